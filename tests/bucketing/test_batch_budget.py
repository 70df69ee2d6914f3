"""A batch has as many samples as its budget allows, and what is too long is refused or dropped."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.bucketing.budget import Budget, QuadraticCost, drop_too_long
from lightning_stateful.bucketing.lengths import histogram
from lightning_stateful.errors import ConfigurationError

LENGTHS = np.array([3, 9, 9, 4, 12, 10, 3])


@st.composite
def token_budgets(draw):
    cost = draw(st.one_of(st.none(), st.integers(1, 200)))
    return Budget(
        max_tokens=draw(st.integers(1, 2000)),
        max_samples=draw(st.one_of(st.none(), st.integers(1, 40))),
        multiple=draw(st.one_of(st.just(1), st.integers(2, 9))),
        cost=None if cost is None else QuadraticCost(cost),
    )


def by_counting(budget, longest):
    """The most samples that fit, found by adding one after the other."""
    each = max(longest, 1)
    cost = each if budget.cost is None else each + Fraction(each**2, budget.cost.length)
    count = 0
    while (count + 1) * cost <= budget.max_tokens and count != budget.max_samples:
        count += 1
    while count > budget.multiple and count % budget.multiple:
        count -= 1
    return count


@given(token_budgets(), st.integers(0, 300))
def test_a_full_batch_has_as_many_samples_as_fit(budget, longest):
    count = budget.num_samples(longest)
    assert count == by_counting(budget, longest)
    assert budget.num_samples(longest + 1) <= count
    assert budget.use(longest, count) <= 1
    if longest and budget.max_samples is None and budget.multiple == 1:
        assert budget.use(longest, count + 1) > 1


def test_a_budget_stands_in_for_its_short_forms_and_not_beside_them():
    budget = Budget(max_tokens=9, multiple=2)
    assert Budget.of(budget) is budget
    assert Budget.of(None, batch_size=3) == Budget(batch_size=3)
    with pytest.raises(ConfigurationError, match=r"Leave out max_tokens=None and batch_size=4"):
        Budget.of(budget, batch_size=4)
    with pytest.raises(ConfigurationError, match="budget must be a Budget, got 9"):
        Budget.of(9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either max_tokens or batch_size, got max_tokens=None, batch_size=None"),
        ({"max_tokens": 5, "batch_size": 3}, "either max_tokens or batch_size, got max_tokens=5, batch_size=3"),
        ({"batch_size": True}, "batch_size must be an integer, got True"),
        ({"max_tokens": 5, "multiple": 0}, "multiple must be at least 1, got 0"),
        ({"batch_size": 5, "max_samples": 2}, "leave them out of batch_size"),
        ({"max_tokens": 5, "cost": 3}, "cost must be a QuadraticCost, got 3"),
    ],
)
def test_budgets_out_of_range_are_refused_with_their_values(options, said):
    with pytest.raises(ConfigurationError, match=said):
        Budget(**options)


# Samples that are too long


@pytest.mark.parametrize("limit", [3, 9, 13])
def test_dropping_splits_the_lengths_at_the_limit(limit):
    kept, dropped = drop_too_long(histogram(LENGTHS), Budget(max_tokens=limit, too_long="drop"))
    assert kept.values.tolist() == sorted({length for length in LENGTHS.tolist() if length <= limit})
    assert dropped == sum(length > limit for length in LENGTHS.tolist()) == 7 - int(kept.counts.sum())


@pytest.mark.parametrize(
    ("max_tokens", "too_long", "said"),
    [
        (9, "error", '2 of 7 samples are longer than max_tokens=9 allows; the longest has 12 tokens.*too_long="drop"'),
        (2, "drop", r"7 of 7 samples are longer.*would leave no sample\. Raise max_tokens"),
        (12, "alone", r"too_long must be one of \('error', 'drop'\), got 'alone'"),
    ],
)
def test_what_cannot_be_served_is_refused(max_tokens, too_long, said):
    with pytest.raises(ConfigurationError, match=said):
        drop_too_long(histogram(LENGTHS), Budget(max_tokens=max_tokens, too_long=too_long))
