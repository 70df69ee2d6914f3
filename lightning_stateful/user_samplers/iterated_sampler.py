"""Iterates a user's sampler under randomness of its own, told of ranks and epochs, and keeps items that it yields."""

from __future__ import annotations

import copy
import warnings
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import PLAIN, attributes_of
from lightning_stateful.generators.generator_states import GeneratorState, identity_of
from lightning_stateful.generators.rng import (
    KINDS,
    OwnRandomness,
    get_generator_state,
    keep_randomness,
    seed_generator,
    set_generator_state,
)
from lightning_stateful.sampler_copies.sampler_copy import Path, SamplerCopy, SamplerParts, digest_of_contents, held_at
from lightning_stateful.sampler_copies.sampler_facts import RankDraws
from lightning_stateful.sampler_copies.sampler_ranks import AskedRanks, Setting, told
from lightning_stateful.sampler_copies.shared_objects import SharedObjects
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.state_codec import from_plain, to_plain

T = TypeVar("T")
_next: Callable[[Iterator[Any]], Any] = next


class IteratedSampler:
    """Iterates a sampler under randomness of its own, perhaps told of other ranks than those that there are.

    Args:
        sampler: The sampler.
        seed: Chooses the randomness, together with epoch, cycle and item.
        dataset: What is not looked into to find samplers and generators, or None.
        settings: Attributes to set while it is iterated.
        asked: Answers for torch.distributed while it is iterated; None to leave torch alone.
        generators: Where the generators are that it held before anybody iterated it. One that it makes on the way would
            not be there in a resumed run.
        outside: Generators outside of it that its code reaches, by the names that lead there.
        tell: Tells it the epoch; None to call every ``set_epoch`` in it.
        draws: What each rank draws for itself; None for nothing.
    """

    def __init__(
        self,
        sampler: Any,
        seed: int,
        *,
        dataset: Any = None,
        settings: Sequence[Setting] = (),
        asked: AskedRanks | None = None,
        generators: Collection[Path] = (),
        outside: Sequence[tuple[Path, GeneratorState]] = (),
        tell: Callable[[int], None] | None = None,
        draws: RankDraws | None = None,
    ) -> None:
        self._tell = partial(_tell_epoch, sampler, dataset) if tell is None else tell
        self.sampler, self._seed, self._dataset, self._generators = sampler, seed, dataset, generators
        self._settings, self._asked, self._draws = settings, asked, draws
        self._random, self._outside = OwnRandomness(seed), OutsideRandomness(outside)
        is_plain = not (settings or asked is not None or outside)
        self._block: AbstractContextManager[None] = self._random if is_plain else _Told(self._blocks)

    def begin(
        self,
        epoch: int,
        cycle: int,
        drawn: int = 0,
        state: Any = None,
        *,
        before_iter: Callable[[], object] = tuple,
    ) -> Iterator[Any]:
        """Begin a pass; what is returned is to be iterated within :meth:`entered`.

        With a ``state`` it goes on behind the ``drawn`` items that it had yielded when :meth:`state` returned that. The
        sampler has been told the epoch when ``before_iter`` is called.
        """
        self.tell(epoch, cycle)
        before_iter()
        if state is not None:
            self._reseed(epoch, cycle, drawn)
        with self.entered():
            if state is not None:
                self.sampler.load_state_dict(from_plain(state))
            iterator = iter(self.sampler)
        # A sampler that is its own iterator may begin anew at iter(), which islice() calls: let only next() be called.
        return map(_next, repeat(iterator)) if hasattr(type(iterator).__iter__, "__code__") else iterator

    def tell(self, epoch: int, cycle: int = 0, *, by: Callable[[int], object] | None = None) -> None:
        """Tell the sampler the epoch, under the randomness of a pass; ``by`` is called in place of every set_epoch."""
        self._reseed(epoch, cycle)
        with self.entered():
            (self._tell if by is None else by)(epoch)

    def asked(self, ask: Callable[[Any], T], epoch: int, cycle: int) -> T:
        """What ``ask`` gives of the sampler under the randomness that a pass begins with; a pass that runs goes on."""
        held = [held_at(self.sampler, path) for path in self._generators]
        kept = [(of, get_generator_state(of)) for of in held if identity_of(of)]
        run = self._random, self._outside
        self._random, self._outside = OwnRandomness(self._seed), OutsideRandomness(self._outside.states)
        try:
            self._reseed(epoch, cycle)
            with _Told(self._blocks):
                return ask(self.sampler)
        finally:
            self._random, self._outside = run
            for generator, state in kept:
                set_generator_state(generator, state)

    def state(self, epoch: int, cycle: int, drawn: int) -> Any:
        """The sampler's own state after it has yielded ``drawn`` items, as plain data."""
        # Seeded first: a state may hold generators, which a resume then puts where they are now.
        self._reseed(epoch, cycle, drawn)
        with self.entered():
            return to_plain(self.sampler.state_dict(), f"{type(self.sampler).__qualname__}.state_dict()")

    def entered(self) -> AbstractContextManager[None]:
        """A block in which to run the sampler's code: it sees its own randomness, and the ranks that it is told of.

        It may be entered again and again.
        """
        return self._block

    def _blocks(self) -> Iterator[AbstractContextManager[Any]]:
        yield self._random
        if self._outside.states:
            yield self._outside
        if self._settings:
            yield told(self._settings)
        if self._asked is not None:
            yield self._asked.answering()

    def _reseed(self, *labels: int) -> None:
        draws = self._draws
        other, kinds = (0, frozenset[str]()) if draws is None else (draws.seed_of(self._seed), draws.kinds)
        of_other = derive_seed("sampler", other, *labels)
        self._random.seed(derive_seed("sampler", self._seed, *labels), other=of_other, kinds=kinds & set(KINDS))
        held = other if "held" in kinds else self._seed

        def seed_of(path: Path) -> int:
            return derive_seed("held generator", repr(path), held, *labels)

        for path in self._generators:
            generator = held_at(self.sampler, path)
            if identity_of(generator) not in self._outside.identities:
                seed_generator(generator, seed_of(path))
        self._outside.seed(seed_of)


class _Told:
    """A block that enters others, made anew each time."""

    def __init__(self, blocks: Callable[[], Iterator[AbstractContextManager[Any]]]) -> None:
        self._blocks, self._entered = blocks, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for block in self._blocks():
                stack.enter_context(block)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class OutsideRandomness:
    """Generators that others hold too, which one piece of code runs on in states of its own.

    Within a ``with`` block they are where that code left them; outside of it they are where others left them.
    """

    def __init__(self, generators: Sequence[tuple[Path, GeneratorState]]) -> None:
        self.states = generators
        self.identities = {identity_of(state.generator) for _, state in generators}
        self._own: list[Any] = []

    def seed(self, seed_of: Callable[[Path], int]) -> None:
        """Seed them by their names; not within a block."""
        others = self._present()
        for path, state in self.states:
            seed_generator(state.generator, seed_of(path))
        self._own = self._present()
        self._put(others)

    def _present(self) -> list[Any]:
        return [state.get() for _, state in self.states]

    def _put(self, held: Sequence[Any]) -> None:
        for (_, state), value in zip(self.states, held, strict=False):
            state.put(value)

    def __enter__(self) -> None:
        self._others = self._present()
        self._put(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = self._present()
        self._put(self._others)


def _tell_epoch(sampler: Any, dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler and of those in it, from the inside out."""
    for part in SamplerParts(sampler, dataset).samplers:
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


class ToldEpochs:
    """Remembers what objects held when they were told an epoch last, or before that at first.

    Whether somebody else has called ``set_epoch`` since shows in their attribute ``epoch``. Of one without that,
    attributes that ``set_epoch`` sets hold something else than in a copy that is told the same epoch. Those that do not
    follow from the epoch, as where ``set_epoch`` draws random numbers, show nothing.

    ``once`` says whether :meth:`tell` is to leave out some that were told before.

    Attributes:
        others: The numbers of those that somebody else has told another epoch, as of the latest call of :meth:`tell`.
    """

    def __init__(self, holders: Sequence[Any], *, once: bool = False) -> None:
        self.others: set[int] = set()
        self._epoch, self._held, self._has_warned = 0, [_held_by(holder) for holder in holders], False
        self._digests = [_digests_of(holder) for holder in holders] if once else []

    def tell(self, holders: Sequence[Any], epoch: int, *, once: bool = False) -> None:
        """Call ``set_epoch`` of the objects, in their order, but of those that somebody else has told another epoch.

        With ``once`` those are left out that somebody else seems to have told this one.
        """
        self.others = self._told_another(holders, (epoch, self._epoch))
        for place, holder in enumerate(holders):
            is_told = once and self._digests[place : place + 1] != [_digests_of(holder)]
            if not is_told and place not in self.others and callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(epoch)
        self._epoch, self._held = epoch, [_held_by(holder) for holder in holders]
        self._digests = [_digests_of(holder) for holder in holders] if once else self._digests

    def note_told(self, holders: Sequence[Any], epoch: int) -> None:
        """Take what objects hold as told by nobody else, but of those that somebody else has told another epoch."""
        self.others = self._told_another(holders, (epoch, self._epoch))
        self.note_iterated(holders)

    def note_iterated(self, holders: Sequence[Any]) -> None:
        """Take what objects hold after their own iteration as told by nobody else: lhotse's go on to the next epoch."""
        held = enumerate(map(_held_by, holders))
        self._held = [self._held[place] if place in self.others else now for place, now in held]

    def warn(self, holders: Sequence[Any], *epochs: int, lives_on: bool = False) -> None:
        """Warn, once, of objects that somebody else has told another epoch; copies in workers may live on."""
        if not self._has_warned and (others := self.others | self._told_another(holders, epochs)):
            self._has_warned = True
            then = (
                "in this process. Its persistent workers never hear of that: a copy that they had by then is told the "
                "epochs 0, 1 and so on, which torch alone would not, and one that they get later stays as it was told. "
                "So the resume is not exact. Pass persistent_workers=False, or tell it the trainer's epoch alone."
                if lives_on
                else "which stays as it was told. A resume from here on is exact only if it is told the same again "
                "before its first batch."
            )
            warnings.warn(
                f"Something else has called set_epoch of {type(holders[min(others)]).__qualname__}, {then}",
                StatefulWarning,
                stacklevel=3,
            )

    def _told_another(self, holders: Sequence[Any], epochs: tuple[int, ...]) -> set[int]:
        found = set()
        for place, holder in enumerate(holders):
            before, now = self._held[place] if place < len(self._held) else {}, _held_by(holder)
            is_left = place in self.others and now == before
            if is_left or (now != before and _is_told_another(holder, before, now, epochs)):
                found.add(place)
        return found


def _is_told_another(holder: Any, before: dict[str, Any], now: dict[str, Any], epochs: tuple[int, ...]) -> bool:
    if "epoch" in now:
        return now["epoch"] not in (before.get("epoch", 0), *epochs)
    if any(callable(getattr(part, "set_epoch", None)) for part in SamplerParts(holder).shared):
        # A copy would tell what it shares.
        return False
    found = []
    with suppress(Exception), keep_randomness(), SharedObjects(holder):
        tried, other = SamplerCopy(holder).sampler, SamplerCopy(holder).sampler
        if tried is holder:
            return False
        for epoch in (0, 0, 1, *epochs):
            tried.set_epoch(epoch)
            found.append(_held_by(tried))
        for epoch in (2, 1):
            other.set_epoch(epoch)
        found.insert(3, _held_by(other))
    if len(found) < 4 + len(epochs):
        return False
    # Drawn by set_epoch, counted up, or following from the epochs before.
    others = {name for name in found[0] if found[0][name] != found[1].get(name)} if epochs else set()
    others |= {name for name in found[2] if found[2][name] != found[3].get(name)}
    sets = [name for name in found[1] if found[1][name] != found[2].get(name) and name not in others]
    return any(now.get(name) not in [of.get(name) for of in (before, *found[4:])] for name in sets)


def _held_by(holder: Any) -> dict[str, Any]:
    """The attribute ``epoch`` of an object with ``set_epoch``, or digests of all its attributes."""
    if callable(getattr(holder, "set_epoch", None)) and getattr(holder, "epoch", None) is not None:
        return {"epoch": holder.epoch}
    return _digests_of(holder)


def _digests_of(holder: Any) -> dict[str, Any]:
    """Digests of all attributes of an object with ``set_epoch``."""
    if not callable(getattr(holder, "set_epoch", None)):
        return {}
    return {name: digest_of_contents({name: value}) for name, value in attributes_of(holder).items()}


# Prefetching workers and open accumulation windows are as far as training may lie behind what was drawn.
KEPT_NOTES = 512
# Samples before the present one of which a digest is taken when a state is asked for; of whole batches it is one.
NUM_LATEST = 64

_INTEGERS = (int, np.integer)
# Containers that a sampler may fill again after it has yielded them; of another object nothing is known.
_CONTAINERS = (list, tuple, dict, set, deque, UserList, UserDict, array, bytearray, np.ndarray, torch.Tensor)


class TakenItems(deque[tuple[int, list[Any]]]):
    """Items that were taken from a pass, each time with the index behind them; of whole batches the last."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT_NOTES)

    def latest_before(self, index: int, least: int) -> list[Any] | None:
        """First, end and digest of up to 64 items before ``index``; None where it is not between two steps."""
        found = self._before(index, NUM_LATEST, is_one=True)
        first = max(index - len(found), index - NUM_LATEST, least)
        return [first, index, digest(found[first - index :])] if first < index else None

    def between(self, first: int, index: int) -> list[Any]:
        """The same of those from ``first`` on that are still known without a gap; empty if there are none."""
        found = self._before(index, index - first) if first < index else []
        first = max(index - len(found), first)
        return [first, index, digest(found[first - index :])] if found else []

    def _before(self, index: int, count: int, *, is_one: bool = False) -> list[Any]:
        """At least so many items before ``index``, as far as they are known; of whole batches one if ``is_one``."""
        found: list[Any] = []
        for end, taken in reversed(self):
            if end == index - len(found):
                found = [*taken, *found]
                if len(found) >= count or (is_one and not isinstance(taken[-1], _INTEGERS)):
                    break
        return found


def snapshot(items: list[Any]) -> list[Any]:
    """Indices; of other items the last one as it is now, though its sampler may change it later."""
    last = items[-1]
    kind = type(last)
    # Batches are mostly of indices alone, which show at both ends.
    if (kind is list or kind is tuple) and last and type(last[0]) is type(last[-1]) is int:
        return [tuple(last)]
    if isinstance(last, _INTEGERS):
        return items
    if kind not in (tuple, list):
        return [last if kind is str else digest(last)]
    return [tuple(last) if PLAIN.issuperset(map(type, last)) else digest(last)]


def kept(batch: Any) -> Any:
    """Copy a batch, so that it stays as it was yielded: a sampler may fill the very container again."""
    # The common case at the speed of a list: batches hold things of one kind.
    if type(batch) is list and (not batch or isinstance(batch[0], _INTEGERS)):
        return batch.copy()
    return copy.deepcopy(batch) if isinstance(batch, _CONTAINERS) else batch
