"""A keyed permutation of ``range(n)`` with random access both ways and constant memory."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.seeding import Label, derive_words

Indices = NDArray[np.int64]

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
        self._forward: Any = _Table(length, key) if length <= _TABLE_LENGTH else _Mixer(length, key)

    def take(self, positions: NDArray[Any]) -> Indices:
        """Elements at ``positions``: int array of any shape in ``range(length)`` -> int64 array of the same shape."""
        return self._apply(self._forward.take, positions)

    def positions_of(self, indices: NDArray[Any]) -> Indices:
        """Positions at which ``indices`` stand; the inverse of :meth:`take`, with the same shapes and errors."""
        return self._apply(self._forward.positions_of, indices)

    def _apply(self, function: Any, values: NDArray[Any]) -> Indices:
        given = np.asarray(values)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"positions and indices are integers, got an array of {given.dtype}")
        flat = given.astype(np.int64)
        if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= self.length):
            raise IndexError(f"values from {flat.min()} to {flat.max()} lie outside range({self.length})")
        result: Indices = function(flat.ravel()).reshape(flat.shape)
        return result


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

    def _walk(self, values: Indices, mix: Any) -> Indices:
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
