"""Every sample that fits is in the bucket of its length, and shuffled within it."""

import json

import numpy as np
import pytest
from support.bucket_cases import in_budget, random_cases

from lightning_stateful.bucketing import Buckets, Budget, QuadraticCost
from lightning_stateful.bucketing.buckets import default_num_buckets
from lightning_stateful.bucketing.lengths import digest, histogram
from lightning_stateful.errors import ConfigurationError

LENGTHS = [3, 9, 9, 4, 12, 10, 3]


def by_bucket(buckets, shuffle=None):
    """The samples of each bucket, the longest bucket first."""
    samples = buckets.take(np.arange(len(buckets)), shuffle)
    assert samples.dtype == np.int64
    return [part.tolist() for part in np.split(samples, buckets.starts[1:-1])]


def test_every_sample_that_fits_is_in_the_bucket_of_its_length():
    for order, _, _ in random_cases(60, seed=1):
        buckets = order.buckets
        lengths = buckets.lengths.tolist()
        fitting = [sample for sample, length in enumerate(lengths) if buckets.budget.num_samples(length)]
        assert buckets.num_dropped == len(lengths) - len(fitting)
        assert list(buckets.ends) == sorted(set(buckets.ends), reverse=True)
        below = [*buckets.ends[1:], -1]
        expected = [
            [sample for sample in fitting if low < lengths[sample] <= high]
            for low, high in zip(below, buckets.ends, strict=True)
        ]
        assert by_bucket(buckets) == expected


def test_a_shuffle_keeps_samples_in_their_buckets_and_differs_by_its_labels():
    buckets = Buckets.of([number % 5 + 1 for number in range(400)], Budget(batch_size=4), num_buckets=3)
    unshuffled = by_bucket(buckets)
    found = [by_bucket(buckets, buckets.shuffle(*labels)) for labels in ((0, 0), (0, 1), (1, 0))]
    assert all([sorted(samples) for samples in each] == unshuffled for each in found)
    assert found[0] != found[1] != found[2] != unshuffled
    shuffle, offsets = buckets.shuffle(3), np.array([7, 390, 0])
    assert buckets.take(offsets, shuffle).tolist() == buckets.take(np.arange(400), shuffle)[offsets].tolist()


@pytest.mark.parametrize(
    ("options", "ends", "sizes"),
    [
        ({"boundaries": [4, 9]}, (12, 9, 4), (2, 2, 6)),
        ({"num_buckets": 2}, (12, 4), (2, 6)),
        ({"num_buckets": 3, "boundaries": "equal_counts"}, (12, 9, 3), (2, 2, 8)),
        ({"boundaries": [6, 11, 40]}, (12, 10, 4), (2, 2, 6)),
        ({"boundaries": [1, 4, 8, 40, 90]}, (90, 12, 8, 4, 1), (1, 2, 3, 6, 24)),
    ],
    ids=["given", "least padding", "equal counts", "moved to the longest", "empty ones stay"],
)
def test_boundaries_are_given_or_chosen(options, ends, sizes):
    buckets = Buckets.of(LENGTHS, Budget(max_tokens=24), **options)
    assert (buckets.ends, buckets.sizes) == (ends, sizes)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(max_tokens=100), 12),
        (Budget(batch_size=10), 25),
        (Budget(max_tokens=10**6), 1),
        (Budget(max_tokens=5), 128),
    ],
)
def test_by_default_a_bucket_has_4_batches_on_average(budget, expected):
    assert default_num_buckets(histogram(np.full(1000, 5)), budget) == expected


@pytest.mark.parametrize(
    "max_tokens", [900, *(pytest.param(number, marks=pytest.mark.slow) for number in (1500, 5000, 30_000))]
)
def test_a_larger_budget_gives_no_more_batches(max_tokens):
    # As of speech: most are short, and one is so long that hardly another fits beside it.
    lengths = histogram(np.append(np.random.default_rng(5).lognormal(3.5, 1.2, 500).astype(int).clip(1, 900), 900))
    buckets = default_num_buckets(lengths, Budget(max_tokens=max_tokens))
    assert _batches(lengths, max_tokens, buckets) <= 1.25 * min(_batches(lengths, max_tokens, n) for n in range(1, 129))


def _batches(lengths, max_tokens, num_buckets):
    values = np.repeat(lengths.values, lengths.counts)
    buckets = Buckets.of(values, Budget(max_tokens=max_tokens), num_buckets=num_buckets)
    return sum(-(-int(count) // size) for count, size in zip(np.diff(buckets.starts), buckets.sizes, strict=True))


@pytest.mark.parametrize("num_buckets", [128, 40_000])
def test_samples_of_several_chunks_are_sorted_as_one_in_4_bytes_each(num_buckets):
    lengths = np.random.default_rng(0).integers(1, 60_000, 2**20 + 4000).astype(np.uint16)
    ends = np.unique(np.linspace(1, 59_999, num_buckets).astype(int))
    buckets = Buckets.of(lengths, Budget(max_tokens=50_000, too_long="drop"), boundaries=ends)
    bucket_of = np.searchsorted(ends, lengths)
    fitting = np.flatnonzero(lengths <= 50_000)
    expected = fitting[np.argsort(-bucket_of[fitting], kind="stable")]
    assert np.array_equal(buckets.members, expected)
    assert buckets.members.nbytes == 4 * len(fitting)
    assert np.shares_memory(buckets.lengths, lengths)


def test_what_was_asked_for_is_plain_data():
    budget = Budget(max_tokens=600, max_samples=9, multiple=2, cost=QuadraticCost(3), too_long="drop")
    buckets = Buckets.of(LENGTHS, budget, num_buckets=np.int64(2))
    assert json.loads(json.dumps(buckets.config)) == {
        "max_tokens": 600,
        "max_samples": 9,
        "multiple": 2,
        "quadratic_length": 3,
        "boundaries": "least_padding",
        "num_buckets": 2,
        "too_long": "drop",
        "lengths": {"samples": 7, "digest": digest(np.array(LENGTHS))},
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 24, "boundaries": [4], "num_buckets": 2}, "leave num_buckets out"),
        ({"max_tokens": 24, "boundaries": "best"}, r"one of \('least_padding', 'equal_counts'\), got 'best'"),
        ({"max_tokens": 24, "num_buckets": 0}, "num_buckets must be at least 1, got 0"),
        ({"max_tokens": 24, "num_buckets": 1.5}, r"num_buckets must be an integer, got 1\.5"),
    ],
)
def test_arguments_out_of_range_are_refused_with_their_values(options, said):
    with pytest.raises(ConfigurationError, match=said):
        Buckets.of(LENGTHS, **in_budget(options))
