"""With ranks times batch size as before, a resume on other ranks takes the same samples in every step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mixtures import mixture, round_robin
from support.quick import thinned

from lightning_stateful.bucketing import Budget
from lightning_stateful.bucketing.buckets import Buckets
from lightning_stateful.bucketing.order import BucketOrder
from lightning_stateful.core.order import Progress
from lightning_stateful.core.samples import BlockShuffledOrder, SampleBatchOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.errors import StateMismatchError
from lightning_stateful.mixture import WeightSchedule
from lightning_stateful.packing import Packing
from lightning_stateful.packing.plan import SequenceOrder
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Samples of a step, over all ranks.
GLOBAL = 12
RANKS = [1, 2, 3, 4, 6]
# The last step of each has as many samples as there are ranks, at least.
LENGTHS = [90, 54, 36]
LENGTH = 198
SCHEDULE = WeightSchedule({0: [1, 2, 1], 9: [3, 1, 1]}, "linear")


def samples(make: Callable[[int], Any], drop_last: bool) -> Callable[[int], Any]:
    return lambda size: SampleBatchOrder(samples=make(LENGTH), batch_size=size, drop_last=drop_last)


def buckets(size: int, **options: Any) -> BucketOrder:
    lengths = [1 + 7 * number % 30 for number in range(LENGTH)]
    return BucketOrder(Buckets.of(lengths, Budget(batch_size=size), **options), seed=3)


# From a batch size of one rank to an order.
ORDERS: dict[str, Callable[[int], Any]] = {
    "sequential": samples(SequentialOrder, False),
    "shuffled": samples(ShuffledOrder, False),
    "shuffled, drop_last": samples(ShuffledOrder, True),
    "block shuffled": samples(lambda length: BlockShuffledOrder(length, block_size=7, window=3), False),
    "packed": samples(lambda length: SequenceOrder(length, Packing(8), "digest"), False),
    "sampler": lambda size: WrappedSampler(random.Random(5).sample(range(LENGTH), LENGTH), batch_size=size),
    "in turn": lambda size: round_robin(LENGTHS, size),
    "mixture": lambda size: mixture(LENGTHS, size, [3, 1, 2]),
    "mixture by sample": lambda size: mixture(LENGTHS, size, [3, 1, 2], by="sample"),
    "mixture by sample, cycle": lambda size: mixture(LENGTHS, size, [3, 1, 2], by="sample", stop="cycle"),
    "packed mixture": lambda size: mixture(LENGTHS, size, [3, 1, 2], by="sample", by_pass=("a", "b", "c")),
    "packed mixture, steps": lambda size: mixture(LENGTHS, size, [3, 1, 2], num_steps=17, by_pass=("a", "b", "c")),
    "mixture, steps": lambda size: mixture(LENGTHS, size, [3, 1, 2], num_steps=17),
    "mixture by sample, steps": lambda size: mixture(LENGTHS, size, [3, 1, 2], by="sample", num_steps=17),
    "mixture, schedule": lambda size: mixture(LENGTHS, size, schedule=SCHEDULE, num_steps=17),
    "buckets of one size": lambda size: buckets(size, num_buckets=5),
}


def steps_of(plan: Any, ranks: int, most: int | None = None) -> list[list[int]]:
    """The samples of every step, or of the first of them, over all ranks."""
    batches = [[list(batch) for _, batch in islice(plan.batches(rank), most)] for rank in range(ranks)]
    return [sorted(index for batch in step for index in batch) for step in zip(*batches, strict=True)]


def resumed(make: Callable[[int], Any], history: list[tuple[int, int]], last: int, epoch: int) -> list[list[int]]:
    """The steps of an epoch in which some ranks after the other take so many, and others the rest."""
    progress, steps, before = None, [], None
    for ranks, taken in [*history, (last, 10**6)]:
        order = make(GLOBAL // ranks)
        if progress is not None and before.config() != order.config():
            # As a state is loaded under a configuration with another batch size.
            progress = order.convert(progress, json.loads(json.dumps(before.config())))
        plan = order.plan(epoch, ranks, progress)
        taken = min(taken, plan.num_steps)
        steps += steps_of(plan, ranks, taken)
        progress = Progress.from_dict(json.loads(json.dumps(plan.progress_after(taken).to_dict())))
        before = order
    return steps


# Sources and their steps are shared alike, by batch and by sample.
SLOW = ("mixture by sample, steps", "mixture by sample, cycle", "packed mixture, steps")


@pytest.mark.parametrize("name", thinned(ORDERS, SLOW))
@given(st.data())
def test_every_step_of_an_epoch_has_the_samples_of_an_uninterrupted_run(name: str, data: st.DataObject) -> None:
    make, number = ORDERS[name], st.sampled_from(RANKS)
    epoch = data.draw(st.integers(0, 2)) if not make(1).carries_over else 0
    history = data.draw(st.lists(st.tuples(number, st.integers(0, 9)), min_size=1, max_size=3))
    first = history[0][0]
    whole = steps_of(make(GLOBAL // first).plan(epoch, first), first)
    found = resumed(make, history, data.draw(number), epoch)
    assert found == whole


@given(st.integers(GLOBAL, 100), st.sampled_from([*RANKS, GLOBAL]), st.sampled_from([*RANKS, GLOBAL]))
def test_of_any_length_all_steps_but_the_last_two_are_the_same(length: int, first: int, second: int) -> None:
    found = []
    for ranks in (first, second):
        order = SampleBatchOrder(samples=ShuffledOrder(length), batch_size=GLOBAL // ranks)
        found.append(steps_of(order.plan(0, ranks), ranks))
    assert len(found[0]) == len(found[1])
    assert found[0][:-2] == found[1][:-2]


def test_steps_of_another_size_are_planned_anew() -> None:
    order = mixture(LENGTHS, 4, [3, 1, 2])
    progress = order.plan(0, 2).progress_after(5)
    other = mixture(LENGTHS, 8, [3, 1, 2])
    assert other.plan(0, 2, other.convert(progress, order.config())).planned_steps == 5
    assert order.plan(0, 4, progress).planned_steps == 5
    assert mixture(LENGTHS, 2, [3, 1, 2]).plan(0, 4, progress).planned_steps == 0


def test_buckets_whose_number_follows_from_the_batch_size_are_not_resumed_with_another() -> None:
    progress = buckets(6).plan(0, 2).progress_after(3)
    with pytest.raises(StateMismatchError, match="batch_size: saved 6, now 3"):
        buckets(3).convert(progress, buckets(6).config())
    for size, ranks in ((4, 3), (8, 1)):
        # No whole number of ranks takes the same steps.
        with pytest.raises(StateMismatchError, match=f"batch_size: saved {size}, now 5"):
            buckets(5, num_buckets=3).convert(
                buckets(size, num_buckets=3).plan(0, ranks).progress_after(3), buckets(size, num_buckets=3).config()
            )


@pytest.mark.parametrize("options", [{}, {"num_buckets": 5}])
def test_buckets_of_a_budget_are_not_resumed_with_another(options: dict[str, Any]) -> None:
    def of_tokens(tokens: int) -> BucketOrder:
        lengths = [1 + 7 * number % 30 for number in range(LENGTH)]
        return BucketOrder(Buckets.of(lengths, Budget(max_tokens=tokens), **options))

    progress = of_tokens(100).plan(0, 2).progress_after(3)
    with pytest.raises(StateMismatchError, match="max_tokens: saved 100, now 50"):
        of_tokens(50).convert(progress, of_tokens(100).config())
