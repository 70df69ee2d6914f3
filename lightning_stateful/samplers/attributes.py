"""Reads the attributes of objects and what their code names outside of them, and tells containers of data from others.

Nothing of their code is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
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


# Classes, functions and modules that are looked into, at most.
_MOST_FOLLOWED = 256
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_stateful", "torchdata", "numpy", "")


def named_outside(value: object) -> dict[str, Any]:
    """Values outside of an object that the methods of its class name, by names with those of module or class.

    These are attributes of its classes, global variables of their modules, and variables of functions around them.
    Functions and classes that are named are followed, but for those of installed packages that are not the object's
    own. Of torch's and Lightning's classes nothing is looked at.
    """
    left: list[Any] = list(type(value).__mro__)
    homes = {of.__module__.partition(".")[0] for of in left}
    found: dict[str, Any] = {}
    seen: set[int] = set()
    while left and len(seen) < _MOST_FOLLOWED:
        part = left.pop()
        part = getattr(part, "__func__", getattr(part, "fget", part))
        if not isinstance(part, (type, FunctionType)) or id(part) in seen or not _is_own(part, homes):
            continue
        seen.add(id(part))
        for name, named in _named_by(part):
            if isinstance(named, (type, FunctionType, staticmethod, classmethod, property)):
                left.append(named)
            elif not callable(named) and not isinstance(named, ModuleType):
                found[name] = named
    return found


def _is_own(part: Any, homes: set[str]) -> bool:
    module = (getattr(part, "__module__", None) or "").partition(".")[0]
    if module in _LIBRARIES or module in sys.stdlib_module_names:
        return False
    return module in homes or "site-packages" not in (getattr(sys.modules.get(module), "__file__", None) or "")


def _named_by(part: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of a class, or what a function names of its module, of others, and of functions around it."""
    if isinstance(part, type):
        own = (item for item in list(vars(part).items()) if not item[0].startswith("__") or callable(item[1]))
        yield from ((f"{part.__qualname__}.{name}", value) for name, value in own)
        return
    names = _names_in(part.__code__)
    modules = [(part.__module__, part.__globals__)]
    modules += [(name, vars(of)) for name in names if isinstance(of := part.__globals__.get(name), ModuleType)]
    for module, held in modules:
        yield from ((f"{module}.{name}", held[name]) for name in names if name in held)
    for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
        with suppress(ValueError):
            yield f"{part.__qualname__}.{name}", cell.cell_contents


def _names_in(code: CodeType) -> list[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return [*code.co_names, *(name for of in inner for name in _names_in(of))]
