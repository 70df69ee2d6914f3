"""From weights to shares, and from shares to whole draws of a period."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture.weights import WeightSchedule, by_name, relative_errors, shares_of, whole_draws

NAMES = ("a", "b", "c")
WEIGHTS = st.lists(st.one_of(st.integers(1, 1000), st.floats(1e-6, 1e6)), min_size=1, max_size=8)


def shares(weights: list[float]) -> list[Fraction]:
    return shares_of([str(number) for number in range(len(weights))], weights)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.7, 0.2, 0.1], ["7/10", "1/5", "1/10"]),
        ([Fraction(1, 7), 1, 0], ["1/8", "7/8", "0"]),
        ([np.float32(0.5), np.int64(1), 0.5], ["1/4", "1/2", "1/4"]),
        ({"c": 1, "a": 2, "b": 5}, ["1/4", "5/8", "1/8"]),
    ],
)
def test_a_decimal_counts_as_the_fraction_that_it_stands_for(weights: Any, expected: list[str]) -> None:
    assert shares_of(NAMES, weights, zero=True) == [Fraction(share) for share in expected]


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, True, "1"])
def test_what_is_no_positive_number_is_refused_by_name(weight: Any) -> None:
    with pytest.raises(ConfigurationError, match="The weight of source 'b' must be a positive number"):
        shares_of(NAMES, [1, weight, 1])


def test_points_of_a_schedule_may_have_weights_of_zero_but_not_all() -> None:
    assert shares_of(NAMES, [0, 1, 0], zero=True) == [0, 1, 0]
    with pytest.raises(ConfigurationError, match="At least one weight must be positive"):
        shares_of(NAMES, [0, 0, 0], zero=True)
    with pytest.raises(ConfigurationError, match="zero or a positive number, got -1"):
        shares_of(NAMES, [0, -1, 1], zero=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 1, "b": 1}, "Source 'c' has no weight"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "a weight for 'd', which is none of the sources"),
        ([1, 2], "2 values were given as weight for the 3 sources"),
        (7, "Give a weight for each of the sources"),
    ],
)
def test_values_that_fit_no_sources_are_refused_by_name(values: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        by_name(NAMES, values, "weight")


@pytest.mark.parametrize("temperature", [0.3, 1, 100])
def test_temperature_raises_shares_to_a_power(temperature: float) -> None:
    powers = [share ** (1 / temperature) for share in (0.5, 0.3, 0.2)]
    found = shares_of(NAMES, [5, 3, 2], temperature=temperature)
    assert sum(found) == 1
    assert [float(share) for share in found] == pytest.approx([power / sum(powers) for power in powers])


@pytest.mark.parametrize("temperature", [0, math.inf, True, "2"])
def test_a_temperature_that_is_no_positive_number_is_refused(temperature: Any) -> None:
    with pytest.raises(ConfigurationError, match="temperature must be a positive number"):
        shares_of(NAMES, [1, 1, 1], temperature=temperature)


@pytest.mark.parametrize(
    ("weights", "draws"),
    [
        ([1, 1, 254], (1, 1, 254)),
        ([1, 2.5, 0.1], (10, 25, 1)),
        ([2, 999, 5000], (2, 999, 5000)),
    ],
)
def test_a_period_is_the_shortest_that_is_exact_where_no_shorter_one_is_close(
    weights: list[float], draws: tuple[int, ...]
) -> None:
    assert whole_draws(shares(weights)) == draws


@given(WEIGHTS)
def test_every_source_has_a_draw_and_shares_are_close_unless_one_is_rare(weights: list[float]) -> None:
    asked = shares(weights)
    draws = whole_draws(asked)
    assert min(draws) >= 1
    assert sum(draws) <= 2**16
    if min(asked) > 0.002:
        assert max(relative_errors(asked, draws)) < 0.01


@given(WEIGHTS, st.integers(8, 300))
def test_a_period_that_is_given_is_filled(weights: list[float], period: int) -> None:
    asked = shares(weights)
    draws = whole_draws(asked, period)
    assert sum(draws) == period
    if min(asked) * period >= 1:
        assert all(abs(count - share * period) < 1 for count, share in zip(draws, asked, strict=True))


def test_a_period_without_a_draw_for_each_source_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="A period of 2 draws has none for some of 3 sources"):
        whole_draws(shares([1, 1, 1]), 2)


@pytest.mark.parametrize("points", [{}, {1: [1, 1]}, {0: [1, 1], 5: [1, 1], 3: [1, 1]}, {-1: [1, 1], 0: [1, 1]}])
def test_points_that_do_not_rise_from_0_are_refused(points: Any) -> None:
    with pytest.raises(ConfigurationError, match="A schedule begins at 0 and its points rise"):
        WeightSchedule(points)


def test_a_schedule_is_checked_as_a_whole() -> None:
    with pytest.raises(ConfigurationError, match=r"goes on in one of .* got between='cosine'"):
        WeightSchedule({0: [1, 1]}, "cosine")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="a point of a schedule must be an integer"):
        WeightSchedule({0: [1, 1], 2.5: [1, 1]})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="A schedule is a dict of weights by step"):
        WeightSchedule(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="gives source 'b' no weight at any point"):
        WeightSchedule({0: [1, 0], 5: [2, 0]}).shares(["a", "b"])
