import random
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st
from support.buckets import fewest_by_recursion, fewest_by_trying, padded_tokens

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.boundaries import equal_counts, given, least_padding
from lightning_stateful.index.lengths import Histogram, histogram


def make(values, counts):
    return Histogram(np.array(values, dtype=np.int64), np.array(counts, dtype=np.int64))


@st.composite
def histograms(draw, most=9, longest=60, largest=50):
    values = sorted(draw(st.sets(st.integers(0, longest), min_size=1, max_size=most)))
    return values, draw(st.lists(st.integers(1, largest), min_size=len(values), max_size=len(values)))


def assert_ends(ends, values, num_buckets):
    assert list(ends) == sorted(set(ends))
    assert set(ends) <= set(values)
    assert ends[-1] == values[-1]
    assert len(ends) <= num_buckets
    assert all(type(end) is int for end in ends)


@hypothesis_given(histograms(), st.integers(1, 10))
def test_no_other_boundaries_pad_fewer_tokens(case, num_buckets):
    values, counts = case
    ends = least_padding(make(values, counts), num_buckets)
    assert_ends(ends, values, num_buckets)
    assert padded_tokens(values, counts, ends) == fewest_by_trying(values, counts, num_buckets)


@hypothesis_given(histograms(longest=2**42 - 1, largest=2**35), st.integers(1, 10))
def test_no_other_boundaries_pad_fewer_tokens_of_huge_numbers(case, num_buckets):
    values, counts = case
    ends = least_padding(make(values, counts), num_buckets)
    assert padded_tokens(values, counts, ends) == fewest_by_trying(values, counts, num_buckets)


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 7, 20, 119, 120, 121])
@pytest.mark.parametrize("kind", ["even", "skewed", "few long", "rising"])
def test_of_many_lengths_the_recursion_finds_no_fewer_padded_tokens(kind, num_buckets):
    rng = random.Random(kind)
    values = sorted(rng.sample(range(1, 3000), 120))
    counts = {
        "even": [1] * 120,
        "skewed": [1 + int(rng.lognormvariate(2, 2)) for _ in values],
        "few long": [1000] * 60 + [1] * 60,
        "rising": list(range(1, 121)),
    }[kind]
    ends = least_padding(make(values, counts), num_buckets)
    assert_ends(ends, values, num_buckets)
    assert len(ends) == min(num_buckets, 120)
    assert padded_tokens(values, counts, ends) == fewest_by_recursion(values, counts, min(num_buckets, 120))


def test_the_two_references_agree():
    rng = random.Random(0)
    for _ in range(50):
        values = sorted(rng.sample(range(100), rng.randint(1, 8)))
        counts, num_buckets = [rng.randint(1, 20) for _ in values], rng.randint(1, len(values))
        assert fewest_by_recursion(values, counts, num_buckets) == fewest_by_trying(values, counts, num_buckets)


def test_each_length_has_a_bucket_where_there_are_enough():
    assert least_padding(make([2, 5, 9], [1, 1, 1]), 3) == (2, 5, 9)
    assert least_padding(make([2, 5, 9], [1, 1, 1]), 128) == (2, 5, 9)


def test_one_bucket_ends_at_the_longest():
    assert least_padding(make([2, 5, 9], [10, 1, 1]), 1) == (9,)


def test_two_clusters_are_split_between_them():
    assert least_padding(make([1, 2, 3, 50, 51], [5, 5, 5, 5, 5]), 2) == (3, 51)


def test_2048_lengths_are_exact():
    values = list(range(1, 2049))
    ends = least_padding(make(values, [1] * 2048), 4)
    # Of evenly spread lengths, equal buckets pad least.
    assert ends == (512, 1024, 1536, 2048)


@pytest.mark.parametrize("scale", [1, 2**30])
def test_of_more_than_2048_lengths_boundaries_pad_hardly_more_than_the_fewest(scale):
    rng = np.random.default_rng(0)
    values = np.unique(np.minimum(rng.lognormal(7, 1, 9000).astype(int) + 1, 20_000)) * scale
    counts = rng.integers(1, 9, values.size)
    assert values.size > 3000
    ends = least_padding(make(values, counts), 16)
    assert_ends(ends, values.tolist(), 16)
    best = _fewest_by_arrays(values.astype(float), counts, 16)
    padded = np.array(ends)[np.searchsorted(ends, values)]
    assert best <= float(padded @ counts.astype(float)) < 1.002 * best


def test_of_many_lengths_both_the_frequent_and_the_far_apart_have_boundaries():
    far = np.unique(np.random.default_rng(0).integers(3001, 10**6, 3000))
    values = np.concatenate([np.arange(1, 3001), far])
    counts = np.where(values <= 3000, 1000, 1)
    ends = least_padding(make(values, counts), 64)
    padded = np.array(ends)[np.searchsorted(ends, values)]
    assert float(padded @ counts) < 1.01 * _fewest_by_arrays(values.astype(float), counts, 64)


def _fewest_by_arrays(values, counts, num_buckets):
    below = np.concatenate([[0], np.cumsum(counts)]).astype(float)
    tokens = np.concatenate([[0], values * below[1:]])
    for _ in range(num_buckets - 1):
        found = [
            (tokens[:end] + values[end - 1] * (below[end] - below[:end])).min() for end in range(1, len(values) + 1)
        ]
        tokens = np.concatenate([[0], found])
    return tokens[-1]


@pytest.mark.parametrize(("far", "num_buckets"), [(100_000, 3), (100_000, 16), (10**9, 16)])
def test_a_length_far_from_all_others_spoils_no_boundary_among_many_lengths(far, num_buckets):
    values, counts = np.array([*range(1, 5001), far]), np.array([100] * 5000 + [1])
    ends = least_padding(make(values, counts), num_buckets)
    padded = np.array(ends)[np.searchsorted(ends, values)]
    assert float(padded @ counts) < 1.002 * _fewest_by_arrays(values.astype(float), counts, num_buckets)


@hypothesis_given(histograms(most=30), st.integers(1, 12))
def test_equal_counts_split_no_length_and_differ_from_equal_by_no_more_than_a_length(case, num_buckets):
    values, counts = case
    ends = equal_counts(make(values, counts), num_buckets)
    assert_ends(ends, values, num_buckets)
    total = sum(counts)
    for number in range(1, num_buckets + 1):
        # Where a boundary should be, one is at the length which stands there.
        wanted = number * total / num_buckets - 0.5
        below = accumulate(counts)
        assert next(value for value, so_far in zip(values, below, strict=True) if so_far >= wanted) in ends


def test_equal_counts_of_different_lengths_are_equal():
    ends = equal_counts(make(range(1, 101), [1] * 100), 4)
    assert ends == (25, 50, 75, 100)


def test_equal_counts_have_fewer_buckets_where_one_length_fills_several():
    assert equal_counts(make([3, 8, 9], [1, 100, 1]), 4) == (8, 9)


def test_equal_counts_of_a_million_samples_are_taken_from_their_histogram():
    lengths = np.random.default_rng(0).integers(1, 5000, 10**6)
    ends = equal_counts(histogram(lengths), 64)
    counts = np.diff(np.searchsorted(np.sort(lengths), ends, side="right"), prepend=0)
    assert len(ends) == 64
    assert abs(counts - 10**6 / 64).max() < 500


def test_given_boundaries_are_extended_to_the_longest():
    assert given([4, 9], 12) == (4, 9, 12)


def test_given_boundaries_may_reach_further_than_the_longest():
    assert given([4, 9], 9) == (4, 9)
    assert given([4, 9, 20], 9) == (4, 9, 20)


def test_given_boundaries_become_plain_integers():
    assert [type(end) for end in given(np.array([4, 9]), 12)] == [int, int, int]


@pytest.mark.parametrize("boundaries", [[], [0, 5], [-1], [3, 3], [5, 4]])
def test_boundaries_that_do_not_rise_are_refused(boundaries):
    with pytest.raises(ConfigurationError, match="positive and rising"):
        given(boundaries, 9)


def test_boundaries_that_are_no_integers_are_refused():
    with pytest.raises(ConfigurationError, match=r"a boundary must be an integer, got 2\.5"):
        given([2.5], 9)
