import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from support.mixtures import in_places, mixture, plan, random_order, round_robin, samples_of, serve

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.mixture_order import MixtureOrder
from lightning_stateful.index.phases import amounts_of
from lightning_stateful.index.schedule import WeightSchedule

WIDTHS = [1, 2, 3, 4, 6, 8, 13, 64]


def whole_epoch(order, width):
    """Steps of a whole epoch; None where it would have none."""
    try:
        return plan(order, width).num_batches()
    except ConfigurationError:
        return None


def histories(count, seed, **fixed):
    """What random orders serve while the number of ranks changes now and then: the order, its steps, the last width."""
    rng = random.Random(seed)
    while count:
        order = random_order(rng, **fixed)
        usable = [width for width in WIDTHS if whole_epoch(order, width)]
        if not usable:
            continue
        position, steps = order.begin(0, rng.choice(usable)), []
        for phase in range(rng.randint(2, 5)):
            width = position.width if phase == 0 else rng.choice(usable)
            if rng.random() < 0.3:
                saved = json.loads(json.dumps(order.save(position)))
                position = order.restore(saved, order.describe(), changed=rng.random() < 0.5)
            num_steps = rng.randint(0, plan(order, width).num_batches(position))
            steps += in_places(order, position, width)[:num_steps]
            position = plan(order, width).after(position, num_steps)
        yield order, steps + in_places(order, position, position.width), position.width
        count -= 1


def test_what_is_left_never_takes_more_steps_than_a_whole_epoch():
    rng = random.Random(1)
    for _ in range(80):
        order = random_order(rng)
        usable = [width for width in WIDTHS if whole_epoch(order, width)]
        if not usable:
            continue
        position = order.begin(0, rng.choice(usable))
        for _ in range(6):
            width = rng.choice(usable)
            left = plan(order, width).num_batches(position)
            assert left <= whole_epoch(order, width)
            position = plan(order, width).after(position, rng.randint(0, left))


def test_what_is_left_at_any_places_never_takes_more_steps_than_a_whole_epoch():
    rng = random.Random(2)
    for _ in range(300):
        order, width = random_order(rng), rng.choice(WIDTHS)
        if not whole_epoch(order, width):
            continue
        begin = order.begin(0, width)
        places = tuple(rng.randint(0, length) for length in order.mixture.sources.lengths)
        if not any(places):
            continue
        moved = order.reopen(plan(order, width).after(begin, 1), width, places)
        assert order.steps(moved) - moved.consumed // width <= whole_epoch(order, width)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
def test_every_history_serves_as_much_of_every_source_as_no_history(stop):
    for order, steps, width in histories(20, seed=3, stop=stop, drop_last=False):
        once = set(samples_of(steps))
        served = Counter(source for source, *_ in once)
        assert tuple(served[source] for source in range(len(order.mixture.sources))) == amounts_of(order.mixture)
        assert len(samples_of(steps)) - len(once) < width
        assert len(set(samples_of(steps[:-1]))) == len(samples_of(steps[:-1]))


def test_every_history_of_all_exhausted_serves_each_sample_once():
    for order, steps, width in histories(20, seed=4, stop="all_exhausted", drop_last=False):
        times = Counter((source, index) for source, _, index in samples_of(steps))
        assert len(times) == sum(order.mixture.sources.lengths)
        assert times.total() - len(times) < width


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
def test_with_drop_last_every_history_serves_full_batches_and_no_sample_twice(stop):
    for order, steps, _ in histories(25, seed=5, stop=stop, drop_last=True):
        sizes = order.mixture.sources.batch_sizes
        assert all(len(batch) == sizes[batch[0][0]] for step in steps for batch in step)
        assert len(set(samples_of(steps))) == len(samples_of(steps))


def test_with_num_steps_every_history_has_as_many_steps_and_whole_passes():
    for order, steps, _ in histories(20, seed=6, num_steps=12):
        assert len(steps) == 12
        for source, length in enumerate(order.mixture.sources.lengths):
            served = [(number, index) for of, number, index in samples_of(steps) if of == source]
            assert len(set(served)) == len(served)
            per_pass = Counter(number for number, _ in served)
            assert all(per_pass[number] == length for number in range(len(per_pass) - 1))


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("unit", ["steps", "samples", "tokens"])
@pytest.mark.parametrize("between", ["constant", "linear"])
def test_with_a_schedule_every_history_has_as_many_steps_and_whole_passes(unit, between, by_sample):
    schedule = WeightSchedule({0: [1, 0], 17: [1, 1], 90: [1, 3]}, unit, between)
    options = {"schedule": schedule, "tokens": (400, 90), "by_sample": by_sample, "num_steps": 30, "block": 4}
    order, rng = mixture([40, 25], 2, **options), random.Random(7)
    position, samples = order.begin(0, 2), []
    for epoch in range(3):
        position, done = order.begin(epoch, 2, position), 0
        while done < 30:
            width = rng.choice([1, 2, 3, 5])
            num_steps = rng.randint(1, plan(order, width).num_batches(position))
            samples += samples_of(in_places(order, position, width)[:num_steps])
            position, done = plan(order, width).after(position, num_steps), done + num_steps
        assert done == 30
    assert len(set(samples)) == len(samples)
    assert tuple(Counter(source for source, *_ in samples)[source] for source in (0, 1)) == order.places(position)


def test_the_end_of_an_epoch_is_restored_for_other_sources():
    before, after = mixture([9, 6], 2, num_steps=5), make_order_of_others()
    end = plan(before, 2).end(before.begin(0, 2))
    restored = after.restore(before.save(end), before.describe(), changed=True)
    assert plan(after, 2).num_batches(restored) == 0


def make_order_of_others():
    order = mixture([9, 6], 2, num_steps=5)
    sources = replace(order.mixture.sources, names=("c", "d"))
    return MixtureOrder(replace(order.mixture, sources=sources))


def test_the_same_number_of_ranks_changes_nothing():
    order = mixture([30, 20], 2, [1, 2])
    position = plan(order, 3).after(order.begin(0, 3), 2)
    assert order.reopen(position, 3) == position


def test_in_round_robin_the_turn_goes_on_where_it_was():
    order = round_robin([40, 40, 40], 2)
    position = plan(order, 2).after(order.begin(0, 2), 4)
    sources = [step[0][0][0] for step in in_places(order, position, 3)[:5]]
    assert sources == [1, 2, 0, 1, 2]


def test_with_num_steps_the_turns_of_a_mixture_go_on_where_they_were():
    order = mixture([40, 60], 2, [1, 3], num_steps=40)
    position = plan(order, 2).after(order.begin(0, 2), 7)

    def turns(width):
        return [step[0][0][0] for step in in_places(order, position, width)]

    assert turns(2) == turns(3) == turns(5)


def test_a_history_that_ends_with_nothing_left_has_no_step():
    order = round_robin([5, 3], 2)
    end = plan(order, 2).end(order.begin(0, 2))
    assert serve(order, end, 3) == []
    assert plan(order, 7).num_batches(end) == 0
