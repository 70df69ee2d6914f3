"""Isolates a wrapped sampler from global RNG state and from torch.distributed while it iterates."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, product, repeat
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.rng import GENERATORS, Randomness, keep_randomness, seed_generator, seed_randomness
from lightning_stateful.samplers.state_codec import from_plain, to_plain

# Where samplers that deal out to ranks by themselves keep how many there are, which, and their share.
_REPLICAS, _RANK = ("num_replicas", "world_size", "_num_replicas", "_world_size"), ("rank", "_rank")


class IsolatedCopy:
    """A deep copy of a sampler that is iterated for one rank, under randomness of its own.

    Within :meth:`entered` the process-wide CPU generators are the copy's; outside, nothing of that can be seen.
    Generators in the copy are seeded with them. A sampler in it that deals out to ranks by itself is told that there is
    one rank: the ranks are the toolkit's to deal out to.

    Args:
        sampler: The user's sampler or batch sampler; it stays as it is.
        seed: Chooses the randomness, together with the labels of :meth:`seed`.
        dataset: What the copy shares with the original, beside what :class:`DeepCopy` shares.
        as_one_rank: Whether samplers in it are told that there is one rank.

    Attributes:
        sampler: The copy.
    """

    def __init__(self, sampler: Any, *, seed: int, dataset: Any = None, as_one_rank: bool = True) -> None:
        self._seed = seed
        self._name = type(sampler).__qualname__
        made = DeepCopy(sampler, dataset)
        self.sampler = made.sampler
        self._generators, self._samplers = made.generators, made.samplers
        self._was_told = as_one_rank and _tell_of_one_rank(self._samplers, made.dicts)
        self._inner: Randomness | None = None

    def seed(self, *labels: int) -> None:
        """Seed everything that the copy may draw from; to be called within :meth:`entered`."""
        seed_randomness(derive_seed("sampler", self._seed, *labels))
        for number, generator in enumerate(self._generators):
            seed_generator(generator, derive_seed("held generator", number, self._seed, *labels))

    def begin(self, epoch: int, cycle: int, drawn: int = 0, state: Any = None) -> Iterator[Any]:
        """Iterate the copy; to be called, and iterated, within :meth:`entered`.

        Args:
            epoch: Which epoch.
            cycle: Which pass within the epoch.
            drawn: How many items it had yielded when it gave a state.
            state: What :meth:`state` returned then; None to begin with the first item.
        """
        self.seed(epoch, cycle)
        for part in self._samplers:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
        if state is not None:
            self.seed(epoch, cycle, drawn)
            self.sampler.load_state_dict(from_plain(state))
        iterator = iter(self.sampler)
        # A sampler that is its own iterator may begin anew at iter(), which islice() calls: let only next() be called.
        return map(_next, repeat(iterator)) if hasattr(type(iterator).__iter__, "__code__") else iterator

    def state(self, epoch: int, cycle: int, drawn: int) -> Any:
        """The own state of a copy that has yielded ``drawn`` items, as plain data; within :meth:`entered`."""
        # Seeded first: a state may hold generators, which a resume then puts where they are now.
        self.seed(epoch, cycle, drawn)
        return to_plain(self.sampler.state_dict(), f"{self._name}.state_dict()")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the copy under its own randomness, which goes on where it was left.

        Raises:
            ConfigurationError: A sampler that counted its share of the ranks when it was built cannot be alone.
        """
        with keep_randomness():
            if self._inner is not None:
                self._inner.restore()
            try:
                yield
            except AssertionError as error:
                if not self._was_told:
                    raise
                why = str(error).partition("\n")[0] or "without a word"
                raise ConfigurationError(
                    f"{self._name} deals batches out to ranks by itself, and failed when it was told that there is one "
                    f"rank (AssertionError: {why}). Build it for one rank (num_replicas=1, rank=0): the loader deals "
                    "its batches out."
                ) from error
            self._inner = Randomness.now()


class DeepCopy:
    """A deep copy of a sampler, by :func:`copy.deepcopy`, and the generators and samplers in it.

    Datasets, modules, functions, iterators, memory that is mapped, read-only or very large, and whatever cannot be
    copied are shared with the original; so are objects in long lists and lists in very long ones, which are data.

    Args:
        sampler: The original.
        dataset: Another object to be shared, or None.

    Attributes:
        sampler: The copy.
        generators: Generators in the copy, in the order in which they are found.
        samplers: Samplers in the copy, each after those that it holds; the last is the copy itself.
        dicts: The dicts in the copy.
    """

    # Longer lists hold data; of very long ones some items say what kind of items they hold.
    _LONG, _VERY_LONG, _MOST_BYTES = 1024, 2**16, 2**28

    def __init__(self, sampler: Any, dataset: Any = None) -> None:
        # What stands in the copy for an original, by its id: what is shared, and what is copied in one go.
        self._memo: dict[int, Any] = {} if dataset is None else {id(dataset): dataset}
        # Originals, each after what it holds.
        self._found: list[Any] = []
        self._seen: set[int] = set()
        self._look_at(sampler, is_held=False)
        own = [copied for value in self._found if (copied := self._copied(value)) is not value]
        self.sampler = self._copied(sampler)
        self.generators = [copied for copied in own if isinstance(copied, GENERATORS)]
        self.samplers = [copied for copied in own if copied is not self.sampler and _is_sampler(copied)]
        self.samplers.append(self.sampler)
        self.dicts = [copied for copied in own if type(copied) is dict]

    def _look_at(self, value: Any, in_data: bool = False, is_held: bool = True) -> None:
        """Note a value and all that it holds."""
        if type(value) in _PLAIN or id(value) in self._memo or id(value) in self._seen:
            return
        self._seen.add(id(value))
        is_datum = in_data and not isinstance(value, (*GENERATORS, *_CONTAINERS))
        try:
            if is_datum or _is_shared(value, is_held):
                self._memo[id(value)] = value
            else:
                is_long = type(value) in (list, tuple, dict) and len(value) > self._LONG
                for item in self._parts(value):
                    self._look_at(item, is_long)
        except Exception:
            # It cannot be copied, like a lock or an open file.
            self._memo[id(value)] = value
        self._found.append(value)

    def _copied(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:
            # Of samplers, a proxy that hands every attribute on, or a class that cannot be called or pickled.
            self._memo[id(value)] = made = self._rebuilt(value) if _is_sampler(value) else value
            return made

    def _rebuilt(self, value: Any) -> Any:
        """A copy made of the attributes alone; the object itself where that cannot be."""
        try:
            held, made = vars(value), object.__new__(type(value))
            # For what holds it in turn.
            self._memo[id(value)] = made
            for name, item in held.items():
                object.__setattr__(made, name, copy.deepcopy(item, self._memo))
        except Exception:
            return value
        return made

    def _parts(self, value: Any) -> Iterable[Any]:
        """What a value holds; nothing for a value that is shared or copied in one go."""
        copied: Any = value
        if isinstance(value, torch.Tensor):
            own = not value.is_shared() and value.nbytes <= self._MOST_BYTES  # type: ignore[no-untyped-call]  # torch's
            copied = value.detach().clone().requires_grad_(value.requires_grad) if own else value
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes <= self._MOST_BYTES and not _is_mapped(value):
                return value.flat if value.dtype.hasobject else ()
        elif isinstance(value, torch.Generator):
            copied = torch.Generator(value.device).set_state(value.get_state())
        elif type(value) is set:
            copied = value.copy()
        elif type(value) in (list, tuple, dict):
            return self._items(value)
        else:
            return () if hasattr(value, "__deepcopy__") else self._state(value)
        self._memo[id(value)] = copied
        return ()

    def _items(self, value: Any) -> Iterable[Any]:
        """Keys and items of a list, tuple or dict; nothing if they are plain, or many lists of plain values."""
        items = list(value.values()) if type(value) is dict else value
        keys = value if type(value) is dict else ()
        kinds = set(map(type, _some(items, self._VERY_LONG)))
        has_rows = kinds in ({list}, {tuple}) and len(items) > self._LONG
        has_rows = has_rows and set(map(type, chain(*_some(items, 4 * self._LONG)))) <= _PLAIN
        if set(map(type, keys)) <= _PLAIN and (kinds <= _PLAIN or has_rows):
            if kinds == {list} and len(items) <= self._VERY_LONG:
                # A list may stand there twice, or elsewhere as well.
                self._memo.update(zip(map(id, items), map(list.copy, items), strict=True))
                items = [self._memo[id(row)] for row in items]
            self._memo[id(value)] = dict(zip(keys, items, strict=True)) if keys else type(value)(items)
            return ()
        return chain(keys, items)

    def _state(self, value: Any) -> Iterable[Any]:
        """What an object holds, as :func:`copy.deepcopy` asks for it."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            # What it holds may be copied all the same.
            reduced = (None, (), vars(value))
        if isinstance(reduced, str):
            return
        _, args, state, items, pairs = (*reduced, None, None, None)[:5]
        yield from args
        for held in state if type(state) is tuple else (state,):
            for name, item in held.items() if type(held) is dict else (("", held),):
                if str(name).startswith("__pl_saved"):
                    # Lightning notes the arguments of samplers that are made while it asks for loaders.
                    self._memo[id(item)] = item
                yield item
        yield from chain(items or (), *(pairs or ()))


T = TypeVar("T")
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), range, np.int64, np.int32, np.float64, np.bool_})
_CONTAINERS = (list, tuple, dict, set, np.ndarray, torch.Tensor)
_SHARED = (
    *(type, FunctionType, BuiltinFunctionType, ModuleType),
    *(Dataset, torch.nn.Module, torch.nn.Parameter, np.generic, random.SystemRandom),
)
# Objects of these packages, a Trainer or a DataLoader among them, are none of a sampler's data.
_LIBRARIES = ("torch", "lightning", "pytorch_lightning")
_COUNTS = ("num_samples", "total_size", "num_selected_samples")


def _some(values: Sequence[T], most: int) -> Sequence[T]:
    """All of them, or some thousand evenly apart where there are more than ``most``."""
    return values if len(values) <= most else values[:: len(values) // 4096]


def _is_shared(value: object, is_held: bool) -> bool:
    if isinstance(value, Iterator) and not hasattr(type(value).__iter__, "__code__"):
        return True
    if not is_held or isinstance(value, Sampler):
        return False
    if isinstance(value, _SHARED):
        return True
    if isinstance(value, (*_CONTAINERS, *GENERATORS)):
        return False
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return True
    # Whatever else is indexed and has a length is a dataset of some library.
    is_data = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return is_data and not type(value).__module__.startswith(("builtins", "collections", "array"))


def _is_mapped(array: object) -> bool:
    # What is written there goes to a file, which others may read as well.
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def _is_sampler(value: object) -> bool:
    if isinstance(value, Sampler):
        return True
    if isinstance(value, (*_SHARED, *_CONTAINERS)) or hasattr(value, "__getitem__"):
        return False
    return hasattr(value, "__iter__") and hasattr(value, "__dict__")


_next: Callable[[Iterator[Any]], Any] = next


# Ranks


def _tell_of_one_rank(samplers: Iterable[object], dicts: Iterable[dict[object, object]]) -> bool:
    """Tell copies of samplers, and the arguments that they keep, that there is one rank; whether any had to be told."""
    was_told = False
    for sampler in samplers:
        for name, value in _settings_of_one_rank(sampler).items():
            was_told = True
            try:
                setattr(sampler, name, value)
            except AttributeError as error:
                raise UnsupportedLoaderError(
                    f"The sampler {type(sampler).__qualname__} deals batches out to ranks by itself, and its {name!r} "
                    "cannot be set. Build it for one rank (num_replicas=1, rank=0): the loader deals its batches out."
                ) from error
    for held in dicts:
        held.update(_ranks_in(held))
    return was_told


def _settings_of_one_rank(sampler: object) -> dict[str, int]:
    """Attributes to set on a sampler that deals batches out by itself; empty for others."""
    held: dict[str, Any] = getattr(sampler, "__dict__", {})
    settings = _ranks_in(held)
    if not settings:
        return {}
    ranks = next(held[name] for name in _REPLICAS if name in settings)
    counts = {name: held[name] for name in _COUNTS if isinstance(held.get(name), int)}
    if isinstance(sampler, DistributedSampler) and isinstance(held.get("dataset"), Sized):
        whole = len(held["dataset"])
        return settings | {name: whole for name in ("num_samples", "total_size") if name in counts}
    # Others count their share in various ways; that of a single rank is all of it.
    if isinstance(ranks, int) and "num_samples" in counts:
        settings["num_samples"] = counts.get("total_size", counts["num_samples"] * ranks)
    if isinstance(ranks, int) and "num_selected_samples" in counts:
        settings["num_selected_samples"] = counts["num_selected_samples"] * ranks
    return settings


def _ranks_in(held: Mapping[Any, object]) -> dict[str, int]:
    """Rank attributes to overwrite so that a dict describes one rank; empty if there are none, or they do."""
    for replicas, rank in product(_REPLICAS, _RANK):
        if replicas in held and rank in held and (held[replicas], held[rank]) != (1, 0):
            return {replicas: 1, rank: 0}
    return {}
