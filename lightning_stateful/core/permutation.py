"""Keyed permutations of ``range(n)``, and of many ranges at once, with random access and constant memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.seeding import Label, derive_words
from lightning_stateful.errors import ConfigurationError

Indices = NDArray[np.int64]

MAX_LENGTH = 2**40
_TABLE_LENGTH = 2**16
# With 6, one key in 130 shows at strides of n/2 just above the table's length; with 8, none of 20,000 does.
_NUM_ROUNDS = 8
# Up to here the elements of a class are sorted by hashed words: mixing is no good shuffle of few. With 8 rounds some
# keys show at strides of half a class, with 10 none does.
_SORTED = 2**10
_CLASS_ROUNDS = 10
_LOOKED_UP_AT_ONCE = 2**10


class KeyedPermutation:
    """A bijection of ``range(length)`` chosen by ``key``.

    Up to 65,536 elements the permutation is the argsort of distinct hashed words, held as a table (at most 0.5 MB).
    Above, each element is mixed on its own by rounds of xor, odd multiplication and xor-shift in the smallest power of
    two that holds ``length``; results that fall outside are mixed again until they fall inside ("cycle walking"),
    which takes fewer than two tries on average. Every round is a bijection of the power of two, so the whole is a
    bijection of ``range(length)``.

    Args:
        length: Number of elements, ``0 <= length <= 2**40``.
        key: Any integer; equal keys give equal permutations on every platform.

    Raises:
        ConfigurationError: ``length`` is out of range.

    Source:
        Cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 4. The table's
        hash: SplitMix64, Steele, Lea and Flood, OOPSLA 2014. This is for shuffling, not for secrets.
    """

    def __init__(self, length: int, key: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ConfigurationError(f"A permutation has 0 to 2**40 elements, got length={length}.")
        self.length = length
        self.key = key
        self._table: Indices | None = None
        if length <= _TABLE_LENGTH:
            # No two words are equal, so every sorting algorithm gives this order; the default is the fastest.
            self._table = np.argsort(hashed_words(np.arange(length), "permutation table", length, key)).astype(np.int64)
        else:
            words = np.array(derive_words(2 * _NUM_ROUNDS, "permutation mixer", length, key), dtype=np.uint64)
            self._mixer = _Mixer([length], words[0::2, None], words[1::2, None])

    def take(self, positions: NDArray[Any]) -> Indices:
        """Elements at ``positions``: int array of any shape in ``range(length)`` -> int64 array of the same shape."""
        given = np.asarray(positions)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"positions are integers, got an array of {given.dtype}")
        flat = given.astype(np.int64)
        if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= self.length):
            raise IndexError(f"values from {flat.min()} to {flat.max()} lie outside range({self.length})")
        return self._mixer.take(flat.ravel(), 0).reshape(flat.shape) if self._table is None else self._table[flat]

    def find(self, elements: Indices) -> Indices:
        """The positions of elements: int64 of shape ``(n,)``, each in ``range(length)`` -> the same shape."""
        return self._mixer.find(elements) if self._table is None else np.argsort(self._table)[elements]


@lru_cache(maxsize=64)
def keyed_permutation(length: int, key: int) -> KeyedPermutation:
    """A :class:`KeyedPermutation` from a small cache, because small ones carry a table."""
    return KeyedPermutation(length, key)


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each 64-bit word to another; a bijection, so distinct words never collide."""
    x: NDArray[np.uint64] = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hashed_words(numbers: NDArray[Any], *labels: Label) -> NDArray[np.uint64]:
    """A word for each of some numbers from 0 on, all different, chosen by the labels (see :func:`derive_seed`)."""
    first, second = derive_words(2, *labels)
    # Hashed twice: with one hash, two keys would walk through the same words at another offset.
    return splitmix64(splitmix64(numbers.astype(np.uint64) ^ np.uint64(first)) ^ np.uint64(second))


class _Mixer:
    """Mixes the elements of large ranges one by one, each in the smallest power of two that holds its range.

    All words have one unsigned type: NumPy turns a mixture of int64 and uint64 into float64, which cannot tell
    neighbours above 2**53 apart.

    Args:
        sizes: Elements of each range.
        keys: What each round adds by xor, uint64 of shape ``(rounds, ranges)``; words are cut to the bits of a range.
        multipliers: What each round multiplies by; of the same shape, and made odd.
    """

    def __init__(self, sizes: list[int], keys: NDArray[np.uint64], multipliers: NDArray[np.uint64]) -> None:
        self._dtype: Any = np.uint32 if max(sizes, default=0) <= 2**32 else np.uint64
        bits = np.array([(size - 1).bit_length() for size in sizes], dtype=np.uint64)
        masks = np.uint64(2**64 - 1) >> (np.uint64(64) - bits)
        self._keys = (keys & masks).astype(self._dtype)
        self._multipliers = (multipliers & masks).astype(self._dtype) | self._dtype(1)
        self._masks = masks.astype(self._dtype)
        # A shift of at least half the bits makes x ^ (x >> shift) a bijection.
        self._shifts = ((bits + np.uint64(1)) // np.uint64(2)).astype(self._dtype)
        self._lasts = np.array([size - 1 for size in sizes], dtype=self._dtype)

    def take(self, offsets: Indices, ranges: Indices | int) -> Indices:
        """The elements at ``offsets`` of their ranges, int64 ``(n,)``; ``ranges`` are their numbers, or one for all."""
        words = offsets.astype(self._dtype)
        lasts = self._lasts[ranges]
        self._mix(words, ranges)
        outside = np.flatnonzero(words > lasts)
        while outside.size:
            again = words[outside]
            self._mix(again, ranges if isinstance(ranges, int) else ranges[outside])
            words[outside] = again
            outside = outside[again > (lasts if isinstance(ranges, int) else lasts[outside])]
        return words.astype(np.int64)

    def find(self, elements: Indices) -> Indices:
        """The offsets of elements of the first range, int64 ``(n,)``: each round is undone, the last one first."""
        mask, shift, last, multipliers = self._masks[0], self._shifts[0], self._lasts[0], self._multipliers[:, 0]
        inverses = [self._dtype(pow(int(one), -1, int(mask) + 1)) for one in multipliers]
        words, left = elements.astype(self._dtype), np.arange(elements.size)
        while left.size:
            again = words[left]
            for key, inverse in zip(self._keys[::-1, 0], inverses[::-1], strict=True):
                # With a shift of at least half the bits, xor-shift undoes itself.
                again ^= again >> shift
                again *= inverse
                again &= mask
                again ^= key
            words[left] = again
            left = left[again > last]
        return words.astype(np.int64)

    def _mix(self, words: NDArray[Any], ranges: Any) -> None:
        masks, shifts = self._masks[ranges], self._shifts[ranges]
        rounds = zip(self._keys, self._multipliers, strict=True)
        if words.size <= _LOOKED_UP_AT_ONCE:
            # Of few words, each operation costs more than its words do.
            rounds = zip(self._keys[:, ranges], self._multipliers[:, ranges], strict=True)
            ranges = ...
        for keys, multipliers in rounds:
            words ^= keys[ranges]
            words *= multipliers[ranges]
            words &= masks
            words ^= words >> shifts


class ClassShuffle:
    """A keyed permutation of each of many consecutive ranges, the classes, all applied in one go.

    A :class:`KeyedPermutation` for each class would cost Python time for each of them. Here the rounds of xor, odd
    multiplication and xor-shift run over elements of all classes together, each with the words of its class; results
    outside a class are mixed again. Classes of up to 1,024 elements are tables. An element costs the same however many
    others are asked for, and what becomes of it depends on its class and the labels alone, not on the other classes.

    Args:
        starts: The first element of each class and, last, the end of the last; int64 of shape ``(classes + 1,)``.
        *labels: Strings and integers that the keys are derived from, as in :func:`derive_seed`.

    Source:
        See :class:`KeyedPermutation`.
    """

    def __init__(self, starts: Indices, *labels: Label) -> None:
        self._starts = starts
        sizes = np.diff(starts)
        self._sorted = sizes <= _SORTED
        self._table_starts, self._table = _shuffled_table(starts, self._sorted, labels)
        # Only classes that are mixed have words: the number of each class among them.
        self._numbers = np.cumsum(~self._sorted) - 1
        numbers = starts[:-1][~self._sorted] * (2 * _CLASS_ROUNDS) + np.arange(2 * _CLASS_ROUNDS)[:, None]
        words = hashed_words(numbers, "class shuffle", *labels)
        self._mixer = _Mixer(sizes[~self._sorted].tolist(), words[:_CLASS_ROUNDS], words[_CLASS_ROUNDS:])

    def take(self, positions: Indices) -> Indices:
        """The elements at ``positions``, each of the class of its position: int64 of shape ``(n,)`` -> the same."""
        classes = np.searchsorted(self._starts, positions, side="right") - 1
        result: Indices = self._starts[classes]
        offsets = positions - result
        in_table = self._sorted[classes]
        if not in_table.any():
            result += self._mixer.take(offsets, self._numbers[classes])
            return result
        result[in_table] = self._table[self._table_starts[classes[in_table]] + offsets[in_table]]
        result[~in_table] += self._mixer.take(offsets[~in_table], self._numbers[classes[~in_table]])
        return result


def _shuffled_table(starts: Indices, chosen: NDArray[np.bool_], labels: tuple[Label, ...]) -> tuple[Indices, Indices]:
    """Shuffle the elements of each chosen class into one table.

    Returns:
        The beginning of each class in the table, and the table.
    """
    counts = np.diff(starts) * chosen
    table_starts = np.cumsum(counts) - counts
    elements = concatenated_ranges(starts[:-1], counts)
    words = hashed_words(elements, "class tables", *labels)
    return table_starts, elements[np.lexsort((words, np.repeat(np.arange(len(counts)), counts)))]


def bounds_of(sizes: Indices) -> Indices:
    """Cumulative sizes, led by 0: ``(ranges,)`` -> int64 ``(ranges + 1,)``."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def concatenated_ranges(starts: Indices, sizes: Indices, step: int = 1) -> Indices:
    """Concatenate ``start, start + step, ...`` with ``size`` elements, of every range.

    Args:
        starts: The first element of each range, int64 of shape ``(ranges,)``.
        sizes: Its number of elements, of the same shape.
        step: The distance between elements.

    Returns:
        int64 of shape ``(sizes.sum(),)``.
    """
    if not sizes.size:
        return starts
    size = int(sizes[0])
    if (sizes == size).all():
        return (starts[:, None] + np.arange(size) * step).ravel() if size != 1 else starts
    ends = np.cumsum(sizes)
    within = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
    result: Indices = np.repeat(starts, sizes) + within * step
    return result
