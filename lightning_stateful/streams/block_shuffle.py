"""Shuffling in blocks, which are read again and never saved."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import PositionError
from lightning_stateful.streams.stage import Item, Open, Place, Run, Stage


class BlockShuffle(Stage):
    """Consecutive blocks of items, each in an order of its own.

    An item travels less than the size of a block. The order follows from the seed and from the block's first item, so
    that a block opened at a place is the same without a random state.

    Args:
        open_inner: Opens what is shuffled.
        place: Where to begin; None for the beginning.
        size: Items of a block; the last may have fewer. A block that was begun keeps the size that it had.
        seed: Chooses the orders.
    """

    def __init__(self, open_inner: Open, place: Place | None, *, size: int, seed: int) -> None:
        self._inner = open_inner(None if place is None else place["at"])
        self._size, self._seed, self._size_of_block = size, seed, size
        self._at: Place = self._inner.place()
        # The block's samples as they are served, the place of each in the order of reading, and what was read.
        self._values: list[Any] = []
        self._order: list[int] = []
        self._runs: list[Run] = []
        self._starts: list[int] = []
        self._served = 0
        # A block that could not be read is part of nothing: it begins where it began.
        self._is_broken = False
        if place is not None and place["since"]:
            self._fill(place["size"])
            self._served = place["since"]
            if self._served > len(self._values):
                raise PositionError(
                    f"{self._served} samples of a shuffled block were used, but now it has {len(self._values)}. Read "
                    "the same data, or resume from another checkpoint."
                )

    def __next__(self) -> Item:
        if not self._find():
            raise StopIteration
        served = self._served
        self._served += 1
        return Item(*self._name(served), self._values[served])

    def take_runs(self, number: int) -> list[Run]:
        """The next samples: those of a block under the name of the first of them."""
        taken = []
        while number and self._find():
            values = self._values[self._served : self._served + number]
            shard, first = self._name(self._served)
            taken.append(Run(shard, first, values))
            self._served += len(values)
            number -= len(values)
        return taken

    def take(self, number: int) -> list[Any]:
        """The next items, each under its own name."""
        taken: list[Any] = []
        while len(taken) < number and self._find():
            served = range(self._served, min(self._served + number - len(taken), len(self._values)))
            taken += [Item(*self._name(place), self._values[place]) for place in served]
            self._served = served.stop
        return taken

    def skip(self, count: int) -> int:
        """Leave out items."""
        return sum(len(run.values) for run in self.take_runs(count))

    def place(self) -> Place:
        """Where the block was begun, how many items of it are served, and how many it has at most."""
        if self._served == len(self._values) and not self._is_broken:
            return {"at": self._inner.place(), "since": 0, "size": self._size}
        return {"at": self._at, "since": self._served, "size": self._size_of_block}

    def close(self) -> None:
        """Close what is shuffled."""
        self._inner.close()

    def _find(self) -> bool:
        """Have a sample at hand; False at the end."""
        if self._served == len(self._values):
            self._fill(self._size)
        return bool(self._values)

    def _fill(self, size: int) -> None:
        if not self._is_broken:
            self._at = self._inner.place()
        self._values, self._served, self._is_broken, self._size_of_block = [], 0, True, size
        runs = self._inner.take_runs(size)
        self._is_broken = False
        values: list[Any] = []
        self._starts = []
        for run in runs:
            self._starts.append(len(values))
            values += run.values
        self._runs, self._order = runs, []
        if runs:
            key = derive_seed("block", self._seed, runs[0].shard, runs[0].first)
            self._order = KeyedPermutation(len(values), key).take(np.arange(len(values))).tolist()
        self._values = [values[number] for number in self._order]

    def _name(self, served: int) -> tuple[int, int]:
        """The shard of an item of the block, and its place in that."""
        number = self._order[served]
        which = bisect_right(self._starts, number) - 1
        return self._runs[which].shard, self._runs[which].first + number - self._starts[which]
