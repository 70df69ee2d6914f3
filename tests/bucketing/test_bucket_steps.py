"""Steps through buckets are those of cutting sample by sample, and what is left is what was not taken."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.bucket_cases import cut, give

from lightning_stateful.bucketing.plan import BucketSteps, Remainder, StepRanges


@st.composite
def cases(draw):
    num_buckets = draw(st.integers(1, 6))
    most = draw(st.sampled_from([3, 20, 60]))
    counts = draw(st.lists(st.integers(0, most), min_size=num_buckets, max_size=num_buckets))
    sizes = sorted(draw(st.lists(st.integers(1, 7), min_size=num_buckets, max_size=num_buckets)))
    return counts, tuple(sizes), draw(st.one_of(st.integers(1, 5), st.integers(1, 64)))


def make(counts, sizes, num_replicas, *, drop_last=False):
    return BucketSteps(np.array(counts, dtype=np.int64), tuple(sizes), num_replicas, drop_last=drop_last)


def ranges_of(steps, numbers=None):
    found = steps.ranges(np.arange(steps.num_steps) if numbers is None else numbers)
    return list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))


@given(cases())
def test_steps_are_those_of_cutting_sample_by_sample(case):
    steps = make(*case)
    expected, num_repeated = give(cut(*case), case[2])
    assert ranges_of(steps) == expected
    assert (steps.num_steps, steps.num_repeated) == (len(expected), num_repeated)


@given(cases())
def test_with_drop_last_the_last_step_is_left_out_unless_it_is_full(case):
    counts, sizes, num_replicas = case
    expected = cut(*case)
    allowed = [size * num_replicas for count, size in zip(counts, sizes, strict=True) for _ in range(count)]
    if expected and expected[-1][1] - expected[-1][0] < allowed[expected[-1][0]]:
        expected.pop()
    steps = make(*case, drop_last=True)
    assert ranges_of(steps) == expected
    assert (steps.num_steps, steps.num_full, steps.num_repeated) == (len(expected), len(expected), 0)


@given(cases(), st.randoms(use_true_random=False), st.booleans())
def test_taking_samples_away_or_adding_ranks_never_needs_more_steps(case, rng, drop_last):
    counts, sizes, num_replicas = case
    left = [rng.randint(0, count) for count in counts]
    assert make(left, sizes, num_replicas, drop_last=drop_last).num_steps <= make(*case, drop_last=drop_last).num_steps
    assert make(counts, sizes, num_replicas + 1).num_steps <= make(*case).num_steps


# What is left


@st.composite
def remainders(draw):
    """The rest after some ranges were taken out again and again, and the same as a list."""
    length = draw(st.integers(0, 60))
    left, expected = Remainder.whole(length), list(range(length))
    for _ in range(draw(st.integers(0, 4))):
        bounds = sorted(draw(st.sets(st.integers(0, len(expected)), max_size=12)))
        pairs = draw(st.permutations([pair for pair in pairwise(bounds) if draw(st.booleans())]))
        taken = {offset for start, stop in pairs for offset in range(start, stop)}
        columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        left = left.without(StepRanges(columns[0], columns[1]))
        expected = [element for offset, element in enumerate(expected) if offset not in taken]
    return left, expected


@given(remainders(), st.lists(st.integers(0, 70)))
def test_what_is_left_is_what_was_not_taken_out(case, limits):
    left, expected = case
    assert left.take(np.arange(len(left))).tolist() == expected
    below = left.num_below(np.array(limits, dtype=np.int64))
    assert below.tolist() == [sum(element < limit for element in expected) for limit in limits]
