"""Tries a copy of a user's sampler before training: what it yields and remembers, and whether it asks for ranks."""

from __future__ import annotations

import hashlib
import marshal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.sampler_copies.sampler_copy import (
    SamplerCopy,
    SamplerParts,
    digest_of_contents,
    names_unseen,
    surroundings_of,
)
from lightning_stateful.sampler_copies.sampler_facts import SamplerFacts
from lightning_stateful.sampler_copies.sampler_ranks import AskedRanks, Setting, tell
from lightning_stateful.sampler_copies.shared_objects import (
    SharedObjects,
    changed_names,
    said_of_changes,
    surroundings_in_trial,
)
from lightning_stateful.sampler_copies.written_files import WrittenFiles
from lightning_stateful.samplers.fingerprint import as_written, digest, types_not_compared
from lightning_stateful.samplers.rank_exchange import collectives_begun
from lightning_stateful.user_samplers.iterated_sampler import IteratedSampler
from lightning_stateful.user_samplers.sampler_pass import STATE_STRIDE, next_digest_index
from lightning_stateful.user_samplers.sampler_trial import (
    COMPARED,
    MOST,
    MOST_ENDLESS,
    PATIENCE,
    QUICK,
    SamplerTrial,
    ask_for_length,
    beginning,
    begins_anew_when_asked,
    copy_as_now,
    fresh_copy,
    held_as_told,
    is_length_seen,
    is_touched,
    reads_training,
    refuse_wrong_length,
    untouched_in,
)
from lightning_stateful.user_samplers.user_sampler import UserSampler

# Seconds to the first items that are too much for each save.
_SLOW_TO_BEGIN = 0.05
# Items drawn at a time, and more where len() says how many there are.
_DRAWN, _DRAWN_OF_KNOWN = 2**12, 2**16
_END = object()


def check_sampler(order: UserSampler, choose: Callable[[Any], list[Setting]] | None = None) -> SamplerFacts:
    """Iterate a copy of a sampler over epoch 0, at most over a million items.

    Later epochs are begun as well where that tells something, see :class:`SamplerTrial`.

    ``choose`` says what to set on a copy while it is iterated, to tell it that there is one rank.

    Raises:
        ConfigurationError: It yields more or fewer items than its ``len``.
        UnsupportedLoaderError: It changes data that the copy shares with the original, other than a cache.
    """
    with SharedObjects(order.sampler, order.dataset) as objects, WrittenFiles() as written:
        facts = _facts_of(order, choose, objects, written)
    facts.writes_files = written.are_there
    return facts


def _facts_of(
    order: UserSampler,
    choose: Callable[[Any], list[Setting]] | None,
    objects: SharedObjects,
    written: WrittenFiles,
) -> SamplerFacts:
    copied = SamplerCopy(order.sampler, order.dataset)
    if not copied.is_apart:
        why = "it holds an iterator, a file or an object that cannot be copied"
        if order.cuts_samples and hasattr(type(order.sampler), "__next__"):
            raise UnsupportedLoaderError(f"{order.name}: {why}, so nobody can tell whether it" + _BEGINS_ANEW)
        return SamplerFacts(error=why, remembers=True, draws_in_len=True)
    facts, parts, begun = SamplerFacts(), SamplerParts(order.sampler, order.dataset), collectives_begun()
    facts.contents = digest_of_contents(order.sampler, order.dataset, epoch=0, parts=parts)
    shared = surroundings_in_trial(order.sampler, order.dataset, parts)
    asked, started = AskedRanks(1 if choose and order.facts.asks else None), time.perf_counter()
    tried = order.iterating(copied.sampler, [] if choose is None else choose(copied.sampler), asked)
    fresh = partial(fresh_copy, order, choose, asked)
    with suppress(Exception):
        facts.says = ask_for_length(order, tried, facts, fresh)
    if facts.changes_in_len:
        # Nobody asks the sampler itself.
        tried = fresh()
    contents = partial(digest_of_contents, tried.sampler, order.dataset, epoch=0)
    before, looks, followed = "", dict[bool, str](), None

    def note_told() -> None:
        nonlocal before
        facts.told_in, before = time.perf_counter() - started, contents()
        # One that is told ranks here was asked under them.
        is_told = order.has_set_epoch and choose is None and facts.says is not None
        if is_told and is_length_seen(order, tried.sampler):
            facts.says = order.length_of(tried.sampler)
        facts.told = held_as_told(order, tried)

    try:
        items = tried.begin(0, 0, before_iter=note_told)
        followed = _Followed(order, tried, items, facts, lambda last: looks.update({last: contents()}), started)
    except Exception as error:
        facts.error, facts.remembers = f"it raised {type(error).__name__}: {error}", True
    if collectives_begun() != begun:
        # A copy that one rank alone iterates later would wait for the others.
        facts.remembers = contents() != before
        with suppress(Exception):
            tried.tell(1)
        followed, facts.untouched = None, untouched_in(order, tried)
    facts.seconds, facts.asks = time.perf_counter() - started, asked.was_asked
    if _fills_cache(order, facts, shared, fresh):
        objects.keep()
        shared = surroundings_in_trial(order.sampler, order.dataset)
    if followed is None:
        return facts
    if not (facts.changes_in_len or is_length_seen(order, tried.sampler)):
        with suppress(Exception):
            # A plan that somebody has asked for before is there until the end of a pass.
            again = partial(fresh, sampler=tried.sampler)
            ask_for_length(order, again(), facts, again)
    refuse_wrong_length(order, facts)
    left, ended = [looks[True]] if True in looks else [], contents()
    is_changed, facts.ends_late = {*left, ended} != {before}, left not in ([], [ended])
    is_unseen = copied.shares_unseen or names_unseen(order.sampler, order.dataset)
    trial = SamplerTrial(order, facts, fresh, is_unseen=is_unseen)
    trial.go_on(tried, is_changed=is_changed)
    if order.has_set_epoch and facts.seconds <= QUICK:
        trial.tell_epochs()
        facts.remembers = facts.remembers or facts.remembers_told
        objects.put_back()
        if facts.hands_epoch_on and (names := changed_names(order.sampler, order.dataset, shared)):
            raise UnsupportedLoaderError(order.name + said_of_changes(names, "set_epoch sets it"))
    if facts.remembers or looks.get(False, before) not in (before, ended):
        facts.fresh = SamplerCopy(order.sampler, order.dataset).sampler
        tell(() if choose is None else choose(facts.fresh))
    facts.leads_back = _leads_back(fresh, followed)
    if is_changed or is_unseen or (order.has_set_epoch and trial.is_cheap):
        shared = surroundings_in_trial(order.sampler, order.dataset)
        trial.compare_copies()
        if is_unseen and "nondeterministic" not in order.accept and facts.apart_in == 0:
            raise UnsupportedLoaderError(order.name + _CHANGES_UNSEEN)
        if facts.hands_epoch_on:
            objects.put_back()
        if _fills_cache(order, facts, shared, fresh):
            objects.keep()
    if written.are_there and not facts.apart_in and trial.follows_files(written):
        # Nobody knows what a resume will find there.
        facts.apart_in = 1
    if facts.apart_in is None:
        trial.compare_orders_of_sets()
    if order.cuts_samples and begins_anew_when_asked(tried.sampler, contents):
        raise UnsupportedLoaderError(order.name + _BEGINS_ANEW)
    if facts.seconds <= QUICK and not facts.remembers:
        facts.left_alone = trial.left_alone_by(tried)
    if has_own_state(order) and not facts.leads_back:
        # Its later items are noted otherwise.
        facts.notes = {0: facts.notes[0]} if 0 in facts.notes else {}
    return facts


def _fills_cache(
    order: UserSampler, facts: SamplerFacts, before: dict[str, str], fresh: Callable[[], IteratedSampler]
) -> bool:
    """Whether a trial has changed what copies share with a sampler; refused unless that is shown to be a cache."""
    names = changed_names(order.sampler, order.dataset, before)
    if not names:
        return False
    now = surroundings_in_trial(order.sampler, order.dataset)
    if why := facts.error or _reason_against_cache(order, facts, now, fresh):
        raise UnsupportedLoaderError(order.name + said_of_changes(names, why))
    return True


def _reason_against_cache(
    order: UserSampler, facts: SamplerFacts, now: dict[str, str], fresh: Callable[[], IteratedSampler]
) -> str:
    """Why what a trial has changed may decide what a sampler yields; empty if it is a cache.

    Two fresh copies go through two epochs each. What they yield has to be the same with the cache empty, filled by an
    epoch, and filled by both; and once an epoch has filled it, that epoch changes it no more.
    """
    known, started = {0: facts}, time.perf_counter()
    try:
        for _ in range(2):
            tried = fresh()
            for epoch in range(2):
                found, began = SamplerFacts(says=facts.says), time.perf_counter()
                _Followed(order, tried, tried.begin(epoch, 0), found)
                found.seconds, filled = time.perf_counter() - began, surroundings_in_trial(order.sampler, order.dataset)
                if _differ_in_items(known.get(epoch, found), found):
                    return "then yields something else"
                if filled != now and epoch in known:
                    return "a second pass changes it again"
                if time.perf_counter() - started > PATIENCE:
                    return f"takes more than {PATIENCE:.0f} s to show that this changes nothing of what it yields"
                known.setdefault(epoch, found)
                now = filled
    except Exception as error:
        return f"a second pass raised {type(error).__name__}: {error}"
    # Without the time that it takes to fill it.
    facts.seconds, facts.begins_in = min(facts.seconds, found.seconds), min(facts.begins_in, found.begins_in)
    return ""


def _differ_in_items(one: SamplerFacts, other: SamplerFacts) -> bool:
    counts = one.marks.keys() & other.marks.keys()
    return one.length != other.length or any(one.marks[count] != other.marks[count] for count in counts)


def can_be_tried(order: UserSampler) -> bool:
    """Whether a copy of the sampler tells, in a short while, what it yields now."""
    return not order.facts.cannot_be_tried and order.facts.seconds <= QUICK


def yields_otherwise(order: UserSampler) -> bool:
    """Whether a copy of a sampler as it is now yields another first epoch than the copy that was tried before training.

    Of one that remembers its passes, it is a copy from before, which shares with the sampler only data and classes.
    """
    facts, now = order.facts, SamplerFacts(says=order.facts.says)
    if not can_be_tried(order) or facts.writes_files:
        return False
    with suppress(Exception), SharedObjects(order.sampler, order.dataset, in_training=True):
        tried = copy_as_now(order, facts.fresh if facts.remembers else order.sampler)
        _Followed(order, tried, tried.begin(0, 0), now)
    return _differ_in_items(facts, now)


def sequence_now(order: UserSampler, sequence: str) -> str:
    """Digest of the first epoch of a copy of a sampler as it is now, or ``sequence``, as it was tried, where unchanged.

    A sampler counts as unchanged if its passes alone have changed it, if these decide what it yields, or if it is slow.
    """
    facts = order.facts
    if facts.calls_collectives:
        return "changed" if is_touched(order) else sequence
    is_own = facts.remembers and not facts.is_harmless
    if is_own or not can_be_tried(order) or facts.writes_files:
        return sequence
    parts, held = SamplerParts(order.sampler, order.dataset), list[str]()
    contents = digest_of_contents(order.sampler, order.dataset, epoch=0, parts=parts)
    looked_at: tuple[Any, ...] = (len(order.memory.passes), contents, sequence)
    if facts.begins_in > _SLOW_TO_BEGIN:
        looked_at += (repr(surroundings_of(order.sampler, order.dataset, parts)),)
        if order.memory.looked_at == looked_at:
            return sequence
    with suppress(Exception), SharedObjects(order.sampler, order.dataset, in_training=True):
        tried = copy_as_now(order, order.sampler)
        items = tried.begin(0, 0, before_iter=lambda: held.append(held_as_told(order, tried)))
        with tried.entered():
            begins = digest([told_apart(item) for item in islice(items, _num_first(order))])
        # All of the epoch only where there is a sign of a change: it may take a while at each save.
        is_as_tried = (contents == facts.contents or held == [facts.told]) and not reads_training(order)
        now = sequence if is_as_tried and begins == sequence.partition("-")[0] else ""
        now = now or first_sequence(order, order.sampler)
        if now == sequence:
            order.memory.looked_at = looked_at
            return sequence
        is_own = facts.fresh is not None and order.memory.follows(order, now, partial(first_sequence, order))
        return sequence if is_own else now
    return sequence


def first_sequence(order: UserSampler, sampler: Any) -> str:
    """Digest of the first epoch of a copy of a sampler, as :attr:`SamplerFacts.sequence` of one that was tried."""
    facts, tried = order.facts, copy_as_now(order, sampler)
    now = SamplerFacts(says=facts.says)
    with SharedObjects(order.sampler, order.dataset, in_training=True):
        if facts.says is not None and not (facts.changes_in_len or facts.draws_in_len):
            # It may have another length than as built.
            now.says = tried.asked(order.length_of, 0, 0)
        _Followed(order, tried, tried.begin(0, 0), now)
    return now.sequence


class _Followed:
    """A pass over a copy of a sampler, iterated as far as is looked at, which notes items and the sampler's own state.

    ``look`` is called, with True, when the last item that ``len()`` says is drawn; and behind the first, if that is
    soon.

    Attributes:
        state: The sampler's own state on the way, if it has one.
        following: Digests of the items that come after that state.
    """

    def __init__(
        self,
        order: UserSampler,
        tried: IteratedSampler,
        items: Iterator[Any],
        facts: SamplerFacts,
        look: Callable[[bool], object] = bool,
        started: float | None = None,
    ) -> None:
        self.state: Any = None
        self.following: list[str] = []
        self._order, self._tried, self._items, self._facts = order, tried, items, facts
        self._has_states, self._most = has_own_state(order), MOST
        if facts.says is not None:
            self._most = min(facts.says + (not order.is_cut), MOST)
        self._started = time.perf_counter() if started is None else started
        self._drawn, self._chained, self._noted_next = 0, "", 0
        self._running, self._beginning = hashlib.blake2b(digest_size=8), list[Any]()
        # Indices stay as they are; others are written as they come.
        self._are_indices = False
        self._follow(look)

    def _follow(self, look: Callable[[bool], object]) -> None:
        order, facts = self._order, self._facts
        while size := self._num_wanted():
            before = self._drawn
            with self._tried.entered():
                self._draw(size)
            if before < 2:
                if not facts.changes_in_len:
                    with suppress(Exception):
                        facts.counts_down = self._tried.asked(order.length_of, 0, 0) != facts.says
                if time.perf_counter() - self._started < _SLOW_TO_BEGIN:
                    look(False)
            if before < COMPARED:
                facts.begins_in = time.perf_counter() - self._started
            facts.marks[self._drawn] = self._running.hexdigest()
            if self._drawn == facts.says and self._drawn > before:
                look(True)
            if self._drawn < before + size:
                facts.length = self._drawn
                break
            if self._drawn == STATE_STRIDE and self._has_states:
                with suppress(Exception):
                    self.state = self._tried.state(0, 0, self._drawn)
        else:
            facts.length = self._drawn if self._drawn == facts.says else None
        if facts.says is not None and not order.is_cut and self._drawn > facts.says:
            facts.length = self._drawn
        facts.begins = digest(self._beginning)

    def _num_wanted(self) -> int:
        """The items to draw next; 0 where no more is looked at."""
        drawn, says = self._drawn, self._facts.says
        may_be_endless = says is None and drawn >= _DRAWN
        if may_be_endless and (drawn >= MOST_ENDLESS or time.perf_counter() - self._started > QUICK):
            return 0
        stride = COMPARED if drawn < COMPARED else _DRAWN if says is None else _DRAWN_OF_KNOWN
        stride = STATE_STRIDE if self._has_states and drawn < STATE_STRIDE else stride
        size = min(stride - drawn % stride if drawn else 2, self._most - drawn)
        return size if says is None or drawn >= says else min(size, says - drawn)

    def _draw(self, size: int) -> None:
        """Draw the next items, and digest them as they are now: a sampler may change later what it has yielded."""
        last = self._drawn + size
        while self._drawn < last:
            index, kept = self._drawn, _num_first(self._order) - len(self._beginning)
            is_followed = self.state is not None and len(self.following) < STATE_STRIDE
            if index != self._noted_next and kept <= 0 and not is_followed:
                wanted = min(last, self._noted_next if index < self._noted_next else last) - index
                if self._draw_at_once(wanted) < wanted:
                    break
                continue
            item = next(self._items, _END)
            if item is _END:
                break
            self._note(index, item)
            self._running.update(_written(item))
            if kept > 0:
                self._beginning.append(told_apart(item))
                self._are_indices = type(self._beginning[-1]) is int
            self._drawn += 1

    def _draw_at_once(self, wanted: int) -> int:
        """Draw items between two that are noted; the number of those that there were."""
        if self._are_indices:
            items = list(islice(self._items, wanted))
            written, count = as_written(items), len(items)
            # Each has as many bytes as the header.
            self._are_indices = written is not None and len(written) == _HEADER * (1 + count)
            self._running.update(written[_HEADER:] if written and self._are_indices else b"".join(map(_written, items)))
        else:
            # Each while the processor has what is in it at hand.
            parts = list(map(_written, islice(self._items, wanted)))
            self._running.update(b"".join(parts))
            count = len(parts)
        self._drawn += count
        return count

    def _note(self, index: int, item: Any) -> None:
        if index == self._noted_next:
            facts = self._facts
            facts.first = item if index == 0 else facts.first
            facts.unseen = facts.unseen or types_not_compared(item)
            self._chained = facts.notes[index] = digest(item, "" if self._has_states else self._chained)
            self._noted_next = STATE_STRIDE if self._has_states else next_digest_index(index + 1)
        if self.state is not None and len(self.following) < STATE_STRIDE:
            self.following.append(digest(item))


def _num_first(order: UserSampler) -> int:
    """Items by which the beginning of an epoch is known: as many as come before a state is taken."""
    return STATE_STRIDE if has_own_state(order) else COMPARED


def _written(item: Any) -> bytes:
    """Bytes that tell an item from others: of a number, a list of numbers, or a digest."""
    if type(item) is list:
        written = as_written(item)
        if written is not None:
            return written
        if {int}.issuperset(map(type, item)):
            return marshal.dumps(item, 0)
    # Version 0 writes equal values alike.
    return marshal.dumps(told_apart(item), 0)


# Bytes in front of the items of a list that is written.
_HEADER = 5


def told_apart(item: Any) -> Any:
    """A plain value that tells an item from others."""
    return int(item) if isinstance(item, int) else digest(item)


def _leads_back(fresh: Callable[[], IteratedSampler], followed: _Followed) -> bool:
    """Whether a fresh copy goes on from a state as the copy that gave it did."""
    state, following = followed.state, followed.following
    with suppress(Exception):
        return state is not None and beginning(fresh(), 0, drawn=STATE_STRIDE, state=state)[:STATE_STRIDE] == following
    return False


def has_own_state(order: UserSampler) -> bool:
    """Whether a sampler has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(order.sampler, name, None)) for name in ("state_dict", "load_state_dict"))


_BEGINS_ANEW = (
    " returns itself from __iter__, and begins anew there. torch's BatchSampler calls iter() for every batch, so that "
    "every batch would be the beginning of an epoch. Let __iter__ return an iterator of its own: yield the indices, or "
    "return iter(list)."
)
_CHANGES_UNSEEN = (
    " yields something else whenever a copy of it is begun, and its code reaches what to try it before training "
    "changes: a file, variables of a function, or an object that is not copied (a database, an iterator, a generator "
    "of a class of your own, a table of pandas that is changed in place). Let it keep that in lists, dicts or arrays "
    "of its own, or pass accept=('nondeterministic',)."
)
