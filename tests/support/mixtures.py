"""Orders over several sources, without the samplers that people build them with, and a slow simulation of them."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

from lightning_stateful.core.order import Progress
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture import MixtureOrder, Sources, WeightSchedule
from lightning_stateful.mixture.weights import DrawSchedule, shares_of, whole_draws

NAMES = tuple("abcdefgh")
RANKS = [1, 1, 2, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64]

# The batches of a step, one for each rank; a sample is an index, or a pair of source and index within it.
Step = list[list[Any]]


def make_sources(lengths: Sequence[int], batch_sizes: int | Sequence[int]) -> Sources:
    """Sources named a, b, c and so on."""
    sizes = (batch_sizes,) * len(lengths) if isinstance(batch_sizes, int) else tuple(batch_sizes)
    return Sources(NAMES[: len(lengths)], tuple(lengths), sizes)


def round_robin(lengths: Sequence[int], batch_sizes: int | Sequence[int], **options: Any) -> MixtureOrder:
    """Whole batches in turn."""
    sources = make_sources(lengths, batch_sizes)
    return MixtureOrder(sources=sources, draws=(1,) * len(sources), in_turn=True, **options)


def mixture(
    lengths: Sequence[int],
    batch_sizes: int | Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    schedule: WeightSchedule | None = None,
    by_pass: tuple[str, ...] = (),
    **options: Any,
) -> MixtureOrder:
    """Batches or, by sample, samples in proportion; by default to the lengths."""
    sources = replace(make_sources(lengths, batch_sizes), by_pass=by_pass)
    draws = whole_draws(shares_of(sources.names, lengths if weights is None else weights))
    if schedule is not None:
        points = tuple(whole_draws(point) for point in schedule.shares(sources.names))
        options["schedule"] = DrawSchedule(tuple(schedule.points), points, schedule.between)
    return MixtureOrder(sources=sources, draws=draws, **options)


def serve(order: MixtureOrder, epoch: int, ranks: int, progress: Progress | None = None) -> list[Step]:
    """All steps of the rest of an epoch."""
    plan = order.plan(epoch, ranks, progress)
    batches = [[batch for _, batch in plan.batches(rank)] for rank in range(ranks)]
    return [list(step) for step in zip(*batches, strict=True)]


def by_source(order: MixtureOrder, steps: list[Step]) -> list[Step]:
    """Steps with pairs of source and index within it, in place of indices."""
    starts = list(accumulate(order.sources.lengths, initial=0))

    def locate(index: int) -> tuple[int, int]:
        source = bisect_right(starts, index) - 1
        return source, index - starts[source]

    return [[[locate(index) for index in batch] for batch in step] for step in steps]


def samples_of(steps: list[Step]) -> list[Any]:
    """All that some steps serve."""
    return [sample for step in steps for batch in step for sample in batch]


def without_repeats(steps: list[Step], num_repeated: int) -> list[Step]:
    """Steps without what the last ranks of the last one serve once more."""
    return [*steps[:-1], steps[-1][: len(steps[-1]) - num_repeated]] if num_repeated else steps


def num_repeated(order: MixtureOrder, ranks: int, progress: Progress | None = None) -> int:
    """Samples that are served twice, as the plan says it in words."""
    said = order.plan(0, ranks, progress).repeats()
    return int(said.split()[0]) if said else 0


def random_order(rng: random.Random, *, longest: int = 40, **fixed: Any) -> MixtureOrder:
    """Any order of one to six sources: in turn, by batch or by sample, with any stop rule."""
    count, by = rng.randint(1, 6), rng.choice(["turn", "batch", "batch", "sample"])
    lengths = [rng.randint(1, rng.choice([4, longest])) for _ in range(count)]
    sizes = [rng.randint(1, 6)] * count if by == "sample" else [rng.randint(1, 6) for _ in range(count)]
    options = {"seed": rng.randint(0, 99), "shuffle": rng.random() < 0.6, "drop_last": rng.random() < 0.3, **fixed}
    if "num_steps" not in options and "stop" not in options:
        stop = rng.choice(["all_exhausted", "all_exhausted", "first_exhausted", "cycle", "num_steps"])
        options.update({"num_steps": rng.randint(1, 20)} if stop == "num_steps" else {"stop": stop})
    if options["drop_last"]:
        sizes = [min(sizes[0], *lengths)] * count if by == "sample" else list(map(min, sizes, lengths))
    if by == "turn":
        return round_robin(lengths, sizes, **options)
    weights = [rng.choice([1, 2, 5, 0.37, rng.random() + 0.02]) for _ in range(count)]
    return mixture(lengths, sizes, weights, by=by, **options)


def random_cases(
    count: int, seed: int, ranks: Sequence[int] = RANKS, **fixed: Any
) -> Iterator[tuple[MixtureOrder, int, random.Random]]:
    """Random orders with a number of ranks for which an epoch has a step."""
    rng = random.Random(seed)
    while count:
        order, num_ranks = random_order(rng, **fixed), rng.choice(ranks)
        if whole_epoch(order, num_ranks):
            yield order, num_ranks, rng
            count -= 1


def whole_epoch(order: MixtureOrder, ranks: int) -> int:
    """Steps of a whole epoch; 0 where it is refused."""
    try:
        return order.plan(0, ranks).num_steps
    except ConfigurationError:
        return 0


def endless_draws(draws: Sequence[int]) -> Iterator[int]:
    """The evenly spread sequence of sources, slowly."""
    spread = sorted(
        (Fraction(2 * number + 1, count), source) for source, count in enumerate(draws) for number in range(count)
    )
    while True:
        yield from (source for _, source in spread)


def simulated_amounts(order: MixtureOrder) -> list[int]:
    """Samples that an epoch serves of every source, from a slow simulation of one rank."""
    mixed, lengths = order, order.sources.lengths
    sizes = [1] * len(lengths) if mixed.by_sample else mixed.sources.batch_sizes
    whole = [
        length // size if mixed.drop_last else -(-length // size) for length, size in zip(lengths, sizes, strict=True)
    ]
    if mixed.stop == "all_exhausted":
        return list(lengths)
    counts = [0] * len(lengths)
    for source in endless_draws(mixed.draws):
        if mixed.stop == "first_exhausted" and counts[source] == whole[source]:
            break
        counts[source] += 1
        if mixed.stop == "cycle" and all(count >= once for count, once in zip(counts, whole, strict=True)):
            break
    return [
        length if count == once else count * size
        for length, size, count, once in zip(lengths, sizes, counts, whole, strict=True)
    ]


def simulate(order: MixtureOrder, ranks: int) -> tuple[list[tuple[int, list[list[int]]]], list[int]]:
    """A whole epoch by batch and unshuffled, slowly.

    Returns:
        Of every step in which all ranks serve one source, that source and each rank's samples of it, counted on from
        pass to pass; and what is left of every source after them.
    """
    mixed = order
    left, served = simulated_amounts(order), [0] * len(mixed.sources)
    rules = [
        StepRule(batch_size=size, num_replicas=ranks, drop_last=mixed.drop_last) for size in mixed.sources.batch_sizes
    ]

    def has_step(source: int) -> bool:
        return left[source] >= (rules[source].full if mixed.drop_last else ranks)

    steps: list[tuple[int, list[list[int]]]] = []
    draws = endless_draws([count if has_step(source) else 0 for source, count in enumerate(mixed.draws)])
    while any(has_step(source) for source in range(len(left))):
        source = next(draws)
        if not has_step(source):
            continue
        rule, begun = rules[source], served[source]
        shares = [(begun + rule.share(left[source], rank)).tolist() for rank in range(ranks)]
        steps.append((source, shares))
        left[source] -= rule.step_size(left[source])
        served[source] += sum(map(len, shares))
    return steps, left
