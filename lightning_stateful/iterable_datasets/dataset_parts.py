"""What an iterable dataset consists of: the datasets in it, their attributes, and variables that their code names."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lightning_stateful.contents.build_values import text_of_function
from lightning_stateful.contents.held_state import changed_names
from lightning_stateful.contents.value_texts import text_of_data
from lightning_stateful.generators.attributes import (
    PLAIN,
    attributes_and_defaults,
    closure_of,
    defaults_of_class,
    function_in,
    is_data,
    is_lightnings,
    is_users,
    names_in,
    package_of,
    places_outside,
)
from lightning_stateful.generators.generator_states import identity_of
from lightning_stateful.generators.rng import state_of_generator
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, digest_of_contents
from lightning_stateful.samplers.fingerprint import digest, digest_of_tensor, is_plain_tensor

GROWING = (list, set, dict, deque)
_CHANGED_IN_PLACE = (*GROWING, np.ndarray, torch.Tensor)
# Types of values that are compared.
OF_DATA = (*PLAIN, *_CHANGED_IN_PLACE)
# Items of these up to which they are digested.
_MOST_ITEMS = 2**13
# Datasets in one that are looked into for others in turn.
_MOST_PARTS = 64
# Of what is compared behind every batch: datasets in one, attributes of each, items of a list, and bytes of an array.
_MOST_DATASETS, _MOST_ATTRIBUTES, _MOST_SHOWN, _MOST_BYTES = 8, 64, 32, 2**12
# Objects in objects.
_MOST_NESTED = 2


class ReadTogether(NamedTuple):
    """A dataset with the ``collate_fn`` of its loader, to be looked at as one.

    Attributes:
        dataset: The dataset.
        collate_fn: An object of the user's that collates, or whose method does; or a function or partial of the user's.
    """

    dataset: Any
    collate_fn: Any

    @classmethod
    def by(cls, loader: DataLoader[Any], dataset: Any) -> Any:
        """What a loader reads with; the dataset alone where nothing of the user's collates."""
        collate = getattr(loader.collate_fn, "__self__", loader.collate_fn)
        function: Any = function_in(collate)
        if isinstance(function, FunctionType):
            return cls(dataset, collate) if is_users(function.__module__) else dataset
        is_left_out = is_lightnings(collate) or isinstance(collate, (torch.nn.Module, DataLoader))
        is_object = is_users(type(collate).__module__) and not is_left_out and collate is not dataset
        return cls(dataset, collate) if is_object else dataset


def parts_of(dataset: Any) -> list[Any]:
    """A dataset, the datasets in it, and what loaders that these hold read with, each once."""
    left = [*dataset] if isinstance(dataset, ReadTogether) else [dataset]
    parts: dict[int, Any] = {id(one): one for one in left}
    for part in left:
        for held in SamplerParts(part).shared:
            found = _parts_of_loader(held) if isinstance(held, DataLoader) else [held]
            new = {id(one): one for one in found if one is not held or isinstance(one, Dataset)}
            left += [one for key, one in new.items() if key not in parts and len(left) < _MOST_PARTS]
            parts |= new
    return list(parts.values())


def _parts_of_loader(loader: Any) -> list[Any]:
    """The dataset, the samplers and the object that collates of a loader: what its passes in this process change."""
    batches, collate = loader.batch_sampler, loader.collate_fn
    # Torch's own holds a sampler, and nothing else that changes.
    sampler = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    found = [loader.dataset, sampler, getattr(collate, "__self__", collate)]
    return [part for part in found if not isinstance(part, (FunctionType, BuiltinFunctionType))]


def holds_data_alone(dataset: Any) -> bool:
    """Whether a dataset, and those in it, hold but plain values, arrays and containers of plain values."""
    held = [value for part in parts_of(dataset) for value in attributes_and_defaults(part).values()]
    containers = [value for value in held if type(value) in (*GROWING, tuple)]
    others = [value for value in held if type(value) not in (*OF_DATA, tuple) and not isinstance(value, Dataset)]
    return not others and all(is_data(one.values() if isinstance(one, dict) else one) for one in containers)


def digest_of_dataset(dataset: Any) -> str:
    """Digest of what a dataset holds, and its parts."""
    return digest([digest_of_contents(part) for part in parts_of(dataset)])


def attributes_in(
    dataset: Any, looks_at: Callable[[Any], bool] = lambda part: True, *, with_told: bool = False
) -> Iterator[tuple[str, Any]]:
    """The attributes of a dataset and of the datasets in it, by ``class.attribute``.

    Left out are what ``set_epoch`` sets, and Lightning's objects, such as a Trainer.

    Args:
        dataset: The dataset.
        looks_at: Which of them to look at; by default all.
        with_told: Whether what ``set_epoch`` sets is among them.
    """
    for part in parts_of(dataset):
        told = names_told(part)
        if told is None or not looks_at(part):
            continue
        for name, value in attributes_and_defaults(part).items():
            if (with_told or name not in told) and not (is_lightnings(value) or _reads_in_threads(value)):
                yield f"{type(part).__qualname__}.{name}", value


def _reads_in_threads(value: Any) -> bool:
    """Whether it is a graph of torchdata's in which threads read ahead, so that it changes by itself between passes."""
    is_graph = package_of(type(value)) == "torchdata"
    return is_graph and any(isinstance(part, threading.Thread) for part in SamplerParts(value).found)


def names_told(part: Any) -> frozenset[str] | None:
    """The names of attributes that ``set_epoch`` of a dataset may set, and of all else that its code names.

    None if nobody can say: of one by an installed package.
    """
    if not callable(getattr(part, "set_epoch", None)):
        return frozenset()
    kind: Any = type(part)
    return _names_in_set_epoch(kind) if is_users(kind.__module__) else None


def names_in_methods(kind: type) -> set[str]:
    """The names in the code of methods that a class has of classes of the user's."""
    kinds = [one for one in kind.__mro__ if is_users(one.__module__)]
    methods = [value for one in kinds for value in vars(one).values() if isinstance(value, FunctionType)]
    return {name for method in methods for name in names_in(method.__code__)}


@lru_cache(maxsize=256)
def _names_in_set_epoch(kind: type) -> frozenset[str] | None:
    method = getattr(kind, "set_epoch", None)
    if not isinstance(method, FunctionType):
        return None
    names, functions = set[str](), [method]
    for function in functions:
        new = {*names_in(function.__code__)} - names
        names |= new
        held = [inspect.getattr_static(kind, name, None) for name in sorted(new)]
        # Setters too, and what a decorator wraps.
        held += [part for one in held if isinstance(one, property) for part in (one.fget, one.fset)]
        functions += [one for one in (*held, *closure_of(function).values()) if isinstance(one, FunctionType)]
    return frozenset(names)


def digests_as_built(dataset: Any) -> dict[str, str]:
    """Digests of plain attributes and containers of a dataset, and of those in it, before anybody has set them."""
    return digests_of(dataset, None)


def values_in(dataset: Any, *, with_told: bool = False) -> Iterator[tuple[str, Any]]:
    """As :func:`attributes_in`, and variables outside of the dataset that code of the user's in it names, once each.

    Of objects of the user's in such variables it is what they hold, and of functions a text that tells them apart.
    """
    names = set()
    for name, value in attributes_in(dataset, with_told=with_told):
        names.add(name)
        yield name, value
    places = places_of_outside(dataset, functions=True)
    outside = ((name, read()) for name, read in places.items() if name not in names)
    for name, value in outside:
        if isinstance(value, FunctionType):
            yield name, text_of_function(value)
        elif type(value) in OF_DATA or data_as_text(value):
            yield name, value
        elif _is_users_object(value):
            held = ((f"{name}.{attribute}", one) for attribute, one in dict(vars(value)).items())
            yield from (item for item in held if type(item[1]) in OF_DATA)


def places_of_outside(dataset: Any, *, functions: bool = False) -> dict[str, Callable[[], Any]]:
    """What reads the variables outside of a dataset that code of the user's in it names, by their names."""
    found: dict[str, Callable[[], Any]] = {}
    for part in parts_of(dataset):
        function = function_in(part)
        if isinstance(part, partial):
            name = getattr(function, "__qualname__", "partial")
            found |= {f"{name}.{key}": partial(part.keywords.get, key) for key in part.keywords}
            found |= {f"{name}.{place}": partial(part.args.__getitem__, place) for place in range(len(part.args))}
        if isinstance(function, FunctionType) or is_users(type(part).__module__):
            found |= places_outside(function, functions=functions)
    return found


def digests_of(dataset: Any, names: Collection[str] | None) -> dict[str, str]:
    """Digests of values as they are now, for another process to compare; None for plain attributes and containers."""
    found: dict[str, str] = {}
    values = attributes_in(dataset) if names is None else values_in(dataset, with_told=True) if names else ()
    for name, value in values:
        if name in names if names is not None else type(value) in (*PLAIN, *GROWING):
            if type(value) in GROWING and len(value) > _MOST_ITEMS:
                # Such as the samples of a replay buffer, at every save.
                value = len(value)
            with suppress(Exception):
                # What cannot be read, such as an object of an installed package in it, is left alone.
                found[name] = digest(data_as_text(value) or value, found.get(name, ""))
    return found


def data_as_text(value: Any) -> str:
    """Text of a table, or of a container or number that is of no type in :data:`OF_DATA`; empty for anything else."""
    with suppress(Exception):
        return "" if type(value) in OF_DATA else text_of_data(value)
    return ""


class HeldValues:
    """What the attributes of a dataset, and the variables outside of it that its code names, hold at one time.

    Of objects it is seen when another one is set, when a list, set or dict grows or shrinks, and when a short one, a
    small array or an attribute of an object of the user's is changed. What ``set_epoch`` sets counts as changed where
    it has another content by then, and random generators among it where they stand elsewhere.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        parts = [part for part in parts_of(dataset) if hasattr(part, "__dict__") and names_told(part) is not None]
        self._holders = [part for part in parts if len(vars(part)) <= _MOST_ATTRIBUTES][:_MOST_DATASETS]
        self._told = {f"{type(part).__qualname__}.": {*(names_told(part) or ())} for part in self._holders}
        left_out = self._names_told().union(*self._told.values(), dict(attributes_in(dataset)))
        # What reads the variables.
        self._places = {
            name: read
            for name, read in places_of_outside(dataset).items()
            if {name, name.rpartition(".")[2]}.isdisjoint(left_out)
        }
        self.note(in_long=False)

    def note(self, *, in_long: bool) -> None:
        """Note what they hold now.

        Args:
            in_long: Whether changes within long lists and large arrays are seen too, up to some thousand items.
        """
        self._in_long, self._noted = in_long, self._now()
        self._items, self._contents = list(map(_items_in, self._noted)), self._contents_now()

    def is_same(self) -> bool:
        """Whether they hold what was noted, which is told in a short while."""
        now = self._now()
        for before, of in zip(self._noted, now, strict=True):
            if not _are_same([*before.values()], [*of.values()]):
                return False
        for items, of_items in zip(self._items, map(_items_in, now), strict=True):
            if items.keys() != of_items.keys() or not all(map(_are_same, items.values(), of_items.values())):
                return False
        return self._contents == self._contents_now()

    def changed(self, *, with_told: bool = True) -> set[str]:
        """The names of those that do not.

        Args:
            with_told: Whether what ``set_epoch`` sets is among them.
        """
        changed = changed_names(self._contents, self._contents_now())
        kinds = [*(f"{type(part).__qualname__}." for part in self._holders), ""]
        for kind, before, of, items in zip(kinds, self._noted, self._now(), self._items, strict=True):
            of_items = _items_in(of)
            names = {name for name, held in items.items() if not _are_same(held, of_items.get(name, []))}
            names |= before.keys() ^ of.keys()
            names |= {name for name in before.keys() & of.keys() if not _is_same(before[name], of[name])}
            # Told the same epoch again it holds other objects with the same in them.
            alike = {name for name in names & self._told.get(kind, set()) if _have_same_content(before, of, name)}
            changed |= {f"{kind}{name}" for name in names - alike}
        return changed if with_told else changed - self._names_told()

    def _names_told(self) -> set[str]:
        return {f"{kind}{name}" for kind, names in self._told.items() for name in names}

    def _now(self) -> list[dict[str, Any]]:
        held = [{**defaults_of_class(part), **vars(part)} for part in self._holders]
        for part, of in zip(self._holders, held, strict=True):
            told = self._told[f"{type(part).__qualname__}."] & of.keys()
            of |= {name: state_of_generator(of[name]) for name in told if identity_of(of[name])}
        return [*held, {name: read() for name, read in self._places.items()}]

    def _contents_now(self) -> dict[str, str]:
        if not self._in_long:
            return {}
        return {
            f"{type(part).__qualname__}.{name}": digest_of_contents([value])
            for part in self._holders
            for name, value in vars(part).items()
            if type(value) in _CHANGED_IN_PLACE and _size_of(value) <= _MOST_ITEMS
        }


def _size_of(value: Any) -> int:
    return int(value.size) if isinstance(value, np.ndarray) else len(value) if type(value) in GROWING else value.numel()


def _items_in(held: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Of lists, sets, dicts and arrays what is in short ones, and how long others are; and attributes of objects."""
    return {name: _items_of(value) for name, value in held.items() if type(value) not in PLAIN}


def _items_of(value: Any, depth: int = 0) -> list[Any]:
    kind = type(value)
    if kind in GROWING and len(value) > _MOST_SHOWN:
        return [len(value)]
    if kind in GROWING or _is_users_object(value):
        held = value if kind in GROWING else dict(vars(value))
        items = [*held, *held.values()] if isinstance(held, dict) else [*held]
        inner = [item for item in items if type(item) not in PLAIN] if depth < _MOST_NESTED else []
        return [*items, *(one for item in inner for one in _items_of(item, depth + 1))]
    if kind not in _CHANGED_IN_PLACE:
        return []
    if isinstance(value, torch.Tensor):
        return [digest_of_tensor(value.detach())] if is_plain_tensor(value) and value.nbytes <= _MOST_BYTES else []
    return [value.tobytes()] if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject else []


def _is_users_object(value: Any) -> bool:
    """Whether it is an object of a user's class, which holds few attributes, and none that is looked at elsewhere."""
    kind = type(value)
    is_known = isinstance(value, (type, Dataset, Sampler, torch.nn.Module)) or is_lightnings(value)
    return is_users(kind.__module__) and not is_known and 0 < len(getattr(value, "__dict__", ())) <= _MOST_ATTRIBUTES


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


def _have_same_content(some: Mapping[str, Any], others: Mapping[str, Any], name: str) -> bool:
    return digest_of_contents([some.get(name)]) == digest_of_contents([others.get(name)])


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(_is_same, some, others))


class SetSinceBuilt:
    """The attributes of a dataset that something has set since it was built, to be put back as they are now.

    Args:
        dataset: The dataset, which nobody has read.
        built: What :func:`digests_as_built` has given.
        restored: Digests by name: only what is as these say is put back; None for all.

    Attributes:
        names: Their names.
    """

    def __init__(self, dataset: Any, built: Mapping[str, str], restored: Mapping[str, str] | None) -> None:
        changed = changed_names(dict(built), digests_of(dataset, None)) if built else set[str]()
        if changed and restored is not None:
            now = digests_of(dataset, restored)
            changed = {name for name in changed if name in restored and now.get(name) == restored[name]}
        self.names = sorted(changed)
        self._held = [
            (vars(part), name, value)
            for part in (parts_of(dataset) if changed else ())
            for name, value in getattr(part, "__dict__", {}).items()
            if f"{type(part).__qualname__}.{name}" in changed
        ]

    def put_back(self) -> None:
        """Set them as they were."""
        for of_part, name, value in self._held:
            of_part[name] = value
