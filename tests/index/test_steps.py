import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError

REMAINING = st.integers(0, 200)
RULES = st.builds(
    StepRule,
    batch_size=st.one_of(st.just(1), st.integers(1, 12)),
    num_replicas=st.integers(1, 12),
    drop_last=st.booleans(),
    exact=st.booleans(),
)


def simulate(rule, remaining):
    """The steps of an epoch, each a list with one list of offsets a rank, cut from lists as the docstring tells."""
    ranks, batch_size = rule.num_replicas, rule.batch_size
    slots = list(range(remaining))
    steps = []
    while len(slots) >= ranks * batch_size:
        steps.append(slots[: ranks * batch_size])
        slots = slots[ranks * batch_size :]
    if slots and not rule.drop_last:
        steps.append(slots)
        if len(steps) > 1 and len(slots) < ranks:
            if batch_size > 1:
                while len(steps[-1]) < ranks:
                    steps[-1].insert(0, steps[-2].pop())
            elif rule.exact:
                steps[-2:] = [steps[-2] + steps[-1]]
    return [deal(step, ranks) for step in steps]


def deal(step, ranks):
    if len(step) < ranks:
        return [[step[rank % len(step)]] for rank in range(ranks)]
    sizes = [len(step) // ranks + (rank < len(step) % ranks) for rank in range(ranks)]
    return [[step[sum(sizes[:rank]) + i] for i in range(sizes[rank])] for rank in range(ranks)]


def serve(rule, remaining, offset=0):
    """The steps of an epoch, by asking the rule for one step after another."""
    steps = []
    while rule.num_steps(remaining):
        steps.append([(offset + rule.share(remaining, rank)).tolist() for rank in range(rule.num_replicas)])
        offset, remaining = offset + rule.step_size(remaining), remaining - rule.step_size(remaining)
    return steps


def count_slots(steps):
    return Counter(slot for step in steps for batch in step for slot in batch)


@given(RULES, REMAINING)
def test_the_shares_of_all_ranks_are_those_of_a_slow_simulation(rule, remaining):
    assert serve(rule, remaining) == simulate(rule, remaining)


def test_every_small_rule_agrees_with_the_slow_simulation():
    for batch_size in (1, 2, 3):
        for num_replicas in (1, 2, 3, 4):
            for flags in ({}, {"drop_last": True}, {"exact": True}, {"drop_last": True, "exact": True}):
                rule = StepRule(batch_size=batch_size, num_replicas=num_replicas, **flags)
                for remaining in range(28):
                    assert serve(rule, remaining) == simulate(rule, remaining), (rule, remaining)


@given(RULES, REMAINING)
def test_num_steps_counts_the_steps_of_the_simulation(rule, remaining):
    assert rule.num_steps(remaining) == len(simulate(rule, remaining))


@given(RULES, REMAINING)
def test_a_step_leaves_one_step_fewer(rule, remaining):
    if rule.num_steps(remaining):
        assert rule.num_steps(remaining - rule.step_size(remaining)) == rule.num_steps(remaining) - 1


@given(RULES, REMAINING)
def test_more_slots_never_need_fewer_steps(rule, remaining):
    assert rule.num_steps(remaining) <= rule.num_steps(remaining + 1)


@given(RULES, REMAINING)
def test_served_is_the_sum_of_the_step_sizes(rule, remaining):
    sizes, left = [], remaining
    for steps in range(rule.num_steps(remaining)):
        assert rule.served(remaining, steps) == sum(sizes)
        sizes.append(rule.step_size(left))
        left -= sizes[-1]


@given(RULES, REMAINING, st.integers(0, 3))
def test_all_slots_count_as_served_once_no_step_is_left(rule, remaining, more):
    assert rule.served(remaining, rule.num_steps(remaining) + more) == remaining


@given(RULES, REMAINING, st.integers(0, 20), st.integers(0, 20))
def test_serving_in_two_parts_is_serving_in_one(rule, remaining, first, second):
    middle = rule.served(remaining, first)
    assert middle + rule.served(remaining - middle, second) == rule.served(remaining, first + second)


@given(RULES, REMAINING)
def test_no_rank_gets_an_empty_batch(rule, remaining):
    assert all(batch for step in serve(rule, remaining) for batch in step)


@given(RULES, REMAINING)
def test_the_batches_of_a_step_differ_by_at_most_one_slot(rule, remaining):
    for step in serve(rule, remaining):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1


@given(RULES, REMAINING)
def test_a_batch_exceeds_the_batch_size_only_by_the_pairs_of_exact(rule, remaining):
    largest = max((len(batch) for step in serve(rule, remaining) for batch in step), default=0)
    assert largest <= (2 if rule.exact and rule.batch_size == 1 else rule.batch_size)


@given(RULES, REMAINING)
def test_steps_before_the_last_two_are_full(rule, remaining):
    for step in serve(rule, remaining)[:-2]:
        assert [len(batch) for batch in step] == [rule.batch_size] * rule.num_replicas


@given(RULES, REMAINING)
def test_every_slot_comes_once_apart_from_those_counted_as_repeated_or_dropped(rule, remaining):
    times = count_slots(serve(rule, remaining))
    assert set(times) <= set(range(remaining))
    assert remaining - len(times) == rule.num_dropped(remaining)
    assert sum(times.values()) - len(times) == rule.num_repeated(remaining)


@given(RULES, REMAINING)
def test_what_drop_last_drops_is_the_end_and_less_than_a_full_step(rule, remaining):
    assert sorted(count_slots(serve(rule, remaining))) == list(range(remaining - rule.num_dropped(remaining)))
    assert rule.num_dropped(remaining) < rule.full


@given(RULES, REMAINING)
def test_slots_are_repeated_only_where_the_docstring_says_so(rule, remaining):
    fewer_than_ranks = 0 < remaining < rule.num_replicas
    short_remainder = rule.batch_size == 1 and not rule.exact and remaining % rule.num_replicas > 0
    expected = not rule.drop_last and (fewer_than_ranks or short_remainder)
    assert (rule.num_repeated(remaining) > 0) == expected


@given(RULES, REMAINING)
def test_fewer_slots_are_repeated_than_there_are_ranks(rule, remaining):
    assert 0 <= rule.num_repeated(remaining) < rule.num_replicas


@given(RULES, REMAINING)
def test_only_the_last_step_repeats(rule, remaining):
    times = count_slots(serve(rule, remaining)[:-1])
    assert set(times.values()) <= {1}


PHASES = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(0, 5)), min_size=1, max_size=5
)


def replay(length, phases, **flags):
    """What each step of an epoch serves when the topology changes after every phase; the last runs to the end."""
    consumed, served = 0, []
    for number, (batch_size, num_replicas, exact, num_steps) in enumerate(phases):
        rule = StepRule(batch_size=batch_size, num_replicas=num_replicas, exact=exact, **flags)
        steps = serve(rule, length - consumed, offset=consumed)
        steps = steps if number == len(phases) - 1 else steps[:num_steps]
        served += [[slot for batch in step for slot in batch] for step in steps]
        consumed += sum(len(set(step)) for step in served[len(served) - len(steps) :])
    return served


@given(st.integers(0, 150), PHASES)
def test_every_history_of_resizings_replays_one_sequence(length, phases):
    served = replay(length, phases)
    assert [slot for step in served for slot in dict.fromkeys(step)] == list(range(length))


@given(st.integers(0, 150), PHASES)
def test_a_history_of_resizings_repeats_slots_in_its_last_step_only(length, phases):
    served = replay(length, phases)
    assert all(len(step) == len(set(step)) for step in served[:-1])


@given(st.integers(0, 150), PHASES)
def test_with_drop_last_every_history_serves_the_sequence_up_to_a_dropped_end(length, phases):
    served = [slot for step in replay(length, phases, drop_last=True) for slot in step]
    assert served == list(range(len(served)))
    assert length - len(served) < phases[-1][0] * phases[-1][1]


def test_a_short_remainder_takes_from_the_step_before_it():
    rule = StepRule(batch_size=4, num_replicas=3)
    assert serve(rule, 13) == [[[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]], [[10], [11], [12]]]


def test_a_short_remainder_at_batch_size_1_is_repeated():
    rule = StepRule(batch_size=1, num_replicas=3)
    assert serve(rule, 4) == [[[0], [1], [2]], [[3], [3], [3]]]


def test_exact_serves_a_short_remainder_at_batch_size_1_with_the_step_before_it():
    rule = StepRule(batch_size=1, num_replicas=3, exact=True)
    assert serve(rule, 5) == [[[0, 1], [2, 3], [4]]]


def test_fewer_slots_than_ranks_are_repeated_in_turn():
    rule = StepRule(batch_size=4, num_replicas=5)
    assert serve(rule, 2) == [[[0], [1], [0], [1], [0]]]


def test_drop_last_leaves_out_an_epoch_smaller_than_a_step():
    rule = StepRule(batch_size=4, num_replicas=5, drop_last=True)
    assert (rule.num_steps(19), rule.step_size(19), rule.num_dropped(19), rule.num_repeated(19)) == (0, 0, 19, 0)


def test_an_empty_epoch_has_no_step():
    rule = StepRule(batch_size=4, num_replicas=5)
    assert (rule.num_steps(0), rule.step_size(0), rule.num_dropped(0), rule.num_repeated(0)) == (0, 0, 0, 0)


def test_a_share_is_int64_also_when_it_is_empty():
    rule = StepRule(batch_size=4, num_replicas=2)
    assert {rule.share(remaining, 1).dtype for remaining in (0, 1, 5, 100)} == {np.dtype(np.int64)}
    assert rule.share(0, 1).shape == (0,)


def test_counts_are_plain_ints():
    rule = StepRule(batch_size=4, num_replicas=3)
    counts = [rule.num_steps(13), rule.step_size(13), rule.served(13, 1), rule.num_repeated(13), rule.num_dropped(13)]
    assert {type(count) for count in counts} == {int}


def test_the_arithmetic_holds_for_2_to_the_40_slots():
    rule = StepRule(batch_size=3, num_replicas=7)
    num_steps = rule.num_steps(2**40)
    assert num_steps == -(-(2**40) // 21)
    assert rule.served(2**40, num_steps - 1) + rule.step_size(2**40 - rule.served(2**40, num_steps - 1)) == 2**40


@pytest.mark.parametrize("name", ["batch_size", "num_replicas"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "2", None, True])
def test_what_is_no_positive_int_is_refused_by_name(name, value):
    values = {"batch_size": 1, "num_replicas": 1, name: value}
    with pytest.raises(ConfigurationError) as caught:
        StepRule(**values)
    assert str(caught.value) == f"{name} must be an int of at least 1, got {value!r}."


def test_a_rule_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepRule(batch_size=1).batch_size = 2


PADDED = st.builds(StepRule, batch_size=st.integers(1, 8), num_replicas=st.integers(1, 8), pad=st.just(True))


def simulate_padded(rule, remaining):
    """The steps of an epoch: every step deals equal shares, the last one around in a circle of its own slots."""
    slots, steps = list(range(remaining)), []
    while slots:
        step, slots = slots[: rule.full], slots[rule.full :]
        equal = -(-len(step) // rule.num_replicas)
        dealt = list(itertools.islice(itertools.cycle(step), equal * rule.num_replicas))
        steps.append([dealt[rank * equal : (rank + 1) * equal] for rank in range(rule.num_replicas)])
    return steps


@given(PADDED, REMAINING)
def test_padded_shares_are_those_of_a_slow_simulation(rule, remaining):
    assert serve(rule, remaining) == simulate_padded(rule, remaining)


@given(PADDED, REMAINING)
def test_padded_steps_and_what_they_serve_are_counted(rule, remaining):
    steps = simulate_padded(rule, remaining)
    assert rule.num_steps(remaining) == len(steps)
    assert [rule.served(remaining, count) for count in range(len(steps))] == [
        count * rule.full for count in range(len(steps))
    ]
    assert rule.served(remaining, len(steps)) == remaining


@given(PADDED, REMAINING)
def test_padding_gives_every_rank_the_same_number_of_slots_and_leaves_none_out(rule, remaining):
    steps = serve(rule, remaining)
    assert all(len({len(batch) for batch in step}) == 1 for step in steps)
    assert sorted(count_slots(steps)) == list(range(remaining))


@given(PADDED, REMAINING)
def test_what_padding_repeats_is_counted_and_stands_in_the_last_step(rule, remaining):
    steps = serve(rule, remaining)
    times = count_slots(steps)
    assert times.total() - len(times) == rule.num_repeated(remaining) < rule.num_replicas
    assert set(count_slots(steps[:-1]).values()) <= {1}


def test_padding_fills_the_last_step_from_its_own_slots_in_turn():
    rule = StepRule(batch_size=2, num_replicas=3, pad=True)
    assert serve(rule, 10) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [6, 7]]]


def test_padding_repeats_fewer_slots_than_ranks_in_turn():
    assert serve(StepRule(batch_size=4, num_replicas=5, pad=True), 2) == [[[0], [1], [0], [1], [0]]]


def test_nothing_is_repeated_where_drop_last_leaves_the_padded_step_out():
    assert StepRule(batch_size=1, num_replicas=2, pad=True, drop_last=True).num_repeated(5) == 0
