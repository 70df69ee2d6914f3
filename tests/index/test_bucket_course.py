import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import cut, deal, give

from lightning_stateful.index.bucket_course import BucketCourse


@st.composite
def courses(draw):
    num_buckets = draw(st.integers(1, 6))
    most = draw(st.sampled_from([3, 20, 60]))
    counts = draw(st.lists(st.integers(0, most), min_size=num_buckets, max_size=num_buckets))
    sizes = sorted(draw(st.lists(st.integers(1, 7), min_size=num_buckets, max_size=num_buckets)))
    return counts, tuple(sizes), draw(st.one_of(st.integers(1, 5), st.integers(1, 64)))


def make(counts, sizes, width, *, drop_last=False):
    return BucketCourse(np.array(counts, dtype=np.int64), tuple(sizes), width, drop_last=drop_last)


def steps_of(course):
    found = course.steps(np.arange(course.num_steps))
    return list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))


def shares_of(course):
    """Of every rank, step by step, the places it serves."""
    steps = course.steps(np.arange(course.num_steps))
    ranks = []
    for rank in range(course.width):
        places, counts = course.share(steps, rank)
        assert places.dtype == counts.dtype == np.int64
        parts = np.split(places, np.cumsum(counts)[:-1]) if counts.size else []
        ranks.append([part.tolist() for part in parts])
    return ranks


@given(courses())
def test_steps_are_those_of_cutting_sample_by_sample(case):
    course = make(*case)
    expected, num_repeated = give(cut(*case), case[2])
    assert steps_of(course) == expected
    assert (course.num_steps, course.num_repeated) == (len(expected), num_repeated)


@given(courses())
def test_with_drop_last_the_last_step_is_left_out_unless_it_is_full(case):
    counts, sizes, width = case
    expected, allowed = (
        cut(*case),
        [size * width for count, size in zip(counts, sizes, strict=True) for _ in range(count)],
    )
    if expected and expected[-1][1] - expected[-1][0] < allowed[expected[-1][0]]:
        expected.pop()
    course = make(*case, drop_last=True)
    assert steps_of(course) == expected
    assert (course.num_steps, course.num_full, course.num_repeated) == (len(expected), len(expected), 0)


@given(courses())
def test_every_place_is_in_one_step(case):
    places = [place for start, stop in steps_of(make(*case)) for place in range(start, stop)]
    assert places == list(range(sum(case[0])))


@given(courses())
def test_no_rank_exceeds_what_the_bucket_of_its_first_sample_allows(case):
    counts, sizes, _ = case
    allowed = [size for count, size in zip(counts, sizes, strict=True) for _ in range(count)]
    for batches in shares_of(make(*case)):
        assert all(1 <= len(batch) <= allowed[min(batch)] for batch in batches)


@given(courses())
def test_all_steps_but_the_last_and_one_that_gives_are_full_on_every_rank(case):
    counts, sizes, width = case
    allowed = [size for count, size in zip(counts, sizes, strict=True) for _ in range(count)]
    course = make(*case)
    shares = shares_of(course)
    for step in range(course.num_full):
        assert {len(batches[step]) for batches in shares} == {allowed[steps_of(course)[step][0]]}
    assert course.num_steps - 2 <= course.num_full <= course.num_steps
    if course.num_full == course.num_steps - 2:
        assert {len(batches[-1]) for batches in shares} == {1}
        giving = [len(batches[-2]) for batches in shares]
        assert max(giving) - min(giving) <= 1
        assert allowed[steps_of(course)[-2][0]] * width - sum(giving) < width


@given(courses())
def test_ranks_take_turns_in_a_step(case):
    course = make(*case)
    expected = [deal(start, stop, case[2]) for start, stop in steps_of(course)]
    assert shares_of(course) == [[step[rank] for step in expected] for rank in range(case[2])]


@given(courses())
def test_samples_are_repeated_only_in_the_last_step_and_fewer_than_there_are_ranks(case):
    course = make(*case)
    served = [place for batches in shares_of(course) for batch in batches for place in batch]
    assert set(served) == set(range(sum(case[0])))
    assert len(served) - len(set(served)) == course.num_repeated < case[2]
    before = [place for batches in shares_of(course) for batch in batches[:-1] for place in batch]
    assert len(before) == len(set(before))


@given(courses(), st.randoms(use_true_random=False), st.booleans())
def test_taking_samples_away_never_needs_more_steps(case, rng, drop_last):
    counts, sizes, width = case
    left = [rng.randint(0, count) for count in counts]
    assert make(left, sizes, width, drop_last=drop_last).num_steps <= make(*case, drop_last=drop_last).num_steps


@given(courses())
def test_more_ranks_never_need_more_steps(case):
    counts, sizes, width = case
    assert make(counts, sizes, width + 1).num_steps <= make(counts, sizes, width).num_steps


def test_there_is_no_way_to_do_with_fewer_steps():
    rng = random.Random(0)
    for _ in range(150):
        num_buckets, width = rng.randint(1, 3), rng.randint(1, 2)
        counts = [rng.randint(0, 5) for _ in range(num_buckets)]
        sizes = sorted(rng.randint(1, 3) for _ in range(num_buckets))
        assert make(counts, sizes, width).num_steps == _fewest_steps(tuple(counts), tuple(sizes), width, {})


def _fewest_steps(counts, sizes, width, known):
    """Over all ways to take a step: any samples, as many as its longest bucket allows."""
    if not any(counts):
        return 0
    if counts not in known:
        found = []
        for taken in np.ndindex(*(count + 1 for count in counts)):
            longest = next((bucket for bucket, number in enumerate(taken) if number), None)
            if longest is not None and sum(taken) <= sizes[longest] * width:
                left = tuple(count - number for count, number in zip(counts, taken, strict=True))
                found.append(1 + _fewest_steps(left, sizes, width, known))
        known[counts] = min(found)
    return known[counts]


@given(courses(), st.lists(st.integers(0, 10**6), max_size=20))
def test_scattered_steps_are_those_of_the_whole_course(case, numbers):
    course = make(*case)
    if course.num_steps:
        chosen = np.array(numbers, dtype=np.int64) % course.num_steps
        found = course.steps(chosen)
        whole = steps_of(course)
        assert list(zip(found.starts.tolist(), found.stops.tolist(), strict=True)) == [whole[step] for step in chosen]


def test_a_bucket_that_lacks_samples_is_filled_from_the_next_shorter():
    assert steps_of(make([3, 5, 4], [2, 3, 4], 1)) == [(0, 2), (2, 4), (4, 7), (7, 10), (10, 12)]


def test_one_step_may_take_from_several_buckets():
    assert steps_of(make([1, 1, 1, 9], [4, 4, 5, 6], 1)) == [(0, 4), (4, 10), (10, 12)]


def test_empty_buckets_take_no_step():
    assert steps_of(make([0, 4, 0, 0, 3, 0], [1, 2, 2, 3, 3, 9], 1)) == [(0, 2), (2, 4), (4, 7)]


def test_the_step_before_the_last_gives_so_that_every_rank_has_a_sample():
    course = make([9], [2], 4)
    assert steps_of(course) == [(0, 5), (5, 9)]
    assert shares_of(course) == [[[0, 4], [5]], [[1], [6]], [[2], [7]], [[3], [8]]]
    assert (course.num_full, course.num_repeated) == (0, 0)


def test_a_step_of_one_sample_a_rank_has_none_to_give():
    course = make([9], [1], 4)
    assert steps_of(course) == [(0, 4), (4, 8), (8, 9)]
    assert course.num_repeated == 3
    assert [batches[-1] for batches in shares_of(course)] == [[8]] * 4


def test_fewer_samples_than_ranks_are_served_in_turn_again():
    course = make([1, 2], [1, 4], 8)
    assert course.num_repeated == 5
    assert [batches[0] for batches in shares_of(course)] == [[0], [1], [2], [0], [1], [2], [0], [1]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_nothing_left_takes_no_step(drop_last):
    course = make([0, 0], [1, 2], 3, drop_last=drop_last)
    assert (course.num_steps, course.num_full, course.num_repeated) == (0, 0, 0)
    assert shares_of(course) == [[], [], []]


def test_2_to_the_40_samples_are_cut_at_once():
    course = make([2**39, 7, 2**39], [1, 3, 5], 64)
    assert course.num_steps == 2**39 // 64 + -(-(7 + 2**39 - 7 - (192 - 7)) // 320) + 1
    steps = course.steps(np.array([2**39 // 64 - 1, 2**39 // 64, course.num_steps - 1]))
    assert steps.starts[:2].tolist() == [2**39 - 64, 2**39]
    assert steps.stops[:2].tolist() == [2**39, 2**39 + 192]
    assert steps.stops[2] == 2**40 + 7
