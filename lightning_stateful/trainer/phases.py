"""The phases that a fit goes through, as the callback sees them.

One value says which it is in, and holds what belongs to that phase::

    setup ---------------> SetUp
    on_load_checkpoint --> Resumed          with ckpt_path
    on_fit_start --------> Resumed          where a trainer is fitted again that was stopped within an epoch
    on_train_start ------> Training         or, in a resumed run, Resumed(training_began=True)
    on_train_epoch_start, on_validation_start, on_train_batch_start, on_train_epoch_end
                     ----> Training
    on_fit_end ----------> Resumed(training_began=True)     where nothing was left to train on
    on_exception --------> Interrupted      but a run that was restored, and has not trained yet, stays Resumed

While a run is Resumed or Interrupted the phase says how far training has got; else the loop's counters do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_stateful.loops.loop_progress import BatchBegun
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.trainer.train_loaders import TrainLoaders


@dataclass(frozen=True, slots=True)
class SetUp:
    """A fit is being set up, and nothing has been resumed.

    Attributes:
        earlier: The loaders of an earlier fit of the same trainer, from which streams go on.
        stopped_at: How far that fit got, until ``on_fit_start`` has decided whether this one goes on there; then None.
        begins_at: Epoch and batch at which the loop's counters stood.
    """

    earlier: TrainLoaders | None = None
    stopped_at: LoopProgress | None = None
    begins_at: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run has been resumed, and waits for its first batch or validation.

    Attributes:
        progress: Where it goes on, in steps of the present ranks and batch sizes.
        global_step: Optimizer steps taken.
        metrics: Values of ``trainer.callback_metrics``.
        saved: The callback's state; empty if there is none.
        training_began: Lightning has begun to train, or found nothing left to train on.
    """

    progress: LoopProgress
    global_step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved: Mapping[str, Any] = field(default_factory=dict)
    training_began: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """The loop's counters say where training is.

    Attributes:
        batch: Counters when the latest batch of this epoch began; None before the first.
        validation_epoch: Epoch in which the resumed run had built its validation loaders; -1 for none.
    """

    batch: BatchBegun | None = None
    validation_epoch: int = -1


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An error has ended the fit.

    Attributes:
        progress: How far it got: Lightning soon forgets whether it was validating.
        was_restored: Whether it had gone on from the checkpoint that it was given, or was given none.
    """

    progress: LoopProgress
    was_restored: bool = True
