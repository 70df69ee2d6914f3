"""Data-parallel ranks of a run, and even splits over them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One data-parallel rank among its replicas.

    Attributes:
        num_replicas: Data-parallel replicas of the run, at least 1.
        rank: This replica, in ``range(num_replicas)``.

    Raises:
        ConfigurationError: A value is out of range.
    """

    num_replicas: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("num_replicas", "rank"):
            if isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be an integer, got {getattr(self, name)}.")
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if self.num_replicas < 1:
            raise ConfigurationError(f"num_replicas must be at least 1, got {self.num_replicas}.")
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigurationError(f"rank must be in range({self.num_replicas}), got {self.rank}.")


def split_evenly(count: int, num_parts: int, part: int) -> range:
    """Split ``range(count)`` into ``num_parts`` consecutive shares, and return share number ``part``.

    Shares differ by at most one, the longer ones come first, and together they are ``range(count)`` in order.
    """
    quotient, remainder = divmod(count, num_parts)
    start = part * quotient + min(part, remainder)
    return range(start, start + quotient + (part < remainder))
