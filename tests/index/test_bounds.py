"""What lies outside the legal ranges is refused, and what lies at their edges works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index import (
    BlockShuffledOrder,
    KeyedPermutation,
    Position,
    ShuffledOrder,
    SubsetOrder,
    Topology,
    WeightedOrder,
)


@pytest.mark.parametrize("wrong", [{"length": -1}, {"num_samples": -1}, {"num_samples": 2**70}])
def test_a_shuffled_order_refuses_a_negative_or_huge_count(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"0 to 2\*\*40"):
        ShuffledOrder(**{"length": 10, **wrong})


def test_a_sample_of_weight_zero_loses_to_any_other() -> None:
    order = WeightedOrder(np.array([0.0, 5e-324, 5e-324]), 2, replacement=False)
    assert sorted(order.take(np.arange(2), 0).tolist()) == [1, 2]


def test_nothing_is_drawn_from_no_weights() -> None:
    assert WeightedOrder(np.zeros(0), 0).take(np.arange(0), 0).tolist() == []


def test_huge_weights_are_drawn_though_their_sum_is_not_a_number() -> None:
    order = WeightedOrder(np.array([1e308, 1e308, 1e308]), 30)
    assert set(order.take(np.arange(30), 0).tolist()) == {0, 1, 2}


def test_a_window_of_more_blocks_than_there_are_shuffles_everything() -> None:
    order = BlockShuffledOrder(100, 0, 10, window=2**62)
    assert sorted(order.take(np.arange(100), 0).tolist()) == list(range(100))


def test_floats_are_no_positions() -> None:
    with pytest.raises(TypeError, match="integers"):
        KeyedPermutation(10, 0).take(np.array([0.9]))


def test_weights_and_indices_changed_afterwards_do_not_change_the_order() -> None:
    weights, indices = np.array([1.0, 2.0, 3.0]), np.array([4, 5, 6])
    orders = [WeightedOrder(weights, 3), SubsetOrder(indices)]
    before = [(order.describe(), order.take(np.arange(3), 0).tolist()) for order in orders]
    weights[0], indices[0] = 9.0, 9
    assert [(order.describe(), order.take(np.arange(3), 0).tolist()) for order in orders] == before


@pytest.mark.parametrize("wrong", [{"num_replicas": 2.5}, {"num_replicas": "2"}, {"num_replicas": True}, {"rank": 0.0}])
def test_a_topology_is_made_of_integers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be an integer"):
        Topology(**wrong)


def test_a_position_holds_python_integers_only() -> None:
    position = Position(epoch=np.int64(1), consumed=np.int64(4), width=1)  # type: ignore[arg-type]
    assert [type(value) for value in position.to_dict().values()] == [int, int, int]


# Keys whose first six or seven multipliers mix the upper half of the range badly.
@pytest.mark.parametrize("key", [215, 2425, 2541, 13220, 5789, 6217, 12350])
def test_keys_with_weak_multipliers_are_mixed_as_well_as_others(key: int) -> None:
    length = 2**17
    order = KeyedPermutation(length, key).take(np.arange(length))
    gaps = (order[length // 2 :] - order[: length // 2]) % length
    pairs = np.bincount(gaps, minlength=length)
    expected = (length // 2) ** 2 / 2 / length
    assert (pairs * (pairs - 1) // 2).sum() < expected + 5 * np.sqrt(expected)
