"""One epoch of a mixture from one place on, for one number of ranks: turns, steps and batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_stateful.core.ranges import Indices, concatenated_ranges
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.leftovers import deal_out
from lightning_stateful.index.mixture import Mixture
from lightning_stateful.index.phases import Outset, Phase, amounts_of, plan_phases
from lightning_stateful.index.slots import Batches
from lightning_stateful.index.sources import EpochCut, StreamCut, deal_out_steps, present


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
        sources = mixture.sources
        outset = Outset(
            mixture=mixture,
            epoch=epoch,
            begun=begun,
            width=width,
            origin=origin or (0,) * len(sources),
            num_steps=num_steps,
        )
        self._outset, self._mixture, self._step = outset, mixture, outset.step
        self._cuts = _cut_sources(outset)
        groups = [cut.num_groups for cut in self._cuts if isinstance(cut, EpochCut)]
        self._phases = plan_phases(outset, groups)
        self._num_turns = self._phases[-1].end if self._phases else 0
        left = [cut.leftovers if isinstance(cut, EpochCut) else 0 for cut in self._cuts]
        self._leftovers = deal_out(left, list(sources.batch_sizes), width, drop_last=mixture.drop_last)
        if self._step is None:
            self.num_steps = self._num_turns + self._leftovers.num_steps
            self.num_repeated = self._leftovers.num_repeated
        else:
            self.num_steps = self._step.num_steps(self._num_turns)
            self.num_repeated = self._step.num_repeated(self._num_turns)
        if mixture.drop_last and num_steps is None and not origin and not begun:
            self._refuse_unserved()
        if not self.num_steps and not origin and not begun:
            sizes = dict(zip(sources.names, sources.lengths, strict=True))
            raise ConfigurationError(
                f"With stop={mixture.stop!r}, drop_last={mixture.drop_last} and {width} ranks, an epoch of the sources "
                f"{sizes} would have no step. Train on fewer ranks, or with smaller batches or another stop."
            )

    def _refuse_unserved(self) -> None:
        sources, places = self._mixture.sources, self.places(self.num_steps)
        for name, place, amount in zip(sources.names, places, amounts_of(self._mixture), strict=True):
            if self.num_steps and amount and not place:
                raise ConfigurationError(
                    f"Source {name!r} has {amount} samples for an epoch, too few for a full step of "
                    f"{self._outset.width} ranks; with drop_last=True it would never be served. Give it a smaller "
                    "batch size, or pass drop_last=False."
                )

    def places(self, steps: int) -> tuple[int, ...]:
        """Samples served of every source after ``steps`` steps."""
        turns = steps
        if self._step is not None:
            # What drop_last leaves out has not been served.
            dropped = self._num_turns % self._step.full if self._mixture.drop_last else 0
            turns = min(self._step.served(self._num_turns, steps), self._num_turns - dropped)
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
            indices, passes = self._look_up(sources, starts, sizes)
        else:
            steps = np.arange(first, last, dtype=np.int64)
            starts, sizes = deal_out_steps(self._num_turns, self._step, steps, rank)
            sources, places = self._of_turns(concatenated_ranges(starts, sizes))
            indices, passes = self._look_up(sources, places, np.ones_like(sources))
        return Batches(indices, sizes, passes)

    def _look_up(self, sources: Indices, starts: Indices, sizes: Indices) -> tuple[Indices, Indices]:
        """Indices, and the passes they belong to, of runs of places: each of one source."""
        seed: tuple[str | int, ...] | None = ("mixture", *self._outset.labels) if self._mixture.shuffle else None
        ends = np.cumsum(sizes)
        indices = np.empty(int(ends[-1]) if ends.size else 0, dtype=np.int64)
        passes = np.zeros_like(indices)
        for source in present(sources):
            of = np.flatnonzero(sources == source)
            where = concatenated_ranges(ends[of] - sizes[of], sizes[of])
            places = concatenated_ranges(starts[of], sizes[of])
            indices[where], passes[where] = self._mixture.sources.look_up(source, places, seed)
        return indices, passes

    # Turns and batches

    def _shares(self, first: int, last: int, rank: int) -> tuple[Indices, Indices, Indices]:
        """Of every step: the source, the first place and the number of places that ``rank`` serves."""
        end = min(last, self._num_turns)
        sources, occurrences = self._occurrences(first, max(first, end))
        starts, sizes = np.empty_like(sources), np.empty_like(sources)
        for source in present(sources):
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
        return sources, np.array(self._outset.origin, dtype=np.int64)[sources] + occurrences

    def _occurrences(self, first: int, last: int) -> tuple[Indices, Indices]:
        """The source of every turn, and how often it had its turn before."""
        sources = self._sources(first, last)
        occurrences = np.empty_like(sources)
        if sources.size:
            before = self._counts(first)
        for source in present(sources):
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


def _cut_sources(outset: Outset) -> Sequence[EpochCut | StreamCut]:
    mixture = outset.mixture
    # Where a turn is a sample, ranks share the turns and not the sources.
    alone = StepRule(batch_size=1)
    rules = [alone if mixture.by_sample else mixture.rule(size, outset.width) for size in mixture.sources.batch_sizes]
    if outset.num_steps is not None:
        return [StreamCut(place, rule) for place, rule in zip(outset.origin, rules, strict=True)]
    amounts = amounts_of(mixture)
    return [EpochCut(amount, place, rule) for amount, place, rule in zip(amounts, outset.origin, rules, strict=True)]


def _within(phase: Phase, first: int, last: int) -> tuple[int, int]:
    return phase.first + first - phase.begin, phase.first + last - phase.begin
