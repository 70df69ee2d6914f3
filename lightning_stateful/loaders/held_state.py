"""Copies what functions and objects hold, to tell whether it has changed and to put it back."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_stateful.loaders.dataset_content import bytes_of
from lightning_stateful.samplers.rng import GENERATORS

_MOST_OBJECTS, _MOST_ITEMS, _MOST_BYTES, _DEPTH = 512, 64, 2**20, 5
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_LEFT_ALONE = (type, BuiltinFunctionType, ModuleType, torch.nn.Module, DataLoader)
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_stateful", "datasets")


class HeldState:
    """Attributes, closure cells, containers and generators that can be reached from some objects, copied shallowly.

    Reached through ``__dict__``, cells, defaults, bound objects and short containers, in bounded depth and number. No
    method or property of the objects is called. Modules, loaders and trainers are not looked into.

    Args:
        roots: The objects.
    """

    def __init__(self, *roots: Any) -> None:
        # By the way that leads there: an object, and a copy of what it held.
        self._kept: dict[str, tuple[Any, Any]] = {}
        seen: set[int] = set()
        found = [(str(number), root, 0) for number, root in enumerate(roots)]
        while found and len(self._kept) < _MOST_OBJECTS:
            name, value, depth = found.pop(0)
            if isinstance(value, _PLAIN) or id(value) in seen or _is_left_alone(value):
                continue
            seen.add(id(value))
            if (copied := _copied(value)) is not None:
                self._kept[name] = value, copied
            if depth < _DEPTH:
                found += [(f"{name}.{part}", held, depth + 1) for part, held in _held_by(value)]

    def restore(self) -> None:
        """Put everything back as it was."""
        for value, copied in self._kept.values():
            _put_back(value, copied)

    def settings(self) -> str:
        """Digest of the numbers and words among the attributes, but for paths."""
        plain = []
        for name, (value, copied) in self._kept.items():
            items = copied.items() if isinstance(copied, dict) and not isinstance(value, dict) else ()
            shown = [(key, item) for key, item in items if isinstance(item, (int, float, bool, str))]
            plain += [f"{name}.{key}={item!r}" for key, item in shown if not (isinstance(item, str) and "/" in item)]
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                plain.append(f"{name}={copied.tolist()}")
        return hashlib.blake2b("\n".join(plain).encode(errors="surrogatepass"), digest_size=6).hexdigest()

    def containers(self) -> dict[str, Any]:
        """Lists, deques, dicts, sets, tensors, arrays and strings, as they were, by the way that leads there."""
        found: dict[str, Any] = {}
        for name, (value, copied) in self._kept.items():
            if isinstance(value, (list, deque, dict, set, bytearray)):
                found[name] = copied
            elif isinstance(copied, dict):
                kinds = (str, bytes, tuple, torch.Tensor, np.ndarray)
                found |= {f"{name}.{key}": item for key, item in copied.items() if isinstance(item, kinds)}
            elif isinstance(value, CellType) and isinstance(copied[0], (str, bytes, tuple, torch.Tensor, np.ndarray)):
                found[name] = copied[0]
        return found


def _is_left_alone(value: Any) -> bool:
    return isinstance(value, _LEFT_ALONE) or type(value).__module__.partition(".")[0] in _LIBRARIES


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, CellType):
        yield from (("", held) for held in _contents(value))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((str(number), item) for number, item in enumerate(value) if len(value) <= _MOST_ITEMS)
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items() if len(value) <= _MOST_ITEMS)
    elif not isinstance(value, (torch.Tensor, np.ndarray, *GENERATORS)):
        if isinstance(value, FunctionType):
            yield from zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield "__defaults__", value.__defaults__ or ()
            yield "__kwdefaults__", value.__kwdefaults__ or {}
        held = getattr(value, "__dict__", {})
        yield from held.items() if isinstance(held, dict) else ()


def _copied(value: Any) -> Any:
    """A shallow copy of what a value holds; None where nothing of it is copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() * value.element_size() <= _MOST_BYTES else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _MOST_BYTES and value.flags.writeable else None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, CellType):
        return _contents(value)
    if type(value) in (list, set, deque, dict, bytearray):
        return value.copy()
    held = getattr(value, "__dict__", None)
    return dict(held) if isinstance(held, dict) and not isinstance(value, FunctionType) else None


def _put_back(value: Any, copied: Any) -> None:
    if isinstance(value, torch.Tensor):
        if not torch.equal(value, copied):
            value.detach().copy_(copied)
    elif isinstance(value, np.ndarray):
        value[...] = copied
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = copied
    elif isinstance(value, random.Random):
        value.setstate(copied)
    elif isinstance(value, (torch.Generator, np.random.RandomState)):
        value.set_state(copied)
    elif isinstance(value, CellType):
        if copied:
            value.cell_contents = copied[0]
    elif isinstance(value, (list, bytearray)):
        value[:] = copied
    elif isinstance(value, deque):
        value.clear()
        value.extend(copied)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(copied)
    else:
        held = vars(value)
        for name in held.keys() - copied.keys():
            del held[name]
        held.update(copied)


class CollateWatch:
    """Tells whether a ``collate_fn`` carries something over from batch to batch.

    A list, deque, string, tensor or tuple that it holds has another content after each of several batches, and not only
    more of it, as a cache or a list of what was seen. Ask before each batch; it is looked at for the first few.

    Args:
        collate_fn: The function.
    """

    _NUM_LOOKS = 6

    def __init__(self, collate_fn: Any) -> None:
        self.collate_fn = collate_fn
        self.looks_left = self._NUM_LOOKS
        self._before: dict[str, bytes] = {}
        # Changes so far, and those that were not only more, by the way that leads there.
        self._changes: dict[str, list[bool]] = {}

    def look(self) -> str:
        """Look at what it holds now; the name of what it has carried over, if that is known by now, else empty."""
        self.looks_left -= 1
        now = {name: _content(value) for name, value in HeldState(self.collate_fn).containers().items()}
        if self.looks_left < self._NUM_LOOKS - 1:
            for name in now.keys() | self._before.keys():
                before, after = self._before.get(name, b""), now.get(name, b"")
                if before != after:
                    self._changes.setdefault(name, []).append(not after.startswith(before))
        self._before = now
        if self.looks_left:
            return ""
        found = [name for name, was_replaced in self._changes.items() if self._is_carried(was_replaced)]
        return min(found, key=len).rpartition(".")[2] or "a closure" if found else ""

    def _is_carried(self, was_replaced: list[bool]) -> bool:
        # The first batch fills an empty buffer; once in a while a batch leaves the very same rest.
        return len(was_replaced) >= self._NUM_LOOKS - 2 and sum(was_replaced) >= 2


def _content(value: Any) -> bytes:
    if isinstance(value, (dict, set)):
        # A cache that has grown has the same entries first.
        value = list(value)
    if isinstance(value, (list, tuple, deque)):
        return b"".join(b"|" + b"".join(bytes_of(item)) for item in list(value)[:4096])
    return value.encode(errors="surrogatepass") if isinstance(value, str) else b"".join(bytes_of(value))
