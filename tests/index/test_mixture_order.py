import json
import random
from collections import Counter

import numpy as np
import pytest
from support.mixtures import in_places, mixture, plan, random_order, round_robin, samples_of, serve

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.course import Course
from lightning_stateful.index.phases import amounts_of
from lightning_stateful.index.slots import BatchOrder

WIDTHS = [1, 1, 2, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64]


def cases(count, seed, widths=WIDTHS, **fixed):
    """Random orders with a number of ranks for which an epoch has a step."""
    rng = random.Random(seed)
    while count:
        order, width = random_order(rng, **fixed), rng.choice(widths)
        try:
            order.steps(order.begin(0, width))
        except ConfigurationError:
            continue
        yield order, width, rng
        count -= 1


def num_repeated(order, width):
    arguments = {"epoch": 0, "begun": 0, "width": width, "origin": (), "num_steps": None}
    return Course(order.mixture, **arguments).num_repeated


def amounts(order, samples):
    counts = Counter(source for source, *_ in samples)
    return tuple(counts[source] for source in range(len(order.mixture.sources)))


def assert_passes(order, samples):
    """Each source goes on from pass to pass, and serves each sample of a pass once."""
    for source, length in enumerate(order.mixture.sources.lengths):
        served = [(number, index) for of, number, index in samples if of == source]
        assert len(set(served)) == len(served)
        per_pass = Counter(number for number, _ in served)
        assert sorted(per_pass) == list(range(len(per_pass)))
        assert all(per_pass[number] == length for number in range(len(per_pass) - 1))


def test_every_rank_takes_the_same_number_of_steps_in_every_epoch():
    for order, width, rng in cases(200, seed=1, widths=range(1, 65), longest=60):
        count = plan(order, width).num_batches()
        for epoch in {0, rng.randint(1, 9)}:
            position = order.begin(epoch, width)
            for rank in {0, width - 1}:
                found = order.batches(position, 0, count, rank)
                assert found.sizes.size == count == order.steps(position)
                assert found.sizes.min() > 0
                assert found.sizes.sum() == found.indices.size == found.passes.size


def test_every_batch_of_a_step_is_of_one_source_and_no_larger_than_its_batch_size():
    for order, width, _ in cases(20, seed=2):
        sizes, by_sample = order.mixture.sources.batch_sizes, order.mixture.by_sample
        for step in in_places(order, order.begin(0, width), width):
            for batch in step:
                assert by_sample or len({source for source, *_ in batch}) == 1
                assert len(batch) <= sizes[batch[0][0]]


def test_all_ranks_of_a_step_serve_one_source_until_the_leftovers():
    for order, width, _ in cases(30, seed=3, drop_last=False):
        if order.mixture.by_sample:
            continue
        steps = in_places(order, order.begin(0, width), width)
        mixed = [len({batch[0][0] for batch in step}) > 1 for step in steps]
        assert mixed == sorted(mixed)
        assert order.mixture.num_steps is None or not any(mixed)


def test_all_exhausted_serves_every_sample_once_apart_from_repeats_in_the_last_step():
    for order, width, _ in cases(40, seed=4, stop="all_exhausted", drop_last=False):
        steps, total = serve(order, order.begin(0, width), width), sum(order.mixture.sources.lengths)
        times = Counter(samples_of(steps))
        assert set(times) == set(range(total))
        assert set(Counter(samples_of(steps[:-1])).values()) <= {1}
        assert times.total() - total == num_repeated(order, width) < width


def test_drop_last_serves_full_batches_in_as_many_full_steps_as_there_are():
    for order, width, _ in cases(40, seed=5, stop="all_exhausted", drop_last=True):
        steps, sources = in_places(order, order.begin(0, width), width), order.mixture.sources
        assert max(Counter(samples_of(steps)).values()) == 1
        assert all(len(batch) == sources.batch_sizes[batch[0][0]] for step in steps for batch in step)
        pairs = zip(sources.lengths, sources.batch_sizes, strict=True)
        batches = sum(length // size for length, size in pairs)
        if order.mixture.by_sample:
            batches = sum(sources.lengths) // sources.batch_sizes[0]
        assert len(steps) == batches // width


@pytest.mark.parametrize("stop", ["first_exhausted", "cycle"])
def test_other_stop_rules_serve_as_much_of_every_source_on_any_number_of_ranks(stop):
    for order, width, _ in cases(20, seed=6, stop=stop, drop_last=False):
        steps = in_places(order, order.begin(0, width), width)
        once = list(dict.fromkeys(samples_of(steps)))
        assert_passes(order, once)
        assert amounts(order, once) == amounts_of(order.mixture)
        assert len(set(samples_of(steps[:-1]))) == len(samples_of(steps[:-1]))
        assert len(samples_of(steps)) - len(once) == num_repeated(order, width) < width


def test_num_steps_serves_full_batches_pass_after_pass_over_epochs():
    for order, width, rng in cases(20, seed=7, widths=[1, 2, 3, 5], num_steps=6):
        position, samples = order.begin(0, width), []
        for epoch in range(rng.randint(1, 4)):
            steps = in_places(order, position, width)
            assert len(steps) == order.mixture.num_steps
            assert all(len(b) == order.mixture.sources.batch_sizes[b[0][0]] for step in steps for b in step)
            samples += samples_of(steps)
            position = order.begin(epoch + 1, width, plan(order, width).end(position))
            assert position == order.begin(epoch + 1, width)
        assert_passes(order, samples)
        assert order.places(position) == amounts(order, samples)


def test_batches_from_any_step_are_the_end_of_the_whole_epoch():
    for order, width, rng in cases(40, seed=8, widths=[1, 2, 3, 8]):
        begin = order.begin(rng.randint(0, 3), width)
        whole = serve(order, begin, width)
        step = rng.randint(0, len(whole))
        assert serve(order, plan(order, width).after(begin, step), width) == whole[step:]


def test_places_count_what_has_been_served():
    for order, width, rng in cases(30, seed=9, widths=[1, 2, 3, 8]):
        begin = order.begin(0, width)
        steps = in_places(order, begin, width)
        step = rng.randint(0, len(steps) - 1)
        found = order.places(plan(order, width).after(begin, step))
        assert found == amounts(order, samples_of(steps[:step]))


def test_a_saved_position_goes_on_alike_in_a_fresh_order():
    for order, width, rng in cases(20, seed=10, widths=[1, 2, 3, 8]):
        whole = serve(order, order.begin(2, width), width)
        step = rng.randint(0, len(whole))
        saved = json.loads(json.dumps(order.save(plan(order, width).after(order.begin(2, width), step))))
        fresh = type(order)(order.mixture)
        restored = fresh.restore(saved, json.loads(json.dumps(order.describe())), changed=False)
        assert serve(fresh, restored, width) == whole[step:]
        assert fresh.save(restored) == saved
        assert fresh.begin(3, width, restored) == order.begin(3, width)


def test_every_epoch_has_an_order_of_its_own_unless_it_is_unshuffled():
    for make in (round_robin, mixture):
        order = make([30, 20], [2, 3], seed=4)
        epochs = {str(serve(order, order.begin(epoch, 2), 2)) for epoch in range(10)}
        plain = order.unshuffled()
        assert len(epochs) == 10
        assert len({str(serve(plain, plain.begin(epoch, 2), 2)) for epoch in range(10)}) == 1


def test_sources_added_and_removed_leave_the_places_of_the_others():
    before, after = round_robin([30, 20], 2), round_robin([30, 20, 10], 2)
    position = plan(before, 2).after(before.begin(1, 2), 5)
    restored = after.restore(before.save(position), before.describe(), changed=True)
    assert after.places(restored) == (*before.places(position), 0)
    back = before.restore(after.save(restored), after.describe(), changed=True)
    assert before.places(back) == before.places(position)


def test_the_order_has_the_methods_of_a_batch_order():
    assert isinstance(mixture([3, 4], 1), BatchOrder)
    assert (mixture([3, 4], 1).kind, round_robin([3, 4], 1).kind) == ("mixture", "round_robin")


def test_sources_of_2_to_the_40_samples_are_planned_at_once():
    order = mixture([2**40, 2**39 + 7, 5], [64, 32, 2], [1, 1.7, 0.001])
    position = plan(order, 64).after(order.begin(3, 64), 10**8)
    assert order.steps(position) == plan(order, 64).num_batches()
    assert np.all(order.batches(position, 10**8, 10**8 + 5, 63).sizes > 0)


@pytest.mark.parametrize(
    ("lengths", "weight"),
    [([16381, 2], 9.33883067372767e-05), ([43382, 2], 3.276630499087196e-05), ([80098, 18], 0.00021746358439395062)],
)
def test_a_rare_source_is_served_once_though_its_turns_come_early(lengths, weight):
    assert plan(mixture(lengths, 1, [1, weight]), 1).num_batches() == sum(lengths)


def test_skipping_epochs_after_num_steps_was_lowered_is_going_through_them():
    before, after = mixture([10, 20], 2, num_steps=50), mixture([10, 20], 2, num_steps=20)
    saved = before.save(plan(before, 1).after(before.begin(0, 1), 40))
    restored = after.restore(saved, before.describe(), changed=True)
    assert after.begin(2, 1, restored) == after.begin(2, 1, after.begin(1, 1, restored))


def test_places_by_sample_do_not_count_what_drop_last_drops():
    order = mixture([3, 2], 2, [1, 1], by_sample=True, drop_last=True)
    end = plan(order, 1).end(order.begin(0, 1))
    assert sum(order.places(end)) == len(samples_of(serve(order, order.begin(0, 1), 1)))


def test_golden_round_robin():
    order = round_robin([7, 5], 2, seed=3)
    expected = [[[2, 1], [4, 5]], [[8, 7], [11]], [[3, 6], [0]], [[10], [9]]]
    assert (order.order_version, serve(order, order.begin(1, 2), 2)) == (1, expected)


def test_golden_mixture_by_batch():
    order = mixture([9, 6], [2, 1], [2, 1], num_steps=5, seed=3)
    expected = [[[4, 2], [8, 0]], [[12], [11]], [[5, 7], [2, 4]], [[0, 6], [8, 7]], [[1, 5], [3, 0]]]
    assert (order.order_version, serve(order, order.begin(1, 2), 2)) == (1, expected)


def test_golden_mixture_by_sample():
    order = mixture([9, 6], 3, [2, 1], by_sample=True, seed=3)
    expected = [[[5, 6, 12], [1, 10, 2]], [[0, 13, 7], [4, 9, 8]], [[3, 14], [11]]]
    assert (order.order_version, serve(order, order.begin(1, 2), 2)) == (1, expected)
