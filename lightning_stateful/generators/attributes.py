"""Goes through what objects hold and reach, and tells containers of data from others.

Nothing of their code is called.
"""

from __future__ import annotations

import dis
import logging
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial, partialmethod
from itertools import islice
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_stateful.generators.generator_states import identity_of
from lightning_stateful.generators.rng import GENERATORS

T = TypeVar("T")
# Objects in longer lists are data; in a very long list some items say what kind of items it holds.
LONG, VERY_LONG, SPREAD = 1024, 2**16, 4096
BUILT_IN = frozenset({int, float, complex, bool, str, bytes, type(None)})
PLAIN = BUILT_IN | {range, np.int64, np.int32, np.float64, np.bool_}


LIGHTNINGS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})


def package_of(kind: Any) -> str:
    """The package that a class or function is of, such as ``torch``."""
    return (kind.__module__ or "").partition(".")[0]


def is_lightnings(value: object) -> bool:
    """Whether an object is of a class of Lightning's, or of one derived from it, such as a user's LightningModule."""
    return not LIGHTNINGS.isdisjoint(map(package_of, type(value).__mro__))


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes that an object holds in its ``__dict__`` and slots, but loggers, and Lightning's notes."""
    held: dict[str, Any] = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                held[name] = object.__getattribute__(value, name)
    return {key: one for key, one in held.items() if not (str(key).startswith(_NOTES) or issubclass(type(one), _LOGS))}


# The clock of the latest validation among them.
_NOTES = ("__pl_saved", "__dict__", "_last_val_time")
# They keep which levels are on, and nothing that a sample depends on.
_LOGS = (logging.Logger, logging.LoggerAdapter)


def defaults_of_class(value: object) -> dict[str, Any]:
    """Plain attributes of an object's classes but the built-in ones: what it has until others are set on itself."""
    held = {name: item for kind in reversed(type(value).__mro__) for name, item in _own_items(kind)}
    return {name: item for name, item in held.items() if type(item) in PLAIN and name[:2] != "__"}


def attributes_and_defaults(value: object) -> dict[str, Any]:
    """The attributes of an object, and :func:`defaults_of_class` for those that it has not set itself."""
    return {**defaults_of_class(value), **attributes_of(value)}


def methods_of(value: object) -> list[FunctionType]:
    """The functions of the user's classes that an object is of, but for ``__init__``."""
    held = [pair for kind in type(value).__mro__ if is_users(kind.__module__) for pair in vars(kind).items()]
    return [one for name, one in held if isinstance(one, FunctionType) and name != "__init__"]


def function_in(value: Any) -> Any:
    """What a partial or a bound method calls in the end; another value as it is."""
    while isinstance(value, (partial, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    return value


def _own_items(kind: type) -> Iterable[tuple[str, Any]]:
    return vars(kind).items() if is_users(kind.__module__) else ()


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of functions around a function that it uses, but for those that are not set yet."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def text_of_plain(value: Any) -> str:
    """``repr`` of a value of a type in :data:`PLAIN`, or a list of such; in hexadecimal of integers too long for it."""
    try:
        return repr(value)
    except ValueError:
        return f"[{', '.join(map(text_of_plain, value))}]" if isinstance(value, list) else hex(value)


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor can be read and copied as they lie in memory.

    False for one that is sparse, nested, quantized, on the meta device or not yet initialized, whose memory has been
    freed, that a transform of ``torch.func`` has left behind, or whose class does not let itself be read.
    """
    try:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return False
        plain = tensor.detach()
        last = sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
        needed = (plain.storage_offset() + last + 1) * plain.element_size() if plain.numel() else 0
        # A tensor that is fake, or was within a transform, has no address, and raises.
        return (plain.data_ptr() != 0 or not needed) and plain.untyped_storage().nbytes() >= needed
    except Exception:
        return False


def is_data(values: Iterable[Any]) -> bool:
    """Whether the items of a container are plain, or so many that they are data."""
    # The items of a set come in no order, so the first ones do for all.
    first = islice(values, SPREAD) if type(values) is set and len(values) > VERY_LONG else values
    items: Sequence[Any] = first if isinstance(first, (list, tuple)) else list(first)
    kinds = set(map(type, some(items, VERY_LONG)))
    return kinds <= PLAIN or (len(items) > LONG and not any(issubclass(kind, GENERATORS) for kind in kinds))


def some(values: Sequence[T], most: int) -> Sequence[T]:
    """All of them, or some thousand evenly apart where there are more than ``most``."""
    return values if len(values) <= most else values[:: len(values) // SPREAD]


# Objects that are looked into, at most, and how deep.
_MOST_OBJECTS, _MOST_DEEP = 20_000, 24
# Values that lead to no other object, and containers that lead to none if they are empty.
_ENDS = PLAIN | {set, frozenset, np.ndarray, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size}
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, deque})
# Attributes of torch's modules with tensors alone.
_OF_TENSORS = ("_parameters", "_buffers")
_LEFT_OUT = (type, ModuleType, torch.Tensor, np.ndarray, Sampler, DataLoader)
# Objects of these packages, a Trainer or a logger among them, are none of a user's own.
_LEFT_OUT_PACKAGES = LIGHTNINGS | {"logging", "threading", "multiprocessing", "concurrent"}
# A class of this package has it whose objects only look at others.
_LOOKS_ON = "_looks_on"
# Name, value, container, and key in it; a container of None cannot be looked at again cheaply.
Part: TypeAlias = tuple[str, Any, Any, Any]


class Place(NamedTuple):
    """A value that was reached.

    Attributes:
        path: The names that lead there.
        value: The value.
        container: Where it can be looked up again by ``container[key]``, or None.
        key: Its key there.
        above: The place of the object that holds it; None for a root.
    """

    path: tuple[str, ...]
    value: Any
    container: Any = None
    key: Any = None
    above: Place | None = None


def reached(roots: Mapping[str, Any], looks_into: Callable[[Any], bool] = lambda value: True) -> Iterator[Place]:
    """Go through what objects reach, the nearest first, in bounded depth and number.

    They are reached through attributes, slots, lists, dicts, partials, closures, bound methods, default arguments,
    module variables that functions read which are not part of an installed package, functions and attributes of the
    user's classes, also of those that functions name, and generators that are attributes of other classes. Numbers,
    strings, arrays and empty containers are left out, and what is held by modules, samplers and loaders of torch, and
    by objects of Lightning. No property or method is called.

    Args:
        roots: The objects by name.
        looks_into: Whether to look into an object.

    Yields:
        The places: an object that is held in several comes once for each, and is looked into once.
    """
    queue = deque(Place((name,), root) for name, root in roots.items())
    # Kept, so that no other object gets their number.
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MOST_OBJECTS:
        place = queue.popleft()
        yield place
        value = place.value
        kind: Any = type(value)
        read = _reader_of(kind)
        # A class is seen once an object of it was, and not by itself.
        if read is None or id(value) in seen or len(place.path) >= _MOST_DEEP or not looks_into(value):
            continue
        seen[id(value)] = value
        parts = read(value)
        if id(kind) not in seen:
            seen[id(kind)] = kind
            parts += parts_of_class(kind)
        if len(queue) + len(seen) < _MOST_OBJECTS:
            queue += [Place((*place.path, name), part, held, key, place) for name, part, held, key in parts]


@lru_cache(maxsize=4096)
def _reader_of(kind: type) -> Callable[[Any], list[Part]] | None:
    """The function that reads the parts of objects of a kind; None for what is not looked into."""
    if issubclass(kind, _LEFT_OUT) or package_of(kind) in _LEFT_OUT_PACKAGES or hasattr(kind, _LOOKS_ON):
        return None
    readers: list[tuple[tuple[type, ...], Callable[[Any], list[Part]]]] = [
        ((FunctionType,), _parts_of_function),
        ((MethodType,), lambda value: [("self", value.__self__, None, None), ("function", value.__func__, None, None)]),
        ((BuiltinFunctionType,), lambda value: [("self", value.__self__, None, None)]),
        ((partial,), lambda value: _numbered((value.func, value.args, value.keywords))),
        ((dict, list, tuple, deque), _parts_of_container),
    ]
    left_out = _OF_TENSORS if issubclass(kind, torch.nn.Module) else ()
    in_attributes = partial(_parts_in_attributes, left_out=left_out, has_slots=_has_slots(kind))
    return next((read for kinds, read in readers if issubclass(kind, kinds)), in_attributes)


def _has_slots(kind: type) -> bool:
    return any("__slots__" in vars(one) for one in kind.__mro__)


def _numbered(values: Iterable[Any], container: Any = None) -> list[Part]:
    parts = enumerate(values)
    return [(str(number), part, container, number) for number, part in parts if type(part) not in _ENDS]


def base_of(value: Any) -> Any:
    """The built-in container that a container's class is, or is derived from; None for other objects.

    With its methods one is read as what it is, and methods of a user's class are not called.
    """
    own = type(value)
    return own if own in _BASES else next((kind for kind in _BASES if issubclass(own, kind)), None)


_BASES: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, deque)


def unless_changed(read: Callable[[], T]) -> T:
    """What a function reads of a container, such as a queue, read anew where another thread has changed it meanwhile.

    Raises:
        RuntimeError: It was changed each time.
    """
    for _ in range(_TRIES):
        with suppress(RuntimeError):
            return read()
    return read()


_TRIES = 1000


def listed(value: Any, base: Any) -> list[Any]:
    """The items of a container, or the keys of a dict, which is, or is derived from, a built-in one."""
    return unless_changed(lambda: list(base.__iter__(value)))


def _parts_of_container(value: Any) -> list[Part]:
    base = base_of(value)
    if issubclass(base, dict):
        items = [] if is_data(list(dict.values(value))) else enumerate(list(dict.items(value)))
        named = [(key if type(key) is str else str(number), part, value, key) for number, (key, part) in items]
        parts = [part for part in named if type(part[1]) not in _ENDS]
    else:
        values = listed(value, base)
        parts = [] if is_data(values) else _numbered(values, value)
    # One of a subclass has attributes too.
    return parts if type(value) in _CONTAINERS else parts + _parts_in_attributes(value, has_slots=True)


def _parts_in_attributes(value: Any, left_out: Collection[str] = (), has_slots: bool = False) -> list[Part]:
    own = getattr(value, "__dict__", None) or {}
    held = attributes_of(value) if has_slots else own
    # Written out, as a model has some ten thousand attributes.
    found = [
        (name, part, own if name in own else None, name)
        for name, part in list(held.items())
        if (part if type(part) in _CONTAINERS else type(part) not in _ENDS)
        and type(name) is str
        and not (name in left_out or name.startswith(_NOTES))
    ]
    if len(found) > 1:
        # A name says where an attribute is, and not when it was set.
        found.sort(key=itemgetter(0))
    return found


def _parts_of_function(function: FunctionType) -> list[Part]:
    """Closure, default arguments, variables of its module that it reads, and attributes of a function."""
    parts: list[Part] = [(name, part, None, None) for name, part in closure_of(function).items()]
    parts += [(name, part, None, None) for name, part, _, _ in _numbered(function.__defaults__ or ())]
    defaults, own = function.__kwdefaults__ or {}, vars(function)
    held = [(defaults, sorted(defaults)), (function.__globals__, _variables_of(function)), (own, sorted(own))]
    parts += [(name, of[name], of, name) for of, names in held for name in names if type(of[name]) not in _ENDS]
    return parts + [part for kind in _classes_named_by(function) for part in _parts_named_of(kind, function)]


def _classes_named_by(function: FunctionType) -> list[type]:
    """Classes of the user's among the variables of its module that a function of the user's reads."""
    held, code = function.__globals__, function.__code__
    named = [held.get(name) for name in names_in(code)] if is_users(function.__module__) else []
    classes = [kind for kind in named if isinstance(kind, type) and is_users(kind.__module__)]
    return [kind for kind in classes if kind.__name__ in variables_in(code)]


def _parts_named_of(kind: type, function: FunctionType) -> list[Part]:
    """What a class has by the names that a function and, in their turn, its methods of such names name."""
    # One may be made to be called.
    names, parts = {*names_in(function.__code__), "__call__"}, dict[str, Part]()
    while found := [part for part in parts_of_class(kind) if part[0] in names and part[0] not in parts]:
        for part in found:
            parts[part[0]] = part
            names |= set(names_in(part[1].__code__)) if isinstance(part[1], FunctionType) else set()
    return [parts[name] for name in sorted(parts)]


def _variables_of(function: FunctionType) -> list[str]:
    """Variables of its module that a function of the user's reads and that may lead to others."""
    held, code = function.__globals__, function.__code__
    named = names_in(code) if is_users(function.__module__) else ()
    may_lead = [name for name in named if name in held and _may_lead(held[name])]
    # An attribute may be named as a variable of the module is; to tell them apart takes longer.
    return [name for name in may_lead if name in variables_in(code)]


def _may_lead(value: Any) -> bool:
    kind: Any = type(value)
    return kind not in _ENDS and (identity_of(value) is not None or _reader_of(kind) is not None)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and that of the functions in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from codes_in(part)


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> list[str]:
    """The variables and attributes that code names, with those of functions in it."""
    return sorted({name for one in codes_in(code) for name in one.co_names})


@lru_cache(maxsize=4096)
def variables_in(code: CodeType) -> frozenset[str]:
    """The variables of its module that code reads, with those of functions in it."""
    steps = (step for one in codes_in(code) for step in dis.get_instructions(one))
    return frozenset(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def named_in_environment(function: FunctionType) -> list[str]:
    """Names by which a function may look into the environment: strings in its code, if it names that."""
    if {"environ", "getenv"}.isdisjoint(names_in(function.__code__)):
        return []
    constants = {one for code in codes_in(function.__code__) for one in code.co_consts if isinstance(one, str)}
    return sorted(filter(str.isidentifier, constants))


def parts_of_class(kind: type) -> list[Part]:
    """Generators that attributes of a class are or bind; of a user's class also functions, and what may hold some."""
    parts: list[Part] = []
    for one in kind.__mro__[:-1]:
        parts += _parts_in_class(one) if is_users(one.__module__) else _parts_in_installed_class(one)
    return sorted(parts, key=lambda part: part[0])


# What may bind a generator, and is called as a method.
_BINDING = (partial, partialmethod, MethodType, BuiltinFunctionType)


def _parts_in_class(kind: type) -> list[Part]:
    parts: list[Part] = []
    for name, part in vars(kind).items():
        function = part.__func__ if isinstance(part, (staticmethod, classmethod)) else part
        function = part.fget if isinstance(part, property) else function
        if identity_of(part) is not None or (name[:2] != "__" and _may_hold(part) and is_users(kind.__module__)):
            parts.append((name, part, vars(kind), name))
        elif isinstance(function, _BINDING) or (isinstance(function, FunctionType) and is_users(function.__module__)):
            parts.append((name, function, None, None))
    return parts


def _may_hold(part: Any) -> bool:
    """Whether an attribute of a class is a container or an object, and nothing that is called as a method."""
    return not (callable(part) or hasattr(type(part), "__get__")) and _may_lead(part)


# Those of torch and Lightning have hundreds of attributes, which stay.
_parts_in_installed_class = lru_cache(maxsize=4096)(_parts_in_class)


# Packages whose functions are none of a user's.
_LIBRARIES = LIGHTNINGS | {"torch", "lightning_stateful", "torchdata", "numpy"} | sys.stdlib_module_names


@lru_cache(maxsize=1024)
def is_users(module: str | None) -> bool:
    """Whether a module is none of Python's, and of no installed package."""
    if module is None or module.partition(".")[0] in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


# Classes, functions and modules that are looked into, at most.
_MOST_FOLLOWED = 256


def named_outside(value: object) -> dict[str, Any]:
    """Values outside of an object, or a function, that its code names; see :func:`places_outside`."""
    return {name: read() for name, read in places_outside(value).items()}


def places_outside(value: object, *, functions: bool = False) -> dict[str, Callable[[], Any]]:
    """What reads the values outside of an object that the methods of its class, or a function, name, by such names.

    These are attributes of its classes, global variables of their modules, variables of functions around them, default
    arguments, and variables of the environment.
    Functions and classes that are named are followed, but for those of installed packages that are not the object's
    own. Of torch's and Lightning's classes nothing is looked at.

    Args:
        value: The object.
        functions: Whether functions that functions name are among the values.
    """
    left: list[Any] = [value] if isinstance(value, FunctionType) else list(type(value).__mro__)
    homes = set(map(package_of, left)) - _LIBRARIES
    found: dict[str, Callable[[], Any]] = {}
    seen: set[int] = set()
    while left and len(seen) < _MOST_FOLLOWED:
        part = left.pop()
        part = getattr(part, "__func__", getattr(part, "fget", part))
        if not isinstance(part, (type, FunctionType)) or id(part) in seen:
            continue
        if not is_users(part.__module__) and package_of(part) not in homes:
            continue
        seen.add(id(part))
        for name, read in _named_by(part):
            named = read()
            if functions and isinstance(named, FunctionType) and isinstance(part, FunctionType):
                found[name] = read
            if isinstance(named, (type, FunctionType, staticmethod, classmethod, property)):
                left.append(named)
            elif isinstance(named, ModuleType):
                continue
            elif isinstance(named, torch.nn.Module) or not callable(named) or is_users(type(named).__module__):
                found[name] = read
    return found


def _named_by(part: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What reads attributes of a class, or what a function names outside of it."""
    if isinstance(part, type):
        own = (name for name, value in list(vars(part).items()) if not name.startswith("__") or callable(value))
        yield from ((f"{part.__qualname__}.{name}", partial(vars(part).get, name)) for name in own)
        return
    names = names_in(part.__code__)
    modules = [(part.__module__, part.__globals__)]
    modules += [(name, vars(of)) for name in names if isinstance(of := part.__globals__.get(name), ModuleType)]
    for module, held in modules:
        yield from ((f"{module}.{name}", partial(held.get, name)) for name in names if name in held)
    for of in (closure_of, defaults_of):
        yield from ((f"{part.__qualname__}.{name}", partial(_value_of, of, part, name)) for name in of(part))
    yield from ((f"os.environ[{name!r}]", partial(os.environ.get, name, "")) for name in named_in_environment(part))


def _value_of(of: Callable[[Any], Mapping[str, Any]], function: FunctionType, name: str) -> Any:
    return of(function).get(name)


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Default arguments of a function, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}
