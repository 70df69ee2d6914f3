import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.blocks import BlockShuffledOrder
from lightning_stateful.index.draws import ReplacementOrder, SubsetOrder, WeightedOrder
from lightning_stateful.index.orders import Order, SequentialOrder, ShuffledOrder

WEIGHTS = np.array([1.0, 0.0, 2.0, 3.0, 4.0, 0.5, 7.0, 1.5])
SHUFFLES = {
    "shuffled": lambda seed: ShuffledOrder(101, seed),
    "shuffled_part": lambda seed: ShuffledOrder(101, seed, num_samples=40),
    "shuffled_passes": lambda seed: ShuffledOrder(31, seed, num_samples=100),
    "shuffled_large": lambda seed: ShuffledOrder(10**6 + 3, seed),
    "blocks": lambda seed: BlockShuffledOrder(101, seed, block_size=4, window=3),
    "replacement": lambda seed: ReplacementOrder(31, 100, seed),
    "weighted": lambda seed: WeightedOrder(WEIGHTS, 100, seed=seed),
    "weighted_once": lambda seed: WeightedOrder(np.tile(WEIGHTS, 10), 60, replacement=False, seed=seed),
    "subset": lambda seed: SubsetOrder(np.arange(300, 0, -3), seed),
}
ORDERS = {"sequential": lambda seed: SequentialOrder(101), **SHUFFLES}

every_order = pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
every_shuffle = pytest.mark.parametrize("make", SHUFFLES.values(), ids=SHUFFLES)


@every_order
def test_every_order_has_the_methods_of_an_order(make):
    assert isinstance(make(0), Order)


@every_order
def test_the_order_version_is_1(make):
    assert make(0).order_version == 1


def test_every_kind_of_order_has_a_name_of_its_own():
    kinds = {type(make(0)): make(0).kind for make in ORDERS.values()}
    assert len(set(kinds.values())) == len(kinds)


@every_order
def test_an_order_describes_itself_in_plain_data(make):
    described = make(3).describe()
    assert json.loads(json.dumps(described)) == described


@every_shuffle
def test_the_description_tells_the_seed(make):
    assert make(3).describe()["seed"] == 3


@every_order
def test_an_order_cannot_be_changed(make):
    order = make(0)
    name = dataclasses.fields(order)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(order, name, 5)


@every_order
def test_samples_are_int64(make):
    assert make(0).take(np.arange(20), 0).dtype == np.int64


@every_order
def test_no_slots_give_no_samples(make):
    taken = make(0).take(np.arange(0), 0)
    assert taken.dtype == np.int64
    assert taken.shape == (0,)


@every_order
def test_slots_are_not_written_to(make):
    slots = np.arange(250)
    slots.flags.writeable = False
    make(0).take(slots, 0)
    assert slots.tolist() == list(range(250))


@every_order
def test_scattered_slots_give_what_the_whole_sequence_has_there(make):
    whole = make(5).take(np.arange(250), 2)
    slots = np.random.default_rng(0).integers(0, 250, 80)
    assert np.array_equal(make(5).take(slots, 2), whole[slots])


@every_order
def test_slots_asked_one_by_one_give_the_whole_sequence(make):
    order = make(5)
    whole = order.take(np.arange(250), 2)
    assert [int(order.take(np.array([slot]), 2)[0]) for slot in range(250)] == whole.tolist()


@every_order
def test_an_equal_order_gives_the_same_sequence(make):
    assert np.array_equal(make(5).take(np.arange(250), 2), make(5).take(np.arange(250), 2))


@every_order
def test_asking_again_gives_the_same_answer(make):
    order = make(5)
    first = order.take(np.arange(50), 2)
    expected = first.tolist()
    first[:] = 0
    order.take(np.arange(60), 3)
    assert order.take(np.arange(50), 2).tolist() == expected


@every_shuffle
def test_every_epoch_has_its_own_sequence(make):
    order = make(5)
    epochs = {tuple(order.take(np.arange(30), epoch).tolist()) for epoch in range(20)}
    assert len(epochs) == 20


@every_shuffle
def test_every_seed_has_its_own_sequence(make):
    seeds = {tuple(make(seed).take(np.arange(30), 0).tolist()) for seed in range(20)}
    assert len(seeds) == 20


@every_shuffle
def test_seed_1_at_epoch_2_is_not_seed_2_at_epoch_1(make):
    assert make(1).take(np.arange(30), 2).tolist() != make(2).take(np.arange(30), 1).tolist()


@every_shuffle
def test_a_second_pass_within_an_epoch_is_not_the_next_epoch(make):
    order = make(5)
    again = order.take(len(order) + np.arange(30), 0)
    assert again.tolist() != order.take(np.arange(30), 1).tolist()


@every_shuffle
def test_a_second_pass_within_an_epoch_is_not_the_first_pass(make):
    order = make(5)
    assert order.take(len(order) + np.arange(30), 0).tolist() != order.take(np.arange(30), 0).tolist()


def test_a_sequential_order_counts():
    assert SequentialOrder(5).take(np.arange(5), 0).tolist() == [0, 1, 2, 3, 4]


def test_a_sequential_order_is_the_same_in_every_epoch():
    assert SequentialOrder(5).take(np.array([3, 1]), 9).tolist() == [3, 1]


def test_a_sequential_order_starts_over_past_its_end():
    assert SequentialOrder(3).take(np.arange(8), 0).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_sequential_order_describes_that_it_does_not_shuffle():
    assert SequentialOrder(3).describe() == {"shuffle": False}


@given(st.integers(0, 600), st.integers(0, 2**63), st.integers(0, 1000))
def test_a_shuffled_epoch_has_every_sample_once(length, seed, epoch):
    taken = ShuffledOrder(length, seed).take(np.arange(length), epoch)
    assert sorted(taken.tolist()) == list(range(length))


@given(st.integers(1, 60), st.integers(0, 300), st.integers(0, 2**63))
def test_num_samples_gives_whole_passes_and_a_part_of_the_last(length, num_samples, seed):
    order = ShuffledOrder(length, seed, num_samples)
    assert len(order) == num_samples
    taken = order.take(np.arange(num_samples), 0).tolist()
    passes = [taken[start : start + length] for start in range(0, num_samples, length)]
    assert all(sorted(part) == list(range(length)) for part in passes[: num_samples // length])
    assert all(len(set(part)) == len(part) for part in passes)


def test_slots_past_the_end_of_a_shuffled_epoch_are_another_whole_pass():
    order = ShuffledOrder(50, 4)
    assert Counter(order.take(np.arange(150), 0).tolist()) == Counter(dict.fromkeys(range(50), 3))


@pytest.mark.parametrize("length", [10, 100_003])
def test_a_shuffled_pass_is_the_permutation_keyed_by_seed_epoch_and_pass(length):
    slots = np.array([0, 9, length, length + 9])
    expected = [
        int(KeyedPermutation(length, derive_seed("shuffled", 6, 2, number)).take(np.array(place)))
        for number, place in [(0, 0), (0, 9), (1, 0), (1, 9)]
    ]
    assert ShuffledOrder(length, 6).take(slots, 2).tolist() == expected


def test_a_shuffled_order_serves_2_to_the_40_samples():
    slots = np.array([0, 2**39, 2**40 - 1, 2**40, 2**41 - 1])
    taken = ShuffledOrder(2**40, 1).take(slots, 0)
    assert np.unique(taken).size == 5
    assert 0 <= taken.min() <= taken.max() < 2**40


def test_num_samples_is_described_where_it_was_given():
    assert ShuffledOrder(9, 2).describe() == {"shuffle": True, "seed": 2}
    assert ShuffledOrder(9, 2, num_samples=9).describe() == {"shuffle": True, "seed": 2, "num_samples": 9}


@pytest.mark.parametrize("order", [SequentialOrder, ShuffledOrder])
def test_an_empty_dataset_has_an_empty_epoch(order):
    assert len(order(0)) == 0
    assert order(0).take(np.arange(0), 0).tolist() == []


def test_a_sequential_order_refuses_a_negative_length():
    with pytest.raises(ConfigurationError, match=r"0 to 2\*\*40 samples, got -1"):
        SequentialOrder(-1)


@pytest.mark.parametrize("order", [SequentialOrder, ShuffledOrder])
def test_a_length_above_2_to_the_40_is_refused(order):
    with pytest.raises(ConfigurationError, match=rf"0 to 2\*\*40 samples, got {2**40 + 1}"):
        order(2**40 + 1)


def test_drawing_from_an_empty_dataset_is_refused():
    with pytest.raises(ConfigurationError, match="Cannot draw num_samples=3 from an empty dataset"):
        ShuffledOrder(0, num_samples=3)


@pytest.mark.parametrize(
    ("order", "epoch", "samples"),
    [
        (ShuffledOrder(10, 3), 0, [6, 9, 1, 0, 3, 4, 5, 2, 7, 8]),
        (ShuffledOrder(10, 3), 1, [0, 9, 8, 1, 3, 2, 5, 7, 6, 4]),
        (ShuffledOrder(7, 3, num_samples=10), 0, [3, 0, 6, 1, 5, 2, 4, 2, 5, 3]),
        (ShuffledOrder(7, 3, num_samples=10), 1, [4, 6, 5, 3, 0, 2, 1, 1, 2, 3]),
        (ShuffledOrder(10**6, 3), 0, [188432, 419257, 604946, 787407]),
        (ShuffledOrder(10**6, 3), 1, [215945, 958003, 558338, 33132]),
    ],
)
def test_order_version_1_never_changes(order, epoch, samples):
    assert order.take(np.arange(len(samples)), epoch).tolist() == samples
