"""Where a run stands: the only thing that changes during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import DamagedStateError, PositionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How many slots of which epoch the model has been trained on, over all ranks.

    Attributes:
        epoch: The epoch that the next slot belongs to, from 0.
        consumed: Slots of that epoch already trained on. It exceeds the epoch's length only where a shorter loader
            starts over within an epoch (``max_size_cycle``).
        width: Number of replicas that the epoch was begun with.
        since: Slots consumed when the rest of the epoch was planned (batch orders; 0 if it was when the epoch began).
        origin: What had been served then, as the order counts it; empty for nothing.
        carried: What a user's sampler needs beside, as text; empty for nothing.

    Raises:
        PositionError: A value is negative, or the width is zero.
    """

    epoch: int = 0
    consumed: int = 0
    width: int = 1
    since: int = 0
    origin: tuple[int, ...] = ()
    carried: str = ""

    def __post_init__(self) -> None:
        for name in ("epoch", "consumed", "width"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if self.epoch < 0 or self.consumed < 0 or self.width < 1:
            raise PositionError(
                "A position has epoch >= 0, consumed >= 0 and width >= 1, "
                f"got epoch={self.epoch}, consumed={self.consumed}, width={self.width}."
            )

    @property
    def steps_before(self) -> int:
        """Steps of the epoch that were done when its rest was planned."""
        return self.since // self.width

    @property
    def steps_since(self) -> int:
        """Steps done since then."""
        return (self.consumed - self.since) // self.width

    def to_dict(self) -> dict[str, int]:
        """Plain data for a state."""
        return {"epoch": self.epoch, "consumed": self.consumed, "width": self.width}

    @classmethod
    def from_dict(cls, data: Any) -> Position:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DamagedStateError: A key is missing or no integer.
            PositionError: A value is out of range.
        """
        if not isinstance(data, Mapping):
            raise DamagedStateError(f"a position is a dict, got {type(data).__name__}")
        for key in ("epoch", "consumed", "width"):
            if key not in data:
                raise DamagedStateError(f"a position needs {key!r}, got the keys {sorted(map(str, data))}")
            if type(data[key]) is not int:
                raise DamagedStateError(f"position.{key} must be an int, got {data[key]!r}")
        return cls(epoch=data["epoch"], consumed=data["consumed"], width=data["width"])
