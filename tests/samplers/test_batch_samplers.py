"""StatefulBatchSampler serves any order of batches, alone or in a DataLoader, and goes on where a state was taken."""

from __future__ import annotations

import copy
import io
import json
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stateful.bucketing import BucketOrder, Buckets
from lightning_stateful.core import SampleBatchOrder, ShuffledOrder
from lightning_stateful.errors import ConfigurationError, DamagedStateError, StateMismatchError
from lightning_stateful.mixture import MixtureOrder, Sources
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler

LENGTHS = [1 + 7 * number % 23 for number in range(60)]
DATASET = [100 * number for number in range(60)]
ORDERS = {
    "samples": SampleBatchOrder(samples=ShuffledOrder(60, 3), batch_size=4),
    "buckets": BucketOrder(Buckets.of(LENGTHS, max_tokens=60, num_buckets=4), seed=3),
    "sources": MixtureOrder(sources=Sources(("a", "b"), (15, 45), (2, 3)), draws=(1, 2), seed=3),
}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def a_sampler(order: Any, num_replicas: int = 2, rank: int = 1, **options: Any) -> StatefulBatchSampler:
    return StatefulBatchSampler(order, num_replicas=num_replicas, rank=rank, **options)


def take(sampler: StatefulBatchSampler, count: int) -> list[list[int]]:
    batches = iter(sampler)
    return [next(batches) for _ in range(count)]


def resumed(state: dict[str, Any], order: Any, **options: Any) -> StatefulBatchSampler:
    sampler = a_sampler(order, **options)
    sampler.load_state_dict(state)
    return sampler


@every_order
def test_it_serves_the_batches_of_its_rank_epoch_by_epoch(order: Any) -> None:
    sampler = a_sampler(order)
    expected = [[indices for _, indices in order.plan(epoch, 2).batches(1)] for epoch in range(2)]

    assert [list(sampler), list(sampler)] == expected
    assert (sampler.order, sampler.epoch) == (order, 2)


@every_order
def test_its_length_is_that_of_a_whole_epoch_wherever_it_stands(order: Any) -> None:
    sampler = a_sampler(order)
    lengths = {len(sampler), *(len(sampler) for _ in sampler)}

    assert lengths == {len(list(a_sampler(order)))}
    assert len(resumed(a_sampler(order).state_dict(num_batches=3), order)) in lengths


@every_order
def test_a_loop_that_sets_every_epoch_resumes_at_every_step(order: Any) -> None:
    def train(sampler: StatefulBatchSampler) -> list[list[int]]:
        seen = []
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            for batch in sampler:
                seen.append(batch)
                states.append(sampler.state_dict())
        return seen

    states: list[dict[str, Any]] = []
    whole = train(a_sampler(order))
    for stop, state in list(enumerate(states, 1)):
        assert train(resumed(state, order)) == whole[stop:], stop


@every_order
def test_in_a_data_loader_the_number_of_trained_batches_leaves_out_what_was_only_fetched(order: Any) -> None:
    sampler = a_sampler(order)
    batches = iter(DataLoader(DATASET, batch_sampler=sampler, num_workers=2))
    for _ in range(3):
        next(batches)
    assert sampler.state_dict() != sampler.state_dict(num_batches=3)
    rest = DataLoader(DATASET, batch_sampler=resumed(sampler.state_dict(num_batches=3), order), num_workers=2)

    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in batches]


@every_order
def test_a_data_loader_has_its_length_and_serves_its_epochs(order: Any) -> None:
    loader, fresh = DataLoader(DATASET, batch_sampler=a_sampler(order)), a_sampler(order)

    assert len(loader) == len(fresh)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[100 * index for index in batch] for batch in fresh]


def test_more_trained_batches_than_the_pass_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"from 0 to 8, .* got 9"):
        a_sampler(ORDERS["samples"]).state_dict(num_batches=9)


@every_order
def test_a_state_is_small_and_loads_with_weights_only(order: Any) -> None:
    sampler, file = a_sampler(order), io.BytesIO()
    take(sampler, 3)
    torch.save(sampler.state_dict(), file)
    file.seek(0)

    assert torch.load(file, weights_only=True) == sampler.state_dict()
    assert len(json.dumps(sampler.state_dict())) < 1024


def test_a_state_changed_by_hand_is_refused() -> None:
    order = ORDERS["buckets"]
    state = a_sampler(order).state_dict(num_batches=3)
    state["progress"]["epoch"] = 1

    with pytest.raises(DamagedStateError, match="The sampler's state does not have the checksum of its contents"):
        resumed(state, order)


@every_order
def test_another_seed_is_refused_unless_it_is_accepted(order: Any) -> None:
    state = a_sampler(order.adapted(path="other")).state_dict()

    with pytest.raises(StateMismatchError, match=r"The sampler's state does not fit(?s:.*)seed: saved"):
        resumed(state, order)
    assert list(resumed(state, order, accept="seed")) == list(a_sampler(order))


@every_order
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_sampler_is_copied_and_pickled_with_its_progress(order: Any, copied: Any) -> None:
    sampler = a_sampler(order)
    take(sampler, 3)
    other = copied(sampler)

    assert other.state_dict() == sampler.state_dict()
    assert list(resumed(other.state_dict(), order)) == list(a_sampler(order))[3:]


@every_order
def test_reports_are_equal_on_all_ranks_and_after_a_resume(order: Any) -> None:
    ranks = [a_sampler(order, 3, rank) for rank in range(3)]
    served = [len(batch) for sampler in ranks for batch in take(sampler, 2)]
    reports = [sampler.position_report() for sampler in ranks]

    counted = [of["samples"] for of in reports[0].get("sources", {"all": reports[0]}).values()]
    assert reports == [reports[0]] * 3
    assert (reports[0]["epoch"], sum(counted)) == (0, sum(served))
    assert resumed(ranks[0].state_dict(), order).position_report() == reports[0]
