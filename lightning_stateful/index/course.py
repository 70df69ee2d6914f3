"""One epoch of a mixture from one place on, for one number of ranks: turns, steps and batches."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.leftovers import deal_out
from lightning_stateful.index.mixture import Mixture
from lightning_stateful.index.permutation import Indices
from lightning_stateful.index.proportions import Proportions
from lightning_stateful.index.schedule import Stretch
from lightning_stateful.index.seeding import derive_seed
from lightning_stateful.index.slots import Batches
from lightning_stateful.index.sources import PassCut, StreamCut, deal_out_steps
from lightning_stateful.index.steps import StepRule
from lightning_stateful.index.turns import Turns


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


class Course:
    """The steps of one epoch from where its sources stood at some step.

    Args:
        mixture: The configuration.
        epoch: The epoch.
        begun: Steps of the epoch that were done before.
        width: Number of ranks.
        origin: Samples of every source that were served before; empty for none.
        num_steps: Steps of the course, where they are given.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        epoch: int,
        begun: int,
        width: int,
        origin: tuple[int, ...],
        num_steps: int | None,
    ) -> None:
        self._mixture, self._width, self._begun, self._epoch = mixture, width, begun, epoch
        sources = mixture.sources
        self._origin = origin or (0,) * len(sources)
        self._cuts = self._cut_sources()
        # A pass over a source, and the order of turns, belong to an epoch unless places carry over.
        self._labels = (mixture.seed, epoch) if num_steps is None else (mixture.seed,)
        self._step = mixture.rule(sources.batch_sizes[0], width) if mixture.by_sample else None
        if num_steps is None:
            self._phases = list(self._until_stop())
        else:
            self._phases = list(self._for_turns(num_steps if self._step is None else num_steps * self._step.full))
        self._num_turns = self._phases[-1].end if self._phases else 0
        left = [cut.leftovers if isinstance(cut, PassCut) else 0 for cut in self._cuts]
        if mixture.stop != "all_exhausted":
            left = [0] * len(left)
        self._leftovers = deal_out(left, list(sources.batch_sizes), width, drop_last=mixture.drop_last)
        if self._step is None:
            self.num_steps = self._num_turns + self._leftovers.num_steps
            self.num_repeated = self._leftovers.num_repeated
        else:
            self.num_steps = self._step.num_steps(self._num_turns)
            self.num_repeated = self._step.num_repeated(self._num_turns)
        if not self.num_steps and not origin:
            sizes = dict(zip(sources.names, sources.lengths, strict=True))
            raise ConfigurationError(
                f"With stop={mixture.stop!r}, drop_last={mixture.drop_last} and {width} ranks, an epoch of the sources "
                f"{sizes} would have no step. Train on fewer ranks, or with smaller batches or another stop."
            )

    def _cut_sources(self) -> list[PassCut | StreamCut]:
        mixture = self._mixture
        if mixture.by_sample:
            return [
                StreamCut(length, place, StepRule(batch_size=1))
                for length, place in zip(mixture.sources.lengths, self._origin, strict=True)
            ]
        kind = StreamCut if mixture.serves_again else PassCut
        return [
            kind(length, place, mixture.rule(batch_size, self._width))
            for length, place, batch_size in zip(
                mixture.sources.lengths, self._origin, mixture.sources.batch_sizes, strict=True
            )
        ]

    def places(self, steps: int) -> tuple[int, ...]:
        """Samples served of every source after ``steps`` steps."""
        turns = steps if self._step is None else self._step.served(self._num_turns, steps)
        counts = self._counts(turns).tolist()
        places = [cut.place_after(count) for cut, count in zip(self._cuts, counts, strict=True)]
        if self._step is None and steps > self._num_turns:
            served = self._leftovers.served(steps - self._num_turns, len(places)).tolist()
            places = [place + more for place, more in zip(places, served, strict=True)]
        return tuple(places)

    def batches(self, first: int, last: int, rank: int) -> Batches:
        """The batches of ``rank`` in the steps ``first <= step < last``."""
        if self._step is None:
            sources, starts, sizes = self._shares(first, last, rank)
            sources, places = np.repeat(sources, sizes), _spell_out(starts, sizes)
        else:
            steps = np.arange(first, last, dtype=np.int64)
            starts, sizes = deal_out_steps(self._num_turns, self._step, steps, rank)
            sources, places = self._of_turns(_spell_out(starts, sizes))
        labels = ("mixture", *self._labels) if self._mixture.shuffle else None
        indices = self._mixture.sources.indices(sources, places, labels)
        return Batches(indices, sizes, places // np.array(self._mixture.sources.lengths, dtype=np.int64)[sources])

    # Turns and batches

    def _shares(self, first: int, last: int, rank: int) -> tuple[Indices, Indices, Indices]:
        """Of every step: the source, the first place and the number of places that ``rank`` serves."""
        end = min(last, self._num_turns)
        sources, occurrences = self._occurrences(first, max(first, end))
        starts, sizes = np.empty_like(sources), np.empty_like(sources)
        for source in np.unique(sources).tolist():
            chosen = sources == source
            starts[chosen], sizes[chosen] = self._cuts[source].shares(occurrences[chosen], rank)
        if last <= self._num_turns:
            return sources, starts, sizes
        left = self._leftovers
        chosen = np.arange(max(first - self._num_turns, 0), last - self._num_turns)
        of = left.sources[chosen, rank]
        begun = np.array(self.places(self._num_turns), dtype=np.int64)[of]
        return (
            np.concatenate([sources, of]),
            np.concatenate([starts, begun + left.starts[chosen, rank]]),
            np.concatenate([sizes, left.sizes[chosen, rank]]),
        )

    def _of_turns(self, turns: Indices) -> tuple[Indices, Indices]:
        """The source and the place in it of each turn, where a turn is a sample."""
        if not turns.size:
            return turns, turns
        begin = int(turns.min())
        sources, occurrences = self._occurrences(begin, int(turns.max()) + 1)
        sources, occurrences = sources[turns - begin], occurrences[turns - begin]
        return sources, np.array(self._origin, dtype=np.int64)[sources] + occurrences

    def _occurrences(self, first: int, last: int) -> tuple[Indices, Indices]:
        """The source of every turn, and how often it had its turn before."""
        sources = self._sources(first, last)
        occurrences = np.empty_like(sources)
        if sources.size:
            before = self._counts(first)
        for source in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == source)
            occurrences[chosen] = before[source] + np.arange(chosen.size)
        return sources, occurrences

    def _sources(self, first: int, last: int) -> Indices:
        parts = [
            phase.active[phase.turns.sources(*_within(phase, max(first, phase.begin), min(last, phase.end)))]
            for phase in self._phases
            if phase.begin < last and phase.end > first
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _counts(self, turn: int) -> Indices:
        counts = np.zeros(len(self._mixture.sources), dtype=np.int64)
        for phase in self._phases:
            if phase.begin < turn:
                counts[phase.active] += phase.turns.counts(*_within(phase, phase.begin, min(turn, phase.end)))
        return counts

    # Phases

    def _key(self, *labels: int) -> int | None:
        mixture = self._mixture
        return derive_seed("turns", *self._labels, *labels) if mixture.shuffle and not mixture.in_turn else None

    def _until_stop(self) -> Iterator[Phase]:
        mixture, unseen = self._mixture, [cut.num_groups for cut in self._cuts]
        everyone = np.arange(len(unseen), dtype=np.int64)
        if mixture.stop == "all_exhausted":
            # In round robin the turn goes on after a resume where it was, if all sources still have one.
            yield from self._until_exhausted(unseen, self._begun if mixture.in_turn else 0)
            return
        # Elsewhere it begins anew: what is left must never take more steps than a whole epoch.
        turns = Turns(proportions=Proportions(mixture.block, mixture.shares))
        if mixture.stop == "cycle":
            ends = [turns.turn_after(source, count) for source, count in enumerate(unseen) if count]
            end = max(ends, default=0)
            for source, count in enumerate(unseen):
                cut = self._cuts[source]
                if count and isinstance(cut, StreamCut) and turns.turn_after(source, count) == end:
                    cut.end_with(count - 1, mixture.sources.lengths[source])
        else:
            end = min(turns.turn_after(source, count + 1) - 1 for source, count in enumerate(unseen))
        if end:
            turns = Turns(proportions=turns.proportions, stop=end, key=self._key(0))
            yield Phase(0, end, turns, 0, everyone)

    def _until_exhausted(self, unseen: list[int], start: int) -> Iterator[Phase]:
        mixture, begin, number = self._mixture, 0, 0
        active = np.array([source for source, count in enumerate(unseen) if count], dtype=np.int64)
        while active.size:
            shares = [mixture.shares[source] for source in active]
            total = sum(shares)
            # Of fewer sources, a round is shorter; the block of a mixture stays as it is.
            block = len(shares) if mixture.in_turn else mixture.block
            proportions = Proportions(block, [share / total for share in shares])
            if mixture.in_turn:
                start %= block
            open_end = Turns(proportions=proportions, start=start)
            ends = [open_end.turn_after(place, unseen[source]) for place, source in enumerate(active)]
            end, last = min(ends), int(np.argmin(ends))
            turns = Turns(proportions=proportions, start=start, stop=end, key=self._key(number))
            yield Phase(begin, begin + end - start, turns, start, active)
            for source, count in zip(active.tolist(), turns.counts(start, end).tolist(), strict=True):
                unseen[source] -= count
            # The turn passes to whoever comes after the source that has left.
            rest = np.roll(active, -last - 1)
            active = rest[[unseen[source] > 0 for source in rest.tolist()]]
            begin, start, number = begin + end - start, 0, number + 1

    def _for_turns(self, num_turns: int) -> Iterator[Phase]:
        mixture, everyone = self._mixture, np.arange(len(self._cuts), dtype=np.int64)
        if mixture.schedule is None:
            yield Phase(
                0,
                num_turns,
                Turns(proportions=Proportions(mixture.block, mixture.shares), key=self._key(0)),
                self._done_turns(),
                everyone,
            )
            return
        begin, progress = 0, self._progress()
        for stretch in mixture.schedule.stretches(progress):
            if begin >= num_turns:
                return
            turns, first, length = (
                self._by_steps(stretch)
                if mixture.schedule.unit == "steps"
                else self._measured(stretch, progress, self._done_turns() + begin)
            )
            end = num_turns if length is None else min(begin + length, num_turns)
            if end > begin:
                yield Phase(begin, end, turns, first, everyone)
            begin, progress = end, Fraction(stretch.end or 0)

    def _done_steps(self) -> int:
        return self._epoch * (self._mixture.num_steps or 0) + self._begun

    def _by_steps(self, stretch: Stretch) -> tuple[Turns, int, int | None]:
        """A stretch whose turns are known since training began."""
        a_step = 1 if self._step is None else self._step.full
        first = max(self._done_steps() - stretch.begin, 0) * a_step
        length = None if stretch.end is None else (stretch.end - stretch.begin) * a_step
        turns = self._turns(stretch.first, stretch.final, length, stretch.begin)
        return turns, first, None if length is None else length - first

    def _measured(self, stretch: Stretch, progress: Fraction, done: int) -> tuple[Turns, int, int | None]:
        """A stretch from ``progress`` on, in samples or tokens, of which a turn has a mean number."""
        shares = stretch.shares_at(progress)
        if stretch.end is None:
            return self._turns(shares, shares, None, stretch.begin), done, None
        means = [(a + b) / 2 for a, b in zip(shares, stretch.final, strict=True)]
        rate = sum(mean * measure for mean, measure in zip(means, self._turn_measures(), strict=True))
        length = max(-(-(stretch.end - progress) // rate), 1)
        if shares == stretch.final:
            return self._turns(shares, shares, None, stretch.begin), done, length
        # The way from here to the end is planned anew in every epoch, so its blocks begin here.
        return self._turns(shares, stretch.final, length, done), 0, length

    def _turns(self, first: tuple[Fraction, ...], final: tuple[Fraction, ...], length: int | None, label: int) -> Turns:
        block = self._mixture.block
        blocks = 1 if length is None else -(-length // block)
        proportions = Proportions(block, first, final, blocks, shift=label // block)
        return Turns(proportions=proportions, stop=length, key=self._key(label))

    def _done_turns(self) -> int:
        return self._done_steps() if self._step is None else sum(self._origin)

    def _progress(self) -> Fraction:
        unit = self._mixture.schedule.unit if self._mixture.schedule else "steps"
        if unit == "steps":
            return Fraction(self._done_steps())
        return sum((place * mean for place, mean in zip(self._origin, self._means(), strict=True)), Fraction(0))

    def _means(self) -> list[Fraction]:
        """Progress that a sample of every source makes."""
        mixture = self._mixture
        if mixture.schedule is None or mixture.schedule.unit == "samples" or mixture.tokens is None:
            return [Fraction(1)] * len(mixture.sources)
        return [
            Fraction(tokens, length) for tokens, length in zip(mixture.tokens, mixture.sources.lengths, strict=True)
        ]

    def _turn_measures(self) -> list[Fraction]:
        """Progress that a turn of every source makes."""
        sizes = [1 if self._step else size * self._width for size in self._mixture.sources.batch_sizes]
        return [mean * size for mean, size in zip(self._means(), sizes, strict=True)]


def _within(phase: Phase, first: int, last: int) -> tuple[int, int]:
    return phase.first + first - phase.begin, phase.first + last - phase.begin


def _spell_out(starts: Indices, sizes: Indices) -> Indices:
    """``start, start + 1, ...``, ``size`` of them, for each pair."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(int(ends[-1]) if ends.size else 0)
