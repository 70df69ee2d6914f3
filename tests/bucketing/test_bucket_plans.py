"""Epochs of batches of like lengths are served in step, once, through any changes of ranks."""

import numpy as np
import pytest
from support.bucket_cases import in_budget, random_histories, samples_of, serve, unshuffled_steps
from support.orders import OrderCase, every_law

from lightning_stateful.bucketing import BucketOrder, Buckets, QuadraticCost
from lightning_stateful.core import Progress
from lightning_stateful.errors import ConfigurationError, PositionError

LENGTHS = [7, 3, 9, 3, 8, 2, 9, 1, 7, 5, 4, 4]


def make(lengths=LENGTHS, *, seed=0, shuffle=True, drop_last=False, **options):
    return BucketOrder(Buckets.of(lengths, **in_budget(options)), seed=seed, shuffle=shuffle, drop_last=drop_last)


LAW_LENGTHS = [1 + (index * index * 7 + index * 3) % 19 for index in range(61)]


def case(lengths=LAW_LENGTHS, *, shuffle=True, drop_last=False, **options):
    def order(of):
        return BucketOrder(
            Buckets.of(of, **in_budget({"num_buckets": 4, **options})), seed=3, shuffle=shuffle, drop_last=drop_last
        )

    short = order(lengths)
    samples = [sample for sample, length in enumerate(lengths) if short.budget.num_samples(length)]
    return OrderCase(order=short, samples=samples, drops=drop_last, shuffled=shuffle, longer=order(lengths * 3))


CASES = {
    "tokens": case(max_tokens=40),
    "samples": case(batch_size=4),
    "batches of one": case(batch_size=1),
    "limited and in multiples": case(max_tokens=40, max_samples=7, multiple=3),
    "quadratic cost": case(max_tokens=60, cost=QuadraticCost(12)),
    "given boundaries": case(max_tokens=40, boundaries=[3, 8, 20, 50], num_buckets=None),
    "too long dropped": case(max_tokens=12, too_long="drop"),
    "full steps": case(max_tokens=20, drop_last=True),
    "unshuffled": case(max_tokens=40, shuffle=False),
    "one bucket": case(max_tokens=40, num_buckets=1),
}


@every_law
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_buckets_keep_the_laws(law, case):
    law(case)


# Whole epochs, and epochs in which the number of ranks changes


def test_an_unshuffled_epoch_is_that_of_lists_of_samples():
    for history in random_histories(40, seed=0, shuffle=False, drop_last=False):
        assert history.steps == unshuffled_steps(history.order, history.segments)


# Resumes


def test_progress_holds_the_ranks_and_steps_of_every_segment():
    order = make(range(1, 41), max_tokens=80)
    progress = order.plan(1, 3).progress_after(2)
    progress = order.plan(1, 1, progress).progress_after(4)
    assert progress.to_dict() == {"epoch": 1, "cycle": 0, "consumed": 6, "segments": [[3, 2], [1, 4]]}
    assert order.plan(1, 1, progress).progress_after(2).details == {"segments": [[3, 2], [1, 6]]}


def test_a_report_counts_the_samples_served():
    for history in random_histories(30, seed=9, drop_last=False):
        plan = history.order.plan(history.epoch, history.num_replicas, history.progress)
        assert (plan.num_steps, serve(plan)) == (0, [])
        assert plan.report_after(0) == {"samples": len(set(samples_of(history.steps)))}
    plan = make(max_tokens=20).plan(0, 2)
    assert plan.report_after(1) == {"samples": len(samples_of(serve(plan)[:1]))}


@pytest.mark.parametrize("segments", [[[64, 20]], [[64, 1], [1, 900]], [[64, 20], [1, 1]]], ids=str)
def test_more_steps_than_there_were_are_refused(segments):
    order = make(range(1, 41), max_tokens=80)
    progress = Progress(consumed=sum(steps for _, steps in segments), details={"segments": segments})
    with pytest.raises(PositionError, match=r"steps of epoch 0 were taken on \d+ ranks, where only \d+ were left"):
        order.plan(0, 1, progress)


def test_segments_that_contradict_the_steps_are_refused():
    with pytest.raises(PositionError, match=r"3 steps of epoch 0 were taken, and segments=\[\(1, 2\)\]"):
        make(max_tokens=20).plan(0, 1, Progress(consumed=3, details={"segments": [[1, 2]]}))


# Configuration


def test_an_epoch_without_a_step_is_refused():
    order = make([5, 5, 5], batch_size=2, drop_last=True)
    with pytest.raises(
        ConfigurationError, match=r"With drop_last=True and 4 ranks, an epoch of 3 samples.*no full step"
    ):
        order.plan(0, 4)
    # The rest of one that has begun may be empty.
    assert order.plan(0, 4, order.plan(0, 1).progress_after(1)).num_steps == 0


# Sizes, and golden values


def test_a_million_samples_are_served_once():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 10**6).astype(np.uint16) + 1, 4096)
    plan, times = make(lengths, max_tokens=16384).plan(1, 8), np.zeros(10**6, dtype=np.int64)
    for rank in range(8):
        indices, sizes = plan.read(rank, 0, plan.num_steps)
        times += np.bincount(indices, minlength=10**6)
        longest = np.maximum.reduceat(lengths[indices].astype(np.int64), np.cumsum(sizes) - sizes)
        assert int((longest * sizes).max()) <= 16384
    assert (times.min(), times.max()) == (1, 1)


def test_golden_batches():
    by_tokens = make(max_tokens=20, num_buckets=3, seed=3)
    by_size = make(batch_size=2, num_buckets=3, seed=3)
    resized = by_size.plan(1, 1, by_size.plan(1, 2).progress_after(1))
    assert by_tokens.version == 1
    assert serve(by_tokens.plan(1, 2)) == [[[9, 11], [0, 7]], [[4, 2], [6, 8]], [[5, 1], [10, 3]]]
    assert serve(resized) == [[[1, 3]], [[5, 10]], [[11, 7]], [[9, 0]]]
    assert serve(by_size.plan(0, 1)) == [[[6, 2]], [[9, 8]], [[7, 10]], [[3, 11]], [[5, 1]], [[4, 0]]]
