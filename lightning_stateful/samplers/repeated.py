"""A sampler that yields the same in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler


class Repeated(Sampler[Any]):
    """The first epoch of a sampler, over and over; to overfit on.

    Args:
        sampler: Any sampler or batch sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)
