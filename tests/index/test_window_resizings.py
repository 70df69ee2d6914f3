import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from support.buckets import is_within, random_cases, random_histories, random_window_order
from support.mixtures import plan, samples_of, serve

from lightning_stateful.errors import DamagedStateError, PositionError, StateMismatchError
from lightning_stateful.index.position import Position
from lightning_stateful.index.window_order import WindowOrder
from lightning_stateful.index.windows import Windows

WIDTHS = [1, 2, 3, 4, 6, 8, 13, 64]


def make(lengths=tuple(range(1, 41)), *, shuffle_batches=True, drop_last=False, **options):
    windows = Windows.of(lengths, **{"max_tokens": 80, "window": 15, **options})
    return WindowOrder(windows, shuffle_batches=shuffle_batches, drop_last=drop_last)


def cases(count, seed, **fixed):
    return random_cases(random_window_order, WIDTHS, count, seed, **fixed)


def histories(count, seed, **fixed):
    return random_histories(random_window_order, WIDTHS, count, seed, **fixed)


def test_every_history_serves_each_sample_once_apart_from_repeats_in_the_last_step():
    for order, steps, width in histories(30, seed=1, drop_last=False):
        times = Counter(samples_of(steps))
        samples = order.windows.samples.take(np.arange(len(order.windows.samples)), None, 0)
        assert set(times) == set(samples.tolist())
        assert set(Counter(samples_of(steps[:-1])).values()) <= {1}
        assert times.total() - len(times) < max(width, len(steps[-1]))


def test_with_drop_last_every_history_serves_no_sample_twice():
    for _, steps, _ in histories(20, seed=2, drop_last=True):
        assert set(Counter(samples_of(steps)).values()) <= {1}


def test_in_every_history_each_batch_keeps_its_budget():
    for order, steps, _ in histories(20, seed=3):
        lengths = np.asarray(order.lengths).tolist()
        for batch in (batch for step in steps for batch in step):
            found = [max(lengths[sample], 1) for sample in batch]
            alone = len(batch) == 1 and not order.budget.num_samples(found[0])
            assert alone or is_within(order.budget, found)


def test_after_its_first_step_every_history_serves_one_sequence_of_batches_but_for_the_last_step():
    checked = 0
    for order, usable, rng in cases(20, seed=4):
        made = plan(order, rng.choice(usable))
        whole = [batch for step in serve(order, made.begin(1), made.num_replicas) for batch in step]
        full = int(order.slots[-1]) // made.num_replicas * made.num_replicas
        if not full:
            continue
        position, served = made.after(made.begin(1), 1), whole[: made.num_replicas]
        for _ in range(4):
            made = plan(order, rng.choice(usable))
            num_steps = rng.randint(0, max(made.num_batches(position) - 1, 0))
            served += [batch for step in serve(order, position, made.num_replicas)[:num_steps] for batch in step]
            position = made.after(position, num_steps)
        checked += 1
        assert served[:full] == whole[: min(len(served), full)]
    assert checked > 10


def test_what_is_left_never_takes_more_steps_than_a_whole_epoch():
    for order, usable, rng in cases(30, seed=5):
        position = order.begin(0, rng.choice(usable))
        for _ in range(6):
            made = plan(order, rng.choice(usable))
            left = made.num_batches(position)
            assert left <= made.num_batches()
            position = made.after(position, rng.randint(0, left))


def test_the_same_number_of_ranks_changes_nothing():
    order = make()
    position = plan(order, 3).after(order.begin(0, 3), 2)
    assert order.reopen(position, 3) == position


def test_before_the_first_step_a_change_of_ranks_is_another_beginning():
    order = make()
    assert order.reopen(order.begin(2, 3), 5) == order.begin(2, 5)


def test_a_position_knows_the_batches_served_and_the_ranks_of_the_beginning():
    order = make()
    position = plan(order, 3).after(order.begin(1, 3), 2)
    position = plan(order, 1).after(position, 4)
    position = order.reopen(position, 2)
    assert position == Position(epoch=1, consumed=12, width=2, since=12, origin=(10, 3))


def test_a_report_counts_the_samples_of_all_parts():
    for order, usable, rng in cases(20, seed=6, drop_last=False):
        position, samples = order.begin(0, rng.choice(usable)), set()
        for _ in range(3):
            width = rng.choice(usable)
            num_steps = rng.randint(0, plan(order, width).num_batches(position))
            samples |= set(samples_of(serve(order, position, width)[:num_steps]))
            position = plan(order, width).after(position, num_steps)
            assert order.report(position) == {"samples": len(samples)}


@pytest.mark.parametrize("width", [1, 2, 5, 64])
def test_a_history_that_ends_with_nothing_left_has_no_step(width):
    order = make()
    end = plan(order, 2).end(order.begin(0, 2))
    assert plan(order, width).num_batches(end) == 0
    assert serve(order, end, width) == []
    assert order.report(plan(order, width).here(end)) == {"samples": 40}


# States


def positions():
    for order, usable, rng in cases(20, seed=7):
        position = order.begin(rng.randint(0, 3), rng.choice(usable))
        for _ in range(rng.randint(0, 4)):
            made = plan(order, rng.choice(usable))
            position = made.after(position, rng.randint(0, made.num_batches(position)))
        yield order, position


def test_a_saved_position_is_restored_by_a_fresh_order():
    for order, position in positions():
        saved = json.loads(json.dumps(order.save(position)))
        fresh = dataclasses.replace(order)
        assert fresh.restore(saved, order.describe(), changed=False) == position
        assert fresh.save(position) == saved


def test_a_saved_position_has_the_same_keys_everywhere():
    keys = ("epoch", "consumed", "width", "since", "served")
    assert {tuple(order.save(position)) for order, position in positions()} == {keys}


def test_restoring_does_not_change_what_was_saved():
    order = make()
    saved = order.save(order.reopen(plan(order, 3).after(order.begin(1, 3), 2), 2))
    before = json.dumps(saved)
    order.restore(saved, order.describe(), changed=False)
    assert json.dumps(saved) == before


GOOD = {"epoch": 1, "consumed": 8, "width": 2, "since": 4, "served": [6, 3]}


def test_the_state_that_the_damaged_ones_are_made_from_is_good():
    order = make()
    assert order.save(order.restore(GOOD, order.describe(), changed=False)) == GOOD


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"since": None}, "needs since, and served as integers"),
        ({"since": True}, "needs since, and served as integers"),
        ({"served": None}, "needs since, and served as integers"),
        ({"served": [6, 2.0]}, "needs since, and served as integers"),
        ({"served": [6, True]}, "needs since, and served as integers"),
        ({"served": [6]}, "contradict each other"),
        ({"served": [6, 3, 1]}, "contradict each other"),
        ({"served": []}, "contradict each other"),
        ({"served": [0, 3]}, "contradict each other"),
        ({"served": [6, -3]}, "contradict each other"),
        ({"since": 0}, "contradict each other"),
        ({"since": -4}, "contradict each other"),
        ({"since": 10}, "contradict each other"),
        ({"since": 3}, "groups of width=2"),
        ({"consumed": 7}, "groups of width=2"),
        ({"width": "2"}, r"position\.width must be an int"),
    ],
)
def test_a_damaged_position_is_refused(damage, said):
    order = make()
    with pytest.raises(DamagedStateError, match=said):
        order.restore({**GOOD, **damage}, order.describe(), changed=False)


@pytest.mark.parametrize("key", list(GOOD))
def test_a_position_that_lacks_a_key_is_refused(key):
    order = make()
    with pytest.raises(DamagedStateError, match=key):
        order.restore({name: value for name, value in GOOD.items() if name != key}, order.describe(), changed=False)


def test_a_position_out_of_range_is_refused():
    order = make()
    with pytest.raises(PositionError, match="epoch=-1"):
        order.restore({**GOOD, "epoch": -1}, order.describe(), changed=False)


def test_more_batches_served_than_there_are_are_refused():
    order = make()
    with pytest.raises(PositionError, match="1000000 batches of an epoch were served"):
        order.restore({**GOOD, "served": [10**6, 3]}, order.describe(), changed=False)


def test_within_an_epoch_other_batches_are_refused_with_every_difference():
    saved, present = make(), make(max_tokens=90, window=16, shuffle_batches=False, drop_last=True)
    position = plan(saved, 2).after(saved.begin(0, 2), 1)
    with pytest.raises(StateMismatchError) as caught:
        present.restore(saved.save(position), saved.describe(), changed=True)
    found = {difference.path: (difference.saved, difference.present) for difference in caught.value.differences}
    expected = {
        "max_tokens": (80, 90),
        "window": (15, 16),
        "shuffle_batches": (True, False),
        "drop_last": (False, True),
    }
    assert found == expected


def test_within_an_epoch_other_keys_are_refused():
    saved, present = make(boundary_key=[0, 1] * 20), make(boundary_key=[1, 0] * 20)
    position = plan(saved, 2).after(saved.begin(0, 2), 1)
    with pytest.raises(StateMismatchError, match="boundary_key: saved"):
        present.restore(saved.save(position), saved.describe(), changed=True)


def test_at_the_beginning_of_an_epoch_other_batches_are_let_pass():
    saved, present = make(), make(window=20)
    position = saved.begin(3, 2)
    assert present.restore(saved.save(position), saved.describe(), changed=True) == present.begin(3, 2)
