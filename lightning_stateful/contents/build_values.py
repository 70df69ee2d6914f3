"""Finds the values that code reads, of ``train_dataloader`` or of samples: attributes and variables that it names."""

from __future__ import annotations

import dis
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_stateful.generators.attributes import (
    LIGHTNINGS,
    PLAIN,
    attributes_of,
    closure_of,
    function_in,
    is_users,
    named_in_environment,
    package_of,
    text_of_plain,
    variables_in,
)
from lightning_stateful.samplers.fingerprint import digest, hex_digest

# Functions that are followed, at most, and how deep objects are looked into.
_MOST_FUNCTIONS, _MOST_DEEP = 256, 3
_OURS = "lightning_stateful"
_LEFT_OUT = LIGHTNINGS | {_OURS}
# Called without being named.
_OF_CLASS, _OF_OBJECT = ("__init__", "__post_init__"), ("__call__", "__getitem__", "__iter__", "__len__")
_OF_SAMPLES = ("__getitem__", "__getitems__", "__call__")
# Packages of Python's own whose objects hold settings.
_HOLDERS = ("types", "argparse")
# Functions of Python, torch and NumPy.
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, np.ufunc)
# Functions of a list that are looked at.
_MOST_IN_LIST = 64


def values_read_by(owner: Any, method: str) -> dict[str, Any]:
    """The values that a method reads, or that functions read which it calls, as far as their code names them.

    These are attributes of the owner and of objects that it holds, entries of dicts, and variables of functions, of the
    user's modules and of the environment. Functions that it holds (``self.make(self)``) are followed as well. Left out
    is what objects of torch, of this package and of Lightning hold, as a Trainer does. An attribute that is only
    counted up (``self.calls += 1``) is not read. No property or method is called.

    Args:
        owner: The object, a data module say.
        method: The name of its method.

    Returns:
        The values by the way that leads there.
    """
    reading = _Reading()
    for function in _functions_of(type(owner), method):
        reading.follow(function)
    reading.look_into_all(owner)
    return {**reading.variables, **reading.values}


def values_samples_follow(dataset: Any, collate_fn: Any) -> dict[str, Any]:
    """The values that the code reads which reads and collates samples, found as by :func:`values_read_by`.

    Objects that variables of modules hold are looked into as well.

    Args:
        dataset: The dataset, or one that holds it, such as a ``Subset``.
        collate_fn: The ``collate_fn``.

    Returns:
        The values by the way that leads there.
    """
    found: dict[str, Any] = {}
    way = ""
    while package_of(type(dataset)) in ("torch", _OURS) and "dataset" in getattr(dataset, "__dict__", {}):
        dataset, way = dataset.dataset, f"{way}dataset."
    is_method = isinstance(collate_fn, MethodType)
    for prefix, owner in ((way, dataset), ("collate_fn.", collate_fn.__self__ if is_method else collate_fn)):
        reading = _Reading(of_samples=True)
        methods = (collate_fn.__func__.__name__,) if is_method and owner is not dataset else _OF_SAMPLES
        for function in (one for method in methods for one in _functions_of(type(owner), method)):
            reading.follow(function)
        if isinstance(owner, FunctionType):
            reading.follow(owner)
        reading.look_into_all(owner)
        found |= reading.variables | {
            name if name.startswith(tuple(f"{one}." for one in reading.variables)) else f"{prefix}{name}": value
            for name, value in reading.values.items()
        }
    return found


def text_of_function(value: Any, depth: int = 0) -> str:
    """A text that tells a function from others, in another process too; empty for what is none, and for classes.

    A partial is told by its arguments, an object by its class, and a list of functions by all of them.
    """
    if depth > _MOST_DEEP or isinstance(value, type):
        return ""
    if isinstance(value, (list, tuple)):
        texts = [text_of_function(one, depth + 1) for one in value[:_MOST_IN_LIST]]
        return f"[{', '.join(texts)}]" if texts and all(texts) else ""
    if isinstance(value, MethodType):
        return text_of_function(value.__func__, depth)
    if isinstance(value, partial):
        keywords = [f"{name}={_text_of_argument(part, depth)}" for name, part in sorted(value.keywords.items())]
        of = [text_of_function(value.func, depth + 1), *(_text_of_argument(one, depth) for one in value.args)]
        return f"partial({', '.join([*of, *keywords])})"
    if isinstance(value, FunctionType):
        inner = [*closure_of(value).items(), *enumerate(value.__defaults__ or ())]
        of = [_digest_of(value.__code__), *(f"{name}={_text_of_argument(part, depth)}" for name, part in inner)]
        return f"{value.__name__} {hex_digest(repr(of).encode(errors='surrogatepass'), size=4)}"
    if isinstance(value, _BUILT_IN):
        return str(value.__name__)
    return type(value).__qualname__ if callable(value) else ""


def _text_of_argument(value: Any, depth: int) -> str:
    if type(value) in PLAIN:
        return text_of_plain(value)
    text = text_of_function(value, depth + 1)
    if not text and type(value) in (dict, set, list, tuple):
        # What cannot be read is left alone.
        with suppress(Exception):
            text = digest(value) if len(value) <= _MOST_IN_LIST else str(len(value))
    return text


@lru_cache(maxsize=4096)
def _digest_of(code: CodeType) -> str:
    constants = [_digest_of(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    # The order of a set is another in another process.
    constants = [one for one in constants if not one.startswith("frozenset")]
    return hex_digest(repr((code.co_code, code.co_names, constants)).encode(errors="surrogatepass"), size=4)


class _Reading:
    """Goes through code and the objects that it names.

    Args:
        of_samples: Whether the code reads samples, and not only builds loaders: datasets are read, and objects that
            variables hold are looked into.
    """

    def __init__(self, *, of_samples: bool = False) -> None:
        self._of_samples = of_samples
        self.names: set[str] = set()
        self.variables: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self._seen: set[Any] = set()
        self._functions: dict[type, dict[str, list[FunctionType]]] = {}

    def follow(self, function: FunctionType) -> None:
        """Note what a function names, and follow the user's functions and classes among it."""
        if function in self._seen or len(self._seen) >= _MOST_FUNCTIONS:
            return
        self._seen.add(function)
        names = set(_names_read(function.__code__))
        if package_of(function) == _OURS:
            # What the data modules of this package keep for themselves follows from their state.
            names = {name for name in names if not name.startswith("_")}
        self.names |= names
        held = {f"{function.__qualname__}.{name}": value for name, value in closure_of(function).items()}
        if is_users(function.__module__):
            modules = [function.__globals__.get(name) for name in names]
            for of in (one for one in modules if isinstance(one, ModuleType) and is_users(one.__name__)):
                held |= {f"{of.__name__}.{name}": vars(of)[name] for name in names & vars(of).keys()}
            of_module = names & variables_in(function.__code__) & function.__globals__.keys()
            held |= {f"{function.__module__}.{name}": function.__globals__[name] for name in of_module}
            held |= {f"os.environ[{name!r}]": os.environ.get(name, "") for name in named_in_environment(function)}
        for name, value in held.items():
            if self._of_samples and _is_called(value):
                # A hook may put another one in its place, or change what it holds.
                self.variables[name] = value
            if isinstance(value, FunctionType) and is_users(value.__module__):
                self.follow(value)
            elif isinstance(value, type) and is_users(value.__module__):
                for called in (one for part in _OF_CLASS for one in _functions_of(value, part)):
                    self.follow(called)
            elif not callable(value) and not isinstance(value, ModuleType):
                self.variables[name] = value

    def look_into_all(self, owner: Any) -> None:
        """Note the named attributes of the owner and, where samples are read, those of objects in variables."""
        number = -1
        while number != len(self.names):
            # What is named in a method that one of the objects has may name others.
            number = len(self.names)
            self.values = {}
            self.look_into("", owner, set(), 0)
            for name, value in list(self.variables.items()) if self._of_samples else ():
                if isinstance(value, dict) or is_users(type(value).__module__) or package_of(type(value)) in _HOLDERS:
                    self.look_into(f"{name}.", value, set(), 1)

    def look_into(self, way: str, value: Any, above: set[int], depth: int) -> None:
        """Note those attributes of an object that are named, and follow its methods that are."""
        is_others = depth and package_of(type(value)) in _LEFT_OUT | {"torch"} and not isinstance(value, dict)
        if depth > _MOST_DEEP or id(value) in above or is_others:
            return
        if not isinstance(value, dict):
            called = ("__len__",) if isinstance(value, Dataset) and not self._of_samples else _OF_OBJECT
            if (functions := self._functions.get(type(value))) is None:
                functions = self._functions[type(value)] = _functions_in(type(value))
            for name in sorted(functions.keys() & {*self.names, *(called if depth else ())}):
                for function in functions[name]:
                    self.follow(function)
        held: Mapping[Any, Any] = value if type(value) is dict else {**attributes_of(value), **_entries(value)}
        for name in sorted(self.names & held.keys()):
            part = held[name]
            if package_of(type(part)) not in _LEFT_OUT:
                self.values[f"{way}{name}"] = part
            self._follow_held(part)
            if isinstance(part, dict) or getattr(part, "__dict__", None):
                self.look_into(f"{way}{name}.", part, above | {id(value)}, depth + 1)

    def _follow_held(self, value: Any) -> None:
        """Follow a function that an object holds, if it is one of the user's."""
        function = function_in(value)
        if isinstance(function, FunctionType) and is_users(function.__module__):
            self.follow(function)


def _is_called(value: Any) -> bool:
    """Whether it is a function, a partial, or an object of a user's class that is called like one."""
    is_function = isinstance(value, (FunctionType, BuiltinFunctionType, partial))
    return is_function or (callable(value) and not isinstance(value, type) and is_users(type(value).__module__))


def _entries(value: Any) -> dict[Any, Any]:
    """The entries of an object that is a dict as well, as Lightning's ``hparams`` are."""
    return dict(dict.items(value)) if isinstance(value, dict) else {}


def _functions_of(kind: type, name: str) -> list[FunctionType]:
    """The functions of a class and its bases by a name, those of properties too; of Lightning's classes ``hparams``."""
    return _functions_in(kind).get(name, [])


def _functions_in(kind: type) -> dict[str, list[FunctionType]]:
    """By name what :func:`_functions_of` gives."""
    found: dict[str, list[FunctionType]] = {}
    for base in kind.__mro__:
        package = package_of(base)
        for name, part in vars(base).items() if package not in ("torch", "builtins") else ():
            function = getattr(part, "__func__", getattr(part, "fget", part))
            if isinstance(function, FunctionType) and (package not in LIGHTNINGS or name == "hparams"):
                found.setdefault(name, []).append(function)
    return found


@lru_cache(maxsize=4096)
def _names_read(code: CodeType) -> frozenset[str]:
    """The variables and attributes that code reads, and its strings, which may be keys; but for what it counts up."""
    inner = (_names_read(part) for part in code.co_consts if isinstance(part, CodeType))
    names, before = {part for part in code.co_consts if isinstance(part, str) and part.isidentifier()}, ""
    for step in dis.get_instructions(code):
        # To add in place, code copies the object before it reads the attribute.
        if step.opname.startswith("LOAD_") and isinstance(step.argval, str) and before not in ("COPY", "DUP_TOP"):
            names.add(step.argval)
        before = step.opname
    return frozenset(names).union(*inner)
