"""Finds in a Lightning checkpoint how far its run was: the callback's part, and the data's state.

The data's state is part of the data module's, or of the callback's where there is no stateful data module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    Difference,
    StateError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.loops.lightning import TrainerFn, TrainerStatus, pl
from lightning_stateful.loops.saved_progress import SEED_REMEDY, LoopProgress, data_state_in


class HoldsDataState(Protocol):
    """A data module that has the state of its training data, as the callback sees it."""

    def take_loaded_state(self) -> Mapping[str, Any] | None:
        """The state that Lightning has loaded into it; None from the second call on."""


def warn_of_unknown_position(trainer: pl.Trainer) -> None:
    """Warn that what is being saved was trained in processes that are gone, as in a notebook."""
    if trainer.state.status == TrainerStatus.FINISHED and trainer.state.fn == TrainerFn.FITTING:
        rank_zero_warn(
            "A checkpoint is being written in a process that has not trained: the Trainer has started others for that, "
            "as with ddp_fork, ddp_notebook and ddp_spawn, which alone knew how far they had got. A resume from it "
            "begins with epoch 0. Let ModelCheckpoint write checkpoints while training.",
            category=StatefulWarning,
        )


def refuse_other_seed(
    callback_state: Mapping[str, Any], seed: int, seeds: Mapping[str, int], accept: Collection[str]
) -> None:
    """Refuse a run that would draw other noise than the one that wrote the checkpoint.

    Args:
        callback_state: The callback's state.
        seed: The callback's seed.
        seeds: Those of loaders whose samples are seeded, by path.
        accept: With ``"seed"`` in it, others are taken.

    Raises:
        StateMismatchError: The seeds differ, and that is not accepted.
    """
    saved = callback_state.get("seed")
    pairs = [(saved, seed)]
    if (of_loaders := callback_state.get("seeds")) is not None:
        pairs += [(of_loaders.get(path, saved), present) for path, present in seeds.items()]
    others = [pair for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]
    if others and "seed" not in accept:
        differences = [Difference(path="seed", saved=before, present=now, remedy=SEED_REMEDY) for before, now in others]
        raise StateMismatchError(differences, where="The callback's state")


def find_data_state(
    checkpoint: Mapping[str, Any],
    callback_state: Mapping[str, Any] | None,
    module: HoldsDataState | None,
    accept: Collection[str],
) -> Mapping[str, Any] | None:
    """The data's state: as the data module has loaded it, under another module's name, or in the callback's state.

    Args:
        checkpoint: The whole checkpoint.
        callback_state: The state of the callback in it, if it has one.
        module: The present data module, if it holds the data's state.
        accept: With ``"module"`` in it, the state of a data module of another name is taken.

    Raises:
        StateMismatchError: A data module of another class name saved the state, or this run has no such module
            at all, and that is not accepted.
    """
    saved_by = None if callback_state is None else callback_state.get("module")
    name, loaded = (None, None) if module is None else (type(module).__qualname__, module.take_loaded_state())
    if saved_by is not None and saved_by != name:
        if "module" not in accept:
            mend = "Train on that StatefulDataModule"
            if name is not None:
                mend = "Give the data module its old name (Lightning keeps its state under that name)"
            remedy = f"{mend}, or accept the change with accept=('module',)."
            difference = Difference(path="module", saved=saved_by, present=name, remedy=remedy)
            raise StateMismatchError([difference], where="The checkpoint's data state")
        name, loaded = saved_by, None
    if loaded is None and name is not None:
        # Lightning has not loaded it into the module: it was saved under another name, or a subclass overrides
        # load_state_dict without super().
        loaded = data_state_in(checkpoint.get(name))
    return callback_state.get("data") if loaded is None and callback_state is not None else loaded


def stateful_module(trainer: Any) -> HoldsDataState | None:
    """The data module of a trainer, if it holds the data's state."""
    module: Any = None if trainer is None else getattr(trainer, "datamodule", None)
    return module if getattr(module, "holds_data_state", False) else None


def refuse_unused_state(trainer: Any) -> None:
    """Refuse to train from the beginning with a data module into which somebody has loaded a state.

    Raises:
        ConfigurationError: The module holds such a state, and the fit has no ``ckpt_path``.
    """
    module = stateful_module(trainer)
    if module is not None and module.take_loaded_state() is not None and trainer.ckpt_path is None:
        raise ConfigurationError(
            f"A state was loaded into this {type(module).__name__}, but trainer.fit has no ckpt_path, so its loops "
            "begin at epoch 0. Pass the checkpoint as ckpt_path, which restores both; or load no state."
        )


def refuse_restored_loops(before: tuple[int, int], now: tuple[int, int]) -> None:
    """Refuse to train where Lightning has restored its loops from a checkpoint without callbacks.

    Args:
        before: Epoch and batch at which the loop's counters stood when the fit was set up.
        now: Epoch and batch at which they stand where training begins.

    Raises:
        StateError: They differ, although no callback was called with the checkpoint.
    """
    # An epoch that an earlier fit has begun is over.
    if now != ((before[0] + 1, 0) if before[1] else before):
        raise StateError(
            "Lightning has restored its loops from a checkpoint without 'callbacks', and so has not shown it to the "
            f"StatefulDataCallback: training would begin at batch {now[1]} of epoch {now[0]}, and leave out the rest "
            "of the epoch before. To drop the states of other callbacks, keep that of this one: "
            "checkpoint['callbacks'] = {'StatefulDataCallback': checkpoint['callbacks']['StatefulDataCallback']}. If "
            "it is lost, set checkpoint['callbacks'] = {}."
        )


def trains_on_our_module(trainer: Any) -> bool:
    """Whether the loaders to be trained on come from a data module that holds the data's state."""
    return bool(getattr(trainer.fit_loop._data_source.instance, "holds_data_state", False))


def warn_of_missing_loops(checkpoint: Mapping[str, Any]) -> None:
    """Say that Lightning begins at epoch 0 with a checkpoint that does not say how far training was."""
    rank_zero_warn(
        f"The checkpoint has no loop counters (its keys are {', '.join(checkpoint)}), so nobody knows how far its run "
        "was: training begins at epoch 0, with its weights and optimizers. To go on where that run stopped, resume "
        "from a checkpoint that trainer.save_checkpoint has written.",
        category=StatefulWarning,
    )


def refuse_empty_loops(loops: Mapping[str, Any]) -> None:
    """Refuse loop counters that leave out those of training, without which Lightning cannot restore the others.

    Raises:
        DamagedStateError: They do.
    """
    if "fit_loop" not in loops:
        raise DamagedStateError(
            f"checkpoint['loops'] has no 'fit_loop', only {sorted(loops)}, so nobody knows how far its run was. Resume "
            "from a checkpoint that trainer.save_checkpoint has written; or leave out 'loops', to begin at epoch 0 "
            "with its weights and optimizers."
        )


def warn_of_missing_state(progress: LoopProgress, begun_anew: Collection[str]) -> None:
    """Say what a run does that is resumed from a checkpoint without a data state.

    Args:
        progress: Where it goes on.
        begun_anew: Names of streams, of which nobody knows where they stood within the epoch.
    """
    follows = (
        "in this toolkit's order. The checkpoint's run had another order, so some samples of this epoch are trained on "
        "twice and others not at all; from the next epoch on every sample comes once."
    )
    if begun_anew:
        follows = (
            f"but nobody knows where in its shards that was, so {', '.join(begun_anew)} begins anew: samples that the "
            "checkpoint's run has trained on in this epoch come again."
        )
    rank_zero_warn(
        "The checkpoint has no data state: it was made without lightning-stateful, or before there were loaders. The "
        f"run goes on at batch {progress.batch} of epoch {progress.epoch}, as the loop counters say, {follows}",
        category=StatefulWarning,
    )
