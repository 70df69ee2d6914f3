"""Positions and steps of one rank against lists that are cut in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.steps import StepRule
from lightning_stateful.index.position import Position
from lightning_stateful.index.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots(StepPlan):
    """So many slots, and nothing else."""

    length: int
    rule: StepRule
    rank: int

    def num_slots(self) -> int:
        return self.length


RULES = st.builds(
    StepRule,
    batch_size=st.integers(1, 6),
    num_replicas=st.integers(1, 6),
    drop_last=st.booleans(),
    exact=st.booleans(),
) | st.builds(StepRule, batch_size=st.integers(1, 6), num_replicas=st.integers(1, 6), pad=st.just(True))
LENGTHS = st.integers(0, 120)


def steps_from(rule: StepRule, consumed: int, length: int) -> list[list[list[int]]]:
    """The steps of a pass from a slot on, each a list with one list of slots a rank, one question after another."""
    steps, left = [], length - consumed
    while rule.num_steps(left):
        steps.append([(length - left + rule.share(left, rank)).tolist() for rank in range(rule.num_replicas)])
        left -= rule.step_size(left)
    return steps


def plans(rule: StepRule, length: int) -> list[Slots]:
    return [Slots(length=length, rule=rule, rank=rank) for rank in range(rule.num_replicas)]


@given(RULES, LENGTHS)
def test_a_plan_counts_the_batches_of_an_epoch(rule: StepRule, length: int) -> None:
    assert {plan.num_batches() for plan in plans(rule, length)} == {len(steps_from(rule, 0, length))}


@given(RULES, LENGTHS)
def test_a_plan_counts_the_slots_of_its_rank(rule: StepRule, length: int) -> None:
    steps = steps_from(rule, 0, length)
    for plan in plans(rule, length):
        assert plan.num_shared() == sum(len(step[plan.rank]) for step in steps)


@given(RULES, st.integers(1, 120), st.integers(0, 30))
def test_the_position_after_some_steps_is_behind_the_slots_that_they_served(
    rule: StepRule, length: int, count: int
) -> None:
    steps = steps_from(rule, 0, length)
    plan = plans(rule, length)[0]
    served = {slot for step in steps[:count] for batch in step for slot in batch}
    expected = length if count >= len(steps) else len(served)

    assert plan.after(Position(), count).consumed == expected


@given(RULES, st.integers(1, 120), st.integers(0, 30))
def test_what_is_left_after_some_steps_is_the_rest_of_them(rule: StepRule, length: int, count: int) -> None:
    steps = steps_from(rule, 0, length)
    plan = plans(rule, length)[0]
    position = plan.after(Position(), count)
    if count < len(steps):
        assert plan.num_batches(position) == len(steps) - count
        assert steps_from(rule, position.consumed, length) == steps[count:]
    else:
        assert not plan.in_first_pass(position)


@given(RULES, LENGTHS)
def test_plain_steps_are_full_and_the_last_shares_are_what_follows(rule: StepRule, length: int) -> None:
    steps = steps_from(rule, 0, length)
    for plan in plans(rule, length):
        plain = plan.num_plain(length)
        start = plain * rule.full
        assert [step[plan.rank] for step in steps[:plain]] == [
            list(range(first + plan.rank * rule.batch_size, first + (plan.rank + 1) * rule.batch_size))
            for first in range(0, start, rule.full)
        ]
        assert [(start + share).tolist() for share in plan.last_shares(length - start)] == [
            step[plan.rank] for step in steps[plain:]
        ]


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 4))
def test_passes_within_an_epoch_begin_at_multiples_of_its_length(length: int, consumed: int, passes: int) -> None:
    plan = Slots(length=length, rule=StepRule(batch_size=2), rank=0)
    after = plan.pass_after(Position(epoch=3, consumed=consumed), passes)

    assert after == Position(epoch=3, consumed=(consumed // length + passes) * length)
    assert plan.remaining(after) == length


def test_a_new_epoch_begins_with_the_present_number_of_ranks() -> None:
    plan = Slots(length=9, rule=StepRule(batch_size=2, num_replicas=3), rank=1)

    assert plan.begin(4, Position(epoch=3, consumed=5, width=7)) == Position(epoch=4, width=3)


def test_the_end_keeps_epoch_and_width() -> None:
    plan = Slots(length=9, rule=StepRule(batch_size=2), rank=0)

    assert plan.end(Position(epoch=3, consumed=5, width=7)) == Position(epoch=3, consumed=9, width=7)


@pytest.mark.parametrize("consumed", [0, 4])
def test_of_an_empty_epoch_nothing_is_left(consumed: int) -> None:
    plan = Slots(length=0, rule=StepRule(batch_size=2, num_replicas=2), rank=0)
    position = Position(consumed=consumed)

    assert (plan.remaining(position), plan.num_batches(position), plan.num_shared()) == (0, 0, 0)
    assert not plan.in_first_pass(position)


def test_the_steps_of_2_to_the_40_slots_are_computed() -> None:
    plan = Slots(length=2**40, rule=StepRule(batch_size=3, num_replicas=7), rank=6)
    near_the_end = plan.after(Position(), plan.num_batches() - 2)

    assert plan.num_batches(near_the_end) == 2
    assert plan.num_shared() in (2**40 // 7, 2**40 // 7 + 1)
