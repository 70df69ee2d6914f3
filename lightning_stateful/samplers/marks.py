"""Digests of what a sampler yielded, by which another run of it is known to be the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np
import torch

# Marks stand at the slots 0, 1, 2, 4, 8 and so on, then at the multiples of this.
STRIDE = 8192

_INTEGERS = (int, np.integer)


def next_mark(slot: int) -> int:
    """The first marked slot at or after ``slot``."""
    if slot >= STRIDE:
        return -(-slot // STRIDE) * STRIDE
    return slot if slot < 2 else 1 << (slot - 1).bit_length()


def digest(item: Any, before: str = "") -> str:
    """Hex digest of a slot, chained to that of an earlier one; equal for equal slots in every process.

    Slots are told apart by the numbers, strings, arrays and containers in them; of another object its ``id`` attribute
    counts, or else what it contains, or only its type.
    """
    if type(item) is int:
        return hashlib.blake2b(b"%bi%d;" % (before.encode(), item), digest_size=8).hexdigest()
    hashed = hashlib.blake2b(before.encode(), digest_size=8)
    _feed(hashed, item, 0)
    return hashed.hexdigest()


def _feed(hashed: Any, item: Any, depth: int) -> None:
    if isinstance(item, (int, np.integer)):
        hashed.update(b"i%d;" % int(item))
    elif isinstance(item, (str, bytes, float, type(None))):
        hashed.update(f"{type(item).__name__}{item!r};".encode())
    elif isinstance(item, (np.ndarray, torch.Tensor)):
        _feed(hashed, item.tolist(), depth)
    elif isinstance(item, (list, tuple, range)) and all(issubclass(kind, _INTEGERS) for kind in set(map(type, item))):
        # The common case, in one go: an index is the same index in whatever type.
        hashed.update(repr(list(map(int, item))).encode())
    elif isinstance(item, Mapping):
        _feed(hashed, list(item.items()), depth + 1)
    elif isinstance(identity := getattr(item, "id", None), (str, int)):
        _feed(hashed, identity, depth)
    elif isinstance(item, Iterable) and isinstance(item, Sized) and depth < 8:
        hashed.update(b"[%d" % len(item))
        for part in item:
            _feed(hashed, part, depth + 1)
    else:
        hashed.update(type(item).__qualname__.encode())
