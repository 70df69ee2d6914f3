"""How many turns of every block go to each source: whole numbers whose sums stay true to real shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np

from lightning_stateful.core.ranges import Indices

# Numerators of fractions; a power of two, so that rounding to it keeps whole numbers whole.
_UNIT = 2**128
# The golden ratio's fraction: successive multiples fall evenly into any interval, for up to the root of the unit.
_STRIDE = math.isqrt(5 << 254) - 2**127


class Proportions:
    """Turns of each source in block 0, 1, 2 and so on of ``block`` turns each.

    In every block a source has its real share of the turns, rounded down or up, and the counts add up to the block
    exactly: laid end to end, the shares of a block are a ruler, a source gets one turn for each whole number between
    its ends, and the ruler is shifted a little further in every block (systematic sampling). Sums over any number of
    blocks are computed in closed form.

    Args:
        block: Turns in a block, at least 1.
        shares: Share of each source in the first of ``num_blocks`` blocks; they add up to 1.
        final: Share of each source at the end of them, if the shares change linearly; None if they do not.
        num_blocks: Blocks over which they change.
        shift: By how many blocks the ruler has been shifted before block 0.

    Source:
        Systematic sampling: Madow, "On the theory of systematic sampling, II", 1949. Shifts by the golden ratio:
        Weyl's equidistribution. Sums of floors: the Euclid-like algorithm of Graham, Knuth and Patashnik, "Concrete
        Mathematics", section 3.5.
    """

    def __init__(
        self,
        block: int,
        shares: Sequence[Fraction],
        final: Sequence[Fraction] | None = None,
        num_blocks: int = 1,
        shift: int = 0,
    ) -> None:
        self.block = block
        first = self._marks(shares)
        last = first if final is None else self._marks(final)
        # Marks of the ruler in block i are (offset + slope * i) / modulus.
        steady = first == last
        scale = 1 if steady else 2 * num_blocks
        self._modulus = scale * _UNIT
        self._lines = [
            (scale * (a + _STRIDE * shift) + (b - a), scale * _STRIDE + 2 * (b - a))
            for a, b in zip(first, last, strict=True)
        ]
        whole = steady and all(mark % _UNIT == 0 for mark in first)
        self._fixed = np.diff([mark // _UNIT for mark in first]).astype(np.int64) if whole else None

    @property
    def num_sources(self) -> int:
        """Number of sources."""
        return len(self._lines) - 1

    @property
    def fixed(self) -> Indices | None:
        """Turns of each source in a block if they are the same in all blocks, else None."""
        return self._fixed

    def turns_in_block(self, source: int) -> float:
        """Mean number of turns of a source in a block, at the beginning."""
        upper, lower = self._lines[source + 1][0], self._lines[source][0]
        return (upper - lower) / self._modulus

    def counts(self, first: int, last: int) -> Indices:
        """Turns of each source in each of the blocks ``first <= i < last``; shape ``(last - first, sources)``."""
        if self._fixed is not None:
            return np.broadcast_to(self._fixed, (last - first, self._fixed.size))
        modulus = self._modulus
        marks = [[(offset + slope * i) // modulus for offset, slope in self._lines] for i in range(first, last)]
        result: Indices = np.diff(np.array(marks, dtype=object).reshape(last - first, len(self._lines)), axis=1).astype(
            np.int64
        )
        return result

    def total(self, first: int, last: int, source: int) -> int:
        """Turns of one source in the blocks ``first <= i < last`` together."""
        if self._fixed is not None:
            return int(self._fixed[source]) * (last - first)
        upper, lower = (
            _sum_of_floors(last - first, self._modulus, slope, offset + slope * first)
            for offset, slope in (self._lines[source + 1], self._lines[source])
        )
        return upper - lower

    def totals(self, first: int, last: int) -> Indices:
        """Turns of every source in the blocks ``first <= i < last`` together; shape ``(sources,)``."""
        if self._fixed is not None:
            return self._fixed * (last - first)
        marks = [
            _sum_of_floors(last - first, self._modulus, slope, offset + slope * first) for offset, slope in self._lines
        ]
        return np.array([upper - lower for lower, upper in pairwise(marks)], dtype=np.int64)

    def _marks(self, shares: Sequence[Fraction]) -> list[int]:
        return [round(mark * self.block * _UNIT) for mark in accumulate(shares, initial=Fraction(0))]


def _sum_of_floors(count: int, modulus: int, slope: int, offset: int) -> int:
    """The sum of ``(slope * i + offset) // modulus`` over ``i`` in ``range(count)``."""
    total = 0
    while count > 0:
        quotient, slope = divmod(slope, modulus)
        total += quotient * (count * (count - 1) // 2)
        quotient, offset = divmod(offset, modulus)
        total += quotient * count
        highest = slope * count + offset
        if highest < modulus:
            break
        # Count the lattice points under the line by the other axis.
        count, rest = divmod(highest, modulus)
        modulus, slope, offset = slope, modulus, rest
    return total
