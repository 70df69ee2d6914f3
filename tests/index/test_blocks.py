import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.blocks import BlockShuffledOrder

SHAPES = st.tuples(st.integers(0, 300), st.integers(1, 40), st.integers(1, 12))


def shuffle_by_hand(items, key):
    return [items[place] for place in KeyedPermutation(len(items), key).take(np.arange(len(items))).tolist()]


def pass_by_hand(length, seed, block_size, window, epoch, number):
    """One pass as a list: cut into blocks, shuffle them, join a window of them at a time and shuffle what it holds."""
    key = derive_seed("block_shuffled", seed, epoch, number)
    blocks = [list(range(length))[start : start + block_size] for start in range(0, length, block_size)]
    blocks = shuffle_by_hand(blocks, derive_seed("blocks", key))
    served = []
    for w, start in enumerate(range(0, len(blocks), window)):
        joined = [sample for block in blocks[start : start + window] for sample in block]
        served += shuffle_by_hand(joined, derive_seed("window", key, w))
    return served


@given(SHAPES, st.integers(0, 2**63), st.integers(0, 100))
def test_an_epoch_is_that_of_a_slow_reference(shape, seed, epoch):
    length, block_size, window = shape
    order = BlockShuffledOrder(length, seed, block_size, window)
    assert order.take(np.arange(length), epoch).tolist() == pass_by_hand(length, seed, block_size, window, epoch, 0)


def test_every_small_shape_agrees_with_the_slow_reference():
    for length in range(14):
        for block_size in range(1, 8):
            for window in range(1, 6):
                taken = BlockShuffledOrder(length, 2, block_size, window).take(np.arange(length), 1)
                assert taken.tolist() == pass_by_hand(length, 2, block_size, window, 1, 0), (length, block_size, window)


@given(SHAPES, st.integers(0, 2**63))
def test_an_epoch_has_every_sample_once(shape, seed):
    length, block_size, window = shape
    taken = BlockShuffledOrder(length, seed, block_size, window).take(np.arange(length), 0)
    assert sorted(taken.tolist()) == list(range(length))


@given(SHAPES, st.data())
def test_scattered_slots_over_several_passes_agree_with_the_slow_reference(shape, data):
    length, block_size, window = max(shape[0], 1), shape[1], shape[2]
    slots = data.draw(st.lists(st.integers(0, 4 * length - 1), max_size=30))
    passes = [sample for number in range(4) for sample in pass_by_hand(length, 7, block_size, window, 3, number)]
    taken = BlockShuffledOrder(length, 7, block_size, window).take(np.array(slots, dtype=np.int64), 3)
    assert taken.tolist() == [passes[slot] for slot in slots]


def blocks_open_together(order, epoch):
    """How many blocks are begun before all that were begun are used up, from one such moment to the next."""
    sizes = np.bincount(np.arange(order.length) // order.block_size)
    touched, num_served, counts = set(), 0, []
    for block in (order.take(np.arange(order.length), epoch) // order.block_size).tolist():
        touched.add(block)
        num_served += 1
        if num_served == sum(sizes[b] for b in touched):
            counts.append(len(touched))
            touched, num_served = set(), 0
    return counts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("length", "block_size", "window"),
    [(1000, 10, 4), (1003, 10, 4), (997, 10, 7), (64, 8, 1), (61, 8, 1), (50, 100, 3)],
)
def test_a_window_of_slots_touches_at_most_window_blocks(length, block_size, window, seed):
    counts = blocks_open_together(BlockShuffledOrder(length, seed, block_size, window), epoch=0)
    assert max(counts) <= window
    assert sum(counts) == -(-length // block_size)


def test_any_slots_as_long_as_a_window_touch_at_most_two_windows_of_blocks():
    order = BlockShuffledOrder(10_000, 1, block_size=16, window=4)
    blocks = order.take(np.arange(10_000), 0) // 16
    assert max(np.unique(blocks[start : start + 64]).size for start in range(0, 9_900, 13)) <= 8


def test_samples_of_a_window_are_shuffled_across_its_blocks():
    order = BlockShuffledOrder(4096, 1, block_size=64, window=8)
    blocks = order.take(np.arange(512), 0) // 64
    assert min(np.unique(blocks[start : start + 64]).size for start in range(0, 512, 64)) >= 6


def test_another_epoch_puts_other_blocks_beside_a_block():
    order = BlockShuffledOrder(6400, 1, block_size=64, window=4)
    neighbours = set()
    for epoch in range(10):
        blocks = (order.take(np.arange(6400), epoch) // 64).reshape(-1, 256)
        (row,) = [row for row in blocks if 0 in row]
        neighbours.add(tuple(np.unique(row)))
    assert len(neighbours) == 10


def test_one_block_for_all_is_a_plain_shuffle_of_the_dataset():
    taken = BlockShuffledOrder(500, 1, block_size=500, window=1).take(np.arange(500), 0)
    assert sorted(taken.tolist()) == list(range(500))
    assert taken.tolist() != list(range(500))


def test_blocks_of_one_sample_alone_in_their_window_are_a_permutation_of_blocks():
    taken = BlockShuffledOrder(50, 1, block_size=1, window=1).take(np.arange(50), 0)
    assert taken.tolist() == pass_by_hand(50, 1, 1, 1, 0, 0)


def test_slots_past_the_end_are_another_whole_pass():
    order = BlockShuffledOrder(50, 4, block_size=8, window=2)
    assert sorted(order.take(np.arange(50, 100), 0).tolist()) == list(range(50))


def test_the_defaults_serve_a_large_dataset_and_lose_nothing():
    length = 10**6 + 7
    taken = BlockShuffledOrder(length, 1).take(np.arange(length), 0)
    assert np.array_equal(np.sort(taken), np.arange(length))


@pytest.mark.parametrize("length", [2**32 + 1, 2**40 - 1, 2**40])
def test_windows_of_a_huge_dataset_read_their_blocks_only(length):
    order = BlockShuffledOrder(length, 1)
    taken = order.take(np.arange(1024 * 16), 0)
    assert np.unique(taken).size == taken.size
    assert np.unique(taken // 1024).size == 16


@pytest.mark.parametrize("length", [2**32 + 1, 2**40 - 1])
def test_the_last_slots_of_a_huge_dataset_are_distinct_samples(length):
    taken = BlockShuffledOrder(length, 1).take(np.arange(length - 5000, length), 0)
    assert np.unique(taken).size == 5000
    assert 0 <= taken.min() <= taken.max() < length


def test_an_empty_dataset_has_an_empty_epoch():
    assert BlockShuffledOrder(0).take(np.arange(0), 0).tolist() == []


def test_a_block_shuffled_order_describes_what_shapes_it():
    described = BlockShuffledOrder(9, 2, block_size=4, window=3).describe()
    assert described == {"shuffle": "blocks", "seed": 2, "block_size": 4, "window": 3}


@pytest.mark.parametrize(("block_size", "window"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_blocks_and_windows_below_one_are_refused_with_both_values(block_size, window):
    with pytest.raises(ConfigurationError, match=f"got block_size={block_size}, window={window}"):
        BlockShuffledOrder(10, 0, block_size, window)


@pytest.mark.parametrize("length", [-1, 2**40 + 1])
def test_a_length_out_of_range_is_refused(length):
    with pytest.raises(ConfigurationError, match=f"got {length}"):
        BlockShuffledOrder(length)


@pytest.mark.parametrize(
    ("shape", "epoch", "samples"),
    [
        ((10, 3, 2, 2), 0, [8, 6, 7, 9, 2, 3, 4, 5, 1, 0]),
        ((10, 3, 2, 2), 1, [1, 0, 8, 9, 6, 3, 2, 7, 4, 5]),
        ((11, 3, 3, 2), 0, [3, 6, 8, 7, 4, 5, 9, 0, 1, 10]),
        ((11, 3, 3, 2), 1, [8, 7, 10, 9, 6, 2, 5, 3, 4, 1]),
        ((10**6, 3), 0, [133276, 839232, 31506, 350874]),
        ((10**6, 3), 1, [784854, 157105, 737958, 891185]),
    ],
)
def test_order_version_1_never_changes(shape, epoch, samples):
    assert BlockShuffledOrder(*shape).take(np.arange(len(samples)), epoch).tolist() == samples
