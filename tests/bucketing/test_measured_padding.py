"""Padding, budget use and straggling are what one counts by hand."""

import numpy as np
import pytest
from support.bucket_cases import random_cases, serve

from lightning_stateful.bucketing import BucketOrder, Buckets, Budget, QuadraticCost, StepPadding, measure


def make_measured(*steps):
    """Steps of (longest, count, tokens) for every rank."""
    longest, counts, tokens = np.moveaxis(np.array(steps, dtype=np.int64), 2, 0)
    return StepPadding(longest=longest, counts=counts, tokens=tokens)


def assert_measured(measured, steps, lengths):
    found = [[[lengths[sample] for sample in batch] for batch in step] for step in steps]
    for name, function in (("longest", max), ("counts", len), ("tokens", sum)):
        assert getattr(measured, name).tolist() == [[function(batch) for batch in step] for step in found]


def test_every_batch_of_some_steps_is_measured():
    for order, usable, rng in random_cases(30, seed=1):
        plan = order.plan(rng.randint(0, 2), rng.choice(usable))
        steps, lengths = serve(plan), order.lengths.tolist()
        assert_measured(measure(plan), steps, lengths)
        first, last = sorted(rng.randint(0, plan.num_steps) for _ in range(2))
        assert_measured(measure(plan, first, last), steps[first:last], lengths)
        assert measure(plan, first, last).longest.shape == (last - first, plan.num_replicas)
        assert measure(plan).uses(order.budget).max() <= 1


def test_long_epochs_of_short_types_are_measured_part_by_part():
    lengths = np.tile(np.array([250, 251, 255], dtype=np.uint8), 500_000)
    measured = measure(BucketOrder(Buckets.of(lengths, Budget(batch_size=3), num_buckets=3)).plan(0, 1))
    assert measured.counts.sum() == 1_500_000
    assert measured.tokens.sum() == 500_000 * 756


def test_padding_is_the_share_of_tokens_that_are_none():
    measured = make_measured([(5, 3, 12), (5, 2, 8)])
    assert measured.padded.tolist() == [[15, 10]]
    assert measured.padding() == pytest.approx(5 / 25)
    assert make_measured([(0, 3, 0)]).padding() == 0


def test_straggling_is_the_share_of_time_in_which_ranks_wait():
    # Ranks take 10 and 6, and then 20 and 20 tokens: of 60 tokens' time, 4 are waited.
    measured = make_measured([(5, 2, 9), (3, 2, 6)], [(10, 2, 20), (5, 4, 18)])
    assert measured.straggling() == pytest.approx(4 / 60)
    assert make_measured([(5, 2, 9), (5, 2, 6)]).straggling() == 0
    assert make_measured([(5, 2, 9)], [(3, 2, 6)]).straggling() == 0


def test_the_budget_used_is_that_of_the_average_batch():
    measured = make_measured([(5, 2, 9), (10, 2, 20)], [(4, 5, 12), (5, 1, 5)])
    assert measured.uses(Budget(max_tokens=20)).tolist() == [[0.5, 1.0], [1.0, 0.25]]
    assert measured.budget_use(Budget(max_tokens=20)) == pytest.approx(2.75 / 4)
    assert measured.uses(Budget(batch_size=5)).tolist() == [[0.4, 0.4], [1.0, 0.2]]
    assert measured.uses(Budget(max_tokens=100, cost=QuadraticCost(5))).tolist() == [[0.2, 0.6], [0.36, 0.1]]
