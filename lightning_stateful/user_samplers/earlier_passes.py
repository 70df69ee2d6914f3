"""Earlier passes over a user's sampler, as a state tells of them, and beginning them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any, NoReturn

from lightning_stateful.errors import PositionError
from lightning_stateful.sampler_copies.sampler_copy import SamplerCopy, SamplerParts, surroundings_of
from lightning_stateful.sampler_copies.sampler_ranks import AskedRanks
from lightning_stateful.sampler_copies.shared_objects import SharedObjects
from lightning_stateful.user_samplers.iterated_sampler import IteratedSampler
from lightning_stateful.user_samplers.sampler_pass import LONG_FAST_FORWARD, STATE_STRIDE
from lightning_stateful.user_samplers.user_sampler import UserSampler


class PassesHere(list[list[int]]):
    """Passes that were begun in this process; a state holds them as a plain list."""


class LeftIterator:
    """The iterator of a pass that is over, which its sampler's ``finally`` waits for to be dropped."""

    def __init__(self, iterated: IteratedSampler, iterator: Any) -> None:
        self._iterated, self._held = iterated, [iterator]

    def drop(self) -> None:
        """Drop it; once."""
        if self._held:
            with self._iterated.entered():
                self._held.clear()


def begin_pass(order: UserSampler, iterated: IteratedSampler, passed: Sequence[int]) -> LeftIterator:
    """Iterate a pass as the run has: its epoch, its cycle, and its items, or -1 for one to the end.

    Where the run noted the sampler's own state on the way, which seeds it anew, the state is asked for again.
    """
    epoch, cycle, items = passed
    drawn = iterated.begin(epoch, cycle)
    if order.resume_mode != "own_state":
        with iterated.entered():
            deque(drawn if items < 0 else islice(drawn, items), maxlen=0)
        return LeftIterator(iterated, drawn)
    for number in count(0, STATE_STRIDE):
        if number:
            iterated.state(epoch, cycle, number)
        wanted = STATE_STRIDE if items < 0 else min(items - number, STATE_STRIDE)
        with iterated.entered():
            came = sum(1 for _ in islice(drawn, wanted))
        if came < STATE_STRIDE or number + came == items:
            break
    return LeftIterator(iterated, drawn)


class CopyInStep:
    """A copy of a sampler from before training, on which the passes of training are begun again as they come."""

    def __init__(self) -> None:
        # The copy, and the passes that it has gone through: all but the latest.
        self._copied: tuple[IteratedSampler, list[list[int]]] | None = None
        # What was found to follow from the passes, each time with their number.
        self._following: set[tuple[int, object]] = set()

    def gives(
        self, order: UserSampler, begun: Sequence[Sequence[int]], value: object, of: Callable[[Any], object]
    ) -> bool:
        """Whether ``of`` gives the same value of it as of the sampler; False where that cannot be tried quickly."""
        facts, passes = order.facts, [list(passed) for passed in begun]
        if (len(passes), value) in self._following:
            return True
        if facts.fresh is None or facts.seconds > LONG_FAST_FORWARD or facts.writes_files:
            return False
        asked = AskedRanks(1) if order.dealing.answers else None
        with suppress(Exception), SharedObjects(order.sampler, order.dataset, in_training=True):
            if self._copied is None or self._copied[1] != passes[: len(self._copied[1])]:
                self._copied = order.iterating(SamplerCopy(facts.fresh, order.dataset).sampler, asked=asked), []
            copied, gone = self._copied
            while len(gone) < len(passes) - 1:
                begin_pass(order, copied, passes[len(gone)]).drop()
                gone.append(passes[len(gone)])
            latest = order.iterating(SamplerCopy(copied.sampler, order.dataset).sampler, asked=asked)
            if passes:
                begin_pass(order, latest, passes[-1]).drop()
            with latest.entered():
                found = of(latest.sampler)
            if found == value:
                self._following.add((len(passes), value))
            return found == value
        return False


def put_together(passes: Sequence[Sequence[int]]) -> PassesHere:
    """Passes as a state has them: ``[epoch, cycle, items or -1, number of epochs that follow alike]``."""
    told = PassesHere()
    for passed in passes:
        if told and list(passed) == [told[-1][0] + told[-1][3], *told[-1][1:3]]:
            told[-1][3] += 1
        else:
            told.append([*passed, 1])
    return told


def spelled_out(told: Sequence[Sequence[int]]) -> list[list[int]]:
    """Every one of the passes that a state has."""
    return [[first + number, cycle, items] for first, cycle, items, count in told for number in range(count)]


def refuse_iterated(order: UserSampler, here: int, before: int, epoch: int) -> NoReturn:
    """Refuse a sampler that cannot be brought to an epoch, because other passes of it were begun here."""
    if order.memory.is_shared:
        raise PositionError(
            f"{order.name} cannot be brought to epoch {epoch}: several loaders share it, and it changes while it is "
            "iterated, so that what the one gets depends on the passes of the other, whose order no checkpoint holds. "
            f"Give each loader a {order.name} of its own, and train anew."
        )
    raise PositionError(
        f"{order.name} has been iterated {here} times in this process, and what it yields depends on that. The run "
        f"that wrote the checkpoint, or the fit that this one goes on from, had iterated it {before} times before "
        f"epoch {epoch}, and it cannot be brought there. Make a new one, or for another fit a new Trainer, and do not "
        "iterate it before."
    )


def contents_of(order: UserSampler, own: str, parts: SamplerParts) -> tuple[str, dict[str, str]]:
    """Digests of what a sampler holds, ``own``, and of what else may decide what it yields, by name."""
    if order.is_known:
        return "", {name: repr(value) for name, value in order.parameters().items()}
    facts = order.facts
    if not facts.remembers or facts.is_harmless or facts.calls_collectives:
        return own, surroundings_of(order.sampler, order.dataset, parts)
    # Its passes change its own lists, but not those of a copy from before them.
    if facts.fresh is None:
        return "", surroundings_of(order.sampler, order.dataset, parts)
    return "", surroundings_of(facts.fresh, order.dataset)
