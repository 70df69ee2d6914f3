from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.index.leftovers import deal_out


@st.composite
def leftovers(draw):
    """Fewer samples of each source than ranks, as the groups of an epoch leave them."""
    num_ranks, count = draw(st.integers(1, 64)), draw(st.integers(1, 8))
    counts = draw(st.lists(st.integers(0, num_ranks - 1), min_size=count, max_size=count))
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=count, max_size=count))
    return counts, sizes, num_ranks


def cells(dealt):
    """Of every step, for every rank, the samples of its batch as pairs of source and number."""
    return [
        [
            [(source, start + number) for number in range(size)]
            for source, start, size in zip(*(row.tolist() for row in rows), strict=True)
        ]
        for rows in zip(dealt.sources, dealt.starts, dealt.sizes, strict=True)
    ]


def times(steps):
    return Counter(sample for step in steps for batch in step for sample in batch)


@given(leftovers())
def test_every_sample_is_served_once_apart_from_repeats_in_the_last_step(case):
    counts, _, num_ranks = case
    dealt = deal_out(*case)
    steps = cells(dealt)
    assert set(times(steps)) == {(source, number) for source, count in enumerate(counts) for number in range(count)}
    assert set(times(steps[:-1]).values()) <= {1}
    assert times(steps).total() - sum(counts) == dealt.num_repeated < num_ranks


@given(leftovers())
def test_samples_are_repeated_only_where_there_are_too_few_for_a_batch_a_rank(case):
    dealt = deal_out(*case)
    assert (dealt.num_repeated > 0) == (sum(case[0]) < dealt.num_steps * case[2])


@given(leftovers())
def test_every_rank_has_a_batch_of_legal_size_in_every_step(case):
    _, sizes, num_ranks = case
    for step in cells(deal_out(*case)):
        assert len(step) == num_ranks
        assert all(1 <= len(batch) <= sizes[batch[0][0]] for batch in step)


@given(leftovers())
def test_there_are_no_more_steps_than_batches_need(case):
    counts, sizes, num_ranks = case
    batches = sum(-(-count // size) for count, size in zip(counts, sizes, strict=True))
    assert deal_out(*case).num_steps == -(-batches // num_ranks)


@given(leftovers())
def test_the_samples_of_a_source_come_in_their_order(case):
    flat = [sample for step in cells(deal_out(*case)) for batch in step for sample in batch]
    once = list(dict.fromkeys(flat))
    assert once == sorted(once)


@given(leftovers(), st.booleans())
def test_served_counts_the_samples_of_the_first_steps(case, drop_last):
    dealt = deal_out(*case, drop_last=drop_last)
    for steps in range(dealt.num_steps + 1):
        found = Counter(source for source, _ in times(cells(dealt)[:steps]))
        assert dealt.served(steps, len(case[0])).tolist() == [found[source] for source in range(len(case[0]))]


@given(leftovers(), st.integers(1, 5))
def test_with_drop_last_only_full_batches_of_full_steps_are_served(case, more):
    counts, sizes, num_ranks = case
    counts = [count * more for count in counts]
    dealt = deal_out(counts, sizes, num_ranks, drop_last=True)
    assert dealt.num_steps == sum(count // size for count, size in zip(counts, sizes, strict=True)) // num_ranks
    assert dealt.num_repeated == 0
    assert all(len(batch) == sizes[batch[0][0]] for step in cells(dealt) for batch in step)
    assert set(times(cells(dealt)).values()) <= {1}


@given(leftovers())
def test_the_batches_of_one_source_differ_by_at_most_one_sample(case):
    dealt = deal_out(*case)
    for source in range(len(case[0])):
        sizes = dealt.sizes[dealt.sources == source]
        assert not sizes.size or sizes.max() - sizes.min() <= 1


def test_the_leftovers_of_three_sources_fill_a_step():
    dealt = deal_out([3, 1, 2], [4, 4, 4], 4)
    assert cells(dealt) == [[[(0, 0)], [(0, 1), (0, 2)], [(1, 0)], [(2, 0), (2, 1)]]]


def test_what_is_repeated_comes_from_the_last_step():
    dealt = deal_out([2, 2], [1, 1], 3)
    assert cells(dealt) == [[[(0, 0)], [(0, 1)], [(1, 0)]], [[(1, 1)], [(1, 1)], [(1, 1)]]]
    assert dealt.num_repeated == 2


@pytest.mark.parametrize("drop_last", [False, True])
def test_nothing_left_takes_no_steps(drop_last):
    dealt = deal_out([0, 0], [2, 3], 4, drop_last=drop_last)
    assert (dealt.num_steps, dealt.num_repeated) == (0, 0)
    assert {dealt.sources.dtype, dealt.starts.dtype, dealt.sizes.dtype} == {np.dtype(np.int64)}
    assert dealt.served(0, 2).tolist() == [0, 0]
