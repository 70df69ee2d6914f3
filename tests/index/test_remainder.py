from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.index.remainder import Remainder


@st.composite
def ranges(draw, length):
    """Ranges of places that do not overlap, in any order; some touch, and none is empty."""
    bounds = sorted(draw(st.sets(st.integers(0, length), max_size=12)))
    pairs = [pair for pair in pairwise(bounds) if draw(st.booleans())]
    return draw(st.permutations(pairs))


@st.composite
def histories(draw):
    """What is left after some ranges were taken out again and again, and the same as a list."""
    length = draw(st.integers(0, 60))
    left, expected = Remainder.whole(length), list(range(length))
    for _ in range(draw(st.integers(0, 4))):
        pairs = draw(ranges(len(expected)))
        taken = {place for start, stop in pairs for place in range(start, stop)}
        left = (
            left.without(*(np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))) if pairs else left
        )
        expected = [element for place, element in enumerate(expected) if place not in taken]
    return left, expected


@given(histories())
def test_what_is_left_is_what_was_not_taken_out(case):
    left, expected = case
    assert len(left) == len(expected)
    assert left.take(np.arange(len(left))).tolist() == expected


@given(histories(), st.lists(st.integers(0, 70)))
def test_elements_below_a_bound_are_counted(case, bounds):
    left, expected = case
    found = left.num_below(np.array(bounds, dtype=np.int64))
    assert found.tolist() == [sum(element < bound for element in expected) for bound in bounds]


@given(histories(), st.lists(st.integers(0, 10**6), max_size=20))
def test_elements_are_found_at_scattered_places(case, places):
    left, expected = case
    if expected:
        places = [place % len(expected) for place in places]
        assert left.take(np.array(places, dtype=np.int64)).tolist() == [expected[place] for place in places]


@given(histories())
def test_stretches_rise_and_are_not_empty(case):
    left, expected = case
    sizes = np.diff(left.places)
    assert left.places[0] == 0
    assert left.places[-1] == len(expected)
    if expected:
        assert np.all(sizes > 0)
        assert np.all(left.firsts[1:] >= left.firsts[:-1] + sizes[:-1])


def test_taking_out_nothing_leaves_all():
    none = np.zeros(0, dtype=np.int64)
    assert Remainder.whole(5).without(none, none).take(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_taking_out_all_leaves_nothing():
    left = Remainder.whole(9).without(np.array([5, 0]), np.array([9, 5]))
    assert len(left) == 0
    assert left.num_below(np.array([0, 4, 9])).tolist() == [0, 0, 0]
    assert left.take(np.arange(0)).tolist() == []
    again = left.without(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert len(again) == 0


def test_what_is_left_is_not_changed_by_what_is_taken_out_of_it():
    whole = Remainder.whole(9)
    first = whole.without(np.array([2]), np.array([4]))
    first.without(np.array([0]), np.array([3]))
    assert (len(whole), len(first)) == (9, 7)
    assert first.take(np.arange(7)).tolist() == [0, 1, 4, 5, 6, 7, 8]


def test_the_memory_follows_the_ranges_and_not_the_length():
    starts = np.arange(0, 2**40, 2**30)
    left = Remainder.whole(2**40).without(starts, starts + 5)
    assert len(left) == 2**40 - 5 * 1024
    assert left.take(np.array([0, 2**30 - 5, len(left) - 1])).tolist() == [5, 2**30 + 5, 2**40 - 1]
    assert left.firsts.nbytes + left.places.nbytes < 20_000
