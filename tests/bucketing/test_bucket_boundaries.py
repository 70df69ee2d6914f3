"""Boundaries pad as few tokens as any, hold equal counts, or are those given."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bucket_cases import fewest_by_trying, padded_tokens

from lightning_stateful.bucketing.boundaries import check_boundaries, equal_counts, least_padding
from lightning_stateful.bucketing.lengths import Histogram
from lightning_stateful.errors import ConfigurationError


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


@given(st.one_of(histograms(), histograms(longest=2**42 - 1, largest=2**35)), st.integers(1, 10))
def test_no_other_boundaries_pad_fewer_tokens(case, num_buckets):
    values, counts = case
    ends = least_padding(make(values, counts), num_buckets)
    assert_ends(ends, values, num_buckets)
    assert padded_tokens(values, counts, ends) == fewest_by_trying(values, counts, num_buckets)


def fewest_by_arrays(values, counts, num_buckets):
    """The fewest padded tokens, in O(num_buckets * len(values)**2)."""
    below = np.concatenate([[0], np.cumsum(counts)]).astype(float)
    tokens = np.concatenate([[0], values * below[1:]])
    for _ in range(num_buckets - 1):
        found = [
            (tokens[:end] + values[end - 1] * (below[end] - below[:end])).min() for end in range(1, len(values) + 1)
        ]
        tokens = np.concatenate([[0], found])
    return tokens[-1]


def padded_by_arrays(values, counts, ends):
    return float(np.array(ends)[np.searchsorted(ends, values)] @ counts.astype(float))


@pytest.mark.parametrize("scale", [1, 2**30])
def test_of_more_than_2048_lengths_boundaries_pad_hardly_more_than_the_fewest(scale):
    rng = np.random.default_rng(0)
    values = np.unique(np.minimum(rng.lognormal(7, 1, 9000).astype(int) + 1, 20_000)) * scale
    counts = rng.integers(1, 9, values.size)
    assert values.size > 3000
    ends = least_padding(make(values, counts), 16)
    best = fewest_by_arrays(values.astype(float), counts, 16)
    assert best <= padded_by_arrays(values, counts, ends) < 1.002 * best


def test_a_length_far_from_all_others_spoils_no_boundary_among_many_lengths():
    values, counts = np.array([*range(1, 5001), 10**9]), np.array([100] * 5000 + [1])
    ends = least_padding(make(values, counts), 16)
    best = fewest_by_arrays(values.astype(float), counts, 16)
    assert padded_by_arrays(values, counts, ends) < 1.002 * best


@given(histograms(most=30), st.integers(1, 12))
def test_equal_counts_split_no_length_and_differ_from_equal_by_no_more_than_a_length(case, num_buckets):
    values, counts = case
    ends = equal_counts(make(values, counts), num_buckets)
    assert_ends(ends, values, num_buckets)
    for number in range(1, num_buckets + 1):
        # Where a boundary should be, one is at the length which stands there.
        wanted = number * sum(counts) / num_buckets - 0.5
        assert next(value for value, so_far in zip(values, accumulate(counts), strict=True) if so_far >= wanted) in ends


def test_given_boundaries_reach_at_least_to_the_longest():
    assert check_boundaries([4, 9], 12) == (4, 9, 12)
    assert check_boundaries(np.array([4, 9]), 9) == (4, 9)
    assert check_boundaries([4, 9, 20], 9) == (4, 9, 20)


@pytest.mark.parametrize(
    ("boundaries", "said"),
    [
        ([], "positive and rising"),
        ([0, 5], "positive and rising"),
        ([3, 3], "positive and rising"),
        ([2.5], r"a boundary must be an integer, got 2\.5"),
        (5, "boundaries are lengths, one for each bucket, got 5"),
    ],
)
def test_boundaries_of_no_use_are_refused(boundaries, said):
    with pytest.raises(ConfigurationError, match=said):
        check_boundaries(boundaries, 9)
