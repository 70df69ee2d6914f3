"""lhotse's samplers, which yield whole batches of cuts, are dealt out to ranks and resume exactly."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
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
    "dynamic": lambda **ranks: sampling.DynamicCutSampler(
        cuts(), max_duration=9, shuffle=True, shuffle_buffer_size=7, **ranks
    ),
    "dynamic buckets": lambda **ranks: sampling.DynamicBucketingSampler(
        cuts(), max_duration=9, shuffle=True, num_buckets=2, buffer_size=12, **ranks
    ),
    "buckets": lambda **ranks: sampling.BucketingSampler(cuts(), max_duration=9, shuffle=True, num_buckets=3, **ranks),
    "round robin, at random": lambda **ranks: sampling.RoundRobinSampler(
        sampling.DynamicCutSampler(cuts(0, 25), max_duration=9, shuffle=True, **ranks),
        sampling.SimpleCutSampler(cuts(25), max_duration=7, shuffle=True, **ranks),
        randomize=[0.6, 0.4],
    ),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def patched(name: str, num_replicas: int, rank: int, **options: Any) -> StatefulLoader:
    sampler = SAMPLERS[name](world_size=num_replicas, rank=rank)
    loader: DataLoader[Any] = DataLoader(Ids(), sampler=sampler, batch_size=None, **options)
    return patch_dataloader(loader, num_replicas=num_replicas, rank=rank)


def on_ranks(name: str, num_replicas: int, state: dict[str, Any] | None = None) -> list[StatefulLoader]:
    loaders = [patched(name, num_replicas, rank) for rank in range(num_replicas)]
    for loader in loaders if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


def served(ranks: list[list[list[str]]]) -> Counter[str]:
    return Counter(cut for batches in ranks for batch in batches for cut in batch)


@every_sampler
def test_every_cut_comes_once_on_ranks_that_take_equal_steps_and_without_a_loader_too(name: str) -> None:
    ranks = on_ranks(name, 2)
    for _ in range(2):
        epoch = [list(loader) for loader in ranks]
        assert len(set(map(len, epoch))) == 1
        # Of fewer cuts than ranks, left for the last step, some come twice.
        assert len(served(epoch)) == NUM_CUTS <= served(epoch).total() <= NUM_CUTS + 1
    wrappers = [DDPSamplerWrapper(SAMPLERS[name](world_size=2, rank=rank), 2, rank) for rank in range(2)]

    assert [[[cut.id for cut in batch] for batch in wrapper] for wrapper in wrappers] == [
        list(loader) for loader in on_ranks(name, 2)
    ]


@pytest.mark.parametrize(("num_replicas", "kills"), [(1, (3, 9)), (2, (3, 2))])
@every_sampler
def test_a_run_that_is_killed_twice_goes_on_exactly(name: str, num_replicas: int, kills: tuple[int, ...]) -> None:
    whole = [list(loader) + list(loader) for loader in on_ranks(name, num_replicas)]
    found: list[list[list[str]]] = [[] for _ in range(num_replicas)]
    loaders = on_ranks(name, num_replicas)
    for count in kills:
        for loader, batches in zip(loaders, found, strict=True):
            batches += islice(loader, count)
        states = [loader.state_dict() for loader in loaders]
        assert states == [states[0]] * num_replicas
        loaders = on_ranks(name, num_replicas, states[0])
    for loader, batches in zip(loaders, found, strict=True):
        while loader.epoch < 2:
            batches += list(loader)

    assert found == whole


@every_sampler
def test_resumed_on_another_number_of_ranks_every_cut_comes_once(name: str) -> None:
    ranks = on_ranks(name, 2)
    begun = served([list(islice(loader, 5)) for loader in ranks])
    for num_replicas in (1, 3):
        counts = begun + served([list(loader) for loader in on_ranks(name, num_replicas, ranks[0].state_dict())])

        assert len(counts) == NUM_CUTS
        assert num_replicas > 1 or counts.total() == NUM_CUTS


def test_cuts_fetched_ahead_by_workers_do_not_count() -> None:
    loader, fresh = (patched("dynamic buckets", 1, 0, num_workers=number) for number in (2, 1))
    found = list(islice(loader, 3))
    fresh.load_state_dict(loader.state_dict())

    assert found + list(fresh) == list(patched("dynamic buckets", 1, 0))


@every_sampler
def test_a_sampler_keeps_the_ranks_it_was_built_for(name: str) -> None:
    def ranks() -> list[tuple[int, int]]:
        parts = [sampler, *getattr(sampler, "samplers", []), *getattr(sampler, "bucket_samplers", [])]
        return [(part.world_size, part.rank) for part in parts if hasattr(part, "world_size")]

    sampler = SAMPLERS[name](world_size=2, rank=1)
    before = ranks()
    list(patch_dataloader(DataLoader(Ids(), sampler=sampler, batch_size=None), num_replicas=3, rank=0))

    assert ranks() == before
    assert (2, 1) in before
