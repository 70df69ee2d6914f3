"""Who is served when, from one place on: turns in phases, between one event and the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.index.mixture import Mixture
from lightning_stateful.index.proportions import Proportions
from lightning_stateful.index.schedule import Schedule, Stretch
from lightning_stateful.index.turns import Turns

# How many turns a source may have had more or fewer than its share, generously: systematic sampling strays by a few.
_STRAY = 8


class Phase(NamedTuple):
    """Turns between two events: a source has been served whole, or the shares change.

    Attributes:
        begin: The phase's first turn, counted from where the course begins.
        end: The turn after its last one.
        turns: Who is served.
        first: The turn of ``turns`` that is the phase's first.
        active: The sources that ``turns`` counts.
    """

    begin: int
    end: int
    turns: Turns
    first: int
    active: Indices


# Turns, the first of them to serve, and how many.
Part = tuple[Turns, int, int]


@dataclass(frozen=True, kw_only=True)
class Outset:
    """Where a course of turns begins.

    Attributes:
        mixture: The configuration.
        epoch: The epoch.
        begun: Steps of the epoch that were done before.
        width: Number of ranks.
        origin: Samples of every source that were served before.
        num_steps: Steps to go, where places carry over from epoch to epoch; else None.
    """

    mixture: Mixture
    epoch: int
    begun: int
    width: int
    origin: tuple[int, ...]
    num_steps: int | None

    @property
    def labels(self) -> tuple[int, ...]:
        """What orders belong to: the seed, and the epoch unless places carry over."""
        return (self.mixture.seed, self.epoch) if self.num_steps is None else (self.mixture.seed,)

    @property
    def step(self) -> StepRule | None:
        """How turns are cut into steps, where a turn is a sample; None where it is a step."""
        mixture = self.mixture
        return mixture.rule(mixture.sources.batch_sizes[0], self.width) if mixture.by_sample else None

    @property
    def done_steps(self) -> int:
        """Steps since training began, where places carry over."""
        return self.epoch * (self.mixture.num_steps or 0) + self.begun

    @property
    def done_turns(self) -> int:
        """Turns since training began, where places carry over."""
        return self.done_steps if self.step is None else sum(self.origin)

    def key(self, *labels: int) -> int | None:
        """Chooses the order of turns within blocks; None where they stay evenly spread."""
        mixture = self.mixture
        return derive_seed("turns", *self.labels, *labels) if mixture.shuffle and not mixture.in_turn else None


def plan_phases(outset: Outset, num_groups: Sequence[int]) -> list[Phase]:
    """The phases from an outset to the end of its epoch.

    Args:
        outset: Where they begin.
        num_groups: Turns that every source has left, unless places carry over.
    """
    mixture, num_steps = outset.mixture, outset.num_steps
    if num_steps is None:
        return list(_until_all_are_exhausted(outset, list(num_groups)))
    num_turns = num_steps if outset.step is None else num_steps * outset.step.full
    if mixture.schedule is None:
        turns = Turns(proportions=Proportions(mixture.block, mixture.shares), key=outset.key(0))
        return [Phase(0, num_turns, turns, outset.done_turns, _everyone(mixture))]
    return list(_Scheduled(outset, mixture.schedule).phases(num_turns))


@lru_cache(maxsize=16)
def amounts_of(mixture: Mixture) -> tuple[int, ...]:
    """Samples that an epoch serves of every source, where a stop rule ends it.

    They are those of a run on one rank with turns evenly spread, so that they depend on neither ranks nor epochs.
    """
    lengths = mixture.sources.lengths
    if mixture.stop == "all_exhausted":
        return lengths
    sizes = [1] * len(lengths) if mixture.by_sample else mixture.sources.batch_sizes
    pairs = list(zip(lengths, sizes, strict=True))
    unseen = [length // size if mixture.drop_last else -(-length // size) for length, size in pairs]
    turns = Turns(proportions=Proportions(mixture.block, mixture.shares))
    if mixture.stop == "cycle":
        end = _last_end(turns, unseen)
    else:
        end = _first_end(turns, [count + 1 for count in unseen])[0] - 1
    counts = turns.counts(0, end).tolist()
    # Who has just been served whole does not begin again for the sake of a full batch.
    return tuple(
        length if count == whole else count * size
        for count, whole, (length, size) in zip(counts, unseen, pairs, strict=True)
    )


def _everyone(mixture: Mixture) -> Indices:
    return np.arange(len(mixture.sources), dtype=np.int64)


def _until_all_are_exhausted(outset: Outset, unseen: list[int]) -> Iterator[Phase]:
    mixture, begin, number = outset.mixture, 0, 0
    active = np.array([source for source, count in enumerate(unseen) if count], dtype=np.int64)
    # In round robin the turn goes on after a resume where it was, if all sources still have one.
    start = outset.begun if mixture.in_turn else 0
    while active.size:
        shares = [mixture.shares[source] for source in active]
        total = sum(shares)
        # Of fewer sources, a round is shorter; the block of a mixture stays as it is.
        block = len(shares) if mixture.in_turn else mixture.block
        proportions = Proportions(block, [share / total for share in shares])
        start = start % block if mixture.in_turn else 0
        end, last = _first_end(
            Turns(proportions=proportions, start=start), [unseen[source] for source in active.tolist()]
        )
        turns = Turns(proportions=proportions, start=start, stop=end, key=outset.key(number))
        yield Phase(begin, begin + end - start, turns, start, active)
        for source, count in zip(active.tolist(), turns.counts(start, end).tolist(), strict=True):
            unseen[source] -= count
        # The turn passes to whoever comes after the source that has left.
        rest = np.roll(active, -last - 1)
        active = rest[[unseen[source] > 0 for source in rest.tolist()]]
        begin, start, number = begin + end - start, 0, number + 1


def _first_end(turns: Turns, counts: list[int]) -> tuple[int, int]:
    """The turn after which a source has first had all its turns, and which source that is."""
    block = turns.proportions.block
    rates = [turns.proportions.turns_in_block(source) / block for source in range(len(counts))]
    end, last = 0, -1
    for source in sorted(range(len(counts)), key=lambda source: counts[source] / rates[source]):
        # Who cannot end sooner needs no closer look.
        if last >= 0 and (counts[source] - _STRAY) / rates[source] - block > end - turns.start:
            continue
        own = turns.turn_after(source, counts[source])
        if last < 0 or own < end:
            end, last = own, source
    return end, last


def _last_end(turns: Turns, counts: list[int]) -> int:
    """The turn after which all sources have had all their turns."""
    block, end = turns.proportions.block, 0
    rates = [turns.proportions.turns_in_block(source) / block for source in range(len(counts))]
    for source in sorted(range(len(counts)), key=lambda source: -counts[source] / rates[source]):
        # Who cannot end later needs no closer look.
        if (counts[source] + _STRAY) / rates[source] + block > end - turns.start:
            end = max(end, turns.turn_after(source, counts[source]))
    return end


class _Scheduled:
    """The phases of a schedule, from some progress on."""

    def __init__(self, outset: Outset, schedule: Schedule) -> None:
        self._outset, self._schedule = outset, schedule
        mixture = outset.mixture
        measures = [Fraction(1)] * len(mixture.sources)
        if schedule.unit == "tokens" and mixture.tokens is not None:
            lengths = mixture.sources.lengths
            measures = [Fraction(tokens, length) for tokens, length in zip(mixture.tokens, lengths, strict=True)]
        # Progress that a sample, and a turn, of every source makes: samples, or tokens on average.
        self._of_sample = measures
        sizes = [1 if mixture.by_sample else size * outset.width for size in mixture.sources.batch_sizes]
        self._of_turn = [measure * size for measure, size in zip(measures, sizes, strict=True)]

    def phases(self, num_turns: int) -> Iterator[Phase]:
        """Phases for as many turns."""
        begin, progress = 0, self._progress()
        for stretch in self._schedule.stretches(progress):
            by_steps = self._schedule.unit == "steps"
            left = num_turns - begin
            parts = self._by_steps(stretch, left) if by_steps else self._measured(stretch, progress, begin, left)
            for turns, first, length in parts:
                end = min(begin + length, num_turns)
                if end > begin:
                    yield Phase(begin, end, turns, first, _everyone(self._outset.mixture))
                begin = end
            if begin >= num_turns:
                return
            progress = Fraction(stretch.end or 0)

    def _progress(self) -> Fraction:
        if self._schedule.unit == "steps":
            return Fraction(self._outset.done_steps)
        pairs = zip(self._outset.origin, self._of_sample, strict=True)
        return sum((place * measure for place, measure in pairs), Fraction(0))

    def _by_steps(self, stretch: Stretch, num_turns: int) -> Iterator[Part]:
        """A stretch whose turns are known since training began."""
        step = self._outset.step
        a_step = 1 if step is None else step.full
        done = max(self._outset.done_steps - stretch.begin, 0) * a_step
        if stretch.end is None:
            yield self._steady(stretch.first, stretch.begin), done, num_turns
            return
        for turns, _, length in self._parts(stretch, (stretch.end - stretch.begin) * a_step, stretch.begin):
            if done < length:
                yield turns, done, length - done
            done = max(done - length, 0)

    def _measured(self, stretch: Stretch, progress: Fraction, begin: int, num_turns: int) -> Iterator[Part]:
        """A stretch in samples or tokens, which a turn brings forward by a mean amount."""
        done, shares = self._outset.done_turns + begin, stretch.shares_at(progress)
        if stretch.end is None:
            yield self._steady(shares, stretch.begin), done, num_turns
            return
        means = [(a + b) / 2 for a, b in zip(shares, stretch.final, strict=True)]
        rate = sum(mean * measure for mean, measure in zip(means, self._of_turn, strict=True))
        length = max(-(-(stretch.end - progress) // rate), 1)
        if shares == stretch.final:
            yield self._steady(shares, stretch.begin), done, length
            return
        # The way from here on is planned anew in every epoch, as far as the epoch goes.
        rest = Stretch(0, length, shares, stretch.final)
        count = min(length, num_turns)
        yield from self._parts(Stretch(0, count, shares, rest.shares_at(Fraction(count))), count, done)

    def _steady(self, shares: tuple[Fraction, ...], label: int) -> Turns:
        proportions = Proportions(self._outset.mixture.block, shares, shift=label)
        return Turns(proportions=proportions, key=self._outset.key(label))

    def _parts(self, stretch: Stretch, num_turns: int, label: int) -> Iterator[Part]:
        """A stretch of so many turns: whole blocks, and a shorter one, in which proportions are as exact."""
        whole, rest = divmod(num_turns, self._outset.mixture.block)
        middle = stretch.partway(Fraction(num_turns - rest, num_turns))
        if whole:
            blocks = Proportions(self._outset.mixture.block, stretch.first, middle, whole, shift=label)
            yield Turns(proportions=blocks, key=self._outset.key(label)), 0, num_turns - rest
        if rest:
            short = Proportions(rest, middle, stretch.final, shift=label + whole)
            yield Turns(proportions=short, key=self._outset.key(label, 1)), 0, rest
