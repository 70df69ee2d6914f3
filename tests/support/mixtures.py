"""Orders over several sources, without the samplers that people build them with."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from lightning_stateful.core.topology import Topology
from lightning_stateful.index.mixture import Mixture
from lightning_stateful.index.mixture_order import MixtureOrder
from lightning_stateful.index.position import Position
from lightning_stateful.index.schedule import WeightSchedule
from lightning_stateful.index.slots import SlotPlan
from lightning_stateful.index.sources import Sources
from lightning_stateful.index.weights import exact_block, shares_of

NAMES = tuple("abcdefgh")


def make_sources(lengths: Sequence[int], batch_sizes: int | Sequence[int]) -> Sources:
    """Sources named a, b, c and so on."""
    sizes = (batch_sizes,) * len(lengths) if isinstance(batch_sizes, int) else tuple(batch_sizes)
    return Sources(NAMES[: len(lengths)], tuple(lengths), sizes)


def round_robin(lengths: Sequence[int], batch_sizes: int | Sequence[int], **options: Any) -> MixtureOrder:
    """Whole batches in turn."""
    sources, count = make_sources(lengths, batch_sizes), len(lengths)
    shares = (Fraction(1, count),) * count
    return MixtureOrder(Mixture(sources=sources, shares=shares, block=count, in_turn=True, **options))


def mixture(
    lengths: Sequence[int],
    batch_sizes: int | Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    schedule: WeightSchedule | None = None,
    block: int | None = None,
    **options: Any,
) -> MixtureOrder:
    """Batches, or with ``by_sample`` samples, in proportion; by default to the lengths."""
    sources = make_sources(lengths, batch_sizes)
    shares = tuple(shares_of(sources.names, lengths if weights is None else weights))
    resolved = None if schedule is None else schedule.resolved(sources.names)
    if options.get("by_sample"):
        block = sources.batch_sizes[0]
    elif block is None:
        block = max(map(exact_block, [shares] if resolved is None else resolved.shares))
    return MixtureOrder(Mixture(sources=sources, shares=shares, block=block, schedule=resolved, **options))


def plan(order: MixtureOrder, width: int, rank: int = 0) -> SlotPlan:
    """The batches of one of ``width`` ranks."""
    return SlotPlan(order, Topology(num_replicas=width, rank=rank))


def serve(order: MixtureOrder, position: Position, width: int) -> list[list[list[int]]]:
    """What ``width`` ranks are served from a position to the end of its epoch: of every step, a batch for each rank."""
    ranks = [list(plan(order, width, rank).indices(position)) for rank in range(width)]
    return [list(step) for step in zip(*ranks, strict=True)]


def in_places(order: MixtureOrder, position: Position, width: int) -> list[list[list[tuple[int, int, int]]]]:
    """As :func:`serve`, with (source, pass over it, index within it) in place of each sample's index."""
    ends = list(accumulate(order.mixture.sources.lengths, initial=0))
    ranks = []
    for rank in range(width):
        here = plan(order, width, rank).here(position)
        found = order.batches(here, here.consumed // here.width, order.steps(here), rank)
        pairs = iter(zip(found.indices.tolist(), found.passes.tolist(), strict=True))
        ranks.append([[_place(ends, *next(pairs)) for _ in range(size)] for size in found.sizes.tolist()])
    return [list(step) for step in zip(*ranks, strict=True)]


def samples_of(steps: list[list[list[Any]]]) -> list[Any]:
    """All that some steps serve."""
    return [sample for step in steps for batch in step for sample in batch]


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
    return mixture(lengths, sizes, weights, by_sample=by == "sample", **options)


def _place(ends: list[int], index: int, number: int) -> tuple[int, int, int]:
    source = bisect_right(ends, index) - 1
    return source, number, index - ends[source]
