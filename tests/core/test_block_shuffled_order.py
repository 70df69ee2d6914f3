"""Block-shuffled orders against lists that are cut into blocks and shuffled a window at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core import BlockShuffledOrder, KeyedPermutation, derive_seed
from lightning_stateful.errors import ConfigurationError

SHAPES = st.tuples(st.integers(0, 300), st.integers(1, 40), st.integers(1, 12))


def shuffle_by_hand(items: list[Any], key: int) -> list[Any]:
    return [items[offset] for offset in KeyedPermutation(len(items), key).take(np.arange(len(items))).tolist()]


def by_hand(order: BlockShuffledOrder, epoch: int, cycle: int) -> list[int]:
    """An epoch as a list: cut into blocks, shuffle them, join a window of them at a time and shuffle what it holds."""
    key = derive_seed("block_shuffled", order.seed, epoch, cycle)
    starts = range(0, order.length, order.block_size)
    blocks = [list(range(start, min(start + order.block_size, order.length))) for start in starts]
    if blocks:
        last = blocks.pop()
        blocks = shuffle_by_hand(blocks, derive_seed("blocks", key))
        blocks.insert(derive_seed("last block", key) % (len(blocks) + 1), last)
    served = []
    for number, start in enumerate(range(0, len(blocks), order.window)):
        joined = [sample for block in blocks[start : start + order.window] for sample in block]
        served += shuffle_by_hand(joined, derive_seed("window", key, number))
    return served


@given(SHAPES, st.integers(0, 2**63), st.integers(0, 100), st.integers(0, 3), st.data())
def test_any_offsets_of_an_epoch_are_those_by_hand(
    shape: tuple[int, int, int], seed: int, epoch: int, cycle: int, data: st.DataObject
) -> None:
    order = BlockShuffledOrder(shape[0], seed, *shape[1:])
    offsets = data.draw(st.lists(st.integers(0, max(shape[0] - 1, 0)), max_size=30 if shape[0] else 0))
    expected = by_hand(order, epoch, cycle)

    assert order.take(np.arange(shape[0]), epoch, cycle).tolist() == expected
    assert order.take(np.array(offsets, dtype=np.int64), epoch, cycle).tolist() == [expected[at] for at in offsets]


@pytest.mark.parametrize("length", [2**32 + 1, 2**40 - 1, 2**40])
def test_both_ends_of_a_huge_dataset_are_served_by_windows(length: int) -> None:
    order = BlockShuffledOrder(length, 1)
    first, last = (order.take(np.arange(start, start + 2**14), 0, 0) for start in (0, length - 2**14))

    assert np.unique(np.concatenate([first, last])).size == 2**15
    assert np.unique(first // 1024).size == 16
    assert 0 <= min(first.min(), last.min()) <= max(first.max(), last.max()) < length


@pytest.mark.parametrize("name", ["block_size", "window"])
@pytest.mark.parametrize("value", [0, -1])
def test_blocks_and_windows_below_one_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be at least 1, got {value}"):
        BlockShuffledOrder(10, **{name: value})


@pytest.mark.parametrize(
    ("shape", "epoch", "samples"),
    [
        ((10, 3, 2, 2), 0, [8, 2, 3, 9, 0, 1, 4, 5, 7, 6]),
        ((11, 3, 3, 2), 1, [4, 3, 5, 6, 8, 7, 0, 1, 9, 10]),
        ((10**6, 3), 0, [410780, 671296, 344850, 7834]),
    ],
)
def test_version_1_never_changes(shape: tuple[int, ...], epoch: int, samples: list[int]) -> None:
    order = BlockShuffledOrder(*shape)

    assert order.version == 1
    assert order.take(np.arange(len(samples)), epoch, 0).tolist() == samples
