"""Histories of runs of mixtures that go on with other numbers of ranks."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.mixtures import (
    by_source,
    mixture,
    num_repeated,
    random_order,
    round_robin,
    samples_of,
    serve,
    simulated_amounts,
    whole_epoch,
    without_repeats,
)

from lightning_stateful.core.order import Progress
from lightning_stateful.mixture import MixtureOrder, WeightSchedule

RANKS = [1, 2, 3, 4, 6, 8, 13, 64]


def histories(count: int, seed: int, **fixed: Any) -> Iterator[tuple[MixtureOrder, list[Any], int]]:
    """Runs of random orders while ranks change now and then: the order, its steps, and what is served twice."""
    rng = random.Random(seed)
    while count:
        order = random_order(rng, **fixed)
        usable = [ranks for ranks in RANKS if whole_epoch(order, ranks)]
        if not usable:
            continue
        progress, steps, ranks = Progress(), [], rng.choice(usable)
        for _ in range(rng.randint(1, 4)):
            plan = order.plan(0, ranks, progress)
            assert plan.num_steps <= whole_epoch(order, ranks)
            taken = rng.randint(0, max(plan.num_steps - 1, 0))
            steps += serve(order, 0, ranks, progress)[:taken]
            progress = Progress.from_dict(json.loads(json.dumps(plan.progress_after(taken).to_dict())))
            if rng.random() < 0.3:
                progress = order.convert(progress, order.config())
            ranks = rng.choice(usable)
        rest = serve(order, 0, ranks, progress)
        if rest:
            yield order, by_source(order, steps + rest), num_repeated(order, ranks, progress)
            count -= 1


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
def test_every_history_serves_as_much_of_every_source_as_no_history(stop: str) -> None:
    for order, steps, repeated in histories(30, seed=3, stop=stop, drop_last=False):
        times = Counter(samples_of(without_repeats(steps, repeated)))
        served = Counter(source for source, _ in times.elements())
        assert [served[source] for source in range(len(order.sources))] == simulated_amounts(order)
        for source, length in enumerate(order.sources.lengths):
            of_source = [count for (of, _), count in times.items() if of == source]
            assert max(of_source, default=0) - min(of_source, default=0) <= 1
            assert not of_source or max(of_source) == -(-served[source] // length)


def test_with_num_steps_every_history_has_as_many_steps_and_whole_passes() -> None:
    for order, steps, _ in histories(30, seed=6, num_steps=12):
        assert len(steps) == 12
        for source, length in enumerate(order.sources.lengths):
            own = [index for of, index in samples_of(steps) if of == source]
            for first in range(0, len(own), length):
                assert len(set(own[first : first + length])) == len(own[first : first + length])


@pytest.mark.parametrize("by", ["batch", "sample"])
@pytest.mark.parametrize("between", ["constant", "linear"])
def test_with_a_schedule_every_history_goes_on_over_epochs(between: Any, by: Any) -> None:
    schedule = WeightSchedule({0: [1, 0], 17: [1, 1], 90: [1, 3]}, between)
    order, rng = mixture([40, 25], 2, schedule=schedule, by=by, num_steps=30), random.Random(7)
    progress, samples, steps_before = Progress(), [], 0
    for epoch in range(3):
        while (left := order.plan(epoch, 1, progress).num_steps) and progress.epoch <= epoch:
            ranks, taken = rng.choice([1, 2, 3, 5]), rng.randint(1, left)
            samples += samples_of(by_source(order, serve(order, epoch, ranks, progress)[:taken]))
            progress = order.plan(epoch, ranks, progress).progress_after(taken)
            steps_before += taken
    assert steps_before == 90
    for source, length in enumerate((40, 25)):
        own = [index for of, index in samples if of == source]
        assert progress.details["served"]["ab"[source]] == len(own)
        assert sorted(own[:length]) == list(range(min(length, len(own))))


def test_in_round_robin_the_next_source_is_the_one_whose_turn_it_was() -> None:
    order = round_robin([40, 40, 40], 2)
    progress = order.plan(0, 2).progress_after(4)
    steps = by_source(order, serve(order, 0, 3, progress))
    assert [step[0][0][0] for step in steps[:5]] == [1, 2, 0, 1, 2]


def test_with_num_steps_the_draws_of_a_mixture_go_on_where_they_were() -> None:
    order = mixture([40, 60], 2, [1, 3], num_steps=40)
    progress = order.plan(0, 2).progress_after(7)
    sources = [[step[0][0][0] for step in by_source(order, serve(order, 0, ranks, progress))] for ranks in (2, 3, 5)]
    assert sources[0] == sources[1] == sources[2]
