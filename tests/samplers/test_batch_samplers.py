"""StatefulBatchSampler serves any order of batches, alone or in a DataLoader; BucketBatchSampler is one of them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from support.bucket_cases import in_budget
from torch.utils.data import DataLoader

from lightning_stateful.bucketing import BucketOrder, Buckets, Budget
from lightning_stateful.core import SampleBatchOrder, ShuffledOrder
from lightning_stateful.errors import StateMismatchError
from lightning_stateful.mixture import MixtureOrder, Sources
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler, StatefulBatchSampler

DATASET = [100 * number for number in range(60)]
ORDERS = {
    "samples": SampleBatchOrder(samples=ShuffledOrder(60, 3), batch_size=4),
    "buckets": BucketOrder(
        Buckets.of([1 + 7 * n % 23 for n in range(60)], Budget(max_tokens=60), num_buckets=4), seed=3
    ),
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
def test_in_a_data_loader_the_number_of_trained_batches_leaves_out_what_was_only_fetched(order: Any) -> None:
    sampler = a_sampler(order)
    loader = DataLoader(DATASET, batch_sampler=sampler, num_workers=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert sampler.state_dict() != sampler.state_dict(num_batches=3)
    rest = DataLoader(DATASET, batch_sampler=resumed(sampler.state_dict(num_batches=3), order))

    assert len(loader) == len(sampler)
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in batches]


@every_order
def test_a_state_is_small_and_loads_with_weights_only(order: Any) -> None:
    sampler, file = a_sampler(order), io.BytesIO()
    take(sampler, 3)
    torch.save(sampler.state_dict(), file)
    file.seek(0)

    assert torch.load(file, weights_only=True) == sampler.state_dict()
    assert len(json.dumps(sampler.state_dict())) < 1024


@every_order
def test_reports_are_equal_on_all_ranks_and_after_a_resume(order: Any) -> None:
    ranks = [a_sampler(order, 3, rank) for rank in range(3)]
    served = [len(batch) for sampler in ranks for batch in take(sampler, 2)]
    reports = [sampler.position_report() for sampler in ranks]

    counted = [of["samples"] for of in reports[0].get("sources", {"all": reports[0]}).values()]
    assert reports == [reports[0]] * 3
    assert (reports[0]["epoch"], sum(counted)) == (0, sum(served))
    assert resumed(ranks[0].state_dict(), order).position_report() == reports[0]


# Buckets

LENGTHS = [*np.random.default_rng(5).integers(1, 41, 149).tolist(), 40]


def buckets(lengths: Any = LENGTHS, **options: Any) -> BucketBatchSampler:
    budget = {} if "max_tokens" in options else {"max_tokens": 100}
    count = {} if "boundaries" in options else {"num_buckets": 4}
    return BucketBatchSampler(lengths, **in_budget({**budget, **count, **options}))


def state_after(count: int, **options: Any) -> dict[str, Any]:
    sampler = buckets(**options)
    take(sampler, count)
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


class TestBuckets:
    def test_samples_left_out_are_counted(self) -> None:
        longer = {index for index, length in enumerate(LENGTHS) if length > 30}
        sampler = buckets(max_tokens=30, too_long="drop")

        assert (sampler.num_dropped, buckets().num_dropped) == (len(longer), 0)
        assert {index for batch in sampler for index in batch} == set(range(150)) - longer

    def test_the_seed_is_that_of_seed_everything_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PL_GLOBAL_SEED", "9")

        assert list(buckets()) == list(buckets(seed=9)) != list(buckets(seed=0))

    @pytest.mark.parametrize(
        ("lengths", "options", "paths"),
        [
            (LENGTHS, {"num_buckets": 7, "max_tokens": 90, "seed": 2}, {"num_buckets", "max_tokens", "seed"}),
            (LENGTHS, {"shuffle": False, "drop_last": True}, {"shuffle", "drop_last"}),
            (LENGTHS, {"num_buckets": 4, "boundaries": "equal_counts"}, {"boundaries"}),
            ([*LENGTHS[1:], LENGTHS[0]], {}, {"lengths.digest"}),
        ],
    )
    def test_every_other_setting_is_named_and_nothing_is_loaded(self, lengths: Any, options: Any, paths: Any) -> None:
        sampler = buckets(lengths, **options)
        before = sampler.state_dict()
        with pytest.raises(StateMismatchError) as caught:
            sampler.load_state_dict(state_after(3))

        assert {each.path for each in caught.value.differences} == paths
        assert all("accept=(" in each.remedy for each in caught.value.differences)
        assert sampler.state_dict() == before
