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
        object.__setattr__(self, "num_replicas", as_int("num_replicas", self.num_replicas, least=1))
        if isinstance(self.rank, bool):
            raise ConfigurationError(f"rank must be an integer, got {self.rank}.")
        object.__setattr__(self, "rank", as_int("rank", self.rank))
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigurationError(f"rank must be in range({self.num_replicas}), got {self.rank}.")


def split_evenly(count: int, num_parts: int, part: int) -> range:
    """Split ``range(count)`` into ``num_parts`` consecutive shares, and return share number ``part``.

    Shares differ by at most one, the longer ones come first, and together they are ``range(count)`` in order.
    """
    quotient, remainder = divmod(count, num_parts)
    start = part * quotient + min(part, remainder)
    return range(start, start + quotient + (part < remainder))
