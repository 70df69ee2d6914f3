import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.index.proportions import Proportions

WEIGHTS = st.one_of(
    st.integers(1, 9).map(Fraction), st.floats(1e-3, 1).map(Fraction), st.sampled_from([Fraction(0), Fraction(10**6)])
)
# Marks are rounded to 2**-64 of a turn.
ROUNDING = Fraction(1, 2**60)


def normal(weights):
    total = sum(weights)
    return [weight / total for weight in weights] if total else [Fraction(1, len(weights))] * len(weights)


@st.composite
def shares(draw, count):
    return normal(draw(st.lists(WEIGHTS, min_size=count, max_size=count)))


@st.composite
def steady(draw):
    count, block = draw(st.integers(1, 40)), draw(st.integers(1, 100))
    return Proportions(block, draw(shares(count)), shift=draw(st.sampled_from([0, 1, 10**12])))


@st.composite
def linear(draw):
    count, block, num_blocks = draw(st.integers(1, 12)), draw(st.integers(1, 100)), draw(st.integers(1, 30))
    first, final = draw(shares(count)), draw(shares(count))
    return Proportions(block, first, final, num_blocks, draw(st.integers(0, 50))), first, final, num_blocks


def counts(proportions, first, last):
    return proportions.counts(first, last).tolist()


@given(st.data(), st.integers(1, 40), st.integers(1, 100), st.integers(0, 10**12))
def test_every_block_gives_each_source_its_share_rounded_down_or_up(data, count, block, first):
    wanted = data.draw(shares(count))
    for found in counts(Proportions(block, wanted), first, first + 5):
        for share, number in zip(wanted, found, strict=True):
            assert math.floor(share * block - ROUNDING) <= number <= math.ceil(share * block + ROUNDING)


@given(linear(), st.data())
def test_linear_shares_are_those_of_the_middle_of_each_block_rounded_down_or_up(made, data):
    proportions, first, final, num_blocks = made
    block = data.draw(st.integers(0, num_blocks - 1))
    middle = Fraction(2 * block + 1, 2 * num_blocks)
    for a, b, number in zip(first, final, counts(proportions, block, block + 1)[0], strict=True):
        exact = (a + (b - a) * middle) * proportions.block
        assert math.floor(exact - ROUNDING) <= number <= math.ceil(exact + ROUNDING)


@given(steady(), st.integers(0, 10**15))
def test_the_counts_of_a_block_add_up_to_it(proportions, first):
    assert {sum(block) for block in counts(proportions, first, first + 8)} == {proportions.block}


@given(linear())
def test_the_counts_of_a_block_add_up_to_it_while_shares_change(made):
    proportions, *_, num_blocks = made
    assert {sum(block) for block in counts(proportions, 0, num_blocks)} == {proportions.block}


@given(steady(), st.one_of(st.integers(0, 60), st.integers(10**12, 10**12 + 60)), st.integers(1, 40))
def test_totals_are_sums_of_counts(proportions, first, length):
    expected = proportions.counts(first, first + length).sum(axis=0)
    assert np.array_equal(proportions.totals(first, first + length), expected)


@given(linear(), st.data())
def test_totals_are_sums_of_counts_while_shares_change(made, data):
    proportions, *_, num_blocks = made
    first = data.draw(st.integers(0, num_blocks - 1))
    last = data.draw(st.integers(first + 1, num_blocks))
    assert np.array_equal(proportions.totals(first, last), proportions.counts(first, last).sum(axis=0))


@given(steady(), st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_total_of_one_source_is_its_part_of_all_totals(proportions, first, length):
    totals = proportions.totals(first, first + length).tolist()
    assert [proportions.total(first, first + length, source) for source in range(len(totals))] == totals


@given(linear(), st.integers(0, 30))
def test_the_total_of_one_source_is_its_part_while_shares_change(made, last):
    proportions, *_, num_blocks = made
    totals = proportions.totals(0, min(last, num_blocks)).tolist()
    found = [proportions.total(0, min(last, num_blocks), source) for source in range(len(totals))]
    assert found == totals


def test_totals_over_10_to_the_12_blocks_stay_near_the_shares():
    rng = random.Random(0)
    for _ in range(50):
        wanted = normal([Fraction(rng.random()) for _ in range(rng.randint(2, 40))])
        totals = Proportions(64, wanted).totals(0, 10**12).tolist()
        assert sum(totals) == 64 * 10**12
        for share, total in zip(wanted, totals, strict=True):
            assert abs(total - share * 64 * 10**12) < 64


def test_a_linear_change_over_10_to_the_12_blocks_has_the_mean_of_its_ends():
    half = Proportions(64, [Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)], 10**12)
    assert abs(half.totals(0, 10**12)[0] - 32 * 10**12) < 64
    assert abs(half.totals(0, 5 * 10**11)[0] - 24 * 10**12) < 64


def test_the_counts_of_shares_that_are_not_whole_vary_from_block_to_block():
    found = counts(Proportions(3, [Fraction(1, 2), Fraction(1, 2)]), 0, 100)
    assert sorted(set(map(tuple, found))) == [(1, 2), (2, 1)]
    assert abs(sum(first for first, _ in found) - 150) <= 2


def test_shares_that_come_out_whole_are_the_same_in_every_block():
    fixed = Proportions(10, [Fraction(7, 10), Fraction(3, 10)])
    assert fixed.fixed.tolist() == [7, 3]
    assert counts(fixed, 10**12, 10**12 + 2) == [[7, 3], [7, 3]]
    assert fixed.total(5, 10**12, 1) == 3 * (10**12 - 5)


def test_shares_that_do_not_come_out_whole_or_change_are_not_fixed():
    assert Proportions(10, [Fraction(1, 3), Fraction(2, 3)]).fixed is None
    assert Proportions(2, [Fraction(1), Fraction(0)], [Fraction(1, 2), Fraction(1, 2)], 4).fixed is None


def test_one_source_has_all_the_turns():
    assert counts(Proportions(7, [Fraction(1)]), 3, 5) == [[7], [7]]


def test_a_source_without_a_share_has_no_turn():
    rare = Proportions(7, [Fraction(1, 3), Fraction(0), Fraction(2, 3)])
    assert rare.total(0, 10**12, 1) == 0


def test_counts_are_int64():
    for proportions in (Proportions(2, [Fraction(1, 2)] * 2), Proportions(3, [Fraction(1, 2)] * 2)):
        assert {proportions.counts(0, 3).dtype, proportions.totals(0, 3).dtype} == {np.dtype(np.int64)}


@pytest.mark.parametrize("weights", [[1, 1], [1, 2]])
def test_no_blocks_have_no_counts(weights):
    proportions = Proportions(2, normal([Fraction(weight) for weight in weights]))
    assert proportions.totals(4, 4).tolist() == [0, 0]
    assert [proportions.total(4, 4, source) for source in range(2)] == [0, 0]


def test_no_blocks_have_no_rows_whether_or_not_shares_are_fixed():
    assert Proportions(2, [Fraction(1, 3), Fraction(2, 3)]).counts(4, 4).shape == (0, 2)


def test_golden_counts():
    expected = [[1, 1, 2], [1, 1, 2], [1, 1, 2], [2, 0, 2], [1, 1, 2], [1, 1, 2]]
    assert counts(Proportions(4, [Fraction(1, 3), Fraction(1, 6), Fraction(1, 2)]), 0, 6) == expected
