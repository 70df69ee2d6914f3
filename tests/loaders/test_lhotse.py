"""lhotse's samplers, which yield whole batches of cuts, are dealt out to ranks and resume exactly."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_stateful.loaders import StatefulLoader, patch_dataloader
from lightning_stateful.samplers import DDPSamplerWrapper

lhotse = pytest.importorskip("lhotse")
sampling = pytest.importorskip("lhotse.dataset.sampling")
dummies = pytest.importorskip("lhotse.testing.dummies")

# Cuts that are read from memory will do here.
pytestmark = pytest.mark.filterwarnings("ignore:You are using Dynamic.*with an eagerly read CutSet:UserWarning")

NUM_CUTS = 40


def cuts(first: int = 0, last: int = NUM_CUTS) -> Any:
    return lhotse.CutSet.from_cuts(dummies.dummy_cut(n, duration=1.0 + (n * 7) % 5) for n in range(first, last))


class Ids(Dataset[list[str]]):
    """A batch of cuts as the list of their ids."""

    def __getitem__(self, batch: Any) -> list[str]:
        return [cut.id for cut in batch]


SAMPLERS: dict[str, Callable[..., Any]] = {
    "simple": lambda **ranks: sampling.SimpleCutSampler(cuts(), max_duration=9, shuffle=True, **ranks),
    "simple, in order": lambda **ranks: sampling.SimpleCutSampler(cuts(), max_cuts=2, **ranks),
    "dynamic": lambda **ranks: sampling.DynamicCutSampler(cuts(), max_duration=9, shuffle=True, **ranks),
    "dynamic, small buffer": lambda **ranks: sampling.DynamicCutSampler(
        cuts(), max_duration=9, shuffle=True, shuffle_buffer_size=7, **ranks
    ),
    "dynamic buckets": lambda **ranks: sampling.DynamicBucketingSampler(
        cuts(), max_duration=9, shuffle=True, num_buckets=3, **ranks
    ),
    "dynamic buckets, small buffer": lambda **ranks: sampling.DynamicBucketingSampler(
        cuts(), max_duration=9, shuffle=True, num_buckets=2, buffer_size=12, **ranks
    ),
    "buckets": lambda **ranks: sampling.BucketingSampler(cuts(), max_duration=9, shuffle=True, num_buckets=3, **ranks),
    "round robin": lambda **ranks: sampling.RoundRobinSampler(
        sampling.SimpleCutSampler(cuts(0, 25), max_duration=9, shuffle=True, **ranks),
        sampling.SimpleCutSampler(cuts(25), max_duration=7, shuffle=True, **ranks),
    ),
    "round robin, at random": lambda **ranks: sampling.RoundRobinSampler(
        sampling.DynamicCutSampler(cuts(0, 25), max_duration=9, shuffle=True, **ranks),
        sampling.DynamicCutSampler(cuts(25), max_duration=7, shuffle=True, **ranks),
        randomize=[0.6, 0.4],
    ),
}


def patched(name: str, num_replicas: int, rank: int, **options: Any) -> StatefulLoader:
    sampler = SAMPLERS[name](world_size=num_replicas, rank=rank)
    loader: DataLoader[Any] = DataLoader(Ids(), sampler=sampler, batch_size=None, **options)
    return patch_dataloader(loader, num_replicas=num_replicas, rank=rank)


def epochs(loader: StatefulLoader, count: int = 2) -> list[list[str]]:
    return [batch for _ in range(count) for batch in loader]


def run_with_kills(name: str, num_replicas: int, kills: tuple[int, ...]) -> tuple[list[list[list[str]]], list[Any]]:
    """Two epochs on all ranks, in which fresh objects with rank 0's state take over after so many batches each.

    Returns:
        What each rank was given, and the last states.
    """
    ranks = range(num_replicas)
    loaders = [patched(name, num_replicas, rank) for rank in ranks]
    found: list[list[list[str]]] = [[] for _ in ranks]
    states: list[Any] = []
    for count in kills:
        for loader, batches in zip(loaders, found, strict=True):
            batches += _take_on(loader, count)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        loaders = [patched(name, num_replicas, rank) for rank in ranks]
        for loader in loaders:
            loader.load_state_dict(states[0])
    for loader, batches in zip(loaders, found, strict=True):
        while loader.epoch < 2:
            batches += list(loader)
    return found, states


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_cut_comes_at_least_once_on_ranks_that_take_equal_steps(name: str, num_replicas: int) -> None:
    for epoch in zip(*(_two_epochs(name, num_replicas, rank) for rank in range(num_replicas)), strict=True):
        counts = Counter(cut for batches in epoch for batch in batches for cut in batch)

        assert len({len(batches) for batches in epoch}) == 1
        assert len(counts) == NUM_CUTS
        assert num_replicas > 1 or counts.total() == NUM_CUTS


@pytest.mark.parametrize(("num_replicas", "kills"), [(1, (3, 9)), (2, (3, 2)), (2, (10, 4))])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_that_is_killed_twice_goes_on_exactly(name: str, num_replicas: int, kills: tuple[int, ...]) -> None:
    whole = [epochs(patched(name, num_replicas, rank)) for rank in range(num_replicas)]

    found, states = run_with_kills(name, num_replicas, kills)

    assert found == whole
    assert states == [states[0]] * num_replicas


@pytest.mark.parametrize("name", SAMPLERS)
def test_resumed_on_another_number_of_ranks_every_cut_comes_at_least_once(name: str) -> None:
    ranks = [patched(name, 2, rank) for rank in range(2)]
    served = [cut for rank in ranks for cut in _take(rank, 5)]
    for num_replicas in (1, 3):
        counts = Counter(served)
        for rank in range(num_replicas):
            fresh = patched(name, num_replicas, rank)
            fresh.load_state_dict(ranks[0].state_dict())
            counts.update(cut for batch in fresh for cut in batch)

        assert len(counts) == NUM_CUTS
        assert num_replicas > 1 or counts.total() == NUM_CUTS


@pytest.mark.parametrize("name", ["simple", "dynamic buckets"])
def test_cuts_fetched_ahead_by_workers_do_not_count(name: str) -> None:
    loader = patched(name, 1, 0, num_workers=2)
    iterator = iter(loader)
    found = [next(iterator) for _ in range(3)]
    fresh = patched(name, 1, 0, num_workers=1)
    fresh.load_state_dict(loader.state_dict())

    assert found + list(fresh) == epochs(patched(name, 1, 0), 1)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_wrapper_deals_them_out_without_a_loader(name: str) -> None:
    ranks = [DDPSamplerWrapper(SAMPLERS[name](world_size=2, rank=rank), 2, rank) for rank in range(2)]
    loaders = [patched(name, 2, rank) for rank in range(2)]

    assert [[[cut.id for cut in batch] for batch in rank] for rank in ranks] == [list(loader) for loader in loaders]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_keeps_the_ranks_it_was_built_for(name: str) -> None:
    def ranks() -> list[tuple[int, int]]:
        parts = [sampler, *getattr(sampler, "samplers", []), *getattr(sampler, "bucket_samplers", [])]
        return [(part.world_size, part.rank) for part in parts if hasattr(part, "world_size")]

    sampler = SAMPLERS[name](world_size=2, rank=1)
    before = ranks()
    list(patch_dataloader(DataLoader(Ids(), sampler=sampler, batch_size=None), num_replicas=3, rank=0))

    assert ranks() == before
    assert (2, 1) in before


def _two_epochs(name: str, num_replicas: int, rank: int) -> list[list[list[str]]]:
    loader = patched(name, num_replicas, rank)
    return [list(loader) for _ in range(2)]


def _take(loader: StatefulLoader, count: int) -> list[str]:
    iterator = iter(loader)
    return [cut for _ in range(count) for cut in next(iterator)]


def _take_on(loader: StatefulLoader, count: int) -> list[list[str]]:
    """The next batches, to the end of an epoch and on."""
    taken: list[list[str]] = []
    while len(taken) < count:
        for batch in loader:
            taken.append(batch)
            if len(taken) == count:
                break
    return taken
