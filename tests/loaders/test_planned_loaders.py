"""A loader over mixtures or buckets serves the batches of their samplers, patched or not, and goes on exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_stateful.errors import ConfigurationError, StateMismatchError
from lightning_stateful.loaders import StatefulLoader, build_patched
from lightning_stateful.samplers import MixtureBatchSampler, RoundRobinBatchSampler
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler

SOURCES = {"a": 7, "b": 12, "c": 4}
LENGTHS = [random.Random(seed).randint(1, 12) for seed in range(23)]
DATA = list(range(23))


class Versioned(list[int]):
    """Says what it is."""

    def describe(self) -> dict[str, Any]:
        return {"version": 2}


SAMPLERS: dict[str, Any] = {
    "round robin": lambda **options: RoundRobinBatchSampler(SOURCES, 2, **options),
    "cycle": lambda **options: MixtureBatchSampler(SOURCES, [1, 2, 3], weights=[2, 1, 1], stop="cycle", **options),
    "by sample": lambda **options: MixtureBatchSampler(SOURCES, 4, by="sample", num_steps=9, **options),
    "buckets": lambda **options: BucketBatchSampler(LENGTHS, max_tokens=30, num_buckets=3, **options),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
round_robin, buckets = SAMPLERS["round robin"], SAMPLERS["buckets"]


def a_loader(sampler: Any, **options: Any) -> StatefulLoader:
    return StatefulLoader(DATA, batch_sampler=sampler, **options)


def plain(sampler: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=sampler, **options)


def indices(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


class TestBatches:
    @every_sampler
    def test_it_serves_those_of_its_sampler_and_shows_the_rest_of_the_pass(self, make: Any) -> None:
        sampler, loader = make(num_replicas=2, rank=1), a_loader(make(num_replicas=2, rank=1))
        assert [indices(loader), indices(loader)] == [list(sampler), list(sampler)]
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        batches = list(loader.batch_sampler)

        assert list(loader.sampler) == [index for batch in batches for index in batch]
        assert indices(loader) == batches
        loader.set_epoch(5)
        assert len(list(loader.batch_sampler)) == len(loader.batch_sampler) == len(loader)
        assert isinstance(loader.sampler, DistributedSampler)

    def test_ranks_given_to_the_loader_count_before_the_samplers_which_may_be_an_order_alone(self) -> None:
        loader = a_loader(round_robin(num_replicas=2, rank=0), num_replicas=3, rank=2)
        bare = a_loader(round_robin().order, num_replicas=3, rank=2)

        assert (loader.topology.num_replicas, loader.topology.rank) == (3, 2)
        assert indices(bare) == indices(loader)

    def test_a_dataset_of_another_length_is_refused_with_both_numbers(self) -> None:
        for batches in (buckets(), buckets().order):
            with pytest.raises(ConfigurationError, match="There are 23 lengths, and the dataset has 24 samples"):
                StatefulLoader(range(24), batch_sampler=batches)


class TestStates:
    def test_another_dataset_of_the_same_lengths_is_refused(self) -> None:
        with pytest.raises(StateMismatchError, match=r"dataset\.version"):
            StatefulLoader(Versioned(DATA), batch_sampler=buckets()).load_state_dict(a_loader(buckets()).state_dict())

    def test_a_state_of_the_sampler_alone_is_one_of_the_loader_but_for_what_it_does_not_say(self) -> None:
        state = buckets().state_dict(num_batches=4)
        with pytest.raises(StateMismatchError, match="dataset"):
            a_loader(buckets()).load_state_dict(state)
        accepting = a_loader(buckets(), accept="dataset")
        accepting.load_state_dict(state)
        assert indices(accepting) == list(buckets())[4:]


class TestTakenOver:
    def test_what_the_sampler_accepts_is_accepted_when_it_is_patched_again_too(self) -> None:
        loader = build_patched(plain(round_robin(accept="seed")), accept="weights", seed=4)
        again = build_patched(loader, seed=9, num_replicas=2, rank=1)
        again.load_state_dict(build_patched(plain(round_robin(seed=8))).state_dict())

        assert (again.accept, again.seed, again.topology.num_replicas) == (("seed", "weights"), 4, 2)

    def test_for_evaluation_it_is_served_in_the_same_order_every_time(self) -> None:
        loader = build_patched(plain(RoundRobinBatchSampler(SOURCES, 3)), shuffle=False)
        first, second = indices(loader), indices(loader)

        assert first == second
        assert first[:3] == [[0, 1, 2], [7, 8, 9], [19, 20, 21]]

    def test_a_batch_sampler_derived_from_torchs_is_run_as_it_is(self) -> None:
        class Own(BatchSampler):
            pass

        assert list(build_patched(plain(Own(range(23), 2, False))).batch_sampler)[:2] == [[0, 1], [2, 3]]
