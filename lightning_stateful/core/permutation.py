"""A keyed permutation of ``range(n)`` with random access both ways and constant memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.ranges import Indices, concatenated_ranges
from lightning_stateful.core.seeding import Label, derive_words
from lightning_stateful.errors import ConfigurationError

MAX_LENGTH = 2**40
_TABLE_LENGTH = 2**16
# With 6, one key in 130 shows at strides of n/2 just above the table's length; with 8, none of 20,000 does.
_NUM_ROUNDS = 8


class KeyedPermutation:
    """A bijection of ``range(length)`` chosen by ``key``.

    Up to 65,536 elements the permutation is the argsort of distinct hashed words, held as a table (at most 0.5 MB).
    Above, each element is mixed on its own by rounds of xor, odd multiplication and xor-shift in the smallest power of
    two that holds ``length``; results that fall outside are mixed again until they fall inside ("cycle walking"),
    which takes fewer than two tries on average. Every round is a bijection of the power of two, so the whole is a
    bijection of ``range(length)``, and it runs backwards as well.

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
        self._forward: _Table | _Mixer = _Table(length, key) if length <= _TABLE_LENGTH else _Mixer(length, key)

    def take(self, positions: NDArray[Any]) -> Indices:
        """Elements at ``positions``: int array of any shape in ``range(length)`` -> int64 array of the same shape."""
        return self._apply(self._forward.take, positions)

    def positions_of(self, indices: NDArray[Any]) -> Indices:
        """Positions at which ``indices`` stand; the inverse of :meth:`take`, with the same shapes and errors."""
        return self._apply(self._forward.positions_of, indices)

    def _apply(self, function: Callable[[Indices], Indices], values: NDArray[Any]) -> Indices:
        """Check values, and call ``function`` with them as a flat int64 array."""
        given = np.asarray(values)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"positions and indices are integers, got an array of {given.dtype}")
        flat = given.astype(np.int64)
        if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= self.length):
            raise IndexError(f"values from {flat.min()} to {flat.max()} lie outside range({self.length})")
        return function(flat.ravel()).reshape(flat.shape)


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


class _Table:
    """A small permutation, sorted once."""

    def __init__(self, length: int, key: int) -> None:
        words = hashed_words(np.arange(length), "permutation table", length, key)
        # No two words are equal, so every sorting algorithm gives this order; the default is the fastest.
        self._table: Indices = np.argsort(words).astype(np.int64)

    def take(self, positions: Indices) -> Indices:
        return self._table[positions]

    def positions_of(self, indices: Indices) -> Indices:
        return self._inverse[indices]

    @cached_property
    def _inverse(self) -> Indices:
        inverse = np.empty_like(self._table)
        inverse[self._table] = np.arange(self._table.size)
        return inverse


class _Mixer:
    """A large permutation, mixed element by element in ``range(2**bits)``.

    All words have one unsigned type: NumPy turns a mixture of int64 and uint64 into float64, which cannot tell
    neighbours above 2**53 apart.
    """

    def __init__(self, length: int, key: int) -> None:
        bits = (length - 1).bit_length()
        self._dtype: Any = np.uint32 if bits <= 32 else np.uint64
        self._last = self._dtype(length - 1)
        self._mask = self._dtype(2**bits - 1)
        # A shift of at least half the bits makes x ^ (x >> shift) its own inverse.
        self._shift = self._dtype((bits + 1) // 2)
        words = derive_words(2 * _NUM_ROUNDS, "permutation mixer", length, key)
        modulus = 2**bits
        odd = [(word % modulus) | 1 for word in words[1::2]]
        self._keys = [self._dtype(word % modulus) for word in words[0::2]]
        self._multipliers = [self._dtype(multiplier) for multiplier in odd]
        self._inverses = [self._dtype(pow(multiplier, -1, modulus)) for multiplier in odd]

    def take(self, positions: Indices) -> Indices:
        return self._walk(positions, self._mix)

    def positions_of(self, indices: Indices) -> Indices:
        return self._walk(indices, self._unmix)

    def _walk(self, values: Indices, mix: Callable[[NDArray[Any]], None]) -> Indices:
        """Mix each value in place, again and again until it lies in ``range(length)``."""
        words = values.astype(self._dtype)
        mix(words)
        outside = np.flatnonzero(words > self._last)
        while outside.size:
            again = words[outside]
            mix(again)
            words[outside] = again
            outside = outside[again > self._last]
        return words.astype(np.int64)

    def _mix(self, words: NDArray[Any]) -> None:
        scratch = np.empty_like(words)
        for key, multiplier in zip(self._keys, self._multipliers, strict=True):
            np.bitwise_xor(words, key, out=words)
            np.multiply(words, multiplier, out=words)
            np.bitwise_and(words, self._mask, out=words)
            np.right_shift(words, self._shift, out=scratch)
            np.bitwise_xor(words, scratch, out=words)

    def _unmix(self, words: NDArray[Any]) -> None:
        scratch = np.empty_like(words)
        for key, inverse in zip(reversed(self._keys), reversed(self._inverses), strict=True):
            np.right_shift(words, self._shift, out=scratch)
            np.bitwise_xor(words, scratch, out=words)
            np.multiply(words, inverse, out=words)
            np.bitwise_and(words, self._mask, out=words)
            np.bitwise_xor(words, key, out=words)


# Up to here elements are sorted by hashed words: mixing is no good shuffle of few. With 8 rounds some keys show at
# strides of half a class, with 10 none does.
_SORTED = 2**10
_CLASS_ROUNDS = 10


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
        # Only classes that are mixed have words: the column of each class among them.
        self._columns = np.cumsum(~self._sorted) - 1
        mixed = sizes[~self._sorted]
        self._dtype: Any = np.uint32 if mixed.max(initial=0) <= 2**32 else np.uint64
        bits = np.array([(size - 1).bit_length() for size in mixed.tolist()], dtype=np.uint64)
        masks = np.uint64(2**64 - 1) >> (np.uint64(64) - bits)
        numbers = starts[:-1][~self._sorted] * (2 * _CLASS_ROUNDS) + np.arange(2 * _CLASS_ROUNDS)[:, None]
        words = hashed_words(numbers, "class shuffle", *labels).reshape(2, _CLASS_ROUNDS, len(mixed))
        keys = (words & masks).astype(self._dtype)
        self._keys, self._multipliers = keys[0], keys[1] | self._dtype(1)
        self._masks = masks.astype(self._dtype)
        # A shift of at least half the bits makes x ^ (x >> shift) a bijection.
        self._shifts = ((bits + np.uint64(1)) // np.uint64(2)).astype(self._dtype)
        self._lasts = (mixed - 1).astype(self._dtype)

    def take(self, positions: Indices) -> Indices:
        """The elements at ``positions``, each of the class of its position: int64 of shape ``(n,)`` -> the same."""
        classes = np.searchsorted(self._starts, positions, side="right") - 1
        result: Indices = self._starts[classes]
        offsets = positions - result
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
