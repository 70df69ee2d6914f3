"""Everything with a state obeys the eight laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.index import BlockShuffledOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.loaders import StatefulLoader, take_over
from lightning_stateful.samplers import StatefulDistributedSampler
from lightning_stateful.testing import LAWS

LENGTH = 11
WEIGHTS = torch.tensor([float(i % 4) for i in range(LENGTH)], dtype=torch.double)

Make = Callable[[int, int], Any]


def a_sampler(length: int = LENGTH, **options: Any) -> Make:
    return lambda num_replicas, rank: StatefulDistributedSampler(length, num_replicas, rank, **options)


def a_loader(length: int = LENGTH, **options: Any) -> Make:
    return lambda num_replicas, rank: StatefulLoader(
        list(range(length)), num_replicas=num_replicas, rank=rank, **options
    )


def a_loader_with(sampler: Callable[[], Any], length: int = LENGTH, **options: Any) -> Make:
    return lambda num_replicas, rank: StatefulLoader(
        list(range(length)), num_replicas=num_replicas, rank=rank, sampler=sampler(), **options
    )


def a_loader_taken_over(**options: Any) -> Make:
    return lambda num_replicas, rank: take_over(
        DataLoader(list(range(LENGTH)), **options), num_replicas=num_replicas, rank=rank, seed=3
    )


def a_loader_with_a_batch_sampler(num_replicas: int, rank: int) -> StatefulLoader:
    batches = BatchSampler(RandomSampler(range(LENGTH)), batch_size=3, drop_last=False)
    return StatefulLoader(list(range(LENGTH)), batch_sampler=batches, num_replicas=num_replicas, rank=rank)


IMPLEMENTERS: dict[str, Make] = {
    "sampler, shuffled": a_sampler(),
    "sampler, sequential": a_sampler(shuffle=False),
    "sampler, shuffled, tail dropped": a_sampler(drop_last=True),
    "sampler, sequential, tail dropped": a_sampler(shuffle=False, drop_last=True),
    "sampler, even length": a_sampler(12),
    "sampler, fewer samples than ranks": a_sampler(1),
    "sampler, no samples": a_sampler(0),
    "loader, sequential": a_loader(batch_size=3),
    "loader, shuffled": a_loader(batch_size=3, shuffle=True),
    "loader, shuffled, tail dropped": a_loader(batch_size=3, shuffle=True, drop_last=True),
    "loader, batches of one": a_loader(shuffle=True),
    "loader, one batch": a_loader(batch_size=20, shuffle=True),
    "loader, fewer samples than ranks": a_loader(1, batch_size=2),
    "loader, no samples": a_loader(0, batch_size=2),
    "loader, samples not seeded": a_loader(batch_size=3, shuffle=True, seed_samples=False),
    "loader, for evaluation": a_loader(10, exact=True),
    "loader, in shuffled blocks": a_loader_with(
        lambda: BlockShuffledOrder(LENGTH, block_size=3, window=2), batch_size=2
    ),
    "loader, an order": a_loader_with(lambda: ShuffledOrder(LENGTH, 5), batch_size=2),
    "loader, SequentialSampler": a_loader_with(lambda: SequentialSampler(range(LENGTH)), batch_size=2),
    "loader, RandomSampler": a_loader_with(lambda: RandomSampler(range(LENGTH)), batch_size=2),
    "loader, RandomSampler with replacement": a_loader_with(
        lambda: RandomSampler(range(LENGTH), replacement=True), batch_size=2
    ),
    "loader, RandomSampler with fewer samples": a_loader_with(
        lambda: RandomSampler(range(LENGTH), num_samples=7), batch_size=2
    ),
    "loader, RandomSampler with more samples": a_loader_with(
        lambda: RandomSampler(range(LENGTH), num_samples=25), batch_size=4
    ),
    "loader, SubsetRandomSampler": a_loader_with(lambda: SubsetRandomSampler([8, 1, 5, 3, 10, 2, 0]), batch_size=2),
    "loader, WeightedRandomSampler": a_loader_with(lambda: WeightedRandomSampler(WEIGHTS, 9), batch_size=2),
    "loader, WeightedRandomSampler without replacement": a_loader_with(
        lambda: WeightedRandomSampler(WEIGHTS, 7, replacement=False), batch_size=2
    ),
    "loader, DistributedSampler": a_loader_with(
        lambda: DistributedSampler(range(LENGTH), num_replicas=2, rank=1), batch_size=2
    ),
    "loader, BatchSampler": a_loader_with_a_batch_sampler,
    "loader taken over": a_loader_taken_over(batch_size=3, shuffle=True),
}

OTHERS: dict[str, Callable[[], Any]] = {
    "sampler": lambda: StatefulDistributedSampler(LENGTH, 1, 0, seed=99),
    "loader": lambda: StatefulLoader(list(range(LENGTH)), sampler=SequentialOrder(LENGTH - 1), drop_last=True),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", IMPLEMENTERS)
def test_every_implementer_obeys_every_law(name: str, law: str) -> None:
    options: dict[str, Any] = {}
    if law == "rank-free":
        options["drop_last"] = "tail dropped" in name
        options["resize"] = (1, 3, 4)
    if law == "not configuration":
        options["make_other"] = OTHERS["loader" if name.startswith("loader") else "sampler"]
    LAWS[law](IMPLEMENTERS[name], **options)


def test_a_loader_with_two_workers_obeys_the_laws_on_resuming() -> None:
    make = a_loader(7, batch_size=2, shuffle=True, num_workers=2)

    for law in ("fresh", "suffix", "echo"):
        LAWS[law](make, num_epochs=1, stops=[1])


def test_each_sampler_and_loader_refuses_every_single_other_setting() -> None:
    make = a_loader(batch_size=3, shuffle=True)
    others: list[Callable[[], Any]] = [
        lambda: StatefulLoader(list(range(LENGTH)), batch_size=3, shuffle=True, seed=1),
        lambda: StatefulLoader(list(range(LENGTH)), batch_size=3, shuffle=False),
        lambda: StatefulLoader(list(range(LENGTH)), batch_size=3, shuffle=True, drop_last=True),
        lambda: StatefulLoader(list(range(LENGTH + 1)), batch_size=3, shuffle=True),
        lambda: StatefulLoader(list(range(LENGTH)), sampler=RandomSampler(range(LENGTH), num_samples=LENGTH - 1)),
        lambda: StatefulLoader(list(range(LENGTH)), sampler=RandomSampler(range(LENGTH), replacement=True)),
        lambda: StatefulLoader(list(range(LENGTH)), sampler=BlockShuffledOrder(LENGTH)),
    ]

    for other in others:
        LAWS["not configuration"](make, make_other=other, stops="spread")
