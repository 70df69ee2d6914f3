"""Replicas and ranks are checked where they are told, and split things evenly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core import Topology, split_evenly
from lightning_stateful.errors import ConfigurationError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_replicas": 0}, r"num_replicas must be at least 1, got 0\."),
        ({"rank": 4, "num_replicas": 4}, r"rank must be in range\(4\), got 4\."),
        ({"num_replicas": 2.5}, r"num_replicas must be an integer, got 2\.5"),
        ({"num_replicas": "2"}, "num_replicas must be an integer, got '2'"),
        ({"rank": 0.0}, r"rank must be an integer, got 0\.0"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology(**wrong)


@given(st.integers(0, 500), st.integers(1, 60))
def test_even_shares_laid_end_to_end_are_the_whole_in_order(count: int, num_parts: int) -> None:
    shares = [split_evenly(count, num_parts, part) for part in range(num_parts)]

    assert [item for share in shares for item in share] == list(range(count))
    assert len(shares[0]) - len(shares[-1]) <= 1
    assert sorted(map(len, shares), reverse=True) == list(map(len, shares))
