import dataclasses
import json
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from support.buckets import has_steps, is_within, random_window_order
from support.mixtures import plan, samples_of, serve

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.index.window_order import WindowOrder
from lightning_stateful.index.windows import Windows

WIDTHS = [1, 1, 2, 2, 3, 4, 5, 7, 8, 13, 33, 64]
LENGTHS = [7, 3, 9, 3, 8, 2, 9, 1, 7, 5, 4, 4]


def cases(count, seed, widths=WIDTHS, **fixed):
    """Random orders, each with a number of ranks for which an epoch has a step."""
    rng = random.Random(seed)
    while count:
        order, width = random_window_order(rng, **fixed), rng.choice(widths)
        if has_steps(order, width):
            yield order, width, rng
            count -= 1


def make(lengths=LENGTHS, *, shuffle_batches=True, drop_last=False, **options):
    return WindowOrder(Windows.of(lengths, **options), shuffle_batches=shuffle_batches, drop_last=drop_last)


def cut(order, epoch):
    """All batches of an epoch as the windows have them, each with its window."""
    windows, found = order.windows, []
    for window in range(len(windows)):
        opened = windows.open(window, window + 1, epoch)
        parts = np.split(opened.samples, opened.starts[1:])
        found += [(window, part.tolist()) for part in parts]
    return found


def num_repeated(order, width):
    said = order.repeats(width)
    return int(said[0].split()[0]) if said else 0


def test_it_is_a_batch_order():
    order = make(max_tokens=20, window=5)
    assert isinstance(order, BatchOrder)
    assert (order.kind, order.carries_over) == ("windows", False)


def test_every_sample_is_served_once_apart_from_repeats_in_the_last_step():
    for order, width, rng in cases(40, seed=1, drop_last=False):
        steps = serve(order, order.begin(rng.randint(0, 3), width), width)
        times = Counter(samples_of(steps))
        assert set(times) == {sample for _, batch in cut(order, 0) for sample in batch}
        assert set(Counter(samples_of(steps[:-1])).values()) <= {1}
        assert times.total() - len(times) == num_repeated(order, width) < width


def test_all_steps_but_the_last_serve_batches_of_the_windows():
    for order, width, rng in cases(30, seed=2):
        epoch = rng.randint(0, 3)
        batches = [batch for _, batch in cut(order, epoch)]
        steps = serve(order, order.begin(epoch, width), width)
        assert len(steps) == (len(batches) // width if order.drop_last else -(-len(batches) // width))
        full = [batch for step in steps[: len(batches) // width] for batch in step]
        assert all(batch in batches for batch in full)
        assert len({tuple(batch) for batch in full}) == len(full)


def test_the_last_step_deals_out_parts_of_the_batches_that_are_left():
    for order, width, _ in cases(40, seed=3, drop_last=False):
        steps, batches = serve(order, order.begin(0, width), width), [set(batch) for _, batch in cut(order, 0)]
        for batch in steps[-1]:
            assert batch
            assert any(whole.issuperset(batch) for whole in batches)


def test_no_batch_exceeds_its_budget_but_of_samples_that_are_alone():
    for order, width, _ in cases(30, seed=4):
        lengths = np.asarray(order.lengths).tolist()
        for batch in (batch for step in serve(order, order.begin(1, width), width) for batch in step):
            found = [max(lengths[sample], 1) for sample in batch]
            alone = len(batch) == 1 and order.windows.num_alone and not order.budget.num_samples(found[0])
            assert alone or is_within(order.budget, found)


def test_every_rank_takes_the_same_number_of_steps_in_every_epoch():
    for order, width, rng in cases(30, seed=5, widths=range(1, 65)):
        count = plan(order, width).num_batches()
        for epoch in {0, 1, rng.randint(2, 9)}:
            position = order.begin(epoch, width)
            assert order.steps(position) == count
            for rank in {0, width // 2, width - 1}:
                found = order.batches(position, 0, count, rank)
                assert found.sizes.size == count
                assert found.sizes.min() > 0
                assert found.sizes.sum() == found.indices.size == found.passes.size


def test_without_shuffling_batches_ranks_take_them_in_turn():
    for order, width, rng in cases(30, seed=6, shuffle_batches=False):
        epoch = rng.randint(0, 3)
        batches = [batch for _, batch in cut(order, epoch)]
        served = [batch for step in serve(order, order.begin(epoch, width), width) for batch in step]
        full = len(batches) // width * width
        assert served[:full] == batches[:full]


def test_shuffled_batches_stay_in_their_windows_and_in_groups_of_neighbours():
    for order, width, rng in cases(30, seed=7, shuffle_batches=True):
        epoch = rng.randint(0, 3)
        batches = cut(order, epoch)
        groups = [batches[start : start + width] for start in range(0, len(batches), width)]
        steps = serve(order, order.begin(epoch, width), width)
        for number, step in enumerate(steps[: len(batches) // width]):
            group = next(group for group in groups if group[0][1] == step[0])
            assert [batch for _, batch in group] == step
            windows = {window for window, _ in group}
            # Groups that lie in two windows keep their place.
            assert groups.index(group) == number if len(windows) > 1 else {w for w, _ in groups[number]} == windows


def test_batches_of_a_window_are_shuffled():
    lengths = np.random.default_rng(0).integers(1, 99, 2000)
    order = make(lengths, max_tokens=400, window=1000)
    sizes = [[len(batch) for step in serve(order, order.begin(epoch, 2), 2) for batch in step] for epoch in (0, 1)]
    half = int(order.slots[1])
    assert sizes[0] != sizes[1]
    assert Counter(sizes[0]) == Counter(sizes[1])
    assert abs(np.corrcoef(sizes[0][:half], np.arange(half))[0, 1]) < 0.3


def test_slots_count_the_batches_before_each_window():
    for order, _, _ in cases(20, seed=8):
        counts = Counter(window for window, _ in cut(order, 2))
        assert np.diff(order.slots).tolist() == [counts[window] for window in range(len(order.windows))]
        assert order.slots[0] == 0


def test_any_split_into_calls_gives_what_one_call_gives():
    for order, width, rng in cases(20, seed=9):
        position, rank = order.begin(rng.randint(0, 2), width), rng.randrange(width)
        count = order.steps(position)
        whole = order.batches(position, 0, count, rank)
        bounds = sorted({0, count, *(rng.randint(0, count) for _ in range(5))})
        fresh = dataclasses.replace(order)
        parts = [fresh.batches(position, first, last, rank) for first, last in pairwise(bounds)]
        for column in ("indices", "sizes", "passes"):
            assert np.array_equal(np.concatenate([getattr(part, column) for part in parts]), getattr(whole, column))


def test_no_steps_have_no_batches():
    order = make(max_tokens=20, window=5)
    found = order.batches(order.begin(0, 2), 1, 1, 0)
    assert (found.indices.size, found.sizes.size) == (0, 0)


def test_every_seed_has_its_own_sequence():
    orders = [make(range(1, 60), max_tokens=99, window=20, seed=seed) for seed in range(8)]
    assert len({json.dumps(serve(order, order.begin(0, 1), 1)) for order in orders}) == 8


def test_unshuffling_keeps_windows_of_the_order_of_the_dataset():
    order = make(max_tokens=20, window=6, seed=4)
    shuffled = serve(order, order.begin(0, 1), 1)
    still = order.unshuffled()
    expected = [[[2, 4]], [[0, 1]], [[3, 5]], [[6, 8]], [[9, 10, 11, 7]]]
    assert serve(still, still.begin(0, 1), 1) == serve(still, still.begin(3, 1), 1) == expected
    assert serve(order, order.begin(0, 1), 1) == shuffled


def test_a_report_counts_the_samples_served():
    for order, width, rng in cases(20, seed=10, drop_last=False):
        begin = order.begin(rng.randint(0, 2), width)
        steps, done = serve(order, begin, width), rng.randint(0, order.steps(begin))
        position = plan(order, width).after(begin, done)
        assert order.report(position) == {"samples": len(set(samples_of(steps[:done])))}


def test_repeats_are_told_in_words():
    assert make([5, 5, 5], batch_size=2, window=9).repeats(4) == ["1 of 3 samples are served twice in every epoch"]
    assert make([5, 5, 5], batch_size=2, window=9).repeats(3) == []
    assert make([5, 5, 5], batch_size=2, window=9, drop_last=True).repeats(2) == []


def test_an_epoch_without_a_step_is_refused():
    order = make([5, 5, 5], batch_size=2, window=9, drop_last=True)
    with pytest.raises(ConfigurationError, match=r"With drop_last=True and 3 ranks, an epoch of 3 samples.*full step"):
        plan(order, 3).num_batches()


def test_the_work_for_a_batch_is_that_of_the_batches_of_all_ranks():
    assert make([5] * 100, max_tokens=50, window=50).work(4) == 40


def test_a_description_tells_how_batches_are_shuffled():
    order = make(max_tokens=20, window=5, seed=4, drop_last=True)
    options = {"shuffle": True, "shuffle_batches": True, "seed": 4, "drop_last": True}
    assert json.loads(json.dumps(order.describe())) == {**order.windows.described, **options}


def test_an_order_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(max_tokens=20, window=5).drop_last = True


def test_lengths_up_to_2_to_the_41_are_served():
    lengths = [2**41 - number for number in range(10)] + [5] * 10
    order = make(lengths, max_tokens=3 * 2**41, window=12)
    steps = serve(order, order.begin(0, 2), 2)
    assert sorted(samples_of(steps)) == list(range(20))


def test_a_million_samples_are_served_once():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 10**6).astype(np.uint16) + 1, 4096)
    order = make(lengths, max_tokens=16_384, window=100_000)
    position = order.begin(1, 2)
    count, times = order.steps(position), np.zeros(10**6, dtype=np.int64)
    for rank in range(2):
        times += np.bincount(order.batches(position, 0, count, rank).indices, minlength=10**6)
    assert (times.min(), times.max()) == (1, 1)


def test_golden_by_tokens():
    order = make(max_tokens=20, window=7, seed=3)
    expected = [[[2, 6], [10, 11, 3, 5, 7]], [[4, 0], [8, 9]], [[1], [1]]]
    assert (order.order_version, serve(order, order.begin(1, 2), 2)) == (1, expected)


def test_golden_by_batch_size_and_key():
    order = make(batch_size=2, window=12, boundary_key=[0, 1] * 6, seed=3)
    expected = [[[3, 1]], [[4, 0]], [[9, 11]], [[6, 2]], [[8, 10]], [[5, 7]]]
    assert (order.order_version, serve(order, order.begin(0, 1), 1)) == (1, expected)


def test_golden_after_a_change_of_ranks():
    order = make(max_tokens=12, window=6, seed=3)
    position = order.reopen(plan(order, 2).after(order.begin(1, 2), 1), 3)
    expected = [[[10, 11, 3], [5], [8]], [[9, 1], [4], [0]], [[7], [7], [7]]]
    assert (order.order_version, serve(order, position, 3)) == (1, expected)
