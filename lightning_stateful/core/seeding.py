"""Seeds derived by hashing labels, never by adding them.

Sums collide: seed 1 at epoch 2 would be seed 2 at epoch 1. A hash of the labels keeps every combination apart.
"""

from __future__ import annotations

import hashlib
import operator
from functools import lru_cache
from typing import SupportsIndex

Label = str | SupportsIndex


def derive_seed(*labels: Label) -> int:
    """Hash labels to one 64-bit seed.

    Args:
        *labels: Strings and integers that say what the seed is for, for example ``("shuffle", seed, epoch)``. Their
            order, number and types matter: ``("a", 1)``, ``("a", "1")`` and ``("a1",)`` give three seeds.

    Returns:
        An integer in ``range(2**64)``, equal on every platform and Python version.

    Raises:
        TypeError: A label is neither a string nor an integer.

    Source:
        BLAKE2b (RFC 7693) over length-prefixed, type-tagged labels.
    """
    return int.from_bytes(hashlib.blake2b(_encode(labels), digest_size=8).digest(), "little")


def derive_seed_within(first: tuple[Label, ...], *labels: Label) -> int:
    """The seed ``derive_seed(*first, *labels)``, in less time where many seeds have the same first labels."""
    hashed = _hash_of(first).copy()
    hashed.update(_encode(labels))
    return int.from_bytes(hashed.digest(), "little")


@lru_cache(maxsize=64)
def _hash_of(labels: tuple[Label, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(_encode(labels), digest_size=8)


def derive_words(count: int, *labels: Label) -> list[int]:
    """Hash labels to ``count`` independent 64-bit words (SHAKE-256 of the same encoding)."""
    stream = hashlib.shake_256(_encode(labels)).digest(8 * count)
    return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(count)]


def mixed_seed(seed: int, *numbers: int) -> int:
    """Mix numbers into a derived seed: one seed for each of very many batches, much faster than a hash for each.

    Args:
        seed: A seed from :func:`derive_seed`, for what the batches have in common.
        *numbers: Integers below 2**64 that tell the batches apart; equally many for each.

    Returns:
        An integer in ``range(2**64)``, equal on every platform.

    Source:
        The finalizer of SplitMix64, Steele, Lea and Flood, OOPSLA 2014, once for each number.
    """
    for number in numbers:
        seed = (seed + number + 0x9E3779B97F4A7C15) & _WORD
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _WORD
        seed ^= seed >> 31
    return seed


def loader_seed(seed: int, path: str) -> int:
    """The seed of one of several loaders that are served side by side, so that no two of them draw alike.

    Args:
        seed: The seed that all of them share.
        path: The loader's place in the user's list or dict of loaders, with dots; empty for a single loader.

    Returns:
        ``seed`` itself for a single loader.
    """
    return derive_seed("loader", seed, path) if path else seed


_WORD = 2**64 - 1


def _encode(labels: tuple[Label, ...]) -> bytes:
    # The tag keeps 1 and "1" apart, the length in bytes keeps ("ab", "c") and ("a", "bc") apart.
    text = ""
    for label in labels:
        if isinstance(label, str):
            text += f"s{len(label.encode())}:{label}"
        else:
            number = str(operator.index(label))
            text += f"i{len(number)}:{number}"
    return text.encode()
