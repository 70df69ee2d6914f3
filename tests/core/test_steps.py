"""The step rule against steps that are cut from lists, as its docstring tells; and ranks, which split things evenly."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core import StepRule, Topology, split_evenly
from lightning_stateful.errors import ConfigurationError

Steps = list[list[list[int]]]
REMAINING = st.integers(0, 200)
RULES = st.builds(
    StepRule,
    batch_size=st.one_of(st.just(1), st.integers(1, 12)),
    num_replicas=st.integers(1, 12),
    drop_last=st.booleans(),
    exact=st.booleans(),
) | st.builds(StepRule, batch_size=st.integers(1, 8), num_replicas=st.integers(1, 8), pad=st.just(True))


def by_hand(rule: StepRule, remaining: int) -> Steps:
    """The steps of an epoch, each a list with one list of offsets a rank."""
    ranks = rule.num_replicas
    offsets = list(range(remaining))
    steps = [offsets[start : start + rule.full] for start in range(0, remaining, rule.full)]
    if steps and len(steps[-1]) < rule.full and rule.drop_last:
        steps.pop()
    if rule.pad:
        return [pad(step, ranks) for step in steps]
    if len(steps) > 1 and len(steps[-1]) < ranks:
        if rule.batch_size > 1:
            while len(steps[-1]) < ranks:
                steps[-1].insert(0, steps[-2].pop())
        elif rule.exact:
            steps[-2:] = [steps[-2] + steps[-1]]
    return [deal(step, ranks) for step in steps]


def deal(step: list[int], ranks: int) -> list[list[int]]:
    if len(step) < ranks:
        return [[step[rank % len(step)]] for rank in range(ranks)]
    rest = iter(step)
    return [list(itertools.islice(rest, len(step) // ranks + (rank < len(step) % ranks))) for rank in range(ranks)]


def pad(step: list[int], ranks: int) -> list[list[int]]:
    equal = -(-len(step) // ranks)
    circle = itertools.cycle(step)
    return [list(itertools.islice(circle, equal)) for _ in range(ranks)]


def serve(rule: StepRule, remaining: int) -> Steps:
    """The steps of an epoch, by asking the rule for one step after another."""
    steps, done = [], 0
    while rule.num_steps(remaining - done):
        steps.append([(done + rule.share(remaining - done, rank)).tolist() for rank in range(rule.num_replicas)])
        done += rule.step_size(remaining - done)
    return steps


def served_times(steps: Steps) -> Counter[int]:
    return Counter(offset for step in steps for batch in step for offset in batch)


def test_every_small_rule_agrees_with_the_one_by_hand() -> None:
    flags: list[dict[str, Any]] = [
        {},
        {"drop_last": True},
        {"exact": True},
        {"exact": True, "drop_last": True},
        {"pad": True},
    ]
    for batch_size, num_replicas, flag in itertools.product((1, 2, 3), (1, 2, 3, 4), flags):
        rule = StepRule(batch_size=batch_size, num_replicas=num_replicas, **flag)
        for remaining in range(28):
            assert serve(rule, remaining) == by_hand(rule, remaining), (rule, remaining)


@given(RULES, REMAINING)
def test_steps_and_what_they_serve_are_counted(rule: StepRule, remaining: int) -> None:
    steps = by_hand(rule, remaining)

    assert rule.num_steps(remaining) == len(steps)
    for count in range(len(steps)):
        assert rule.served(remaining, count) == len(served_times(steps[:count]))
    assert rule.served(remaining, len(steps)) == rule.served(remaining, len(steps) + 3) == remaining


@given(RULES, REMAINING)
def test_repeated_and_dropped_samples_are_counted(rule: StepRule, remaining: int) -> None:
    times = served_times(by_hand(rule, remaining))

    assert remaining - len(times) == rule.num_dropped(remaining) < rule.full
    assert times.total() - len(times) == rule.num_repeated(remaining) < rule.num_replicas


@given(RULES, REMAINING)
def test_merges_says_whether_the_end_comes_in_batches_of_two(rule: StepRule, remaining: int) -> None:
    sizes = {len(batch) for step in serve(rule, remaining) for batch in step}

    assert rule.ends_in_pairs(remaining) == (rule.batch_size == 1 and 2 in sizes)


@given(RULES, REMAINING)
def test_samples_are_repeated_only_where_the_docstring_says_so(rule: StepRule, remaining: int) -> None:
    if rule.pad:
        return
    fewer_than_ranks = 0 < remaining < rule.num_replicas
    short_remainder = rule.batch_size == 1 and not rule.exact and remaining % rule.num_replicas > 0

    assert (rule.num_repeated(remaining) > 0) == (not rule.drop_last and (fewer_than_ranks or short_remainder))


def test_shares_are_int64_and_counts_are_plain_ints() -> None:
    rule = StepRule(batch_size=4, num_replicas=3)
    counts = [rule.num_steps(13), rule.step_size(13), rule.served(13, 1), rule.num_repeated(13), rule.num_dropped(13)]

    assert {type(count) for count in counts} == {int}
    assert {rule.share(remaining, 1).dtype for remaining in (0, 1, 5, 100)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("name", ["batch_size", "num_replicas"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_what_is_no_positive_int_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be (an integer|at least 1), got {value!r}"):
        StepRule(**{"batch_size": 1, "num_replicas": 1, name: value})


# Topology


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_replicas": 0}, r"num_replicas must be at least 1, got 0\."),
        ({"rank": 4, "num_replicas": 4}, r"rank must be in range\(4\), got 4\."),
        ({"num_replicas": 2.5}, r"num_replicas must be an integer, got 2\.5"),
        ({"num_replicas": "2"}, "num_replicas must be an integer, got '2'"),
        ({"rank": 0.0}, r"rank must be an integer, got 0\.0"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology(**wrong)


@given(st.integers(0, 500), st.integers(1, 60))
def test_even_shares_laid_end_to_end_are_the_whole_in_order(count: int, num_parts: int) -> None:
    shares = [split_evenly(count, num_parts, part) for part in range(num_parts)]

    assert [item for share in shares for item in share] == list(range(count))
    assert len(shares[0]) - len(shares[-1]) <= 1
    assert sorted(map(len, shares), reverse=True) == list(map(len, shares))
