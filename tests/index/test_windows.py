import json
import random
from itertools import pairwise

import numpy as np
import pytest
from infinibatch.iterators import BucketedReadaheadBatchIterator, NativeCheckpointableIterator
from support.buckets import is_within, random_window_order, read_ahead

from lightning_stateful.core.permutation import keyed_permutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.budget import QuadraticCost
from lightning_stateful.index.lengths import digest
from lightning_stateful.index.too_long import num_samples
from lightning_stateful.index.windows import Windows

LENGTHS = [3, 9, 9, 4, 12, 10, 3]


def cases(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        yield random_window_order(rng).windows, rng


def in_batches(opened):
    samples = opened.samples.tolist()
    return [samples[start : start + size] for start, size in zip(opened.starts, opened.sizes, strict=True)]


def shuffled(windows, epoch):
    """The order that is cut into windows."""
    places = np.arange(len(windows.samples))
    if not windows.shuffle:
        return windows.samples.in_order(places).tolist()
    classes = keyed_permutation(len(places), derive_seed("order of classes", windows.seed)).take(places)
    return windows.samples.take(classes, windows.seed, epoch).tolist()


def plain(windows):
    """Lengths and keys as lists, and what fits into a batch of a longest sample."""
    keys = None if windows.boundary_key is None else windows.boundary_key.tolist()
    return np.asarray(windows.lengths).tolist(), keys, lambda longest: num_samples(windows.budget, longest)


def test_windows_are_sorted_and_cut_as_reading_ahead_does():
    for windows, rng in cases(30, seed=1):
        lengths, keys, fits = plain(windows)
        epoch = rng.randint(0, 3)
        expected = read_ahead(shuffled(windows, epoch), lengths, keys, windows.window, fits)
        assert len(windows) == len(expected)
        assert in_batches(windows.open(0, len(windows), epoch)) == [batch for batches in expected for batch in batches]


def test_batches_are_those_of_infinibatch_on_the_same_shuffled_order():
    for windows, rng in cases(20, seed=2):
        lengths, keys, fits = plain(windows)
        epoch = rng.randint(0, 3)
        iterator = BucketedReadaheadBatchIterator(
            NativeCheckpointableIterator(shuffled(windows, epoch)),
            read_ahead=windows.window,
            # It sorts from large to small.
            key=lambda sample, lengths=lengths, keys=keys: (0 if keys is None else -keys[sample], lengths[sample]),
            batch_size=lambda sample, lengths=lengths, fits=fits: fits(lengths[sample]),
            boundary_key=None if keys is None else keys.__getitem__,
            shuffle=False,
        )
        assert in_batches(windows.open(0, len(windows), epoch)) == list(iterator)


def test_every_window_is_cut_alike_in_every_epoch():
    for windows, _ in cases(30, seed=3):
        counts = windows.count_batches().tolist()
        sizes = [windows.open(0, len(windows), epoch).sizes.tolist() for epoch in range(4)]
        assert sizes.count(sizes[0]) == 4
        assert counts == [windows.open(window, window + 1, 2).sizes.size for window in range(len(windows))]


def test_every_epoch_serves_each_sample_once():
    for windows, rng in cases(30, seed=4):
        samples = [sample for batch in in_batches(windows.open(0, len(windows), rng.randint(0, 5))) for sample in batch]
        lengths, _, _ = plain(windows)
        served = [sample for sample, length in enumerate(lengths) if length <= windows.values[-1]]
        assert sorted(samples) == served
        assert len(lengths) - len(served) == windows.num_dropped


def test_any_split_into_calls_opens_what_one_call_does():
    for windows, rng in cases(30, seed=5):
        bounds = sorted({0, len(windows), *(rng.randint(0, len(windows)) for _ in range(4))})
        parts = [batch for first, last in pairwise(bounds) for batch in in_batches(windows.open(first, last, 1))]
        assert parts == in_batches(windows.open(0, len(windows), 1))


def test_no_batch_exceeds_its_budget_or_mixes_keys():
    for windows, _ in cases(30, seed=6):
        lengths, keys, _ = plain(windows)
        for batch in in_batches(windows.open(0, len(windows), 1)):
            found = [max(lengths[sample], 1) for sample in batch]
            alone = len(batch) == 1 and windows.num_alone and not windows.budget.num_samples(found[0])
            assert alone or is_within(windows.budget, found)
            assert keys is None or len({keys[sample] for sample in batch}) == 1


def test_a_window_is_filled_anew_in_every_epoch():
    lengths = np.random.default_rng(0).integers(1, 99, 2000)
    windows = Windows.of(lengths, window=200, max_tokens=500)
    first, second = ({frozenset(batch) for batch in in_batches(windows.open(0, 10, epoch))} for epoch in (0, 1))
    assert len(first & second) < 0.05 * len(first)
    filled = [set(windows.open(0, 1, epoch).samples.tolist()) for epoch in (0, 1)]
    assert len(filled[0] & filled[1]) < 60


def test_with_a_batch_size_the_order_is_a_plain_shuffle_without_a_list_of_samples():
    windows = Windows.of(np.arange(1, 101), window=30, batch_size=4)
    assert windows.samples.members is None
    assert windows.count_batches().tolist() == [8, 8, 8, 3]


def test_without_shuffling_windows_hold_the_order_of_the_dataset():
    windows = Windows.of(LENGTHS, window=4, max_tokens=20, shuffle=False)
    expected = [[1, 2], [3, 0], [4], [5, 6]]
    assert in_batches(windows.open(0, 2, 0)) == in_batches(windows.open(0, 2, 7)) == expected
    assert windows.count_batches().tolist() == [2, 2]


def test_dropped_samples_leave_no_gap_in_the_order_of_the_dataset():
    windows = Windows.of(LENGTHS, window=4, max_tokens=9, shuffle=False, too_long="drop")
    assert in_batches(windows.open(0, 2, 0)) == [[1], [2], [3, 0], [6]]
    assert (windows.num_dropped, windows.num_alone) == (2, 0)


def test_samples_that_are_too_long_are_served_alone():
    windows = Windows.of(LENGTHS, window=7, max_tokens=9, shuffle=False, too_long="alone")
    assert in_batches(windows.open(0, 1, 0)) == [[4], [5], [1], [2], [3, 0], [6]]
    assert (windows.num_dropped, windows.num_alone) == (0, 2)


def test_a_window_is_sorted_by_key_before_it_is_by_length():
    windows = Windows.of(LENGTHS, window=7, max_tokens=30, shuffle=False, boundary_key=[8, 5, 8, 5, 8, 5, 8])
    assert in_batches(windows.open(0, 1, 0)) == [[5, 1, 3], [4, 2], [0, 6]]


def test_keys_count_by_their_order_alone():
    first, second = (
        Windows.of(LENGTHS, window=4, max_tokens=30, boundary_key=keys)
        for keys in ([0, 1, 2, 0, 1, 2, 0], [7, 10**12, 10**12 + 1, 7, 10**12, 10**12 + 1, 7])
    )
    assert first.described == second.described
    assert in_batches(first.open(0, 2, 3)) == in_batches(second.open(0, 2, 3))


@pytest.mark.parametrize(("longest", "num_keys"), [(2**20, 5000), (2**33, 3), (2**41, 2000)])
def test_many_keys_and_long_lengths_are_sorted_exactly(longest, num_keys):
    rng = np.random.default_rng(0)
    lengths, keys = rng.integers(longest // 2, longest, 3000), rng.integers(0, num_keys, 3000)
    windows = Windows.of(lengths, window=500, max_tokens=4 * longest, boundary_key=keys)
    plain_lengths, plain_keys, fits = plain(windows)
    expected = read_ahead(shuffled(windows, 1), plain_lengths, plain_keys, 500, fits)
    assert in_batches(windows.open(0, 6, 1)) == [batch for batches in expected for batch in batches]


def test_a_key_for_every_sample_makes_batches_of_one():
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    windows = Windows.of(lengths, window=1000, max_tokens=5000, boundary_key=np.arange(20_000))
    assert windows.count_batches().tolist() == [1000] * 20
    assert len(windows.samples.starts) == 20_001


def test_batches_are_counted_alike_however_many_windows_are_opened_at_once():
    lengths = np.random.default_rng(0).integers(1, 99, 300_000)
    windows = Windows.of(lengths, window=1000, max_tokens=500)
    counts = windows.count_batches()
    assert counts.size == 300
    for window in (0, 261, 262, 263, 299):
        assert counts[window] == windows.open(window, window + 1, 5).sizes.size


def test_a_window_larger_than_the_dataset_is_one_window():
    windows = Windows.of(LENGTHS, window=10**9, max_tokens=20)
    assert len(windows) == 1
    assert windows.open(0, 1, 0).samples.size == 7


def test_a_window_of_one_makes_batches_of_one():
    windows = Windows.of(LENGTHS, window=1, max_tokens=24)
    assert windows.open(0, 7, 0).sizes.tolist() == [1] * 7


def test_a_million_samples_are_cut_into_windows_without_a_copy_of_their_lengths():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 10**6).astype(np.uint16) + 1, 4096)
    windows = Windows.of(lengths, window=100_000, max_tokens=16_384)
    assert np.shares_memory(windows.lengths, lengths)
    assert windows.samples.members.nbytes == 4 * 10**6
    opened = windows.open(3, 5, 0)
    assert opened.samples.size == np.unique(opened.samples).size == opened.sizes.sum() == 200_000


def test_what_was_asked_for_is_described_in_plain_data():
    windows = Windows.of(LENGTHS, window=np.int64(4), max_tokens=900, cost=QuadraticCost(2), boundary_key=[5] * 7)
    assert json.loads(json.dumps(windows.described)) == {
        "max_tokens": 900,
        "quadratic_length": 2,
        "window": 4,
        "too_long": "error",
        "boundary_key": digest(np.zeros(7, dtype=np.int64)),
        "lengths": {"samples": 7, "digest": digest(np.array(LENGTHS))},
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 0, "max_tokens": 20}, "window must be at least 1, got 0"),
        ({"window": 2.5, "max_tokens": 20}, r"window must be an integer, got 2\.5"),
        ({"window": 4}, "either max_tokens or batch_size"),
        ({"window": 4, "max_tokens": 9}, "2 of 7 samples are longer"),
        ({"window": 4, "max_tokens": 20, "boundary_key": [1, 2]}, "boundary_key has 2 keys for 7 samples"),
        ({"window": 4, "max_tokens": 20, "boundary_key": [0.5] * 7}, "boundary_key must be integers, got float64"),
        ({"window": 4, "max_tokens": 20, "boundary_key": [-1] * 7}, "boundary_key must not be negative"),
        ({"window": 4, "batch_size": [4, 2]}, "batch_size must be an integer"),
    ],
)
def test_arguments_out_of_range_are_refused_with_their_values(options, said):
    with pytest.raises(ConfigurationError, match=said):
        Windows.of(LENGTHS, **options)
