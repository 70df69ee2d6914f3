"""The order of a mixture, batches from several sources in turn or in proportion, and its epoch plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, get_args

import numpy as np

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import Progress, read_in_chunks, say_repeats, seeded_at
from lightning_stateful.core.permutation import Indices, concatenated_ranges
from lightning_stateful.core.seeding import Label, derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError, Difference, PositionError, StateMismatchError
from lightning_stateful.mixture.draws import Draws, Period
from lightning_stateful.mixture.source_steps import LastSteps, SourceSteps, gather, shares_of_steps
from lightning_stateful.mixture.sources import By, Sources, Stop, present
from lightning_stateful.mixture.weights import DrawSchedule, digest
from lightning_stateful.shapes import COUNT, check_shape

# A state of many sources stays short: beyond so many, their draws are told apart by a digest alone.
_MOST_LISTED = 8

# Samples that are looked up at a time, and steps.
_MOST_SAMPLES, _MOST_STEPS = 2**17, 8192
# More than a pass has, over all ranks: the numbers of the batches of the next pass begin here.
_STEPS_A_CYCLE = 2**44
# More steps than any source is asked for, where an epoch has as many as it is told to.
_ENDLESS = 2**40
_PLANNED = {"ranks?": COUNT, "steps?": COUNT, "served?": {str: COUNT}}


@dataclass(frozen=True, kw_only=True)
class MixtureOrder:
    """Batches that come from one source each or, by sample, from several in proportion.

    A step gives every rank one batch, all of the same source; only the last steps of an epoch gather what is left of
    several. The rest of an epoch that is resumed on another number of ranks, or with other sources or weights, is
    planned from what was served of each source. Progress is counted in steps; its details are

    - ``served``: samples of every source, in the epoch or, with ``num_steps``, since training began;
    - ``batches``: batches of the epoch over all ranks, by which batches are numbered;
    - ``planned``: for how many ``ranks`` the rest of the epoch was planned and, unless it was the whole, after how many
      ``steps`` and samples ``served``. On other ranks it is planned anew from ``served``, unless that plan would have
      served the same on these; with ``num_steps``, always.

    Attributes:
        sources: The datasets.
        draws: Draws of each source in a period. A draw is a step or, by sample, a sample.
        stop: When an epoch ends, unless ``num_steps`` says it; by default, when all are exhausted.
        num_steps: Steps of an epoch; each source goes on in the next one where it was.
        seed: Chooses the orders.
        shuffle: Whether samples, and draws within a period, have an order of their own.
        drop_last: Serve full batches only, and leave out the last step if it is not full.
        in_turn: Round robin: draws stand evenly spread in their period.
        by: What the weights were shares of. By sample, a batch holds several sources, and all batch sizes are equal.
        tokens: Tokens in every source, if they are known.
        schedule: Draws that change as training goes on, in place of ``draws``.

    Raises:
        ConfigurationError: The values contradict each other.
    """

    sources: Sources
    draws: tuple[int, ...]
    stop: Stop | None = None
    num_steps: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    in_turn: bool = False
    by: By = "batch"
    tokens: tuple[int, ...] | None = None
    schedule: DrawSchedule | None = None
    version: ClassVar[int] = 1
    details_shape: ClassVar = {"served": {str: COUNT}, "batches": COUNT, "planned": _PLANNED}

    def __post_init__(self) -> None:
        if self.num_steps is None:
            object.__setattr__(self, "stop", self.stop or "all_exhausted")
            if self.stop not in get_args(Stop):
                raise ConfigurationError(f"stop must be one of {get_args(Stop)}, got {self.stop!r}.")
        elif self.stop is not None:
            raise ConfigurationError(
                f"num_steps takes the place of stop; got num_steps={self.num_steps} and stop={self.stop!r}."
            )
        else:
            object.__setattr__(self, "num_steps", as_int("num_steps", self.num_steps, least=1))
        if self.schedule is not None and self.num_steps is None:
            raise ConfigurationError(
                "With a schedule, an epoch that ends with its sources would have another length each time; pass "
                "num_steps, and each source goes on in the next epoch where it was."
            )
        if self.drop_last and self.by != "sample":
            self.sources.refuse_less_than_a_batch()

    @property
    def harmless(self) -> tuple[str, ...]:
        """Names of differences that it goes on with exactly; a shuffled source that has changed has another order."""
        sources = "sources that come or go" if self.shuffle else "sources"
        return "weights", "stop", "batch_size", "by", "block", "in_turn", sources

    @property
    def kind(self) -> str:
        """The name under which a state knows this order."""
        return "round_robin" if self.in_turn else "mixture"

    @property
    def carries_over(self) -> bool:
        """Whether sources go on in an epoch where the one before left them."""
        return self.num_steps is not None

    def config(self) -> dict[str, Any]:
        """Configuration that determines the sequence; ``weights`` are the draws of each source in a period."""
        sizes = self.sources.batch_sizes
        config: dict[str, Any] = {
            "stop": self._stop(),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "batch_size": sizes[0] if len(set(sizes)) == 1 else list(sizes),
            **self.sources.config(),
        }
        if not self.in_turn:
            weights: Any = list(self.draws)
            if self.schedule is not None:
                weights = self.schedule.describe()
            elif len(weights) > _MOST_LISTED:
                weights = f"of {len(weights)} sources, {digest(weights)}"
            config |= {"by": self.by, "weights": weights}
        return config

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> MixtureEpochPlan:
        """Plan ``epoch``, or the rest of it.

        Raises:
            PositionError: More steps were taken than the epoch has.
            ConfigurationError: A whole epoch would have no step, or would leave a source out.
        """
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        if self.carries_over:
            here = self._carried_over(epoch, num_replicas, progress or Progress())
        if not here.details:
            ranks, nothing = 0 if self.carries_over else num_replicas, (0,) * len(self.sources)
            here = replace(here, details=self._details(nothing, here.consumed * num_replicas, ranks))
        details = here.details
        planned = {"steps": 0, "served": {}, **details["planned"]}
        plan = MixtureEpochPlan(self, num_replicas, here, planned["steps"], self.sources.in_order(planned["served"]))
        check_shape(details["served"], dict.fromkeys(self.sources.names, COUNT), "progress.served")
        if "ranks" not in planned or not plan.goes_on_alike():
            if planned.get("ranks") == num_replicas:
                raise PositionError(f"progress.served is not what its plan serves by step {here.consumed}: {details}.")
            plan = replace(plan, planned_steps=here.consumed, origin=self.sources.in_order(details["served"]))
        first, last = plan.planned_steps, plan.planned_steps + plan.total_steps
        if not first <= here.consumed <= last:
            raise PositionError(
                f"{here.consumed} steps of epoch {epoch} were taken, and on {num_replicas} ranks the rest of it "
                f"was planned to go from step {first} to {last}. Resume from a checkpoint of these sources."
            )
        if not here.consumed:
            plan.refuse_empty()
        return plan

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """A progress of other sources, weights or stop rules: each source goes on where it was.

        Raises:
            StateMismatchError: Passes over the sources, or steps of a schedule, are counted otherwise.
        """
        stop = str(saved.get("stop"))
        carried = stop.endswith("steps")
        if progress.consumed or progress.epoch:
            self._refuse_other_counting(stop, carried, progress)
        served = progress.details.get("served", {})
        if carried != self.carries_over or not served:
            # Passes begin with each epoch, or go on from one to the next: nothing is left of how they were counted.
            return Progress(epoch=progress.epoch, consumed=progress.consumed)
        kept = self.sources.moved(served, saved["sources"])
        details = self._details(kept, progress.details["batches"])
        if not self.carries_over and self._differs_in_batch_size_alone(saved):
            # What was planned may go on, where other ranks make the steps as large as before.
            details["planned"] = {**progress.details["planned"], "ranks": 0}
        return replace(progress, details=details)

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> MixtureOrder:
        """The same batches for another use; unshuffled epochs do not go on where the one before ended."""
        order = seeded_at(self, path)
        if not shuffle:
            order = replace(order, shuffle=False)
            if self.carries_over:
                order = replace(order, num_steps=None, schedule=None, stop="cycle")
        return order

    @property
    def by_sample(self) -> bool:
        """Whether a draw is a sample, and not a step."""
        return self.by == "sample"

    def rule(self, batch_size: int, num_replicas: int) -> StepRule:
        """The rule that cuts samples into steps."""
        return StepRule(batch_size=batch_size, num_replicas=num_replicas, drop_last=self.drop_last)

    @cached_property
    def amounts(self) -> tuple[int, ...]:
        """Samples that an epoch serves of every source, where a stop rule ends it.

        They are those of a run on one rank with draws evenly spread, so that they depend on neither ranks nor epochs.
        """
        lengths = self.sources.lengths
        if self.stop == "all_exhausted":
            return lengths
        sizes = [1] * len(lengths) if self.by_sample else self.sources.batch_sizes
        whole = [(n if self.drop_last else n + size - 1) // size for n, size in zip(lengths, sizes, strict=True)]
        period = Period(self.draws)
        if self.stop == "cycle":
            end = max(period.draw_of(source, count - 1) for source, count in enumerate(whole)) + 1
        else:
            end = min(period.draw_of(source, count) for source, count in enumerate(whole))
        # A source that has just been served whole does not begin again for the sake of a full batch.
        return tuple(
            length if count == of_a_pass else count * size
            for count, of_a_pass, length, size in zip(period.before(end).tolist(), whole, lengths, sizes, strict=True)
        )

    def _stop(self) -> str:
        return str(self.stop) if self.num_steps is None else f"{self.num_steps} steps"

    def _details(self, served: Sequence[int], batches: int, ranks: int = 0) -> dict[str, Any]:
        """Details of a progress where nothing is planned or, for so many ranks, the whole epoch."""
        named = dict(zip(self.sources.names, served, strict=True))
        return {"served": named, "batches": batches, "planned": {"ranks": ranks} if ranks else {}}

    def _carried_over(self, epoch: int, num_replicas: int, progress: Progress) -> Progress:
        """The progress in ``epoch`` of a run whose sources go on, from its progress in that or an earlier one."""
        steps = self.num_steps or 0
        if progress.epoch > epoch:
            progress = Progress()
        if progress.consumed > steps:
            raise PositionError(
                f"{progress.consumed} steps of epoch {progress.epoch} were taken, but an epoch has only num_steps="
                f"{steps}. Pass at least as many, or resume from the end of an epoch."
            )
        consumed = progress.consumed if progress.epoch == epoch else 0
        known = progress if progress.details else Progress()
        if (known.epoch, known.consumed) == (epoch, consumed):
            return known
        origin = self.sources.in_order(known.details.get("served", {}))
        before = MixtureEpochPlan(self, num_replicas, known, known.consumed, origin)
        served = before.served_after((epoch - known.epoch) * steps - known.consumed + consumed)
        return Progress(epoch=epoch, consumed=consumed, details=self._details(served, consumed * num_replicas))

    def _refuse_other_counting(self, stop: str, carried: bool, progress: Progress) -> None:
        remedy = ""
        if carried != self.carries_over and progress.consumed:
            remedy = (
                "With num_steps passes go on from epoch to epoch, and without they begin with each, in other orders: "
                "this cannot be changed within an epoch. Train to its end under the saved stop."
            )
        if carried and self.schedule is not None and stop != self._stop():
            remedy = "A schedule counts steps by num_steps; keep it, or give weights without a schedule."
        if remedy:
            raise StateMismatchError([Difference(path="stop", saved=stop, present=self._stop(), remedy=remedy)])

    def _differs_in_batch_size_alone(self, saved: Mapping[str, Any]) -> bool:
        present = self.config()
        is_alike = all(saved.get(name) == present[name] for name in present.keys() - {"batch_size", "sources"})
        return is_alike and self.sources.are(saved["sources"])


@dataclass(frozen=True)
class MixtureEpochPlan:
    """The rest of an epoch of a mixture; a plan in the sense of :class:`~lightning_stateful.core.order.EpochPlan`.

    A source is cut into steps of its own, and draws say which source has the next one; by sample, a source gives a
    sample a draw, and the draws are cut into steps.

    Attributes:
        order: The order that was planned.
        num_replicas: Number of ranks.
        progress: Where this plan begins.
        planned_steps: Steps of the epoch that had been taken when its rest was planned; the plan begins there or later.
        origin: Samples of every source that had been served then: in the epoch or, with ``num_steps``, since training
            began.
    """

    order: MixtureOrder
    num_replicas: int
    progress: Progress
    planned_steps: int
    origin: tuple[int, ...]

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
        work = max(self.order.sources.batch_sizes) * (self.num_replicas if self.order.by_sample else 1)
        largest = min(max(_MOST_SAMPLES // work, 1), _MOST_STEPS)
        batches = read_in_chunks(
            lambda begin, end: self._read(begin, end, rank), self._taken + first_step, self.total_steps, largest=largest
        )
        before = self.progress.cycle * _STEPS_A_CYCLE + self.progress.details["batches"]
        return zip(count(before + first_step * self.num_replicas + rank, self.num_replicas), batches, strict=False)

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps: the samples served of every source, and whence the rest was planned."""
        if not steps:
            return self.progress
        names, done = self.order.sources.names, self._taken + steps
        planned: dict[str, Any] = {}
        if self.order.num_steps is None:
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
        return {"sources": self.order.sources.report(self.passes_after(steps), self.order.tokens)}

    def passes_after(self, steps: int) -> dict[str, list[tuple[int, int]]]:
        """Of each source the passes over it: pairs of its number and the samples that were served of it."""
        order, nothing = self.order, (0,) * len(self.order.sources)
        served = [(self._labels, self.served_after(self._taken + steps))]
        if self.progress.cycle:
            whole = replace(self, progress=Progress(epoch=self.epoch), planned_steps=0, origin=nothing)
            of_cycle = whole.served_after(whole.total_steps)
            labels = [(order.seed, self.epoch, cycle) for cycle in range(self.progress.cycle)]
            served = [*((label, of_cycle) for label in labels), *served]
        return order.sources.passes_of(served)

    def repeats(self) -> str:
        """Samples that are served twice, in words."""
        repeated = self._last.num_repeated + self._step_rule.num_repeated(self._num_draws)
        return say_repeats(repeated, sum(self.order.amounts))

    @cached_property
    def total_steps(self) -> int:
        """Steps from where the rest of the epoch was planned to its end."""
        if self.order.num_steps is not None:
            return self.order.num_steps - self.planned_steps
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
        order, sources = self.order, self.order.sources
        if not self.total_steps:
            raise ConfigurationError(
                f"With stop={order.stop!r}, drop_last={order.drop_last} and {self.num_replicas} ranks, an epoch of "
                f"the sources {dict(zip(sources.names, sources.lengths, strict=True))} would have no step. Train on "
                "fewer ranks, or with smaller batches or another stop."
            )
        if not order.drop_last or order.num_steps is not None:
            return
        served = self.served_after(self.total_steps)
        for name, samples, amount in zip(sources.names, served, order.amounts, strict=True):
            if amount and not samples:
                raise ConfigurationError(
                    f"Source {name!r} has {amount} samples for an epoch, too few for a full step of "
                    f"{self.num_replicas} ranks; with drop_last=True it would never be served. Give it a smaller "
                    "batch size, or pass drop_last=False."
                )

    def goes_on_alike(self) -> bool:
        """Whether the steps taken on other ranks would have served the same on these: all are as large as then."""
        served = self.order.sources.in_order(self.progress.details["served"])
        return 0 <= self._taken <= self.total_steps and self.served_after(self._taken) == served

    @property
    def _taken(self) -> int:
        return self.progress.consumed - self.planned_steps

    @cached_property
    def _step_rule(self) -> StepRule:
        """The rule that cuts draws into steps: by sample as samples are cut, else one draw a step."""
        order = self.order
        if order.by_sample:
            return order.rule(order.sources.batch_sizes[0], self.num_replicas)
        return StepRule(batch_size=1)

    @cached_property
    def _source_steps(self) -> Sequence[SourceSteps]:
        """The steps of each source: a draw takes a sample of it (by sample), or a batch for every rank."""
        order, result = self.order, []
        for source, (served, size) in enumerate(zip(self.origin, order.sources.batch_sizes, strict=True)):
            rule = StepRule(batch_size=1) if order.by_sample else order.rule(size, self.num_replicas)
            endless = _ENDLESS * rule.full * self._step_rule.full
            remaining = max(order.amounts[source] - served, 0) if order.num_steps is None else endless
            result.append(SourceSteps(served, remaining, rule))
        return result

    @cached_property
    def _num_draws(self) -> int:
        return sum(of.num_steps for of in self._source_steps)

    @cached_property
    def _last(self) -> LastSteps:
        order, left = self.order, [of.left for of in self._source_steps]
        return gather(left, order.sources.batch_sizes, self.num_replicas, drop_last=order.drop_last)

    @cached_property
    def _labels(self) -> tuple[int, ...]:
        """Labels that orders are derived from: the seed, and the epoch unless sources go on from epoch to epoch."""
        seed = self.order.seed
        return (seed,) if self.order.num_steps is not None else (seed, self.epoch, self.progress.cycle)

    @cached_property
    def _first_draw(self) -> int:
        """Draws that were made before, where they go on from epoch to epoch; else 0."""
        steps = self.order.num_steps
        return 0 if steps is None else (self.epoch * steps + self.planned_steps) * self._step_rule.full

    @cached_property
    def _draws(self) -> Draws:
        order = self.order
        # By sample, draws stay evenly spread: each batch has its share of every source.
        shuffled = order.shuffle and not order.in_turn and not order.by_sample
        key = derive_seed("draws", *self._labels) if shuffled else None
        if order.schedule is not None:
            return Draws.scheduled(order.schedule, self._step_rule.full, key=key)
        if order.num_steps is not None:
            return Draws.repeated(order.draws, key=key)
        # Round robin goes on where it was, as long as all sources still have draws.
        start = self.planned_steps if order.in_turn else 0
        totals = [of.num_steps for of in self._source_steps]
        return Draws.until_exhausted(order.draws, totals, start=start, key=key)

    def _counts_before(self, draw: int) -> Indices:
        """The number of draws of every source before ``draw``."""
        first = self._first_draw
        return self._draws.counts_before(first + draw) - self._draws.counts_before(first)

    def _read(self, first: int, last: int, rank: int) -> tuple[Indices, Indices]:
        """The batches of ``rank`` in the steps ``first <= step < last``: indices, and the size of each batch."""
        rule, by_sample = self._step_rule, self.order.by_sample
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
        seed: tuple[Label, ...] | None = ("mixture", *self._labels) if self.order.shuffle else None
        return self.order.sources.take(numbers, starts, sizes, seed), batch_sizes

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
        asked = draws - first
        return numbers[asked], starts[asked], sizes[asked]
