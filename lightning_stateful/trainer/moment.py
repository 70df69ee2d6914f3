"""How far a training run has got, and what it goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_stateful.errors import DamagedStateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How far a training run has got.

    Attributes:
        epoch: Epochs that are over.
        batch: Batches of the running epoch that the model has been trained on; 0 between epochs.
        running: An epoch has begun and its end hooks have not run.
        ended: All batches of the running epoch are done, its end hooks are not.
        validate: A validation is due before the next batch.
        plateau: ``"step"`` or ``"epoch"`` if schedulers that monitor a metric have yet to take that step, or empty.
        stepped: Lightning's count of batches (of windows, under accumulation) for its loggers.
        train_reload_epoch: Epoch at which the training loaders were built last; -1 for none.
        val_reload_epoch: The same for validation loaders.
        validated: Batches of the running epoch up to which validations have been run; 0 unless beyond ``batch``, where
            batches of an open accumulation window are trained on again.
        stopping: The run has been told to stop, and waits for ``min_epochs`` or ``min_steps``.
    """

    epoch: int = 0
    batch: int = 0
    running: bool = False
    ended: bool = False
    validate: bool = False
    plateau: str = ""
    stepped: int = 0
    train_reload_epoch: int = -1
    val_reload_epoch: int = -1
    validated: int = 0
    stopping: bool = False

    @property
    def data(self) -> tuple[int, int]:
        """Epoch and step that the data goes on from: after the last batch of an epoch, the next epoch."""
        return (self.epoch + 1, 0) if self.ended else (self.epoch, self.batch)

    def at_step(self, step: int, *, ended: bool) -> Moment:
        """The same moment of a running epoch in steps of the present ranks and batch sizes.

        Args:
            step: Batches that the model has been trained on.
            ended: The epoch has no more of them.
        """
        validated = self.validated if step == self.batch else 0
        moment = replace(self, batch=step, ended=ended, validated=validated)
        if ended and not self.validate:
            # Nothing is left on the present ranks. Lightning then decides on a validation, and counts the batch again.
            return replace(moment, validate=True, stepped=self.stepped - 1)
        if self.validate and step != self.batch:
            # Validations fall after certain steps, of which this is no longer one.
            return replace(moment, validate=ended, stepped=self.stepped + (not ended))
        return moment

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Moment:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DamagedStateError: A key is missing or has the wrong type.
        """
        fresh = asdict(cls())
        for key, default in fresh.items():
            if type(data.get(key)) is not type(default):
                raise DamagedStateError(
                    f"The callback's state must hold a {type(default).__name__} under {key!r}, got {data.get(key)!r}. "
                    "Resume from another checkpoint; this one's state is damaged."
                )
        return cls(**{key: data[key] for key in fresh})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a run goes on with, until its first batch or validation.

    Attributes:
        moment: Where, in steps of the present topology.
        global_step: Optimizer steps taken.
        metrics: Values of monitored metrics.
    """

    moment: Moment
    global_step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
