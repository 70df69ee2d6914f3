"""Notices a dataset that remembers what was read: a resume begins without that memory."""

from __future__ import annotations

import ctypes
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, islice
from operator import le
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from lightning_stateful.contents.code_uses import Use, uses_of
from lightning_stateful.contents.held_state import is_same, is_same_item
from lightning_stateful.contents.kept_samples import CACHED, KeptSamples
from lightning_stateful.contents.lost_items import LostItems
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import (
    BUILT_IN,
    Place,
    attributes_of,
    can_be_read,
    closure_of,
    defaults_of,
    is_users,
    named_outside,
    names_in,
    reached,
    unless_changed,
)

T = TypeVar("T")
# Batches after which nothing is looked at any more, and the changes by which one carries something over: of a
# container, and of what code counts up or moves on.
_NUM_LOOKS, _LEAST_CHANGES, _LEAST_COUNTED = 6, 4, 2
# Items of a dict that are numbered by more than chance.
_LEAST_NUMBERED = 4
# Batches of a stream after which nothing is looked at any more.
_MOST_BATCHES = 2048
_MOST_HOLDERS, _MOST_ITEMS, _MOST_COLUMNS = 256, 2048, 16
# Kinds of values in which a part of some samples may be kept for later ones.
_LEFTOVERS = (list, tuple, dict, str, bytes, bytearray, torch.Tensor, np.ndarray)


class _Name(NamedTuple):
    """A value that is looked at.

    Attributes:
        way: The attributes that lead to the object that holds it; empty where none do, as for a module's variables.
        holder: The class of that object, or the name of a function.
        attribute: The name of the value there.
    """

    way: str
    holder: str
    attribute: str


class _Moving(NamedTuple):
    """The position of an iterator, which cannot be put back.

    Attributes:
        position: It, or another object each time where only ``next()`` would tell.
    """

    position: Any


class ReadWatch:
    """Looks at what a map-style dataset holds before and after each of the first batches that a process reads.

    Looked at are numbers, strings, tensors, containers, iterators and values in shared memory: in attributes of objects
    of the user's classes, in closures, in default arguments, and in variables of modules and classes that their methods
    name. Counts, iterators and queues that nearly every batch changes are warned of, if the code that reads samples
    uses them otherwise than to count. Nothing is read for that.

    Args:
        dataset: The dataset.
        keeps: Whether what the dataset keeps lasts for longer than an epoch.
        in_workers: Whether workers read it, of which one speaks for all.
    """

    # What it holds is not held by what it looks at.
    _looks_on = True
    _while, _if = "samples are read", "samples depend on it"
    _remedy = "derive it from the index and the epoch"

    def __init__(self, dataset: Any, *, keeps: bool = True, in_workers: bool = False) -> None:
        self._dataset, self._keeps = dataset, keeps
        self._is_over, self._kept = False, KeptSamples(dataset, _held)
        self._kept.is_over = not keeps
        said = torch.zeros(1, dtype=torch.bool)
        if in_workers:
            said.share_memory_()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._lost: LostItems | None = LostItems(dataset, _named_users, partial(_is_used, dataset), said)
        self._num_looks = 0
        self._changes: dict[_Name, list[Any]] = {}
        # Looks that have shown a container to have got items.
        self._grown: Counter[_Name] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        # A worker looks by itself.
        made = ReadWatch(self._dataset, keeps=self._keeps)
        made._is_over, made._kept.is_over = self._is_over, self._kept.is_over
        if made._lost is not None and self._lost is not None:
            made._lost.said = self._lost.said
        return vars(made)

    @property
    def is_over(self) -> bool:
        """Whether nothing is looked at any more."""
        return self._is_over and self._kept.is_over and (self._lost is None or self._lost.is_over)

    @is_over.setter
    def is_over(self, is_over: bool) -> None:
        # Items may be lost later, too.
        self._is_over = self._kept.is_over = is_over

    def __call__(self, read: Callable[[], T]) -> T:
        """Read samples, and look at what that changes.

        Args:
            read: Reads the samples of a batch.

        Warns:
            StatefulWarning: The dataset remembers what was read; once, in the first worker.
        """
        if self._lost is not None and not self._lost.is_over:
            read = partial(self._lost, read)
        if not self._kept.is_over:
            read = partial(self._kept, read)
        if self._is_over:
            return read()
        before = self._snapshot()
        samples = read()
        self._end_look(self._look(before, self._snapshot()))
        return samples

    def _end_look(self, found: list[_Name]) -> None:
        if self._lost is not None and self._lost.named is not None:
            owner, attribute = self._lost.named
            found = [name for name in found if name != owner._replace(attribute=attribute)]
        if found:
            self._warn(found)
        self._is_over = self._is_over or self._num_looks >= _NUM_LOOKS
        if self._is_over:
            # Nothing of the user's is kept alive.
            self._changes = {}

    def _snapshot(self) -> dict[_Name, Any]:
        try:
            return _snapshot(self._dataset)
        except Exception:
            # A thread of the user's may change a container meanwhile: no look at it ends a run.
            self._is_over = True
            return {}

    def _look(self, before: dict[_Name, Any], now: dict[_Name, Any]) -> list[_Name]:
        """The counts and queues that are carried over, if a look shows some."""
        self._num_looks += 1
        if self._is_over:
            return []
        try:
            for name, change in _changes(before, now).items():
                self._changes.setdefault(name, []).append(change)
            self._grown.update(name for name, value in now.items() if _is_grown(before.get(name), value))
            carried = [name for name, of in self._changes.items() if self._is_carried(name, of)]
            return sorted({*carried, *(name for name in self._grown if self._is_memory(name, now.get(name)))})
        except Exception:
            # Values that cannot be compared, or source that cannot be read.
            self._is_over = True
            return []

    def _is_carried(self, name: _Name, changes: list[tuple[Any, Any]]) -> bool:
        """Whether nearly every batch has changed a count or a queue that the code which reads uses."""
        latest = changes[-1][1]
        is_moving, is_set = isinstance(latest, _Moving), isinstance(latest, (int, float, dict))
        if not self._is_often(len(changes), is_counted=self._is_moved(latest)) or not (
            is_moving or _is_count_or_queue(changes)
        ):
            return False
        used = _uses(self._dataset, name)
        # A number that is set, and not counted up, is mostly the index in hand; numbers, what was drawn for a sample.
        return used.uses and (used.counts or not is_set)

    @staticmethod
    def _is_moved(value: Any) -> bool:
        """Whether this is a number or the position of an iterator."""
        return isinstance(value, (_Moving, int, float))

    def _is_often(self, num_changes: int, *, is_counted: bool) -> bool:
        least = _LEAST_COUNTED if is_counted else _LEAST_CHANGES
        return num_changes >= least and self._num_looks in (num_changes, _NUM_LOOKS)

    def _is_memory(self, name: _Name, value: Any) -> bool:
        """Whether reading adds items to a container, and code uses more of it than those of the sample in hand."""
        if self._grown[name] != _LEAST_COUNTED:
            return False
        used = _uses(self._dataset, name)
        grows = used.grows or is_numbered(value)
        # Of a list, an item by its key is one that is kept; in a set or a dict, a key says what was read.
        return grows and (used.uses_all if isinstance(value, list) else used.uses)

    def _warn(self, names: list[_Name]) -> None:
        self._is_over = True
        worker = get_worker_info()
        if worker is None or worker.id == 0:
            warnings.warn(
                f"{names[0].holder} changes {_joined(names)} whenever {self._while}. No checkpoint has that. If "
                f"{self._if}, a resume is not exact: {self._remedy}.",
                StatefulWarning,
                stacklevel=2,
            )


class StreamWatch(ReadWatch):
    """Looks at what functions of a stream hold before its first batch, and behind batches 1, 2, 4 and so on to 2048.

    Samples are read ahead, so that most batches change nothing. The last batch of each pass is one that is looked
    behind, too. Warned of is also what is left of some samples and joined with later ones: a list, string, tensor or
    the like that is changed, and not only added to, by code that adds to it, or uses it and then sets it.

    Args:
        source: Whatever holds the functions.
    """

    def __init__(self, source: Any) -> None:
        super().__init__(source, keeps=False)
        self._lost = None
        self._num_batches, self._before = 0, self._snapshot()

    def after_batch(self, *, is_last: bool = False) -> str:
        """A batch was read.

        Args:
            is_last: Whether it is the last one of a pass.

        Returns:
            A warning, once, that a function remembers what it was given; mostly nothing.
        """
        self._num_batches += 1
        if self.is_over or (self._num_batches & (self._num_batches - 1) and not is_last):
            return ""
        before, self._before = self._before, self._snapshot()
        found = self._look(before, self._before)
        self.is_over = bool(found) or self._num_batches >= _MOST_BATCHES
        if self.is_over:
            self._changes, self._before = {}, {}
        if not found:
            return ""
        return (
            f"{found[0].holder} changes {_joined(found)} as samples are read. No checkpoint has that: a resume begins "
            "with what it holds when it is made, and is not exact if samples depend on it. Carry it by "
            "stream.recurrent(function, initial), which is resumed."
        )

    def _is_often(self, num_changes: int, *, is_counted: bool) -> bool:
        return num_changes >= _LEAST_COUNTED

    def _snapshot(self) -> dict[_Name, Any]:
        values = super()._snapshot()
        # A list for each column, say.
        lists = {
            name._replace(attribute=f"{name.attribute}[{key!r}]"): list(item)
            for name, held in values.items()
            if isinstance(held, dict)
            for key, item in islice(held.items(), _MOST_COLUMNS)
            if isinstance(item, list) and len(item) <= _MOST_ITEMS
        }
        return values | lists

    def _is_carried(self, name: _Name, changes: list[tuple[Any, Any]]) -> bool:
        return super()._is_carried(name, changes) or self._is_leftover(name, changes)

    def _is_leftover(self, name: _Name, changes: list[tuple[Any, Any]]) -> bool:
        """Whether code leaves something here for the next call, and has left something else each time."""
        left = [now for was, now in changes if was is not None]
        if len(left) < _LEAST_COUNTED or not all(isinstance(now, _LEFTOVERS) for now in left):
            return False
        used = _uses(self._dataset, name)
        return used.uses and (used.carries or "[" in name.attribute)


def is_numbered(value: Any) -> bool:
    """Whether the items of a dict are numbered in their order, as new words of a vocabulary are."""
    if not isinstance(value, dict) or len(value) < _LEAST_NUMBERED:
        return False
    numbers = [*value.values()]
    is_named = not any(isinstance(key, (int, float)) for key in value)
    return is_named and {*map(type, numbers)} == {int} and numbers == [*range(numbers[0], numbers[0] + len(numbers))]


def moved_for_good(dataset: Any, *, is_elsewhere: bool = False) -> list[tuple[str, str, bool]]:
    """Iterators that reading samples may move on, and counts in shared memory: a second reading would, too.

    Args:
        dataset: The dataset.
        is_elsewhere: Whether that is in another process, which has iterators of its own.

    Returns:
        Of each the class or function that holds it, its name, and whether the code that reads samples uses it.
    """
    found = []
    # A thread of the user's may change a container meanwhile.
    with suppress(Exception):
        for name, value in _held(dataset):
            copied = _copied(value)
            is_moving = isinstance(copied, _Moving) and not is_elsewhere
            if is_moving or (_is_shared(value) and (is_elsewhere or copied is not value)):
                used = _uses(dataset, name)
                if used.counts or (used.uses and is_moving):
                    found.append((name.holder, name.attribute, used.uses))
    return found


def _uses(dataset: Any, name: _Name) -> Use:
    # Of a list in a dict, that of the dict.
    leaf = name.attribute.partition("[")[0].rpartition(".")[2]
    return uses_of(dataset, leaf, is_variable=not name.way)


def _named_users(dataset: Any) -> Iterator[tuple[Any, _Name]]:
    """Objects of the user's that are reached from a dataset, and the name of the object as that of a value in it."""
    for value, place in islice(_users(dataset), _MOST_HOLDERS):
        if not isinstance(value, FunctionType):
            yield value, _Name(_way(place), type(value).__qualname__, "")


def _is_used(dataset: Any, owner: _Name, attribute: str) -> bool:
    try:
        return _uses(dataset, owner._replace(attribute=attribute)).uses
    except Exception:
        # Source that cannot be read ends no run.
        return True


def _joined(names: list[_Name]) -> str:
    """The names of the first one's holder, three at most."""
    return " and ".join([repr(name.attribute) for name in names if name[:2] == names[0][:2]][:3])


def _snapshot(dataset: Any) -> dict[_Name, Any]:
    """What the user's objects hold, by name: values, and shallow copies of containers."""
    return {name: _copied(value) for name, value in _held(dataset)}


def _held(dataset: Any) -> Iterator[tuple[_Name, Any]]:
    outside: dict[str, Any] = named_outside(dataset)
    yield from ((_Name("", type(dataset).__qualname__, name), item) for name, item in outside.items())
    for value, place in islice(_users(dataset), _MOST_HOLDERS):
        is_function = isinstance(value, FunctionType)
        held = _named_by(value) if is_function else {**_cached_methods(type(value)), **attributes_of(value)}
        holder = value.__qualname__ if is_function else type(value).__qualname__
        yield from ((_Name(_way(place), holder, name), item) for name, item in held.items())


def _cached_methods(kind: type) -> dict[str, Any]:
    """The methods of a class whose results a ``functools.lru_cache`` keeps."""
    return {name: value for of in kind.__mro__ for name, value in vars(of).items() if isinstance(value, CACHED)}


def _users(dataset: Any) -> Iterator[tuple[Any, Place]]:
    """Objects and functions of the user's that are reached, and the place of each."""
    seen: dict[int, Any] = {}
    # A loader of the user's, of which a collate_fn is a method.
    owner = getattr(getattr(dataset, "func", None), "__self__", None)
    for place in reached({"dataset": dataset}):
        value = place.value
        is_left_out = isinstance(value, (type, ModuleType, DataLoader, Sampler)) and value is not owner
        if id(value) in seen or is_left_out:
            continue
        seen[id(value)] = value
        if is_users(value.__module__ if isinstance(value, FunctionType) else type(value).__module__):
            yield value, place


def _way(place: Place) -> str:
    """The attributes that lead to an object; empty for a function, and for what only a function leads to."""
    above: Place | None = place
    while above is not None:
        if isinstance(above.value, FunctionType):
            return ""
        above = above.above
    return ".".join(place.path)


def _named_by(function: FunctionType) -> dict[str, Any]:
    """Values of a function's closure, and those of its module that it names."""
    held = {name: function.__globals__[name] for name in names_in(function.__code__) if name in function.__globals__}
    return held | closure_of(function) | defaults_of(function)


_KINDS = (_Moving, list, tuple, deque, dict, set, frozenset, torch.Tensor, np.ndarray, np.generic)


def _is_looked_at(value: Any) -> bool:
    return type(value) in BUILT_IN or isinstance(value, _KINDS)


def _copied(value: Any) -> Any:
    """A value, or a shallow copy of a container, of a long one the first and last items; where an iterator stands."""
    value = _in_shared_memory(value)
    if type(value) is count:
        return _Moving(repr(value))
    if issubclass(type(value), Iterator) and type(value).__module__ in _ITERATORS:
        return _Moving(object())
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and can_be_read(value)):
        # Memory that is written again for each batch is no memory of what was read; another array in its place may be.
        is_count = (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
        return value.item() if is_count and not getattr(value, "is_cuda", False) else value
    if isinstance(value, dict):
        return unless_changed(lambda: dict(islice(dict.items(value), _MOST_ITEMS)))
    if isinstance(value, (set, frozenset)):
        return frozenset(value) if len(value) <= _MOST_ITEMS else len(value)
    if isinstance(value, deque) or (isinstance(value, (list, tuple)) and len(value) <= 2 * _MOST_ITEMS):
        return type(value)(value) if type(value) in (list, tuple, deque) else list(value)
    if isinstance(value, (list, tuple)):
        return [len(value), *value[:_MOST_ITEMS], *value[-_MOST_ITEMS:]]
    return value


# Modules of iterators that hold a position of their own, which files do not: they are opened again.
_ITERATORS = ("builtins", "itertools")


def _in_shared_memory(value: Any) -> Any:
    """The number or numbers in a value of multiprocessing's or ctypes's; any other value itself."""
    held = vars(value).get("_obj") if type(value).__module__ == "multiprocessing.sharedctypes" else value
    if isinstance(held, ctypes._SimpleCData):
        return held.value
    return list(held) if isinstance(held, ctypes.Array) else value


def _is_shared(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return can_be_read(value) and value.is_shared() if is_tensor else _in_shared_memory(value) is not value


def _changes(before: dict[_Name, Any], now: dict[_Name, Any]) -> dict[_Name, tuple[Any, Any]]:
    """What was changed, and not only added to: the value before, None for a missing one, and now."""
    pairs = {name: (before.get(name), value) for name, value in now.items() if _is_looked_at(value)}
    return {name: pair for name, pair in pairs.items() if not is_same(*pair) and not _is_added_to(*pair)}


def _is_added_to(was: Any, now: Any) -> bool:
    """Whether a container only got items; a dict may have lost some too, as a cache of bounded size does."""
    if isinstance(was, dict) and isinstance(now, dict):
        return all(is_same_item(item, now[key]) for key, item in was.items() if key in now)
    if isinstance(was, frozenset) and isinstance(now, frozenset):
        return was <= now
    return type(was) is type(now) and isinstance(was, (list, tuple)) and is_same(was, now[: len(was)])


def _is_grown(was: Any, now: Any) -> bool:
    """Whether a list or a set only got items, or a dict of numbers."""
    is_looked_at = isinstance(now, (list, frozenset)) or _are_counts(None, now)
    return is_looked_at and not is_same(was, now) and _is_added_to(was, now)


def _is_count_or_queue(changes: list[tuple[Any, Any]]) -> bool:
    """Whether changes are of a number that only grows or falls, or takes turns, of several numbers, or of a queue."""
    pairs = [pair for pair in changes if pair[0] is not None]
    if all(isinstance(one, (int, float)) for pair in pairs for one in pair):
        takes_turns = len(pairs) >= _LEAST_CHANGES and len(set(pairs)) == 2
        return takes_turns or len({was < now for was, now in pairs}) == 1
    return all(map(_are_counts, *zip(*pairs, strict=True))) or all(map(_moves_on, *zip(*pairs, strict=True)))


def _are_counts(was: Any, now: Any) -> bool:
    """Whether a dict holds numbers, or a list as many as before of which none is less."""
    items = now.values() if isinstance(now, dict) else now if isinstance(now, list) else [None]
    if not all(isinstance(one, (int, float, np.number)) for one in items):
        return False
    is_as_long = isinstance(was, list) and len(was) == len(now)
    return isinstance(now, dict) or (is_as_long and all(map(le, was, now)))


def _moves_on(was: Any, now: Any) -> bool:
    """Whether a deque has changed, or of a list items were taken from one end, and others perhaps added."""
    if isinstance(now, list) and isinstance(was, list):
        # Of a list of samples that are kept under their index, most are None at first.
        rests = ((was[number:], now[: len(was) - number]) for number in range(1, len(was)))
        taken = (is_same(rest, first) for rest, first in rests if any(one is not None for one in rest))
        return (0 < len(now) < len(was) and is_same(was[: len(now)], now)) or any(taken)
    return isinstance(now, deque) and isinstance(was, deque)
