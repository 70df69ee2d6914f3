"""The rest of one epoch of a mixture, planned from the samples that were served of each source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from lightning_stateful.core.order import read_in_chunks, say_repeats
from lightning_stateful.core.progress import Progress
from lightning_stateful.core.ranges import Indices, concatenated_ranges
from lightning_stateful.core.seeding import Label, derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture.draws import Draws
from lightning_stateful.mixture.source_steps import LastSteps, SourceSteps, gather, shares_of_steps
from lightning_stateful.mixture.sources import Mixture, amounts_of, present

# Samples that are looked up at a time, and steps.
_MOST_SAMPLES, _MOST_STEPS = 2**17, 8192
# More than a pass has, over all ranks: the numbers of the batches of the next pass begin here.
_STEPS_A_CYCLE = 2**44


class _Segment(NamedTuple):
    """Draws ``begin <= k < end`` of a plan; in ``draws`` they stand from ``first`` on."""

    begin: int
    end: int
    draws: Draws
    first: int

    def within(self, first: int, last: int) -> tuple[int, int]:
        """The part of ``first <= k < last`` that lies in the segment, as it counts in ``draws``."""
        offset = self.first - self.begin
        return max(first, self.begin) + offset, min(last, self.end) + offset


@dataclass(frozen=True)
class MixtureEpochPlan:
    """The rest of an epoch of a mixture; a plan in the sense of :class:`~lightning_stateful.core.order.EpochPlan`.

    Attributes:
        mixture: What is served.
        epoch: Which epoch.
        num_replicas: Number of ranks.
        planned_steps: Steps of the epoch that had been taken when its rest was planned.
        origin: Samples of every source that had been served then: in the epoch or, with ``num_steps``, since training
            began.
        taken: Steps taken since, by which this plan begins later.
        begun: The progress that the plan was made from, where there was one.
        cycle: Which pass within the epoch.
    """

    mixture: Mixture
    epoch: int
    num_replicas: int
    planned_steps: int
    origin: tuple[int, ...]
    taken: int = 0
    begun: Progress | None = None
    cycle: int = 0

    # The protocol

    @cached_property
    def num_steps(self) -> int:
        """Steps to the end of the epoch."""
        return self.total_steps - self.taken

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, list[int]]]:
        """The batches of ``rank``; numbered through all steps of the epoch and the ranks of each."""
        first = self.taken + first_step
        work = max(self.mixture.sources.batch_sizes) * (self.num_replicas if self.mixture.by_sample else 1)
        largest = min(max(_MOST_SAMPLES // work, 1), _MOST_STEPS)
        batches = read_in_chunks(
            lambda begin, end: self._read(begin, end, rank), first, self.total_steps, largest=largest
        )
        number = self.cycle * _STEPS_A_CYCLE + self.batches_before + first_step * self.num_replicas + rank
        return zip(count(number, self.num_replicas), batches, strict=False)

    @property
    def batches_before(self) -> int:
        """Batches of the epoch, over whatever ranks, that were served before this plan."""
        if self.begun is None:
            return (self.planned_steps + self.taken) * self.num_replicas
        return int(self.begun.details.get("batches", self.begun.consumed * self.num_replicas))

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps: the samples served of every source, and whence the rest was planned."""
        if not steps and self.begun is not None:
            return self.begun
        names, done = self.mixture.sources.names, self.taken + steps
        details: dict[str, Any] = {"served": dict(zip(names, self.served_after(done), strict=True))}
        details["batches"] = self.batches_before + steps * self.num_replicas
        if self.mixture.num_steps is None:
            origin = dict(zip(names, self.origin, strict=True))
            planned = {"ranks": self.num_replicas, "steps": self.planned_steps, "served": origin}
            details["planned"] = planned if self.planned_steps else {}
        return Progress(epoch=self.epoch, cycle=self.cycle, consumed=self.planned_steps + done, details=details)

    def report_after(self, steps: int) -> dict[str, Any]:
        """Of each of the ``sources``: samples, passes ("epochs"), share of samples and, if known, tokens.

        Counted in the epoch or, with ``num_steps``, since training began. Tokens of a pass that is not complete are
        its samples times their mean length.
        """
        served = [
            samples + self.cycle * of_pass
            for samples, of_pass in zip(self.served_after(self.taken + steps), self._served_in_a_pass, strict=True)
        ]
        total, sources, tokens = sum(served), self.mixture.sources, self.mixture.tokens
        result: dict[str, dict[str, float]] = {}
        for source, (name, length, samples) in enumerate(zip(sources.names, sources.lengths, served, strict=True)):
            share = samples / total if total else 0.0
            result[name] = {"samples": samples, "epochs": samples / length, "share": share}
            if tokens is not None:
                result[name]["tokens"] = (2 * samples * tokens[source] + length) // (2 * length)
        return {"sources": result}

    @cached_property
    def _served_in_a_pass(self) -> tuple[int, ...]:
        """Samples that a whole pass before this one has served of every source; of no use where there was none."""
        nothing = (0,) * len(self.mixture.sources)
        if not self.cycle:
            return nothing
        whole = replace(self, planned_steps=0, origin=nothing, taken=0, begun=None, cycle=0)
        return whole.served_after(whole.total_steps)

    def repeats(self) -> str:
        """What is served twice, in words."""
        repeated = self._last.num_repeated if self._rule is None else self._rule.num_repeated(self._num_draws)
        return say_repeats(repeated, sum(amounts_of(self.mixture)))

    # Steps, counted from where the rest of the epoch was planned

    @cached_property
    def total_steps(self) -> int:
        """Steps from where the rest of the epoch was planned to its end."""
        if self.mixture.num_steps is not None:
            return max(self.mixture.num_steps - self.planned_steps, 0)
        return self._num_draws + self._last.num_steps if self._rule is None else self._rule.num_steps(self._num_draws)

    def served_after(self, steps: int) -> tuple[int, ...]:
        """Samples served of every source after ``steps`` steps."""
        draws, last = steps, 0
        if self._rule is not None:
            draws = steps * self._rule.full
            if self.mixture.num_steps is None:
                # What drop_last leaves out has not been served.
                all_served = self._num_draws - self._rule.num_dropped(self._num_draws)
                draws = min(self._rule.served(self._num_draws, steps), all_served)
        elif self.mixture.num_steps is None:
            draws, last = min(steps, self._num_draws), max(steps - self._num_draws, 0)
        counts = self._counts_before(draws).tolist()
        served = [of.served_after(count) for of, count in zip(self._steps_of_sources, counts, strict=True)]
        if last:
            more = self._last.served(last, len(served)).tolist()
            served = [samples + others for samples, others in zip(served, more, strict=True)]
        return tuple(served)

    def refuse_empty(self) -> None:
        """Refuse a whole epoch without a step, or one that leaves a source out.

        Raises:
            ConfigurationError: With the source's name.
        """
        mixture, sources = self.mixture, self.mixture.sources
        if not self.total_steps:
            raise ConfigurationError(
                f"With stop={mixture.stop!r}, drop_last={mixture.drop_last} and {self.num_replicas} ranks, an epoch of "
                f"the sources {dict(zip(sources.names, sources.lengths, strict=True))} would have no step. Train on "
                "fewer ranks, or with smaller batches or another stop."
            )
        if not mixture.drop_last or mixture.num_steps is not None:
            return
        served = self.served_after(self.total_steps)
        for name, samples, amount in zip(sources.names, served, amounts_of(mixture), strict=True):
            if amount and not samples:
                raise ConfigurationError(
                    f"Source {name!r} has {amount} samples for an epoch, too few for a full step of "
                    f"{self.num_replicas} ranks; with drop_last=True it would never be served. Give it a smaller "
                    "batch size, or pass drop_last=False."
                )

    # How the pieces fit

    @cached_property
    def _rule(self) -> StepRule | None:
        """How draws are cut into steps, where a draw is a sample; None where it is a step."""
        mixture = self.mixture
        return mixture.rule(mixture.sources.batch_sizes[0], self.num_replicas) if mixture.by_sample else None

    @cached_property
    def _steps_of_sources(self) -> Sequence[SourceSteps]:
        mixture = self.mixture
        # Where a draw is a sample, ranks share the draws and not the sources.
        rules = [
            StepRule(batch_size=1) if mixture.by_sample else mixture.rule(size, self.num_replicas)
            for size in mixture.sources.batch_sizes
        ]
        amounts = [None] * len(rules) if mixture.num_steps is not None else amounts_of(mixture)
        return [SourceSteps(*args) for args in zip(self.origin, amounts, rules, strict=True)]

    @cached_property
    def _last(self) -> LastSteps:
        mixture, left = self.mixture, [of.left for of in self._steps_of_sources]
        return gather(left, mixture.sources.batch_sizes, self.num_replicas, drop_last=mixture.drop_last)

    @cached_property
    def _num_draws(self) -> int:
        return sum(of.num_steps for of in self._steps_of_sources)

    @cached_property
    def _labels(self) -> tuple[int, ...]:
        """What orders belong to: the seed, and the epoch unless sources go on from epoch to epoch."""
        if self.mixture.num_steps is not None:
            return (self.mixture.seed,)
        return (self.mixture.seed, self.epoch, self.cycle) if self.cycle else (self.mixture.seed, self.epoch)

    def _key(self, number: int) -> int | None:
        mixture = self.mixture
        # By sample, draws stay evenly spread: each batch has its share of every source.
        shuffled = mixture.shuffle and not mixture.in_turn and not mixture.by_sample
        return derive_seed("draws", *self._labels, number) if shuffled else None

    @cached_property
    def _segments(self) -> list[_Segment]:
        """Draws between one event and the next: a source has been served whole."""
        mixture = self.mixture
        if mixture.num_steps is None:
            return list(self._until_exhausted())
        done_steps = self.epoch * mixture.num_steps + self.planned_steps
        per_step = 1 if self._rule is None else self._rule.full
        if mixture.schedule is not None:
            draws, first = Draws.scheduled(mixture.schedule, per_step, key=self._key(0)), done_steps * per_step
        else:
            draws = Draws.repeated(mixture.draws, key=self._key(0))
            first = done_steps if self._rule is None else sum(self.origin)
        return [_Segment(0, 2**61 - first, draws, first)]

    def _until_exhausted(self) -> Iterator[_Segment]:
        """The endless draws, without those of sources that have been served whole."""
        counts = [of.num_steps for of in self._steps_of_sources]
        each = [draws if count else 0 for draws, count in zip(self.mixture.draws, counts, strict=True)]
        if not any(each):
            return
        spread = Draws.repeated(each)
        # Round robin goes on where it was, as long as all sources still have draws.
        start = self.planned_steps % sum(each) if self.mixture.in_turn else 0
        last = [before + count for before, count in zip(spread.spread_before(start).tolist(), counts, strict=True)]
        ends = sorted(spread.when(source, last[source]) for source, count in enumerate(counts) if count)
        begin = 0
        for number, (*_, source) in enumerate(ends):
            stop = spread.draw_after(source, last[source])
            if stop > start:
                draws = Draws.repeated(each, key=self._key(number), start=start, stop=stop)
                yield _Segment(begin, begin + stop - start, draws, start)
            # Of the draws so far, those of the source that leaves are counted no more.
            begin, start = begin + stop - start, stop - last[source]
            each[source] = 0
            spread = Draws.repeated(each)

    # Draws and batches

    def _read(self, first: int, last: int, rank: int) -> tuple[Indices, Indices]:
        """The batches of ``rank`` in the steps ``first <= step < last``: indices, and the size of each batch."""
        if self._rule is None:
            runs, sizes = self._shares(first, last, rank)
            of_runs = sizes
        else:
            steps = np.arange(first, last, dtype=np.int64)
            # With num_steps there is always more to draw.
            length = (last + 2) * self._rule.full if self.mixture.num_steps is not None else self._num_draws
            starts, sizes = shares_of_steps(length, self._rule, steps, rank)
            runs = self._samples(concatenated_ranges(starts, sizes))
            of_runs = np.ones_like(runs[0])
        seed: tuple[Label, ...] | None = ("mixture", *self._labels) if self.mixture.shuffle else None
        return self.mixture.sources.take(*runs, of_runs, seed), sizes

    def _shares(self, first: int, last: int, rank: int) -> tuple[tuple[Indices, Indices], Indices]:
        """Of every step: the source and the first sample of it that ``rank`` serves, and how many."""
        end = last if self.mixture.num_steps is not None else min(last, self._num_draws)
        numbers, drawn_before = self._drawn(first, max(first, end))
        starts, sizes = np.empty_like(numbers), np.empty_like(numbers)
        for source in present(numbers):
            chosen = numbers == source
            starts[chosen], sizes[chosen] = self._steps_of_sources[source].shares(drawn_before[chosen], rank)
        if last == end:
            return (numbers, starts), sizes
        gathered = self._last
        chosen = np.arange(max(first - end, 0), last - end)
        of = gathered.sources[chosen, rank]
        begun = np.array(self.served_after(end), dtype=np.int64)[of]
        numbers = np.concatenate([numbers, of])
        starts = np.concatenate([starts, begun + gathered.starts[chosen, rank]])
        return (numbers, starts), np.concatenate([sizes, gathered.sizes[chosen, rank]])

    def _samples(self, draws: Indices) -> tuple[Indices, Indices]:
        """The source, and the sample of it, of each draw, where a draw is a sample."""
        if not draws.size:
            return draws, draws
        first = int(draws.min())
        numbers, drawn_before = self._drawn(first, int(draws.max()) + 1)
        numbers, drawn_before = numbers[draws - first], drawn_before[draws - first]
        return numbers, np.array(self.origin, dtype=np.int64)[numbers] + drawn_before

    def _drawn(self, first: int, last: int) -> tuple[Indices, Indices]:
        """The source of every draw, and how often it was drawn before."""
        parts = [np.empty(0, dtype=np.int64)]
        parts += [
            of.draws.sources(*of.within(first, last)) for of in self._segments if of.begin < last and of.end > first
        ]
        numbers = np.concatenate(parts)
        drawn_before = np.empty_like(numbers)
        before = self._counts_before(first)
        for source in present(numbers):
            chosen = np.flatnonzero(numbers == source)
            drawn_before[chosen] = before[source] + np.arange(chosen.size)
        return numbers, drawn_before

    def _counts_before(self, draw: int) -> Indices:
        """How often every source was drawn before ``draw``."""
        if draw == self._num_draws and self.mixture.num_steps is None:
            return np.array([of.num_steps for of in self._steps_of_sources], dtype=np.int64)
        counts = np.zeros(len(self.mixture.sources), dtype=np.int64)
        for of in self._segments:
            if of.begin < draw:
                first, last = of.within(0, draw)
                counts += of.draws.counts_before(last) - of.draws.counts_before(first)
        return counts
