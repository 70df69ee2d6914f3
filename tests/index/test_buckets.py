import json
import random
from collections import Counter

import numpy as np
import pytest
from support.buckets import padded_tokens, random_bucket_order

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.buckets import NUM_BUCKETS, Buckets, default_num_buckets
from lightning_stateful.index.budget import Budget, QuadraticCost
from lightning_stateful.index.lengths import digest, histogram

LENGTHS = [3, 9, 9, 4, 12, 10, 3]


def cases(count, seed, **fixed):
    rng = random.Random(seed)
    for _ in range(count):
        yield random_bucket_order(rng, **fixed).buckets


def by_bucket(buckets):
    """The samples of each bucket, the longest bucket first."""
    samples = buckets.samples.take(np.arange(len(buckets.samples)), None, 0)
    return [part.tolist() for part in np.split(samples, buckets.samples.starts[1:-1])]


def test_every_sample_that_fits_is_in_one_bucket():
    for buckets in cases(50, seed=1):
        samples = [sample for bucket in by_bucket(buckets) for sample in bucket]
        assert len(samples) == len(set(samples)) == len(buckets.lengths) - buckets.num_dropped


def test_the_longest_bucket_comes_first_and_each_ends_at_its_longest_sample():
    for buckets in cases(50, seed=2):
        assert list(buckets.ends) == sorted(set(buckets.ends), reverse=True)
        for end, below, samples in zip(buckets.ends, [*buckets.ends[1:], -1], by_bucket(buckets), strict=True):
            lengths = [int(buckets.lengths[sample]) for sample in samples]
            assert all(below < length <= end for length in lengths)
            assert not lengths or max(lengths) == end


def test_a_full_batch_of_a_bucket_is_what_its_longest_sample_allows():
    for buckets in cases(50, seed=3):
        assert buckets.sizes == tuple(max(buckets.budget.num_samples(end), 1) for end in buckets.ends)
        assert list(buckets.sizes) == sorted(buckets.sizes)


def test_samples_that_are_too_long_are_counted_and_share_no_bucket_with_others():
    for buckets in cases(60, seed=5):
        lengths, budget = np.asarray(buckets.lengths).tolist(), buckets.budget
        too_long = {sample for sample, length in enumerate(lengths) if not budget.num_samples(length)}
        assert buckets.num_dropped + buckets.num_alone == len(too_long)
        for samples in by_bucket(buckets):
            with_tokens = {sample for sample in samples if lengths[sample]}
            assert too_long.isdisjoint(with_tokens) or too_long.issuperset(with_tokens)
        if buckets.num_dropped:
            assert too_long.isdisjoint(sample for samples in by_bucket(buckets) for sample in samples)


def test_dropped_samples_are_in_no_bucket():
    buckets = Buckets.of(LENGTHS, max_tokens=9, too_long="drop", num_buckets=2)
    assert sorted(sample for samples in by_bucket(buckets) for sample in samples) == [0, 1, 2, 3, 6]
    assert (buckets.num_dropped, buckets.num_alone) == (2, 0)


def test_samples_to_be_served_alone_have_buckets_of_batches_of_one():
    buckets = Buckets.of(LENGTHS, max_tokens=18, too_long="alone", num_buckets=1)
    assert (buckets.ends, buckets.sizes, buckets.num_alone) == ((12,), (1,), 0)
    buckets = Buckets.of(LENGTHS, max_tokens=9, too_long="alone", num_buckets=1)
    assert (buckets.ends, buckets.sizes, buckets.num_alone) == ((12, 9), (1, 1), 2)
    assert by_bucket(buckets) == [[4, 5], [0, 1, 2, 3, 6]]


def test_all_samples_may_be_too_long():
    buckets = Buckets.of(LENGTHS, max_tokens=2, too_long="alone")
    assert (buckets.num_alone, set(buckets.sizes)) == (7, {1})


def test_boundaries_are_given_or_chosen():
    assert Buckets.of(LENGTHS, max_tokens=24, boundaries=[4, 9]).ends == (12, 9, 4)
    assert Buckets.of(LENGTHS, max_tokens=24, num_buckets=2).ends == (12, 4)
    assert Buckets.of(LENGTHS, max_tokens=24, num_buckets=3, boundaries="equal_counts").ends == (12, 9, 3)


def test_a_bucket_ends_at_its_longest_sample_wherever_its_boundary_lies():
    buckets = Buckets.of(LENGTHS, max_tokens=24, boundaries=[6, 11, 40])
    assert (buckets.ends, buckets.sizes) == ((12, 10, 4), (2, 2, 6))


def test_a_bucket_without_samples_keeps_its_boundary():
    buckets = Buckets.of(LENGTHS, max_tokens=24, boundaries=[1, 4, 8, 40, 90])
    assert (buckets.ends, buckets.sizes) == ((90, 12, 8, 4, 1), (1, 2, 3, 6, 24))
    assert np.diff(buckets.samples.starts).tolist() == [0, 4, 0, 3, 0]


def test_buckets_may_have_batch_sizes_of_their_own_shortest_first():
    buckets = Buckets.of(LENGTHS, batch_size=[8, 4, 2], boundaries=[4, 9])
    assert (buckets.ends, buckets.sizes) == ((12, 9, 4), (2, 4, 8))
    assert Buckets.of(LENGTHS, batch_size=np.array([8, 2]), boundaries=[9]).sizes == (2, 8)


def test_batch_sizes_of_buckets_have_the_multiple_that_was_asked_for():
    assert Buckets.of(LENGTHS, batch_size=[10, 6, 3], boundaries=[3, 9], multiple=4).sizes == (3, 4, 8)


def test_a_bucket_has_its_own_batch_size_wherever_its_boundary_lies():
    buckets = Buckets.of(LENGTHS, batch_size=[9, 7, 5, 3], boundaries=[2, 8, 11, 40])
    assert (buckets.ends, buckets.sizes) == ((12, 10, 4, 2), (3, 5, 7, 9))


def test_a_million_short_and_some_long_lengths_have_128_buckets():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 10**6).astype(np.uint16) + 1, 4096)
    buckets = Buckets.of(lengths, max_tokens=8192)
    assert len(buckets.ends) == NUM_BUCKETS == 128
    assert np.shares_memory(buckets.lengths, lengths)
    assert Counter(np.bincount(buckets.samples.members).tolist()) == {1: 10**6}
    assert buckets.samples.members.nbytes == 4 * 10**6


def test_least_padding_pads_less_than_equal_counts():
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, 5000).astype(int) + 1, 500)
    counted = histogram(lengths)
    padded = [
        padded_tokens(
            counted.values.tolist(),
            counted.counts.tolist(),
            Buckets.of(lengths, max_tokens=2000, num_buckets=10, boundaries=boundaries).ends,
        )
        for boundaries in ("least_padding", "equal_counts")
    ]
    assert padded[0] < 0.95 * padded[1]


def test_by_default_a_bucket_has_4_batches_on_average():
    counted = histogram(np.full(1000, 5))
    assert default_num_buckets(counted, Budget(max_tokens=100)) == 12
    assert default_num_buckets(counted, Budget(batch_size=10)) == 25
    assert default_num_buckets(counted, Budget(max_tokens=10**6)) == 1
    assert default_num_buckets(counted, Budget(batch_size=2)) == 125
    assert default_num_buckets(counted, Budget(max_tokens=5)) == 128


def test_lengths_go_up_to_2_to_the_41():
    lengths = np.array([2**41, 2**41 - 1, 5, 2**20, 2**41])
    buckets = Buckets.of(lengths, max_tokens=2**42, num_buckets=2)
    assert (buckets.ends, buckets.sizes) == ((2**41, 2**20), (2, 2**22))
    assert by_bucket(buckets) == [[0, 1, 4], [2, 3]]


def test_lengths_are_not_copied_from_a_memory_mapped_file(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype=np.uint16))
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    assert np.shares_memory(Buckets.of(mapped, max_tokens=24).lengths, mapped)


def test_samples_without_tokens_are_in_the_shortest_bucket():
    buckets = Buckets.of([0, 7, 0, 8], max_tokens=16, boundaries=[1, 8])
    assert by_bucket(buckets) == [[1, 3], [0, 2]]
    assert buckets.sizes == (2, 16)


def test_what_was_asked_for_is_described_in_plain_data():
    asked = {"max_tokens": 600, "max_samples": 9, "multiple": 2, "cost": QuadraticCost(3)}
    buckets = Buckets.of(LENGTHS, **asked, num_buckets=np.int64(2), too_long="drop")
    assert json.loads(json.dumps(buckets.described)) == {
        "max_tokens": 600,
        "max_samples": 9,
        "multiple": 2,
        "quadratic_length": 3,
        "boundaries": "least_padding",
        "num_buckets": 2,
        "too_long": "drop",
        "lengths": {"samples": 7, "digest": digest(np.array(LENGTHS))},
    }


def test_whatever_changes_batches_changes_the_description():
    others = [
        {"max_tokens": 24},
        {"max_tokens": 25},
        {"max_tokens": 24, "num_buckets": 2},
        {"max_tokens": 24, "num_buckets": 2, "boundaries": "equal_counts"},
        {"max_tokens": 24, "boundaries": [4, 12]},
        {"max_tokens": 24, "boundaries": [9, 12]},
        {"max_tokens": 24, "too_long": "drop"},
        {"batch_size": 8},
        {"batch_size": [8, 4], "boundaries": [9]},
        {"batch_size": [8, 5], "boundaries": [9]},
    ]
    found = {json.dumps(Buckets.of(LENGTHS, **options).described) for options in others}
    assert len(found) == len(others)
    assert json.dumps(Buckets.of(LENGTHS[::-1], max_tokens=24).described) not in found


def test_given_boundaries_are_described_alike_with_the_longest_or_without():
    first, second = (Buckets.of(LENGTHS, max_tokens=24, boundaries=ends).described for ends in ([4, 9], [4, 9, 12]))
    assert first == second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either max_tokens or batch_size"),
        ({"max_tokens": 24, "boundaries": [4], "num_buckets": 2}, "leave num_buckets out"),
        ({"max_tokens": 24, "boundaries": "best"}, r"one of \('least_padding', 'equal_counts'\), got 'best'"),
        ({"max_tokens": 24, "num_buckets": 0}, "num_buckets must be at least 1, got 0"),
        ({"max_tokens": 24, "num_buckets": 1.5}, r"num_buckets must be an integer, got 1\.5"),
        ({"max_tokens": 24, "boundaries": [4, 4]}, "positive and rising"),
        ({"max_tokens": 9}, "2 of 7 samples are longer than max_tokens=9"),
        ({"batch_size": [4, 2], "boundaries": [4, 9]}, r"names 2 buckets, and there are 3.*4, 9, 12"),
        ({"batch_size": [2, 4], "boundaries": [9]}, "must not grow with the length.*2, 4"),
        ({"batch_size": [4, 0], "boundaries": [9]}, "batch_size must be at least 1, got 0"),
        ({"batch_size": [], "boundaries": [9]}, "batch_size names 0 buckets, and there are 2"),
        ({"batch_size": [4, 2]}, "belong to given boundaries"),
        ({"batch_size": [4, 2.5], "boundaries": [9]}, r"batch_size must be an integer, got 2\.5"),
        ({"batch_size": 4, "too_long": "cut"}, "too_long must be one of"),
    ],
)
def test_arguments_out_of_range_are_refused_with_their_values(options, said):
    with pytest.raises(ConfigurationError, match=said):
        Buckets.of(LENGTHS, **options)
