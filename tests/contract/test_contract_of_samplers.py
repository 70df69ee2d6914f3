"""Samplers and loaders that the toolkit has not written obey the eight laws as well."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from support.samplers import (
    BATCHED,
    DRAWS,
    LENGTH,
    LOADERS,
    PERMUTATIONS,
    BatchesWithoutLen,
    Endless,
    GlobalRandom,
    ShuffledBatches,
    WithoutLen,
)
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from lightning_stateful.loaders import StatefulLoader, build_patched
from lightning_stateful.samplers import DDPSamplerWrapper
from lightning_stateful.testing import LAWS, Recorder

Make = Callable[[int, int], Any]

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Names(Sampler[str]):
    """Names in place of numbers."""

    def __iter__(self) -> Any:
        return iter([f"sample {number}" for number in torch.randperm(LENGTH).tolist()])


class Longer(Endless):
    """Has more than anybody wants, and an end after all, which is soon found when it is looked into."""

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), 100)


class Arrays(ShuffledBatches):
    """Batches as tensors."""

    def __iter__(self) -> Any:
        return map(torch.tensor, super().__iter__())


def wrapped(sampler: Callable[[], Any], **options: Any) -> Make:
    return lambda num_replicas, rank: DDPSamplerWrapper(sampler(), num_replicas, rank, **options)


def loader_of(sampler: Callable[[], Any], **options: Any) -> Make:
    return lambda num_replicas, rank: StatefulLoader(
        list(range(LENGTH)), sampler=sampler(), num_replicas=num_replicas, rank=rank, **{"batch_size": 3, **options}
    )


def loader_of_batches(sampler: Callable[[], Any]) -> Make:
    return lambda num_replicas, rank: StatefulLoader(
        list(range(LENGTH)), batch_sampler=sampler(), num_replicas=num_replicas, rank=rank
    )


def patched(make: Callable[[], DataLoader[Any]], **options: Any) -> Make:
    return lambda num_replicas, rank: build_patched(make(), num_replicas=num_replicas, rank=rank, **options)


def samples_of(item: Any) -> list[Hashable]:
    if isinstance(item, dict):
        return [int(number) for number in item["id"].reshape(-1).tolist()]
    if isinstance(item, torch.Tensor):
        return list(item.reshape(-1).tolist())
    return list(item) if isinstance(item, (list, tuple)) else [item]


SAMPLERS = {**PERMUTATIONS, **DRAWS, **BATCHED}
UNBATCHED = {**PERMUTATIONS, **DRAWS}
# One of each way, sized or not, in batches or not.
SOME = {name: SAMPLERS[name] for name in ("without len", "own state", "class balanced", "batches without len")}
WRAPPERS: dict[str, Make] = {
    **{f"wrapper, {name}": wrapped(make) for name, make in SAMPLERS.items()},
    **{f"wrapper, {name}, tail dropped": wrapped(make, tail="drop", seed=4) for name, make in SOME.items()},
    **{
        f"wrapper, {name}, between ranks": wrapped(make, shuffle_samples_between_gpus=True)
        for name, make in SOME.items()
    },
    "wrapper, cut": wrapped(Longer, length=9),
    "wrapper, batches cut": wrapped(ShuffledBatches, length=5),
    "wrapper, length not believed": wrapped(ShuffledBatches, length="unknown"),
    "wrapper, samples of a length not believed": wrapped(GlobalRandom, length="unknown"),
    "wrapper, a list": wrapped(lambda: list(range(LENGTH))),
    "wrapper, a list of batches": wrapped(lambda: [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]]),
    "wrapper, names": wrapped(Names),
    "wrapper, batches as tensors": wrapped(Arrays),
    "wrapper, BatchSampler": wrapped(lambda: BatchSampler(GlobalRandom(), 3, False)),
    "wrapper, BatchSampler without len": wrapped(lambda: BatchSampler(WithoutLen(), 3, False)),
    "wrapper, torchdata's distributed": wrapped(lambda: TorchdataDistributedSampler(range(LENGTH), 2, 1, seed=3)),
    "wrapper, one sample": wrapped(lambda: [7]),
    "wrapper, one batch": wrapped(lambda: [[7, 8]]),
}
OVER_LOADERS: dict[str, Make] = {
    **{f"patched, {name}": patched(make) for name, make in LOADERS.items()},
    **{
        f"loader, {name}, tail dropped": loader_of(make, drop_last=True)
        for name, make in UNBATCHED.items()
        if name in SOME
    },
    "loader, samples not seeded": loader_of(GlobalRandom, seed_samples=False),
    "loader, for evaluation": loader_of(GlobalRandom, exact=True, batch_size=1),
    "loader, one by one": loader_of(GlobalRandom, batch_size=None),
    "loader, batches for evaluation": lambda num_replicas, rank: StatefulLoader(
        list(range(LENGTH)), batch_sampler=ShuffledBatches(), num_replicas=num_replicas, rank=rank, exact=True
    ),
    "loader, wrapper as sampler": loader_of(lambda: DDPSamplerWrapper(GlobalRandom(), seed=2)),
    "loader, wrapper as sampler, cut": loader_of(lambda: DDPSamplerWrapper(Longer(), length=17)),
    "loader, wrapper as sampler, without len": loader_of(lambda: DDPSamplerWrapper(WithoutLen())),
    "loader, wrapper as sampler, tail dropped": loader_of(lambda: DDPSamplerWrapper(GlobalRandom(), tail="drop")),
    "loader, wrapper as batch sampler": loader_of_batches(
        lambda: DDPSamplerWrapper(ShuffledBatches(), shuffle_samples_between_gpus=True, seed=2)
    ),
    "loader, wrapper as batch sampler, tail dropped": loader_of_batches(
        lambda: DDPSamplerWrapper(BatchesWithoutLen(), tail="drop")
    ),
}
IMPLEMENTERS = {**WRAPPERS, **OVER_LOADERS}
# One of each way obeys all laws wherever it is stopped; the others go on on as many and on other ranks from a spread of
# stops, and give back the state they have loaded.
STOPPED_EVERYWHERE = ("wrapper, without len", "wrapper, own state", "patched, class balanced", "patched, own state")


def another(name: str) -> Any:
    if name.startswith("wrapper"):
        return DDPSamplerWrapper(list(range(LENGTH)), 1, 0, seed=99)
    return StatefulLoader(list(range(LENGTH + 3)), batch_size=3, num_replicas=1, rank=0, seed=99)


def settings_of(source: Any) -> dict[str, Any]:
    """Settings of objects with and without a length."""
    sized = source.is_sized if isinstance(source, StatefulLoader) else source.order.is_sized
    names = (
        "batch_size",
        "drop_last",
        "num_replicas",
        "rank",
        "tail",
        "seed",
        "shuffle_samples_between_gpus",
        "accept",
    )
    held = {name: vars(source)[name] for name in names if name in vars(source)}
    return {"length": len(source) if sized else None, **held}


@pytest.mark.parametrize("name", IMPLEMENTERS)
def test_every_sampler_that_is_not_ours_obeys_every_law(name: str) -> None:
    make = Recorder(IMPLEMENTERS[name])
    everywhere = name in STOPPED_EVERYWHERE
    options: dict[str, dict[str, Any]] = {law: {"stops": "every" if everywhere else "spread"} for law in LAWS}
    options["rank-free"] = {"resize": (1, 3), "key": samples_of, "drop_last": "tail dropped" in name, "stops": "spread"}
    options["rank-free"]["num_epochs"] = 2 if everywhere else 1
    options["not configuration"] = {"make_other": lambda: another(name), "settings": settings_of, "stops": [0, 3]}
    for law in LAWS if everywhere else ("echo", "rank-free"):
        LAWS[law](make, **options[law])


@pytest.mark.parametrize("name", ["own state", "batches without len"])
def test_with_two_workers_a_patched_loader_obeys_the_laws_on_resuming(name: str) -> None:
    def make(num_replicas: int, rank: int) -> StatefulLoader:
        loader = LOADERS[name]()
        options = {"sampler": loader.sampler, "batch_size": 2}
        if name in BATCHED:
            options = {"batch_sampler": loader.batch_sampler}
        return build_patched(DataLoader(loader.dataset, num_workers=2, **options), num_replicas=num_replicas, rank=rank)

    recorder = Recorder(make)
    for law in ("suffix", "echo"):
        LAWS[law](recorder, num_epochs=1, stops=[3])


def test_a_wrapper_refuses_every_other_setting_and_sampler() -> None:
    settings: list[dict[str, Any]] = [{"seed": 1}, {"tail": "drop"}, {"length": 5}, {"length": "unknown"}]
    others = [partial(wrapped(ShuffledBatches, **options), 1, 0) for options in settings]
    others += [partial(wrapped(SAMPLERS[name]), 1, 0) for name in set(SAMPLERS) - {"shuffled batches"}]
    recorder = Recorder(wrapped(ShuffledBatches))
    for other in others:
        LAWS["not configuration"](recorder, make_other=other, settings=settings_of, num_epochs=1, stops=[0, 2])


@pytest.mark.parametrize("name", ["wrapper, without len", "patched, without len"])
def test_settings_can_be_read_of_an_object_without_a_length(name: str) -> None:
    LAWS["not configuration"](IMPLEMENTERS[name], num_epochs=1, stops=[0, 3])
