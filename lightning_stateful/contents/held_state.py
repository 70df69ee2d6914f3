"""Copies what functions and objects hold, to tell whether it has changed, and to put it back."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ctypes import Array, _SimpleCData
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_stateful.generators.attributes import (
    BUILT_IN,
    LIGHTNINGS,
    attributes_of,
    base_of,
    can_be_read,
    closure_of,
    defaults_of_class,
    is_users,
    listed,
    package_of,
    text_of_plain,
)
from lightning_stateful.generators.rng import GENERATORS, get_generator_state, set_generator_state

_MOST_OBJECTS, _MOST_ITEMS, _MOST_BYTES, _DEPTH = 512, 64, 2**20, 5
# Values that a batch is compared by, and those of an array in it.
_MOST_VALUES, _MOST_DIGESTED = 10_000, 65_536
_PLAIN: tuple[Any, ...] = tuple(BUILT_IN)
_CONTAINERS: tuple[type, ...] = (list, set, deque, dict, bytearray, torch.Tensor, np.ndarray, *GENERATORS)
# Values that are replaced where they change.
_REBOUND = (str, bytes, tuple, torch.Tensor, np.ndarray)
_DEFAULTS = (bool, int, float, str)
# Ends the name or text of a value that processes share.
SHARED = " in shared memory"
# Characters that a digest has at least.
_LEAST_DIGEST = 12
_LEFT_ALONE = (type, BuiltinFunctionType, ModuleType, torch.nn.Module, DataLoader, SynchronizedBase)
_LIBRARIES = LIGHTNINGS | {"lightning_stateful", "datasets"}


class HeldState:
    """Attributes, closures, containers and generators that can be reached from some objects, copied shallowly.

    Reached through ``__dict__``, closures, defaults, bound objects and short containers, in bounded depth and number.
    No method or property of the objects is called. Modules, loaders and trainers are not looked into.

    Args:
        roots: The objects.
        containers: Whether to copy containers, arrays and generators as well as attributes.
        most_bytes: Bytes of arrays and tensors up to which they are copied.

    Attributes:
        is_whole: Whether there were not too many objects to be copied.
    """

    def __init__(self, *roots: Any, containers: bool = True, most_bytes: int = _MOST_BYTES) -> None:
        self._how = containers, most_bytes
        # By the way that leads there: an object, and a copy of what it held.
        self._kept: dict[str, tuple[Any, Any]] = {}
        seen: set[int] = set()
        found = [(str(number), root, 0) for number, root in enumerate(roots)]
        while found and len(self._kept) < _MOST_OBJECTS:
            name, value, depth = found.pop(0)
            if isinstance(value, _PLAIN) or id(value) in seen or _is_left_alone(value):
                continue
            seen.add(id(value))
            if (copied := _copied(value, containers, most_bytes)) is not None:
                self._kept[name] = value, copied
            if depth < _DEPTH:
                found += [(f"{name}.{part}", held, depth + 1) for part, held in _held_by(value)]
        self.is_whole = not found

    def keep_changed(self) -> None:
        """Forget what is as it was, so that :meth:`restore` puts back the rest alone, whatever changes later."""
        kept = self._kept.items()
        self._kept = {
            name: (value, copied) for name, (value, copied) in kept if not are_same(copied, _copied(value, *self._how))
        }

    def restore(self) -> None:
        """Put everything back as it was."""
        for value, copied in self._kept.values():
            put_back(value, copied)

    def plain(self) -> dict[str, str]:
        """The numbers and strings among the attributes, but for paths, by the way that leads there, as ``repr``.

        A default in a user's class is what an instance has until another is set.
        """
        plain: dict[str, str] = {}
        for name, (value, copied) in self._kept.items():
            if isinstance(copied, dict) and not isinstance(value, (dict, FunctionType)):
                way = name.partition(".")[2]
                defaults = {key: item for key, item in defaults_of_class(value).items() if type(item) in _DEFAULTS}
                plain |= {f"{way}.{key}".removeprefix("."): text_of_plain(item) for key, item in defaults.items()}
        for name, item in self.attributes():
            if isinstance(item, (int, float, bool, str)) and not (isinstance(item, str) and "/" in item):
                plain[name] = text_of_plain(item)
        for name, (value, copied) in self._kept.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                plain[name.partition(".")[2]] = repr(copied.tolist())
        return plain

    def attributes(self) -> Iterator[tuple[str, Any]]:
        """The attributes of objects that are held, by the way that leads there."""
        for name, (value, copied) in self._kept.items():
            if isinstance(copied, dict) and not isinstance(value, (dict, FunctionType)):
                way = name.partition(".")[2]
                yield from ((f"{way}.{key}".removeprefix("."), item) for key, item in copied.items())

    def containers(self) -> dict[str, Any]:
        """Lists, deques, dicts, sets, strings, tuples and tensors that are held, by the way that leads there."""
        found: dict[str, Any] = {}
        for name, (value, copied) in self._kept.items():
            if isinstance(copied, (list, deque, set, bytearray)) or isinstance(value, dict):
                found[name] = copied
            items = copied if isinstance(copied, dict) else {}
            found |= {f"{name}.{key}": item for key, item in items.items() if isinstance(item, _REBOUND)}
        return found


def _is_left_alone(value: Any) -> bool:
    return isinstance(value, _LEFT_ALONE) or package_of(type(value)) in _LIBRARIES


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, (list, tuple, deque, dict)):
        base = base_of(value)
        items = list(dict.items(value)) if isinstance(value, dict) else enumerate(listed(value, base))
        yield from ((str(key), item) for key, item in items) if base.__len__(value) <= _MOST_ITEMS else ()
        # Of a subclass.
        yield from ((("__dict__", value.__dict__),) if hasattr(value, "__dict__") else ())
    elif not isinstance(value, (torch.Tensor, np.ndarray, *GENERATORS)):
        if isinstance(value, FunctionType):
            used = ((name, value.__globals__.get(name)) for name in value.__code__.co_names)
            yield from ((name, held) for name, held in used if isinstance(held, (list, deque, bytearray)))
            yield from closure_of(value).items()
            yield "__defaults__", value.__defaults__ or ()
            yield "__kwdefaults__", value.__kwdefaults__ or {}
        yield from (_attributes_of(value) or {}).items()


def _copied(value: Any, containers: bool, most_bytes: int) -> Any:
    """A shallow copy of what a value holds; None where nothing of it is copied."""
    if isinstance(value, torch.Tensor):
        if not can_be_read(value) or (value.nbytes > most_bytes if containers else value.numel() != 1):
            return None
        return value.detach().clone()
    if not containers and isinstance(value, _CONTAINERS):
        return None
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= most_bytes and value.flags.writeable else None
    if isinstance(value, GENERATORS):
        return get_generator_state(value)
    if isinstance(value, FunctionType):
        return closure_of(value)
    # Of a subclass what it holds as its base: methods of its own are not called.
    if isinstance(value, OrderedDict):
        return OrderedDict(OrderedDict.items(value))
    kinds: tuple[Any, ...] = (list, set, dict, bytearray)
    for kind in kinds:
        if isinstance(value, kind):
            return kind.copy(value)
    if type(value) is deque:
        return value.copy()
    return _attributes_of(value)


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """A copy of an object's ``__dict__``; of an object of the user's that has slots alone, what these hold."""
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        return dict(held)
    return (attributes_of(value) or None) if held is None and is_users(type(value).__module__) else None


def put_back(value: Any, copied: Any) -> None:
    """Put back what a shallow copy of a value has kept; methods of the value's own class are not called."""
    if isinstance(value, torch.Tensor):
        if not torch.equal(value, copied):
            value.detach().copy_(copied)
    elif isinstance(value, np.ndarray):
        value[...] = copied
    elif isinstance(value, GENERATORS):
        set_generator_state(value, copied)
    elif isinstance(value, FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        for name, held in copied.items():
            cells[name].cell_contents = held
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), copied)
    elif isinstance(value, bytearray):
        bytearray.__setitem__(value, slice(None), copied)
    elif isinstance(copied, deque):
        deque.clear(value)
        deque.extend(value, copied)
    elif isinstance(value, set):
        # Else its order may become another.
        if not set.__eq__(value, copied):
            set.clear(value)
            set.update(value, copied)
    elif isinstance(value, OrderedDict):
        # It keeps its order beside the dict that it is.
        OrderedDict.clear(value)
        for key, item in copied.items():
            OrderedDict.__setitem__(value, key, item)
    elif isinstance(value, dict):
        dict.clear(value)
        dict.update(value, copied)
    elif not hasattr(value, "__dict__"):
        for name, held in copied.items():
            object.__setattr__(value, name, held)
    else:
        held = vars(value)
        for name in held.keys() - copied.keys():
            del held[name]
        held.update(copied)


def are_same(one: Any, other: Any) -> bool:
    """Whether two values, or shallow copies of containers, are of the same content: of objects, the same objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other) if isinstance(one, (set, bytearray)) else is_same(one, other)


def is_same(was: Any, now: Any) -> bool:
    """Whether a value is the same object or an equal plain one, or a list, tuple, deque or dict of such."""
    if was is now:
        return True
    if type(was) is not type(now):
        return False
    if isinstance(was, (list, tuple, deque)):
        return len(was) == len(now) and (all(map(is_, was, now)) or all(map(is_same_item, was, now)))
    if isinstance(was, dict):
        return was.keys() == now.keys() and all(is_same_item(item, now[key]) for key, item in was.items())
    return is_same_item(was, now)


def is_same_item(was: Any, now: Any) -> bool:
    """Whether an item of a container is the same object, or an equal plain one."""
    return was is now or (type(was) is type(now) and type(was) in {*BUILT_IN, frozenset} and bool(was == now))


def values_in(batch: Any) -> list[Any]:
    """The values in a batch, with what tells whether a tensor or an array has been changed in place.

    Looked at are lists, tuples, dicts and the attributes of objects, those that are nearest first. The list holds the
    values themselves, so that another one cannot take the place in memory of one that was replaced.
    """
    found, seen, left = list[Any](), set[int](), deque([batch])
    while left and len(found) < _MOST_VALUES:
        value = left.popleft()
        found.append(value)
        if isinstance(value, torch.Tensor):
            # Tensors that are made in inference mode have no version.
            found.append(None if value.is_inference() else value._version)
        elif isinstance(value, np.ndarray):
            found.append(_sum_of_array(value))
        elif not isinstance(value, (str, bytes, int, float)) and id(value) not in seen:
            seen.add(id(value))
            left += _parts_of(value)
    return found


def _parts_of(value: Any) -> list[Any]:
    if issubclass(type(value), Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []


def _sum_of_array(array: Any) -> int:
    """A digest of an array: of all of a small one, and of some values of a large one."""
    if array.dtype.hasobject:
        return 0
    flat = array.ravel() if array.size <= _MOST_DIGESTED else array.flat[:: array.size // _MOST_DIGESTED]
    return crc32(flat.tobytes())


def changed_names(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """The names of what is another, new or gone."""
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


def shared_numbers(value: object) -> list[Any]:
    """In a list what ``multiprocessing.Value`` or ``Array``, or a ctypes object, holds: a number, or a list of such.

    An empty list for anything else, such as a structure.
    """
    held = value.get_obj() if isinstance(value, SynchronizedBase) else value
    if isinstance(held, Array):
        return [list(held)]
    return [held.value] if isinstance(held, _SimpleCData) else []


def are_equal(one: str, other: str) -> bool:
    """Whether texts of values are the same, or those of equal numbers, such as 0 and 0.0; digests are no numbers."""
    with suppress(ValueError):
        return one == other or (max(len(one), len(other)) < _LEAST_DIGEST and float(one) == float(other))
    return False


def is_untouched(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists hold the very same values; numbers, which are no objects of a batch's own, equal ones."""
    if len(before) != len(now):
        return False
    return all(one is other or (type(one) is int and one == other) for one, other in zip(before, now, strict=True))


def is_handed_on(read: Any, held: list[Any], batch: Any) -> bool:
    """Whether a batch is one that was read, or another list, tuple or dict with the same in it, all of it as it was.

    Args:
        read: The batch that was read.
        held: Its :func:`values_in`, from when it was read.
        batch: The batch that may be it.
    """
    is_repacked = any(isinstance(read, kinds) and isinstance(batch, kinds) for kinds in ((list, tuple), dict))
    return (read is batch or is_repacked) and is_untouched(held[1:], values_in(batch)[1:])
