"""A loader over several sources goes on exactly: workers, augmentation, patched loaders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, DistributedSampler

from lightning_stateful.loaders import StatefulLoader, take_over
from lightning_stateful.samplers import MixtureBatchSampler, RoundRobinBatchSampler, StatefulBatchSampler

LENGTHS = {"a": 7, "b": 12, "c": 4}
Draws = list[list[tuple[int, float]]]


class Noisy(Dataset[tuple[int, float]]):
    """Every sample draws from torch and NumPy."""

    def __init__(self, length: int, first: int) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index + self.first, torch.rand(1, dtype=torch.double).item() + np.random.rand()


def noisy() -> ConcatDataset[Any]:
    return ConcatDataset([Noisy(length, 100 * place) for place, length in enumerate(LENGTHS.values())])


def a_loader(sampler: Any = None, num_workers: int = 0, **options: Any) -> StatefulLoader:
    sampler = RoundRobinBatchSampler(LENGTHS, 2) if sampler is None else sampler
    return StatefulLoader(noisy(), batch_sampler=sampler, num_workers=num_workers, **options)


def draws(batches: Any) -> Draws:
    return [[(int(index), float(drawn)) for index, drawn in zip(*batch, strict=True)] for batch in batches]


SAMPLERS: dict[str, Any] = {
    "round robin": lambda **ranks: RoundRobinBatchSampler(LENGTHS, 2, **ranks),
    "cycle": lambda **ranks: MixtureBatchSampler(LENGTHS, [1, 2, 3], weights=[2, 1, 1], stop="cycle", **ranks),
    "by sample": lambda **ranks: MixtureBatchSampler(LENGTHS, 4, by="sample", num_steps=9, **ranks),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


class TestBatches:
    @every_sampler
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_loader_serves_the_batches_of_its_sampler_epoch_by_epoch(self, make: Any, rank: int) -> None:
        dataset = list(range(sum(LENGTHS.values())))
        sampler = make(num_replicas=2, rank=rank)
        loader = StatefulLoader(dataset, batch_sampler=make(num_replicas=2, rank=rank))

        for _ in range(3):
            assert [batch.tolist() for batch in loader] == list(sampler)
            assert len(loader) == len(sampler)

    def test_ranks_given_to_the_loader_count_before_the_samplers(self) -> None:
        loader = a_loader(SAMPLERS["cycle"](num_replicas=2, rank=0), num_replicas=3, rank=2)

        assert (loader.topology.num_replicas, loader.topology.rank) == (3, 2)

    def test_a_bare_order_will_do(self) -> None:
        sampler = SAMPLERS["round robin"]()

        assert draws(a_loader(sampler.tracker.order)) == draws(a_loader(sampler))

    @every_sampler
    def test_those_who_look_at_its_samplers_find_the_rest_of_the_pass(self, make: Any) -> None:
        dataset = list(range(sum(LENGTHS.values())))
        loader = StatefulLoader(dataset, batch_sampler=make(num_replicas=2, rank=1))
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(loader.state_dict())
        assert list(loader.batch_sampler) == [batch.tolist() for batch in loader]
        loader.set_epoch(5)
        batches = list(loader.batch_sampler)

        assert list(loader.sampler) == [index for batch in batches for index in batch]
        assert len(loader.batch_sampler) == len(batches)
        assert isinstance(loader.sampler, DistributedSampler)


class TestProgress:
    def test_with_workers_only_what_was_handed_over_is_reported(self) -> None:
        loader = a_loader(num_workers=2)
        batches = iter(loader)
        next(batches)

        assert loader.position_report()["sources"]["a"]["samples"] == 2
        assert loader.position_report()["sources"]["b"]["samples"] == 0

    def test_a_state_of_the_sampler_alone_is_one_of_the_loader(self) -> None:
        sampler, loader = SAMPLERS["cycle"](), a_loader(SAMPLERS["cycle"]())
        batches = iter(sampler)
        for _ in range(3):
            next(batches)
        loader.load_state_dict(sampler.state_dict())

        assert loader.state_dict() == sampler.state_dict()


class TestTakenOver:
    def plain(self, sampler: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(noisy(), batch_sampler=sampler, **options)

    @pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in SAMPLERS), ("cycle", 2)])
    def test_a_loader_taken_over_serves_what_it_would_and_resumes(self, kind: str, num_workers: int) -> None:
        make = SAMPLERS[kind]
        loader = take_over(self.plain(make(), num_workers=num_workers), seed=4)
        dataset = noisy()
        expected = [[dataset[index][0] for index in batch] for batch in make()]
        batches = iter(loader)
        begun = draws(next(batches) for _ in range(3))
        fresh = take_over(self.plain(make()), seed=4)
        fresh.load_state_dict(loader.state_dict())
        rest = draws(fresh)

        assert [[index for index, _ in batch] for batch in begun + rest] == expected
        assert draws(batches) == rest

    def test_ranks_given_are_those_of_a_sampler_that_has_none(self) -> None:
        loaders = [take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 2)), num_replicas=2, rank=r) for r in (0, 1)]
        served = [index for loader in loaders for batch in draws(loader) for index, _ in batch]

        assert len(served) == len(set(served)) == sum(LENGTHS.values())

    def test_what_the_sampler_accepts_is_accepted(self) -> None:
        loader = take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 2, accept="seed")), accept="weights")
        loader.load_state_dict(take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 2, seed=8))).state_dict())

        assert loader.accept == ("seed", "weights")

    def test_taken_over_again_it_stays_the_same(self) -> None:
        sampler = MixtureBatchSampler(LENGTHS, 2, weights=[1, 2, 3], seed=3, accept="weights")
        loader = take_over(take_over(self.plain(sampler), seed=4), seed=9, num_replicas=2, rank=1)

        assert (loader.seed, loader.accept, loader.topology.num_replicas) == (4, ("weights",), 2)
        assert loader.order == sampler.tracker.order

    def test_for_evaluation_it_is_served_in_the_same_order_every_time(self) -> None:
        loader = take_over(self.plain(RoundRobinBatchSampler(LENGTHS, 3)), shuffle=False)
        first, second = ([[index for index, _ in batch] for batch in draws(loader)] for _ in range(2))

        assert first == second
        assert first[:3] == [[0, 1, 2], [100, 101, 102], [200, 201, 202]]

    def test_the_sampler_that_is_taken_over_is_not_moved(self) -> None:
        sampler = RoundRobinBatchSampler(LENGTHS, 2)
        before = sampler.state_dict()
        list(take_over(self.plain(sampler)))

        assert sampler.state_dict() == before

    def test_a_batch_sampler_derived_from_torchs_is_run_as_it_is(self) -> None:
        class Own(BatchSampler):
            pass

        taken = take_over(self.plain(Own(range(23), 2, False)))

        assert list(taken.batch_sampler)[:2] == [[0, 1], [2, 3]]

    def test_any_batch_sampler_over_an_order_is_taken_over(self) -> None:
        sampler = StatefulBatchSampler(RoundRobinBatchSampler(LENGTHS, 2).tracker.order)

        assert len(take_over(self.plain(sampler))) == len(sampler)
