import json
from collections import Counter

import numpy as np
import pytest
from support.buckets import is_within, random_bucket_order, random_cases, random_histories
from support.mixtures import plan, samples_of, serve

from lightning_stateful.errors import DamagedStateError, PositionError, StateMismatchError
from lightning_stateful.index.bucket_order import BucketOrder
from lightning_stateful.index.buckets import Buckets
from lightning_stateful.index.position import Position

WIDTHS = [1, 2, 3, 4, 6, 8, 13, 64]


def make(lengths=tuple(range(1, 41)), *, seed=0, shuffle=True, drop_last=False, **options):
    return BucketOrder(Buckets.of(lengths, **options), seed=seed, shuffle=shuffle, drop_last=drop_last)


def cases(count, seed, **fixed):
    return random_cases(random_bucket_order, WIDTHS, count, seed, **fixed)


def histories(count, seed, **fixed):
    return random_histories(random_bucket_order, WIDTHS, count, seed, **fixed)


def test_every_history_serves_each_sample_once_apart_from_repeats_in_the_last_step():
    for order, steps, width in histories(40, seed=1, drop_last=False):
        times = Counter(samples_of(steps))
        samples = order.buckets.samples.take(np.arange(len(order.buckets.samples)), None, 0)
        assert set(times) == set(samples.tolist())
        assert set(Counter(samples_of(steps[:-1])).values()) <= {1}
        assert times.total() - len(times) < max(width, len(steps[-1]))


def test_with_drop_last_every_history_serves_no_sample_twice_and_only_full_steps():
    for _, steps, _ in histories(30, seed=2, drop_last=True):
        assert set(Counter(samples_of(steps)).values()) <= {1}
        assert all(len({len(batch) for batch in step}) == 1 for step in steps)


def test_in_every_history_each_batch_keeps_its_budget():
    for order, steps, _ in histories(30, seed=3):
        lengths = np.asarray(order.lengths).tolist()
        for batch in (batch for step in steps for batch in step):
            found = [lengths[sample] for sample in batch]
            alone = len(batch) == 1 and not order.budget.num_samples(found[0])
            assert alone or is_within(order.budget, [max(length, 1) for length in found])


def test_what_is_left_never_takes_more_steps_than_a_whole_epoch():
    for order, usable, rng in cases(40, seed=4):
        position = order.begin(0, rng.choice(usable))
        for _ in range(6):
            width = rng.choice(usable)
            made = plan(order, width)
            left = made.num_batches(position)
            assert left <= made.num_batches()
            position = made.after(position, rng.randint(0, left))


def test_on_more_ranks_what_is_left_never_takes_more_steps():
    for order, usable, rng in cases(40, seed=5, drop_last=False):
        made = plan(order, rng.choice(usable))
        position = made.after(made.begin(0), rng.randint(0, made.num_batches()))
        more = plan(order, position.width + rng.randint(1, 9))
        assert more.num_batches(position) <= made.num_batches(position)


def test_the_same_number_of_ranks_changes_nothing():
    order = make(max_tokens=80)
    position = plan(order, 3).after(order.begin(0, 3), 2)
    assert order.reopen(position, 3) == position


def test_before_the_first_step_a_change_of_ranks_is_another_beginning():
    order = make(max_tokens=80)
    assert order.reopen(order.begin(2, 3), 5) == order.begin(2, 5)


def test_a_history_has_the_ranks_and_steps_of_every_part():
    order = make(max_tokens=80)
    position = plan(order, 3).after(order.begin(1, 3), 2)
    position = plan(order, 1).after(position, 4)
    position = order.reopen(position, 2)
    assert position == Position(epoch=1, consumed=12, width=2, since=12, origin=(3, 2, 1, 4))


def test_ranks_that_changed_back_before_a_step_leave_no_trace_but_the_slot():
    order = make(max_tokens=80)
    position = plan(order, 3).after(order.begin(1, 3), 2)
    there_and_back = order.reopen(order.reopen(position, 7), 3)
    assert there_and_back.origin == (3, 2)
    assert there_and_back.consumed == position.consumed == 6


def test_any_split_into_calls_gives_what_one_call_gives_after_a_resizing():
    order = make(list(range(1, 200)), max_tokens=400)
    position = order.reopen(plan(order, 3).after(order.begin(0, 3), 5), 2)
    first, last = 5, order.steps(position)
    for rank in (0, 1):
        whole = order.batches(position, first, last, rank)
        parts = [order.batches(position, step, step + 1, rank) for step in range(first, last)]
        assert np.array_equal(np.concatenate([part.indices for part in parts]), whole.indices)
        assert np.array_equal(np.concatenate([part.sizes for part in parts]), whole.sizes)


def test_what_is_left_depends_on_the_history_and_not_on_who_replays_it():
    order = make(list(range(1, 100)), max_tokens=200)
    position = plan(order, 3).after(order.begin(2, 3), 4)
    position = plan(order, 2).after(position, 3)
    fresh = make(list(range(1, 100)), max_tokens=200)
    assert serve(fresh, position, 5) == serve(order, position, 5)


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
    order = make(max_tokens=80)
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
        fresh = BucketOrder(order.buckets, order.seed, order.shuffle, order.drop_last)
        assert fresh.restore(saved, order.describe(), changed=False) == position
        assert fresh.save(position) == saved


def test_a_saved_position_has_the_same_keys_everywhere():
    assert {tuple(order.save(position)) for order, position in positions()} == {
        ("epoch", "consumed", "width", "since", "history")
    }


def test_restoring_does_not_change_what_was_saved():
    order = make(max_tokens=80)
    position = order.reopen(plan(order, 3).after(order.begin(1, 3), 2), 2)
    saved = order.save(position)
    before = json.dumps(saved)
    order.restore(saved, order.describe(), changed=False)
    assert json.dumps(saved) == before


GOOD = {"epoch": 1, "consumed": 8, "width": 2, "since": 4, "history": [3, 2]}


def test_the_state_that_the_damaged_ones_are_made_from_is_good():
    order = make(max_tokens=80)
    assert order.save(order.restore(GOOD, order.describe(), changed=False)) == GOOD


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"since": None}, "needs since, and history as integers"),
        ({"since": True}, "needs since, and history as integers"),
        ({"history": None}, "needs since, and history as integers"),
        ({"history": "32"}, "needs since, and history as integers"),
        ({"history": [3, 2.0]}, "needs since, and history as integers"),
        ({"history": [3, True]}, "needs since, and history as integers"),
        ({"history": [3]}, "contradict each other"),
        ({"history": [3, 2, 1]}, "contradict each other"),
        ({"history": [3, 1]}, "contradict each other"),
        ({"history": []}, "contradict each other"),
        ({"history": [3, 0, 1, 2]}, "contradict each other"),
        ({"history": [-3, 2]}, "contradict each other"),
        ({"since": 2}, "contradict each other"),
        ({"since": -4}, "contradict each other"),
        ({"consumed": 2}, "contradict each other"),
        ({"consumed": 7}, "groups of width=2"),
        ({"history": [64, 20], "since": 40, "consumed": 40}, "has 20 steps on 64 ranks where 1 were left"),
        ({"width": "2"}, "position.width must be an int"),
    ],
)
def test_a_damaged_position_is_refused(damage, said):
    order = make(max_tokens=80)
    with pytest.raises(DamagedStateError, match=said):
        order.restore({**GOOD, **damage}, order.describe(), changed=False)


@pytest.mark.parametrize("key", list(GOOD))
def test_a_position_that_lacks_a_key_is_refused(key):
    order = make(max_tokens=80)
    with pytest.raises(DamagedStateError, match=key):
        order.restore({name: value for name, value in GOOD.items() if name != key}, order.describe(), changed=False)


def test_a_position_out_of_range_is_refused():
    order = make(max_tokens=80)
    with pytest.raises(PositionError, match="epoch=-1"):
        order.restore({**GOOD, "epoch": -1}, order.describe(), changed=False)


def test_within_an_epoch_other_batches_are_refused_with_every_difference():
    saved, present = make(max_tokens=80, num_buckets=3), make(max_tokens=90, num_buckets=4, drop_last=True)
    position = plan(saved, 2).after(saved.begin(0, 2), 1)
    with pytest.raises(StateMismatchError) as caught:
        present.restore(saved.save(position), saved.describe(), changed=True)
    found = {difference.path: (difference.saved, difference.present) for difference in caught.value.differences}
    assert found == {"max_tokens": (80, 90), "num_buckets": (3, 4), "drop_last": (False, True)}
    assert "beginning of an epoch" in str(caught.value)


def test_within_an_epoch_other_lengths_are_refused():
    saved, present = make(max_tokens=80), make(tuple(range(40, 0, -1)), max_tokens=80)
    position = plan(saved, 2).after(saved.begin(0, 2), 1)
    with pytest.raises(StateMismatchError, match="lengths: saved"):
        present.restore(saved.save(position), saved.describe(), changed=True)


def test_at_the_beginning_of_an_epoch_other_batches_are_let_pass():
    saved, present = make(max_tokens=80), make(max_tokens=90)
    position = saved.begin(3, 2)
    assert present.restore(saved.save(position), saved.describe(), changed=True) == present.begin(3, 2)


def test_a_state_of_many_resizings_stays_small():
    order = make(np.arange(1, 3001), max_tokens=3000)
    position = order.begin(0, 1)
    for number in range(40):
        position = plan(order, 1 + number % 3).after(position, 2)
    assert len(json.dumps(order.save(position))) < 500
