"""What a hook still changes about the module behind a callback that has written a checkpoint within that hook.

Lightning calls ``on_train_batch_end`` of the callbacks first, of ``ModelCheckpoint`` last, and then that of the module.
An average of weights that the module updates there lacks a step in the checkpoint, and a resume does not call the hook
again for that batch. So it is at the end of a validation, and of an epoch for a callback that saves there: also of what
an EarlyStopping counts that comes behind that callback.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.attributes import is_users
from lightning_stateful.loops.lightning import Checkpoint, EarlyStopping, pl
from lightning_stateful.loops.loop_progress import next_step
from lightning_stateful.loops.other_callbacks import acts_before, callbacks_of
from lightning_stateful.module_state.manual_steps import NUM_CHANGES
from lightning_stateful.module_state.optimizer_steps import settings_of_optimizers

_BATCH_END, _VALIDATION_END, _EPOCH_END = "on_train_batch_end", "on_validation_end", "on_train_epoch_end"
# Kept with the loop.
_LATER = "_later_hooks"
_MOST_NAMED = 8
_STOPPING, _SCHEDULER, _SETTINGS = "EarlyStopping of", "lr_scheduler ", "learning rates or other settings of optimizers"


class _Later:
    """What was changed behind checkpoints.

    Attributes:
        found: By hook, the names of what was changed.
        noted: The hook that has written the latest checkpoint, with what tells whether anything is changed; or None.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self.noted: tuple[str, dict[str, Any]] | None = None


def watch(trainer: pl.Trainer, saved: list[str]) -> None:
    """Begin to follow it, and warn on a resume of what a checkpoint lacks; called in ``on_train_start``.

    Args:
        trainer: The trainer.
        saved: What :func:`note_save` gave.

    Warns:
        StatefulWarning: The checkpoint lacks something.
    """
    vars(trainer.fit_loop)[_LATER] = _Later()
    if saved:
        hook, *names = saved
        rank_zero_warn(
            f"The checkpoint was written by a callback in {hook}, and {_later(trainer, hook, names)} had changed "
            f"{some_of(names)} behind earlier ones. The checkpoint does not hold the latest of that, and the hook is "
            f"not called again: the resume is not exact. {_remedy(hook, names)}",
            category=StatefulWarning,
        )


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`."""
    vars(trainer.fit_loop).pop(_LATER, None)


def note_save(trainer: pl.Trainer) -> list[str]:
    """A checkpoint is being written.

    Returns:
        The hook, and what was changed behind earlier checkpoints that were written in it; empty if nothing was.
    """
    known: _Later | None = vars(trainer.fit_loop).get(_LATER)
    hook = trainer.lightning_module._current_fx_name
    if known is None or hook is None or not _is_followed(trainer, hook):
        return []
    if known.noted is None:
        known.noted = hook, _signs(trainer, hook)
    return [hook, *known.found[hook]] if known.found.get(hook) else []


def compare(trainer: pl.Trainer, before: str = "") -> None:
    """The hook that has written a checkpoint is over, for the module too.

    Args:
        trainer: The trainer.
        before: The hook that is called now; empty ahead of all hooks.

    Warns:
        StatefulWarning: Something is another than as the checkpoint was written; once for each hook.
    """
    known: _Later | None = vars(trainer.fit_loop).get(_LATER)
    if known is None or known.noted is None:
        return
    (hook, signs), known.noted = known.noted, None
    if hook in known.found or (before and acts_before(trainer, before)):
        return
    now = _signs(trainer, hook)
    names = [name for name, sign in signs.items() if now.get(name) != sign][:_MOST_NAMED]
    if any(name.startswith(_SCHEDULER) for name in names):
        # It has set them.
        names = [name for name in names if name != _SETTINGS]
    if names:
        known.found[hook] = names
        epoch, batch = next_step(trainer, begun=True)
        rank_zero_warn(
            f"A callback has written a checkpoint in {hook}, behind batch {batch} of epoch {epoch}, and then "
            f"{_later(trainer, hook, names)} has changed {some_of(names)}. The checkpoint does not hold that, and a "
            f"resume does not call the hook again, so it is not exact. {_remedy(hook, names)}",
            category=StatefulWarning,
        )


def _later(trainer: pl.Trainer, hook: str, names: Collection[str]) -> str:
    if all(name.startswith(_STOPPING) for name in names):
        return "Lightning's call of EarlyStopping, which comes behind the hooks of others,"
    module = trainer.lightning_module
    is_modules = _has(module, pl.LightningModule, hook)
    return f"{type(module).__qualname__}.{hook}" if is_modules else f"the {hook} of a later callback"


def _remedy(hook: str, names: Collection[str]) -> str:
    if all(name.startswith(_STOPPING) for name in names):
        return "Save by ModelCheckpoint, which Lightning calls behind EarlyStopping."
    other = " or in training_step" if hook == _BATCH_END else ""
    return f"Do it in a callback{other}: the module's hooks are called last, behind ModelCheckpoint."


def _is_followed(trainer: pl.Trainer, hook: str) -> bool:
    """Whether what is looked at may change behind a callback of the user's that saves in a hook."""
    if hook not in (_BATCH_END, _VALIDATION_END, _EPOCH_END) or trainer.sanity_checking:
        return False
    return bool(_early_stoppings(trainer)) or _changes_module(trainer, hook)


def _early_stoppings(trainer: pl.Trainer) -> list[EarlyStopping]:
    return [one for one in callbacks_of(trainer) if isinstance(one, EarlyStopping)]


def _changes_module(trainer: pl.Trainer, hook: str) -> bool:
    """Whether a hook of the module's is called behind those of callbacks, or one of several callbacks of the user's."""
    if _has(trainer.lightning_module, pl.LightningModule, hook):
        return True
    others = [one for one in callbacks_of(trainer) if not isinstance(one, (Checkpoint, EarlyStopping))]
    return sum(_has(one, pl.Callback, hook) for one in others) > 1


def _has(owner: Any, base: Any, hook: str) -> bool:
    """Whether an object of a user's class has a hook of its own."""
    kinds = [kind for kind in type(owner).__mro__ if hook in vars(kind)]
    return getattr(type(owner), hook) is not getattr(base, hook) and is_users(kinds[0].__module__)


def _signs(trainer: pl.Trainer, hook: str) -> dict[str, Any]:
    """By the name of a weight, a buffer or a scheduler, what is another where it was changed in this process."""
    stopping = {f"{_STOPPING} {one.monitor}": repr(one.state_dict()) for one in _early_stoppings(trainer)}
    return stopping | (_signs_of_module(trainer, hook) if _changes_module(trainer, hook) else {})


def _signs_of_module(trainer: pl.Trainer, hook: str) -> dict[str, Any]:
    module = trainer.lightning_module
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # What is written to .data is counted nowhere.
    sums = {name: total for name, one in tensors.items() if (total := _sum_of(one)) is not None}
    read = {name: repr(total.item()) for name, total in sums.items()}
    found: dict[str, Any] = {
        name: (id(one), getattr(one, NUM_CHANGES), read.get(name)) for name, one in tensors.items()
    }
    is_automatic = module.automatic_optimization
    if hook == _EPOCH_END and is_automatic and trainer.lr_scheduler_configs:
        # Behind it those step that Lightning has step at an epoch's end.
        return found
    # Lightning has these step behind a validation, and set learning rates.
    plateaus = [is_automatic and config.reduce_on_plateau for config in trainer.lr_scheduler_configs]
    for number, config in enumerate(trainer.lr_scheduler_configs):
        if not plateaus[number]:
            found[f"{_SCHEDULER}{number}"] = getattr(config.scheduler, "last_epoch", None)
    if not any(plateaus):
        found[_SETTINGS] = settings_of_optimizers(trainer)
    return found


def _sum_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of a tensor's numbers, on its device; None for one that cannot be read."""
    with torch.no_grad(), suppress(Exception):
        local = getattr(tensor, "_local_tensor", tensor)
        return local.sum(dtype=torch.float32 if local.device.type == "mps" else torch.float64)
    return None
