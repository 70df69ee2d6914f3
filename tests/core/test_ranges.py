"""Many ranges at once, against one NumPy range after another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.ranges import bounds_of, concatenated_ranges

RANGES = st.lists(st.tuples(st.integers(0, 2**41), st.integers(0, 5)), max_size=12)


def arrays(ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(RANGES, st.integers(1, 9))
def test_concatenated_ranges_are_those_that_numpy_makes_one_by_one(ranges: list[tuple[int, int]], step: int) -> None:
    expected = [start + step * number for start, size in ranges for number in range(size)]

    assert concatenated_ranges(*arrays(ranges), step).tolist() == expected


@pytest.mark.parametrize("size", [0, 1, 3])
def test_ranges_of_one_size_are_concatenated_too(size: int) -> None:
    found = concatenated_ranges(*arrays([(7, size), (2, size), (2**40, size)]), 2)

    assert found.tolist() == [start + 2 * number for start in (7, 2, 2**40) for number in range(size)]
    assert found.dtype == np.int64


@given(RANGES)
def test_bounds_are_the_sums_of_the_sizes_before(ranges: list[tuple[int, int]]) -> None:
    sizes = arrays(ranges)[1]
    bounds = bounds_of(sizes)

    assert bounds.dtype == np.int64
    assert bounds.tolist() == [sum(sizes[:number].tolist()) for number in range(len(sizes) + 1)]
