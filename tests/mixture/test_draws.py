"""Draws: exact periods, random access, closed forms, and schedules."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mixtures import endless_draws

from lightning_stateful.mixture.draws import Draws
from lightning_stateful.mixture.weights import Between, DrawSchedule

KEYS = st.one_of(st.none(), st.integers(0, 2**64 - 1))
POINTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any).map(tuple)


@st.composite
def any_draws(draw: st.DrawFn) -> Draws:
    """One period, short or long, or a schedule."""
    key = draw(KEYS)
    if draw(st.booleans()):
        return Draws.repeated(draw(st.lists(st.integers(1, 200), min_size=1, max_size=6)), key=key)
    gaps = draw(st.lists(st.integers(1, 300), max_size=4))
    points = tuple(draw(POINTS) for _ in range(len(gaps) + 1))
    steps = tuple(np.cumsum([0, *gaps]).tolist())
    between: Between = draw(st.sampled_from(["constant", "linear"]))
    return Draws.scheduled(DrawSchedule(steps, points, between), draw(st.integers(1, 20)), key=key)


@given(any_draws(), st.integers(0, 3000), st.integers(0, 900))
def test_any_part_is_that_part_of_the_whole(draws: Draws, first: int, count: int) -> None:
    assert np.array_equal(draws.sources(first, first + count), draws.sources(0, first + count)[first:])


@given(any_draws(), st.integers(0, 3000))
def test_counts_count_the_draws(draws: Draws, draw: int) -> None:
    expected = np.bincount(draws.sources(0, draw), minlength=draws.counts_before(0).size)
    assert np.array_equal(draws.counts_before(draw), expected)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any))
def test_without_a_key_draws_stand_evenly_spread(counts: list[int]) -> None:
    assert Draws.repeated(counts).sources(0, 100).tolist() == list(islice(endless_draws(counts), 100))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 2**64 - 1), st.integers(0, 10**12))
def test_a_key_shuffles_within_windows(counts: list[int], key: int, number: int) -> None:
    window = sum(counts) if sum(counts) <= 256 else 64
    part = number * window, (number + 1) * window
    served, spread = Draws.repeated(counts, key=key).sources(*part), Draws.repeated(counts).sources(*part)
    assert sorted(served) == sorted(spread)


@given(st.data(), st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 700), KEYS)
def test_exhausted_sources_leave_the_others_in_their_order(
    data: st.DataObject, counts: list[int], start: int, key: int | None
) -> None:
    totals = data.draw(st.lists(st.integers(0, 100), min_size=len(counts), max_size=len(counts)))
    draws, keyed = (Draws.until_exhausted(counts, totals, start=start, key=of) for of in (None, key))
    present = [count if total else 0 for count, total in zip(counts, totals, strict=True)]
    expected, left = [], list(totals)
    for source in islice(endless_draws(present), start % max(sum(present), 1), None) if any(totals) else ():
        if left[source]:
            expected.append(source)
            left[source] -= 1
        if not any(left):
            break
    first = data.draw(st.integers(0, sum(totals)))
    assert draws.sources(0, sum(totals)).tolist() == expected
    assert sorted(keyed.sources(0, sum(totals))) == sorted(expected)
    assert np.array_equal(keyed.sources(first, sum(totals)), keyed.sources(0, sum(totals))[first:])
    assert np.array_equal(keyed.counts_before(first), np.bincount(keyed.sources(0, first), minlength=len(counts)))


def test_golden_draws() -> None:
    schedule = DrawSchedule((0, 8, 24), ((1, 0, 0), (2, 1, 1), (0, 1, 1)), "linear")
    assert Draws.repeated([3, 2, 1]).sources(0, 6).tolist() == [0, 1, 0, 2, 1, 0]
    assert Draws.repeated([3, 2, 1], key=1).sources(0, 12).tolist() == [2, 0, 0, 1, 1, 0, 1, 2, 0, 0, 0, 1]
    expected = [0, 2, 0, 0, 0, 0, 1, 0, 0, 1, 1, 2, 1, 2, 0, 0, 1, 2, 1, 2, 2, 1, 2, 0, 2, 1, 2, 1, 2, 1]
    assert Draws.scheduled(schedule, 1, key=2).sources(0, 30).tolist() == expected


def furthest(draws: Draws, schedule: DrawSchedule, count: int, per_step: int = 1) -> float:
    """The largest distance of the last source's draws from the sum of its shares, slowly."""
    due, served, distance = Fraction(0), 0, Fraction(0)
    for number, source in enumerate(draws.sources(0, count).tolist()):
        step = (number + Fraction(1, 2)) / per_step
        at = max(point for point, begin in enumerate(schedule.steps) if begin <= step)
        share = Fraction(schedule.draws[at][-1], sum(schedule.draws[at]))
        if schedule.between == "linear" and at + 1 < len(schedule.steps):
            done = (step - schedule.steps[at]) / (schedule.steps[at + 1] - schedule.steps[at])
            share += (Fraction(schedule.draws[at + 1][-1], sum(schedule.draws[at + 1])) - share) * done
        due, served = due + share, served + (source == len(schedule.draws[0]) - 1)
        distance = max(distance, abs(served - due))
    return float(distance)


@pytest.mark.parametrize("per_step", [1, 64])
@pytest.mark.parametrize("key", [None, 7])
@pytest.mark.parametrize("between", ["constant", "linear"])
def test_scheduled_draws_stay_near_the_sum_of_their_shares(between: Between, key: int | None, per_step: int) -> None:
    schedule = DrawSchedule((0, 120, 240), ((1, 0), (1, 1), (1, 3)), between)
    draws = Draws.scheduled(schedule, per_step, key=key)
    # Half a window, and what a linear way has in a stage of 64 draws less or more than its mean.
    assert furthest(draws, schedule, 300 * per_step, per_step) <= 18
