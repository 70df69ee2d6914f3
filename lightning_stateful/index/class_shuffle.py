"""A shuffle within each of many classes at once, with random access."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.index.permutation import Indices, hashed_words
from lightning_stateful.index.runs import spell_out

# Up to here elements are sorted by hashed words: mixing is no good shuffle of few. With 8 rounds some keys show at
# strides of half a class, with 10 none does.
_SORTED = 2**10
_NUM_ROUNDS = 10


class ClassShuffle:
    """A keyed permutation of each of many consecutive ranges, all applied in one go.

    What :class:`~lightning_stateful.index.permutation.KeyedPermutation` does for one range this does for many, the
    classes. An element costs the same however many others are asked for, and what becomes of it depends on its class
    and the labels alone, not on the other classes. Its rounds of xor, odd multiplication and xor-shift run over
    elements of all classes together, each with the words of its class; results outside a class are mixed again.
    Classes of up to 1,024 elements are tables.

    Args:
        starts: The first element of each class and, last, the end of the last; int64 of shape ``(classes + 1,)``.
        labels: What the keys are derived from.

    Source:
        See :class:`~lightning_stateful.index.permutation.KeyedPermutation`.
    """

    def __init__(self, starts: Indices, *labels: Any) -> None:
        self._starts = starts
        sizes = np.diff(starts)
        self._sorted = sizes <= _SORTED
        self._table_starts, self._table = _shuffled_table(starts, self._sorted, labels)
        # Words only for the classes that are mixed, which stand at these columns.
        self._columns = np.cumsum(~self._sorted) - 1
        mixed = sizes[~self._sorted]
        self._dtype: Any = np.uint32 if mixed.max(initial=0) <= 2**32 else np.uint64
        bits = np.array([(size - 1).bit_length() for size in mixed.tolist()], dtype=np.uint64)
        masks = np.uint64(2**64 - 1) >> (np.uint64(64) - bits)
        numbers = starts[:-1][~self._sorted] * (2 * _NUM_ROUNDS) + np.arange(2 * _NUM_ROUNDS)[:, None]
        words = hashed_words(numbers, "class shuffle", *labels).reshape(2, _NUM_ROUNDS, len(mixed))
        keys = (words & masks).astype(self._dtype)
        self._keys, self._multipliers = keys[0], keys[1] | self._dtype(1)
        self._masks = masks.astype(self._dtype)
        # A shift of at least half the bits makes x ^ (x >> shift) a bijection.
        self._shifts = ((bits + np.uint64(1)) // np.uint64(2)).astype(self._dtype)
        self._lasts = (mixed - 1).astype(self._dtype)

    def take(self, places: Indices) -> Indices:
        """The elements at ``places``, each of the class of its place: int64 of shape ``(n,)`` -> the same."""
        classes = np.searchsorted(self._starts, places, side="right") - 1
        result: Indices = self._starts[classes]
        offsets = places - result
        in_table = self._sorted[classes]
        if not in_table.any():
            result += self._walk(offsets, self._columns[classes])
            return result
        result[in_table] = self._table[self._table_starts[classes[in_table]] + offsets[in_table]]
        result[~in_table] += self._walk(offsets[~in_table], self._columns[classes[~in_table]])
        return result

    def _walk(self, offsets: Indices, columns: Indices) -> Indices:
        # All words have one unsigned type; with int64 NumPy would make them float64.
        words = offsets.astype(self._dtype)
        lasts = self._lasts[columns]
        self._mix(words, columns)
        outside = np.flatnonzero(words > lasts)
        while outside.size:
            again = words[outside]
            self._mix(again, columns[outside])
            words[outside] = again
            outside = outside[again > lasts[outside]]
        return words.astype(np.int64)

    def _mix(self, words: NDArray[Any], columns: Indices) -> None:
        masks, shifts = self._masks[columns], self._shifts[columns]
        for keys, multipliers in zip(self._keys, self._multipliers, strict=True):
            words ^= keys[columns]
            words *= multipliers[columns]
            words &= masks
            words ^= words >> shifts


def _shuffled_table(starts: Indices, chosen: NDArray[np.bool_], labels: tuple[Any, ...]) -> tuple[Indices, Indices]:
    """Where each of the chosen classes begins in a table of their elements, and that table, each class shuffled."""
    counts = np.diff(starts) * chosen
    table_starts = np.cumsum(counts) - counts
    elements = spell_out(starts[:-1], counts)
    words = hashed_words(elements, "class tables", *labels)
    return table_starts, elements[np.lexsort((words, np.repeat(np.arange(len(counts)), counts)))]
