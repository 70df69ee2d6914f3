"""Every batch of a plan is measured: its longest sample, its samples and its tokens."""

import numpy as np
from support.bucket_cases import random_cases, serve

from lightning_stateful.bucketing import BucketOrder, Buckets, Budget, measure


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
