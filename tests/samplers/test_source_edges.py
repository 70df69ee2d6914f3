"""Rare settings of several sources: tiny or very many ones, extreme weights, changes that cannot be carried out."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest

from lightning_stateful import MixtureBatchSampler, RoundRobinBatchSampler, StatefulLoader
from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.index.slots import Batches, SlotPlan
from lightning_stateful.index.sources import Sources


def after(sampler: Any, count: int) -> dict[str, Any]:
    """The state of a sampler after ``count`` batches."""
    for _ in islice(sampler, count):
        pass
    state: dict[str, Any] = sampler.state_dict()
    return state


@pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
def test_a_checkpoint_made_after_an_accepted_change_loads_where_an_epoch_serves_less_now(stop: Any) -> None:
    lengths = {"a": 1000, "b": 20}
    first = after(MixtureBatchSampler(lengths, 4, weights=[1, 1], stop="cycle"), 100)
    changed = MixtureBatchSampler(lengths, 4, weights=[50, 1], stop=stop, accept=("weights", "stop"))
    changed.load_state_dict(first)
    whole = MixtureBatchSampler(lengths, 4, weights=[50, 1], stop=stop, accept=("weights", "stop"))
    whole.load_state_dict(first)
    rest = list(whole)

    again = MixtureBatchSampler(lengths, 4, weights=[50, 1], stop=stop)
    again.load_state_dict(after(changed, 1))

    assert len(rest) > 1
    assert list(again) == rest[1:]


@pytest.mark.parametrize(
    ("before", "now"), [({"num_steps": 50}, {"stop": "cycle"}), ({"stop": "cycle"}, {"num_steps": 50})]
)
def test_passes_that_are_counted_otherwise_are_refused_within_an_epoch(before: Any, now: Any) -> None:
    state = after(RoundRobinBatchSampler([100, 100], 5, **before), 20)

    with pytest.raises(StateMismatchError, match="cannot be changed within an epoch"):
        RoundRobinBatchSampler([100, 100], 5, **now, accept="stop").load_state_dict(state)


def test_passes_that_are_counted_otherwise_begin_anew_with_an_epoch() -> None:
    state = after(RoundRobinBatchSampler([20, 20], 5, stop="cycle"), 8)
    sampler = RoundRobinBatchSampler([20, 20], 5, num_steps=6, accept="stop")

    sampler.load_state_dict(state)

    assert sampler.epoch == 1
    assert sampler.position_report()["sources"]["0"]["samples"] == 0


def test_other_steps_under_a_schedule_over_steps_are_refused() -> None:
    schedule: Any = {0: [1, 0], 50: [0, 1]}
    sampler = MixtureBatchSampler([500, 500], 5, schedule=schedule, num_steps=10)
    sampler.set_epoch(3)
    state = after(sampler, 5)

    with pytest.raises(StateMismatchError, match="counts them by num_steps"):
        MixtureBatchSampler([500, 500], 5, schedule=schedule, num_steps=40, accept="stop").load_state_dict(state)


def test_a_source_more_with_the_same_batch_size_is_no_other_batch_size() -> None:
    state = after(RoundRobinBatchSampler({"a": 40, "b": 40}, 8), 3)
    more = RoundRobinBatchSampler(
        {"a": 40, "b": 40, "c": 9}, {"a": 8, "b": 8, "c": 4}, num_replicas=1, rank=0, accept="sources"
    )

    more.load_state_dict(state)

    assert sum(len(batch) for batch in more) == 40 + 40 + 9 - 24


def test_a_source_too_small_for_full_steps_of_all_ranks_is_refused_by_name() -> None:
    sampler = RoundRobinBatchSampler({"a": 100, "b": 8}, 8, drop_last=True, num_replicas=2, rank=0)

    with pytest.raises(ConfigurationError, match="Source 'b' has 8 samples for an epoch, too few for a full step of 2"):
        len(sampler)


def test_a_temperature_that_leaves_a_source_nothing_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="Source 'b' would be served less than once"):
        MixtureBatchSampler({"a": 1000, "b": 10}, 4, temperature=0.001)


def test_a_source_of_one_sample_costs_no_more_than_another() -> None:
    looked_up = []

    class Counting(Sources):
        def _in_pass(self, source: int, number: int, places: Any, seed: Any) -> Any:
            looked_up.append(number)
            return super()._in_pass(source, number, places, seed)

    sources = Counting(("a", "b"), (1, 7), (1, 1))
    indices, passes = sources.look_up(0, np.arange(100_000), ("seed",))
    assert not indices.any()
    assert np.array_equal(passes, np.arange(100_000))
    assert looked_up == []

    indices, _ = sources.look_up(1, np.arange(700), ("seed",))
    assert looked_up == list(range(100))
    assert Counter(indices.tolist()) == dict.fromkeys(range(1, 8), 100)


@pytest.mark.parametrize(
    ("options", "num_replicas"),
    [({"batch_size": 4096}, 1), ({"batch_size": 512, "by": "sample"}, 32), ({"batch_size": 2**18}, 1)],
)
def test_batches_are_computed_a_bounded_number_of_samples_at_a_time(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_replicas: int
) -> None:
    sampler = MixtureBatchSampler(
        [10**7, 10**7], weights=[1, 2], num_steps=300, num_replicas=num_replicas, rank=0, **options
    )
    found: list[Batches] = []
    of_plan = SlotPlan._batches
    monkeypatch.setattr(
        SlotPlan, "_batches", lambda plan, position: (found.append(part) or part for part in of_plan(plan, position))
    )

    for _ in islice(sampler, 40):
        pass

    largest = 1 if options.get("by") is None else num_replicas
    assert all(len(part.sizes) == 1 or part.indices.size * largest <= 2**17 for part in found)


def test_two_hundred_sources_are_served_whole() -> None:
    lengths = [7 + number % 13 for number in range(200)]
    for sampler in (
        RoundRobinBatchSampler(lengths, 4, num_replicas=3, rank=0),
        MixtureBatchSampler(lengths, 4, weights=[1 + number % 7 for number in range(200)], num_replicas=3, rank=0),
    ):
        ranks = [SlotPlan(sampler.order, type(sampler.plan.topology)(num_replicas=3, rank=rank)) for rank in range(3)]
        served = Counter(index for plan in ranks for batch in plan.indices(plan.begin(0)) for index in batch)
        assert sorted(served) == list(range(sum(lengths)))
        assert sum(served.values()) - sum(lengths) < 3


def test_a_batch_that_is_no_dict_but_a_mapping_keeps_its_kind() -> None:
    from collections import UserDict

    from lightning_stateful.loaders.sources import Sample, SourceCollate

    collate = SourceCollate(("a",), lambda samples: UserDict(x=samples), tag="source")

    batch = collate([Sample(0, 3)])

    assert type(batch) is UserDict
    assert dict(batch) == {"x": [3], "source": "a"}


def test_what_a_loader_is_asked_for_exactly_is_refused_for_batches_of_several_sources() -> None:
    sampler = RoundRobinBatchSampler([3, 4], 2)

    with pytest.raises(ConfigurationError, match="which whole batches cannot promise"):
        StatefulLoader(list(range(7)), batch_sampler=sampler, exact=True)
