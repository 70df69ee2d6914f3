"""Flags of a module that hooks set in training and Lightning's checkpoints do not hold: frozen parameters, eval mode.

Where training begins with the same flags as in the run that was stopped, hooks have set what was another at the save,
and a resume sets it again. Else it may be meant, and hooks may set flags as an epoch or a batch begins, or in
``training_step``: one that is never seen as it was at the save, in some batches, is named in a warning.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.contents.training_uses import names_in_hook
from lightning_stateful.errors import DamagedStateError, StatefulWarning, some_of
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import call_before_epochs, next_step
from lightning_stateful.loops.other_callbacks import callbacks_of

# Kept with the loop.
_WATCH = "_module_flags"
# Batches of a resumed run in which its own steps may set a flag: as the critic is frozen in every fifth of a GAN, say.
_MOST_BATCHES = 8
# Parts of names that say how a module is run.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_TRAINED, _MODE = "requires_grad", "training"
# By which people set them.
_SETTERS = frozenset({_TRAINED, "requires_grad_", "freeze", "unfreeze", "train", "eval"})


class _Watch:
    """What is known of a module's flags in a fit.

    Args:
        saved: What :func:`flags` gave, of the checkpoint that the run is resumed from.
    """

    def __init__(self, saved: Sequence[Any] | None) -> None:
        self.saved = saved
        # Whether the hooks on_train_start are over.
        self.has_begun = False
        # Flags that were not yet seen as they were at the save, by name, with their values then.
        self.awaited: dict[str, bool] = {}
        self.batches = 0
        self.handles: list[Any] = []
        # The flags with which training began, as flags() has them.
        self.begun = ""
        # Whether hooks of the epoch that begins may have set some on purpose.
        self.is_by_epoch = False
        # Where the latest validation began.
        self.validated: tuple[int, int] | None = None
        # The flags ahead of the end of an epoch that was cut: where it was cut, and as flags() has them.
        self.cut: tuple[tuple[int, int], str] | None = None
        # The flags as the fit ended.
        self.at_end: list[Any] | None = None

    def see(self, now: Mapping[str, bool]) -> None:
        """Wait no longer for flags that are as they were at the save."""
        self.awaited = {name: value for name, value in self.awaited.items() if now.get(name, value) != value}
        if not self.awaited:
            self.stop()

    def stop(self) -> None:
        """Wait for none."""
        self.awaited = {}
        for handle in self.handles:
            handle.remove()
        self.handles = []


def watch(trainer: pl.Trainer, saved: Sequence[Any] | None) -> None:
    """Begin to follow the flags of the module; to be called in ``on_train_start``.

    Args:
        trainer: The trainer.
        saved: What :func:`flags` gave, if the run is resumed from a checkpoint that has it.
    """
    kept = vars(trainer.fit_loop)
    if (earlier := kept.get(_WATCH)) is not None:
        # A fit that failed was not torn down.
        earlier.stop()
    kept[_WATCH] = _Watch(saved)
    call_before_epochs(trainer, partial(_begin, trainer))


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`, but keep the flags: the model may be used before another checkpoint is written."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and known.at_end is None:
        known.at_end = flags(trainer, is_within=False)
        known.stop()


def note_validation(trainer: pl.Trainer) -> None:
    """Note that a validation begins, which puts all of the module in eval mode."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None:
        known.validated = next_step(trainer)


def note_cut(trainer: pl.Trainer) -> None:
    """An epoch ends before all its batches, or by a validation that is run only for that: note the flags of before."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and known.has_begun:
        now = _flags(trainer, known, in_training=True)
        known.cut = next_step(trainer, begun=True), _text({**now, **known.awaited})


def flags(trainer: pl.Trainer, *, is_within: bool) -> list[Any]:
    """The parameters that are not trained, and the submodules in eval mode, as plain data; empty before training.

    Args:
        trainer: The trainer.
        is_within: A batch has begun that a resume trains on again: its step may have set flags for a while.

    Returns:
        Their names, compressed, and ``is_within``; and, where these are others, the names with which training began.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None:
        return []
    if known.at_end is not None:
        return known.at_end
    if not known.has_begun:
        # Hooks set flags that will be set again.
        return list(known.saved or ())
    if known.cut is not None and known.cut[0] == next_step(trainer, begun=True):
        # What that end sets it will set again.
        now = known.cut[1]
    else:
        now = _text({**_flags(trainer, known), **known.awaited})
    return [now, is_within, *([known.begun] if known.begun != now else [])]


def _text(held: Mapping[str, bool]) -> str:
    unset = "\0".join(sorted(name for name, value in held.items() if not value))
    return zlib.compress(unset.encode()).hex() if unset else ""


def _flags(trainer: pl.Trainer, known: _Watch, *, in_training: bool = False) -> dict[str, bool]:
    """The flags of parameters and submodules by name, as ``net.0.weight.requires_grad``.

    Args:
        trainer: The trainer.
        known: What is known of them.
        in_training: Whether Lightning has put no module in eval mode, even if a validation is about to begin.
    """
    module = trainer.lightning_module
    # In validation, also one that has failed, all modules are in eval mode, and Lightning remembers which were not.
    is_validating = trainer.validating or not (trainer.training or known.validated != next_step(trainer))
    modes = trainer.fit_loop.epoch_loop.val_loop._module_mode.mode if is_validating and not in_training else {}
    found = {_named(name, _TRAINED): one.requires_grad for name, one in module.named_parameters()}
    return found | {_named(name, _MODE): modes.get(name, one.training) for name, one in module.named_modules()}


def _named(name: str, flag: str) -> str:
    return ".".join(part for part in (*name.split("."), flag) if part and part not in _WRAPPERS)


def _begin(trainer: pl.Trainer) -> None:
    """Look which flags are others than at the save, once: behind the hooks ``on_train_start``, before an epoch."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or known.has_begun:
        return
    known.has_begun = True
    now = _flags(trainer, known)
    known.begun = _text(now)
    if not known.saved:
        return
    unset = _read(known.saved[0])
    known.awaited = {name: name not in unset for name in now}
    known.see(now)
    # Within an epoch what the save has is that of the epoch.
    known.is_by_epoch = next_step(trainer)[1] == 0 and _is_set_by_epoch(trainer)
    if known.awaited and known.saved[1:] == [False, known.begun]:
        _set(trainer, known.awaited)
        known.stop()
    elif known.awaited and known.saved[1]:
        # The step that begins again may set them until it ends.
        for one in trainer.optimizers:
            if hasattr(one, "register_step_pre_hook"):
                known.handles.append(one.register_step_pre_hook(partial(_look, trainer)))
                known.handles.append(one.register_step_post_hook(partial(_look, trainer)))


def _set(trainer: pl.Trainer, held: Mapping[str, bool]) -> None:
    """Set flags, and say so in the log."""
    module = trainer.lightning_module
    for flag, parts in ((_TRAINED, module.named_parameters()), (_MODE, module.named_modules())):
        for name, part in parts:
            if (named := _named(name, flag)) in held:
                setattr(part, flag, held[named])
    said = some_of([f"{name} is {value}" for name, value in held.items()])
    rank_zero_info(f"As hooks had set it before the checkpoint was written: {said}.")


def _read(text: str) -> set[str]:
    """The names in a state."""
    try:
        return set(zlib.decompress(bytes.fromhex(text)).decode().split("\0")) if text else set()
    except (ValueError, zlib.error) as error:
        raise DamagedStateError(f"The callback's state has no flags of parameters and submodules: {text!r}.") from error


def _look(trainer: pl.Trainer, *_: Any) -> None:
    known: _Watch = vars(trainer.fit_loop)[_WATCH]
    known.see(_flags(trainer, known))


def look_again(trainer: pl.Trainer, *, at_end: bool = False) -> None:
    """Look as a batch ends which flags are still others than at the save; after some batches, say so.

    Args:
        trainer: The trainer.
        at_end: The epoch ends.

    Warns:
        StatefulWarning: Nothing has set them again.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or not known.awaited:
        # In most runs, at every batch.
        return
    known.batches += not at_end
    known.see(_flags(trainer, known))
    if not known.awaited or not known.batches:
        return
    if at_end or known.batches >= max(_MOST_BATCHES, trainer.accumulate_grad_batches):
        _tell(known)
        known.stop()


def _is_set_by_epoch(trainer: pl.Trainer) -> bool:
    """Whether a hook that is called as an epoch begins freezes parameters, or sets modes, as far as its code tells."""
    owners = [*callbacks_of(trainer), trainer.lightning_module]
    return any(not _SETTERS.isdisjoint(names_in_hook(one, "on_train_epoch_start")) for one in owners)


def _tell(known: _Watch) -> None:
    """Warn of flags that nothing has set again, or say so in the log where that may be meant."""
    awaited = known.awaited
    named = [f"{name} was {value}" for name, value in awaited.items()]
    is_left = all(value and name.rpartition(".")[2] == _MODE for name, value in awaited.items())
    left = " An error within a validation leaves a model in eval mode: call model.train() before it is fitted again."
    said = (
        "Parameters or submodules of the module are not trained as they were when the checkpoint was written: "
        f"{some_of(named)}."
    )
    if known.is_by_epoch:
        rank_zero_info(f"{said} That is exact if on_train_epoch_start sets them by the epoch alone.")
        return
    rank_zero_warn(
        f"{said} A hook had set this in training, or the module is built otherwise "
        "now. Checkpoints do not hold it, and nothing has set it since, so the resume is not exact. Set it again in "
        f"on_train_start, or in load_state_dict of the callback that sets it.{left if is_left else ''}",
        category=StatefulWarning,
    )
