"""A shuffle within each of many classes at once, with random access."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.index.permutation import Indices, splitmix64
from lightning_stateful.index.seeding import derive_words

# Mixing is no good shuffle of very few elements; these are sorted by hashed words.
_SORTED = 2**8
_NUM_ROUNDS = 8


class ClassShuffle:
    """A keyed permutation of each class of ``range(n)``, all applied in one go.

    What :class:`~lightning_stateful.index.permutation.KeyedPermutation` does for one range this does for consecutive
    ranges, and an element costs the same however many of the others are asked for. Its rounds of xor, odd
    multiplication and xor-shift run over elements of all classes together, each with the words of its class; results
    outside a class are mixed again. Classes of up to 256 elements are tables.

    Args:
        starts: The first element of each class and, last, their number; int64 of shape ``(classes + 1,)``.
        labels: What the keys are derived from.

    Source:
        See :class:`~lightning_stateful.index.permutation.KeyedPermutation`.
    """

    def __init__(self, starts: Indices, *labels: Any) -> None:
        self._starts = starts
        sizes = np.diff(starts)
        largest = int(sizes.max(initial=1))
        bits = np.array([(size - 1).bit_length() if size > 1 else 1 for size in sizes.tolist()], dtype=np.uint64)
        self._dtype: Any = np.uint32 if largest <= 2**32 else np.uint64
        words = np.array(derive_words(2 * _NUM_ROUNDS * len(sizes), "class shuffle", *labels), dtype=np.uint64)
        masks = np.uint64(2**64 - 1) >> (np.uint64(64) - bits)
        keys = (words.reshape(2, _NUM_ROUNDS, len(sizes)) & masks).astype(self._dtype)
        self._keys, self._multipliers = keys[0], keys[1] | self._dtype(1)
        self._masks = masks.astype(self._dtype)
        self._shifts = ((bits + np.uint64(1)) // np.uint64(2)).astype(self._dtype)
        self._lasts = (np.maximum(sizes, 1) - 1).astype(self._dtype)
        self._sorted = sizes <= _SORTED
        self._table = self._sort(sizes, *derive_words(2, "class tables", *labels))

    def take(self, places: Indices) -> Indices:
        """The elements at ``places``, each of the class of its place: int64 of shape ``(n,)`` -> the same."""
        classes = np.searchsorted(self._starts, places, side="right") - 1
        starts = self._starts[classes]
        words = (places - starts).astype(self._dtype)
        in_table = self._sorted[classes]
        result: Indices = starts.copy()
        if not in_table.any():
            self._walk(words, classes)
            result += words.astype(np.int64)
            return result
        result[in_table] = self._table[self._table_starts[classes[in_table]] + words[in_table]]
        mixed, classes = words[~in_table], classes[~in_table]
        self._walk(mixed, classes)
        result[~in_table] += mixed.astype(np.int64)
        return result

    def _walk(self, words: NDArray[Any], classes: Indices) -> None:
        lasts = self._lasts[classes]
        self._mix(words, classes)
        outside = np.flatnonzero(words > lasts)
        while outside.size:
            again = words[outside]
            self._mix(again, classes[outside])
            words[outside] = again
            outside = outside[again > lasts[outside]]

    def _mix(self, words: NDArray[Any], classes: Indices) -> None:
        masks, shifts = self._masks[classes], self._shifts[classes]
        for keys, multipliers in zip(self._keys, self._multipliers, strict=True):
            words ^= keys[classes]
            words *= multipliers[classes]
            words &= masks
            words ^= words >> shifts

    def _sort(self, sizes: Indices, first: int, second: int) -> Indices:
        """The elements of all small classes, class by class, each shuffled."""
        small = np.flatnonzero(self._sorted)
        counts = sizes[small]
        self._table_starts = np.zeros(len(sizes), dtype=np.int64)
        self._table_starts[small] = np.cumsum(counts) - counts
        of_class = np.repeat(small, counts)
        elements = np.arange(counts.sum()) - np.repeat(self._table_starts[small], counts) + self._starts[of_class]
        words = splitmix64(splitmix64(elements.astype(np.uint64) ^ np.uint64(first)) ^ np.uint64(second))
        result: Indices = elements[np.lexsort((words, of_class))]
        return result
