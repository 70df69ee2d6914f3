from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.index.proportions import Proportions
from lightning_stateful.index.turns import Turns


@st.composite
def proportions(draw):
    weights = draw(st.lists(st.one_of(st.integers(1, 5), st.floats(0.01, 5)), min_size=1, max_size=20))
    exact = [Fraction(weight) for weight in weights]
    return Proportions(draw(st.integers(1, 40)), [weight / sum(exact) for weight in exact])


@st.composite
def turns(draw):
    made = draw(proportions())
    start = draw(st.integers(0, 2 * made.block))
    stop = start + draw(st.integers(1, 5 * made.block))
    return Turns(proportions=made, start=start, stop=stop, key=draw(st.one_of(st.none(), st.integers(0, 2**64 - 1))))


def spread(counts):
    """A block's turns: each source's at equal distances, ties in the order of the sources."""
    places = [
        (Fraction(2 * number + 1, count), source) for source, count in enumerate(counts) for number in range(count)
    ]
    return [source for _, source in sorted(places)]


def whole(made):
    return made.sources(made.start, made.stop)


@given(proportions(), st.integers(0, 10**6))
def test_without_a_key_turns_stand_evenly_spread_in_their_block(made, block):
    first = block * made.block
    found = Turns(proportions=made).sources(first, first + 2 * made.block).tolist()
    expected = [source for counts in made.counts(block, block + 2).tolist() for source in spread(counts)]
    assert found == expected


@given(turns(), st.data())
def test_any_part_is_that_part_of_the_whole(made, data):
    first = data.draw(st.integers(made.start, made.stop))
    last = data.draw(st.integers(first, made.stop))
    assert np.array_equal(made.sources(first, last), whole(made)[first - made.start : last - made.start])


@given(turns(), st.data())
def test_counts_count_the_turns(made, data):
    first = data.draw(st.integers(made.start, made.stop))
    last = data.draw(st.integers(first, made.stop))
    expected = np.bincount(made.sources(first, last), minlength=made.proportions.num_sources)
    assert np.array_equal(made.counts(first, last), expected)


@given(turns())
def test_how_often_a_source_is_served_does_not_depend_on_the_key(made):
    other = Turns(proportions=made.proportions, start=made.start, stop=made.stop)
    assert np.array_equal(made.counts(made.start, made.stop), other.counts(made.start, made.stop))


@given(turns())
def test_with_or_without_a_key_every_whole_block_has_its_counts(made):
    size = made.proportions.block
    for block in range(-(-made.start // size), made.stop // size):
        found = np.bincount(made.sources(block * size, (block + 1) * size), minlength=made.proportions.num_sources)
        assert np.array_equal(found, made.proportions.counts(block, block + 1)[0])


@given(proportions(), st.integers(0, 100), st.data())
def test_turn_after_finds_any_turn_of_a_source(made, start, data):
    endless = Turns(proportions=made, start=start)
    sources = endless.sources(start, start + 6 * made.block)
    source = data.draw(st.sampled_from(sorted(set(sources.tolist()))))
    ends = start + np.flatnonzero(sources == source) + 1
    assert [endless.turn_after(source, count + 1) for count in range(ends.size)] == ends.tolist()


def test_turn_after_finds_turns_far_away():
    made = Turns(proportions=Proportions(64, [Fraction(2, 3), Fraction(1, 3)]), start=17)
    for source in (0, 1):
        end = made.turn_after(source, 10**12)
        assert made.counts(17, end)[source] == 10**12
        assert made.sources(end - 1, end).tolist() == [source]


def test_turns_of_one_block_that_begin_and_end_within_it_are_those_of_the_spread_sequence():
    made = Proportions(8, [Fraction(3, 4), Fraction(1, 4)])
    keyed = Turns(proportions=made, start=2, stop=6, key=3)
    assert Counter(whole(keyed).tolist()) == Counter(spread([6, 2])[2:6])


def test_another_key_gives_another_order():
    made = Proportions(30, [Fraction(1, 2), Fraction(1, 2)])
    orders = {tuple(Turns(proportions=made, key=key).sources(0, 60).tolist()) for key in (None, *range(20))}
    assert len(orders) == 21


def test_blocks_of_one_key_have_orders_of_their_own():
    made = Turns(proportions=Proportions(30, [Fraction(1, 2), Fraction(1, 2)]), key=5)
    assert len({tuple(made.sources(30 * block, 30 * block + 30).tolist()) for block in range(40)}) == 40


def test_a_key_puts_every_source_everywhere_in_a_block():
    made = Proportions(5, [Fraction(4, 5), Fraction(1, 5)])
    places = [Turns(proportions=made, key=key).sources(0, 5).tolist().index(1) for key in range(1000)]
    assert all(140 <= count <= 260 for count in Counter(places).values())
    assert set(places) == set(range(5))


def test_no_turns_are_an_empty_int64_array():
    made = Turns(proportions=Proportions(3, [Fraction(1)]))
    assert (made.sources(5, 5).shape, made.sources(5, 5).dtype) == ((0,), np.dtype(np.int64))


def test_equal_shares_take_turns():
    made = Turns(proportions=Proportions(3, [Fraction(1, 3)] * 3))
    assert made.sources(4, 10).tolist() == [1, 2, 0, 1, 2, 0]


def test_golden_turns():
    made = Proportions(8, [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)])
    assert Turns(proportions=made).sources(0, 16).tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 1, 0]
    assert Turns(proportions=made, key=1).sources(0, 16).tolist() == [0, 1, 1, 2, 2, 0, 0, 0, 1, 0, 0, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("key", [None, 9])
def test_turns_10_to_the_15_away_are_found_at_once(key):
    made = Turns(proportions=Proportions(64, [Fraction(2, 3), Fraction(1, 3)]), key=key)
    near = made.counts(0, 10**15)
    assert near.sum() == 10**15
    assert abs(near[1] - 10**15 / 3) < 64
