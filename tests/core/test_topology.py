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
        ({"num_replicas": -1}, r"num_replicas must be at least 1, got -1\."),
        ({"rank": -1, "num_replicas": 4}, r"rank must be in range\(4\), got -1\."),
        ({"rank": 4, "num_replicas": 4}, r"rank must be in range\(4\), got 4\."),
        ({"num_replicas": 2.5}, r"num_replicas must be an integer, got 2\.5"),
        ({"num_replicas": "2"}, "num_replicas must be an integer, got '2'"),
        ({"num_replicas": True}, "num_replicas must be an integer, got True"),
        ({"rank": 0.0}, r"rank must be an integer, got 0\.0"),
        ({"rank": True, "num_replicas": 2}, "rank must be an integer, got True"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology(**wrong)


@pytest.mark.parametrize(
    ("count", "num_parts", "sizes"),
    [
        (10, 3, [4, 3, 3]),
        (6, 3, [2, 2, 2]),
        (2, 3, [1, 1, 0]),
        (0, 2, [0, 0]),
        (2**40, 3, [(2**40 + 2) // 3, *[2**40 // 3] * 2]),
    ],
)
def test_the_longer_shares_come_first(count: int, num_parts: int, sizes: list[int]) -> None:
    assert [len(split_evenly(count, num_parts, part)) for part in range(num_parts)] == sizes


@given(st.integers(0, 500), st.integers(1, 60))
def test_even_shares_laid_end_to_end_are_the_whole_in_order(count: int, num_parts: int) -> None:
    shares = [split_evenly(count, num_parts, part) for part in range(num_parts)]

    assert [item for share in shares for item in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
