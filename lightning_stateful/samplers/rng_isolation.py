"""Isolates a wrapped sampler from global RNG state and from torch.distributed while it iterates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, repeat
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.rng import GENERATORS, Randomness, keep_randomness, seed_generator, seed_randomness

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
        shares_rows: Whether lists in a long list are shared, which were seen to stay as they are.

    Attributes:
        sampler: The copy.
    """

    def __init__(
        self, sampler: Any, *, seed: int, dataset: Any = None, as_one_rank: bool = True, shares_rows: bool = False
    ) -> None:
        self._seed = seed
        self._name = type(sampler).__qualname__
        self._made = DeepCopy(dataset, shares_rows=shares_rows)
        self.sampler = self._made(sampler)
        self._was_told = as_one_rank and _tell_of_one_rank(self._made.samplers.values(), self._made.dicts)
        self._inner: Randomness | None = None

    @property
    def keeps_rows(self) -> bool:
        """Whether all lists in long lists still hold what those of the original hold."""
        return all(copies == rows for rows, copies in self._made.rows)

    def seed(self, *labels: int) -> None:
        """Seed everything that the copy may draw from; to be called within :meth:`entered`."""
        seed_randomness(derive_seed("sampler", self._seed, *labels))
        for path, generator in self._made.generators.items():
            seed_generator(generator, derive_seed("sampler", path, self._seed, *labels))

    def begin(self, epoch: int, cycle: int, state: tuple[int, Any] | None = None) -> Iterator[Any]:
        """Iterate the copy; to be called, and iterated, within :meth:`entered`.

        Args:
            epoch: Which epoch.
            cycle: Which pass within the epoch.
            state: How many slots it had yielded when it gave a state of its own, and that state.
        """
        self.seed(epoch, cycle)
        for part in reversed(self._made.samplers.values()):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
        if state is not None:
            self.seed(epoch, cycle, state[0])
            self.sampler.load_state_dict(state[1])
        return _only_next(iter(self.sampler))

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
    """Copies a sampler with all that it holds, and notes the generators and samplers in the copy.

    Datasets, modules, functions, iterators, memory that is mapped, read-only or very large, and whatever cannot be
    copied are shared with the original; so are objects in long lists, which are data.

    Args:
        dataset: Another object to be shared, or None.
        shares_rows: Whether lists in a long list are shared.

    Attributes:
        generators: Generators in the copy by where they are held, such as ``"sampler.rngs.0"``.
        samplers: The copy itself, under ``""``, and the samplers in it.
        dicts: The dicts in the copy.
        rows: Long lists of flat lists with the lists that were copied from them.
    """

    # Longer lists hold data; of very long ones some items say what kind of items they hold.
    _LONG, _VERY_LONG, _MOST_BYTES = 1024, 2**16, 2**28

    def __init__(self, dataset: Any = None, *, shares_rows: bool = False) -> None:
        self.generators: dict[str, Any] = {}
        self.samplers: dict[str, Any] = {}
        self.dicts: list[dict[Any, Any]] = []
        self.rows: list[tuple[list[Any], list[Any]]] = []
        self._shares_rows = shares_rows
        # Copies by the id of the original, and the originals, so that no id is used again.
        self._memo: dict[int, Any] = {} if dataset is None else {id(dataset): dataset}
        self._originals: list[Any] = []

    def __call__(self, sampler: Any) -> Any:
        """The copy of ``sampler``."""
        copied = self._copy(sampler, "")
        self._memo.clear()
        self._originals.clear()
        return copied

    def _copy(self, value: Any, path: str, in_data: bool = False) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._originals.append(value)
        try:
            copied = value if _is_shared(value, path) else self._copied(value, path, in_data)
        except Exception:
            # It cannot be copied, like a lock or an open file.
            copied = value
            self.samplers.pop(path, None)
        self._note(value, copied, path)
        return copied

    def _copied(self, value: Any, path: str, in_data: bool) -> Any:
        if type(value) is list:
            items: list[Any] = []
            self._memo[id(value)] = items
            items.extend(self._items(value, path))
            return items
        if type(value) is dict:
            copied: dict[Any, Any] = {}
            self._memo[id(value)] = copied
            copied.update(zip(value, self._items(list(value.values()), path, value), strict=True))
            self.dicts.append(copied)
            return copied
        if type(value) is tuple:
            parts = self._items(value, path)
            return self._memo.get(id(value), value if parts is value else tuple(parts))
        if type(value) is set:
            return value.copy()
        if isinstance(value, (np.ndarray, torch.Tensor)):
            return self._copied_array(value, path)
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).set_state(value.get_state())
        # Objects in a long list are data; a generator may stand there all the same.
        return value if in_data and not isinstance(value, (*GENERATORS, *_CONTAINERS)) else self._rebuilt(value, path)

    def _items(self, values: Sequence[Any], path: str, keys: Iterable[Any] | None = None) -> Sequence[Any]:
        kinds = set(map(type, _some(values, self._VERY_LONG)))
        if kinds <= _PLAIN:
            return values
        is_long = len(values) > self._LONG
        if is_long and kinds == {list} and set(map(type, chain(*_some(values, 4 * self._LONG)))) <= _PLAIN:
            return self._rows_of(values)
        keys = range(len(values)) if keys is None else keys
        return [self._copy(value, f"{path}.{key}", is_long) for key, value in zip(keys, values, strict=True)]

    def _rows_of(self, values: Sequence[Any]) -> Sequence[Any]:
        if self._shares_rows:
            return values
        # In one go; a list may stand there twice, or elsewhere as well.
        made = dict(zip(map(id, values), map(list.copy, values), strict=True))
        self._memo = made | self._memo
        copies = [self._memo[id(row)] for row in values]
        self.rows.append((list(values), copies))
        return copies

    def _copied_array(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            own = not value.is_shared() and value.nbytes <= self._MOST_BYTES  # type: ignore[no-untyped-call]  # torch's
            return value.detach().clone().requires_grad_(value.requires_grad) if own else value
        if not value.flags.writeable or value.nbytes > self._MOST_BYTES or _is_mapped(value):
            return value
        copied = value.copy()
        if value.dtype.hasobject:
            copied.flat[:] = [self._copy(item, f"{path}.{number}") for number, item in enumerate(value.flat)]
        return copied

    def _rebuilt(self, value: Any, path: str) -> Any:
        """A copy of an object, made as :func:`copy.deepcopy` makes it."""
        if hasattr(value, "__deepcopy__"):
            return value.__deepcopy__(self._memo)
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return value
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        copied = make(*self._items(args, path))
        self._note(value, copied, path)
        if hasattr(copied, "__setstate__"):
            if state is not None:
                copied.__setstate__(self._attributes(state, path) if type(state) is dict else self._copy(state, path))
        else:
            held, slots = state if isinstance(state, tuple) else (state, None)
            for name, item in self._attributes({**(held or {}), **(slots or {})}, path).items():
                object.__setattr__(copied, name, item)
        if items is not None:
            copied.extend(self._items(list(items), path))
        for key, item in pairs or ():
            copied[key] = self._copy(item, f"{path}.{key}")
        return copied

    def _attributes(self, held: Mapping[str, Any], path: str) -> dict[str, Any]:
        before = f"{path}." if path else ""
        # Lightning notes the arguments of samplers that are made while it asks for loaders.
        return {
            name: value if name.startswith("__pl_saved") else self._copy(value, f"{before}{name}")
            for name, value in held.items()
        }

    def _note(self, value: Any, copied: Any, path: str) -> None:
        self._memo[id(value)] = copied
        if isinstance(copied, GENERATORS) and copied is not value:
            self.generators.setdefault(path, copied)
        if not path or (copied is not value and _is_sampler(copied)):
            self.samplers[path] = copied


_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), range, np.int64, np.int32, np.float64, np.bool_})
_CONTAINERS = (list, tuple, dict, set, np.ndarray, torch.Tensor)
_SHARED = (
    *(type, FunctionType, BuiltinFunctionType, ModuleType),
    *(Dataset, torch.nn.Module, torch.nn.Parameter, np.generic, random.SystemRandom),
)
# Objects of these packages, a Trainer or a DataLoader among them, are none of a sampler's data.
_LIBRARIES = ("torch", "lightning", "pytorch_lightning")
_COUNTS = ("num_samples", "total_size", "num_selected_samples")


def _some(values: Sequence[Any], most: int) -> Sequence[Any]:
    """All of them, or some thousand evenly apart where there are more than ``most``."""
    return values if len(values) <= most else values[:: len(values) // 4096]


def _is_shared(value: Any, path: str) -> bool:
    if isinstance(value, Iterator) and not hasattr(type(value).__iter__, "__code__"):
        return True
    if not path or isinstance(value, Sampler):
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


def _is_mapped(array: Any) -> bool:
    # What is written there goes to a file, which others may read as well.
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def _is_sampler(value: Any) -> bool:
    if isinstance(value, Sampler):
        return True
    if isinstance(value, (*_SHARED, *_CONTAINERS)) or hasattr(value, "__getitem__"):
        return False
    return hasattr(value, "__iter__") and hasattr(value, "__dict__")


def _only_next(iterator: Iterator[Any]) -> Iterator[Any]:
    """An iterator of which only ``next`` is asked: a sampler that is its own iterator may begin anew at ``iter()``."""
    if not hasattr(type(iterator).__iter__, "__code__"):
        return iterator
    step: Callable[[Iterator[Any]], Any] = next
    return map(step, repeat(iterator))


# Ranks


def _tell_of_one_rank(samplers: Iterable[Any], dicts: Iterable[dict[Any, Any]]) -> bool:
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


def _settings_of_one_rank(sampler: Any) -> dict[str, Any]:
    """What has to be set on a sampler that deals batches out by itself; empty for others."""
    held = getattr(sampler, "__dict__", {})
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


def _ranks_in(held: Mapping[Any, Any]) -> dict[str, Any]:
    """What says there, unless there is one rank, that there is one; empty where nothing does."""
    for replicas in _REPLICAS:
        for rank in _RANK:
            if replicas in held and rank in held and (held[replicas], held[rank]) != (1, 0):
                return {replicas: 1, rank: 0}
    return {}
