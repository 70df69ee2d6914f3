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
        slot: The number of the first item that is wanted.
        noted: A note of an earlier run: the number of an item, its digest, and the sampler's own state or None. Empty
            for none.

    Attributes:
        drawn: Items of the pass that the sampler has yielded.
        end: Items of the pass once the sampler was seen to end; None before that.
    """

    def __init__(self, order: WrappedSampler, epoch: int, cycle: int, slot: int, noted: Sequence[Any]) -> None:
        self.drawn = 0
        self.end: int | None = None
        self._order, self._epoch, self._slot = order, epoch, slot
        self._pass = (0, 0) if order.repeats_first_epoch else (epoch, cycle)
        self._expected = noted or (-1, "", None)
        self._copy: IsolatedCopy | None = None
        self._iterator: Iterator[Any] = iter(())
        self._ready: list[Any] = []
        self._failure: Exception | None = None
        self._size = 1
        self._has_states = order.resume_mode == "own_state"
        # The latest item before which the sampler's own state was taken, and that state.
        self._state: tuple[int, Any] = (0, None)
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

    def noted_before(self, slot: int) -> list[Any]:
        """The latest note of an earlier item, for a progress at ``slot``; empty if there is none."""
        return next((note for note in reversed(self._notes) if note[0] < slot), [])

    # Drawing

    def _begin(self) -> None:
        order, started = self._order, time.perf_counter()
        if self._slot and not order.check().is_repeatable:
            warnings.warn(
                f"{order.name} differs from run to run. What is left of epoch {self._epoch} is not what was left "
                "when the checkpoint was written: some samples come twice, and others never.",
                StatefulWarning,
                stacklevel=2,
            )
        made = order.copied()
        with made.entered():
            at, _, state = self._expected
            if state is not None:
                self.drawn, self._state = at, (at, state)
            self._iterator = made.begin(*self._pass, at, state)
            distance = self._slot - self.drawn
            self._skip(made)
        self._copy = made
        seconds = time.perf_counter() - started
        if distance > 0 and seconds > _LONG_FAST_FORWARD:
            warnings.warn(
                f"{order.name} was fast-forwarded by {distance} items to slot {self._slot} of epoch {self._epoch}, "
                f"which took {seconds:.1f} s. A sampler with state_dict() and load_state_dict() is there at once.",
                StatefulWarning,
                stacklevel=2,
            )

    def _skip(self, made: IsolatedCopy) -> None:
        """Let the sampler yield what comes before the first item, and look at as little of it as will do."""
        while self.drawn < self._slot and self.end is None:
            if self._has_states:
                self._pull(made, self._slot - self.drawn)
                self._ready.clear()
                continue
            noted = self._next_note(self.drawn)
            stop = min(noted + 1, self._slot)
            # At the speed of the sampler itself: nothing here runs between two notes.
            item = next(islice(self._iterator, stop - self.drawn - 1, None), _END)
            if item is _END:
                self.end = self.drawn
                break
            self.drawn = stop
            if stop == noted + 1:
                self._note(noted, item)
        if self.drawn < self._slot:
            raise PositionError(
                f"{self._slot} items of {self._order.name} were used in epoch {self._epoch}, but now it ends before "
                "that. Build it as when the checkpoint was written, or resume from another checkpoint."
            )

    def _draw(self, count: int) -> None:
        if self._copy is None:
            self._begin()
        made: Any = self._copy
        with made.entered():
            started, target = time.perf_counter(), len(self._ready) + count
            while len(self._ready) < target and self.end is None:
                self._pull(made, target - len(self._ready))
            seconds = time.perf_counter() - started
        if self.end is not None:
            self._order.check_after_pass(made, self._epoch)
        # More at a time, as long as nobody notices.
        self._size = min(2 * self._size, _MOST_DRAWN) if seconds < _LONG_DRAW else max(self._size // 2, 1)

    def _pull(self, made: IsolatedCopy, wanted: int) -> None:
        """Let the sampler yield many items, or all up to where a state of its own is due."""
        before, began = len(self._ready), self.drawn
        if self._has_states:
            if began % STATE_STRIDE == 0 and began > self._state[0]:
                self._state = (began, made.state(*self._pass, began))
            wanted = min(wanted, STATE_STRIDE - began % STATE_STRIDE)
        slots = islice(self._iterator, wanted)
        try:
            # What a sampler yielded before it failed stays.
            self._ready.extend(map(_kept, slots) if self._order.yields_containers else slots)
        finally:
            found = self._ready[before:]
            self.drawn += len(found)
        self.end = None if len(found) == wanted else self.drawn
        noted = self._next_note(began)
        while noted < self.drawn:
            self._note(noted, found[noted - began])
            noted = self._next_note(noted + 1)

    def _next_note(self, slot: int) -> int:
        """The first item at or after ``slot`` that is noted."""
        return -(-slot // STATE_STRIDE) * STATE_STRIDE if self._has_states else next_digest_slot(slot)

    def _note(self, slot: int, item: Any) -> None:
        # Chained where a resume comes by the same notes again, and so sees all of them changed.
        found = digest(item, self._notes[-1][1] if self._notes and not self._has_states else "")
        self._notes.append([slot, found, self._state[1] if self._state[0] == slot else None])
        if slot == self._expected[0]:
            self._compare(slot, found)

    def _compare(self, slot: int, found: str) -> None:
        """Make sure that what stands at an item is what stood there when a state was taken."""
        order, expected = self._order, self._expected[1]
        if found == expected or not order.check().is_repeatable:
            return
        remedy = (
            f"{order.name} no longer yields what it did up to this slot: build it with the same data and settings. If "
            "it depends on anything else (training, time, the order of a set, another process), make it depend on its "
            "epoch alone. accept=('sequence',) goes on all the same."
        )
        changed = Difference(path=f"sequence at slot {slot}", saved=expected, present=found, remedy=remedy)
        if "sequence" not in order.accept:
            raise StateMismatchError([changed], where=f"The state within epoch {self._epoch}")
        warnings.warn(f"Accepted: {changed}", StatefulWarning, stacklevel=2)


def next_digest_slot(slot: int) -> int:
    """The first item at or after ``slot`` at which a digest is noted."""
    if slot >= _DIGEST_STRIDE:
        return -(-slot // _DIGEST_STRIDE) * _DIGEST_STRIDE
    return slot if slot < 2 else 1 << (slot - 1).bit_length()


def digest(item: Any, before: str = "") -> str:
    """Hex digest of an item, chained to that of an earlier one; equal for equal items in every process.

    Items are told apart by the numbers, strings, arrays and containers in them; of another object its ``id`` attribute
    counts, or else what it contains, or only its type.
    """
    hashed = hashlib.blake2b(before.encode(), digest_size=8)
    _feed(hashed, item, 0)
    return hashed.hexdigest()


def _feed(hashed: Any, item: Any, depth: int) -> None:
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
_CONTAINERS = (list, tuple, dict, set, deque, UserList, UserDict, array, bytearray)


def _kept(batch: Any) -> Any:
    """Copy a batch, so that it stays as it was yielded: a sampler may fill the very container again."""
    # The common case at the speed of a list: batches hold things of one kind.
    if type(batch) is list and (not batch or isinstance(batch[0], _INTEGERS)):
        return batch.copy()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    return copy.deepcopy(batch) if isinstance(batch, _CONTAINERS) else batch
