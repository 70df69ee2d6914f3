from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from lightning_stateful.core.permutation import ClassShuffle

SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 17, 300, 1023, 1024, 1025, 1500, 2048]), min_size=1, max_size=12)


def starts_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@given(SIZES, st.integers(0, 2**40))
def test_every_class_is_mapped_onto_itself(sizes: list[int], seed: int) -> None:
    starts = starts_of(sizes)

    found = ClassShuffle(starts, seed).take(np.arange(starts[-1]))

    for first, last in pairwise(starts.tolist()):
        assert sorted(found[first:last]) == list(range(first, last))


@given(SIZES, st.integers(0, 100), st.randoms(use_true_random=False))
def test_an_element_is_the_same_in_whatever_company_it_is_asked_for(sizes, seed, random) -> None:
    starts = starts_of(sizes)
    places = np.arange(starts[-1])
    whole = ClassShuffle(starts, seed).take(places)
    chosen = np.array(random.choices(range(len(places)), k=20) if len(places) else [], dtype=np.int64)

    assert ClassShuffle(starts, seed).take(chosen).tolist() == whole[chosen].tolist()
    assert [int(ClassShuffle(starts, seed).take(chosen[i : i + 1])[0]) for i in range(len(chosen))] == (
        whole[chosen].tolist()
    )


def test_labels_and_classes_have_orders_of_their_own() -> None:
    starts = starts_of([1300, 1300, 20, 20])
    places = np.arange(2640)
    first, second = (ClassShuffle(starts, 0, epoch).take(places) for epoch in (0, 1))

    assert (first != second).mean() > 0.9
    assert (first[:1300] != first[1300:2600] - 1300).mean() > 0.9
    assert (first[2600:2620] != first[2620:] - 20).any()


@pytest.mark.parametrize("size", [3, 40, 512, 1024, 1025, 1500, 2048])
def test_an_element_goes_anywhere_in_its_class_equally_often(size: int) -> None:
    starts = starts_of([size] * 400)
    found = np.concatenate([ClassShuffle(starts, seed).take(starts[:-1]) - starts[:-1] for seed in range(50)])
    bins = min(size, 32)

    counts = np.bincount(found * bins // size, minlength=bins)
    expected = np.bincount(np.arange(size) * bins // size, minlength=bins) * len(found) / size
    assert chisquare(counts, expected).pvalue > 1e-6


@pytest.mark.parametrize("size", [40, 1024, 1025, 1500, 2048])
def test_neighbours_are_no_more_often_neighbours_afterwards_than_by_chance(size: int) -> None:
    starts = starts_of([size] * (200_000 // size))
    found = np.concatenate([ClassShuffle(starts, seed).take(np.arange(starts[-1])) for seed in range(10)])
    steps = np.diff(found.reshape(-1, size), axis=1)

    # Each of the size - 1 pairs is a rising pair of neighbours with a chance of 1 in size.
    per_class = (steps == 1).sum(axis=1).mean()
    assert per_class == pytest.approx((size - 1) / size, abs=6 / np.sqrt(len(steps)))


def test_the_order_is_the_one_that_checkpoints_refer_to() -> None:
    starts = starts_of([5, 1300, 2])

    found = ClassShuffle(starts, 7, 3).take(np.arange(1307))

    assert found[:8].tolist() == [0, 4, 3, 1, 2, 930, 1038, 924]
    assert found[1303:].tolist() == [1256, 190, 1305, 1306]


def test_a_class_is_shuffled_alike_whatever_other_classes_there_are() -> None:
    starts = starts_of([50, 2000, 30, 1500, 7])
    whole = ClassShuffle(starts, 5).take(np.arange(starts[-1]))

    part = ClassShuffle(starts[1:4], 5).take(np.arange(starts[1], starts[3]))

    assert part.tolist() == whole[starts[1] : starts[3]].tolist()


def test_a_class_of_more_than_32_bits_is_mapped_onto_itself() -> None:
    starts = starts_of([2**33 + 5, 300])
    places = np.arange(2**33, 2**33 + 305)

    found = ClassShuffle(starts, 1).take(places)

    assert len(set(found.tolist())) == 305
    assert (found[:5] < 2**33 + 5).all()
    assert sorted(found[5:]) == list(range(2**33 + 5, 2**33 + 305))


@pytest.mark.parametrize("size", [1025, 2048, 4096])
def test_no_stride_of_a_class_shows_whatever_the_key(size: int) -> None:
    starts = starts_of([size] * 500)
    found = ClassShuffle(starts, 3).take(np.arange(starts[-1])).reshape(-1, size)

    for stride in (1, size // 4, size // 2):
        differences = np.sort((found[:, stride:] - found[:, :-stride]) % size, axis=1)
        # Of a random permutation, one difference comes about nine times at most; of a bad key, dozens of times.
        assert not (differences[:, 16:] == differences[:, :-16]).any()
