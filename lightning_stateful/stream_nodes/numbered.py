"""Numbers of the samples of a stream, which go with them from their shards to the batch, for a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Of a number, the bits behind the pass.
_BITS_OF_SAMPLE = 44
_MOST_PASSES = 2 ** (63 - _BITS_OF_SAMPLE)


class Numbered(tuple[Any, tuple[int, ...]]):
    """A pair of what a node makes of samples and the numbers of these.

    It is a sample, a window or a packed sequence. A window has the number of its first sample, a packed sequence those
    of the documents that begin in it.
    """

    # No NamedTuple, which is made in twice the time.
    __slots__ = ()


class Numbering(NamedTuple):
    """Gives each sample of a source a number: of its pass, its shard, and its place in the shard.

    Attributes:
        first: The number of the source's first shard, among the shards of all sources.
        total: Shards of all sources.
    """

    first: int
    total: int

    def numbers(self, epoch: int, shard: int, first: int, count: int) -> range:
        """The numbers of consecutive samples of a shard.

        Args:
            epoch: The pass.
            shard: The shard.
            first: The place of the first of them in the shard.
            count: Samples.
        """
        start = ((epoch % _MOST_PASSES) << _BITS_OF_SAMPLE) + first * self.total + self.first + shard
        return range(start, start + count * self.total, self.total)


_item, _numbers = itemgetter(0), itemgetter(1)


class Given(NamedTuple):
    """The part that sources have in a batch.

    Attributes:
        sources: Of each source its number, samples, and tokens of padding in packed ones; empty where a stream has one
            source that is not packed.
        numbers: The numbers of the samples, as :class:`Numbering` gives them; None where nobody asked for them.
    """

    sources: tuple[tuple[int, int, int], ...] = ()
    numbers: tuple[int, ...] | None = None


NOTHING = Given()


def numbered(items: Sequence[Any], numbers: Sequence[tuple[int, ...]] | None) -> list[Any]:
    """Items with their numbers; the items alone where there are none."""
    if numbers is None:
        return items if isinstance(items, list) else list(items)
    return list(map(Numbered, zip(items, numbers, strict=True)))


def without_numbers(items: Sequence[Any]) -> tuple[list[Any], list[tuple[int, ...]] | None]:
    """Items of a node, of which all or none have numbers.

    Returns:
        The items alone, and the numbers of each; None where they have none.
    """
    if not items or type(items[0]) is not Numbered:
        return items if isinstance(items, list) else list(items), None
    return list(map(_item, items)), list(map(_numbers, items))


def by_pass(numbers: Sequence[int]) -> list[tuple[int, NDArray[np.uint64]]]:
    """Numbers of samples as a ledger keeps them.

    Returns:
        Of each pass, in ascending order, its number, and of each sample its place in the shard, multiplied by the
        shards of all sources, plus the number of the shard; uint64 of shape ``(samples,)``.
    """
    found = np.array(numbers, dtype=np.uint64)
    places = found & np.uint64(2**_BITS_OF_SAMPLE - 1)
    first, last = (number >> _BITS_OF_SAMPLE for number in (min(numbers, default=0), max(numbers, default=0)))
    if first == last:
        return [(first, places)] if numbers else []
    passes = found >> np.uint64(_BITS_OF_SAMPLE)
    return [(int(number), places[passes == number]) for number in np.unique(passes)]
