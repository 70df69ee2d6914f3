"""What a user's loader has and reads beside torch's: attributes, and further DataLoaders, as of unlabelled data."""

from __future__ import annotations

import dis
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.generators.attributes import (
    PLAIN,
    attributes_of,
    codes_in,
    function_in,
    is_lightnings,
    is_users,
    named_outside,
    reached,
)
from lightning_stateful.generators.generator_states import identity_of, state_for
from lightning_stateful.generators.rng import GENERATORS, state_of_generator
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, digest_of_contents, generators_outside, shown
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.tracked_loader import TrackedLoader
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.user_loaders import TORCHS, names_set
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Attributes that hold no other loader's, and may hold very much.
_OWN = frozenset({"dataset", "sampler", "batch_sampler", "collate_fn", "generator", "_iterator"})
_LOADERS = (DataLoader, _BaseDataLoaderIter)
# Items of a container, and bytes of an array, that are compared behind every batch.
_MOST_SHOWN, _MOST_BYTES, _LARGE = 64, 2**14, 2**20
# What an iteration may set something on: parts of the loader.
_TOLD = ("dataset.", "collate_fn.")
_COUNTING = frozenset({"accumulate", "count", "cycle", "enumerate", "islice"})


class LoadersBeside:
    """DataLoaders that a loader with an ``__iter__`` of its own, or an object that holds it, can read beside its own.

    The generators from which they draw are seeded for each pass, as those of the loader's own sampler are. What their
    samplers and iterable datasets remember from pass to pass a new loader has not.
    """

    def __init__(self, holders: tuple[Any, ...]) -> None:
        found = loaders_in(*holders).values()
        self._remembering = {id(loader.sampler) for loader in found if _remembers(loader)}
        self._is_seeded = self._has_warned = False
        # Iterators in attributes, by name, and the epochs in which they were found first.
        self._iterators: dict[str, tuple[Any, int]] = {}
        # On several processes one may have been seeded for each of them.
        is_alone = detect_topology(None, None).num_replicas == 1
        generators = [one for loader in found for one in _generators_of(loader).values()]
        self._began_with = {identity_of(one): "" if is_alone else state_of_generator(one) for one in generators}

    def seed(self, holders: tuple[Any, ...], seed: int) -> None:
        """Seed their generators for a pass, before anything is read."""
        self._is_seeded = True
        seeded: set[int | None] = set()
        for name, loader in loaders_in(*holders).items():
            for path, generator in _generators_of(loader).items():
                identity = identity_of(generator)
                if identity and identity not in seeded:
                    seeded.add(identity)
                    began_with = self._began_with.get(identity, "")
                    state_for(generator, derive_seed("beside", name, path, began_with)).seed(seed)

    def warn_of_told(self, holder: Any, changed: Collection[str]) -> None:
        """Warn, once, if what has changed as the latest batch was given is of the dataset or the ``collate_fn``."""
        told = sorted(name for name in changed if name.startswith(_TOLD))
        if told and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(holder).__qualname__}.__iter__ sets {', '.join(told)} from batch to batch. No checkpoint has "
                "that. A resume within the first epoch reads it again up to there; a later one is exact only if it is "
                "set anew as a pass begins, or restored before the first batch, as in on_train_start.",
                StatefulWarning,
                stacklevel=3,
            )

    def digests(self, holders: tuple[Any, ...], epoch: int) -> dict[str, str]:
        """Digests of what they remember from pass to pass, by name; and which iterators were there in earlier ones."""
        found = {}
        for name, value in named_in(holders).items():
            if isinstance(value, Iterator) and not isinstance(value, _BaseDataLoaderIter):
                known, first = self._iterators.get(name, (None, epoch))
                first = first if known is not None and known() is value else epoch
                with suppress(TypeError):
                    # Of few iterators there are no weak references: of generators there are.
                    self._iterators[name] = weakref.ref(value), first
                found[name] = str(epoch - first)
        for name, loader in loaders_in(*holders).items():
            if isinstance(loader.dataset, IterableDataset):
                found[f"{name}.dataset"] = digest_of_contents(loader.dataset, epoch=epoch)
            elif id(loader.sampler) in self._remembering:
                batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
                found[f"{name}.sampler"] = digest_of_contents(batches, loader.dataset, epoch=epoch)
            if not self._is_seeded and (generators := _generators_of(loader)):
                found[f"{name}.generator"] = " ".join(map(state_of_generator, generators.values()))
        return found


def loaders_in(*holders: Any) -> dict[str, DataLoader[Any]]:
    """The DataLoaders that objects hold, or that their code names elsewhere, by name; the objects are none of them.

    They are looked for in containers and in objects that can be iterated.
    """
    return {name: value for name, value in _held_by(*holders).items() if isinstance(value, DataLoader)}


def warn_of_held_loaders(iterable: Any, where: str) -> None:
    """Warn of an object without a state that reads DataLoaders in a way that cannot be followed."""
    held = _held_by(iterable)
    is_iterable = [isinstance(getattr(one, "dataset", None), IterableDataset) for one in held.values()]
    if not all(is_iterable) and not hasattr(type(iterable), "state_dict"):
        warnings.warn(
            f"{where} is a {type(iterable).__qualname__} that reads torch's loaders by itself ({', '.join(held)}). A "
            "resume iterates it again from the beginning of the epoch up to where the model stood. That is exact only "
            "if its batches come in the same order again: not where they are shuffled within the epoch, and not from "
            "any later epoch where it keeps an iterator over epochs. Pass the DataLoader itself, with "
            f"prefetch_factor=, or let {type(iterable).__qualname__} hold one DataLoader, no iterator of it, and have "
            "no __next__, but an __iter__ that calls iter() on the DataLoader and yields.",
            StatefulWarning,
            stacklevel=4,
        )


def _held_by(*holders: Any) -> dict[str, Any]:
    """The DataLoaders that objects hold or name, and iterators of torch's over such, by name."""
    roots: dict[str, Any] = {}
    for holder in holders:
        is_loader = isinstance(holder, DataLoader)
        held = {name: value for name, value in attributes_of(holder).items() if not (is_loader and name in _OWN)}
        roots = {**named_outside(holder), **held, **roots}
    found: dict[int, tuple[str, Any]] = {}
    for place in reached(roots, _may_hold_loaders):
        if isinstance(place.value, _LOADERS) and not any(place.value is holder for holder in holders):
            found.setdefault(id(place.value), (".".join(place.path), place.value))
    return dict(found.values())


def _may_hold_loaders(value: Any) -> bool:
    if isinstance(value, _LOADERS):
        return False
    is_data = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return isinstance(value, (list, tuple, dict)) or (hasattr(type(value), "__iter__") and not is_data)


def _remembers(loader: DataLoader[Any]) -> bool:
    """Whether what a loader's sampler yields depends on its earlier passes, or may."""
    if isinstance(loader, TrackedLoader) or isinstance(loader.dataset, IterableDataset):
        # What these hold is compared as it is.
        return False
    cuts = type(loader.batch_sampler) is BatchSampler
    sampler = loader.sampler if loader.batch_sampler is None or cuts else loader.batch_sampler
    how: dict[str, Any] = {"dataset": loader.dataset, "is_dealt_out": False, "is_cut_by_torch": cuts}
    try:
        return WrappedSampler(sampler, **how, batch_size=1 if sampler is loader.sampler else None).remembers
    except (ConfigurationError, UnsupportedLoaderError):
        return True


def _generators_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The generators from which a loader draws, by the names that lead there."""
    found = {}
    parts: Mapping[str, Any] = {name: getattr(loader, name, None) for name in ("generator", "dataset", "collate_fn")}
    for place in reached(parts):
        if identity_of(place.value):
            found[".".join(place.path)] = place.value
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name, None)
        for path, generator in SamplerParts(sampler, loader.dataset).generators.items():
            if identity_of(generator):
                found[".".join(map(str, (name, *path)))] = generator
        for path, state in generators_outside(sampler, loader.dataset):
            found[".".join(map(str, (name, *path)))] = state.generator
    return found


def held_loader(iterable: Any) -> str:
    """The attribute under which an object that is iterated holds a single DataLoader; empty if it holds none, or more.

    An object with a state of its own is resumed by that, and one that holds an iterator has begun already.
    """
    is_plain = hasattr(type(iterable), "__iter__") and not hasattr(iterable, "__next__")
    if isinstance(iterable, DataLoader) or not is_plain or hasattr(type(iterable), "state_dict"):
        return ""
    held = getattr(iterable, "__dict__", {})
    loaders = [name for name, value in held.items() if isinstance(value, DataLoader)]
    begun = any(isinstance(value, _BaseDataLoaderIter) for value in held.values())
    return loaders[0] if len(loaders) == 1 and not begun else ""


def named_in(holders: tuple[Any, ...]) -> dict[str, Any]:
    """The attributes that a loader has beside those of torch's, and those of an object that holds it, by name.

    Of torch's there is the name of the function that collates.
    """
    found = {}
    for number, holder in enumerate(holders):
        if isinstance(holder, DataLoader):
            collate = function_in(holder.collate_fn)
            found["collate_fn"] = getattr(collate, "__qualname__", type(collate).__qualname__)
        # A copy: the loader may be read in a thread.
        for name, value in attributes_of(holder).items():
            is_torchs = isinstance(holder, DataLoader) and (name in TORCHS or name.startswith("_DataLoader__"))
            if not (is_torchs or any(value is one for one in holders) or name.startswith("__pl")):
                found[f"{type(holder).__qualname__}.{name}" if number else name] = value
    return found


def digests_of_attributes(holders: tuple[Any, ...]) -> dict[str, str]:
    """Digests of these attributes, to be compared in this process."""
    found = {}
    for name, value in named_in(holders).items():
        if isinstance(value, _BaseDataLoaderIter) and hasattr(value._index_sampler, "plan"):
            # One that is not begun, or at its end, says no more than none.
            told = "" if value._num_yielded in (0, _length_of(value._index_sampler)) else str(value._num_yielded)
        elif isinstance(value, torch.Tensor):
            told = f"{id(value)} {value._version}"
        elif isinstance(value, GENERATORS):
            told = state_of_generator(value)
        elif isinstance(value, np.ndarray) and value.nbytes > _LARGE:
            # Some thousand of its numbers: this is looked at behind every batch.
            told = f"{id(value)} {shown(value)}"
        else:
            told = digest_of_contents({name.rpartition(".")[2]: value})
        if told:
            found[name] = told
    return found


def told_by_iteration(holders: tuple[Any, ...]) -> dict[str, str]:
    """Digests of attributes of a loader's dataset and ``collate_fn`` that code of ``__iter__`` sets, by name."""
    kind: Any = type(holders[0]) if holders else object
    names, found = _names_set_by(kind), dict[str, str]()
    for part in _TOLD if names else ():
        value = vars(holders[-1]).get(part.rstrip("."))
        held = getattr(value, "__dict__", {})
        # Batches are read through a dataset around the user's.
        held = getattr(held["dataset"], "__dict__", {}) if "_held_generators" in held else held
        found |= {part + name: digest_of_contents({name: held[name]}) for name in names & held.keys()}
    return found


@lru_cache(maxsize=256)
def _names_set_by(kind: type) -> frozenset[str]:
    return frozenset[str]().union(*map(names_set, _codes_of_iter(kind)))


def _codes_of_iter(kind: type) -> list[CodeType]:
    code = getattr(getattr(kind, "__iter__", None), "__code__", None)
    return [] if code is None else [*codes_in(code)]


def _length_of(batches: Any) -> int:
    """Batches that DataLoader is asked for in a pass."""
    plan = getattr(batches.plan, "plan", batches.plan)
    return int(plan.num_steps) - int(batches.first_step)


def counts_batches(kind: type) -> bool:
    """Whether code of ``__iter__`` counts in variables of its own, so that a resume at the next batch counts others."""
    codes = _codes_of_iter(kind)
    adds = any(
        step.opname == "BINARY_OP" and step.argrepr == "+=" for one in codes for step in dis.get_instructions(one)
    )
    return adds or any(name in _COUNTING for one in codes for name in one.co_names)


def is_short(value: Any) -> bool:
    """Whether a variable is compared behind every batch: a plain one, a short container, or an object of the user's."""
    if isinstance(value, (list, tuple, dict, set, deque)):
        return len(value) <= _MOST_SHOWN
    is_array = isinstance(value, (torch.Tensor, np.ndarray)) and value.nbytes <= _MOST_BYTES
    is_object = is_users(type(value).__module__) or isinstance(value, SimpleNamespace)
    is_object = is_object and not isinstance(value, (torch.nn.Module, Dataset, Sampler))
    return type(value) in PLAIN or is_array or (is_object and not is_lightnings(value))


def portable_digest(value: Any) -> str:
    """Digest of a value, the same in every process; empty where nothing of it can be told."""
    with suppress(Exception):
        return digest(value)
    with suppress(Exception):
        return digest(shown(value, of_copy=True))
    return ""
