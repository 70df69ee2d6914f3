"""Variables, containers and random generators outside of a dataset that its code reaches: read, compared, put back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_stateful.contents.held_state import put_back
from lightning_stateful.generators.attributes import (
    PLAIN,
    can_be_read,
    defaults_of,
    is_lightnings,
    is_users,
    named_in_environment,
    names_in,
    reached,
    variables_in,
)
from lightning_stateful.generators.rng import GENERATORS, get_generator_state, state_of_generator
from lightning_stateful.sampler_copies.sampler_copy import shown
from lightning_stateful.samplers.fingerprint import hex_digest

# A cell, module or class, and the name of a variable in it.
_Variable: TypeAlias = tuple[Any, str]
_NOTHING = object()
# Longer containers and larger arrays are data.
_MOST_ITEMS, _MOST_BYTES = 2**16, 2**20
_BASES: tuple[Any, ...] = (list, dict, set, deque, bytearray)
_OF_DATA: tuple[Any, ...] = (*_BASES, *PLAIN, tuple, np.ndarray, torch.Tensor)


class OutsideValues:
    """What a dataset's code can change outside of the dataset, as it is now: copies of the dataset share it.

    These are variables of functions, modules and classes of the user's, default arguments, and containers, objects and
    random generators in them. They are found through all that :func:`~.attributes.reached` goes through.

    Args:
        dataset: The dataset.
        objects: Whether to look at all objects of the user's that it reaches, those too that copies do not share.

    Attributes:
        can_be_restored: Whether none of them is an iterator, which nobody can put back.
    """

    def __init__(self, dataset: Any, *, objects: bool = False) -> None:
        self._objects = objects
        self._variables: dict[str, tuple[_Variable, Any]] = {}
        self._contents: dict[int, tuple[str, Any, Any]] = {}
        # Containers that are default arguments, and variables of the environment.
        self._defaults: dict[str, tuple[FunctionType, Any]] = {}
        self._environment: dict[str, str | None] = {}
        # The dataset itself is left out, and not held: a history of its passes ends with it.
        self._kinds: set[type] = set()
        self._left_out = id(dataset)
        self.can_be_restored = True
        # By the id of a place, whether it is reached through a function or a class, which copies share; or, where all
        # objects are looked at, through a partial.
        shared: dict[int, bool] = {}
        holders = (FunctionType, partial) if objects else (FunctionType,)
        for place in reached({"dataset": dataset}):
            above = place.above
            is_shared = above is not None and (shared[id(above)] or type(above.value) in holders)
            # Arguments that Hugging Face gives to a function.
            is_shared = is_shared or (objects and place.path[-1] == "fn_kwargs")
            shared[id(place)] = is_shared or isinstance(place.container, MappingProxyType)
            if isinstance(place.value, FunctionType):
                self._note_variables(place.value)
            elif shared[id(place)]:
                self._note_contents(".".join(place.path[1:]), place.value)
            elif objects and is_users(type(place.value).__module__) and not _is_trained(place.value):
                self._note_contents("", place.value)
            if type(place.value) not in self._kinds:
                for kind in type(place.value).__mro__:
                    self._note_class(kind)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has variables of its own, and modules cannot be pickled.
        return {**vars(self), "_kinds": set(), "_variables": {}, "_contents": {}, "_defaults": {}}

    def _note_variables(self, function: FunctionType) -> None:
        """Note the variables around a function, and those that it names of its module and of others of the user's."""
        name = function.__qualname__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._note_variable(f"{name}.{variable}", (cell, ""))
        for number, value in enumerate(function.__defaults__ or ()):
            self._note_contents(f"{name}.{number}", value)
        if not is_users(function.__module__):
            return
        self._note_given(function)
        names, held = names_in(function.__code__), function.__globals__
        modules = [held.get(one) for one in names]
        for module in (one for one in modules if isinstance(one, ModuleType) and is_users(one.__name__)):
            for variable in names:
                self._note_variable(f"{module.__name__}.{variable}", (vars(module), variable))
        for variable in sorted(variables_in(function.__code__)):
            self._note_variable(f"{function.__module__}.{variable}", (held, variable))

    def _note_given(self, function: FunctionType) -> None:
        """Note what a function has without naming a variable: default arguments, and the environment."""
        for name, value in defaults_of(function).items():
            if isinstance(value, (*_BASES, np.ndarray, torch.Tensor)):
                self._defaults[f"{function.__qualname__}.{name}"] = function, value
        self._environment |= {name: os.environ.get(name) for name in named_in_environment(function)}

    def _note_class(self, kind: type) -> None:
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        if is_new and is_users(kind.__module__):
            for name, value in list(vars(kind).items()):
                if not name.startswith("__") and (type(value) in PLAIN or isinstance(value, (*_BASES, *GENERATORS))):
                    self._note_variable(f"{kind.__qualname__}.{name}", (kind, name))

    def _note_variable(self, name: str, at: _Variable) -> None:
        value = _read(at)
        if id(value) == self._left_out:
            return
        if isinstance(value, type):
            self._note_class(value)
        elif name not in self._variables and not isinstance(value, (FunctionType, ModuleType)):
            self._variables[name] = at, value
            self._note_contents(name, value)

    def _note_contents(self, name: str, value: Any) -> None:
        if id(value) in self._contents or type(value) in PLAIN or id(value) == self._left_out:
            return
        if self._objects and is_users(type(value).__module__):
            # Whatever way leads there first.
            name = type(value).__qualname__
        self.can_be_restored &= not issubclass(type(value), Iterator)
        with suppress(Exception):  # A generator by the operating system has no state.
            if (copied := _copied(value)) is not None:
                self._contents[id(value)] = name, value, copied

    def variables(self) -> dict[str, tuple[Any, Any]]:
        """The variables as they are now, by name: a cell, class, function, or dict of a module, and the value in it."""
        now = {name: (at[0], _read(at)) for name, (at, _) in self._variables.items()}
        found = {name: one for name, one in now.items() if one[1] is not _NOTHING}
        of_environment = {f"os.environ[{name!r}]": (os, os.environ.get(name, "")) for name in sorted(self._environment)}
        return {**found, **self._defaults, **of_environment}

    def restore(self) -> None:
        """Put everything back as it was."""
        for at, value in self._variables.values():
            if _read(at) is not value:
                _write(at, value)
        for _, value, copied in self._contents.values():
            put_back(value, copied)
        for name, held in self._environment.items():
            if held is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != held:
                os.environ[name] = held

    def digests(self, *, of_generators: bool = True) -> dict[str, str]:
        """Digests of what they are now, by name, to be compared in another process too.

        Of a dict only what it held at first counts: code puts into it what it has computed.

        Args:
            of_generators: Whether those of random generators are among them.
        """
        found = {name: repr(_read(at)) for name, (at, _) in self._variables.items() if type(_read(at)) in PLAIN}
        found |= {f"os.environ[{name!r}]": os.environ.get(name, "") for name in sorted(self._environment)}
        for name, value, copied in self._contents.values():
            if isinstance(value, GENERATORS) and not of_generators:
                continue
            if isinstance(copied, dict) and not isinstance(value, (dict, *GENERATORS)):
                # Of other objects in it, such as paths, what they note for themselves may change.
                own = {key: held for key, held in dict(vars(value)).items() if isinstance(held, _OF_DATA)}
                for key, held in own.items():
                    # Several objects may be of one class.
                    path = f"{name}.{key}"
                    found[path] = found.get(path, "") + _text_of(_counted(held, copied.get(key)))
            else:
                found[name] = _text_of(_counted(value, copied))
        return {name: hex_digest(text.encode(errors="surrogatepass")) for name, text in found.items()}

    def generators(self) -> list[Any]:
        """The random generators among them."""
        return [value for _, value, _ in self._contents.values() if isinstance(value, GENERATORS)]

    def names_of_generators(self) -> set[str]:
        """The names of these."""
        return {name for name, value, _ in self._contents.values() if isinstance(value, GENERATORS)}


def _is_trained(value: Any) -> bool:
    """Whether training changes an object as it goes on: a module, or one of Lightning's."""
    return isinstance(value, torch.nn.Module) or is_lightnings(value)


def _counted(value: Any, copied: Any) -> Any:
    """What counts of a value: of a dict what it held at first."""
    return {key: value.get(key) for key in copied} if type(value) is dict and type(copied) is dict else value


def _text_of(value: Any) -> str:
    if isinstance(value, GENERATORS):
        return state_of_generator(value)
    return repr(sorted(map(repr, value))) if isinstance(value, set) else shown(value, of_copy=True)


def _read(at: _Variable) -> Any:
    holder, name = at
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return _NOTHING
    return vars(holder).get(name, _NOTHING) if isinstance(holder, type) else holder.get(name, _NOTHING)


def _write(at: _Variable, value: Any) -> None:
    holder, name = at
    if isinstance(holder, CellType):
        if value is _NOTHING:
            del holder.cell_contents
        else:
            holder.cell_contents = value
    elif isinstance(holder, type):
        setattr(holder, name, value)
    elif value is _NOTHING:
        holder.pop(name, None)
    else:
        holder[name] = value


def _copied(value: Any) -> Any:
    """A shallow copy of what a container, array, generator or object of a user's class holds; None for others."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if can_be_read(value) and value.nbytes <= _MOST_BYTES else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _MOST_BYTES and value.flags.writeable else None
    if isinstance(value, GENERATORS):
        return get_generator_state(value)
    for kind in _BASES:
        if isinstance(value, kind):
            # As its base: methods of a subclass are not called.
            return kind.copy(value) if len(value) <= _MOST_ITEMS else None
    held = getattr(value, "__dict__", None)
    is_object = isinstance(held, dict) and not isinstance(value, (type, FunctionType, ModuleType))
    return dict(held) if is_object and held is not None and is_users(type(value).__module__) else None


def digests_reached(*roots: Any) -> dict[str, str]:
    """Digests of variables, and of what objects of the user's hold, that functions reach; the same in every process."""
    return OutsideValues(roots, objects=True).digests(of_generators=False)
