"""Finds the random generators that a dataset or its transforms hold, and seeds them for each batch."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.samplers.attributes import PLAIN, attributes_of, is_data
from lightning_stateful.samplers.generator_states import GeneratorState, comparable_state, identity_of, state_for

T = TypeVar("T")
_MOST_OBJECTS, _MOST_DEEP = 20_000, 24
# Batches in a row before which an object was replaced, after which it is no longer looked at.
_MOST_REPLACED = 8
_LEFT_OUT = (type, ModuleType, torch.Tensor, np.ndarray, Sampler, DataLoader)
# Objects of these packages, a Trainer or a logger among them, are none of a dataset's own.
_LIBRARIES = frozenset({"lightning", "pytorch_lightning", "logging", "threading", "multiprocessing", "concurrent"})
# Modules of Python's own, and of this package.
_NOT_USERS = (sys.stdlib_module_names | {__name__.partition(".")[0]}) - {"__main__"}


class _Link(NamedTuple):
    """The place of an object, ``container[key]``; a container of None cannot be looked at again cheaply."""

    container: Any
    key: Any
    value: Any
    above: _Link | None


class HeldGenerators:
    """Random generators that objects hold, seeded before each batch from (seed of the batch, place).

    They are ``numpy.random.Generator``, ``numpy.random.RandomState``, ``random.Random`` and ``torch.Generator`` objects
    of the CPU, and no subclasses of these. They are looked for in attributes, slots, lists, dicts, partials, closures,
    bound methods, default arguments, attributes of classes, and module variables that functions name which are not part
    of an installed package. No property and no method of the objects is called. A place is the shortest way there.

    They are looked for once after :meth:`begin`, before and after the first batch: one that was made while it was read
    is seeded, and the batch read once more. They are looked for again where one has been replaced.

    A dataset may draw an order of all its samples while the first is read, and keep it. Seeded by the batch, workers
    would each keep another. The generators of an object that does so are left as they are, and the batch is read again.

    Args:
        is_repeatable: Whether a batch may be read once more. False where that would move a stream on, or change samples
            twice.
        **roots: The objects by name, for example ``dataset`` and ``collate_fn``.

    Attributes:
        is_idle: Whether nothing was found, so that reading takes no more than without.

    Warns:
        StatefulWarning: Generators are left as they are.
    """

    def __init__(self, *, is_repeatable: bool = True, **roots: Any) -> None:
        self._is_repeatable, self._roots = is_repeatable, roots
        # Objects whose generators are left as they are.
        self._spared: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Look for generators anew at the next batch."""
        self.is_idle, self._is_first, self._num_replaced = False, True, 0
        self._found: dict[int, GeneratorState] = {}
        self._states: list[GeneratorState] = []
        self._watched: list[tuple[Any, Any, Any]] = []
        self._left: set[int | None] = set()
        self._holders: list[Any] = []
        self._ignored: set[tuple[int, Any]] = set()

    def __getstate__(self) -> dict[str, Any]:
        # States are addresses in the memory of this process.
        return {"_roots": self._roots, "_spared": self._spared, "_is_repeatable": self._is_repeatable}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.begin()

    def __call__(self, seed: int, read: Callable[[], T]) -> T:
        """Run ``read()`` with the generators seeded, which stay where it leaves them."""
        if self._is_first:
            self._find()
            return self._read_first(seed, read)
        self._look_again()
        self._seed(seed)
        return read()

    def isolated(self, seed: int, read: Callable[[], T]) -> T:
        """Run ``read()`` with the generators seeded, and put them back."""
        if self._is_first:
            return self.put_back_after(partial(self._read_first, seed, read))
        self._look_again()
        if len(self._states) == 1:
            # As below, in half the time.
            state = self._states[0]
            held = state.exchange(seed)
            try:
                return read()
            finally:
                state.put(held)
        before = [(state, state.exchange(seed)) for state in self._states]
        try:
            return read()
        finally:
            for state, held in before:
                state.put(held)

    def put_back_after(self, read: Callable[[], T]) -> T:
        """Run ``read()``, and put the generators back to where they are now."""
        if self._is_first:
            self._find()
        before = [(state, state.get()) for state in self._states]
        try:
            return read()
        finally:
            for state, held in before:
                if identity_of(state.generator) not in self._left:
                    state.put(held)

    def present(self) -> list[Any]:
        """The present states, equal as long as nothing is drawn."""
        if self._is_first:
            self._find()
            self._is_first = False
        return [comparable_state(state) for state in self._states]

    def _seed(self, seed: int) -> None:
        for state in self._states:
            state.seed(seed)

    def _look_again(self) -> None:
        """Look for generators again, where what was found has been replaced."""
        try:
            for container, key, value in self._watched:
                if container[key] is not value:
                    break
            else:
                if self._num_replaced:
                    self._num_replaced = 0
                return
        except (LookupError, TypeError):
            pass
        self._num_replaced += 1
        if self._num_replaced > _MOST_REPLACED:
            # It is made anew for each batch.
            self._ignored |= {
                (id(container), key) for container, key, value in self._watched if not _is_at(container, key, value)
            }
        self._find()

    def _read_first(self, seed: int, read: Callable[[], T]) -> T:
        """Read a batch; once more if that has shown generators to be seeded, or to be left alone."""
        known, states = self._found, [(state, state.get()) for state in self._found.values()]
        before = [(holder, dict(vars(holder))) for holder in self._holders]
        self._seed(seed)
        result = read()
        if kept := list(self._orders_in(before)) if self._is_repeatable else []:
            orders = [vars(holder)[name] for holder, name in kept]
            _restore(before, states)
            # Where the generators stand: as without this package.
            read()
            for (holder, name), order in zip(kept, orders, strict=True):
                if list(vars(holder).get(name, ())) != list(order):
                    self._spared.append(holder)
                    _warn(holder, name)
            _restore(before, states)
        self._find()
        if self._is_repeatable and (kept or not self._found.keys() <= known.keys()):
            self._seed(seed)
            result = read()
        self._is_first, self.is_idle = False, not self._found
        return result

    def _orders_in(self, before: list[tuple[Any, dict[str, Any]]]) -> Iterator[tuple[Any, str]]:
        """The objects, and names of attributes, that hold an order of all samples that they did not hold before."""
        for holder, held in before:
            for name, value in vars(holder).items():
                is_new = value is not held.get(name) and _is_order(value)
                if is_new and len(value) in [_length(one) for one in (holder, self._roots.get("dataset"))]:
                    yield holder, name

    def _find(self) -> None:
        """Look for generators, those that are nearest first."""
        self._found, self._holders = {}, []
        self._left = {0, *(identity_of(value) for holder in self._spared for value in vars(holder).values())}
        links: dict[tuple[int, Any], _Link] = {}
        queue: deque[tuple[tuple[str, ...], _Link, Any]] = deque()
        queue.extend(((name,), _Link(None, name, root, None), None) for name, root in self._roots.items())
        seen: set[int] = set()
        while queue and len(seen) < _MOST_OBJECTS:
            path, link, holder = queue.popleft()
            value = link.value
            identity = identity_of(value)
            if identity is not None:
                self._note(identity, path, link, holder, links)
            elif id(value) not in seen and len(path) < _MOST_DEEP:
                parts = parts_of(value)
                if id(type(value)) not in seen and parts is not None:
                    parts += parts_of_class(type(value))
                seen |= {id(value), id(type(value))}
                for name, container, key, part in parts or ():
                    if type(part) not in PLAIN and len(queue) + len(seen) < _MOST_OBJECTS:
                        queue.append(((*path, name), _Link(container, key, part, link), value))
        self._states = list(self._found.values())
        self._watched = [link[:3] for place, link in links.items() if place not in self._ignored]

    def _note(self, identity: int, path: tuple[str, ...], link: _Link, holder: Any, links: dict[Any, _Link]) -> None:
        """Note a generator, and what leads there."""
        above: _Link | None = link
        while above is not None:
            if above.container is not None:
                links.setdefault((id(above.container), above.key), above)
            above = above.above
        if identity in self._left:
            return
        if not any(holder is one for one in self._holders) and hasattr(holder, "__dict__"):
            self._holders.append(holder)
        if identity not in self._found:
            self._found[identity] = state_for(link.value, derive_seed("held", *path))


def parts_of(value: Any) -> list[tuple[str, Any, Any, Any]] | None:
    """The parts of an object: name, container, key in it, and the part. None for what is not looked into."""
    if isinstance(value, _LEFT_OUT) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    if isinstance(value, FunctionType):
        return [*_variables_of(value), *_held_in(vars(value))]
    if isinstance(value, MethodType):
        return [("self", None, None, value.__self__), ("function", None, None, value.__func__)]
    if isinstance(value, BuiltinFunctionType):
        return [("self", None, None, value.__self__)]
    if isinstance(value, partial):
        arguments = (value.func, value.args, value.keywords)
        return [(str(number), None, None, part) for number, part in enumerate(arguments)]
    parts: list[tuple[str, Any, Any, Any]] = []
    if isinstance(value, dict):
        if not is_data(list(dict.values(value))):
            for number, (key, part) in enumerate(dict.items(value)):
                parts.append((key if type(key) is str else str(number), value, key, part))
        if type(value) is dict:
            return parts
    elif isinstance(value, (list, tuple, deque)):
        kind: Any = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
        items = list(kind.__iter__(value))
        parts = [] if is_data(items) else [(str(number), value, number, part) for number, part in enumerate(items)]
        if type(value) is kind:
            return parts
    own, kind = getattr(value, "__dict__", None), type(value)
    if not _has_slots(kind) and PLAIN.issuperset(map(type, (own or {}).values())):
        # As most of very many samples.
        return parts
    held = attributes_of(value)
    # A name says where an attribute is, and not when it was set.
    names = sorted(name for name in held if type(name) is str)
    return parts + [(name, own if name in (own or ()) else None, name, held[name]) for name in names]


@lru_cache(maxsize=4096)
def _has_slots(kind: type) -> bool:
    return any("__slots__" in vars(one) for one in kind.__mro__)


def _held_in(names: dict[str, Any]) -> list[tuple[str, Any, Any, Any]]:
    return [(name, names, name, names[name]) for name in sorted(names)]


def _variables_of(function: FunctionType) -> list[tuple[str, Any, Any, Any]]:
    """The parts of a function: closure, default arguments, and variables of its module that it names."""
    parts: list[tuple[str, Any, Any, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            parts.append((name, None, None, cell.cell_contents))
    for number, default in enumerate(function.__defaults__ or ()):
        parts.append((str(number), None, None, default))
    parts += _held_in(function.__kwdefaults__ or {})
    if _is_users(function.__module__):
        variables = function.__globals__
        named = [name for name in names_in(function.__code__) if name in variables]
        parts += [(name, variables, name, variables[name]) for name in named]
    return parts


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> list[str]:
    """The variables and attributes that code names, with those of functions in it."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in names_in(part)]
    return sorted({*code.co_names, *inner})


@lru_cache(maxsize=1024)
def _is_users(module: str | None) -> bool:
    """Whether a module is none of Python's or of this package, and of no installed one."""
    if module is None or module.partition(".")[0] in _NOT_USERS:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def parts_of_class(kind: type) -> list[tuple[str, Any, Any, Any]]:
    """Generators that are attributes of a class, and the functions of one that is the user's."""
    parts: list[tuple[str, Any, Any, Any]] = []
    for one in kind.__mro__[:-1]:
        for name, part in vars(one).items():
            function = part.__func__ if isinstance(part, (staticmethod, classmethod)) else part
            if isinstance(function, FunctionType):
                if _is_users(function.__module__):
                    parts.append((name, None, None, function))
            elif identity_of(part) is not None:
                parts.append((name, vars(one), name, part))
    return sorted(parts, key=lambda part: part[0])


def _is_order(value: Any) -> bool:
    """Whether this may be an order of samples: distinct integers."""
    if isinstance(value, np.ndarray):
        is_integer = value.ndim == 1 and value.dtype.kind in "iu"
    elif isinstance(value, torch.Tensor):
        is_integer = value.ndim == 1 and not (value.is_floating_point() or value.is_complex())
    else:
        is_integer = type(value) in (list, tuple) and all(isinstance(item, (int, np.integer)) for item in value)
    return is_integer and len(value) > 1 and len({int(item) for item in value}) == len(value)


def _length(value: Any) -> int:
    try:
        return len(value)
    except Exception:
        return -1


def _is_at(container: Any, key: Any, value: Any) -> bool:
    try:
        return container[key] is value
    except (LookupError, TypeError):
        return False


def _restore(attributes: list[tuple[Any, dict[str, Any]]], states: list[tuple[GeneratorState, Any]]) -> None:
    for holder, held in attributes:
        vars(holder).clear()
        vars(holder).update(held)
    for state, value in states:
        state.put(value)


def _warn(holder: Any, name: str) -> None:
    kind = type(holder).__qualname__
    warnings.warn(
        f"{kind} draws an order of its samples, {kind}.{name}, from a generator that it holds while a batch is read, "
        "and keeps it. So that all workers keep the same, its generators are left as they are: what else it draws from "
        "them is not seeded, and does not come again on a resume. Draw the order in __init__.",
        StatefulWarning,
        stacklevel=4,
    )
