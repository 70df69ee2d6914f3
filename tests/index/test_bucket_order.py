import dataclasses
import json
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from support.buckets import has_steps, is_within, random_bucket_order
from support.mixtures import plan, samples_of, serve

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.bucket_order import BucketOrder
from lightning_stateful.index.buckets import Buckets
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder

WIDTHS = [1, 1, 2, 2, 3, 4, 5, 7, 8, 13, 33, 64]
LENGTHS = [7, 3, 9, 3, 8, 2, 9, 1, 7, 5, 4, 4]


def cases(count, seed, widths=WIDTHS, **fixed):
    """Random orders, each with a number of ranks."""
    rng = random.Random(seed)
    while count:
        order, width = random_bucket_order(rng, **fixed), rng.choice(widths)
        if has_steps(order, width):
            yield order, width, rng
            count -= 1


def make(lengths=LENGTHS, *, seed=0, shuffle=True, drop_last=False, **options):
    return BucketOrder(Buckets.of(lengths, **options), seed=seed, shuffle=shuffle, drop_last=drop_last)


def num_repeated(order, width):
    said = order.repeats(width)
    return int(said[0].split()[0]) if said else 0


def served_samples(order):
    return set(order.buckets.samples.take(np.arange(len(order.buckets.samples)), None, 0).tolist())


def test_it_is_a_batch_order():
    assert isinstance(make(max_tokens=20), BatchOrder)
    assert (make(max_tokens=20).kind, make(max_tokens=20).carries_over) == ("buckets", False)


def test_every_sample_is_served_once_apart_from_repeats_in_the_last_step():
    for order, width, rng in cases(50, seed=1, drop_last=False):
        steps = serve(order, order.begin(rng.randint(0, 3), width), width)
        times = Counter(samples_of(steps))
        assert set(times) == served_samples(order)
        assert set(Counter(samples_of(steps[:-1])).values()) <= {1}
        assert times.total() - len(times) == num_repeated(order, width) < width


def test_repeats_come_only_where_the_step_before_cannot_give():
    for order, width, _ in cases(50, seed=2, drop_last=False):
        if num_repeated(order, width):
            steps = serve(order, order.begin(0, width), width)
            assert len(set(samples_of(steps[-1:]))) < width
            assert len(steps) == 1 or len(samples_of(steps[-2:-1])) < 2 * width


def test_no_batch_exceeds_its_budget_but_of_samples_that_are_alone():
    for order, width, _ in cases(50, seed=3):
        lengths = np.asarray(order.lengths).tolist()
        for batch in (batch for step in serve(order, order.begin(1, width), width) for batch in step):
            found = [lengths[sample] for sample in batch]
            assert is_within(order.budget, [max(length, 1) for length in found]) or (
                len(batch) == 1 and order.buckets.num_alone and not order.budget.num_samples(found[0])
            )


def test_full_steps_have_one_size_on_all_ranks_which_is_what_the_longest_allows():
    for order, width, _ in cases(50, seed=4):
        steps, lengths = serve(order, order.begin(2, width), width), np.asarray(order.lengths).tolist()
        size_of = dict(zip(order.buckets.ends, order.buckets.sizes, strict=True))
        last_full = steps[:-1] if order.drop_last or not steps else steps[:-2]
        for step in last_full:
            longest = max(lengths[sample] for batch in step for sample in batch)
            bucket = min(end for end in order.buckets.ends if end >= longest)
            assert {len(batch) for batch in step} == {size_of[bucket]}


def test_the_step_before_the_last_gives_fewer_samples_than_there_are_ranks():
    given = 0
    for order, width, _ in cases(100, seed=5, drop_last=False):
        steps = serve(order, order.begin(0, width), width)
        if len(steps) > 1 and len({len(batch) for batch in steps[-2]}) > 1:
            given += 1
            assert {len(batch) for batch in steps[-1]} == {1}
            largest = max(map(len, steps[-2]))
            assert 0 < largest * width - len(samples_of([steps[-2]])) < width
    assert given > 5


def test_with_drop_last_all_steps_are_full_and_as_many_as_go():
    for order, width, _ in cases(50, seed=6, drop_last=True):
        steps = serve(order, order.begin(0, width), width)
        assert all(len({len(batch) for batch in step}) == 1 for step in steps)
        assert set(Counter(samples_of(steps)).values()) <= {1}
        kept = dataclasses.replace(order, drop_last=False)
        whole = serve(kept, kept.begin(0, width), width)
        assert len(whole) - 1 <= len(steps) <= len(whole)
        assert num_repeated(order, width) == 0


def test_every_rank_takes_the_same_number_of_steps_in_every_epoch():
    for order, width, rng in cases(50, seed=7, widths=range(1, 65)):
        count = plan(order, width).num_batches()
        for epoch in {0, 1, rng.randint(2, 9)}:
            position = order.begin(epoch, width)
            assert order.steps(position) == count
            for rank in {0, width // 2, width - 1}:
                found = order.batches(position, 0, count, rank)
                assert found.sizes.size == count
                assert found.sizes.sum() == found.indices.size == found.passes.size


def test_the_number_of_steps_follows_neither_seed_nor_shuffling():
    for order, width, _ in cases(20, seed=8):
        others = [dataclasses.replace(order, **change) for change in ({"seed": 123}, {"shuffle": False})]
        assert {other.steps(other.begin(3, width)) for other in others} == {order.steps(order.begin(0, width))}


def test_any_split_into_calls_gives_what_one_call_gives():
    for order, width, rng in cases(30, seed=9):
        position, rank = order.begin(rng.randint(0, 2), width), rng.randrange(width)
        count = order.steps(position)
        whole = order.batches(position, 0, count, rank)
        cuts = sorted({0, count, *(rng.randint(0, count) for _ in range(5))})
        fresh = dataclasses.replace(order)
        parts = [fresh.batches(position, first, last, rank) for first, last in pairwise(cuts)]
        for column in ("indices", "sizes", "passes"):
            assert np.array_equal(np.concatenate([getattr(part, column) for part in parts]), getattr(whole, column))


def test_every_step_asked_alone_and_backwards_is_that_of_the_epoch():
    order = make(np.random.default_rng(0).integers(1, 99, 500), max_tokens=400, num_buckets=6)
    position = order.begin(4, 3)
    steps = serve(order, position, 3)
    for step in reversed(range(order.steps(position))):
        for rank in range(3):
            assert order.batches(position, step, step + 1, rank).indices.tolist() == steps[step][rank]


def test_no_steps_have_no_batches():
    found = make(max_tokens=20).batches(Position(width=2), 1, 1, 0)
    assert (found.indices.size, found.sizes.size) == (0, 0)


def test_from_epoch_to_epoch_other_samples_meet_and_batches_come_in_another_order():
    order = make(np.random.default_rng(0).integers(1, 99, 2000), max_tokens=800, num_buckets=8)
    epochs = [serve(order, order.begin(epoch, 2), 2) for epoch in range(3)]
    pairs = [{frozenset(pair) for step in steps for batch in step for pair in pairwise(batch)} for steps in epochs]
    for first, second in [(0, 1), (0, 2), (1, 2)]:
        assert len(pairs[first] & pairs[second]) < 0.1 * len(pairs[first])
        sizes = [[len(step[0]) for step in epochs[epoch]] for epoch in (first, second)]
        assert Counter(sizes[0]) == Counter(sizes[1])
        assert sizes[0] != sizes[1]


def test_batches_are_not_sorted_by_length():
    order = make(np.random.default_rng(0).integers(1, 99, 2000), max_tokens=800, num_buckets=8)
    sizes = np.array([len(step[0]) for step in serve(order, order.begin(0, 1), 1)])
    assert abs(np.corrcoef(sizes, np.arange(sizes.size))[0, 1]) < 0.2


def test_every_seed_has_its_own_sequence():
    lengths = list(range(1, 60))
    found = {
        json.dumps(serve(order, order.begin(0, 1), 1))
        for order in (make(lengths, max_tokens=99, seed=s) for s in range(8))
    }
    assert len(found) == 8


def test_unshuffled_the_longest_bucket_comes_first_each_in_the_order_of_the_dataset():
    order = make(boundaries=[4], batch_size=3, shuffle=False)
    assert serve(order, order.begin(0, 1), 1) == [[[0, 2, 4]], [[6, 8, 9]], [[1, 3, 5]], [[7, 10, 11]]]
    assert serve(order, order.begin(5, 1), 1) == serve(order, order.begin(0, 1), 1)


def test_unshuffling_keeps_the_samples_and_forgets_the_order():
    order = make(boundaries=[4], batch_size=3, seed=4)
    shuffled = serve(order, order.begin(0, 2), 2)
    still = order.unshuffled()
    assert serve(still, still.begin(1, 2), 2) == [[[0, 4, 8], [2, 6, 9]], [[1, 5, 10], [3, 7, 11]]]
    assert serve(order, order.begin(0, 2), 2) == shuffled


def test_many_epochs_and_widths_asked_in_turn_give_the_same_answers():
    order = make(list(range(1, 60)), max_tokens=120, num_buckets=4)
    keys = [(epoch, width) for epoch in range(4) for width in (1, 2, 3)]
    expected = {key: serve(dataclasses.replace(order), order.begin(*key), key[1]) for key in keys}
    random.Random(0).shuffle(keys)
    assert all(serve(order, order.begin(*key), key[1]) == expected[key] for key in keys)


def test_a_report_counts_the_samples_served():
    for order, width, rng in cases(20, seed=10, drop_last=False):
        begin = order.begin(rng.randint(0, 2), width)
        steps, done = serve(order, begin, width), rng.randint(0, order.steps(begin))
        position = plan(order, width).after(begin, done)
        assert order.report(position) == {"samples": len(set(samples_of(steps[:done])))}


def test_repeats_are_told_in_words():
    assert make([5, 5, 5], batch_size=2).repeats(4) == ["1 of 3 samples are served twice in every epoch"]
    assert make([5, 5, 5], batch_size=2).repeats(3) == []
    assert make([5, 5, 5], batch_size=2, drop_last=True).repeats(1) == []


def test_an_epoch_without_a_step_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"With drop_last=True and 4 ranks, an epoch of 3 samples.*no full step"
    ):
        plan(make([5, 5, 5], batch_size=2, drop_last=True), 4).num_batches()


def test_the_work_for_a_batch_is_its_mean_number_of_samples():
    assert make([5] * 100, max_tokens=50).work(4) == 10
    assert make([5], max_tokens=50).work(4) == 1


def test_a_description_tells_seed_shuffling_and_dropping_beside_what_was_asked_for():
    order = make(max_tokens=20, seed=4, drop_last=True)
    expected = {**order.buckets.described, "shuffle": True, "seed": 4, "drop_last": True}
    assert json.loads(json.dumps(order.describe())) == expected


def test_an_order_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(max_tokens=20).seed = 3


def test_equal_arguments_give_one_sequence_whatever_the_type_of_the_lengths():
    made = [make(np.array(LENGTHS, dtype=dtype), max_tokens=20) for dtype in (np.uint8, np.int64, ">i4")]
    assert len({json.dumps(serve(order, order.begin(1, 2), 2)) for order in made}) == 1
    assert len({json.dumps(order.describe()) for order in made}) == 1


def test_lengths_up_to_2_to_the_41_are_served():
    lengths = [2**41 - number for number in range(10)] + [5] * 10
    order = make(lengths, max_tokens=3 * 2**41, num_buckets=2)
    steps = serve(order, order.begin(0, 2), 2)
    assert sorted(samples_of(steps)) == list(range(20))
    assert max(len(batch) for step in steps for batch in step if min(batch) < 10) == 3


def test_a_million_samples_are_served_once():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 10**6).astype(np.uint16) + 1, 4096)
    order = make(lengths, max_tokens=16384)
    position = order.begin(1, 8)
    count, times = order.steps(position), np.zeros(10**6, dtype=np.int64)
    for rank in range(8):
        found = order.batches(position, 0, count, rank)
        times += np.bincount(found.indices, minlength=10**6)
        longest = np.maximum.reduceat(lengths[found.indices].astype(np.int64), np.cumsum(found.sizes) - found.sizes)
        assert int((longest * found.sizes).max()) <= 16384
    assert (times.min(), times.max()) == (1, 1)


def test_golden_by_tokens():
    order = make(max_tokens=20, num_buckets=3, seed=3)
    expected = [[[8, 3], [9, 7]], [[4, 6], [2, 0]], [[5, 1], [10, 11]]]
    assert (order.order_version, serve(order, order.begin(1, 2), 2)) == (1, expected)


def test_golden_by_batch_size():
    order = make(batch_size=2, num_buckets=3, seed=3)
    expected = [[[5, 7]], [[3, 11]], [[4, 6]], [[8, 9]], [[10, 1]], [[2, 0]]]
    assert (order.order_version, serve(order, order.begin(0, 1), 1)) == (1, expected)


def test_golden_after_a_change_of_ranks():
    order = make(max_tokens=20, num_buckets=3, seed=3)
    position = order.reopen(plan(order, 2).after(order.begin(1, 2), 1), 1)
    expected = [[[6, 0]], [[4, 2]], [[5, 10, 1, 11]]]
    assert (order.order_version, serve(order, position, 1)) == (1, expected)
