"""What skip= names is left out of plans of every kind, and nothing else; all other batches stay as they are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from lightning_stateful.bucketing import Budget
from lightning_stateful.core import SampleBatchOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.core.skip import Gaps, SkippingPlan, as_skip, left_out_at, without_gaps
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.samplers import BucketBatchSampler, MixtureBatchSampler
from lightning_stateful.samplers.skipping import Skipping


@pytest.mark.parametrize("seed", range(20))
def test_gaps_count_and_find_positions_as_a_list_does(seed: int) -> None:
    draw = random.Random(seed)
    ranges = [(start := draw.randrange(30), start + draw.randrange(6)) for _ in range(draw.randrange(6))]
    gaps = Gaps.of(ranges)
    left_out = sorted({position for one in ranges for position in range(*one)})
    kept = [position for position in range(60) if position not in left_out]
    assert gaps.positions(np.arange(len(kept))).tolist() == kept
    assert [gaps.before(position) for position in range(61)] == [
        sum(one < position for one in left_out) for position in range(61)
    ]
    first, stop = sorted(draw.sample(range(40), 2))
    within = gaps.within(first, stop)
    assert [p for one in within.pairs.tolist() for p in range(*one)] == [p for p in left_out if first <= p < stop]
    assert bool(gaps) == bool(left_out)
    other = Gaps.of([(3, 9)])
    assert [p for one in (gaps | other).pairs.tolist() for p in range(*one)] == sorted({*left_out, *range(3, 9)})


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "by epoch": ({2: range(300, 350), 4: [range(3), (5, 7)]}, ((2, 300, 350), (4, 0, 3), (4, 5, 7)), None),
    "of a file": ({2: [300, 350]}, ((2, 300, 350),), None),
    "pairs": ([(2, range(300, 350)), (0, range(1, 2))], ((0, 1, 2), (2, 300, 350)), None),
    "a pair": ((2, range(300, 350)), ((2, 300, 350),), None),
    "indices": ({17, 912, 3}, (), [3, 17, 912]),
    "a list of indices": ([17, 3, 17], (), [3, 17]),
    "an array": (np.array([5, 4], dtype=np.int32), (), [4, 5]),
    "both": ([(2, range(300, 350)), {17}, [3]], ((2, 300, 350),), [3, 17]),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_out_can_be_said_in_several_ways(form: str) -> None:
    given, ranges, indices = FORMS[form]
    skip = as_skip(given)
    assert skip is not None
    assert skip.ranges == ranges
    assert (None if skip.indices is None else skip.indices.tolist()) == indices
    assert as_skip(skip) is skip


@pytest.mark.parametrize("nothing", [None, {}, [], set(), {2: []}])
def test_nothing_is_left_out_where_nothing_is_named(nothing: Any) -> None:
    assert as_skip(nothing) is None


WRONG: dict[str, tuple[Any, str]] = {
    "a number": (5, "ranges of batches by epoch"),
    "text": ({"two": range(3)}, "the epoch of skip must be an integer, got 'two'"),
    "steps": ({2: range(0, 10, 2)}, "that follow one another"),
    "no batch": ({2: range(5, 5)}, "no batch in range"),
    "a batch before the first": ({2: range(-2, 5)}, "a batch of skip must be at least 0"),
    "batches one by one": ({2: [1, 2, 3]}, "Of epoch 2 it has 1"),
    "beyond any epoch": ({2: range(2**50)}, "numbers go up to"),
    "negative indices": ({-1}, "integers from 0"),
    "names": ({"a"}, "integers from 0"),
    "two functions": ([np.isfinite, np.isnan], "2 functions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_refused_with_its_value(case: str) -> None:
    given, said = WRONG[case]
    with pytest.raises(ConfigurationError, match=said):
        as_skip(given)


def test_a_function_that_gives_no_array_of_booleans_is_refused_by_its_name() -> None:
    skip = as_skip(lambda indices: [1, 2])
    assert skip is not None
    with pytest.raises(ConfigurationError, match=r"<lambda> of skip= .* gave int64 of shape \(2,\)"):
        skip.leaves_out(np.arange(5))


def applied(plan: Any, skip: Any, ranks: int) -> Any:
    found = as_skip(skip)
    assert found is not None
    return Skipping(found).applied(plan, plan.epoch, None, ranks)


LENGTHS = [3, 7, 1, 12, 5, 5, 9, 2, 16, 4, 6, 3, 11, 8, 1, 14, 2, 10, 7, 3, 5, 13, 4]
ORDERS: dict[str, Any] = {
    "samples": lambda: SampleBatchOrder(samples=ShuffledOrder(103, 3), batch_size=4),
    "samples, tail dropped": lambda: SampleBatchOrder(samples=ShuffledOrder(103, 3), batch_size=4, drop_last=True),
    "mixture": lambda: MixtureBatchSampler({"a": 20, "b": 44, "c": 31}, 3).order,
    "mixture, steps": lambda: MixtureBatchSampler({"a": 20, "b": 44}, 3, num_steps=17).order,
    "buckets": lambda: BucketBatchSampler(LENGTHS * 3, budget=Budget(max_tokens=32), num_buckets=3).order,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_a_range_of_batches_is_left_out_and_all_others_stay_as_they_are(name: str, ranks: int) -> None:
    order = ORDERS[name]()
    whole = order.plan(1, ranks)
    plan = applied(whole, {1: [range(2, 5), range(7, 8)], 0: range(9)}, ranks)
    numbers = [step for step in range(whole.num_steps) if step not in {2, 3, 4, 7}]
    assert plan.num_steps == len(numbers) == whole.num_steps - 4
    assert without_gaps(plan).num_steps == whole.num_steps
    for rank in range(ranks):
        every = list(whole.batches(rank))
        assert list(plan.batches(rank)) == [every[number] for number in numbers]
        for first in (1, 2, 3, plan.num_steps):
            assert list(plan.batches(rank, first)) == [every[number] for number in numbers[first:]]
    counts = [left_out_at(plan, step) for step in range(plan.num_steps)]
    if not isinstance(plan, SkippingPlan):
        counts = [None if found is None else len(found) // (4 * ranks) for found in counts]
    assert counts == [None, None, 3, None, 1, *[None] * (plan.num_steps - 5)]
    # The progress after each step is that of the plan with all steps, behind the very batch.
    for steps in range(1, plan.num_steps):
        assert plan.progress_after(steps) == whole.progress_after(numbers[steps - 1] + 1)
    end = whole.progress_after(whole.num_steps)
    assert plan.progress_after(plan.num_steps) == end
    assert plan.report_after(plan.num_steps)["skipped"] == (4 * 4 * ranks if "samples" in name else 4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_samples_are_left_out_and_the_others_fill_the_batches(ranks: int) -> None:
    order = SampleBatchOrder(samples=ShuffledOrder(103, 3), batch_size=4)
    bad = {5, 17, 99, 100, 101, 102, 103, 9000}
    plans = [applied(order.plan(2, ranks), skip, ranks) for skip in (bad, lambda indices: np.isin(indices, [*bad]))]
    for plan in plans:
        batches = [[batch for _, batch in plan.batches(rank)] for rank in range(ranks)]
        steps = [[index for batch in step for index in batch] for step in zip(*batches, strict=True)]
        whole = order.samples.take(np.arange(103), 2, 0).tolist()
        assert [index for step in steps for index in step] == [index for index in whole if index not in bad]
        assert {len(batch) for of_rank in batches for batch in of_rank[:-2]} == {4}
        found = [left_out_at(plan, step) for step in range(plan.num_steps)]
        assert sorted(index for one in found if one is not None for index in one.tolist()) == sorted(bad - {103, 9000})


def test_an_epoch_of_which_all_or_only_the_end_is_left_out_has_fewer_steps() -> None:
    order = SampleBatchOrder(samples=SequentialOrder(22), batch_size=4)
    assert applied(order.plan(0, 1), {0: range(4, 90)}, 1).num_steps == 4
    assert list(applied(order.plan(0, 1), {0: range(90)}, 1).batches(0)) == []
