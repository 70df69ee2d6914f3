import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.weights import by_name, exact_block, shares_of, tempered

NAMES = ("a", "b", "c")
WEIGHTS = st.lists(st.one_of(st.integers(1, 1000), st.floats(1e-6, 1e6)), min_size=3, max_size=3)


@given(WEIGHTS)
def test_shares_add_up_to_exactly_1(weights):
    assert sum(shares_of(NAMES, weights)) == 1


@given(WEIGHTS)
def test_shares_are_as_the_weights_are(weights):
    for share, weight in zip(shares_of(NAMES, weights), weights, strict=True):
        assert math.isclose(share, weight / sum(weights), rel_tol=1e-9)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.2, 0.1], ["7/10", "1/5", "1/10"]),
        ([0.1, 0.1, 0.1], ["1/3", "1/3", "1/3"]),
        ([1 / 3, 1 / 3, 1 / 3], ["1/3", "1/3", "1/3"]),
        ([9, 1, 10], ["9/20", "1/20", "1/2"]),
        ([Fraction(1, 7), 1, 0], ["1/8", "7/8", "0"]),
        ([np.float32(0.5), np.int64(1), 0.5], ["1/4", "1/2", "1/4"]),
        ([0.05, 0.9, 0.05], ["1/20", "9/10", "1/20"]),
    ],
)
def test_a_decimal_counts_as_the_fraction_that_it_stands_for(weights, shares):
    assert shares_of(NAMES, weights, zero=True) == [Fraction(share) for share in shares]


def test_weights_by_name_come_in_the_order_of_the_sources():
    assert shares_of(NAMES, {"c": 1, "a": 2, "b": 5}) == [Fraction(2, 8), Fraction(5, 8), Fraction(1, 8)]


@pytest.mark.parametrize("weight", [0, 0.0, -1, math.nan, math.inf, True, "1", None, 1j])
def test_what_is_no_positive_number_is_refused_by_name(weight):
    with pytest.raises(ConfigurationError, match="The weight of source 'b' must be a positive number"):
        shares_of(NAMES, [1, weight, 1])


def test_a_schedule_may_have_weights_of_zero_but_not_all():
    assert shares_of(NAMES, [0, 1, 0], zero=True) == [0, 1, 0]
    with pytest.raises(ConfigurationError, match="At least one weight must be positive"):
        shares_of(NAMES, [0, 0, 0], zero=True)
    with pytest.raises(ConfigurationError, match="zero or a positive number, got -1"):
        shares_of(NAMES, [0, -1, 1], zero=True)


def test_values_that_fit_no_sources_are_refused_by_name():
    with pytest.raises(ConfigurationError, match="Source 'c' has no weight"):
        by_name(NAMES, {"a": 1, "b": 1}, "weight")
    with pytest.raises(ConfigurationError, match="a weight for 'd', which is none of the sources"):
        by_name(NAMES, {"a": 1, "b": 1, "c": 1, "d": 1}, "weight")
    with pytest.raises(ConfigurationError, match="2 values were given as weight for the 3 sources"):
        by_name(NAMES, [1, 2], "weight")


def test_temperature_1_leaves_shares_as_they_are():
    shares = shares_of(NAMES, [5, 3, 2])
    assert tempered(shares, 1) == shares


@pytest.mark.parametrize("temperature", [0.3, 0.9, 2, 5, 100])
def test_temperature_raises_shares_to_a_power(temperature):
    powers = [share ** (1 / temperature) for share in (0.5, 0.3, 0.2)]
    found = tempered(shares_of(NAMES, [5, 3, 2]), temperature)
    assert sum(found) == 1
    assert [float(share) for share in found] == pytest.approx([power / sum(powers) for power in powers])


@pytest.mark.parametrize("temperature", [0, -1, math.inf, math.nan, True, "2", None])
def test_a_temperature_that_is_no_positive_number_is_refused(temperature):
    with pytest.raises(ConfigurationError, match="temperature must be a positive number"):
        tempered(shares_of(NAMES, [1, 1, 1]), temperature)


@pytest.mark.parametrize(
    ("weights", "block"),
    [([1, 1, 1], 3), ([0.7, 0.2, 0.1], 10), ([1, 1, 254], 256), ([1, 1, 255], 64), ([1, 2, 3], 6), ([1, 2.5, 0.1], 36)],
)
def test_the_block_is_the_smallest_with_whole_counts_or_64(weights, block):
    assert exact_block(shares_of(NAMES, weights)) == block


@given(st.lists(st.integers(1, 60), min_size=3, max_size=3))
def test_in_a_block_of_at_most_256_all_shares_are_whole_and_in_no_smaller_one(weights):
    shares = shares_of(NAMES, weights)
    whole = [block for block in range(1, 257) if all((share * block).denominator == 1 for share in shares)]
    assert exact_block(shares) == (whole[0] if whole else 64)
