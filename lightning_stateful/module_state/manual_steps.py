"""Steps of optimizers under manual optimization: a checkpoint between two of them may lack gradients of the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import next_step

# A tensor's count of changes, by which autograd tells that one was changed in place.
NUM_CHANGES = "_version"
# Kept with the loop: handles of hooks, what was noted, and what is inexact where an epoch was cut.
_HOOKS, _STEPS, _AT_CUT = "_manual_hooks", "_manual_steps", "_manual_at_cut"
# Lightning's method behind the hooks of a batch's end.
_ADVANCED = "on_advance_end"
# Said of a checkpoint that is being written, and of one that a run is resumed from.
_WARNINGS = {
    "gradients": (
        "A checkpoint is being written when gradients have been added up since the latest step of an optimizer (manual "
        "optimization). No checkpoint holds them: its next step is taken on fewer batches, so a resume is not exact, "
        "unless they are cleared before that. Save behind a step, as ModelCheckpoint(every_n_train_steps=...) does, "
        "which counts these steps.",
        "The checkpoint lacks gradients that had been added up when it was written, between two steps of an optimizer "
        "(manual optimization). The next step is taken on fewer batches, so the resume is not exact, unless they are "
        "cleared before that. Resume from a checkpoint that was written behind a step.",
    ),
    "stepped": (
        "A checkpoint is being written within batch {} of epoch {}, in which an optimizer has stepped already (manual "
        "optimization). A resume from it trains on that batch again, so it is not exact. Save in on_train_batch_end.",
        "When the checkpoint was written, an optimizer had stepped within batch {} of epoch {} (manual optimization), "
        "which is trained on again: the resume is not exact. Resume from a checkpoint that was written between two "
        "batches.",
    ),
}


class _Gradient:
    """A gradient of an optimizer at some moment, by which a later one is told.

    Args:
        optimizer: The optimizer, of whose gradients the first one is looked at.
    """

    def __init__(self, optimizer: Any) -> None:
        self._parameter: Any = next(_with_gradients(optimizer), None)
        self._held: Any = None
        if self._parameter is not None:
            # Not itself, which would keep its memory.
            self._held = weakref.ref(self._parameter.grad)
            self._changes = getattr(self._parameter.grad, NUM_CHANGES)

    def __getstate__(self) -> dict[str, Any]:
        # A trainer that is pickled or copied has other gradients.
        return {**vars(self), "_held": None}

    @property
    def is_kept(self) -> bool:
        """Whether it was not cleared since, be more added to it or not."""
        return self._held is not None and self._parameter.grad is not None and self._parameter.grad is self._held()

    @property
    def is_same(self) -> bool:
        """Whether there is no other, nor more added to it."""
        return self.is_kept and getattr(self._parameter.grad, NUM_CHANGES) == self._changes


class _Gradients:
    """The gradients of an optimizer, from batch to batch: whether those that a batch leaves are used by a later step.

    Some add up gradients of several batches. Others leave some that nobody uses, as those of a discriminator through
    which a generator's loss flows, and clear them before they take a step.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        # Those of its latest step, and those that were left as the latest batch began, since a step.
        self._used: _Gradient | None = None
        self._left: _Gradient | None = None
        # Whether such were kept until a step, and until another batch; None before that was seen.
        self._are_used: bool | None = None
        self._are_kept: bool | None = None
        # Whether those of a step are left as they are until the next batch clears them.
        self._clears_later = False

    def note_step(self) -> None:
        """It has stepped."""
        if self._left is not None:
            self._are_used = self._left.is_kept
        self._used, self._left = _Gradient(self._optimizer), None

    def note_batch(self) -> None:
        """A batch begins."""
        if self._left is not None:
            self._are_kept = self._left.is_kept
        self._left = None
        if next(_with_gradients(self._optimizer), None) is None:
            return
        if self._are_of_step:
            self._clears_later = True
        else:
            self._left = _Gradient(self._optimizer)

    def are_missed(self, *, has_stepped: bool) -> bool:
        """Whether a checkpoint that is written between two batches lacks some that a step is to use.

        Args:
            has_stepped: Whether some optimizer has stepped in the batch before.
        """
        found = self._are_used if self._are_used is not None else self._are_kept
        if found is None:
            found = not (has_stepped or self._clears_later)
        if not found or self._are_of_step:
            return False
        return any(bool(one.grad.count_nonzero()) for one in _with_gradients(self._optimizer))

    @property
    def _are_of_step(self) -> bool:
        """Whether the present ones are those of its latest step."""
        return self._used is not None and self._used.is_same


class _ManualSteps:
    """What was noted of the steps of a fit under manual optimization.

    Args:
        trainer: The trainer.

    Attributes:
        latest: The epoch and batch of the latest step; None before the first one.
        has_warned: Whether a warning was given.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.latest: tuple[int, int] | None = None
        self.has_warned = False
        self.of_optimizers = [_Gradients(one) for one in trainer.optimizers]

    def note_step(self, trainer: pl.Trainer, of: _Gradients, *_: Any) -> None:
        """An optimizer has stepped.

        Args:
            trainer: The trainer.
            of: The gradients of the optimizer.
        """
        of.note_step()
        self.latest = next_step(trainer, begun=True)


def _with_gradients(optimizer: Any) -> Iterator[Any]:
    return (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None)


def watch(trainer: pl.Trainer) -> None:
    """Note from now on what optimizers do; nothing where one has no hooks."""
    if not all(hasattr(one, "register_step_post_hook") for one in trainer.optimizers):
        return
    steps = _ManualSteps(trainer)
    pairs = zip(trainer.optimizers, steps.of_optimizers, strict=True)
    # No local functions: a trainer may have to be pickled.
    hooks = [one.register_step_post_hook(partial(steps.note_step, trainer, of)) for one, of in pairs]
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop).pop(_AT_CUT, None)
    vars(epoch_loop).update({_STEPS: steps, _HOOKS: hooks, _ADVANCED: partial(_end_batch, trainer)})


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    for name in (_STEPS, _ADVANCED):
        vars(epoch_loop).pop(name, None)
    for hook in vars(epoch_loop).pop(_HOOKS, ()):
        hook.remove()


def note_batch(trainer: pl.Trainer) -> None:
    """A batch begins; with automatic optimization nothing is noted."""
    steps: _ManualSteps | None = vars(trainer.fit_loop.epoch_loop).get(_STEPS)
    if steps is not None:
        for each in steps.of_optimizers:
            each.note_batch()


def inexact_steps(trainer: pl.Trainer) -> dict[str, list[int]]:
    """What makes a resume from a checkpoint inexact that is written now; with a warning, the first time.

    Returns:
        ``gradients``, if some have been added up that a later step is to use; or ``stepped``, if a step was taken
        within the batch that is trained on now, with the batch and its epoch.
    """
    kept: Any = vars(trainer.fit_loop.epoch_loop)
    steps: _ManualSteps | None = kept.get(_STEPS)
    at, found = kept.get(_AT_CUT, (None, {}))
    if at != next_step(trainer, begun=True):
        found = {} if steps is None else _found_in(steps, trainer)
    if found and (steps is None or not steps.has_warned):
        _warn(found, when=0)
    if found and steps is not None:
        steps.has_warned = True
    return dict(found)


def note_cut(trainer: pl.Trainer) -> None:
    """An epoch ends before all its batches: a validation that follows, or the end of the fit, clears gradients."""
    kept: Any = trainer.fit_loop.epoch_loop
    steps, at = vars(kept).get(_STEPS), next_step(trainer, begun=True)
    if steps is not None and vars(kept).get(_AT_CUT, (None, {}))[0] != at:
        vars(kept)[_AT_CUT] = at, _found_in(steps, trainer)


def _end_batch(trainer: pl.Trainer, fetcher: Any) -> None:
    """In place of Lightning's method, which validates behind a batch where the run is told to stop."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if trainer.should_stop:
        note_cut(trainer)
    type(epoch_loop).on_advance_end(epoch_loop, fetcher)


def _found_in(steps: _ManualSteps, trainer: pl.Trainer) -> dict[str, list[int]]:
    epoch, batch = next_step(trainer, begun=True)
    if steps.latest == (epoch, batch):
        return {"stepped": [batch, epoch]}
    is_missed = any(one.are_missed(has_stepped=steps.latest == (epoch, batch - 1)) for one in steps.of_optimizers)
    return {"gradients": []} if is_missed else {}


def warn_of_inexact_steps(found: Mapping[str, Any]) -> None:
    """Warn on a resume of what :func:`inexact_steps` has found."""
    _warn(found, when=1)


def _warn(found: Mapping[str, Any], when: int) -> None:
    for name, where in found.items():
        rank_zero_warn(_WARNINGS[name][when].format(*where), category=StatefulWarning)
