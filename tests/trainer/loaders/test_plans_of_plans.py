"""Samplers whose plan of an epoch follows from the plan before, and is kept: each is drawn in its own epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from harm.basics import LENGTH
from harm.laws import judged
from harm.own_samplers import Sized
from harm.table import of


class Rotates(Sized):
    """Rotates the order of the epoch before by a random number."""

    epoch = 0

    def __init__(self) -> None:
        self.plans: dict[int, list[int]] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def plan(self, epoch: int) -> list[int]:
        if epoch not in self.plans:
            self.plans[epoch] = self.rotated(self.plan(epoch - 1)) if epoch else list(range(LENGTH))
        return self.plans[epoch]

    def rotated(self, before: list[int]) -> list[int]:
        by = random.randrange(1, LENGTH)
        return before[by:] + before[:by]

    def __iter__(self) -> Iterator[int]:
        return iter(self.plan(self.epoch))


class RotatesUnseen(Rotates):
    """Keeps the orders where no attribute shows them."""

    @lru_cache  # noqa: B019  # kept per object
    def plan(self, epoch: int) -> list[int]:
        return self.rotated(self.plan(epoch - 1)) if epoch else list(range(LENGTH))


class Prunes(Rotates):
    """Keeps four fifths of the samples of the epoch before; its ``len()`` may be the first to ask for them."""

    def __init__(self) -> None:
        self.plans = {0: list(range(LENGTH))}

    def rotated(self, before: list[int]) -> list[int]:
        return sorted(random.sample(before, len(before) * 4 // 5))

    def __len__(self) -> int:
        return len(self.plan(self.epoch))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Rotates, RotatesUnseen, Prunes])
def test_it_is_resumed_exactly_wherever_it_is_stopped(tmp_path: Path, kind: Any, workers: int) -> None:
    # Behind the second epoch too: the plan of the third follows from one that was drawn in the second.
    stops = (3, 6, 8, 11, 12, 13)
    judged(tmp_path, of(kind), dict.fromkeys(stops, "exact"), "runs", workers)
