import random

import numpy as np
import pytest
from support.buckets import has_steps, random_bucket_order, random_window_order
from support.mixtures import plan, serve

from lightning_stateful.index.bucket_order import BucketOrder
from lightning_stateful.index.buckets import Buckets
from lightning_stateful.index.budget import Budget, QuadraticCost
from lightning_stateful.index.padding import BudgetedOrder, StepPadding, measure

LENGTHS = np.array([7, 3, 9, 3, 8, 2, 9, 1, 7, 5, 4, 4])


def make_measured(*steps):
    """Steps of (longest, count, tokens) for every rank."""
    longest, counts, tokens = np.moveaxis(np.array(steps, dtype=np.int64), 2, 0)
    return StepPadding(longest=longest, counts=counts, tokens=tokens)


def cases(count, seed):
    rng = random.Random(seed)
    while count:
        order, width = rng.choice([random_bucket_order, random_window_order])(rng), rng.choice([1, 2, 3, 8])
        if has_steps(order, width):
            yield order, width, rng
            count -= 1


def by_hand(steps, lengths):
    found = [[[lengths[sample] for sample in batch] for batch in step] for step in steps]
    return [[[function(batch) for batch in step] for step in found] for function in (max, len, sum)]


def assert_measured(measured, steps, lengths):
    longest, counts, tokens = by_hand(steps, lengths)
    assert measured.longest.tolist() == longest
    assert measured.counts.tolist() == counts
    assert measured.tokens.tolist() == tokens


def test_orders_over_buckets_and_windows_can_be_measured():
    for order, _, _ in cases(10, seed=0):
        assert isinstance(order, BudgetedOrder)


def test_every_batch_is_measured():
    for order, width, rng in cases(30, seed=1):
        position = order.begin(rng.randint(0, 2), width)
        measured = measure(order, order.lengths, position)
        assert_measured(measured, serve(order, position, width), np.asarray(order.lengths).tolist())


def test_some_steps_are_measured():
    for order, width, rng in cases(20, seed=2):
        position = order.begin(0, width)
        first, last = sorted(rng.randint(0, order.steps(position)) for _ in range(2))
        measured = measure(order, order.lengths, position, first, last)
        assert measured.longest.shape == (last - first, width)
        assert_measured(measured, serve(order, position, width)[first:last], np.asarray(order.lengths).tolist())


def test_the_rest_of_an_epoch_is_measured_after_a_change_of_ranks():
    order = BucketOrder(Buckets.of(LENGTHS, max_tokens=20, num_buckets=3))
    position = order.reopen(plan(order, 2).after(order.begin(0, 2), 1), 1)
    measured = measure(order, LENGTHS, position, 1)
    assert_measured(measured, serve(order, position, 1), LENGTHS.tolist())


def test_no_steps_are_measured_as_nothing():
    order = BucketOrder(Buckets.of(LENGTHS, max_tokens=20, num_buckets=3))
    measured = measure(order, LENGTHS, order.begin(0, 2), 1, 1)
    assert measured.longest.shape == (0, 2)
    assert (measured.padding(), measured.straggling(), measured.budget_use(Budget(max_tokens=20))) == (0, 0, 0)


def test_long_epochs_are_measured_part_by_part():
    lengths = np.tile(LENGTHS.astype(np.uint8), 100_000)
    order = BucketOrder(Buckets.of(lengths, batch_size=3, num_buckets=3))
    measured = measure(order, lengths, order.begin(0, 1))
    assert measured.counts.sum() == 1_200_000
    assert measured.tokens.sum() == 100_000 * LENGTHS.sum()
    found = order.batches(order.begin(0, 1), 399_000, 399_001, 0).indices
    assert measured.tokens[399_000, 0] == lengths[found].sum()


def test_short_types_of_lengths_do_not_overflow():
    lengths = np.full(64, 255, dtype=np.uint8)
    order = BucketOrder(Buckets.of(lengths, batch_size=8))
    measured = measure(order, lengths, order.begin(0, 2))
    assert measured.tokens.tolist() == [[2040, 2040]] * 4


def test_padded_tokens_are_the_longest_times_the_count():
    assert make_measured([(5, 3, 11), (4, 2, 8)], [(9, 1, 9), (1, 1, 1)]).padded.tolist() == [[15, 8], [9, 1]]


def test_padding_is_the_share_of_tokens_that_are_none():
    assert make_measured([(5, 3, 12), (5, 2, 8)]).padding() == pytest.approx(5 / 25)
    assert make_measured([(5, 3, 15)]).padding() == 0


def test_samples_without_tokens_have_no_padding():
    measured = make_measured([(0, 3, 0)])
    assert (measured.padding(), measured.straggling()) == (0, 0)


def test_straggling_is_the_share_of_time_in_which_ranks_wait():
    # Ranks take 10 and 6, and then 20 and 20 tokens: of 60 tokens' time, 4 are waited.
    measured = make_measured([(5, 2, 9), (3, 2, 6)], [(10, 2, 20), (5, 4, 18)])
    assert measured.straggling() == pytest.approx(4 / 60)


def test_one_rank_never_waits():
    assert make_measured([(5, 2, 9)], [(3, 2, 6)]).straggling() == 0


def test_equal_steps_have_no_straggling_whatever_their_padding():
    assert make_measured([(5, 2, 9), (5, 2, 6)]).straggling() == 0


def test_the_budget_used_is_that_of_the_average_batch():
    measured = make_measured([(5, 2, 9), (10, 2, 20)], [(4, 5, 12), (5, 1, 5)])
    assert measured.uses(Budget(max_tokens=20)).tolist() == [[0.5, 1.0], [1.0, 0.25]]
    assert measured.budget_use(Budget(max_tokens=20)) == pytest.approx(2.75 / 4)
    assert measured.uses(Budget(batch_size=5)).tolist() == [[0.4, 0.4], [1.0, 0.2]]
    assert measured.uses(Budget(max_tokens=100, cost=QuadraticCost(5))).tolist() == [[0.2, 0.6], [0.36, 0.1]]


def test_no_batch_of_an_order_uses_more_than_its_budget_unless_it_is_alone():
    for order, width, _ in cases(20, seed=3):
        uses = measure(order, order.lengths, order.begin(0, width)).uses(order.budget)
        samples = order.buckets if isinstance(order, BucketOrder) else order.windows
        assert uses.max() <= 1 or samples.num_alone


def test_some_steps_are_chosen():
    measured = make_measured([(5, 2, 9)], [(3, 2, 6)], [(4, 1, 4)])
    chosen = measured.where(np.array([True, False, True]))
    assert (chosen.longest.tolist(), chosen.counts.tolist(), chosen.tokens.tolist()) == (
        [[5], [4]],
        [[2], [1]],
        [[9], [4]],
    )
