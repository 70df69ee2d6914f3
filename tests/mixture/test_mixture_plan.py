"""Plans of mixtures against a slow simulation, and what every plan serves."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from support.mixtures import (
    by_source,
    mixture,
    num_repeated,
    random_cases,
    random_order,
    round_robin,
    samples_of,
    serve,
    simulate,
    whole_epoch,
)

from lightning_stateful.core.permutation import Indices
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture import Sources


def test_plans_are_those_of_a_slow_simulation() -> None:
    rng, compared = random.Random(0), 0
    while compared < 80:
        order, ranks = random_order(rng, shuffle=False), rng.choice([1, 1, 2, 3, 5, 8])
        if order.carries_over or order.by_sample or not whole_epoch(order, ranks):
            continue
        lengths = order.sources.lengths
        expected, left = simulate(order, ranks)
        found = by_source(order, serve(order, 0, ranks))
        for (source, shares), step in zip(expected, found, strict=False):
            assert step == [[(source, offset % lengths[source]) for offset in share] for share in shares]
        served = order.plan(0, ranks).progress_after(len(found)).details["served"]
        assert sum(served.values()) == len(samples_of(found)) - num_repeated(order, ranks)
        rest = [sample for step in found[len(expected) :] for sample in samples_of([step])]
        if not order.drop_last:
            assert len(set(rest)) == len(rest) - num_repeated(order, ranks) or order.stop == "cycle"
            assert len(rest) - num_repeated(order, ranks) == sum(left)
        compared += 1


def test_drop_last_serves_full_batches_in_as_many_full_steps_as_there_are() -> None:
    for order, ranks, _ in random_cases(40, seed=5, stop="all_exhausted", drop_last=True):
        steps, sources = by_source(order, serve(order, 0, ranks)), order.sources
        assert max(Counter(samples_of(steps)).values()) == 1
        assert all(len(batch) == sources.batch_sizes[batch[0][0]] for step in steps for batch in step)
        batches = sum(length // size for length, size in zip(sources.lengths, sources.batch_sizes, strict=True))
        if order.by_sample:
            batches = sum(sources.lengths) // sources.batch_sizes[0]
        assert len(steps) == batches // ranks


def test_samples_are_looked_up_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []
    take = Sources.take

    def counted(self: Sources, numbers: Indices, offsets: Indices, sizes: Indices, seed: Any) -> Indices:
        looked_up.append(int(sizes.sum()))
        return take(self, numbers, offsets, sizes, seed)

    monkeypatch.setattr(Sources, "take", counted)
    for size, ranks, by in ((4096, 1, "batch"), (512, 32, "sample"), (2**18, 1, "batch")):
        looked_up.clear()
        order = mixture([10**7, 10**7], size, [1, 2], num_steps=300, by=by)
        assert sum(1 for _ in islice(order.plan(0, ranks).batches(0), 40)) == 40
        assert all(count == size or count * (ranks if by == "sample" else 1) <= 2**17 for count in looked_up)


def test_a_report_tells_samples_passes_shares_and_tokens_of_every_source() -> None:
    plan = mixture([9, 6], 3, [2, 1], num_steps=6, tokens=(90, 7)).plan(1, 1)
    assert plan.report_after(0)["sources"]["b"] == {"samples": 6, "epochs": 1.0, "share": 1 / 3, "tokens": 7}
    assert plan.report_after(6)["sources"]["a"] == {"samples": 24, "epochs": 24 / 9, "share": 2 / 3, "tokens": 240}


def test_sources_of_2_to_the_40_samples_are_planned_at_once() -> None:
    order = mixture([2**40, 2**39 + 7, 5], [64, 32, 2], [1, 1.7, 0.001])
    plan = order.plan(3, 64)
    resumed = order.plan(3, 64, plan.progress_after(10**8))
    assert resumed.num_steps == plan.num_steps - 10**8
    assert next(resumed.batches(63)) == next(plan.batches(63, 10**8))


def test_a_rare_source_is_served_once_though_its_draws_come_early() -> None:
    assert mixture([16381, 2], 1, [1, 9.33883067372767e-05]).plan(0, 1).num_steps == 16383


def test_an_epoch_without_a_step_is_refused_with_its_sources_and_ranks() -> None:
    with pytest.raises(ConfigurationError, match=r"16 ranks, an epoch of the sources \{'a': 7, 'b': 12\}"):
        round_robin([7, 12], 2, drop_last=True).plan(0, 16)


def test_golden_round_robin() -> None:
    order = round_robin([7, 5], 2, seed=3)
    expected = [[[0, 1], [3, 2]], [[11, 10], [8]], [[6, 5], [4]], [[9], [7]]]
    assert (order.version, serve(order, 1, 2)) == (1, expected)


def test_golden_mixture_by_batch() -> None:
    order = mixture([9, 6], [2, 1], [2, 1], num_steps=5, seed=3)
    expected = [[[4, 2], [8, 0]], [[5, 7], [2, 4]], [[12], [11]], [[0, 6], [8, 7]], [[14], [12]]]
    assert (order.version, serve(order, 1, 2)) == (1, expected)


def test_golden_mixture_by_sample() -> None:
    order = mixture([9, 6], 3, [2, 1], by="sample", seed=3)
    expected = [[[7, 11, 4], [2, 12, 6]], [[5, 10, 8], [3, 9, 1]], [[0, 14], [13]]]
    assert (order.version, serve(order, 1, 2)) == (1, expected)
