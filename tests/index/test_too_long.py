import numpy as np
import pytest

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.budget import Budget, QuadraticCost
from lightning_stateful.index.lengths import histogram
from lightning_stateful.index.too_long import fit, num_samples

LENGTHS = np.array([3, 9, 9, 4, 12, 10, 3])


@pytest.mark.parametrize("too_long", ["error", "drop", "alone"])
def test_where_all_fit_nothing_happens(too_long):
    fitting = fit(histogram(LENGTHS), Budget(max_tokens=12), too_long)
    assert fitting.lengths.values.tolist() == [3, 4, 9, 10, 12]
    assert (fitting.longest, fitting.num_dropped, fitting.num_alone) == (12, 0, 0)


def test_samples_that_are_too_long_are_an_error_that_counts_them():
    said = (
        "2 of 7 samples are longer than max_tokens=9 allows; the longest has 12 tokens. Raise max_tokens.*"
        'too_long="drop".*too_long="alone"'
    )
    with pytest.raises(ConfigurationError, match=said):
        fit(histogram(LENGTHS), Budget(max_tokens=9), "error")


def test_samples_that_are_too_long_are_dropped():
    fitting = fit(histogram(LENGTHS), Budget(max_tokens=9), "drop")
    assert fitting.lengths.values.tolist() == [3, 4, 9]
    assert fitting.lengths.counts.tolist() == [2, 1, 2]
    assert (fitting.longest, fitting.num_dropped, fitting.num_alone) == (9, 2, 0)


def test_samples_that_are_too_long_are_kept_to_be_served_alone():
    fitting = fit(histogram(LENGTHS), Budget(max_tokens=9), "alone")
    assert fitting.lengths.counts.sum() == 7
    assert (fitting.longest, fitting.num_dropped, fitting.num_alone) == (9, 0, 2)


def test_all_samples_may_be_served_alone():
    fitting = fit(histogram(LENGTHS), Budget(max_tokens=2), "alone")
    assert (fitting.longest, fitting.num_alone) == (0, 7)


def test_dropping_every_sample_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"7 of 7 samples are longer.*would leave no sample\. Raise max_tokens"
    ):
        fit(histogram(LENGTHS), Budget(max_tokens=2), "drop")


def test_a_cost_decides_what_is_too_long():
    fitting = fit(histogram(LENGTHS), Budget(max_tokens=20, cost=QuadraticCost(10)), "drop")
    assert (fitting.longest, fitting.num_dropped) == (10, 1)


def test_with_a_batch_size_no_sample_is_too_long():
    assert fit(histogram(np.array([2**41])), Budget(batch_size=3), "error").longest == 2**41


def test_another_word_is_refused():
    with pytest.raises(ConfigurationError, match=r"one of \('error', 'drop', 'alone'\), got 'cut'"):
        fit(histogram(LENGTHS), Budget(max_tokens=9), "cut")


def test_every_limit_splits_the_lengths_at_that_limit():
    for limit in range(3, 14):
        fitting = fit(histogram(LENGTHS), Budget(max_tokens=limit), "alone")
        assert fitting.num_alone == sum(length > limit for length in LENGTHS.tolist())
        assert fitting.longest == max(length for length in LENGTHS.tolist() if length <= limit)


def test_a_sample_that_does_not_fit_makes_a_batch_of_one():
    budget = Budget(max_tokens=9)
    assert [num_samples(budget, longest) for longest in (3, 9, 10, 500)] == [3, 1, 1, 1]
