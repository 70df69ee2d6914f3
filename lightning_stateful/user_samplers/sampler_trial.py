"""Copies of a user's sampler, tried against one another: whether an epoch depends on those before it, and on what."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.generators.attributes import PLAIN, attributes_of, is_lightnings, is_users, named_outside
from lightning_stateful.generators.generator_states import comparable_state, process_states
from lightning_stateful.generators.rng import keep_randomness
from lightning_stateful.sampler_copies.sampler_copy import (
    SamplerCopy,
    SamplerParts,
    digest_of_contents,
    digest_of_generators,
    surroundings_of,
)
from lightning_stateful.sampler_copies.sampler_facts import SamplerFacts, len_only_reads
from lightning_stateful.sampler_copies.sampler_ranks import AskedRanks, told
from lightning_stateful.sampler_copies.shared_objects import SharedObjects
from lightning_stateful.sampler_copies.written_files import WrittenFiles
from lightning_stateful.samplers.fingerprint import digest, hex_digest
from lightning_stateful.samplers.state_codec import to_plain
from lightning_stateful.user_samplers.iterated_sampler import IteratedSampler
from lightning_stateful.user_samplers.user_sampler import UserSampler

# Items by which the beginning of an epoch is known; the most of an epoch that is looked at, and of one without an end.
COMPARED, MOST, MOST_ENDLESS = 64, 2**20, 2**14
# Seconds of an epoch that is gone through again where that tells something; all ranks are simulated for less.
QUICK, PATIENCE = 2.0, 20.0
# Seconds in which an epoch is begun that is begun ten times, or twice, to be sure: it may take as long as a pass.
_CHEAP, _BEARABLE = 0.05, 0.5


# A set of more items has a larger table once it is filled to three times as many; a smaller one needs more.
_LARGE_SET = 50_000
# Seconds to the first items with which a copy that goes on from a state takes too long at each save.
_SLOW_TO_GO_ON = 0.5


class SamplerTrial:
    """Goes on with copies of a sampler that has yielded its first epoch, and puts into its facts what that shows.

    ``fresh`` makes a copy of the sampler, or of an earlier copy; one ``is_unseen`` whose code reaches what no digest
    tells.
    """

    def __init__(
        self, order: UserSampler, facts: SamplerFacts, fresh: Callable[..., IteratedSampler], *, is_unseen: bool
    ) -> None:
        self._order, self._facts, self._fresh, self._is_unseen = order, facts, fresh, is_unseen
        # Two copies of one that the first epoch has changed, and how that has begun the next epoch.
        self._ended: list[IteratedSampler] = []
        self._next: list[str] | None = None
        # A copy that was told another epoch than the first.
        self._told_another: IteratedSampler | None = None

    @property
    def is_cheap(self) -> bool:
        """Whether to begin an epoch takes next to no time."""
        return self._facts.begins_in <= _CHEAP

    def go_on(self, ended: IteratedSampler, *, is_changed: bool) -> None:
        """Try whether passes matter: whether a copy that has gone through the first epoch goes on as a fresh one does.

        Where the pass has changed it, they do not only if both also hold the same behind the next epoch: else what they
        hold may show in a later one. What it does not hold, as in a cache by ``functools``, may matter without that.
        """
        facts = self._facts
        if not is_changed:
            with suppress(Exception):
                for epoch in (1, 2) if self.is_cheap else ():
                    if (fresh := beginning(self._fresh(), epoch)) != beginning(ended, epoch):
                        facts.remembers = fresh == beginning(self._fresh(), epoch)
                        return
            return
        self._ended = [self._fresh(sampler=ended.sampler) for _ in range(2)]
        if facts.seconds <= QUICK:
            with suppress(Exception):
                self._next = beginning(ended, 1)
                is_alike = not facts.unseen and self._next == beginning(self._fresh(), 1)
                facts.is_harmless = is_alike and self._next == beginning(_left(self._fresh(), facts), 1)
        facts.remembers = not (facts.is_harmless and self._ends_alike(ended))

    def _ends_alike(self, ended: IteratedSampler) -> bool:
        """Whether a copy that was iterated to its end holds after the next epoch what a fresh one does.

        A fresh one also has to begin the epoch behind that as it does: a plan that follows from the plan of the epoch
        before is drawn in that epoch, or else where it is first asked for.
        """
        with suppress(Exception):
            held = []
            for tried in (ended, self._fresh()):
                items = tried.begin(1, 0)
                with tried.entered():
                    deque(islice(items, most_of(self._facts, 1)), maxlen=0)
                held.append(self._held_by(tried))
            is_alike = held[0] == held[1]
            if is_alike and self._facts.begins_in <= _BEARABLE:
                is_alike = beginning(self._fresh(), 2) == beginning(ended, 2)
            return is_alike
        return False

    def tell_epochs(self) -> None:
        """Try whether ``set_epoch`` tells others of the epoch, and whether epochs told before matter."""
        facts = self._facts
        facts.hands_epoch_on = self._hands_epoch_on()
        facts.remembers_told, facts.adds_up = self._depends_on_told()

    def left_alone_by(self, tried: IteratedSampler) -> dict[str, str]:
        """As :func:`held_by`, of what neither passes nor ``set_epoch`` change; empty where that was not tried."""
        order, copies = self._order, [tried, *([] if self._told_another is None else [self._told_another])]
        if order.has_set_epoch and len(copies) == 1:
            return {}
        return untouched_in(order, *copies)

    def _hands_epoch_on(self) -> bool:
        """Whether a copy that is told an epoch changes what it shares with the sampler, as by telling its dataset."""
        held = []
        with suppress(Exception):
            for epoch in range(2):
                tried = self._fresh()
                # It may tell others when it is iterated.
                beginning(tried, epoch) if self.is_cheap else tried.tell(epoch)
                self._told_another = tried if epoch else None
                held.append(surroundings_of(self._order.sampler, self._order.dataset))
        return held[:1] != held[1:]

    def _depends_on_told(self) -> tuple[bool, bool]:
        """Whether an epoch begins otherwise on a copy that was told of those before, and by how often it was told.

        The second may not show it: a ``set_epoch`` that compares the epoch with the latest may do nothing at the first.
        """
        shows_all = not (self._is_unseen or self._facts.hands_epoch_on)
        with suppress(Exception):
            for epoch in (1, 2) if self._facts.told_in <= _BEARABLE else (1,):
                if shows_all and self._held_when_told(epoch, 0) == self._held_when_told(epoch, 1):
                    # So it yields the same.
                    continue
                if self._facts.begins_in > _BEARABLE:
                    return True, False
                untold, once = self._begins_when_told(epoch, 0), self._begins_when_told(epoch, 1)
                if once != untold and self._begins_when_told(epoch, 0) == untold:
                    return True, self._begins_when_told(epoch, 2) != once
        return False, False

    def _told_before(self, epoch: int, times: int) -> IteratedSampler:
        """A copy that was told of each epoch before so many times."""
        tried = self._fresh()
        for before in range(epoch):
            for _ in range(times):
                tried.tell(before)
        return tried

    def _begins_when_told(self, epoch: int, times: int) -> list[str]:
        return beginning(self._told_before(epoch, times), epoch)

    def _held_when_told(self, epoch: int, times: int) -> str:
        tried = self._told_before(epoch, times)
        tried.tell(epoch)
        return self._held_by(tried)

    def _held_by(self, tried: IteratedSampler) -> str:
        held = digest_of_contents(tried.sampler, self._order.dataset, of_copy=True)
        return held + digest_of_generators(tried.sampler)

    def compare_copies(self) -> None:
        """Look for an epoch that begins otherwise on two equal copies, although they draw alike."""
        facts = self._facts
        is_tried = self.is_cheap and (self._ended or self._order.has_set_epoch)
        facts.apart_in = _first_apart(self._fresh(), self._fresh(), range(3 if is_tried else int(self._is_unseen)))
        if facts.apart_in is not None or not self._ended:
            return
        # As the whole of the first epoch leaves it.
        one, other = self._ended
        if any(issubclass(type(part), Iterator) for part in SamplerParts(one.sampler, self._order.dataset).shared):
            # Both go on with the same one, such as a generator.
            return
        if self.is_cheap:
            facts.apart_in = _first_apart(one, other, range(1, 3))
        elif facts.begins_in <= _BEARABLE and not facts.is_harmless:
            # Of one that goes on as a fresh one, three copies have begun the next epoch alike.
            with suppress(Exception):
                began = beginning(one, 1)
                facts.apart_in = 1 if began != self._next and began != beginning(other, 1) else None

    def follows_files(self, written: WrittenFiles) -> bool:
        """Whether the first epoch begins otherwise by what passes have written than by what was there before them."""
        if self._facts.begins_in <= _BEARABLE:
            with suppress(Exception):
                now = beginning(self._fresh(), 0)
                written.put_back()
                return beginning(self._fresh(), 0) != now
        return False

    def compare_orders_of_sets(self) -> None:
        """Look for an epoch that begins otherwise on a copy of which sets of strings have another order."""
        # With a value of the user's it is the same in all processes.
        is_fixed = os.environ.get("PYTHONHASHSEED", "random") != "random"
        if is_fixed or not _sets_of_strings(self._order.sampler, self._order.dataset):
            return
        other = self._fresh()
        for one in _sets_of_strings(other.sampler, self._order.dataset):
            _put_in_other_order(one)
        self._facts.by_sets_in = _first_apart(self._fresh(), other, range(3 if self.is_cheap else 1))


def _sets_of_strings(sampler: Any, dataset: Any) -> list[set[Any]]:
    """Sets in a sampler whose order is another one in each process: of other items than numbers."""
    sets = [part for part in SamplerParts(sampler, dataset).found if type(part) is set and len(part) > 1]
    return [one for one in sets if not all(isinstance(item, (int, float)) for item in one)]


def _put_in_other_order(of: set[Any]) -> None:
    """Let a set keep its items in a larger table, from which they come in another order."""
    more = [object() for _ in range((16 if len(of) < _LARGE_SET else 2) * len(of))]
    of.update(more)
    for one in more:
        # One by one: the table stays as large.
        of.discard(one)


def most_of(facts: SamplerFacts, num_more: int = 0) -> int:
    """The items that ``len`` says, and ``num_more``, at most as many as are looked at of an epoch that may not end."""
    return MOST_ENDLESS if facts.says is None else min(facts.says + num_more, MOST)


def beginning(tried: IteratedSampler, epoch: int, *, drawn: int = 0, state: Any = None) -> list[str]:
    """Digests of the first items of an epoch, or of those that come after a state."""
    items = tried.begin(epoch, 0, drawn, state)
    with tried.entered():
        return list(map(digest, islice(items, COMPARED)))


def _left(tried: IteratedSampler, facts: SamplerFacts) -> IteratedSampler:
    """A copy that was iterated up to its last item, where Lightning leaves one with a length."""
    with suppress(Exception):
        items = tried.begin(0, 0)
        with tried.entered():
            deque(islice(items, most_of(facts)), maxlen=0)
    return tried


def _first_apart(one: IteratedSampler, other: IteratedSampler, epochs: Iterable[int]) -> int | None:
    """The first of some epochs that begins otherwise on two equal copies, although they draw alike; None for none."""
    started = time.perf_counter()
    with suppress(Exception):
        for epoch in epochs:
            if time.perf_counter() - started > PATIENCE:
                return None
            if beginning(one, epoch) != beginning(other, epoch):
                return epoch
    return None


def fresh_copy(order: UserSampler, choose: Any, asked: AskedRanks | None, sampler: Any = None) -> IteratedSampler:
    """A copy of a sampler, or of an earlier copy, told of ranks by what ``choose`` sets, and of those it asks for."""
    copied = SamplerCopy(order.sampler if sampler is None else sampler, order.dataset).sampler
    return order.iterating(copied, [] if choose is None else choose(copied), asked)


def copy_as_now(order: UserSampler, sampler: Any) -> IteratedSampler:
    """A copy of a sampler, or of an earlier copy, told of ranks as the sampler is."""
    with told(order.dealing.settings):
        copied = SamplerCopy(sampler, order.dataset)
    return order.iterating(copied.sampler, asked=AskedRanks(1) if order.dealing.answers else None)


def has_come_from(
    order: UserSampler, label: tuple[int, int], drawn: int, state: Any, count: int, is_latest: Callable[[Any], bool]
) -> bool:
    """Whether a copy comes from a state of a sampler's own to the one that it has now; True where that is not known.

    A pass by its ``label`` had yielded ``drawn`` items when it gave ``state``, and ``count`` since.
    """
    if order.facts.cannot_be_tried or order.facts.begins_in > _SLOW_TO_GO_ON:
        return True
    with suppress(Exception), SharedObjects(order.sampler, order.dataset, in_training=True), keep_randomness():
        tried = copy_as_now(order, order.sampler)
        items = tried.begin(*label, drawn, state)
        with tried.entered():
            found = deque(islice(items, count), maxlen=1)
            reached = [digest(to_plain(tried.sampler.state_dict()))]
        if found and not is_latest(found[0]):
            # The state leads elsewhere, which a resume will refuse.
            return True
        if order.has_set_epoch:
            # Lightning tells the next epoch where a fit ends within one.
            tried.tell(label[0] + 1)
            reached.append(digest(to_plain(tried.sampler.state_dict())))
        return digest(to_plain(order.sampler.state_dict())) in reached
    return True


def reads_training(order: UserSampler) -> bool:
    """Whether a sampler holds a model, an optimizer or an object of Lightning's, which training changes."""
    shared = SamplerParts(order.sampler, order.dataset).shared
    return any(isinstance(part, (torch.nn.Module, torch.optim.Optimizer)) or is_lightnings(part) for part in shared)


def held_as_told(order: UserSampler, tried: IteratedSampler) -> str:
    """Digest of what a copy holds that was told epoch 0; empty of one that is told none."""
    is_told = order.has_set_epoch
    return digest_of_contents(tried.sampler, order.dataset, epoch=0, of_copy=True) if is_told else ""


def holds_as_tried(order: UserSampler) -> bool:
    """Whether a copy of a sampler that is told epochs, as it is now, holds at epoch 0 what the tried copy held then."""
    with suppress(Exception), SharedObjects(order.sampler, order.dataset, in_training=True):
        tried = copy_as_now(order, order.sampler)
        tried.tell(0)
        return held_as_told(order, tried) == order.facts.told
    return False


def held_by(sampler: Any, dataset: Any = None) -> dict[str, str]:
    """Digests of the attributes of a sampler that another process may compare: of none with sets or generators.

    An attribute that is the dataset is left out: others compare that. If it is given, variables that the sampler's code
    names count too.
    """
    held = dict(attributes_of(sampler))
    if dataset is not None:
        outside = {name: value for name, value in named_outside(sampler).items() if _is_data(value)}
        held = {name: value for name, value in {**outside, **held}.items() if value is not dataset}
    parts = {name: SamplerParts([value]) for name, value in held.items()}
    return {
        name: hex_digest(digest_of_contents([held[name]], of_copy=True, parts=within).encode(errors="surrogatepass"))
        for name, within in parts.items()
        if not within.generators and not any(isinstance(part, (set, frozenset)) for part in within.found)
    }


def _is_data(value: Any) -> bool:
    is_own = is_users(type(value).__module__) and not (callable(value) or isinstance(value, torch.nn.Module))
    return is_own or type(value) in PLAIN or isinstance(value, (list, tuple, dict, deque, np.ndarray, torch.Tensor))


def untouched_in(order: UserSampler, *tried: IteratedSampler) -> dict[str, str]:
    """As :func:`held_by`, of what a sampler holds as copies of it do that were told epochs and iterated."""
    after = [held_by(one.sampler, order.dataset) for one in tried]
    now = held_by(order.sampler, order.dataset)
    return {name: value for name, value in now.items() if all(held.get(name) == value for held in after)}


def is_touched(order: UserSampler) -> bool:
    """Whether something else than its passes has changed a sampler, of which its trial noted what they leave."""
    now, untouched = held_by(order.sampler), order.facts.untouched or {}
    return any(now.get(name, value) != value for name, value in untouched.items())


def ask_for_length(
    order: UserSampler, tried: IteratedSampler, facts: SamplerFacts, unasked: Callable[[], IteratedSampler]
) -> int | None:
    """The ``len()`` of a copy; facts then say whether that draws, or changes one that can be iterated without it.

    ``unasked`` makes another such copy.
    """
    if is_length_seen(order, tried.sampler):
        return tried.asked(order.length_of, 0, 0)
    outside = [state for _, state in order.memory.generators_outside(order.sampler, order.dataset)]

    def ask(sampler: Any) -> int | None:
        def held() -> Any:
            return process_states(), digest_of_generators(sampler), [comparable_state(state) for state in outside]

        before = held()
        says = order.length_of(sampler)
        facts.draws_in_len = facts.draws_in_len or held() != before
        return says

    def ask_in(epoch: int, copied: IteratedSampler) -> int | None:
        before = digest_of_contents(copied.sampler, order.dataset, epoch=epoch)
        says = copied.asked(ask, epoch, 0)
        if says is not None and digest_of_contents(copied.sampler, order.dataset, epoch=epoch) != before:
            with suppress(Exception):
                beginning(unasked(), epoch)
                facts.changes_in_len = True
        return says

    says = ask_in(0, tried)
    if order.has_set_epoch and says is not None:
        # A plan of the first epoch may be there from the beginning, and others be made in len().
        with suppress(Exception):
            second = unasked()
            second.tell(1)
            ask_in(1, second)
    return says


def length_when_told(order: UserSampler, epoch: int, cycle: int) -> int | None:
    """Items of an epoch as a copy that is told it says; the sampler stays as it is, and what it shares with copies."""
    tried = copy_as_now(order, order.sampler)
    with SharedObjects(order.sampler, order.dataset, in_training=True):
        tried.tell(epoch, cycle)
        with tried.entered():
            return order.length_of(tried.sampler)


def length_now(order: UserSampler, epoch: int, cycle: int) -> int | None:
    """The ``len()`` of a sampler as it is; what that draws, it draws as a pass of the epoch that begins."""
    dealing, asked = order.dealing, AskedRanks(1) if order.dealing.answers else None
    if order.facts.draws_in_len:
        return order.iterating(order.sampler, dealing.settings, asked).asked(order.length_of, epoch, cycle)
    with told(dealing.settings), nullcontext() if asked is None else asked.answering():
        return order.length_of(order.sampler)


class Asked(NamedTuple):
    """The ``len()`` of a copy of a sampler, and what it may depend on."""

    depends_on: tuple[Any, ...]
    length: int | None


def asked_once(order: UserSampler, epoch: int, cycle: int, latest: Asked | None) -> Asked:
    """As :func:`length_when_told`, which is asked again only where what it may depend on is not as in ``latest``."""
    sampler, dataset = order.sampler, order.dataset
    parts = SamplerParts(sampler, dataset)
    held = digest_of_contents(sampler, dataset, epoch=epoch, parts=parts)
    depends_on = epoch, cycle, len(order.memory.passes), held, repr(surroundings_of(sampler, dataset, parts))
    if latest is not None and latest.depends_on == depends_on:
        return latest
    return Asked(depends_on, length_when_told(order, epoch, cycle))


def is_length_seen(order: UserSampler, sampler: Any) -> bool:
    """Whether the length is given, or ``len()`` of a copy is seen to change nothing."""
    return order.is_cut or len_only_reads(sampler)


def begins_anew_when_asked(sampler: Any, contents: Callable[[], str]) -> bool:
    """Whether a sampler is its own iterator, and ``iter()`` of that begins anew, as torch calls it for every batch."""
    if not hasattr(type(sampler), "__next__"):
        return False
    before = contents()
    with suppress(Exception):
        return iter(sampler) is sampler and hasattr(type(sampler).__iter__, "__code__") and contents() != before
    return False


def refuse_wrong_length(order: UserSampler, facts: SamplerFacts) -> None:
    """Refuse a sampler that yields more or fewer items than its ``len`` says."""
    found, says = facts.length, facts.says
    if found is None or says is None or found == says or (order.is_cut and found >= says):
        return
    saying = f"length={says} was given" if order.is_cut else f"its len() is {says}"
    found_text = f"more than {says}" if found > says else f"only {found}"
    raise ConfigurationError(
        f"{order.name} yields {found_text} items in epoch 0, but {saying}. Steps and the end of an epoch follow "
        "from that: correct it, or wrap the sampler: DDPSamplerWrapper(sampler, length=N) ends an epoch after N, and "
        "length='unknown' finds out where one ends that is not endless."
    )
