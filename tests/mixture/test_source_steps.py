"""What the rest of an epoch takes of each source: its own steps, and the last ones, which gather what is left."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.core.permutation import Indices
from lightning_stateful.core.steps import StepRule
from lightning_stateful.mixture.source_steps import LastSteps, SourceSteps, gather, shares_of_steps

RULES = st.builds(
    StepRule,
    batch_size=st.one_of(st.just(1), st.integers(1, 8)),
    num_replicas=st.integers(1, 9),
    drop_last=st.booleans(),
)


def ranges(shares: tuple[Indices, Indices]) -> list[list[int]]:
    return [list(range(start, start + size)) for start, size in zip(*(part.tolist() for part in shares), strict=True)]


def steps_of(source: SourceSteps, rule: StepRule, count: int) -> list[list[list[int]]]:
    """Of every step, the samples of each rank."""
    ranks = [ranges(source.shares(np.arange(count), rank)) for rank in range(rule.num_replicas)]
    return [list(step) for step in zip(*ranks, strict=True)]


def samples_of(steps: list[list[list[int]]]) -> list[int]:
    return [sample for step in steps for batch in step for sample in batch]


@given(RULES, st.integers(1, 150), st.data())
def test_steps_computed_at_once_are_those_that_the_rule_gives_one_by_one(
    rule: StepRule, length: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, rule.num_replicas - 1))
    steps = data.draw(st.permutations(range(rule.num_steps(length))))
    expected = []
    for step in steps:
        served = rule.served(length, step)
        expected.append((served + rule.share(length - served, rank)).tolist())
    assert ranges(shares_of_steps(length, rule, np.array(steps, dtype=np.int64), rank)) == expected


@given(RULES, st.integers(0, 150), st.integers(0, 160))
def test_steps_and_what_is_left_after_them_are_all_that_remains(rule: StepRule, remaining: int, served: int) -> None:
    source = SourceSteps(served, remaining, rule)
    steps = steps_of(source, rule, source.num_steps)
    found = samples_of(steps)
    assert found == list(range(served, served + len(found)))
    assert all(batch for step in steps for batch in step)
    dropped = remaining - len(found) - source.left
    assert 0 <= dropped < (rule.batch_size if rule.drop_last else 1)
    assert source.left < (rule.full if rule.drop_last else rule.num_replicas)
    assert [source.served_after(count) for count in range(len(steps) + 1)] == [
        served + len(samples_of(steps[:count])) for count in range(len(steps) + 1)
    ]


@st.composite
def what_is_left(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Fewer samples of each source than ranks, as the steps of an epoch leave them."""
    num_ranks, count = draw(st.integers(1, 64)), draw(st.integers(1, 8))
    left = draw(st.lists(st.integers(0, num_ranks - 1), min_size=count, max_size=count))
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=count, max_size=count))
    return left, sizes, num_ranks


def batches_of(last: LastSteps) -> list[list[list[tuple[int, int]]]]:
    """Of every step, for every rank, the samples of its batch as pairs of source and number."""
    return [
        [
            [(source, start + number) for number in range(size)]
            for source, start, size in zip(*(row.tolist() for row in rows), strict=True)
        ]
        for rows in zip(last.sources, last.starts, last.sizes, strict=True)
    ]


def times(steps: list[list[list[tuple[int, int]]]]) -> Counter[tuple[int, int]]:
    return Counter(sample for step in steps for batch in step for sample in batch)


@given(what_is_left())
def test_every_sample_is_gathered_once_apart_from_repeats_in_the_last_step(
    case: tuple[list[int], list[int], int],
) -> None:
    left, sizes, num_ranks = case
    last = gather(*case)
    steps = batches_of(last)
    assert set(times(steps)) == {(source, number) for source, count in enumerate(left) for number in range(count)}
    assert set(times(steps[:-1]).values()) <= {1}
    assert times(steps).total() - sum(left) == last.num_repeated < num_ranks
    assert (last.num_repeated > 0) == (sum(left) < last.num_steps * num_ranks)
    assert last.num_steps == -(-sum(-(-count // size) for count, size in zip(left, sizes, strict=True)) // num_ranks)
    assert all(len(step) == num_ranks for step in steps)
    assert all(1 <= len(batch) <= sizes[batch[0][0]] for step in steps for batch in step)


@given(what_is_left(), st.booleans(), st.integers(1, 5))
def test_gathered_steps_count_what_the_first_of_them_serve(
    case: tuple[list[int], list[int], int], drop_last: bool, more: int
) -> None:
    left = [count * more if drop_last else count for count in case[0]]
    last = gather(left, *case[1:], drop_last=drop_last)
    for steps in range(last.num_steps + 1):
        found = Counter(source for source, _ in times(batches_of(last)[:steps]))
        assert last.served(steps, len(left)).tolist() == [found[source] for source in range(len(left))]


@given(what_is_left(), st.integers(1, 5))
def test_with_drop_last_only_full_batches_of_full_steps_are_gathered(
    case: tuple[list[int], list[int], int], more: int
) -> None:
    left, sizes, num_ranks = [count * more for count in case[0]], case[1], case[2]
    last = gather(left, sizes, num_ranks, drop_last=True)
    assert last.num_steps == sum(count // size for count, size in zip(left, sizes, strict=True)) // num_ranks
    assert all(len(batch) == sizes[batch[0][0]] for step in batches_of(last) for batch in step)
    assert set(times(batches_of(last)).values()) <= {1}


@pytest.mark.parametrize("drop_last", [False, True])
def test_nothing_left_takes_no_steps(drop_last: bool) -> None:
    last = gather([0, 0], [2, 3], 4, drop_last=drop_last)
    assert (last.num_steps, last.num_repeated) == (0, 0)
    assert last.served(0, 2).tolist() == [0, 0]
