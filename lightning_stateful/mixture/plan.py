"""The rest of one epoch of a mixture, planned from the samples that were served of each source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from lightning_stateful.core.order import Progress, read_in_chunks, say_repeats
from lightning_stateful.core.permutation import Indices, concatenated_ranges
from lightning_stateful.core.seeding import Label, derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture.draws import Draws
from lightning_stateful.mixture.source_steps import LastSteps, SourceSteps, gather, shares_of_steps
from lightning_stateful.mixture.sources import Mixture, present

# Samples that are looked up at a time, and steps.
_MOST_SAMPLES, _MOST_STEPS = 2**17, 8192
# More than a pass has, over all ranks: the numbers of the batches of the next pass begin here.
_STEPS_A_CYCLE = 2**44
# More steps than any source is asked for, where an epoch has as many as it is told to.
_ENDLESS = 2**40


@dataclass(frozen=True)
class MixtureEpochPlan:
    """The rest of an epoch of a mixture; a plan in the sense of :class:`~lightning_stateful.core.order.EpochPlan`.

    A source is cut into steps of its own, and draws say which source has the next one; by sample, a source gives a
    sample a draw, and the draws are cut into steps.

    Attributes:
        mixture: What is served.
        num_replicas: Number of ranks.
        progress: Where this plan begins.
        planned_steps: Steps of the epoch that had been taken when its rest was planned; the plan begins there or later.
        origin: Samples of every source that had been served then: in the epoch or, with ``num_steps``, since training
            began.
    """

    mixture: Mixture
    num_replicas: int
    progress: Progress
    planned_steps: int
    origin: tuple[int, ...]

    # The protocol

    @property
    def epoch(self) -> int:
        """The epoch that is planned."""
        return self.progress.epoch

    @cached_property
    def num_steps(self) -> int:
        """Steps to the end of the epoch."""
        return self.total_steps - self._taken

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, list[int]]]:
        """The batches of ``rank``; numbered through all steps of the epoch and the ranks of each."""
        work = max(self.mixture.sources.batch_sizes) * (self.num_replicas if self.mixture.by_sample else 1)
        largest = min(max(_MOST_SAMPLES // work, 1), _MOST_STEPS)
        batches = read_in_chunks(
            lambda begin, end: self._read(begin, end, rank), self._taken + first_step, self.total_steps, largest=largest
        )
        return zip(count(self._batches_before(first_step) + rank, self.num_replicas), batches, strict=False)

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps: the samples served of every source, and whence the rest was planned."""
        if not steps:
            return self.progress
        names, done = self.mixture.sources.names, self._taken + steps
        planned: dict[str, Any] = {}
        if self.mixture.num_steps is None:
            planned["ranks"] = self.num_replicas
            if self.planned_steps:
                planned |= {"steps": self.planned_steps, "served": dict(zip(names, self.origin, strict=True))}
        details = {
            "served": dict(zip(names, self.served_after(done), strict=True)),
            "batches": self.progress.details["batches"] + steps * self.num_replicas,
            "planned": planned,
        }
        return replace(self.progress, consumed=self.planned_steps + done, details=details)

    def report_after(self, steps: int) -> dict[str, Any]:
        """Of each of the ``sources``: samples, passes ("epochs"), share of samples and, if known, tokens.

        Counted in the epoch or, with ``num_steps``, since training began. Tokens of a pass that is not complete are
        its samples times their mean length.
        """
        served = [
            samples + self.progress.cycle * of_pass
            for samples, of_pass in zip(self.served_after(self._taken + steps), self._served_in_a_pass, strict=True)
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
        if not self.progress.cycle:
            return nothing
        whole = replace(self, progress=Progress(epoch=self.epoch), planned_steps=0, origin=nothing)
        return whole.served_after(whole.total_steps)

    def repeats(self) -> str:
        """Samples that are served twice, in words."""
        repeated = self._last.num_repeated + self._step_rule.num_repeated(self._num_draws)
        return say_repeats(repeated, sum(self.mixture.amounts))

    # Steps, counted from where the rest of the epoch was planned

    @cached_property
    def total_steps(self) -> int:
        """Steps from where the rest of the epoch was planned to its end."""
        if self.mixture.num_steps is not None:
            return self.mixture.num_steps - self.planned_steps
        return self._step_rule.num_steps(self._num_draws) + self._last.num_steps

    def served_after(self, steps: int) -> tuple[int, ...]:
        """Samples served of every source after ``steps`` steps."""
        rule, draws = self._step_rule, self._num_draws
        # What drop_last leaves out has not been served.
        counts = self._counts_before(min(rule.served(draws, steps), draws - rule.num_dropped(draws)))
        last = self._last.served(max(steps - rule.num_steps(draws), 0), len(self.origin))
        each = zip(self._source_steps, counts.tolist(), last.tolist(), strict=True)
        return tuple(of.served_after(count) + more for of, count, more in each)

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
        for name, samples, amount in zip(sources.names, served, mixture.amounts, strict=True):
            if amount and not samples:
                raise ConfigurationError(
                    f"Source {name!r} has {amount} samples for an epoch, too few for a full step of "
                    f"{self.num_replicas} ranks; with drop_last=True it would never be served. Give it a smaller "
                    "batch size, or pass drop_last=False."
                )

    @property
    def _taken(self) -> int:
        return self.progress.consumed - self.planned_steps

    def _batches_before(self, steps: int) -> int:
        """The number of the first batch after ``steps`` steps of this plan."""
        before: int = self.progress.details["batches"]
        return self.progress.cycle * _STEPS_A_CYCLE + before + steps * self.num_replicas

    # How the pieces fit

    @cached_property
    def _step_rule(self) -> StepRule:
        """The rule that cuts draws into steps: by sample as samples are cut, else one draw a step."""
        mixture = self.mixture
        if mixture.by_sample:
            return mixture.rule(mixture.sources.batch_sizes[0], self.num_replicas)
        return StepRule(batch_size=1)

    @cached_property
    def _source_steps(self) -> Sequence[SourceSteps]:
        """The steps of each source: a draw takes a sample of it (by sample), or a batch for every rank."""
        mixture, result = self.mixture, []
        for source, (served, size) in enumerate(zip(self.origin, mixture.sources.batch_sizes, strict=True)):
            rule = StepRule(batch_size=1) if mixture.by_sample else mixture.rule(size, self.num_replicas)
            if mixture.num_steps is not None:
                remaining = _ENDLESS * rule.full * self._step_rule.full
            else:
                remaining = max(mixture.amounts[source] - served, 0)
            result.append(SourceSteps(served, remaining, rule))
        return result

    @cached_property
    def _num_draws(self) -> int:
        return sum(of.num_steps for of in self._source_steps)

    @cached_property
    def _last(self) -> LastSteps:
        mixture, left = self.mixture, [of.left for of in self._source_steps]
        return gather(left, mixture.sources.batch_sizes, self.num_replicas, drop_last=mixture.drop_last)

    @cached_property
    def _labels(self) -> tuple[int, ...]:
        """Labels that orders are derived from: the seed, and the epoch unless sources go on from epoch to epoch."""
        seed = self.mixture.seed
        return (seed,) if self.mixture.num_steps is not None else (seed, self.epoch, self.progress.cycle)

    @cached_property
    def _first_draw(self) -> int:
        """Draws that were made before, where they go on from epoch to epoch; else 0."""
        if self.mixture.num_steps is None:
            return 0
        return (self.epoch * self.mixture.num_steps + self.planned_steps) * self._step_rule.full

    @cached_property
    def _draws(self) -> Draws:
        mixture = self.mixture
        # By sample, draws stay evenly spread: each batch has its share of every source.
        shuffled = mixture.shuffle and not mixture.in_turn and not mixture.by_sample
        key = derive_seed("draws", *self._labels) if shuffled else None
        if mixture.schedule is not None:
            return Draws.scheduled(mixture.schedule, self._step_rule.full, key=key)
        if mixture.num_steps is not None:
            return Draws.repeated(mixture.draws, key=key)
        # Round robin goes on where it was, as long as all sources still have draws.
        start = self.planned_steps if mixture.in_turn else 0
        totals = [of.num_steps for of in self._source_steps]
        return Draws.until_exhausted(mixture.draws, totals, start=start, key=key)

    def _counts_before(self, draw: int) -> Indices:
        """The number of draws of every source before ``draw``."""
        first = self._first_draw
        return self._draws.counts_before(first + draw) - self._draws.counts_before(first)

    # Batches

    def _read(self, first: int, last: int, rank: int) -> tuple[Indices, Indices]:
        """The batches of ``rank`` in the steps ``first <= step < last``: indices, and the size of each batch."""
        rule, by_sample = self._step_rule, self.mixture.by_sample
        end = rule.num_steps(self._num_draws)
        steps = np.arange(first, min(last, end), dtype=np.int64)
        firsts, counts = shares_of_steps(self._num_draws, rule, steps, rank if by_sample else 0)
        numbers, starts, sizes = self._samples_of(concatenated_ranges(firsts, counts), 0 if by_sample else rank)
        batch_sizes = counts if by_sample else sizes
        if last > end:
            gathered, chosen = self._last, slice(max(first - end, 0), last - end)
            of = gathered.sources[chosen, rank]
            begun = np.array(self.served_after(end), dtype=np.int64)[of]
            numbers = np.concatenate([numbers, of])
            starts = np.concatenate([starts, begun + gathered.starts[chosen, rank]])
            sizes = batch_sizes = np.concatenate([sizes, gathered.sizes[chosen, rank]])
        seed: tuple[Label, ...] | None = ("mixture", *self._labels) if self.mixture.shuffle else None
        return self.mixture.sources.take(numbers, starts, sizes, seed), batch_sizes

    def _samples_of(self, draws: Indices, rank: int) -> tuple[Indices, Indices, Indices]:
        """Of each of ``draws``, which rise: the source, the first sample of it that ``rank`` serves, and how many."""
        if not draws.size:
            return draws, draws, draws
        first, last = int(draws[0]), int(draws[-1]) + 1
        numbers = self._draws.sources(self._first_draw + first, self._first_draw + last)
        drawn_before = self._counts_before(first)
        starts, sizes = np.empty_like(numbers), np.empty_like(numbers)
        for source in present(numbers):
            chosen = np.flatnonzero(numbers == source)
            steps = drawn_before[source] + np.arange(chosen.size)
            starts[chosen], sizes[chosen] = self._source_steps[source].shares(steps, rank)
        if draws.size == numbers.size:
            return numbers, starts, sizes
        asked = draws - first
        return numbers[asked], starts[asked], sizes[asked]
