"""Iterates a user's sampler from any item on, by its own state or by dropping items, under randomness of the epoch."""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import GeneratorType
from typing import Any

from lightning_stateful.errors import (
    Difference,
    PositionError,
    StateError,
    StatefulError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.rank_exchange import post, posted
from lightning_stateful.user_samplers.iterated_sampler import (
    KEPT_NOTES,
    NUM_LATEST,
    IteratedSampler,
    TakenItems,
    kept,
    snapshot,
)
from lightning_stateful.user_samplers.sampler_trial import has_come_from
from lightning_stateful.user_samplers.user_sampler import UserSampler

# A sampler that has a state of its own is noted so often.
STATE_STRIDE = 16
# Others are noted at the items 0, 1, 2, 4, 8 and so on, then at the multiples of this.
_DIGEST_STRIDE = 1024
# Notes that other ranks see, where each iterates its own.
_NUM_POSTED = 16
# Seconds from which on the cost of fast-forwarding is worth a word.
LONG_FAST_FORWARD = 1.0

_END = object()
_OF_KEPT: frozenset[Any] = frozenset({type(iter([])), type(iter(())), type(iter(range(0)))})


class SamplerPass:
    """One pass over the user's sampler itself, from any item on; nothing is drawn before it is asked for.

    It begins when it is first asked for items: by the sampler's own state, or at the pass's first item, and drops what
    comes before. On its way it notes items with a digest of what was yielded there, and with the sampler's own state
    before that, if it has one. A state holds the latest note, and a digest of the items just before the state: a resume
    compares both.

    Args:
        order: The sampler.
        epoch: Which epoch.
        cycle: Which pass within the epoch.
        first: The index of the first item that is wanted.
        noted: A note of an earlier run: the index of an item, its digest, the sampler's own state or None, and the
            first and the end of the items just before that run's state with their digest. Empty for none.
        earlier: Passes that the run has begun before, as a state has them, in a list; None, or a ``PassesHere``, for a
            pass that follows those of this process.
        since: Passes of evaluation loaders that the run has begun since, likewise.

    Attributes:
        entry: The pass as it stands in the notes of all passes.
        drawn: Items of the pass that the sampler has yielded.
        end: Items of the pass once the sampler was seen to end; None before that.
        has_states: Whether items are noted with the sampler's own state.
        label: Epoch and cycle by which it is seeded.
        goes_on: Whether the sampler is to come to its end before another pass begins, and has not yet.
        is_assumed: Whether a state has been taken that counts on that.
        listed: Items of the epoch, where Lightning alone would list all of them; else None.
        held: Digests of what the sampler held where the epoch began that a resume begins with, if they are known.
        ahead: First, end and digest of items that an earlier run had taken ahead of its state, until this pass has as
            well; empty for none.
        when_there: Called when it has come to the first item that is wanted.
    """

    ahead: Sequence[Any] = ()
    when_there: Callable[[], object] = bool

    def __init__(
        self,
        order: UserSampler,
        epoch: int,
        cycle: int,
        first: int,
        noted: Sequence[Any],
        earlier: Any = None,
        since: Any = None,
    ) -> None:
        self.drawn = 0
        self.end: int | None = None
        self.label: tuple[int, int] = (0, 0) if order.repeats_first_epoch else (epoch, cycle)
        self.entry: list[int] = [*self.label, 0]
        self._order, self._epoch, self._first, self._earlier, self._since = order, epoch, first, earlier, since
        self._expected = noted[:3] or (0, "", None)
        self._expected_latest = noted[3] if len(noted) > 3 else None
        self._taken = TakenItems()
        # The next item of which a note is taken.
        self._noted_next = 0
        self.goes_on = self.is_assumed = False
        self.listed: int | None = None
        self.held: Mapping[str, str] = {}
        self.has_states: bool = order.resume_mode == "own_state"
        self._iterated: IteratedSampler | None = None
        self._iterator: Iterator[Any] = iter(())
        self._ready: list[Any] = []
        self._copies = False
        self._failure: Exception | None = None
        self._notes: deque[list[Any]] = deque(maxlen=KEPT_NOTES)

    @property
    def has_state(self) -> bool:
        """Whether it begins by the sampler's own state."""
        return self._expected[2] is not None

    @property
    def is_within(self) -> bool:
        """Whether it begins an epoch again, of which items were used."""
        return self._first > 0 and not self.has_state

    def look_ahead(self, count: int) -> int:
        """Draw until ``count`` items are ready, unless the sampler ends; how many are."""
        if len(self._ready) < count and self.end is None and self._failure is None:
            try:
                self._draw(count)
            except Exception as error:
                # What came before it is served first.
                self._failure = error
        if self._failure is not None and len(self._ready) < count:
            raise self._failure
        return len(self._ready)

    def steps(self, count: int, most: int) -> Iterator[list[Any]]:
        """The next steps of ``count`` items each, at most so many; only of indices with items that are noted.

        They end before that where the sampler ends or fails; what it has yielded of one more step is ready then. These
        are most steps of an epoch, each in half the time of :meth:`look_ahead` and :meth:`take`.
        """
        iterated = self._iterated
        if self._ready or self.end is not None or self._failure is not None or iterated is None:
            return
        iterator, copies, block, append = self._iterator, self._copies, iterated.entered(), self._taken.append
        left, source = left_of_kept(iterator), map(kept, iterator) if copies else iterator
        is_one = count == 1
        if self.drawn > self._noted_next:
            self._noted_next = self._next_note(self.drawn)
        if is_one or self.has_states or not self._taken or type(self._taken[-1][1][-1]) is not int:
            # The sampler may change a container that is noted, and gives its state before an item.
            most = min(most, (self._noted_next - self.drawn) // count)
        for _ in range(most):
            items: list[Any] = []
            try:
                if left() >= count:
                    items += (next(source),) if is_one else islice(source, count)
                else:
                    with block:
                        items += (next(source),) if is_one else islice(source, count)
            except StopIteration:
                pass
            except Exception as error:
                self._failure = error
            finally:
                # What a sampler yielded before it failed stays.
                self.drawn += len(items)
            while self._noted_next < self.drawn:
                self._note(self._noted_next, items[self._noted_next - self.drawn], None)
                self._noted_next = self._next_note(self._noted_next + 1)
            if len(items) < count:
                self._ready = items
                if self._failure is None:
                    self.end = self.drawn
                    self._note_end()
                return
            append((self.drawn, items if type(items[-1]) is int else snapshot(items)))
            if self.ahead:
                self._compare_ahead()
            yield items

    def leave(self) -> None:
        """Let go of the sampler's iterator, as torch has: what is behind its ``finally`` is run by that."""
        if self._iterated is None or (self.listed is not None and self.end is None) or sys.is_finalizing():
            return
        self.goes_on = False
        if self.end is None:
            with self._order.memory.leaving(self._order, self), self._iterated.entered():
                self._iterator = iter(())
        self._iterator = iter(())

    def finish(self) -> None:
        """Let a sampler that Lightning alone would list come to its end, wherever training has left it."""
        iterated, listed, is_over = self._iterated, self.listed, self.end is not None or self._failure is not None
        if is_over or iterated is None or listed is None:
            return
        with suppress(Exception):
            self._drop(iterated, listed + 1)
        if self.end is not None:
            self._note_end()
        self.listed = None
        self.leave()

    def is_changed_by_others(self) -> bool:
        """Whether something else than its iteration has changed the sampler's own state since that was noted last."""
        note = next((note for note in reversed(self._notes) if note[2] is not None), None)
        order = self._order
        if note is None or not self.has_states or self.end is not None:
            return False
        drawn, latest = self._taken[-1] if self._taken else (0, [])

        def is_latest(item: Any) -> bool:
            return drawn != self.drawn or bool(snapshot([item])[-1] == latest[-1])

        return not has_come_from(order, self.label, note[0], note[2], self.drawn - note[0], is_latest)

    def _note_end(self) -> None:
        order = self._order
        order.memory.note_end(order, self)
        if self.ahead:
            self._compare_ahead()
        if self._tells_no_length:
            self._compare_ends()

    @property
    def _tells_no_length(self) -> bool:
        """Whether it is trained on, and each rank has a sampler of its own that tells no length."""
        order = self._order
        return order.dealing.is_own and order.is_trained_on and order.num_items is None

    def _compare_ends(self) -> None:
        """Warn where ranks have had other numbers of batches in this pass."""
        order, name, label = self._order, f"{self._posted_as} ended", [*self.label]
        post(name, {"label": label, "steps": order.rule(1).num_steps(self.end or 0)})
        found = [of_rank["steps"] if of_rank and of_rank["label"] == label else None for of_rank in posted(name)]
        if len({*found} - {None}) > 1:
            shown = ", ".join(f"{steps} on rank {rank}" for rank, steps in enumerate(found) if steps is not None)
            order.memory.warn_once(
                f"{order.name} has given ranks other numbers of batches in epoch {self._epoch}: {shown}. DDP then adds "
                "up gradients of different epochs, and may wait for ever at the end of training. A checkpoint has the "
                "position of rank 0 alone, so a resume is not exact. Let every rank yield as many batches.",
                once="ended",
            )

    def take(self, count: int) -> list[Any]:
        """The next ``count`` items, which have to be ready."""
        ready = self._ready
        taken, self._ready = (ready, []) if len(ready) == count else (ready[:count], ready[count:])
        self._taken.append((self.drawn - len(self._ready), taken if type(taken[-1]) is int else snapshot(taken)))
        if self.ahead:
            self._compare_ahead()
        return taken

    def taken_ahead(self, index: int) -> list[Any]:
        """First, end and digest of the items that were taken from ``index`` on, or else in an earlier run."""
        found = self._taken.between(index, self._taken[-1][0]) if self._taken else []
        # A resumed run that saves before its first batch may not have come as far.
        return [*self.ahead] if self.ahead and self.ahead[0] == index else found

    def _compare_ahead(self) -> None:
        """Warn where items that an earlier run had taken ahead of its state are others here, once all are taken."""
        first, end, saved = self.ahead
        has_ended = self.end is not None and self.end < end
        if not has_ended and (not self._taken or self._taken[-1][0] < end):
            return
        self.ahead, found = (), self._taken.between(first, end)
        if has_ended or (found[:2] == [first, end] and found[2] != saved):
            self._order.memory.warn_once(
                f"{self._order.name} yields others at items {first} to {end - 1} of epoch {self._epoch} here than in "
                "the run that wrote the checkpoint, which had drawn these by then, ahead of training. So the resume is "
                "not exact. If they follow from what training or a hook changes meanwhile, let that take effect from "
                "the next epoch on, or let them follow from the epoch alone; else build it as it was.",
                once="ahead",
            )

    def noted_before(self, index: int) -> list[Any]:
        """The latest note of an earlier item, for a progress at ``index``, with a digest of the items before that.

        Empty if there is none.
        """
        note = next((note for note in reversed(self._notes) if note[0] < index), None)
        return [] if note is None else [*note, self._taken.latest_before(index, note[0] if self.has_states else 0)]

    def noted_by_ranks(self, index: int) -> list[list[Any]]:
        """The latest notes of an earlier item that all ranks have posted, where each iterates its own sampler."""
        found: list[list[Any]] = []
        for of_rank in posted(self._posted_as):
            notes = of_rank["notes"] if of_rank is not None and of_rank["label"] == list(self.label) else []
            found.append(next((note for note in reversed(notes) if note[0] < index), []))
        return found

    @property
    def _posted_as(self) -> str:
        return f"{self._order.name} {self._order.seed}"

    def _draw(self, count: int) -> None:
        """Draw until ``count`` items are ready, or fewer at the end."""
        if self._iterated is None:
            self._begin()
        iterated, ready = self._iterated, self._ready
        if iterated is None:
            return
        while len(ready) < count and self.end is None:
            self._pull(iterated, count - len(ready), ready)
        if self.end is not None:
            self._note_end()

    def _begin(self) -> None:
        """Begin; an error of the sampler's that was brought to a state of its own says so."""
        try:
            self._begin_iterating()
        except (StatefulError, StopIteration):
            raise
        except Exception as error:
            if not self.has_state:
                raise
            raise StateError(
                f"{self._order.name} cannot go on from its own state in the checkpoint: {type(error).__name__}: "
                f"{error}. Resume from another checkpoint, or mend its load_state_dict."
            ) from error

    def _begin_iterating(self) -> None:
        """Iterate the sampler, and drop what comes before the first item."""
        order, started = self._order, time.perf_counter()
        index, _, state = self._expected
        is_loaded = state is None and type(self._earlier) is list
        if self._tells_no_length and not order.memory.passes:
            # A fit before this one may have posted its own.
            post(f"{self._posted_as} ended", None)
        order.memory.note_begin(order, self, self._earlier if is_loaded else None)
        self.drawn = index if state is not None else 0
        self._iterated = iterated = order.iterated()
        self._copies = order.yields_containers
        note = partial(order.memory.note_contents, order, self)
        self._iterator = iterated.begin(*self.label, index, state, before_iter=note)
        distance = self._first - self.drawn
        expected = self._expected_latest
        if expected is not None and self.drawn <= expected[0] and expected[1] <= self._first:
            self._drop(iterated, expected[1])
            self._compare_latest()
        self._drop(iterated, self._first)
        if self.drawn < self._first:
            raise PositionError(
                f"{self._first} items of {order.name} were used in epoch {self._epoch}, but now it ends before "
                "that. Build it as when the checkpoint was written, or resume from another checkpoint."
            )
        if type(self._since) is list:
            order.memory.begin_since(order, self._since)
        self.when_there()
        seconds = time.perf_counter() - started
        if distance and seconds > LONG_FAST_FORWARD:
            warn(
                f"{order.name} was fast-forwarded by {distance} items to item {self._first} of epoch {self._epoch}, "
                f"which took {seconds:.1f} s. A sampler with state_dict() and load_state_dict() is there at once."
            )

    def _drop(self, iterated: IteratedSampler, end: int) -> None:
        """Let the sampler yield what comes before an item, and remember what is just before it."""
        latest: list[Any] = []
        for until, into in ((max(end - NUM_LATEST, 0), None), (end, latest)):
            while self.drawn < until and self.end is None:
                self._pull(iterated, until - self.drawn, into)
        if latest:
            self._taken.append((self.drawn, snapshot(latest)))

    def _compare_latest(self) -> None:
        """Compare the items just before a state of an earlier run, unless its note has differed already."""
        if self._expected_latest is None:
            return
        first, end, saved = self._expected_latest
        found = self._taken.latest_before(end, first)
        if self.drawn == end and found is not None and found[2] != saved:
            self._differs(first, saved, found[2])

    def _pull(self, iterated: IteratedSampler, wanted: int, into: list[Any] | None) -> None:
        """Let the sampler yield items as far as the next one that is noted, or that one alone; None drops them."""
        began, noted, state = self.drawn, self._noted_next, None
        if began > noted:
            self._noted_next = noted = self._next_note(began)
        is_noted = began == noted
        if is_noted and self.has_states:
            index, _, state = self._expected
            if began != index:
                state = iterated.state(*self.label, began) if began else None
        wanted = 1 if is_noted else min(wanted, noted - began)
        if left_of_kept(self._iterator)() >= wanted:
            item = self._yielded(wanted, into)
        else:
            with iterated.entered():
                item = self._yielded(wanted, into)
        if self.drawn < began + wanted:
            self.end = self.drawn
        elif is_noted:
            self._note(began, item, state)

    def _yielded(self, wanted: int, into: list[Any] | None) -> Any:
        """Let the sampler yield so many items, or fewer at its end; the last of them, or what is not one."""
        if into is None:
            # Dropped at the speed of the sampler itself.
            item = next(islice(self._iterator, wanted - 1, None), _END)
            self.drawn += 0 if item is _END else wanted
            return item
        items, before = islice(self._iterator, wanted), len(into)
        try:
            # What a sampler yielded before it failed stays.
            into.extend(map(kept, items) if self._copies else items)
        finally:
            self.drawn += len(into) - before
        return into[-1] if into else _END

    def _next_note(self, index: int) -> int:
        """The first item at or after ``index`` that is noted."""
        return -(-index // STATE_STRIDE) * STATE_STRIDE if self.has_states else next_digest_index(index)

    def _note(self, index: int, item: Any, state: Any) -> None:
        # Chained where a resume comes by the same notes again, and so sees all of them changed.
        found = digest(item, self._notes[-1][1] if self._notes and not self.has_states else "")
        self._notes.append([index, found, state])
        order, (at, expected, _) = self._order, self._expected
        if order.dealing.is_own and order.is_trained_on:
            notes = list(islice(self._notes, max(len(self._notes) - _NUM_POSTED, 0), None))
            post(self._posted_as, {"label": self.label, "notes": notes})
        order.memory.compare_with_check(order, self, index, found)
        if index == at and expected and found != expected:
            self._expected_latest = None
            self._differs(index, expected, found, of_state=state is not None)

    def _differs(self, index: int, expected: str, found: str, *, of_state: bool = False) -> None:
        """Refuse items that are not those of an earlier run, or warn where that is accepted."""
        order = self._order
        if "nondeterministic" in order.accept:
            warn(
                f"{order.name} differs from run to run. What is left of epoch {self._epoch} is not what was left when "
                "the checkpoint was written: some samples come twice, and others never."
            )
            return
        hint = f"See that {order.name}.load_state_dict leads back to this very item. " if of_state else ""
        if order.remembers and not of_state:
            hint = "Its earlier passes were begun again: let no hook restore, within an epoch, what they change. "
        if order.memory.is_shared:
            hint = f"Several loaders share it: give each a {order.name} of its own, and train anew. "
        remedy = (
            f"{order.name} no longer yields what it did up to this item: build it with the same data and settings. "
            f"{hint}If it skips by itself what a stopped run has used, take that out: a resume does it. If it reads "
            "what training changes, restore what the epoch began with, and not the latest. Let it follow from neither "
            "time, the order of a set, nor a process. accept=('sequence',) goes on all the same."
        )
        changed = Difference(path=f"sequence at item {index}", saved=expected, present=found, remedy=remedy)
        if "sequence" not in order.accept:
            raise StateMismatchError([changed], where=f"The sampler's state in epoch {self._epoch}")
        warn(f"Accepted: {changed}")


def warn(message: str) -> None:
    """Warn the user of a sampler."""
    warnings.warn(message, StatefulWarning, stacklevel=3)


def left_of_kept(iterator: Any) -> Callable[[], int]:
    """Tells how many of the next items come out of a list or a range, so that no code of the sampler's runs for them.

    A generator at ``yield from`` goes on with its own code only when that has ended.
    """
    while type(iterator) is GeneratorType:
        iterator = iterator.gi_yieldfrom
    left: Callable[[], int] = iterator.__length_hint__ if type(iterator) in _OF_KEPT else int
    return left


def next_digest_index(index: int) -> int:
    """The first item at or after ``index`` of which a digest is noted."""
    if index >= _DIGEST_STRIDE:
        return -(-index // _DIGEST_STRIDE) * _DIGEST_STRIDE
    return index if index < 2 else 1 << (index - 1).bit_length()
