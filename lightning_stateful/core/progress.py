"""The progress of training within an epoch: the only part of a state that changes from step to step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import DamagedStateError, PositionError

_COUNTS = ("epoch", "cycle", "consumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A position in training: an epoch, and how much of it the model has been trained on. Equal on every rank.

    Attributes:
        epoch: The epoch that the next batch belongs to, from 0.
        cycle: Passes over the data that came before within the epoch: a short loader starts over beside a longer one
            (``max_size_cycle``).
        consumed: How much of this pass the model has been trained on, counted over all ranks. The unit is the order's:
            samples of a plain dataset, steps of mixtures, buckets and streams, items of a wrapped sampler.
        details: Whatever else the order needs to plan the rest of the epoch: plain JSON data of its own.

    Raises:
        PositionError: A count is negative.
    """

    epoch: int = 0
    cycle: int = 0
    consumed: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if min(self.epoch, self.cycle, self.consumed) < 0:
            raise PositionError(
                f"A progress counts from 0, got epoch={self.epoch}, cycle={self.cycle}, consumed={self.consumed}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Fresh plain data for a state."""
        return {name: getattr(self, name) for name in _COUNTS} | copy.deepcopy(dict(self.details))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Progress:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DamagedStateError: A count is missing or no integer.
            PositionError: A count is negative.
        """
        for name in _COUNTS:
            if type(data.get(name)) is not int:
                raise DamagedStateError(f"progress.{name} must be an int, got {data.get(name)!r}.")
        details = {name: copy.deepcopy(value) for name, value in data.items() if name not in _COUNTS}
        return cls(**{name: data[name] for name in _COUNTS}, details=details)
