"""Finds what a sampler holds, copies it, and tells whether it has changed."""

from __future__ import annotations

import copy
import hashlib
import io
import marshal
import os
import random
import sys
from array import array
from collections import Counter, UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from lightning_stateful.generators.attributes import (
    BUILT_IN,
    LIGHTNINGS,
    LONG,
    PLAIN,
    SPREAD,
    VERY_LONG,
    attributes_and_defaults,
    attributes_of,
    base_of,
    can_be_read,
    is_data,
    is_lightnings,
    is_users,
    listed,
    named_outside,
    package_of,
    parts_of_class,
    reached,
    some,
    text_of_plain,
    unless_changed,
)
from lightning_stateful.generators.generator_states import GeneratorState, identity_of, state_for
from lightning_stateful.generators.rng import GENERATORS, state_of_generator
from lightning_stateful.samplers.fingerprint import as_array, as_written, digest, hex_digest, is_mapped

T = TypeVar("T")
Path: TypeAlias = tuple[Any, ...]
_MOST_BYTES = 2**28
_CONTAINERS = (list, tuple, dict, set, np.ndarray, torch.Tensor)
# Numbers that stand for an array which others hold.
_SHOWN = 1024
# Containers of so many items are looked into for what they hold in turn.
_MOST_NESTED = 64
_SEQUENCES = (list, tuple, dict, set, deque, UserList, UserDict, array, bytearray)
_BUILT_IN_CONTAINERS = frozenset({list, tuple, dict, set})
_SHARED: tuple[Any, ...] = (type, FunctionType, BuiltinFunctionType, ModuleType)
_SHARED += (Dataset, torch.nn.Module, torch.nn.Parameter, np.generic, random.SystemRandom)
# Objects of these packages, a Trainer or a DataLoader among them, are none of a sampler's data.
_LIBRARIES = LIGHTNINGS | {"torch"}


class SamplerParts:
    """Objects that a sampler holds, found through attributes, slots and containers.

    Datasets, modules, functions, and objects in lists of more than 1,024 are not looked into.

    Args:
        sampler: The sampler.
        dataset: Another object that is not looked into, or None.

    Attributes:
        found: Objects, each after those that it holds; the sampler is the last.
        shared: Objects that were not looked into.
        generators: Random generators, by the names and numbers that lead to them.
        samplers: Samplers, the sampler itself last.
        dicts: Plain dicts.
        long: Containers of more than 1,024 items, by the names and numbers that lead to them.
        shown: By their ids, what long containers show, where :func:`digest_of_contents` has noted it.
    """

    def __init__(self, sampler: Any, dataset: Any = None) -> None:
        self.found: list[Any] = []
        self.shared: list[Any] = [] if dataset is None else [dataset]
        self.generators: dict[Path, Any] = {}
        self.long: dict[Path, Any] = {}
        self.shown: dict[int, str] = {}
        self._seen: set[int] = set(map(id, self.shared))
        self._look_at(sampler, (), is_held=False)
        self.samplers: list[Any] = [part for part in self.found if part is not sampler and _is_sampler(part)]
        self.samplers.append(sampler)
        self.dicts: list[dict[Any, Any]] = [part for part in self.found if type(part) is dict]

    def _look_at(self, value: Any, path: Path, in_data: bool = False, is_held: bool = True) -> None:
        if type(value) in PLAIN or id(value) in self._seen:
            return
        self._seen.add(id(value))
        # A sampler may hold thousands of lists, so what can be said by the type alone is.
        is_built_in = type(value) in _BUILT_IN_CONTAINERS
        is_datum = in_data and not is_built_in and not isinstance(value, (*GENERATORS, *_CONTAINERS))
        if is_datum or (not is_built_in and _is_shared(value, is_held)):
            self.shared.append(value)
            return
        is_long = type(value) in (list, tuple, dict) and len(value) > LONG
        for name, part in held_by(value):
            self._look_at(part, (*path, name), is_long)
        self.found.append(value)
        if not is_built_in and isinstance(value, GENERATORS):
            self.generators[path] = value
        if (is_built_in or issubclass(type(value), _SEQUENCES)) and _length(value) > LONG:
            self.long[path] = value


def held_by(value: Any) -> Iterable[tuple[Any, Any]]:
    """Names or numbers, and the objects that a value holds by them; of containers of plain values or of data none."""
    if type(value) in _BUILT_IN_CONTAINERS and is_data(value.values() if type(value) is dict else value):
        return ()
    if isinstance(value, (torch.Tensor, *GENERATORS)):
        return ()
    if isinstance(value, MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords), *vars(value).items()]
    if isinstance(value, np.ndarray):
        return enumerate(value.flat) if value.dtype.hasobject and value.size <= LONG else ()
    items: list[tuple[Any, Any]] = []
    base = base_of(value)
    if base is not None and (base.__len__(value) <= LONG or type(value) in _BUILT_IN_CONTAINERS):
        held = listed(value, base)
        items = [*(("key", key) for key in held), *base.items(value)] if issubclass(base, dict) else [*enumerate(held)]
    # A subclass of a container has attributes beside its items.
    return [*attributes_of(value).items(), *items]


def _as_base(value: Any) -> Any:
    """A container of a user's class as the one that it is derived from: methods of that class are not called."""
    if type(value) in _BUILT_IN_CONTAINERS or (base := base_of(value)) is None or not is_users(type(value).__module__):
        return value
    return base(base.items(value) if issubclass(base, dict) else listed(value, base))


def _length(value: Any) -> int:
    base = None if type(value) in _BUILT_IN_CONTAINERS else base_of(value)
    return len(value) if base is None else int(base.__len__(value))


def held_at(value: Any, path: Path) -> Any:
    """The object that names and numbers lead to; None where they lead nowhere."""
    for name in path:
        # Those of a set have no fixed numbers.
        value = None if isinstance(value, set) else dict(held_by(value)).get(name)
    return value


def _is_shared(value: object, is_held: bool) -> bool:
    # By its type: a closed NpzFile of NumPy raises where isinstance() asks for its __class__.
    kind: Any = type(value)
    if issubclass(kind, Iterator) and not hasattr(kind.__iter__, "__code__"):
        return True
    if not is_held or isinstance(value, (Sampler, torch.quasirandom.SobolEngine)):
        return False
    if isinstance(value, _SHARED):
        return True
    if isinstance(value, (*_CONTAINERS, *GENERATORS)):
        return False
    # This package's callback, in trainer.callbacks, leads to all loaders.
    is_own_callback = package_of(type(value)) == "lightning_stateful" and is_lightnings(value)
    if is_own_callback or package_of(type(value)) in _LIBRARIES:
        return True
    # Whatever else is indexed and has a length is a dataset of some library.
    is_data = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return is_data and not type(value).__module__.startswith(("builtins", "collections", "array"))


def _is_sampler(value: object) -> bool:
    if isinstance(value, Sampler):
        return True
    if hasattr(type(value), "__getitem__") or isinstance(value, (*_SHARED, *_CONTAINERS)):
        return False
    return hasattr(type(value), "__iter__") and hasattr(value, "__dict__")


class SamplerCopy:
    """A deep copy of a sampler, by :func:`copy.deepcopy`.

    Shared with the original are datasets, modules, functions, iterators, arrays that are read-only or above 256 MB,
    objects in lists of more than 1,024, and what cannot be copied. One with a ``__del__`` in it is not copied.

    Args:
        sampler: The original, which stays as it is.
        dataset: Another object to be shared, or None.

    Attributes:
        sampler: The copy.
        is_apart: Whether the copy may be iterated without a trace in the original: it shares no iterator or open file.
        shares_unseen: Whether it shares variables of functions, databases, or objects that cannot be copied.
    """

    is_apart: bool
    shares_unseen: bool

    def __init__(self, sampler: Any, dataset: Any = None) -> None:
        parts = SamplerParts(sampler, dataset)
        self._memo: dict[int, Any] = {id(part): part for part in parts.shared}
        self.is_apart = not any(map(_moves, parts.shared))
        self.shares_unseen = any(map(_is_unseen, parts.shared))
        self.sampler: Any = sampler
        # What that does where a copy is dropped, such as removing a file, nobody undoes.
        if any(hasattr(type(part), "__del__") and is_users(type(part).__module__) for part in parts.found):
            self.is_apart = False
            return
        for part in parts.found:
            self._copied(part)
        self.sampler = self._copied(sampler)
        self.is_apart = self.is_apart and (self.sampler is not sampler or type(sampler) in (*PLAIN, tuple))

    def _copied(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        kept = dict(self._memo)
        try:
            made = self._copied_at_once(value)
            made = copy.deepcopy(value, self._memo) if made is None else made
        except Exception:
            # It holds halves of copies.
            self._memo = kept
            # Of samplers, a proxy that hands every attribute on, or a class that cannot be called or pickled.
            made = self._rebuilt(value) if _is_sampler(value) else value
            self.is_apart = self.is_apart and not _moves(made)
            self.shares_unseen = self.shares_unseen or made is value
        self._memo[id(value)] = made
        return made

    def _copied_at_once(self, value: Any) -> Any:
        """The copy of a tensor, array, generator or long container; None for what :func:`copy.deepcopy` has to copy."""
        if isinstance(value, torch.Tensor):
            # One in shared memory as well: a copy that is tried may shuffle it in place.
            own = can_be_read(value) and value.nbytes <= _MOST_BYTES
            return value.detach().clone().requires_grad_(value.requires_grad) if own else value
        if isinstance(value, np.ndarray):
            own = value.flags.writeable and value.nbytes <= _MOST_BYTES
            return value.copy() if own and not value.dtype.hasobject else None if own else value
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).set_state(value.get_state())
        if type(value) is dict and is_data(value.values()):
            return dict(zip(value, self._rows(list(value.values())), strict=True))
        if type(value) in (list, tuple, set) and is_data(value):
            return value.copy() if type(value) is set else type(value)(self._rows(value))
        return None

    def _rows(self, items: Sequence[Any]) -> Sequence[Any]:
        """The same items; where these are lists, copies of them, as one may stand elsewhere as well."""
        if set(map(type, some(items, VERY_LONG))) != {list} or set(map(type, items)) != {list}:
            return items
        return [self._memo.setdefault(id(row), row.copy()) for row in items]

    def _rebuilt(self, value: Any) -> Any:
        """A copy made of the attributes alone; the object itself where that cannot be."""
        try:
            held, made = attributes_of(value), object.__new__(type(value))
            # For what holds it in turn.
            self._memo[id(value)] = made
            for name, item in held.items():
                object.__setattr__(made, name, copy.deepcopy(item, self._memo))
        except Exception:
            return value
        return made


def _moves(value: object) -> bool:
    """Whether reading an object that is shared moves it on."""
    return issubclass(type(value), (Iterator, io.IOBase))


def _is_unseen(value: object) -> bool:
    """Whether an object that is shared may hold what no digest tells: variables of a function, items of a database."""
    is_keeping = hasattr(type(value), "__setitem__") and not isinstance(value, _SEQUENCES)
    return bool(getattr(value, "__closure__", None) or getattr(value, "__defaults__", None)) or is_keeping


def digest_of_contents(
    sampler: Any, dataset: Any = None, *, epoch: int = -1, of_copy: bool = False, parts: SamplerParts | None = None
) -> str:
    """Digest of all that a sampler holds but for random generators, to be compared in the same process.

    Args:
        sampler: The sampler.
        dataset: An object in it that is not looked into.
        epoch: An attribute that is this epoch counts as the number of the epoch, whatever it is.
        of_copy: It is compared with that of another copy, so objects do not count as the same objects.
        parts: Its parts, where they were found just now.
    """
    hashed = hashlib.blake2b(digest_size=16)
    parts = SamplerParts(sampler, dataset) if parts is None else parts
    for part in parts.found:
        if isinstance(part, _SEQUENCES):
            items = _items_shown(part, of_copy)
            hashed.update(items.encode())
            if _length(part) > LONG:
                parts.shown[id(part)] = items
        if type(part) in _BUILT_IN_CONTAINERS:
            continue
        if isinstance(part, (torch.Tensor, np.ndarray)):
            array = as_array(part) if isinstance(part, torch.Tensor) and can_be_read(part) else part
            if isinstance(array, np.ndarray) and not array.dtype.hasobject and array.nbytes <= _MOST_BYTES:
                # Five times as fast as a digest of 128 bits, for a change that nobody has made to go unseen.
                held: Any = array if array.flags.c_contiguous else array.tobytes()
                hashed.update(f"{array.nbytes} {crc32(held)};".encode())
        elif not isinstance(part, GENERATORS):
            for name, item in attributes_and_defaults(part).items():
                is_epoch = type(item) is int and item == epoch
                told = "epoch" if is_epoch else "" if item is dataset else _shown(item, of_copy)
                hashed.update(f"{name}={told};".encode())
    return hashed.hexdigest()


def digest_of_generators(*holders: Any) -> str:
    """Digest of the states of all random generators that objects hold; empty if they hold none."""
    states = [state_of_generator(generator) for generator in generators_in(*holders)]
    return hex_digest("".join(states).encode(), size=16) if states else ""


def generators_in(*holders: Any) -> list[Any]:
    """The random generators that objects hold, or are, each once."""
    found = [generator for holder in holders for generator in SamplerParts(holder).generators.values()]
    found += [holder for holder in holders if isinstance(holder, GENERATORS)]
    return list(dict.fromkeys(found))


def generators_outside(sampler: Any, dataset: Any = None) -> list[tuple[Path, GeneratorState]]:
    """The random generators that a sampler's code reaches outside of what copies of it hold.

    They are those of its classes, of variables that these name, of functions, and of its dataset. One that it holds too
    has the names that lead there in it.

    Args:
        sampler: The sampler.
        dataset: An object in it that is not looked into, but for its generators.

    Returns:
        Their names and states, each once.
    """
    parts = SamplerParts(sampler, dataset)
    roots, kinds = _named_by_code_of(parts), Counter[str]()
    for part in parts.shared:
        kinds[type(part).__qualname__] += 1
        roots[f"{type(part).__qualname__} {kinds[type(part).__qualname__]}"] = part
    for kind in dict.fromkeys(map(type, parts.found)):
        roots |= {f"{kind.__qualname__}.{name}": part for name, part, _, _ in parts_of_class(kind)}
    held = {identity_of(generator): path for path, generator in parts.generators.items()}
    found: dict[int, tuple[Path, GeneratorState]] = {}
    for place in reached(roots):
        # 0 are those of the process, which are seeded in any case.
        if (identity := identity_of(place.value)) and identity not in found:
            found[identity] = held.get(identity, place.path), state_for(place.value, 0)
    return list(found.values())


def names_unseen(sampler: Any, dataset: Any = None) -> bool:
    """Whether the code of a sampler names an iterator, a generator or a database outside of it that no digest tells."""
    named = _named_by_code_of(SamplerParts(sampler, dataset)).values()
    others = [value for value in named if not isinstance(value, (torch.Tensor, np.ndarray, random.SystemRandom))]
    return any(
        _moves(value) or _is_unseen(value) or (isinstance(value, GENERATORS) and identity_of(value) is None)
        for value in others
    )


def _named_by_code_of(parts: SamplerParts) -> dict[str, Any]:
    """Values outside of a sampler that its code, and that of objects that it holds, names."""
    of_kinds = {type(part): part for part in parts.found}
    return {name: value for part in of_kinds.values() for name, value in named_outside(part).items()}


def _is_told(value: Any) -> bool:
    """Whether a digest tells a value from others: a plain one, a container, an array, or an object of the user's."""
    is_value = type(value) in PLAIN or isinstance(value, (*_SEQUENCES, torch.Tensor, np.ndarray))
    return is_value or (is_users(type(value).__module__) and not issubclass(type(value), (Iterator, Dataset, Sampler)))


def surroundings_of(sampler: Any, dataset: Any = None, parts: SamplerParts | None = None) -> dict[str, str]:
    """Digests of what copies of a sampler share with it, by name.

    These are long lists, attributes of datasets, classes and modules, variables and default arguments of functions that
    its code names, and numbers in the environment.

    Args:
        sampler: The sampler.
        dataset: An object in it that is not looked into.
        parts: Its parts, where they were found just now.

    Returns:
        By names such as ``"ImageFolder.cache"``; what has the same name is digested together.
    """
    parts, found = SamplerParts(sampler, dataset) if parts is None else parts, dict[str, list[str]]()
    for path, value in parts.long.items():
        name = ".".join(map(str, (type(sampler).__name__, *path)))
        found.setdefault(name, []).append(parts.shown.get(id(value)) or _items_shown(value))
    objects = [part for part in parts.shared if not isinstance(part, (type, ModuleType))]
    holders: list[tuple[Any, Any]] = [(part, attributes_and_defaults(part)) for part in objects]
    holders += [(part, part._buffers) for part, _ in holders if isinstance(part, torch.nn.Module)]
    for kind in dict.fromkeys(kind for part in parts.samplers for kind in type(part).__mro__):
        if package_of(kind) not in (*_LIBRARIES, "builtins", "typing", "collections", "abc"):
            within = [kind, *_with_classes(sys.modules.get(kind.__module__))]
            holders += [(holder, attributes_of(holder)) for holder in within]
    of_holders = {getattr(holder, "__qualname__", getattr(holder, "__name__", "")) for holder, _ in holders}
    for name, item in _named_by_code_of(parts).items():
        if _is_told(item) and not (type(item) in PLAIN and name.rpartition(".")[0] in of_holders):
            is_small = isinstance(item, (list, tuple, dict)) and len(item) <= _MOST_NESTED
            # Counts may be deeper in it.
            found.setdefault(name, []).append(shown(item) + (digest(item) if is_small else ""))
    for holder, held in holders:
        of = holder.__name__ if isinstance(holder, (type, ModuleType)) else type(holder).__name__
        for name, item in held.items():
            # Modules hold what Python has noted, such as warnings that were shown.
            is_value = type(item) in PLAIN or issubclass(type(item), (*_SEQUENCES, torch.Tensor, np.ndarray))
            if is_value and not name.startswith("__"):
                found.setdefault(f"{of}.{name}", []).append(shown(item))
    # Numbers alone: a library that is imported while it is iterated may set others.
    found |= {f"os.environ[{name!r}]": [text] for name, text in os.environ.items() if text.isdigit()}
    return {name: hex_digest(repr(values).encode()) for name, values in found.items()}


def shown(value: Any, *, of_copy: bool = False) -> str:
    """The plain values in a value or its items, some of a long one's, and the types of others.

    Args:
        value: The value.
        of_copy: It is compared with that of a copy, so objects do not count as the same objects.
    """
    return _all_shown(_spread(value), of_copy) if isinstance(value, _SEQUENCES) else _shown(value, of_copy)


def _with_classes(module: ModuleType | None) -> list[Any]:
    """A module and the classes that it defines, in which a sampler may keep a count as well."""
    if module is None:
        return []
    return [module, *(of for of in vars(module).values() if isinstance(of, type) and of.__module__ == module.__name__)]


def _items_shown(part: Any, of_copy: bool = False) -> str:
    """The number of items of a container, and what :func:`_shown` shows of some thousand of them and of their keys."""
    part, is_mapping = _as_base(part), isinstance(part, (dict, UserDict))
    keys = _all_shown(_spread(part.keys()), of_copy) if is_mapping else ""
    return f"{len(part)}{keys}{_all_shown(_spread(part.values() if is_mapping else part), of_copy)}"


def _all_shown(values: list[Any], of_copy: bool = False) -> str:
    """What :func:`_shown` shows of each value; many times faster if all are plain, or lists of plain values."""
    kinds, plain = set(map(type, values)), values
    if kinds <= {list, tuple} and max(map(len, values), default=0) <= LONG:
        are_integers = {int}.issuperset(type(value[0]) for value in values if value)
        if are_integers and (written := as_written(values)) is not None:
            return written.hex()
        plain = list(chain.from_iterable(values))
    if BUILT_IN.issuperset(map(type, plain)):
        return marshal.dumps(values, 0).hex()  # Version 0 writes equal values alike.
    return str([_shown(value, of_copy) for value in values])


def _spread(values: Any) -> list[Any]:
    """All items of a container, those of a dict with keys, of a set sorted if plain; or some thousand evenly apart."""
    values = _as_base(values)
    values = values.items() if isinstance(values, (dict, UserDict)) else values
    step = max(len(values) // SPREAD, 1)
    if isinstance(values, set) and step == 1 and BUILT_IN.issuperset(map(type, list(values))):
        return sorted(values, key=repr)
    if isinstance(values, (list, tuple)):
        return list(values[::step])
    return unless_changed(lambda: list(islice(values, 0, None, step)))


def _shown(value: Any, of_copy: bool = False) -> str:
    """The plain values in a value, some numbers of an array or tensor, and the types of others."""
    if type(value) in PLAIN:
        return text_of_plain(value)
    if isinstance(value, torch.Tensor) and can_be_read(value):
        value = as_array(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and not is_mapped(value):
        some = value.flat[:: max(value.size // _SHOWN, 1)] if value.size else value
        return hex_digest(some.tobytes())
    if type(value) in (list, tuple, dict, set, frozenset) and len(value) <= LONG:
        value = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        items = [*value, *value.values()] if type(value) is dict else value
        if BUILT_IN.issuperset(map(type, items)):
            return marshal.dumps(items, 0).hex()
        return text_of_plain([item if type(item) in PLAIN else type(item).__name__ for item in items])
    # Of a LightningModule, training changes them, and a resume names those that no checkpoint has.
    held = [] if isinstance(value, torch.nn.Module) and is_lightnings(value) else attributes_of(value).items()
    plain = ", ".join(f"{name!r}: {text_of_plain(item)}" for name, item in held if type(item) in PLAIN)
    return f"{type(value).__name__}{f'{{{plain}}}' if plain else 0 if of_copy else id(value)}"
