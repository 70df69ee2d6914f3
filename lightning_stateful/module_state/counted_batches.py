"""Batches that callbacks have counted otherwise than a checkpoint does.

A checkpoint that is written within a window of accumulated gradients, or within a batch, stands before it: a resume
trains on its batches again. What a callback's ``state_dict`` has counted by then, it counts again. After an error
behind the optimizer's step the batch counts, and ``on_train_batch_end`` was not called for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.contents.training_uses import changes_in_place
from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.attributes import PLAIN, attributes_of, is_users
from lightning_stateful.loops.lightning import Checkpoint, EarlyStopping, WeightAveraging, pl
from lightning_stateful.loops.loop_progress import call_before_epochs, is_within_batch_end, next_step
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.module_state.manual_steps import NUM_CHANGES
from lightning_stateful.module_state.passing_values import data_module_of, names_of_lightning, texts_of_attributes
from lightning_stateful.samplers.fingerprint import short_text

# Kept with the loop.
_WINDOW = "_counted_in_window"
# Attributes that a checkpoint names.
_MOST_NAMED = 64
# Items of a container that are looked at, and how deep: whoever averages weights does so with all of them.
_MOST, _DEEPEST = 256, 3
_BATCH_END, _BATCH_START, _EPOCH_START = "on_train_batch_end", "on_train_batch_start", "on_train_epoch_start"


class _Window:
    """What callbacks, or the module, have changed since the latest window of accumulated gradients began.

    Args:
        trainer: The trainer, as the first batch of the window begins.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.at = next_step(trainer)
        self.changed: set[str] = set()
        self._held = dict(_signs(trainer))
        self._is_validated = False

    def note_batch(self, trainer: pl.Trainer) -> None:
        """A later batch of it begins."""
        self.note_changes(trainer)
        self._is_validated = False

    def note_validation(self, trainer: pl.Trainer) -> None:
        """A validation begins: what that changes is not changed again, because it is not run again."""
        self.note_changes(trainer)
        self._is_validated = True

    def note_changes(self, trainer: pl.Trainer) -> None:
        """Note what is another value than when this was called last."""
        now = dict(_signs(trainer))
        if not self._is_validated:
            self.changed |= {name for name, value in now.items() if self._held.get(name) != value}
        self._held = now


def note_batch(trainer: pl.Trainer) -> None:
    """A batch begins; where nobody keeps a state of its own nothing is noted."""
    kept = vars(trainer.fit_loop)
    if _WINDOW not in kept:
        # In most runs, at every batch.
        return
    known: _Window | None = kept[_WINDOW]
    if known is None or next_step(trainer)[1] % trainer.accumulate_grad_batches == 0:
        kept[_WINDOW] = _Window(trainer)
    else:
        known.note_batch(trainer)


def note_validation(trainer: pl.Trainer) -> None:
    """A validation begins."""
    known: _Window | None = vars(trainer.fit_loop).get(_WINDOW)
    if known is not None:
        known.note_validation(trainer)


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`."""
    vars(trainer.fit_loop).pop(_WINDOW, None)


def counted_twice(trainer: pl.Trainer, progress: LoopProgress) -> dict[str, str]:
    """What was changed in batches that a resume trains on again, by name, as it is now; to be kept in a checkpoint.

    Args:
        trainer: The trainer.
        progress: The progress of training as it is saved, at the beginning of the window.
    """
    known: _Window | None = vars(trainer.fit_loop).get(_WINDOW)
    if known is None or known.at != (progress.epoch, progress.batch):
        return {}
    known.note_changes(trainer)
    held = texts_of_attributes(trainer) if known.changed else {}
    found = {name: text for name, text in held.items() if _is_part(name, known.changed)}
    return dict(islice(found.items(), _MOST_NAMED))


def left_out(trainer: pl.Trainer, progress: LoopProgress) -> list[str]:
    """Callbacks, or the module, whose ``on_train_batch_end`` was not called for the latest batch, which counts."""
    hook = trainer.lightning_module._current_fx_name
    if not (progress.uncounted or is_within_batch_end(trainer)) or hook == _BATCH_END:
        return []
    averages = [one for one in callbacks_of(trainer) if isinstance(one, WeightAveraging)]
    owners: list[Any] = [*(one for _, one in _owners(trainer)), *averages, trainer.lightning_module]
    kinds: list[Any] = [type(one) for one in owners]
    return list(dict.fromkeys(kind.__qualname__ for kind in kinds if _has_batch_end(kind)))


def called_again(trainer: pl.Trainer, progress: LoopProgress) -> list[str]:
    """Hooks that were called before a save and that a resume calls again, where they change tensors in place.

    Args:
        trainer: The trainer.
        progress: The progress of training as it is saved.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    begun = ""
    if not progress.running:
        begun = _EPOCH_START if epochs.ready > epochs.started else ""
    elif not progress.ended:
        begun = _BATCH_START if batches.ready > progress.batch else ""
    owners = [one for one in (*callbacks_of(trainer), trainer.lightning_module) if is_users(type(one).__module__)]
    return [f"{type(one).__qualname__}.{begun}" for one in owners if begun and changes_in_place(one, begun)]


def watch(trainer: pl.Trainer, twice: Mapping[str, str], missed: Sequence[str], again: Sequence[str]) -> None:
    """Begin to follow what is counted, and warn on a resume of what a checkpoint has; called in ``on_train_start``.

    Args:
        trainer: The trainer.
        twice: What :func:`counted_twice` gave.
        missed: What :func:`left_out` gave.
        again: What :func:`called_again` gave.

    Warns:
        StatefulWarning: Something was restored that has counted batches which are trained on again, or lacks one.
    """
    if next(_owners(trainer), None) is not None:
        vars(trainer.fit_loop)[_WINDOW] = None
    if missed:
        rank_zero_warn(
            "The checkpoint was written after an error behind the optimizer's step, so its latest batch counts, but "
            f"on_train_batch_end was not called for it, or not of all. So {some_of(missed)} may lack that batch: if "
            "training depends on that, the resume is not exact. Resume from a checkpoint that was written at the end "
            "of a batch.",
            category=StatefulWarning,
        )
    if again:
        rank_zero_warn(
            f"The checkpoint was written when {some_of(again)} had been called, within that hook or within the batch, "
            "and on the resume it is called again. It changes tensors in place: if they are weights or buffers, it "
            "changes them twice, and the resume is not exact. Resume from a checkpoint that was written at the end of "
            "a batch or of an epoch.",
            category=StatefulWarning,
        )
    if twice:
        call_before_epochs(trainer, partial(_compare, trainer, dict(twice)))


def _compare(trainer: pl.Trainer, twice: dict[str, str]) -> None:
    # Behind all hooks on_train_start, which may set them; once.
    now = texts_of_attributes(trainer) if twice else {}
    same = [name for name, value in twice.items() if now.get(name) == value]
    twice.clear()
    if same:
        rank_zero_warn(
            "The checkpoint was written within a window of accumulated gradients, or within a batch, which is trained "
            f"on again. What a callback or the module has kept counts its batches twice: {some_of(same)}. If training "
            "depends on it, the resume is not exact. Count optimizer steps (trainer.global_step) instead, or resume "
            "from a checkpoint that was written between windows, as by ModelCheckpoint(every_n_train_steps=...).",
            category=StatefulWarning,
        )


def _owners(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """The user's callbacks, module and data module that put something into a checkpoint, and how their names begin."""
    module, data = trainer.lightning_module, data_module_of(trainer)
    bases: list[tuple[Any, Any]] = [
        *((one, pl.Callback) for one in callbacks_of(trainer)),
        *([] if data is None else [(data, pl.LightningDataModule)]),
        (module, pl.LightningModule),
    ]
    for one, base in bases:
        kind: Any = type(one)
        if _keeps_state(kind, base):
            yield "" if one is module else f"{kind.__qualname__}.", one


@lru_cache(maxsize=256)
def _keeps_state(kind: Any, base: Any) -> bool:
    # The module's own state_dict has weights and buffers.
    hooks = ("on_save_checkpoint",) if base is pl.LightningModule else ("on_save_checkpoint", "state_dict")
    is_own = is_users(kind.__module__) and not issubclass(kind, (Checkpoint, EarlyStopping))
    return is_own and any(getattr(kind, hook, None) is not getattr(base, hook, None) for hook in hooks)


@lru_cache(maxsize=256)
def _has_batch_end(kind: Any) -> bool:
    base = pl.LightningModule if issubclass(kind, pl.LightningModule) else pl.Callback
    return getattr(kind, _BATCH_END) is not getattr(base, _BATCH_END)


def _signs(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """By the name of an attribute, what is another where it was changed in this process."""
    for prefix, owner in _owners(trainer):
        for name, value in attributes_of(owner).items():
            if name not in names_of_lightning() and (sign := _sign(value)) is not None:
                yield f"{prefix}{name}", sign


def _sign(value: Any, *, is_held: bool = False, depth: int = 0) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.nn.Module):
        return sum(getattr(one, NUM_CHANGES) for one in (*value.parameters(), *value.buffers()))
    if isinstance(value, torch.Tensor):
        return id(value), getattr(value, NUM_CHANGES)
    if isinstance(value, (list, dict, set, deque)):
        held: list[Any] = []
        # A thread may fill it meanwhile.
        with suppress(RuntimeError):
            held = (
                [] if depth == _DEEPEST else list(islice(value.values() if isinstance(value, dict) else value, _MOST))
            )
        return [len(value), *(_sign(one, is_held=True, depth=depth + 1) for one in held)]
    if is_users(type(value).__module__) and not is_held:
        return [_sign(part, is_held=True) for part in attributes_of(value).values()]
    # Of a small array, say.
    return short_text(value) or None


def _is_part(name: str, of: set[str]) -> bool:
    """Whether a name is that of an attribute in a set, or of something in it."""
    return any(name == one or name.startswith((f"{one}.", f"{one}[")) for one in of)
