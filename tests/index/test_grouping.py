import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.index.grouping import Grouping


def group(classes, num_classes):
    """Samples whose lengths are their classes, -1 for those left out."""
    found = np.array(classes, dtype=np.int64)
    counts = [int(np.count_nonzero(found == number)) for number in range(num_classes)]
    return Grouping.of(found, lambda first, part: part, counts)


@st.composite
def groupings(draw):
    num_classes = draw(st.integers(1, 6))
    # At least one sample is served.
    classes = [0, *draw(st.lists(st.integers(-1, num_classes - 1), max_size=60))]
    return classes, num_classes


def of_class(classes, number):
    return [sample for sample, found in enumerate(classes) if found == number]


@given(groupings())
def test_unshuffled_the_samples_stand_class_by_class_in_their_order(case):
    classes, num_classes = case
    made = group(*case)
    expected = [sample for number in range(num_classes) for sample in of_class(classes, number)]
    assert made.take(np.arange(len(made)), None, 3).tolist() == expected
    assert len(made) == len(expected)


@given(groupings(), st.integers(0, 5), st.integers(0, 5))
def test_shuffled_every_class_has_its_samples_in_its_places(case, seed, epoch):
    classes, num_classes = case
    made = group(*case)
    samples = made.take(np.arange(len(made)), seed, epoch)
    assert samples.dtype == np.int64
    for number in range(num_classes):
        found = samples[made.starts[number] : made.starts[number + 1]]
        assert sorted(found.tolist()) == of_class(classes, number)


@given(groupings(), st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_scattered_places_give_what_the_whole_has_there(case, places):
    made = group(*case)
    scattered = np.array(places, dtype=np.int64) % len(made)
    whole = made.take(np.arange(len(made)), 5, 2)
    assert np.array_equal(made.take(scattered, 5, 2), whole[scattered])


@given(groupings())
def test_in_order_are_the_samples_that_are_served_rising(case):
    classes, _ = case
    made = group(*case)
    expected = [sample for sample, found in enumerate(classes) if found >= 0]
    assert made.in_order(np.arange(len(made))).tolist() == expected
    assert made.in_order(np.array([len(made) - 1, 0])).tolist() == [expected[-1], expected[0]]


def test_every_epoch_and_every_seed_has_its_own_order():
    made = group([0, 1] * 50, 2)
    found = {tuple(made.take(np.arange(100), seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(found) == 16


def test_asking_for_epochs_in_turn_gives_the_same_answers():
    made = group([0, 1, 1, 2] * 20, 3)
    expected = [group([0, 1, 1, 2] * 20, 3).take(np.arange(80), 4, epoch).tolist() for epoch in range(3)]
    for epoch in (0, 2, 1, 0, 1, 2):
        assert made.take(np.arange(80), 4, epoch).tolist() == expected[epoch]
        assert made.in_order(np.arange(80)).tolist() == list(range(80))


def test_one_class_of_all_samples_keeps_no_list_of_them():
    made = group([0] * 9, 1)
    assert made.members is None
    assert sorted(made.take(np.arange(9), 1, 0).tolist()) == list(range(9))
    assert made.in_order(np.array([3])).tolist() == [3]


def test_one_class_of_some_samples_keeps_a_list_of_them():
    made = group([0, -1, 0, -1, -1], 1)
    assert made.members.tolist() == [0, 2]
    assert set(made.take(np.arange(2), 1, 0).tolist()) == {0, 2}


def test_empty_classes_take_no_place():
    made = group([3, 1, 3], 5)
    assert made.starts.tolist() == [0, 0, 1, 1, 3, 3]
    assert made.take(np.arange(3), None, 0).tolist() == [1, 0, 2]


@pytest.mark.parametrize("seed", [None, 3])
def test_no_places_give_no_samples(seed):
    found = group([0, 1], 2).take(np.arange(0), seed, 0)
    assert (found.dtype, found.shape) == (np.int64, (0,))


def test_places_are_not_written_to():
    places = np.arange(6)
    places.flags.writeable = False
    group([0, 1] * 3, 2).take(places, 3, 0)
    assert places.tolist() == list(range(6))


@pytest.mark.parametrize("num_classes", [7, 2**15 - 1, 2**15, 40_000])
def test_samples_of_several_chunks_are_sorted_as_one(num_classes):
    classes = np.random.default_rng(0).integers(-1, num_classes, 2**20 + 4000)
    counts = np.bincount(classes[classes >= 0], minlength=num_classes).tolist()
    offsets = []

    def given_parts(first, part):
        offsets.append((first, len(part)))
        return part

    made = Grouping.of(classes, given_parts, counts)
    expected = np.argsort(classes, kind="stable")[np.count_nonzero(classes < 0) :]
    assert np.array_equal(made.members, expected)
    assert offsets == [(0, 2**20), (2**20, 4000)]


@pytest.mark.parametrize("num_classes", [128, 6000])
def test_a_million_samples_cost_at_most_12_bytes_each(num_classes):
    classes = np.random.default_rng(0).integers(0, num_classes, 10**6)
    made = Grouping.of(classes, lambda first, part: part, np.bincount(classes).tolist())
    for epoch in (0, 1):
        assert np.all(np.bincount(made.take(np.arange(10**6), 0, epoch), minlength=10**6) == 1)
    assert made.members.nbytes == 4 * 10**6
    assert _num_bytes(made) <= 12 * 10**6 + 250 * num_classes


def _num_bytes(made):
    seen, stack, total = set(), [made.members, made.starts, made._kept], 0
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, np.ndarray):
            total += part.nbytes
        elif isinstance(part, dict):
            stack += part.values()
        elif isinstance(part, (tuple, list)):
            stack += part
        elif hasattr(part, "__dict__"):
            stack.append(vars(part))
    return total
