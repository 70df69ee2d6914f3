"""Plain-Python references for batches of like lengths, and random cases of them."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any

from lightning_stateful.bucketing import BucketEpochPlan, BucketOrder, Buckets, Budget, QuadraticCost
from lightning_stateful.core import Progress
from lightning_stateful.errors import ConfigurationError

Step = tuple[int, int]
RANKS = [1, 2, 3, 4, 6, 8, 13, 64]


def padded_tokens(values: Sequence[int], counts: Sequence[int], ends: Sequence[int]) -> int:
    """Tokens where each sample is padded to the end of its bucket."""
    return sum(count * min(end for end in ends if end >= value) for value, count in zip(values, counts, strict=True))


def fewest_by_trying(values: Sequence[int], counts: Sequence[int], num_buckets: int) -> int:
    """The fewest padded tokens over all ways to choose the ends of buckets."""
    inner = min(num_buckets, len(values)) - 1
    choices = combinations(values[:-1], inner)
    return min(padded_tokens(values, counts, (*chosen, values[-1])) for chosen in choices)


def cut(counts: Sequence[int], sizes: Sequence[int], num_replicas: int) -> list[Step]:
    """Steps through buckets, the longest first: each takes what the bucket of its first sample allows."""
    allowed = [size * num_replicas for count, size in zip(counts, sizes, strict=True) for _ in range(count)]
    steps, start = [], 0
    while start < len(allowed):
        stop = min(start + allowed[start], len(allowed))
        steps.append((start, stop))
        start = stop
    return steps


def give(steps: list[Step], num_replicas: int) -> tuple[list[Step], int]:
    """The steps after the last but one gave to the last, and how many samples that still lacks for one a rank."""
    if not steps or steps[-1][1] - steps[-1][0] >= num_replicas:
        return steps, 0
    lacks = num_replicas - (steps[-1][1] - steps[-1][0])
    if len(steps) == 1 or steps[-2][1] - steps[-2][0] < 2 * num_replicas:
        return steps, lacks
    border = steps[-1][0] - lacks
    return [*steps[:-2], (steps[-2][0], border), (border, steps[-1][1])], 0


def deal(samples: Sequence[int], num_replicas: int) -> list[list[int]]:
    """The samples of each rank in a step: in turn; where there are too few, ranks begin again."""
    if len(samples) >= num_replicas:
        return [list(samples[rank::num_replicas]) for rank in range(num_replicas)]
    return [[samples[rank % len(samples)]] for rank in range(num_replicas)]


def unshuffled_steps(order: BucketOrder, segments: Sequence[tuple[int, int | None]]) -> list[list[list[int]]]:
    """The batches of an unshuffled epoch, step by step and rank by rank, computed with lists of samples alone.

    Args:
        order: Of which lengths, ends and sizes of buckets are taken.
        segments: Ranks, and how many steps are taken on them; None for all that are left.
    """
    lengths = order.lengths.tolist()
    buckets: list[list[int]] = [[] for _ in order.buckets.ends]
    for sample, length in enumerate(lengths):
        fitting = [number for number, end in enumerate(order.buckets.ends) if length <= end]
        if order.budget.num_samples(length):
            buckets[fitting[-1]].append(sample)
    served = []
    for num_replicas, count in segments:
        left = [sample for bucket in buckets for sample in bucket]
        steps, _ = give(cut(list(map(len, buckets)), order.buckets.sizes, num_replicas), num_replicas)
        taken = [left[start:stop] for start, stop in steps][:count]
        served += [deal(samples, num_replicas) for samples in taken]
        used = {sample for samples in taken for sample in samples}
        buckets = [[sample for sample in bucket if sample not in used] for bucket in buckets]
    return served


def read_ahead(
    samples: Sequence[int],
    lengths: Sequence[int],
    keys: Sequence[int] | None,
    window: int,
    num_samples: Callable[[int], int],
) -> list[list[list[int]]]:
    """Batches, window by window, as read-ahead batching makes them: sorted stably, cut at the budget and the key."""

    def key_of(sample: int) -> int:
        return 0 if keys is None else keys[sample]

    windows = []
    for begin in range(0, len(samples), window):
        read = sorted(samples[begin : begin + window], key=lambda sample: (key_of(sample), -lengths[sample]))
        batches = []
        for _, group in groupby(read, key=key_of):
            left = list(group)
            while left:
                size = num_samples(lengths[left[0]])
                batches.append(left[:size])
                left = left[size:]
        windows.append(batches)
    return windows


def is_within(budget: Budget, lengths: Sequence[int]) -> bool:
    """Whether a batch of samples of these lengths keeps its budget, reckoned in whole numbers."""
    longest, count = max(*lengths, 1), len(lengths)
    if budget.batch_size is not None:
        return count <= budget.batch_size
    if budget.max_samples is not None and count > budget.max_samples:
        return False
    assert budget.max_tokens is not None
    if budget.cost is None:
        return count * longest <= budget.max_tokens
    scale = budget.cost.length
    return count * (longest * scale + longest * longest) <= budget.max_tokens * scale


def random_lengths(rng: random.Random, most: int = 300) -> list[int]:
    """Lengths of some distribution: even, skewed, few different ones, all alike, or with outliers."""
    count, longest = rng.randint(1, rng.choice([3, 30, most])), rng.choice([1, 4, 40, 1000])
    kind = rng.choice(["even", "skewed", "few", "alike", "outliers"])
    if kind == "even":
        return [rng.randint(0, longest) for _ in range(count)]
    if kind == "skewed":
        return [min(int(rng.lognormvariate(1, 1)), longest) for _ in range(count)]
    if kind == "few":
        values = [rng.randint(1, longest) for _ in range(3)]
        return [rng.choice(values) for _ in range(count)]
    if kind == "alike":
        return [longest] * count
    return [longest if rng.random() < 0.05 else rng.randint(1, 3) for _ in range(count)]


def in_budget(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of buckets, of which those that a budget takes are put into one."""
    names = {field.name for field in dataclasses.fields(Budget)}
    limits = {name: value for name, value in options.items() if name in names}
    return {"budget": Budget(**limits), **{name: value for name, value in options.items() if name not in names}}


def random_budget(rng: random.Random, lengths: Sequence[int]) -> dict[str, Any]:
    """A budget of any kind, under which every sample fits unless it says to drop those that do not."""
    longest = max(*lengths, 1)
    if rng.random() < 0.25:
        return {"batch_size": rng.randint(1, 9), "multiple": rng.choice([1, 1, 2, 4])}
    budget: dict[str, Any] = {"max_tokens": longest * rng.randint(1, 6) + rng.randint(0, longest)}
    if rng.random() < 0.3:
        budget["max_samples"] = rng.randint(1, 12)
    if rng.random() < 0.3:
        budget["multiple"] = rng.choice([2, 4, 8])
    if rng.random() < 0.3:
        budget["cost"] = QuadraticCost(rng.randint(1, 2 * longest))
        budget["max_tokens"] *= 1 + -(-longest // budget["cost"].length)
    elif rng.random() < 0.3 and 2 * min(lengths) <= longest:
        budget |= {"max_tokens": max(longest - rng.randint(1, longest // 2 + 1), min(lengths), 1), "too_long": "drop"}
    return budget


def random_order(rng: random.Random, *, most: int = 300, **fixed: Any) -> BucketOrder:
    """Any order over buckets."""
    lengths = random_lengths(rng, most)
    chosen: dict[str, Any] = rng.choice(
        [{}, {"num_buckets": rng.randint(1, 12)}, {"num_buckets": rng.randint(1, 12), "boundaries": "equal_counts"}]
    )
    if rng.random() < 0.2:
        chosen = {"boundaries": sorted({rng.randint(1, 1200) for _ in range(rng.randint(1, 8))})}
    buckets = Buckets.of(lengths, Budget(**random_budget(rng, lengths)), **chosen)
    options = {"seed": rng.randint(0, 99), "shuffle": rng.random() < 0.8, "drop_last": rng.random() < 0.25, **fixed}
    return BucketOrder(buckets, **options)


def has_steps(order: BucketOrder, num_replicas: int) -> bool:
    """Whether an epoch has a step on so many ranks."""
    try:
        return order.plan(0, num_replicas).num_steps > 0
    except ConfigurationError:
        return False


def serve(plan: BucketEpochPlan, first_step: int = 0) -> list[list[list[int]]]:
    """The batches of a plan, step by step and rank by rank."""
    ranks = [[batch for _, batch in plan.batches(rank, first_step)] for rank in range(plan.num_replicas)]
    return [list(step) for step in zip(*ranks, strict=True)]


def samples_of(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """All samples in these steps."""
    return [sample for step in steps for batch in step for sample in batch]


def random_cases(count: int, seed: int, **fixed: Any) -> Iterator[tuple[BucketOrder, list[int], random.Random]]:
    """Random orders, each with the numbers of ranks for which an epoch has a step."""
    rng = random.Random(seed)
    while count:
        order = random_order(rng, **fixed)
        usable = [ranks for ranks in RANKS if has_steps(order, ranks)]
        if usable:
            yield order, usable, rng
            count -= 1


@dataclass
class History:
    """An epoch in which the number of ranks changed now and then, to its end."""

    order: BucketOrder
    epoch: int
    segments: list[tuple[int, int]]
    steps: list[list[list[int]]]
    progress: Progress
    num_replicas: int


def random_histories(count: int, seed: int, **fixed: Any) -> Iterator[History]:
    """Epochs of random orders; every change goes through a saved progress and a fresh order."""
    for order, usable, rng in random_cases(count, seed, **fixed):
        made = History(order, rng.randint(0, 3), [], [], Progress(), 0)
        made.progress = Progress(epoch=made.epoch)
        num_parts = rng.randint(1, 5)
        for part in range(num_parts):
            made.num_replicas = rng.choice(usable)
            plan = replace(order).plan(made.epoch, made.num_replicas, made.progress)
            count_steps = plan.num_steps if part == num_parts - 1 else rng.randint(0, plan.num_steps)
            made.steps += serve(plan)[:count_steps]
            made.segments.append((made.num_replicas, count_steps))
            made.progress = Progress.from_dict(json.loads(json.dumps(plan.progress_after(count_steps).to_dict())))
        yield made
