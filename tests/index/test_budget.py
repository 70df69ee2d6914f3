import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.budget import Budget, QuadraticCost

optional = st.one_of(st.none(), st.integers(1, 40))


@st.composite
def token_budgets(draw):
    cost = draw(st.one_of(st.none(), st.integers(1, 200)))
    return Budget(
        max_tokens=draw(st.integers(1, 2000)),
        max_samples=draw(optional),
        multiple=draw(st.one_of(st.just(1), st.integers(2, 9))),
        cost=None if cost is None else QuadraticCost(cost),
    )


def cost_of(budget, longest):
    return longest if budget.cost is None else longest + Fraction(longest**2, budget.cost.length)


def by_counting(budget, longest):
    """The most samples that fit, found by adding one after the other."""
    count = 0
    while (count + 1) * cost_of(budget, max(longest, 1)) <= budget.max_tokens and count != budget.max_samples:
        count += 1
    while count > budget.multiple and count % budget.multiple:
        count -= 1
    return count


@given(token_budgets(), st.integers(0, 300))
def test_a_full_batch_has_as_many_samples_as_fit(budget, longest):
    assert budget.num_samples(longest) == by_counting(budget, longest)


@given(token_budgets(), st.integers(0, 300), st.integers(0, 300))
def test_of_longer_samples_no_more_fit(budget, first, second):
    shorter, longer = sorted((first, second))
    assert budget.num_samples(longer) <= budget.num_samples(shorter)


@given(token_budgets(), st.integers(1, 300))
def test_a_full_batch_uses_no_more_than_the_budget_and_one_sample_more_would(budget, longest):
    assume(budget.num_samples(longest))
    assert budget.use(longest, budget.num_samples(longest)) <= 1
    if budget.max_samples is None and budget.multiple == 1:
        assert budget.use(longest, budget.num_samples(longest) + 1) > 1


def test_tokens_are_the_longest_times_the_count():
    budget = Budget(max_tokens=100)
    assert [budget.num_samples(longest) for longest in (1, 33, 34, 50, 51, 100, 101)] == [100, 3, 2, 2, 1, 1, 0]
    assert budget.use(33, 3) == 0.99


def test_a_quadratic_cost_counts_the_square_beside_the_tokens():
    budget = Budget(max_tokens=120, cost=QuadraticCost(10))
    assert [budget.num_samples(longest) for longest in (10, 20, 30, 31)] == [6, 2, 1, 0]
    assert budget.use(20, 2) == 1.0


def test_a_quadratic_cost_is_exact_for_the_longest_lengths():
    longest = 2**41 - 1
    cost = longest * 3 + longest**2
    assert Budget(max_tokens=-(-cost * 7 // 3), cost=QuadraticCost(3)).num_samples(longest) == 7
    assert Budget(max_tokens=cost * 7 // 3 - 1, cost=QuadraticCost(3)).num_samples(longest) == 6


def test_max_samples_limits_a_batch_of_short_samples():
    budget = Budget(max_tokens=100, max_samples=8)
    assert [budget.num_samples(longest) for longest in (0, 5, 13, 101)] == [8, 8, 7, 0]


def test_batches_of_at_least_a_multiple_have_a_multiple_of_it():
    budget = Budget(max_tokens=100, multiple=8)
    assert [budget.num_samples(longest) for longest in (4, 6, 12, 13, 50)] == [24, 16, 8, 7, 2]


def test_multiple_rounds_max_samples_and_batch_size_down():
    assert Budget(max_tokens=1000, max_samples=13, multiple=4).num_samples(1) == 12
    assert Budget(batch_size=13, multiple=4).num_samples(1) == 12


def test_a_sample_without_tokens_counts_as_one_token():
    assert Budget(max_tokens=5).num_samples(0) == 5


def test_a_batch_size_is_the_same_for_every_length():
    budget = Budget(batch_size=6)
    assert {budget.num_samples(longest) for longest in (0, 1, 2**41)} == {6}
    assert budget.use(2**41, 3) == 0.5


def test_several_batch_sizes_hold_up_to_their_ends():
    budget = Budget(batch_size=(9, 6, 2), ends=(4, 10, 20))
    assert [budget.num_samples(longest) for longest in (0, 4, 5, 10, 11, 20, 21)] == [9, 9, 6, 6, 2, 2, 2]
    assert budget.use(7, 3) == 0.5
    assert budget.describe() == {"batch_size": [9, 6, 2]}


def test_a_multiple_rounds_each_of_several_batch_sizes_down():
    budget = Budget(batch_size=(9, 6, 2), ends=(4, 10, 20), multiple=4)
    assert [budget.num_samples(longest) for longest in (4, 10, 20)] == [8, 4, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either max_tokens or batch_size, got max_tokens=None, batch_size=None"),
        ({"max_tokens": 5, "batch_size": 3}, "either max_tokens or batch_size, got max_tokens=5, batch_size=3"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1"),
        ({"batch_size": True}, "batch_size must be at least 1, got True"),
        ({"max_tokens": 9, "max_samples": 0}, "max_samples must be at least 1, got 0"),
        ({"max_tokens": 9, "multiple": 0}, "multiple must be at least 1, got 0"),
        ({"max_tokens": 9.5}, r"max_tokens must be an integer, got 9\.5"),
        ({"max_tokens": "9"}, "max_tokens must be an integer, got '9'"),
        ({"batch_size": 9, "max_samples": 3}, "leave them out of batch_size"),
        ({"batch_size": 9, "cost": QuadraticCost(3)}, "leave them out of batch_size"),
        ({"batch_size": (4, 2), "ends": (5,)}, "names 2 buckets, and there are 1"),
        ({"batch_size": (), "ends": ()}, "names 0 buckets"),
        ({"batch_size": (2, 4), "ends": (5, 9)}, "must not grow with the length"),
        ({"batch_size": (4, 0), "ends": (5, 9)}, "batch_size must be at least 1, got 0"),
        ({"batch_size": (4, 2.5), "ends": (5, 9)}, r"batch_size must be an integer, got 2\.5"),
        ({"max_tokens": 9, "cost": 3}, "cost must be a QuadraticCost, got 3"),
    ],
)
def test_what_is_no_budget_is_refused_with_its_values(options, said):
    with pytest.raises(ConfigurationError, match=said):
        Budget(**options)


@pytest.mark.parametrize(("length", "said"), [(0, "at least 1, got 0"), (2.5, "must be an integer, got 2.5")])
def test_a_quadratic_cost_needs_a_length(length, said):
    with pytest.raises(ConfigurationError, match=f"QuadraticCost.length must be {said}|QuadraticCost.length {said}"):
        QuadraticCost(length)


def test_a_description_names_what_was_set():
    assert Budget(max_tokens=9).describe() == {"max_tokens": 9}
    assert Budget(batch_size=4, multiple=2).describe() == {"batch_size": 4, "multiple": 2}
    full = Budget(max_tokens=9, max_samples=5, multiple=2, cost=QuadraticCost(7))
    assert full.describe() == {"max_tokens": 9, "max_samples": 5, "multiple": 2, "quadratic_length": 7}


def test_numbers_of_numpy_become_plain_ones():
    budget = Budget(max_tokens=np.int64(9), max_samples=np.uint8(4), cost=QuadraticCost(np.int32(7)))
    assert json.loads(json.dumps(budget.describe())) == {"max_tokens": 9, "max_samples": 4, "quadratic_length": 7}


def test_a_budget_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget(max_tokens=9).max_tokens = 10
