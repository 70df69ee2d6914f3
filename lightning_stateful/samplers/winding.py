"""One run of a user's sampler through a pass of an epoch, from any slot on."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_stateful.errors import ConfigurationError, Difference, PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers.marks import digest, next_mark
from lightning_stateful.samplers.own_words import from_plain, to_plain
from lightning_stateful.samplers.place import Place

if TYPE_CHECKING:
    from lightning_stateful.samplers.user_sampler import UserSampler

# Slots between two states of a sampler that has its own, and what is kept of the latest slots: prefetching workers and
# open accumulation windows are as far as training may lie behind.
_SNAPSHOT_STRIDE, _KEPT_SNAPSHOTS, _KEPT_SLOTS = 16, 512, 8192
# The states of a sampler that depends on training may be large; they serve an open accumulation window again.
_KEPT_HANDED = 32
# Slots that are drawn at a time, and the seconds after which it should not be more.
_MOST_DRAWN, _LONG_DRAW = 4096, 0.002
# Seconds from which on the cost of winding is worth a word.
_LONG_WINDING = 1.0

_END = object()


class Winding:
    """Draws slots from a sampler that it has brought to where it is to go on.

    It begins when it is first asked for slots. Only one runs at a time; an earlier one that is asked again winds
    itself forward anew.

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
        self._source = source
        self._place = place
        self._iterator: Iterator[Any] | None = None
        self._ready: list[Any] = []
        self._size = 1
        self._marks: deque[tuple[int, str]] = deque(maxlen=_KEPT_SNAPSHOTS)
        self._states: deque[tuple[int, Any]] = deque(maxlen=_KEPT_SNAPSHOTS)
        self._history: deque[Any] = deque(maxlen=_KEPT_SLOTS)
        self._handed: deque[tuple[int, int, Any]] = deque(maxlen=_KEPT_HANDED)
        if source.way != "wound":
            self._marks = deque(maxlen=_KEPT_SLOTS)

    @property
    def ready(self) -> list[Any]:
        """Slots that have been drawn and not taken."""
        return self._ready

    def look_ahead(self, count: int) -> int:
        """Draw until ``count`` slots are ready, unless the sampler ends; how many are."""
        if self._iterator is None:
            self._begin()
        while len(self._ready) < count and self.end is None:
            self._draw(count - len(self._ready))
        return len(self._ready)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` slots, which have to be ready."""
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def note_handed(self, slot: int) -> None:
        """Remember how the sampler stands as the batch at ``slot`` is handed over, which may be served again."""
        self._handed.append((slot, self.drawn, self._source.own_state()))

    def place_at(self, slot: int) -> Place:
        """What has to be known of the sampler to go on from ``slot``."""
        way = self._source.way
        if way == "feedback":
            return self._place_in_history(slot)
        mark: tuple[Any, ...] = next(((at, found) for at, found in reversed(self._marks) if at < slot), ())
        if way == "wound":
            return Place(mark=mark) if slot else Place()
        at, state = next(((at, state) for at, state in reversed(self._states) if at <= slot), (0, None))
        if state is None and self._place.state:
            at, state = self._place.slot, self._place.state[0]
        if at > slot or not slot:
            return Place()
        mark = mark if mark and mark[0] == slot - 1 else ()
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
        ahead = drawn - slot
        if ahead < 0 or self.drawn - slot > len(self._history):
            raise ConfigurationError(
                f"{self._source.name} has yielded {self.drawn} items of epoch {self.epoch}, of which training has "
                f"used {slot}; more than {_KEPT_SLOTS} cannot be kept. Use fewer workers or shorter windows."
            )
        first = len(self._history) - (self.drawn - slot)
        pending = [to_plain(item) for item in islice(self._history, first, first + ahead)]
        return Place(slot=drawn, state=(self._source.own_state() if state is None else state,), pending=tuple(pending))

    # Beginning

    def _begin(self) -> None:
        source, started = self._source, time.perf_counter()
        source.examine()
        source.live = self
        with source.surroundings.entered():
            self._iterator = self._brought_near()
            distance = self.begun - self.drawn
            if distance > 0:
                self._wind(self.begun)
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

    def _brought_near(self) -> Iterator[Any]:
        """Begin to iterate, at the epoch's start or where a state of the sampler's own was taken."""
        source, place = self._source, self._place
        state = from_plain(place.state[0]) if place.state and source.way != "wound" else None
        if state is None or (source.way == "own_state" and place.slot == 0):
            return source.begin(self.epoch, self.number)
        if place.slot:
            source.prepare(self.epoch, self.number)
            source.sampler.load_state_dict(state)
        else:
            source.sampler.load_state_dict(state)
            source.prepare(self.epoch, self.number)
        self.drawn = place.slot
        return iter(source.sampler)

    def _wind(self, slot: int) -> None:
        """Let the sampler yield what comes before ``slot``, and look at as little of it as will do."""
        while self.drawn < slot and self.end is None:
            if self._source.way != "wound":
                self._note(self._draw_one())
                continue
            mark = next_mark(self.drawn)
            stop = min(mark + 1, slot)
            # At the speed of the sampler itself: nothing here runs between two marks.
            item = next(islice(self._iterator, stop - self.drawn - 1, None), _END)  # type: ignore[arg-type]
            if item is _END:
                self.end = self.drawn
            else:
                self.drawn = stop
                if stop == mark + 1:
                    self._mark(mark, item)
        if self.end is not None:
            self._refuse_end(slot)

    def _refuse_end(self, slot: int) -> None:
        raise PositionError(
            f"{slot} items of {self._source.name} were used in epoch {self.epoch}, but now it ends before that. "
            "Build it as when the checkpoint was written, or resume from another checkpoint."
        )

    # Drawing

    def _draw(self, count: int) -> None:
        source = self._source
        if source.live is not self:
            self._begin_again()
        started = time.perf_counter()
        with source.surroundings.entered():
            if source.way == "wound":
                wanted = max(count, min(self._size, _MOST_DRAWN))
                found = list(islice(self._iterator, wanted))  # type: ignore[arg-type]  # begun
                mark = next_mark(self.drawn)
                while mark < self.drawn + len(found):
                    self._mark(mark, found[mark - self.drawn])
                    mark = next_mark(mark + 1)
                self.drawn += len(found)
                self.end = None if len(found) == wanted else self.drawn
                self._ready += found
            else:
                for _ in range(count):
                    item = self._draw_one()
                    if item is _END:
                        break
                    self._note(item)
                    self._ready.append(item)
        # More at a time, as long as nobody notices.
        self._size = 2 * self._size if time.perf_counter() - started < _LONG_DRAW else max(self._size // 2, 1)

    def _draw_one(self) -> Any:
        """One slot of a sampler with a state of its own, under randomness that follows from the slot."""
        source = self._source
        if source.way == "own_state" and self.drawn and self.drawn % _SNAPSHOT_STRIDE == 0:
            self._states.append((self.drawn, source.own_state()))
        source.surroundings.seed(source.seed, self.epoch, self.number, self.drawn)
        item = next(self._iterator, _END)  # type: ignore[arg-type]  # begun
        if item is _END:
            self.end = self.drawn
        else:
            self.drawn += 1
        return item

    def _note(self, item: Any) -> None:
        if item is _END:
            return
        if self._source.way == "feedback":
            self._history.append(item)
        else:
            self._mark(self.drawn - 1, item)

    def _mark(self, slot: int, item: Any) -> None:
        """Note what stands at a slot, and make sure that it is what stood there when a state was taken."""
        chained = self._source.way == "wound" and self._marks
        found = digest(item, self._marks[-1][1] if chained else "")
        self._marks.append((slot, found))
        if (slot,) == self._place.mark[:1] and found != self._place.mark[1]:
            self._refuse_other_sequence(slot, found)

    def _refuse_other_sequence(self, slot: int, found: str) -> None:
        source = self._source
        remedy = (
            f"{source.name} no longer yields what it did up to this slot: build it with the same data and settings. If "
            "it depends on what training computes, let it say depends_on_training = True; if it depends on anything "
            "else (time, the order of a set, another process), make it depend on its epoch alone. accept=('sequence',) "
            "goes on all the same."
        )
        changed = Difference(path=f"sequence at slot {slot}", saved=self._place.mark[1], present=found, remedy=remedy)
        if not {"sequence", "nondeterministic"} & set(source.accept):
            raise StateMismatchError([changed], where=f"The state within epoch {self.epoch}")
        warnings.warn(f"Accepted: {changed}", StatefulWarning, stacklevel=2)

    def _begin_again(self) -> None:
        """Another run of the same sampler has begun since: take it back to where this one stands."""
        source = self._source
        if source.way != "wound":
            raise ConfigurationError(
                f"{source.name} is iterated by two at a time, of which the earlier cannot go on: it has one state. "
                "Finish or drop one iterator before the next begins."
            )
        source.live = self
        with source.surroundings.entered():
            self._iterator = source.begin(self.epoch, self.number)
            next(islice(self._iterator, self.drawn, self.drawn), None)
