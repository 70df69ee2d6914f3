"""Batches that callbacks, buffers and averages have seen otherwise than a checkpoint counts them.

A checkpoint that is written within a window of accumulated gradients, or within a batch, stands before it: a resume
trains on its batches again. What a callback's ``state_dict`` has counted by then, it counts again, and what a buffer
holds of them, such as BatchNorm's statistics, it holds twice. After an error behind the optimizer's step the batch
counts, and ``on_train_batch_end`` was not called for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_stateful.contents.training_uses import changes_in_place
from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.attributes import PLAIN, attributes_of, is_users
from lightning_stateful.loops.lightning import Checkpoint, EarlyStopping, OnExceptionCheckpoint, WeightAveraging, pl
from lightning_stateful.loops.loop_progress import call_before_epochs, is_within_batch_end, next_step
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.loops.saved_progress import LoopProgress, hook_begun
from lightning_stateful.module_state.manual_steps import NUM_CHANGES
from lightning_stateful.module_state.passing_values import data_module_of, names_of_lightning, texts_of_attributes
from lightning_stateful.samplers.fingerprint import short_text

# Kept with the loop: what callbacks count, tensors, whether they were named, and which no optimizer trains.
_WINDOW, _TENSORS, _NAMED, _OUTSIDE = "_counted_in_window", "_noted_tensors", "_named_buffers", "_outside_optimizers"
# Whether a callback saves wherever an error comes.
_SAVES_WITHIN = "_saves_within_steps"
# Numbers in a buffer up to which it is copied.
_MOST_NUMBERS = 2**16
# Of parameters that no optimizer trains, how many are looked at.
_MOST_OUTSIDE = 4
# Attributes that a checkpoint names.
_MOST_NAMED = 64
# Items of a container that are looked at, and how deep: whoever averages weights does so with all of them.
_MOST, _DEEPEST = 256, 3
_BATCH_END = "on_train_batch_end"


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


def note_tensors(trainer: pl.Trainer) -> None:
    """A batch begins: note buffers, and parameters that no optimizer trains, as a save may come within its window."""
    at, window = next_step(trainer), trainer.accumulate_grad_batches
    if at[1] % window:
        return
    tensors = dict(_outside_optimizers(trainer))
    if window > 1 or vars(trainer.fit_loop).get(_SAVES_WITHIN):
        tensors |= dict(trainer.lightning_module.named_buffers())
    if tensors:
        vars(trainer.fit_loop)[_TENSORS] = at, {name: _noted(tensor) for name, tensor in tensors.items()}


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`."""
    for name in (_WINDOW, _TENSORS, _NAMED, _OUTSIDE, _SAVES_WITHIN):
        vars(trainer.fit_loop).pop(name, None)


def is_within(progress: LoopProgress, started: int) -> bool:
    """Whether a batch has begun that a resume trains on again."""
    return progress.running and not progress.ended and started > progress.batch


def counted(trainer: pl.Trainer, progress: LoopProgress, started: int) -> dict[str, Any]:
    """What a resume needs to warn of, as plain data; what is empty is left out.

    Args:
        trainer: The trainer.
        progress: The progress of training as it is saved, at the beginning of an open window.
        started: Batches of the epoch that were given to ``training_step``.

    Returns:
        ``counted``: by name, what callbacks, the module and the data module have changed in batches that a resume
        trains on again, as it is now. ``twice``: buffers and averages that were changed then. ``missed``: callbacks
        whose ``on_train_batch_end`` was not called for the latest batch, which counts. ``again``: hooks that were
        called before the save and that a resume calls again, where they change tensors in place.

    Warns:
        StatefulWarning: Buffers or averages were changed, for the first time.
    """
    within = is_within(progress, started)
    found = {
        "counted": _counted_twice(trainer, progress) if within else {},
        "twice": _held_twice(trainer, progress) if within else [],
        "missed": _left_out(trainer, progress),
        "again": _called_again(trainer, progress),
    }
    return {name: part for name, part in found.items() if part}


def _counted_twice(trainer: pl.Trainer, progress: LoopProgress) -> dict[str, str]:
    known: _Window | None = vars(trainer.fit_loop).get(_WINDOW)
    if known is None or known.at != (progress.epoch, progress.batch):
        return {}
    known.note_changes(trainer)
    held = texts_of_attributes(trainer) if known.changed else {}
    found = {name: text for name, text in held.items() if _is_part(name, known.changed)}
    return dict(islice(found.items(), _MOST_NAMED))


def _left_out(trainer: pl.Trainer, progress: LoopProgress) -> list[str]:
    """Callbacks, or the module, whose ``on_train_batch_end`` was not called for the latest batch, which counts."""
    hook = trainer.lightning_module._current_fx_name
    if not (progress.uncounted or is_within_batch_end(trainer)) or hook == _BATCH_END:
        return []
    averages = [one for one in callbacks_of(trainer) if isinstance(one, WeightAveraging)]
    owners: list[Any] = [*(one for _, one in _owners(trainer)), *averages, trainer.lightning_module]
    kinds: list[Any] = [type(one) for one in owners]
    return list(dict.fromkeys(kind.__qualname__ for kind in kinds if _has_batch_end(kind)))


def _called_again(trainer: pl.Trainer, progress: LoopProgress) -> list[str]:
    begun = hook_begun(trainer.fit_loop.state_dict(), progress)
    owners = [one for one in (*callbacks_of(trainer), trainer.lightning_module) if is_users(type(one).__module__)]
    return [f"{type(one).__qualname__}.{begun}" for one in owners if begun and changes_in_place(one, begun)]


def watch(trainer: pl.Trainer, saved: Mapping[str, Any]) -> None:
    """Begin to follow what is counted, and warn on a resume of what a checkpoint has; called in ``on_train_start``.

    Args:
        trainer: The trainer.
        saved: A state that has what :func:`counted` gave; empty if there is none.

    Warns:
        StatefulWarning: Something was restored that has counted batches which are trained on again, or lacks one.
    """
    twice, missed, again = (saved.get(name, []) for name in ("twice", "missed", "again"))
    for name in (_NAMED, _OUTSIDE):
        # A fit that failed was not torn down.
        vars(trainer.fit_loop).pop(name, None)
    # It saves wherever an error comes, within a step too.
    vars(trainer.fit_loop)[_SAVES_WITHIN] = any(isinstance(one, OnExceptionCheckpoint) for one in callbacks_of(trainer))
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
        rank_zero_warn(
            "The checkpoint was written within a window of accumulated gradients, or within a batch, which is trained "
            f"on again. Buffers of the module, or parameters that no optimizer trains, hold its batches twice: "
            f"{some_of(twice)}. The resume is not exact if something depends on them. Resume from a checkpoint that "
            "was written between windows.",
            category=StatefulWarning,
        )
    if counted := saved.get("counted"):
        call_before_epochs(trainer, partial(_compare, trainer, dict(counted)))


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


def _held_twice(trainer: pl.Trainer, progress: LoopProgress) -> list[str]:
    """Buffers and averages that hold batches which a resume trains on again; warns of the first ones."""
    kept = vars(trainer.fit_loop)
    changed = [] if trainer.fit_loop._skip_backward else _changed_tensors(trainer, progress)
    if changed and not kept.get(_NAMED):
        kept[_NAMED] = True
        at = f"batch {progress.batch} of epoch {progress.epoch}"
        when, what, held = f"after {at} has begun", "it", "it"
        if trainer.accumulate_grad_batches > 1:
            when = f"within the window of accumulated gradients that began with {at}"
            what, held = "its batches", "them"
        outside = {name for name, *_ in kept.get(_OUTSIDE, (0, ()))[1]} & {*changed}
        kinds = [
            *(["buffers of the module"] if {*changed} - outside else []),
            *(["parameters that no optimizer trains"] if outside else []),
        ]
        rank_zero_warn(
            f"A checkpoint is being written {when}, before the optimizer has taken its step. A resume trains on "
            f"{what} again, and {' and '.join(kinds)} ({some_of(changed)}) then hold {held} twice. "
            "Save in on_train_batch_end, and between windows of accumulated gradients. This is said once a run, of the "
            "first such checkpoint.",
            category=StatefulWarning,
        )
    return changed[:_MOST_NAMED]


def _outside_optimizers(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Some of the parameters that no optimizer trains, such as those of a teacher that averages them, by name."""
    kept, groups = vars(trainer.fit_loop), [group["params"] for one in trainer.optimizers for group in one.param_groups]
    number = sum(map(len, groups))
    if kept.get(_OUTSIDE, (None,))[0] != number:
        # A frozen one may have been given to an optimizer with all others, and may be trained later.
        given = {id(parameter) for group in groups for parameter in group}
        named = [(name, one, id(one) in given) for name, one in trainer.lightning_module.named_parameters()]
        others = [of for of in named if type(of[1]) is torch.nn.Parameter and not _is_trained(*of[1:])]
        kept[_OUTSIDE] = number, others[:: len(others) // _MOST_OUTSIDE + 1]
    return {name: one for name, one, is_given in kept[_OUTSIDE][1] if not _is_trained(one, is_given)}


def _is_trained(parameter: torch.Tensor, is_given: bool) -> bool:
    return is_given and parameter.requires_grad


def _noted(tensor: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
    """A tensor, how often it was changed, and a copy of its first numbers, as ``tensor.data`` is changed uncounted."""
    return tensor, getattr(tensor, NUM_CHANGES), _first_numbers(tensor).clone()


def _first_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """All of a small tensor, or of a large one a row."""
    tensor = tensor.detach()
    while tensor.numel() > _MOST_NUMBERS and tensor.dim():
        tensor = tensor[:_MOST_NUMBERS] if tensor.dim() == 1 else tensor[0]
    return tensor


def _changed_tensors(trainer: pl.Trainer, progress: LoopProgress) -> list[str]:
    """The saved buffers and averages that batches which a resume trains on again have changed, such as a queue."""
    module = trainer.lightning_module
    at, noted = vars(trainer.fit_loop).get(_TENSORS, (None, {}))
    is_noted = at == (progress.epoch, progress.batch)
    changed: list[str] = []
    if not is_noted or trainer.accumulate_grad_batches == 1:
        # In validation all layers are in eval mode, and Lightning remembers which were not.
        modes = trainer.fit_loop.epoch_loop.val_loop._module_mode.mode if trainer.validating else {}
        layers = {name: one for name, one in module.named_modules() if isinstance(one, _BatchNorm)}
        trained = [name for name, one in layers.items() if one.track_running_stats and modes.get(name, one.training)]
        changed = [f"{name}.running_mean".lstrip(".") for name in trained]
    if is_noted:
        saved, now = module.state_dict().keys(), {**dict(module.named_buffers()), **dict(module.named_parameters())}
        changed += [name for name in noted if name in saved and name in now and _is_changed(now[name], *noted[name])]
    return list(dict.fromkeys(changed))


def _is_changed(now: torch.Tensor, was: torch.Tensor, version: int, first: torch.Tensor) -> bool:
    shown = _first_numbers(now)
    if shown.shape != first.shape or shown.device != first.device or not torch.equal(shown, first):
        return True
    return first.shape != was.shape and (now is not was or getattr(now, NUM_CHANGES) != version)


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
