"""Epochs of batches of like lengths are served in step, once, through any changes of ranks."""

import dataclasses
import json
import random
from collections import Counter

import numpy as np
import pytest
from support.bucket_cases import (
    is_within,
    random_cases,
    random_histories,
    samples_of,
    serve,
    unshuffled_steps,
)

from lightning_stateful.bucketing import BucketOrder, Buckets
from lightning_stateful.core import BatchOrder, Progress
from lightning_stateful.errors import ConfigurationError, PositionError, StateMismatchError

LENGTHS = [7, 3, 9, 3, 8, 2, 9, 1, 7, 5, 4, 4]


def make(lengths=LENGTHS, *, seed=0, shuffle=True, drop_last=False, **options):
    return BucketOrder(Buckets.of(lengths, **options), seed=seed, shuffle=shuffle, drop_last=drop_last)


def num_repeated(plan):
    return int(plan.repeats().split()[0]) if plan.repeats() else 0


def served_samples(order):
    return set(order.buckets.take(np.arange(len(order.buckets))).tolist())


def test_it_is_a_batch_order():
    order = make(max_tokens=20)
    assert isinstance(order, BatchOrder)
    assert (order.kind, order.version, order.carries_over) == ("buckets", 1, False)
    assert (order.lengths.tolist(), order.budget.max_tokens) == (LENGTHS, 20)


# Whole epochs, and epochs in which the number of ranks changes


def test_an_unshuffled_epoch_is_that_of_lists_of_samples():
    for history in random_histories(40, seed=0, shuffle=False, drop_last=False):
        assert history.steps == unshuffled_steps(history.order, history.segments)


def test_every_sample_is_served_once_apart_from_repeats_in_the_last_step():
    for history in random_histories(60, seed=1, drop_last=False):
        times = Counter(samples_of(history.steps))
        assert set(times) == served_samples(history.order)
        assert set(Counter(samples_of(history.steps[:-1])).values()) <= {1}
        assert times.total() - len(times) < max(history.num_replicas, len(history.steps[-1]))


def test_with_drop_last_no_sample_is_served_twice_and_all_steps_are_full():
    for history in random_histories(40, seed=2, drop_last=True):
        assert set(Counter(samples_of(history.steps)).values()) <= {1}
        assert all(len({len(batch) for batch in step}) == 1 for step in history.steps)


def test_no_batch_exceeds_its_budget():
    for history in random_histories(40, seed=3):
        lengths = history.order.lengths.tolist()
        for batch in (batch for step in history.steps for batch in step):
            assert is_within(history.order.budget, [lengths[sample] for sample in batch])


def test_a_plan_counts_its_repeats():
    for order, usable, rng in random_cases(40, seed=4, drop_last=False):
        plan = order.plan(0, rng.choice(usable))
        times = Counter(samples_of(serve(plan)))
        assert times.total() - len(times) == num_repeated(plan) < plan.num_replicas


def test_full_steps_have_one_size_on_all_ranks_which_is_what_the_longest_allows():
    for order, usable, rng in random_cases(40, seed=5):
        steps, lengths = serve(order.plan(2, rng.choice(usable))), order.lengths.tolist()
        size_of = dict(zip(order.buckets.ends, order.buckets.sizes, strict=True))
        for step in steps if order.drop_last else steps[:-2]:
            longest = max(lengths[sample] for batch in step for sample in batch)
            bucket = min(end for end in order.buckets.ends if end >= longest)
            assert {len(batch) for batch in step} == {size_of[bucket]}


def test_the_number_of_steps_follows_neither_epoch_nor_seed_nor_shuffling():
    for order, usable, rng in random_cases(20, seed=6):
        ranks = rng.choice(usable)
        others = [dataclasses.replace(order, **change) for change in ({"seed": 123}, {"shuffle": False})]
        counts = {other.plan(epoch, ranks).num_steps for other in (order, *others) for epoch in (0, 3)}
        assert counts == {len(serve(order.plan(0, ranks)))}


def test_what_is_left_never_takes_more_steps_than_a_whole_epoch_or_than_on_fewer_ranks():
    for order, usable, rng in random_cases(40, seed=7, drop_last=False):
        progress = Progress()
        for _ in range(6):
            ranks = rng.choice(usable)
            plan = order.plan(0, ranks, progress)
            assert plan.num_steps <= order.plan(0, ranks).num_steps
            progress = plan.progress_after(rng.randint(0, plan.num_steps))
            assert order.plan(0, ranks + 3, progress).num_steps <= order.plan(0, ranks, progress).num_steps


# Resumes


def test_progress_holds_the_ranks_and_steps_of_every_segment():
    order = make(range(1, 41), max_tokens=80)
    progress = order.plan(1, 3).progress_after(2)
    progress = order.plan(1, 1, progress).progress_after(4)
    assert progress.to_dict() == {"epoch": 1, "cycle": 0, "consumed": 6, "segments": [[3, 2], [1, 4]]}
    assert order.plan(1, 1, progress).progress_after(2).details == {"segments": [[3, 2], [1, 6]]}


def test_ranks_that_changed_back_before_a_step_leave_no_trace():
    order = make(range(1, 41), max_tokens=80)
    progress = order.plan(1, 3).progress_after(2)
    assert order.plan(1, 7, progress).progress_after(0) == progress
    assert order.plan(1, 7).progress_after(0).details == {"segments": []}


def test_a_report_counts_the_samples_served():
    for history in random_histories(30, seed=9, drop_last=False):
        plan = history.order.plan(history.epoch, history.num_replicas, history.progress)
        assert (plan.num_steps, serve(plan)) == (0, [])
        assert plan.report_after(0) == {"samples": len(set(samples_of(history.steps)))}
    plan = make(max_tokens=20).plan(0, 2)
    assert plan.report_after(1) == {"samples": len(samples_of(serve(plan)[:1]))}


def test_a_progress_of_many_changes_of_ranks_stays_small():
    order, progress = make(np.arange(1, 3001), max_tokens=3000), Progress()
    for number in range(40):
        progress = order.plan(0, 1 + number % 3, progress).progress_after(2)
    assert len(json.dumps(progress.to_dict())) < 500


@pytest.mark.parametrize("segments", [[[64, 20]], [[64, 1], [1, 900]], [[64, 20], [1, 1]]], ids=str)
def test_more_steps_than_there_were_are_refused(segments):
    order = make(range(1, 41), max_tokens=80)
    progress = Progress(consumed=sum(steps for _, steps in segments), details={"segments": segments})
    with pytest.raises(PositionError, match=r"steps of epoch 0 were taken on \d+ ranks, where only \d+ were left"):
        order.plan(0, 1, progress)


def test_segments_that_contradict_the_steps_are_refused():
    with pytest.raises(PositionError, match=r"3 steps of epoch 0 were taken, and segments=\[\(1, 2\)\]"):
        make(max_tokens=20).plan(0, 1, Progress(consumed=3, details={"segments": [[1, 2]]}))


# Shuffling


def test_unshuffled_every_epoch_is_alike_and_the_longest_come_first():
    order = make(max_tokens=20, num_buckets=3).adapted(shuffle=False)
    steps = serve(order.plan(0, 1))
    assert steps == serve(order.plan(5, 1))
    longest = [max(LENGTHS[sample] for sample in step[0]) for step in steps]
    assert longest == sorted(longest, reverse=True)


def test_asking_for_epochs_in_turn_gives_the_same_answers():
    order = make(max_tokens=20, num_buckets=3)
    keys = [(epoch, ranks) for epoch in range(3) for ranks in (1, 2, 3)]
    expected = {key: serve(dataclasses.replace(order).plan(*key)) for key in keys}
    random.Random(0).shuffle(keys)
    assert all(serve(order.plan(*key)) == expected[key] for key in keys)


# Configuration


def test_an_epoch_without_a_step_is_refused():
    order = make([5, 5, 5], batch_size=2, drop_last=True)
    with pytest.raises(
        ConfigurationError, match=r"With drop_last=True and 4 ranks, an epoch of 3 samples.*no full step"
    ):
        order.plan(0, 4)
    # The rest of one that has begun may be empty.
    assert order.plan(0, 4, order.plan(0, 1).progress_after(1)).num_steps == 0


def test_repeats_are_told_in_words():
    assert make([5, 5, 5], batch_size=2).plan(0, 4).repeats() == "1 of 3 samples are served twice in every epoch"
    assert make([5, 5, 5], batch_size=2).plan(0, 3).repeats() == ""


def test_the_configuration_tells_seed_shuffling_and_dropping_beside_what_was_asked_for():
    order = make(max_tokens=20, seed=4, drop_last=True)
    expected = {**order.buckets.config, "shuffle": True, "seed": 4, "drop_last": True}
    assert json.loads(json.dumps(order.config())) == expected


def test_within_an_epoch_other_batches_are_refused_with_every_difference():
    saved, present = make(max_tokens=80, num_buckets=3), make(range(12), max_tokens=90, num_buckets=4, drop_last=True)
    with pytest.raises(StateMismatchError) as caught:
        present.convert(saved.plan(0, 2).progress_after(1), {**saved.config(), "dataset": {"length": 3}})
    found = {difference.path: (difference.saved, difference.present) for difference in caught.value.differences}
    lengths = (saved.config()["lengths"], present.config()["lengths"])
    assert found == {
        "max_tokens": (80, 90),
        "num_buckets": (3, 4),
        "drop_last": (False, True),
        "lengths": lengths,
    }
    assert "beginning of an epoch" in str(caught.value)


def test_at_the_beginning_of_an_epoch_other_batches_are_let_pass():
    saved, present = make(max_tokens=80), make(batch_size=3)
    progress = saved.plan(3, 2).progress_after(0)
    assert present.convert(progress, saved.config()) == progress


def test_equal_arguments_give_one_sequence_whatever_the_type_of_the_lengths():
    made = [make(np.array(LENGTHS, dtype=dtype), max_tokens=20) for dtype in (np.uint8, np.int64, ">i4")]
    assert len({json.dumps([serve(order.plan(1, 2)), order.config()]) for order in made}) == 1


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


def test_lengths_up_to_2_to_the_41_are_served():
    lengths = [2**41 - number for number in range(10)] + [5] * 10
    steps = serve(make(lengths, max_tokens=3 * 2**41, num_buckets=2).plan(0, 2))
    assert sorted(samples_of(steps)) == list(range(20))
    assert max(len(batch) for step in steps for batch in step if min(batch) < 10) == 3


def test_golden_batches():
    by_tokens = make(max_tokens=20, num_buckets=3, seed=3)
    resized = by_tokens.plan(1, 1, by_tokens.plan(1, 2).progress_after(1))
    by_size = make(batch_size=2, num_buckets=3, seed=3)
    assert by_tokens.version == 1
    assert serve(by_tokens.plan(1, 2)) == [[[9, 11], [0, 7]], [[4, 2], [6, 8]], [[5, 1], [10, 3]]]
    assert serve(resized) == [[[2, 8]], [[4, 6]], [[5, 10, 1, 3]]]
    assert serve(by_size.plan(0, 1)) == [[[6, 2]], [[9, 8]], [[7, 10]], [[3, 11]], [[5, 1]], [[4, 0]]]
