"""Notices a dataset that remembers what was read: a resume begins without that memory."""

from __future__ import annotations

import copy
import dis
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from operator import is_
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from lightning_stateful.contents.dataset_content import bytes_of, digest_of_batch, is_same_batch
from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.samplers.attributes import (
    BUILT_IN,
    PLAIN,
    Place,
    attributes_of,
    is_users,
    named_outside,
    names_in,
    reached,
)
from lightning_stateful.samplers.rng import GENERATORS

T = TypeVar("T")
# Batches after which nothing is looked at any more, and the changes by which one carries something over.
_NUM_LOOKS, _LEAST_CHANGES = 6, 4
_MOST_HOLDERS, _MOST_ITEMS, _MOST_INNER, _LARGE, _MOST_BYTES = 256, 2048, 64, 2**20, 2**26
# Objects of these packages stay as they are when a batch is read once more, or are put back.
_REPEATABLE = frozenset(
    re.findall(
        r"\w+",
        "__main__ builtins types collections functools operator _operator re pathlib datetime decimal enum random "
        "logging typing abc string numpy torch torchvision PIL h5py datasets pyarrow _thread torchdata "
        "lightning_stateful",
    )
)


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


class ReadWatch:
    """Looks at what a map-style dataset holds before and after each of the first batches that a process reads.

    Looked at are numbers, strings, tensors and containers in attributes of objects of the user's classes, in closures,
    and in variables of modules and classes that their methods name. What nearly every batch changes, and not only adds
    to, is warned of. A dict of which no value is replaced is a cache, even if it is bounded.

    Where that leaves no trace, a batch that has changed something is read once more under its seed. If its samples are
    others then, they depend on what was read before. If they are the same and what is held is the same too, nothing is
    carried over, as with an attribute for the index that is being read, or the file that is open.

    Args:
        dataset: The dataset.

    Attributes:
        is_over: Whether nothing is looked at any more.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.is_over = False
        self._num_looks = 0
        self._content: dict[str, Any] | None = None
        self._changes: dict[_Name, list[Any]] = {}
        # Names that a batch read once more has changed again, and those that it has left as they were.
        self._carried: set[_Name] = set()
        self._harmless: set[_Name] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A worker looks by itself.
        return vars(ReadWatch(self._dataset)) | {"is_over": self.is_over}

    def note(self, samples: T) -> T:
        """Note the content of the samples that were read."""
        if not self.is_over:
            self._content = _digest(samples)
        return samples

    def __call__(self, read: Callable[[], T], again: Callable[[], Any] | None) -> T:
        """Read a batch, and look at what that changes.

        Args:
            read: Reads the batch, and tells :meth:`note` of its samples.
            again: Reads the samples once more, with the same random numbers, and puts generators back; None where these
                numbers cannot be had.

        Warns:
            StatefulWarning: The dataset remembers what was read; once, in the first worker.
        """
        if self.is_over:
            return read()
        before = _snapshot(self._dataset)
        self._content = None
        result = read()
        self._look(before, _snapshot(self._dataset), again)
        self.is_over = self.is_over or self._num_looks >= _NUM_LOOKS
        if self.is_over:
            # Nothing of the user's is kept alive.
            self._changes = {}
        return result

    def _look(self, before: dict[_Name, Any], now: dict[_Name, Any], again: Callable[[], Any] | None) -> None:
        self._num_looks += 1
        changes = _changes(before, now)
        for name, change in changes.items():
            self._changes.setdefault(name, []).append(change)
        new = {name for name, (was, _) in changes.items() if was is not None} - self._carried - self._harmless
        if new and _is_held(before, now) and again is not None and self._depends(new, again):
            self._warn(sorted(new), is_proven=True)
        elif found := sorted(name for name, of in self._changes.items() if self._is_carried(name, of)):
            self._warn(found, is_proven=False)

    def _is_carried(self, name: _Name, changes: list[tuple[Any, Any]]) -> bool:
        """Whether nearly every batch has changed a value; where none could be read again, of counts and queues only."""
        is_often = len(changes) >= _LEAST_CHANGES and self._num_looks in (len(changes), _NUM_LOOKS)
        is_kept = is_often and name not in self._harmless and (name in self._carried or _is_count_or_queue(changes))
        return is_kept and _is_used(self._dataset, name.attribute.rpartition(".")[2])

    def _depends(self, names: set[_Name], again: Callable[[], Any]) -> bool:
        """Whether samples depend on what was read before, where that can be tried; else False."""
        if not _can_try(self._dataset):
            return False
        users = _held(self._dataset)
        held, large = HeldState(*users), [(one, copy.deepcopy(one)) for one in _large_arrays(users)]
        if not held.is_whole:
            return False
        before, first = _snapshot(self._dataset), self._content
        try:
            other = _digest(again())
            changes = _changes(before, _snapshot(self._dataset))
            changed = {name for name, pair in changes.items() if len({b"".join(bytes_of(one)) for one in pair}) == 2}
            held.restore()
            # What differs between two readings from one state is drawn from elsewhere.
            if first and other and not is_same_batch(first, other):
                return is_same_batch(other, _digest(again()) or first)
        except Exception:
            # It tells nothing of the batch that was read.
            return False
        finally:
            held.restore()
            for one, copied in large:
                one[...] = copied
        self._carried |= names & changed
        self._harmless |= names - changed
        return False

    def _warn(self, names: list[_Name], *, is_proven: bool) -> None:
        depends = ", and the same batch read again has other samples by that" if is_proven else ""
        if_so = "A" if is_proven else "If samples depend on it, a"
        self._say(
            f"{names[0].holder} changes {_joined(names)} whenever samples are read{depends}. No checkpoint has that. "
            f"{if_so} resume is not exact: derive it from the index and the epoch."
        )

    def _say(self, message: str) -> None:
        self.is_over = True
        worker = get_worker_info()
        if worker is None or worker.id == 0:
            warnings.warn(message, StatefulWarning, stacklevel=2)


def _joined(names: list[_Name]) -> str:
    """The names of the first one's holder, three at most."""
    return " and ".join([repr(name.attribute) for name in names if name[:2] == names[0][:2]][:3])


def _digest(samples: Any) -> dict[str, Any] | None:
    try:
        return digest_of_batch(samples)
    except Exception:
        return None


def _snapshot(dataset: Any) -> dict[_Name, Any]:
    """What the user's objects hold, by name: values, and shallow copies of containers."""
    outside: dict[str, Any] = named_outside(dataset)
    found = {_Name("", type(dataset).__qualname__, name): _copied(item) for name, item in outside.items()}
    for value, place in islice(_users(dataset), _MOST_HOLDERS):
        is_function = isinstance(value, FunctionType)
        held = _named_by(value) if is_function else attributes_of(value)
        holder = value.__qualname__ if is_function else type(value).__qualname__
        found |= {_Name(_way(place), holder, name): _copied(item) for name, item in held.items()}
    return found


def _users(dataset: Any) -> Iterator[tuple[Any, Place]]:
    """Objects and functions of the user's that are reached, and the place of each."""
    seen: dict[int, Any] = {}
    for place in reached({"dataset": dataset}):
        value = place.value
        if id(value) in seen or isinstance(value, (type, ModuleType, DataLoader, Sampler)):
            continue
        seen[id(value)] = value
        if is_users(value.__module__ if isinstance(value, FunctionType) else type(value).__module__):
            yield value, place


def _held(dataset: Any) -> list[Any]:
    """The user's objects that attributes lead to."""
    return [value for value, place in _users(dataset) if _way(place)]


def _is_held(before: dict[_Name, Any], now: dict[_Name, Any]) -> bool:
    """Whether all that has changed are values that can be put back, in attributes of objects."""
    changed = [name for name in {**before, **now} if not _is_same(before.get(name), now.get(name))]
    return all(name.way and _is_looked_at(now.get(name)) and _is_looked_at(before.get(name)) for name in changed)


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
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            held[name] = cell.cell_contents
    return held


_FIXED = {*PLAIN, torch.Tensor, np.ndarray, tuple}
_KINDS = (list, tuple, deque, dict, set, frozenset, torch.Tensor, np.ndarray, np.generic)


def _is_looked_at(value: Any) -> bool:
    return type(value) in BUILT_IN or isinstance(value, _KINDS)


def _copied(value: Any) -> Any:
    """A value, or a shallow copy of a container: of a long one the first and last items."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        # Memory that is written again for each batch is no memory of what was read; another array in its place may be.
        is_count = (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
        return value.item() if is_count and not getattr(value, "is_cuda", False) else value
    if isinstance(value, dict):
        return dict(islice(dict.items(value), _MOST_ITEMS))
    if isinstance(value, (set, frozenset)):
        return frozenset(value) if len(value) <= _MOST_ITEMS else len(value)
    if isinstance(value, deque) or (isinstance(value, (list, tuple)) and len(value) <= 2 * _MOST_ITEMS):
        return type(value)(value) if type(value) in (list, tuple, deque) else list(value)
    if isinstance(value, (list, tuple)):
        return [len(value), *value[:_MOST_ITEMS], *value[-_MOST_ITEMS:]]
    return value


def _changes(before: dict[_Name, Any], now: dict[_Name, Any]) -> dict[_Name, tuple[Any, Any]]:
    """What was changed, and not only added to: the value before, None for a missing one, and now."""
    pairs = {name: (before.get(name), value) for name, value in now.items() if _is_looked_at(value)}
    return {name: pair for name, pair in pairs.items() if not _is_same(*pair) and not _is_added_to(*pair)}


def _is_same(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if type(was) is not type(now):
        return False
    if isinstance(was, (list, tuple, deque)):
        return len(was) == len(now) and (all(map(is_, was, now)) or all(map(_is_same_item, was, now)))
    if isinstance(was, dict):
        return was.keys() == now.keys() and all(_is_same_item(item, now[key]) for key, item in was.items())
    return _is_same_item(was, now)


def _is_same_item(was: Any, now: Any) -> bool:
    return was is now or (type(was) is type(now) and type(was) in {*BUILT_IN, frozenset} and bool(was == now))


def _is_added_to(was: Any, now: Any) -> bool:
    """Whether a container only got items; a dict may have lost some too, as a cache of bounded size does."""
    if isinstance(was, dict) and isinstance(now, dict):
        return all(_is_same_item(item, now[key]) for key, item in was.items() if key in now)
    if isinstance(was, frozenset) and isinstance(now, frozenset):
        return was <= now
    return type(was) is type(now) and isinstance(was, (list, tuple)) and _is_same(was, now[: len(was)])


# Functions by which samples are read, and those that only put something into a container.
_READ, _PUT = {"__getitem__", "__getitems__", "__call__", "forward"}, {"append", "appendleft", "add", "extend"}
_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
_BY_NAME = {"getattr", "vars", "__dict__", "__getstate__", "deepcopy", "copy"}


def _is_used(dataset: Any, name: str) -> bool:
    """Whether code that reads samples does more with an attribute or variable than to count it up.

    False for ``self.reads += 1``, ``self.reads[key] += 1`` and ``self.reads.append(index)``, where nothing else in the
    functions that the reading may call names it.
    """
    places = [place for place in reached({"dataset": dataset}) if isinstance(place.value, FunctionType)]
    functions = [place.value for place in places if is_users(place.value.__module__)]
    called = {*_READ, *(place.value.__name__ for place in places if place.above and not _is_method(place))}
    while more := {name for one in functions if one.__name__ in called for name in names_in(one.__code__)} - called:
        called |= more
    codes = [one.__code__ for one in functions if one.__name__ in called]
    return bool(called & _BY_NAME) or any(_is_used_in(code, name) for code in codes)


def _is_method(place: Place) -> bool:
    above = place.above
    return above is not None and getattr(type(above.value), place.value.__name__, None) is place.value


def _is_used_in(code: CodeType, name: str) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
    stored = {step.argval for step in steps if step.opname.startswith("STORE_")}
    for number, step in enumerate(steps):
        if step.argval != name or step.opname not in _LOADS:
            continue
        behind = [*steps[number + 1 : number + 4], *[step] * 3]
        # Of an augmented assignment the object is on the stack twice.
        is_counted = steps[number - 1].opname in ("COPY", "DUP_TOP") and name in stored
        is_summed = behind[2].opname.startswith("STORE_") and behind[2].argval == name
        if not (is_counted or is_summed or behind[0].argval in _PUT or _is_item_counted(steps[number + 1 :])):
            return True
    return any(_is_used_in(part, name) for part in code.co_consts if isinstance(part, CodeType))


def _is_item_counted(steps: list[dis.Instruction]) -> bool:
    """Whether steps behind the loading of a container are those of ``container[key] += number``, for any key."""
    depth = 1
    for step, following in pairwise(steps):
        if depth == 2 and (step.opname == "DUP_TOP_TWO" or step.opname == following.opname == "COPY"):
            return True
        depth += dis.stack_effect(step.opcode, step.arg)
        if depth < 2:
            return False
    return False


def _is_count_or_queue(changes: list[tuple[Any, Any]]) -> bool:
    """Whether changes are those of a number that only grows or falls, a dict of numbers, a deque or a list of such."""
    pairs = [pair for pair in changes if pair[0] is not None]
    if all(isinstance(one, (int, float)) for pair in pairs for one in pair):
        return len({was < now for was, now in pairs}) == 1
    numbers = (int, float, np.number)
    of_numbers = (isinstance(now, dict) and all(isinstance(one, numbers) for one in now.values()) for _, now in pairs)
    return all(of_numbers) or all(map(_moves_on, *zip(*pairs, strict=True)))


def _moves_on(was: Any, now: Any) -> bool:
    """Whether a deque has changed, or of a list items were taken from one end, and others perhaps added."""
    if isinstance(now, list) and isinstance(was, list):
        taken = (number for number in range(1, len(was)) if _is_same(was[number:], now[: len(was) - number]))
        return (0 < len(now) < len(was) and _is_same(was[: len(now)], now)) or any(taken)
    return isinstance(now, deque) and isinstance(was, deque)


def _can_try(dataset: Any) -> bool:
    """Whether nothing that is reached would be left otherwise by reading a batch once more, and put back.

    Iterators, open files and counts shared by processes would, and other objects whose state is not known.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    for place in reached({"dataset": dataset}):
        value, kind = place.value, type(place.value)
        if hasattr(kind, "__next__") or isinstance(value, (DataLoader, Sampler)):
            return False
        if is_users(kind.__module__):
            if issubclass(kind, torch.nn.Module) or any(vars(one).get("__slots__") for one in kind.__mro__[:-1]):
                return False
        elif kind.__module__.partition(".")[0] not in _REPEATABLE and not isinstance(value, GENERATORS):
            return False
        if isinstance(value, (list, tuple, deque, dict)) and len(value) > _MOST_INNER:
            # Others in so long a one are not put back.
            items = list(value.values()) if isinstance(value, dict) else value
            if not {*map(type, items)} <= _FIXED:
                return False
    return sum(int(one.nbytes) for one in _large_arrays(_held(dataset))) <= _MOST_BYTES


def _large_arrays(holders: list[Any]) -> list[Any]:
    """Arrays and tensors among the attributes of objects that could be written to, and are not put back otherwise."""
    held = [one for holder in holders for one in attributes_of(holder).values()]
    arrays = [one for one in held if isinstance(one, (torch.Tensor, np.ndarray)) and one.nbytes > _LARGE]
    return [one for one in arrays if isinstance(one, torch.Tensor) or one.flags.writeable]
