"""Reads the attributes that objects hold, without calling their code, and tells containers of data from others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from lightning_stateful.samplers.rng import GENERATORS

T = TypeVar("T")
# Objects in longer lists are data; in a very long list some items say what kind of items it holds.
LONG, VERY_LONG, SPREAD = 1024, 2**16, 4096
PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), range, np.int64, np.int32, np.float64, np.bool_})


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes that an object holds in its ``__dict__`` and slots, but Lightning's notes of arguments."""
    held: dict[str, Any] = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                held[name] = object.__getattribute__(value, name)
    return {name: item for name, item in held.items() if not str(name).startswith(("__pl_saved", "__dict__"))}


def is_data(values: Iterable[Any]) -> bool:
    """Whether the items of a container are plain, or so many that they are data."""
    items: Sequence[Any] = values if isinstance(values, (list, tuple)) else list(values)
    kinds = set(map(type, some(items, VERY_LONG)))
    return kinds <= PLAIN or (len(items) > LONG and not any(issubclass(kind, GENERATORS) for kind in kinds))


def some(values: Sequence[T], most: int) -> Sequence[T]:
    """All of them, or some thousand evenly apart where there are more than ``most``."""
    return values if len(values) <= most else values[:: len(values) // SPREAD]
