import random

import pytest
from support.mixtures import mixture, plan, random_order, round_robin, samples_of, serve

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.position import Position

ORDERS = {
    "round robin": round_robin([25, 9, 14], [2, 3, 4]),
    "by batch": mixture([25, 9, 14], 2, [3, 1, 2], drop_last=True),
    "by sample": mixture([25, 9, 14], 4, [3, 1, 2], by_sample=True),
    "first_exhausted": mixture([25, 9, 14], 2, [3, 1, 2], stop="first_exhausted"),
    "cycle": round_robin([25, 9, 14], 3, stop="cycle"),
    "num_steps": mixture([25, 9, 14], 2, [3, 1, 2], num_steps=30),
}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@every_order
def test_a_plan_counts_its_batches_slots_and_samples(order):
    for rank in range(3):
        made = plan(order, 3, rank)
        batches = list(made.indices(made.begin(0)))
        assert made.num_batches() == len(batches)
        assert made.num_slots() == 3 * len(batches)
        assert made.num_samples() == sum(map(len, batches))


@every_order
def test_after_so_many_steps_so_many_fewer_are_left(order):
    made = plan(order, 3)
    begin, count = made.begin(1), made.num_batches()
    for steps in range(count + 3):
        position = made.after(begin, steps)
        assert made.num_batches(position) == max(count - steps, 0)
        assert made.is_over(position) == (steps >= count)
    assert made.after(begin, count) == made.after(begin, count + 2) == made.end(begin)


@every_order
def test_steps_in_two_parts_are_steps_in_one(order):
    made = plan(order, 2)
    begin = made.begin(0)
    for first in range(4):
        for second in range(4):
            assert made.after(made.after(begin, first), second) == made.after(begin, first + second)


@every_order
def test_a_position_of_another_topology_is_taken_over(order):
    position = plan(order, 2).after(order.begin(0, 2), 2)
    made = plan(order, 3)
    here = made.here(position)
    assert (here.width, here.epoch) == (3, 0)
    assert order.places(here) == order.places(position)
    assert made.here(here) == here
    assert len(list(made.indices(position))) == made.num_batches(position)


@every_order
def test_no_steps_leave_a_position_as_it_is(order):
    position = plan(order, 2).after(order.begin(0, 2), 2)
    assert plan(order, 3).after(position, 0) == position


def test_a_long_epoch_comes_in_the_same_batches_however_many_are_computed_at_once():
    order = mixture([6000, 3000], 1, [2, 1], seed=1)
    made = plan(order, 2)
    whole = list(made.indices(made.begin(0)))
    assert len(whole) == 4500
    for steps in (1, 7, 8, 9, 2047, 4499):
        assert list(made.indices(made.after(made.begin(0), steps))) == whole[steps:]


@pytest.mark.parametrize("step", [0, 2, 3])
def test_batches_are_numbered_alike_from_wherever_one_begins(step):
    order = round_robin([8, 7], 2)
    for rank in (0, 1):
        made = plan(order, 2, rank)
        whole = list(made.numbered(made.begin(0)))
        assert [slot for slot, _ in whole] == list(range(rank, 2 * len(whole), 2))
        assert list(made.numbered(made.after(made.begin(0), step))) == whole[step:]


def test_repeats_are_told_in_words():
    assert plan(round_robin([1, 2], 2), 4).repeats() == ["1 of 3 samples are served twice in every epoch"]
    assert plan(round_robin([4, 4], 2), 2).repeats() == []


def test_a_batch_order_has_no_later_passes():
    made = plan(round_robin([4, 4], 2), 2)
    assert made.in_first_pass(made.end(made.begin(0)))


def test_an_epoch_without_a_step_is_refused():
    with pytest.raises(ConfigurationError, match="would have no step"):
        plan(round_robin([3, 2], 2, drop_last=True), 4).num_batches()


def test_unshuffled_plans_keep_the_order_of_the_datasets():
    order = round_robin([4, 3], 2).unshuffled()
    assert serve(order, order.begin(3, 1), 1) == [[[0, 1]], [[4, 5]], [[2, 3]], [[6]]]


def test_num_samples_of_all_ranks_are_the_samples_of_an_epoch():
    rng = random.Random(0)
    for _ in range(40):
        order = random_order(rng, stop="all_exhausted", drop_last=False)
        width = rng.randint(1, 4)
        made = [plan(order, width, rank) for rank in range(width)]
        served = len(samples_of(serve(order, made[0].begin(0), width)))
        assert sum(rank.num_samples() for rank in made) == served
        assert 0 <= served - sum(order.mixture.sources.lengths) < width


def test_the_beginning_of_training_is_a_plain_position():
    assert plan(round_robin([4, 4], 2), 3).begin(0) == Position(epoch=0, width=3)
