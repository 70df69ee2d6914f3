"""lhotse's samplers, which yield whole batches of cuts, are dealt out to ranks and resume exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_stateful.audit import check_resume
from lightning_stateful.loaders import StatefulLoader, patch_dataloader
from lightning_stateful.user_samplers import DDPSamplerWrapper

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
# The table of tests/harm has dynamic buckets under a Trainer, with stops.
QUICK = ("simple",)
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def patched(name: str, num_replicas: int, rank: int, **options: Any) -> StatefulLoader:
    sampler = SAMPLERS[name](world_size=num_replicas, rank=rank)
    loader: DataLoader[Any] = DataLoader(Ids(), sampler=sampler, batch_size=None, **options)
    return patch_dataloader(loader, num_replicas=num_replicas, rank=rank)


def whole(batch: list[str]) -> list[str]:
    """A batch as one thing, as batches that are fewer than the ranks are served twice."""
    return [" ".join(batch)]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS]
)
def test_every_cut_comes_once_in_an_epoch_and_runs_that_are_stopped_go_on_exactly(name: str) -> None:
    epoch = [cut for batch in patched(name, 1, 0) for cut in batch]
    assert len(epoch) == len(set(epoch)) == NUM_CUTS

    found = check_resume(partial(patched, name), num_replicas=2, resize=(3,), stops=[5], chain=(3, 2), key=whole)
    assert found, str(found)


@every_sampler
def test_a_wrapper_without_a_loader_serves_the_same(name: str) -> None:
    wrapper = DDPSamplerWrapper(SAMPLERS[name](world_size=2, rank=1), 2, 1)

    assert [[cut.id for cut in batch] for batch in wrapper] == list(patched(name, 2, 1))


def test_cuts_fetched_ahead_by_workers_do_not_count() -> None:
    loader, fresh = (patched("dynamic buckets", 1, 0, num_workers=number) for number in (2, 1))
    found = list(islice(loader, 3))
    fresh.load_state_dict(loader.state_dict())

    assert found + list(fresh) == list(patched("dynamic buckets", 1, 0))
