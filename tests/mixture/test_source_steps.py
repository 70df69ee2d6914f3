"""The last steps of a mixture, which gather what is left of its sources, count and fill what they serve."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.mixture.source_steps import LastSteps, gather


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
