"""Steps of optimizers and learning rate schedulers that a checkpoint falls between.

Lightning counts a batch after ``optimizer_step`` has returned, and steps schedulers behind that. A checkpoint that is
written within, or on an error there, may hold weights that were trained on the batch already. With manual optimization
it may also lack gradients that a later step of the optimizer is to use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import STEPPED_IN, epoch_set_to, next_step
from lightning_stateful.loops.saved_progress import LoopProgress

# A tensor's count of changes, by which autograd tells that one was changed in place.
NUM_CHANGES = "_version"
# Kept with the loop: handles of hooks, and what manual optimization has stepped.
_HOOKS, _MANUAL = "_step_hooks", "_manual_steps"
# Said of a checkpoint that is being written, and of one that a run is resumed from.
_WARNINGS = {
    "gradients": (
        "A checkpoint is being written when gradients have been added up since the latest step of an optimizer (manual "
        "optimization). No checkpoint holds them, so a resume from it is not exact: its next step is taken on fewer "
        "batches. Save behind a step, as ModelCheckpoint(every_n_train_steps=...) does, which counts these steps.",
        "The checkpoint lacks gradients that had been added up when it was written, between two steps of an optimizer "
        "(manual optimization). The next step is taken on fewer batches, so the resume is not exact. Resume from a "
        "checkpoint that was written behind a step.",
    ),
    "stepped": (
        "A checkpoint is being written within batch {} of epoch {}, in which an optimizer has stepped already (manual "
        "optimization). A resume from it trains on that batch again, so it is not exact. Save in on_train_batch_end.",
        "When the checkpoint was written, an optimizer had stepped within batch {} of epoch {} (manual optimization), "
        "which is trained on again: the resume is not exact. Resume from a checkpoint that was written between two "
        "batches.",
    ),
}


class _ManualSteps:
    """Where the latest step was taken under manual optimization, and the gradients that were used.

    Attributes:
        latest: The epoch and batch; None before the first step.
        said: Whether a warning was given.
    """

    def __init__(self) -> None:
        self.latest: tuple[int, int] | None = None
        self.said = False
        # By the id of an optimizer: a parameter, and its gradient as _mark_of() tells it.
        self._used: dict[int, tuple[Any, Any]] = {}

    def note(self, trainer: pl.Trainer, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped."""
        self.latest = next_step(trainer, begun=True)
        if (used := next(_with_gradients(optimizer), None)) is not None:
            self._used[id(optimizer)] = used, _mark_of(used)

    def are_added_up(self, trainer: pl.Trainer) -> bool:
        """Whether an optimizer's parameters have gradients from behind its latest step."""
        for optimizer in trainer.optimizers:
            used, mark = self._used.get(id(optimizer), (None, None))
            is_used = used is not None and (used.grad is None or _mark_of(used) == mark)
            if not is_used and any(bool(one.grad.count_nonzero()) for one in _with_gradients(optimizer)):
                return True
        return False


def _with_gradients(optimizer: Any) -> Iterator[Any]:
    return (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None)


def _mark_of(parameter: Any) -> tuple[int, int]:
    """Tells a gradient from a later one: another tensor, or one that was changed in place since."""
    return id(parameter.grad), getattr(parameter.grad, NUM_CHANGES)


def watch_steps(trainer: pl.Trainer) -> None:
    """Note from now on in which batch optimizers have stepped."""
    forget_steps(trainer)
    if not hasattr(trainer.optimizers[0], "register_step_post_hook"):
        return
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    kept = vars(epoch_loop)
    # No local functions: a trainer may have to be pickled.
    if trainer.lightning_module.automatic_optimization:
        kept[_HOOKS] = [trainer.optimizers[0].register_step_post_hook(partial(_note_step, trainer))]
    else:
        kept[_MANUAL] = steps = _ManualSteps()
        kept[_HOOKS] = [one.register_step_post_hook(partial(steps.note, trainer)) for one in trainer.optimizers]


def _note_step(trainer: pl.Trainer, *_: Any) -> None:
    setattr(trainer.fit_loop.epoch_loop, STEPPED_IN, next_step(trainer, begun=True))


def forget_steps(trainer: pl.Trainer) -> None:
    """Undo :func:`watch_steps`."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    kept = vars(epoch_loop)
    for name in (STEPPED_IN, "update_lr_schedulers", _MANUAL):
        kept.pop(name, None)
    for hook in kept.pop(_HOOKS, ()):
        hook.remove()


def inexact_steps(trainer: pl.Trainer) -> dict[str, list[int]]:
    """What makes a resume from a checkpoint inexact that is written now, under manual optimization; with a warning.

    Returns:
        ``gradients``, if some have been added up since the latest step, or ``stepped``, if one was taken within the
        batch that is trained on now; of the latter the batch and its epoch.
    """
    steps: _ManualSteps | None = vars(trainer.fit_loop.epoch_loop).get(_MANUAL)
    if steps is None:
        return {}
    epoch, batch = next_step(trainer, begun=True)
    if steps.latest == (epoch, batch):
        found = {"stepped": [batch, epoch]}
    elif steps.latest != (epoch, batch - 1) and steps.are_added_up(trainer):
        found = {"gradients": []}
    else:
        return {}
    if not steps.said:
        warn_of_inexact_steps(found, when=0)
    steps.said = True
    return found


def warn_of_inexact_steps(found: Mapping[str, Any], *, when: int = 1) -> None:
    """Warn on a resume of what :func:`inexact_steps` has found.

    Args:
        found: That.
        when: 0 while the checkpoint is written, 1 on the resume.
    """
    for name, where in found.items():
        rank_zero_warn(_WARNINGS[name][when].format(*where), category=StatefulWarning)


def _step_schedulers(trainer: pl.Trainer) -> None:
    """Let the schedulers take the step that follows a batch; those that monitor a metric are not among them."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    if epoch_loop._num_ready_batches_reached():
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def take_due_steps(trainer: pl.Trainer, progress: LoopProgress) -> None:
    """Let schedulers take the step that was due when the checkpoint was written.

    ReduceLROnPlateau takes it if what it monitors is known.
    """
    if progress.uncounted:
        _step_schedulers(trainer)
    if not progress.plateau:
        return
    with epoch_set_to(trainer, progress.epoch - (progress.plateau == "epoch")), _unknown_metrics_allowed(trainer):
        trainer.fit_loop.epoch_loop.update_lr_schedulers(progress.plateau, update_plateau_schedulers=True)


def end_resumed_epoch(trainer: pl.Trainer) -> None:
    """Let the end of a resumed epoch be that of any other; to be called in ``on_train_epoch_end``.

    Lightning still calls itself restarting there if no batch was left, and leaves ReduceLROnPlateau out, because it
    does not save metrics. Here it steps, unless what it monitors has not been logged by the end of that hook.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.restarting = False
    if trainer.fit_loop._restarting:
        trainer.fit_loop._restarting = False
        epoch_loop.update_lr_schedulers = partial(_update_once, trainer)


def _update_once(trainer: pl.Trainer, interval: str, update_plateau_schedulers: bool) -> None:
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    del epoch_loop.update_lr_schedulers
    with _unknown_metrics_allowed(trainer):
        epoch_loop.update_lr_schedulers(interval, update_plateau_schedulers)


@contextmanager
def _unknown_metrics_allowed(trainer: pl.Trainer) -> Iterator[None]:
    """Let Lightning warn, and not fail, where a metric that a checkpoint does not hold is due for ReduceLROnPlateau."""
    strict = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.strict]
    for config in strict:
        config.strict = False
    try:
        yield
    finally:
        for config in strict:
            config.strict = True
