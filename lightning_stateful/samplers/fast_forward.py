"""Iterates a sampler from any item on: fast-forward, its own states, and a digest of what it has yielded."""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_stateful.errors import Difference, PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers.rng_isolation import IsolatedCopy

if TYPE_CHECKING:
    from lightning_stateful.samplers.wrapped_sampler import WrappedSampler

# A sampler that has a state of its own is noted so often.
STATE_STRIDE = 16
# Others are noted at the items 0, 1, 2, 4, 8 and so on, then at the multiples of this.
_DIGEST_STRIDE = 1024
# Prefetching workers and open accumulation windows are as far as training may lie behind what was drawn.
_KEPT_NOTES = 512
# Items that are drawn at a time, and the seconds after which it should not be more.
_MOST_DRAWN, _LONG_DRAW = 4096, 0.002
# Seconds from which on the cost of fast-forwarding is worth a word.
_LONG_FAST_FORWARD = 1.0

_END = object()


class FastForward:
    """One pass over a fresh copy of a sampler, from any item on.

    It begins when it is first asked for items: by the sampler's own state, or at the pass's first item, and drops what
    comes before. On its way it notes items with a digest of what was yielded there, and with the sampler's own state
    before that, if it has one. A resume compares the digest of the note that it begins from.

    Args:
        order: The sampler.
        epoch: Which epoch.
        cycle: Which pass within the epoch.
        first: The index of the first item that is wanted.
        noted: A note of an earlier run: the index of an item, its digest, and the sampler's own state or None. Empty
            for none.

    Attributes:
        drawn: Items of the pass that the sampler has yielded.
        end: Items of the pass once the sampler was seen to end; None before that.
    """

    def __init__(self, order: WrappedSampler, epoch: int, cycle: int, first: int, noted: Sequence[Any]) -> None:
        self.drawn = 0
        self.end: int | None = None
        self._order, self._epoch, self._first = order, epoch, first
        self._pass = (0, 0) if order.repeats_first_epoch else (epoch, cycle)
        self._expected = noted or (0, "", None)
        self._has_states = order.resume_mode == "own_state"
        self._copy: IsolatedCopy | None = None
        self._iterator: Iterator[Any] = iter(())
        self._ready: list[Any] = []
        self._failure: Exception | None = None
        self._size = 1
        self._notes: deque[list[Any]] = deque(maxlen=_KEPT_NOTES)

    def look_ahead(self, count: int) -> int:
        """Draw until ``count`` items are ready, unless the sampler ends; how many are."""
        while len(self._ready) < count and self.end is None and self._failure is None:
            try:
                self._draw(max(count - len(self._ready), self._size))
            except Exception as error:
                # What came before it is served first.
                self._failure = error
        if self._failure is not None and len(self._ready) < count:
            raise self._failure
        return len(self._ready)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` items, which have to be ready."""
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def noted_before(self, index: int) -> list[Any]:
        """The latest note of an earlier item, for a progress at ``index``; empty if there is none."""
        return next((note for note in reversed(self._notes) if note[0] < index), [])

    def _draw(self, count: int) -> None:
        """Draw ``count`` items, or fewer at the end."""
        made = self._copy or self._order.copied()
        with made.entered():
            if self._copy is None:
                self._begin(made)
                self._copy = made
            started, target = time.perf_counter(), len(self._ready) + count
            while len(self._ready) < target and self.end is None:
                self._pull(made, target - len(self._ready))
            seconds = time.perf_counter() - started
        if self.end is not None:
            self._order.check_after_pass(made, self._epoch)
        # More at a time, as long as nobody notices.
        self._size = min(2 * self._size, _MOST_DRAWN) if seconds < _LONG_DRAW else max(self._size // 2, 1)

    def _begin(self, made: IsolatedCopy) -> None:
        """Iterate the copy, and drop what comes before the first item."""
        order, started = self._order, time.perf_counter()
        if self._first and not order.check().is_repeatable:
            _warn(
                f"{order.name} differs from run to run. What is left of epoch {self._epoch} is not what was left "
                "when the checkpoint was written: some samples come twice, and others never."
            )
        index, _, state = self._expected
        self.drawn = index if state is not None else 0
        self._iterator = made.begin(*self._pass, index, state)
        distance = self._first - self.drawn
        while self.drawn < self._first and self.end is None:
            self._pull(made, self._first - self.drawn)
        if self.drawn < self._first:
            raise PositionError(
                f"{self._first} items of {order.name} were used in epoch {self._epoch}, but now it ends before "
                "that. Build it as when the checkpoint was written, or resume from another checkpoint."
            )
        seconds = time.perf_counter() - started
        if distance and seconds > _LONG_FAST_FORWARD:
            _warn(
                f"{order.name} was fast-forwarded by {distance} items to item {self._first} of epoch {self._epoch}, "
                f"which took {seconds:.1f} s. A sampler with state_dict() and load_state_dict() is there at once."
            )

    def _pull(self, made: IsolatedCopy, wanted: int) -> None:
        """Let the sampler yield items as far as the next one that is noted, or that one alone."""
        began, before, state = self.drawn, len(self._ready), None
        is_noted = began == (noted := self._next_note(began))
        if is_noted and self._has_states:
            index, _, state = self._expected
            if began != index:
                state = made.state(*self._pass, began) if began else None
        wanted = 1 if is_noted else min(wanted, noted - began)
        if began < self._first:
            # Dropped at the speed of the sampler itself.
            item = next(islice(self._iterator, wanted - 1, None), _END)
            self.drawn += 0 if item is _END else wanted
        else:
            items = islice(self._iterator, wanted)
            try:
                # What a sampler yielded before it failed stays.
                self._ready.extend(map(_kept, items) if self._order.yields_containers else items)
            finally:
                self.drawn += len(self._ready) - before
            item = self._ready[-1] if self._ready else _END
        if self.drawn < began + wanted:
            self.end = self.drawn
        elif is_noted:
            self._note(began, item, state)

    def _next_note(self, index: int) -> int:
        """The first item at or after ``index`` that is noted."""
        return -(-index // STATE_STRIDE) * STATE_STRIDE if self._has_states else next_digest_index(index)

    def _note(self, index: int, item: Any, state: Any) -> None:
        # Chained where a resume comes by the same notes again, and so sees all of them changed.
        found = digest(item, self._notes[-1][1] if self._notes and not self._has_states else "")
        self._notes.append([index, found, state])
        order, (at, expected, _) = self._order, self._expected
        if index != at or found == expected or not expected or not order.check().is_repeatable:
            return
        of_state = "" if state is None else f"See that {order.name}.load_state_dict leads back to this very item. "
        remedy = (
            f"{order.name} no longer yields what it did up to this item: build it with the same data and settings. "
            f"{of_state}If it depends on anything else (training, time, the order of a set, another process), make it "
            "depend on its epoch alone. accept=('sequence',) goes on all the same."
        )
        changed = Difference(path=f"sequence at item {index}", saved=expected, present=found, remedy=remedy)
        if "sequence" not in order.accept:
            raise StateMismatchError([changed], where=f"The sampler's state in epoch {self._epoch}")
        _warn(f"Accepted: {changed}")


def _warn(message: str) -> None:
    warnings.warn(message, StatefulWarning, stacklevel=3)


def next_digest_index(index: int) -> int:
    """The first item at or after ``index`` of which a digest is noted."""
    if index >= _DIGEST_STRIDE:
        return -(-index // _DIGEST_STRIDE) * _DIGEST_STRIDE
    return index if index < 2 else 1 << (index - 1).bit_length()


def digest(item: object, before: str = "") -> str:
    """Hex digest of an item, chained to that of an earlier one; equal for equal items in every process.

    Items are told apart by the numbers, strings, arrays and containers in them; of another object its ``id`` attribute
    counts, or else what it contains, or only its type.
    """
    hashed = hashlib.blake2b(before.encode(), digest_size=8)
    _feed(hashed, item, 0)
    return hashed.hexdigest()


def _feed(hashed: hashlib.blake2b, item: object, depth: int) -> None:
    if isinstance(item, (int, np.integer)):
        hashed.update(b"i%d;" % int(item))
    elif isinstance(item, (str, bytes, float, type(None))):
        hashed.update(f"{type(item).__name__}{item!r};".encode())
    elif isinstance(item, (np.ndarray, torch.Tensor)):
        _feed(hashed, item.tolist(), depth)
    elif isinstance(item, (list, tuple, range)) and all(issubclass(kind, _INTEGERS) for kind in set(map(type, item))):
        # The common case, in one go: an index is the same index in whatever type.
        hashed.update(repr(list(map(int, item))).encode())
    elif isinstance(item, Mapping):
        _feed(hashed, list(item.items()), depth + 1)
    elif isinstance(identity := getattr(item, "id", None), (str, int)):
        _feed(hashed, identity, depth)
    elif isinstance(item, Iterable) and isinstance(item, Sized) and depth < 8:
        hashed.update(b"[%d" % len(item))
        for part in item:
            _feed(hashed, part, depth + 1)
    else:
        hashed.update(type(item).__qualname__.encode())


_INTEGERS = (int, np.integer)
# Containers that a sampler may fill again after it has yielded them; of another object nothing is known.
_CONTAINERS = (list, tuple, dict, set, deque, UserList, UserDict, array, bytearray, np.ndarray, torch.Tensor)


def _kept(batch: Any) -> Any:
    """Copy a batch, so that it stays as it was yielded: a sampler may fill the very container again."""
    # The common case at the speed of a list: batches hold things of one kind.
    if type(batch) is list and (not batch or isinstance(batch[0], _INTEGERS)):
        return batch.copy()
    return copy.deepcopy(batch) if isinstance(batch, _CONTAINERS) else batch
