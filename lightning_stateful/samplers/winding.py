"""One run of a user's sampler through a pass of an epoch, from any slot on."""

from __future__ import annotations

import copy
import time
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_stateful.errors import ConfigurationError, Difference, PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers import claims
from lightning_stateful.samplers.items import copied, only_next
from lightning_stateful.samplers.marks import digest, next_mark
from lightning_stateful.samplers.place import Place
from lightning_stateful.samplers.state_codec import from_plain, to_plain

if TYPE_CHECKING:
    from lightning_stateful.samplers.user_sampler import UserSampler

# Slots between two states of a sampler that has its own, and what is kept of the latest slots: prefetching workers and
# open accumulation windows are as far as training may lie behind.
STATE_STRIDE, _KEPT_STATES, _KEPT_MARKS, _KEPT_SLOTS = 16, 512, 512, 8192
# The states of a sampler that depends on training may be large; they serve an open accumulation window again.
_KEPT_HANDED = 32
# Slots that are drawn at a time, and the seconds after which it should not be more.
_MOST_DRAWN, _LONG_DRAW = 4096, 0.002
# Seconds from which on the cost of winding is worth a word.
_LONG_WINDING = 1.0

_END = object()


class Winding:
    """Draws slots from a sampler that it has brought to where it is to go on.

    It begins when it is first asked for slots. Only one run of a sampler is under way; an earlier one that is asked
    again brings the sampler back to where it stands.

    Args:
        source: The sampler.
        epoch: Which epoch.
        number: Which pass over the sampler within the epoch.
        slot: The first slot that is wanted.
        place: What is known of the sampler there.
    """

    def __init__(self, source: UserSampler, epoch: int, number: int, slot: int, place: Place) -> None:
        self.epoch, self.number, self.begun = epoch, number, slot
        self.end: int | None = None
        self.drawn = 0
        self._seeded_at = 0
        self._source = source
        self._place = place
        self._iterator: Iterator[Any] | None = None
        self._ready: list[Any] = []
        self._failure: Exception | None = None
        self._size = 1
        self._marks: deque[tuple[int, str]] = deque(maxlen=_KEPT_MARKS)
        # Of a sampler with a state of its own: (slots yielded, state); and the latest of what it yielded.
        self._states: deque[tuple[int, Any]] = deque(maxlen=_KEPT_STATES)
        self._history: deque[Any] = deque(maxlen=_KEPT_SLOTS)
        # Of a sampler that depends on training: (slot, slots yielded, state) as batches were handed over.
        self._handed: deque[tuple[int, int, Any]] = deque(maxlen=_KEPT_HANDED)

    def look_ahead(self, count: int) -> int:
        """Draw until ``count`` slots are ready, unless the sampler ends; how many are."""
        if self._iterator is None:
            self._begin()
        while len(self._ready) < count and self.end is None and self._failure is None:
            try:
                self._draw(count - len(self._ready))
            except Exception as error:
                # What came before it is served first.
                self._failure = error
        if self._failure is not None and len(self._ready) < count:
            raise self._failure
        return len(self._ready)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` slots, which have to be ready."""
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    # What a state keeps

    def note_handed(self, slot: int) -> None:
        """Remember how the sampler stands as the batch at ``slot`` is handed over, which may be served again."""
        self._handed.append((slot, self.drawn, copy.deepcopy(self._source.sampler.state_dict())))

    def place_at(self, slot: int) -> Place:
        """What has to be known of the sampler to go on from ``slot``."""
        way = self._source.way
        if way == "feedback":
            return self._place_in_history(slot)
        if not slot:
            return Place()
        if way == "wound":
            return Place(mark=next(((at, found) for at, found in reversed(self._marks) if at < slot), ()))
        first = self.drawn - len(self._history)
        mark = (slot - 1, digest(self._history[slot - 1 - first])) if slot > first else ()
        # Taken before that slot, so that there is something to compare.
        taken = [*([(self._place.slot, *self._place.state)] if self._place.state else []), *self._states]
        at, state = next(((at, state) for at, state in reversed(taken) if at < slot), (0, None))
        return Place(slot=at, state=() if state is None else (state,), mark=mark)

    def _place_in_history(self, slot: int) -> Place:
        # As it is now, with all that training has taught it; if the batch there has been handed over, as it was then.
        if self._iterator is None:
            return self._place
        drawn, state = next(((at, held) for of, at, held in self._handed if of == slot), (self.drawn, None))
        if state is None and self._handed and slot < self._handed[0][0]:
            warnings.warn(
                f"{self._source.name} depends on training, and how it stood where the open accumulation window began, "
                f"more than {_KEPT_HANDED} batches ago, is not known any more. A run that is resumed from this "
                "checkpoint is not exact.",
                StatefulWarning,
                stacklevel=2,
            )
        first = self.drawn - len(self._history)
        if not first <= slot <= drawn:
            raise ConfigurationError(
                f"{self._source.name} has yielded {self.drawn} items of epoch {self.epoch}, of which training has "
                f"used {slot}; more than {_KEPT_SLOTS} cannot be kept. Use fewer workers or shorter windows."
            )
        pending = [to_plain(item, "item") for item in islice(self._history, slot - first, drawn - first)]
        return Place(slot=drawn, state=(self._source.own_state(state),), pending=tuple(pending))

    # Beginning

    def _begin(self) -> None:
        source, started = self._source, time.perf_counter()
        source.examine()
        source.note_begun(self)
        try:
            with source.entered():
                self._bring_near(self._place)
                distance = self.begun - self.drawn
                self._wind(self.begun)
        except BaseException:
            # Nothing has begun: a state taken now is the one that was loaded.
            source.live, self._iterator = None, None
            self._marks.clear()
            raise
        if distance < 0:
            # It had yielded more than was used.
            self._ready = [from_plain(item) for item in self._place.pending][distance:]
            self._history.extend(self._ready)
        seconds = time.perf_counter() - started
        if distance > 0 and seconds > _LONG_WINDING:
            warnings.warn(
                f"{source.name} was wound forward by {distance} items to slot {self.begun} of epoch {self.epoch}, "
                f"which took {seconds:.1f} s. A sampler with state_dict() and load_state_dict() is there at once; "
                "replace_samplers=True does the same for torch's own.",
                StatefulWarning,
                stacklevel=2,
            )

    def _bring_near(self, place: Place) -> None:
        """Begin to iterate, at the epoch's start or where a state of the sampler's own was taken."""
        source, sampler = self._source, self._source.sampler
        learnt = source.way == "feedback"
        state = from_plain(place.state[0]) if place.state and source.way != "wound" else None
        if learnt and state is None:
            state = self._learnt_before()
        if state is None or (not learnt and not place.slot):
            source.prepare(self.epoch, self.number)
        elif place.slot:
            source.prepare(self.epoch, self.number)
            source.seed_draws(self.epoch, self.number, place.slot)
            sampler.load_state_dict(state)
            self.drawn = place.slot
        else:
            # set_epoch with another epoch than the state's begins that epoch.
            sampler.load_state_dict(state)
            source.prepare(self.epoch, self.number)
        self._seeded_at = self.drawn
        self._iterator = only_next(iter(sampler))

    def _learnt_before(self) -> Any:
        """How a sampler that depends on training stood at the beginning of a pass that was broken off."""
        source, this = self._source, (self.epoch, self.number)
        if source.pass_begun is not None and source.pass_begun[:2] == this:
            return copy.deepcopy(source.pass_begun[2])
        source.pass_begun = (*this, copy.deepcopy(source.sampler.state_dict()))
        return None

    def _begin_again(self) -> None:
        """Another run of the same sampler has begun since: take it back to where this one stands."""
        source, drawn = self._source, self.drawn
        if source.way == "feedback":
            raise ConfigurationError(
                f"{source.name} is iterated by two at a time, of which the earlier cannot go on: it has one state. "
                "Finish or drop one iterator before the next begins."
            )
        source.note_begun(self)
        with source.entered():
            place = self.place_at(drawn)
            self.drawn = 0
            self._bring_near(place)
            left = drawn - self.drawn
            next(islice(self._iterator, left, left), None)  # type: ignore[arg-type]  # begun
            self.drawn = drawn

    # Drawing

    def _wind(self, slot: int) -> None:
        """Let the sampler yield what comes before ``slot``, and look at as little of it as will do."""
        while self.drawn < slot and self.end is None:
            if self._source.way != "wound":
                self._pull(slot - self.drawn)
                continue
            mark = next_mark(self.drawn)
            stop = min(mark + 1, slot)
            # At the speed of the sampler itself: nothing here runs between two marks.
            item = next(islice(self._iterator, stop - self.drawn - 1, None), _END)  # type: ignore[arg-type]  # begun
            if item is _END:
                self.end = self.drawn
                break
            self.drawn = stop
            if stop == mark + 1:
                self._mark(mark, item)
        self._ready.clear()
        if self.drawn < slot:
            raise PositionError(
                f"{slot} items of {self._source.name} were used in epoch {self.epoch}, but now it ends before that. "
                "Build it as when the checkpoint was written, or resume from another checkpoint."
            )

    def _draw(self, count: int) -> None:
        source = self._source
        if source.live is not self or not claims.is_claimed(source, self):
            self._begin_again()
        with source.entered():
            started = time.perf_counter()
            if source.way == "feedback":
                self._pull_one_by_one(count)
            else:
                target = len(self._ready) + max(count, self._size)
                while len(self._ready) < target and self.end is None:
                    self._pull(target - len(self._ready))
            seconds = time.perf_counter() - started
            if self.end is not None:
                source.put_back()
        # More at a time, as long as nobody notices.
        self._size = min(2 * self._size, _MOST_DRAWN) if seconds < _LONG_DRAW else max(self._size // 2, 1)

    def _pull(self, wanted: int) -> None:
        """Let the sampler yield many slots, or all up to where a state of its own is due."""
        source, before = self._source, len(self._ready)
        if source.way == "own_state":
            if self.drawn % STATE_STRIDE == 0 and self.drawn != self._seeded_at:
                # Seeded first: a state may hold generators, which a resume then puts where they are now.
                source.seed_draws(self.epoch, self.number, self.drawn)
                self._states.append((self.drawn, source.own_state()))
            wanted = min(wanted, STATE_STRIDE - self.drawn % STATE_STRIDE)
        slots = islice(self._iterator, wanted)  # type: ignore[arg-type]  # begun
        try:
            # What a sampler yielded before it failed stays.
            self._ready.extend(map(copied, slots) if source.whole_batches else slots)
        finally:
            found = len(self._ready) - before
            self.drawn += found
        self.end = None if found == wanted else self.drawn
        if source.way == "own_state":
            self._history.extend(self._ready[before:])
            slot, expected = self._place.mark or (-1, "")
            if self.drawn - found <= slot < self.drawn:
                self._compare(slot, digest(self._ready[before + slot - self.drawn + found]), expected)
            return
        mark = next_mark(self.drawn - found)
        while mark < self.drawn:
            self._mark(mark, self._ready[before + mark - self.drawn + found])
            mark = next_mark(mark + 1)

    def _pull_one_by_one(self, count: int) -> None:
        """Let a sampler that depends on training yield no more than is needed, under randomness of each slot."""
        source = self._source
        for _ in range(count):
            source.seed_draws(self.epoch, self.number, self.drawn)
            item = next(self._iterator, _END)  # type: ignore[arg-type]  # begun
            if item is _END:
                self.end = self.drawn
                return
            self.drawn += 1
            item = copied(item)
            self._history.append(item)
            self._ready.append(item)

    # Comparing

    def _mark(self, slot: int, item: Any) -> None:
        found = digest(item, self._marks[-1][1] if self._marks else "")
        self._marks.append((slot, found))
        if self._place.mark[:1] == (slot,):
            self._compare(slot, found, self._place.mark[1])

    def _compare(self, slot: int, found: str, expected: str) -> None:
        """Make sure that what stands at a slot is what stood there when a state was taken."""
        source = self._source
        if found == expected or not source.is_repeatable:
            return
        remedy = (
            f"{source.name} no longer yields what it did up to this slot: build it with the same data and settings. If "
            "it depends on what training computes, let it say depends_on_training = True; if it depends on anything "
            "else (time, the order of a set, another process), make it depend on its epoch alone. accept=('sequence',) "
            "goes on all the same."
        )
        changed = Difference(path=f"sequence at slot {slot}", saved=expected, present=found, remedy=remedy)
        if "sequence" not in source.accept:
            raise StateMismatchError([changed], where=f"The state within epoch {self.epoch}")
        warnings.warn(f"Accepted: {changed}", StatefulWarning, stacklevel=2)
