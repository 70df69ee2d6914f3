"""Whose turn it is: the sequence in which sources are served, cut into blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_stateful.core.permutation import hashed_words
from lightning_stateful.core.ranges import Indices, concatenated_ranges
from lightning_stateful.index.proportions import Proportions


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A sequence of turns ``start <= turn < stop`` in blocks of exact proportions.

    Within a block the turns stand evenly spread, or in an order of their own if there is a key. Of the first and last
    block only what lies between ``start`` and ``stop`` is served: the evenly spread sequence decides which turns these
    are, so that their number for each source does not depend on the key.

    Attributes:
        proportions: Turns of each source in a block.
        start: First turn.
        stop: Turn after the last one; None for no end.
        key: Chooses the order within blocks; None for the evenly spread one.
    """

    proportions: Proportions
    start: int = 0
    stop: int | None = None
    key: int | None = None

    def sources(self, first: int, last: int) -> Indices:
        """The source of each of the turns ``first <= turn < last``; int64 of shape ``(last - first,)``."""
        if last <= first:
            return np.empty(0, dtype=np.int64)
        begin, end = self._block(first), self._block(last - 1) + 1
        table = self._table(begin, end)
        skipped = first - self._turn(begin)
        return table.ravel()[skipped : skipped + last - first]

    def counts(self, first: int, last: int) -> Indices:
        """Turns of every source among ``first <= turn < last``; shape ``(sources,)``."""
        begin, end = self._block(first), self._block(last)
        num_sources = self.proportions.num_sources
        if begin == end:
            return np.bincount(self.sources(first, last), minlength=num_sources)
        head = np.bincount(self.sources(first, self._turn(begin + 1)), minlength=num_sources)
        tail = np.bincount(self.sources(self._turn(end), last), minlength=num_sources)
        return head + self.proportions.totals(begin + 1, end) + tail

    def turn_after(self, source: int, count: int) -> int:
        """The turn after the one that gives ``source`` its ``count``-th turn, in the evenly spread sequence."""
        fixed = self.proportions.fixed
        if fixed is not None:
            # Every block is like the first.
            own = np.flatnonzero(self._first_spread == source)
            before = int(np.count_nonzero(own < self.start % self.proportions.block))
            blocks, place = divmod(before + count - 1, own.size)
            return self._turn(self._block(self.start) + blocks) + int(own[place]) + 1
        begin = self._block(self.start)
        head = self._spread_once(begin)[self.start - self._turn(begin) :]
        in_head = int(np.count_nonzero(head == source))
        if count <= in_head:
            return self.start + int(np.flatnonzero(head == source)[count - 1]) + 1
        count -= in_head
        low, high = self._bracket(source, count, begin + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if self.proportions.total(begin + 1, middle, source) < count:
                low = middle
            else:
                high = middle
        count -= self.proportions.total(begin + 1, low, source)
        return self._turn(low) + int(np.flatnonzero(self._spread_once(low) == source)[count - 1]) + 1

    @cached_property
    def _spreads(self) -> dict[int, Indices]:
        return {}

    def _spread_once(self, block: int) -> Indices:
        """:meth:`_spread`, kept: sources that end together ask for the same blocks."""
        if block not in self._spreads:
            self._spreads[block] = self._spread(block)
        return self._spreads[block]

    @cached_property
    def _first_spread(self) -> Indices:
        return self._spread(0)

    def _bracket(self, source: int, count: int, begin: int) -> tuple[int, int]:
        """Blocks ``low <= block < high`` among which the ``count``-th turn from block ``begin`` on lies."""
        guess = begin + int(count / self.proportions.turns_in_block(source))
        low, high, reach = max(guess - 1, begin), max(guess + 2, begin + 1), 2
        while low > begin and self.proportions.total(begin, low, source) >= count:
            low, high, reach = max(low - reach, begin), low, 2 * reach
        while self.proportions.total(begin, high, source) < count:
            low, high, reach = high, high + reach, 2 * reach
        return low, high

    def _block(self, turn: int) -> int:
        return turn // self.proportions.block

    def _turn(self, block: int) -> int:
        return block * self.proportions.block

    def _spread(self, block: int) -> Indices:
        """A block's sources, evenly spread; ties in the order of the sources."""
        counts = self.proportions.counts(block, block + 1)[0]
        members = np.repeat(np.arange(counts.size), counts)
        number = concatenated_ranges(np.zeros_like(counts), counts)
        # Whole numbers in place of (number + 0.5) / count: equal fractions must tie.
        scale = math.lcm(*counts[counts > 0].tolist())
        parts = scale // counts[members] if scale < 2**40 else 1 / counts[members]
        return members[np.argsort((2 * number + 1) * parts, kind="stable")]

    def _table(self, begin: int, end: int) -> Indices:
        """The sources of whole blocks, as they are served; shape ``(end - begin, block)``."""
        size = self.proportions.block
        fixed = self.proportions.fixed
        if self.key is None:
            if fixed is not None:
                return np.broadcast_to(self._first_spread, (end - begin, size))
            return np.stack([self._spread(block) for block in range(begin, end)])
        counts = self.proportions.counts(begin, end)
        members = np.repeat(np.tile(np.arange(counts.shape[1]), end - begin), counts.ravel()).reshape(-1, size)
        words = self._words(begin, end)
        table = np.take_along_axis(members, np.argsort(words, axis=1), axis=1)
        for block in (begin, end - 1):
            low = max(self.start - self._turn(block), 0)
            high = size if self.stop is None else min(self.stop - self._turn(block), size)
            if low > 0 or high < size:
                served = np.argsort(words[block - begin, low:high])
                table[block - begin, low:high] = self._spread(block)[low:high][served]
        return table

    def _words(self, begin: int, end: int) -> Indices:
        size = self.proportions.block
        words = hashed_words(np.arange(begin * size, end * size), "turns", self.key or 0)
        return words.reshape(-1, size)  # type: ignore[return-value]
