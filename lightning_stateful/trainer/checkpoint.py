"""What a Lightning checkpoint says about the data, wherever in it that stands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import (
    DamagedStateError,
    Difference,
    StateError,
    StatefulWarning,
    StateMismatchError,
    StateVersionError,
)
from lightning_stateful.state import VERSION
from lightning_stateful.trainer.loop_progress import LoopProgress

# Under this key a data module's state holds that of its data, apart from what a subclass adds.
STATE_KEY = "lightning_stateful"


def read_callback_state(own: Any) -> tuple[LoopProgress, dict[str, float]]:
    """The progress and the monitored metrics in the callback's part of a checkpoint.

    Raises:
        DamagedStateError: It is not what the callback writes.
        StateVersionError: A version wrote it that this one cannot read.
        StateError: The run that wrote it had not restored itself, or its weights had been replaced by averages.
    """
    if not isinstance(own, Mapping) or type(own.get("version")) is not int:
        raise DamagedStateError(f"The callback's state has no version: {own!r}. Resume from another checkpoint.")
    if own["version"] != VERSION:
        raise StateVersionError(
            f"The callback's state has version {own['version']}, this installation reads version {VERSION}. "
            "Install the version of lightning-stateful that wrote it."
        )
    if own.get("restored") is not True:
        raise StateError(
            "This checkpoint was written by a run that was itself being resumed and had not yet restored its "
            "optimizers and loops. Resume from the checkpoint that that run was resumed from."
        )
    if own.get("averaged"):
        raise StateError(
            "This checkpoint was written while a callback had put averages in place of the weights, during a "
            "validation or after training had ended, and training cannot go on with them. Resume from a checkpoint of "
            "the training itself, or load these weights into the model, and call fit without ckpt_path."
        )
    if not isinstance(own.get("progress"), Mapping):
        raise DamagedStateError(f"The callback's state has no progress: {own!r}. Resume from another checkpoint.")
    metrics = own.get("monitored")
    if not isinstance(metrics, Mapping) or not all(type(value) is float for value in metrics.values()):
        raise DamagedStateError(f"The callback's state has no metrics: {own!r}. Resume from another checkpoint.")
    return LoopProgress.from_dict(own["progress"]), dict(metrics)


def refuse_other_seed(own: Mapping[str, Any], seed: int, accept: Collection[str]) -> None:
    """Refuse a run that would draw other noise than the one that wrote the checkpoint.

    Raises:
        StateMismatchError: The seeds differ, and that is not accepted.
    """
    if own.get("seed") != seed and "seed" not in accept:
        remedy = "Pass the saved seed, or call seed_everything with it, or accept the change with accept=('seed',)."
        difference = Difference(path="seed", saved=own.get("seed"), present=seed, remedy=remedy)
        raise StateMismatchError([difference], where="The callback's state")


def find_data_state(
    checkpoint: Mapping[str, Any], own: Mapping[str, Any] | None, module: str | None, accept: Collection[str]
) -> Mapping[str, Any] | None:
    """The data's state: under the data module's name, or in the callback's part.

    Args:
        checkpoint: The whole checkpoint.
        own: The callback's part of it, if it has one.
        module: Name of the present data module, if it holds the data's state.
        accept: With ``"module"`` in it, the state of a data module of another name is taken.

    Raises:
        StateMismatchError: The state stands under another data module's name.
    """
    saved_by = None if own is None else own.get("module")
    if saved_by is not None and saved_by != module:
        if "module" not in accept:
            remedy = (
                "Give the data module its old name (Lightning keeps its state under that name), or accept the change "
                "with accept=('module',)."
            )
            difference = Difference(path="module", saved=saved_by, present=module, remedy=remedy)
            raise StateMismatchError([difference], where="The checkpoint's data state")
        module = saved_by
    held = None if module is None else data_state_in(checkpoint.get(module))
    return own.get("data") if held is None and own is not None else held


def module_name(trainer: Any) -> str | None:
    """The key under which Lightning saves the data module's state, if it holds the data's."""
    module = None if trainer is None else getattr(trainer, "datamodule", None)
    return type(module).__qualname__ if getattr(module, "holds_data_state", False) else None


def fits_our_module(trainer: Any) -> bool:
    """Whether the loaders to be trained on come from a data module that holds the data's state."""
    return bool(getattr(trainer.fit_loop._data_source.instance, "holds_data_state", False))


def put_data_state(checkpoint: dict[str, Any], module: str, callback: str, state: Mapping[str, Any] | None) -> None:
    """Put a trainer's data state where its data module has put one, or in the callback's part where that has none.

    A data module puts that of the trainer it was attached to last.

    Args:
        checkpoint: The whole checkpoint.
        module: Name of the data module.
        callback: Key of the callback's part.
        state: The data's state.
    """
    if data_state_in(checkpoint.get(module)) is None:
        checkpoint["callbacks"][callback]["data"] = state
    else:
        checkpoint[module] = {**checkpoint[module], STATE_KEY: state}


def data_state_in(module_state: Any) -> Mapping[str, Any] | None:
    """The data's state within a data module's state, which may hold more of the user's own."""
    return module_state.get(STATE_KEY) if isinstance(module_state, Mapping) else None


def drop_loader_states(checkpoint: Mapping[str, Any]) -> None:
    """Take out what Lightning saved of each loader, which is nothing: a Trainer of plain loaders would refuse it."""
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)


def warn_of_missing_loops(checkpoint: Mapping[str, Any]) -> None:
    """Say that Lightning begins at epoch 0 with a checkpoint that does not say how far training was."""
    rank_zero_warn(
        f"The checkpoint has no loop counters (its keys are {', '.join(checkpoint)}), so nobody knows how far its run "
        "was: training begins at epoch 0, with its weights and optimizers. To go on where that run stopped, resume "
        "from a checkpoint that trainer.save_checkpoint has written.",
        category=StatefulWarning,
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
