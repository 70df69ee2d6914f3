import json
import random
from collections import Counter
from fractions import Fraction

import pytest
from support.mixtures import in_places, mixture, plan, samples_of

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.schedule import WeightSchedule

NAMES = ("a", "b")


def sources_by_turn(order, num_epochs, width=1):
    """The source of every turn: of a step, or by sample of each sample in it."""
    turns, position = [], order.begin(0, width)
    for epoch in range(num_epochs):
        steps = in_places(order, order.begin(epoch, width, position), width)
        position = plan(order, width).end(order.begin(epoch, width, position))
        by_sample = order.mixture.by_sample
        turns += [source for source, *_ in samples_of(steps)] if by_sample else [step[0][0][0] for step in steps]
    return turns


def shares_at(points, between, progress):
    """The share of the second source, slowly."""
    places = sorted(points)
    last = max(place for place in places if place <= progress)
    weights = points[last]
    later = [place for place in places if place > progress]
    if between == "linear" and later:
        done = Fraction(progress - last) / (later[0] - last)
        first, final = (Fraction(points[place][1], sum(points[place])) for place in (last, later[0]))
        return first + (final - first) * done
    return Fraction(weights[1], sum(weights))


def furthest(turns, points, between, per_turn=1):
    """How far the turns of the second source ever are from the sum of its shares."""
    due, served, distance = Fraction(0), 0, Fraction(0)
    for turn, source in enumerate(turns):
        due += shares_at(points, between, (turn + Fraction(1, 2)) * per_turn)
        served += source
        distance = max(distance, abs(served - due))
    return distance


POINTS = {0: [1, 0], 120: [1, 1], 240: [1, 3]}


@pytest.mark.parametrize("num_steps", [360, 45, 7])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("between", ["constant", "linear"])
def test_by_steps_the_turns_of_a_source_stay_near_the_sum_of_its_shares(between, shuffle, num_steps):
    schedule = WeightSchedule(POINTS, "steps", between)
    order = mixture([50, 50], 2, schedule=schedule, num_steps=num_steps, shuffle=shuffle)
    turns = sources_by_turn(order, -(-360 // num_steps))
    assert furthest(turns, POINTS, between) <= order.mixture.block


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("between", ["constant", "linear"])
def test_by_sample_and_steps_the_samples_of_a_source_stay_near_the_sum_of_its_shares(between, width):
    order = mixture([50, 50], 8, schedule=WeightSchedule(POINTS, "steps", between), num_steps=45, by_sample=True)
    turns = sources_by_turn(order, 6, width)
    assert furthest(turns, POINTS, between, Fraction(1, 8 * width)) <= 8 * width


@pytest.mark.parametrize("num_steps", [20, 61])
@pytest.mark.parametrize("between", ["constant", "linear"])
def test_by_sample_and_samples_the_samples_of_a_source_stay_near_the_sum_of_its_shares(between, num_steps):
    schedule = WeightSchedule(POINTS, "samples", between)
    order = mixture([50, 50], 4, schedule=schedule, num_steps=num_steps, by_sample=True)
    turns = sources_by_turn(order, -(-100 // num_steps))
    assert furthest(turns, POINTS, between) <= 4


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_by_batch_the_shares_change_when_so_many_samples_or_tokens_were_served(unit):
    schedule = WeightSchedule({0: [1, 0], 1000: [0, 1]}, unit)
    order = mixture([50, 50], [2, 3], schedule=schedule, num_steps=1000, tokens=(250, 150), block=1)
    turns = sources_by_turn(order, 1, width=2)
    of_a = 250 if unit == "samples" else 50
    assert turns == [0] * of_a + [1] * (1000 - of_a)


@pytest.mark.parametrize("num_steps", [3, 50, 100, 1000])
def test_points_come_where_they_are_whatever_the_length_of_an_epoch(num_steps):
    schedule = WeightSchedule({0: [1, 0], 50: [0, 1], 100: [1, 0], 102: [0, 1]})
    turns = sources_by_turn(mixture([9, 9], 1, schedule=schedule, num_steps=num_steps), -(-110 // num_steps))
    assert turns[:110] == [0] * 50 + [1] * 50 + [0] * 2 + [1] * 8


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("unit", ["steps", "samples", "tokens"])
@pytest.mark.parametrize("between", ["constant", "linear"])
def test_from_any_step_the_same_turns_come_as_without_a_stop(unit, between, by_sample):
    schedule = WeightSchedule({0: [1, 0], 37: [1, 1], 130: [1, 3]}, unit, between)
    options = {"schedule": schedule, "tokens": (90, 31), "by_sample": by_sample, "num_steps": 24}
    order, rng = mixture([30, 20], 3, **options), random.Random(3)
    for _ in range(12):
        epoch, step = rng.randint(0, 3), rng.randint(0, 24)
        begin = order.begin(epoch, 2)
        saved = json.loads(json.dumps(order.save(plan(order, 2).after(begin, step))))
        restored = order.restore(saved, order.describe(), changed=False)
        assert in_places(order, restored, 2) == in_places(order, begin, 2)[step:]
        assert in_places(order, order.begin(epoch + 1, 2, restored), 2) == in_places(
            order, order.begin(epoch + 1, 2), 2
        )


def test_points_closer_than_a_block_leave_no_source_out():
    schedule = WeightSchedule({place: [9, 1] for place in range(0, 300, 3)})
    turns = sources_by_turn(mixture([50, 50], 1, schedule=schedule, num_steps=300), 1)
    assert abs(sum(turns) - 30) <= 10


def test_a_linear_way_that_is_no_multiple_of_the_block_has_the_mean_of_its_ends():
    schedule = WeightSchedule({0: [1, 0], 96: [0, 1]}, "steps", "linear")
    turns = sources_by_turn(mixture([50, 50], 1, schedule=schedule, num_steps=96, block=64), 1)
    assert abs(sum(turns) - 48) <= 2


def test_epochs_shorter_than_a_block_leave_no_source_out_on_a_linear_way_in_samples():
    schedule = WeightSchedule({0: [18, 2], 1000: [19, 1]}, "samples", "linear")
    turns = sources_by_turn(mixture([50, 50], 1, schedule=schedule, num_steps=5, shuffle=False), 200)
    assert abs(sum(turns) - 75) <= 20


def test_stretches_follow_each_other():
    schedule = WeightSchedule(POINTS, "steps", "linear").resolved(NAMES)
    found = list(schedule.stretches(Fraction(120)))
    assert [(stretch.begin, stretch.end) for stretch in found] == [(120, 240), (240, None)]
    assert found[0].shares_at(Fraction(180)) == (Fraction(3, 8), Fraction(5, 8))
    assert found[1].shares_at(Fraction(10**9)) == (Fraction(1, 4), Fraction(3, 4))


def test_between_constant_points_the_shares_stay():
    first = next(WeightSchedule(POINTS, "steps", "constant").resolved(NAMES).stretches(Fraction(0)))
    assert first.shares_at(Fraction(119)) == (1, 0)


def test_weights_may_come_by_name():
    by_name = WeightSchedule({0: {"b": 3, "a": 1}}).resolved(NAMES)
    assert by_name.shares == ((Fraction(1, 4), Fraction(3, 4)),)


@pytest.mark.parametrize("points", [{}, {1: [1, 1]}, {0: [1, 1], 5: [1, 1], 3: [1, 1]}, {-1: [1, 1], 0: [1, 1]}])
def test_points_that_do_not_rise_from_0_are_refused(points):
    with pytest.raises(ConfigurationError, match="A schedule begins at 0 and its points rise"):
        WeightSchedule(points)


@pytest.mark.parametrize("wrong", [{"unit": "epochs"}, {"between": "cosine"}])
def test_unknown_units_and_ways_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="A schedule has a unit among"):
        WeightSchedule({0: [1, 1]}, **wrong)


def test_points_that_are_no_integers_and_sources_without_a_weight_are_refused():
    with pytest.raises(ConfigurationError, match="a point of a schedule must be an integer"):
        WeightSchedule({0: [1, 1], 2.5: [1, 1]})
    with pytest.raises(ConfigurationError, match="gives source 'b' no weight at any point"):
        WeightSchedule({0: [1, 0], 5: [2, 0]}).resolved(NAMES)


def test_a_schedule_without_num_steps_is_refused():
    with pytest.raises(ConfigurationError, match="pass num_steps"):
        mixture([5, 5], 1, schedule=WeightSchedule({0: [1, 1]}))


def test_two_schedules_that_differ_in_anything_describe_themselves_differently():
    made = [
        WeightSchedule(points, unit, between).resolved(NAMES).describe()
        for points in ({0: [1, 1]}, {0: [1, 2]}, {0: [1, 1], 4: [1, 1]}, {0: [1, 1], 5: [1, 1]})
        for unit in ("steps", "samples", "tokens")
        for between in ("constant", "linear")
    ]
    assert Counter(made).most_common(1)[0][1] == 1
    assert max(map(len, made)) < 60
