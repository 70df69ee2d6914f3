"""Plain-Python references for length buckets, and random cases of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, groupby
from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.bucket_order import BucketOrder
from lightning_stateful.index.buckets import Buckets
from lightning_stateful.index.budget import Budget, QuadraticCost
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.index.window_order import WindowOrder
from lightning_stateful.index.windows import Windows
from support.mixtures import plan, serve

Step = tuple[int, int]


def padded_tokens(values: Sequence[int], counts: Sequence[int], ends: Sequence[int]) -> int:
    """Tokens where each sample is padded to the end of its bucket."""
    return sum(count * min(end for end in ends if end >= value) for value, count in zip(values, counts, strict=True))


def fewest_by_trying(values: Sequence[int], counts: Sequence[int], num_buckets: int) -> int:
    """The fewest padded tokens over all ways to choose the ends of buckets."""
    inner = min(num_buckets, len(values)) - 1
    choices = combinations(values[:-1], inner)
    return min(padded_tokens(values, counts, (*chosen, values[-1])) for chosen in choices)


def fewest_by_recursion(values: Sequence[int], counts: Sequence[int], num_buckets: int) -> int:
    """The same in O(num_buckets * len(values)**2)."""
    below = [0]
    for count in counts:
        below.append(below[-1] + count)
    ends = range(1, len(values) + 1)
    tokens = [0, *(values[end - 1] * below[end] for end in ends)]
    for _ in range(num_buckets - 1):
        tokens = [
            0,
            *(
                min(tokens[begin] + values[end - 1] * (below[end] - below[begin]) for begin in range(end))
                for end in ends
            ),
        ]
    return tokens[-1]


def cut(counts: Sequence[int], sizes: Sequence[int], width: int) -> list[Step]:
    """Steps through buckets, the longest first: each takes what the bucket of its first sample allows."""
    allowed = [size * width for count, size in zip(counts, sizes, strict=True) for _ in range(count)]
    steps, start = [], 0
    while start < len(allowed):
        stop = min(start + allowed[start], len(allowed))
        steps.append((start, stop))
        start = stop
    return steps


def give(steps: list[Step], width: int) -> tuple[list[Step], int]:
    """The steps after the last but one gave to the last, and how many samples that still lacks for one a rank."""
    if not steps or steps[-1][1] - steps[-1][0] >= width:
        return steps, 0
    lacks = width - (steps[-1][1] - steps[-1][0])
    if len(steps) == 1 or steps[-2][1] - steps[-2][0] < 2 * width:
        return steps, lacks
    border = steps[-1][0] - lacks
    return [*steps[:-2], (steps[-2][0], border), (border, steps[-1][1])], 0


def deal(start: int, stop: int, width: int) -> list[list[int]]:
    """The places of each rank in a step: in turn; where there are too few, ranks begin again."""
    size = stop - start
    if size >= width:
        return [list(range(start + rank, stop, width)) for rank in range(width)]
    return [[start + rank % size] for rank in range(width)]


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
    longest, count = max(lengths), len(lengths)
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


def random_budget(rng: random.Random, lengths: Sequence[int]) -> dict[str, Any]:
    """A budget of any kind, under which every sample fits unless it says what to do about those that do not."""
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
    if rng.random() < 0.25:
        budget["max_tokens"] = max(budget["max_tokens"] // rng.randint(2, 8), 1)
        budget["too_long"] = "alone" if min(lengths) * 9 > budget["max_tokens"] else rng.choice(["alone", "drop"])
        if "cost" in budget:
            budget["too_long"] = "alone"
    return budget


def random_bucket_order(rng: random.Random, *, most: int = 300, **fixed: Any) -> BucketOrder:
    """Any order over buckets."""
    lengths = random_lengths(rng, most)
    chosen: dict[str, Any] = rng.choice(
        [{}, {"num_buckets": rng.randint(1, 12)}, {"num_buckets": rng.randint(1, 12), "boundaries": "equal_counts"}]
    )
    if rng.random() < 0.2:
        chosen = {"boundaries": sorted({rng.randint(1, 1200) for _ in range(rng.randint(1, 8))})}
    buckets = Buckets.of(lengths, **random_budget(rng, lengths), **chosen)
    options = {"seed": rng.randint(0, 99), "shuffle": rng.random() < 0.8, "drop_last": rng.random() < 0.25, **fixed}
    return BucketOrder(buckets, **options)


def random_window_order(rng: random.Random, *, most: int = 300, **fixed: Any) -> WindowOrder:
    """Any order over windows."""
    lengths = random_lengths(rng, most)
    keys = [rng.randint(5, 9) for _ in lengths] if rng.random() < 0.4 else None
    shuffle = rng.random() < 0.8
    windows = Windows.of(
        lengths,
        **random_budget(rng, lengths),
        window=rng.choice([1, 7, 40, 100, 1000]),
        boundary_key=keys,
        shuffle=shuffle,
        seed=rng.randint(0, 99),
    )
    options = {"shuffle_batches": shuffle and rng.random() < 0.7, "drop_last": rng.random() < 0.25, **fixed}
    return WindowOrder(windows, **options)


def has_steps(order: BatchOrder, width: int) -> bool:
    """Whether an epoch has a step on so many ranks."""
    try:
        return order.steps(order.begin(0, width)) > 0
    except ConfigurationError:
        return False


def usable_widths(order: BatchOrder, widths: Sequence[int]) -> list[int]:
    """The numbers of ranks on which an epoch has a step."""
    return [width for width in widths if has_steps(order, width)]


def random_cases(
    draw: Callable[..., BatchOrder], widths: Sequence[int], count: int, seed: int, **fixed: Any
) -> Iterator[tuple[Any, list[int], random.Random]]:
    """Random orders, each with the numbers of ranks for which an epoch has a step."""
    rng = random.Random(seed)
    while count:
        order = draw(rng, **fixed)
        usable = usable_widths(order, widths)
        if usable:
            yield order, usable, rng
            count -= 1


def random_histories(
    draw: Callable[..., BatchOrder], widths: Sequence[int], count: int, seed: int, **fixed: Any
) -> Iterator[tuple[Any, Any, int]]:
    """What random orders serve while the number of ranks changes now and then: the order, its steps, the last width."""
    for order, usable, rng in random_cases(draw, widths, count, seed, **fixed):
        position, steps = order.begin(rng.randint(0, 3), rng.choice(usable)), []
        for phase in range(rng.randint(2, 5)):
            width = position.width if phase == 0 else rng.choice(usable)
            if rng.random() < 0.3:
                saved = json.loads(json.dumps(order.save(position)))
                position = order.restore(saved, order.describe(), changed=False)
            made = plan(order, width)
            num_steps = rng.randint(0, made.num_batches(position))
            steps += serve(order, position, width)[:num_steps]
            position = made.after(position, num_steps)
        yield order, steps + serve(order, position, position.width), position.width
