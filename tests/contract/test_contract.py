"""Everything with a state obeys the eight laws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.bucket_cases import in_budget
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.core import BlockShuffledOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.loaders import StatefulLoader, build_patched
from lightning_stateful.mixture import WeightSchedule
from lightning_stateful.samplers import (
    BucketBatchSampler,
    MixtureBatchSampler,
    RoundRobinBatchSampler,
    StatefulDistributedSampler,
)
from lightning_stateful.testing import LAWS, Recorder

LENGTH = 11
WEIGHTS = torch.tensor([float(i % 4) for i in range(LENGTH)], dtype=torch.double)
SOURCES = {"a": 5, "b": 11, "c": 8}
TOKENS = {"a": [9] * 5, "b": [2] * 11, "c": list(range(1, 9))}
LENGTHS = [3, 7, 1, 12, 5, 5, 9, 2, 16, 4, 6, 3, 11, 8, 1, 14, 2, 10, 7, 3, 5, 13, 4]

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


def a_patched_loader(**options: Any) -> Make:
    return lambda num_replicas, rank: build_patched(
        DataLoader(list(range(LENGTH)), **options), num_replicas=num_replicas, rank=rank, seed=3
    )


def a_loader_with_a_batch_sampler(num_replicas: int, rank: int) -> StatefulLoader:
    batches = BatchSampler(RandomSampler(range(LENGTH)), batch_size=3, drop_last=False)
    return StatefulLoader(list(range(LENGTH)), batch_sampler=batches, num_replicas=num_replicas, rank=rank)


def round_robin(batch_size: Any = 2, **options: Any) -> Make:
    return lambda num_replicas, rank: RoundRobinBatchSampler(
        SOURCES, batch_size, num_replicas=num_replicas, rank=rank, **options
    )


def a_mixture(batch_size: Any = 2, **options: Any) -> Make:
    return lambda num_replicas, rank: MixtureBatchSampler(
        SOURCES, batch_size, num_replicas=num_replicas, rank=rank, **options
    )


def over_sources(sampler: Make) -> Make:
    dataset = ConcatDataset([[1000 * place + index for index in range(n)] for place, n in enumerate(SOURCES.values())])
    return lambda num_replicas, rank: StatefulLoader(dataset, batch_sampler=sampler(num_replicas, rank))


def patched_over_sources(sampler: Callable[[], Any]) -> Make:
    return lambda num_replicas, rank: build_patched(
        DataLoader(list(range(sum(SOURCES.values()))), batch_sampler=sampler()), num_replicas=num_replicas, rank=rank
    )


def buckets(lengths: Any = LENGTHS, **options: Any) -> Make:
    budget = {} if options.keys() & {"batch_size", "max_tokens"} else {"max_tokens": 32}
    return lambda num_replicas, rank: BucketBatchSampler(
        lengths, num_replicas=num_replicas, rank=rank, **in_budget({"num_buckets": 3, **budget, **options})
    )


def over_lengths(sampler: Make, **options: Any) -> Make:
    return lambda num_replicas, rank: StatefulLoader(
        list(range(len(LENGTHS))), batch_sampler=sampler(num_replicas, rank), **options
    )


def patched_over_lengths(sampler: Callable[[], Any]) -> Make:
    return lambda num_replicas, rank: build_patched(
        DataLoader(list(range(len(LENGTHS))), batch_sampler=sampler()), num_replicas=num_replicas, rank=rank
    )


# The laws of each order are in the tests of core, mixture, bucketing and samplers. Here are the faces that serve them:
# samplers, batch samplers and loaders, with an order of each kind and way to end an epoch.
# What an epoch serves does not depend on the number of ranks.
EPOCHS_OF_SEVERAL_SOURCES: dict[str, Make] = {
    "round robin, batch sizes of their own": round_robin({"a": 1, "b": 4, "c": 3}),
    "round robin, tail dropped": round_robin({"a": 1, "b": 2, "c": 1}, drop_last=True),
    "round robin, first exhausted": round_robin(stop="first_exhausted"),
    "round robin, cycle": round_robin([1, 4, 3], stop="cycle"),
    "mixture by batch": a_mixture(weights=[3, 1, 2]),
    "mixture by batch, in blocks of seven": a_mixture(temperature=2, block=7, shuffle=False),
    "mixture by batch, cycle": a_mixture(weights=[3, 1, 2], stop="cycle"),
    "mixture by sample": a_mixture(3, by="sample"),
    "mixture by token": a_mixture(by="token", token_lengths=TOKENS, weights=[1, 1, 1]),
    "loader, mixture by sample": over_sources(a_mixture(4, by="sample", weights=[1, 2, 1])),
    "loader, round robin, cycle": over_sources(round_robin(stop="cycle")),
    "patched loader, round robin": patched_over_sources(lambda: RoundRobinBatchSampler(SOURCES, 3)),
}
# More ranks serve more in as many steps.
STEPS_OF_SEVERAL_SOURCES: dict[str, Make] = {
    "round robin, more steps than there are samples": round_robin(4, num_steps=13),
    "mixture by batch, steps": a_mixture([1, 4, 3], weights=[0.21, 0.5, 0.3], num_steps=7),
    "mixture by sample, scheduled": a_mixture(
        4, by="sample", schedule=WeightSchedule({0: [1, 0, 1], 7: [0, 1, 1]}, between="linear"), num_steps=5
    ),
    "loader, mixture, scheduled": over_sources(a_mixture(schedule={0: [8, 1, 1], 6: [1, 8, 1]}, num_steps=5)),
    "patched loader, mixture, steps": patched_over_sources(lambda: MixtureBatchSampler(SOURCES, 3, num_steps=4)),
}
OF_LIKE_LENGTHS: dict[str, Make] = {
    "buckets": buckets(),
    "buckets, unshuffled, tail dropped": buckets(shuffle=False, drop_last=True, seed=3),
    "buckets, batches of one size": buckets(batch_size=3),
    "buckets, too long dropped": buckets(max_tokens=11, too_long="drop"),
    "buckets, fewer samples than ranks": buckets([4]),
    "loader, buckets, tail dropped": over_lengths(buckets(drop_last=True)),
    "loader, buckets, samples not seeded": over_lengths(buckets(), seed_samples=False),
    "patched loader, buckets": patched_over_lengths(lambda: BucketBatchSampler(LENGTHS, max_tokens=32)),
}
IMPLEMENTERS: dict[str, Make] = {
    **OF_LIKE_LENGTHS,
    **EPOCHS_OF_SEVERAL_SOURCES,
    **STEPS_OF_SEVERAL_SOURCES,
    "sampler, shuffled": a_sampler(),
    "sampler, sequential, tail dropped": a_sampler(shuffle=False, drop_last=True),
    "sampler, fewer samples than ranks": a_sampler(1),
    "sampler, no samples": a_sampler(0),
    "loader, shuffled": a_loader(batch_size=3, shuffle=True),
    "loader, shuffled, tail dropped": a_loader(batch_size=3, shuffle=True, drop_last=True),
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
    "loader, RandomSampler with more samples": a_loader_with(
        lambda: RandomSampler(range(LENGTH), num_samples=25), batch_size=4
    ),
    "loader, SubsetRandomSampler": a_loader_with(lambda: SubsetRandomSampler([8, 1, 5, 3, 10, 2, 0]), batch_size=2),
    "loader, WeightedRandomSampler": a_loader_with(lambda: WeightedRandomSampler(WEIGHTS, 9), batch_size=2),
    "loader, DistributedSampler": a_loader_with(
        lambda: DistributedSampler(range(LENGTH), num_replicas=2, rank=1), batch_size=2
    ),
    "loader, BatchSampler": a_loader_with_a_batch_sampler,
    "patched loader": a_patched_loader(batch_size=3, shuffle=True),
}
# One of each class and of each way to make batches obeys all laws wherever it is stopped; the others go on on as many
# and on other ranks from a spread of stops, and give back the state they have loaded.
STOPPED_EVERYWHERE = (
    "sampler, shuffled",
    "sampler, no samples",
    "loader, shuffled",
    "loader, for evaluation",
    "loader, RandomSampler with more samples",
    "loader, BatchSampler",
    "round robin, cycle",
    "mixture by sample",
    "mixture by batch, steps",
    "loader, mixture, scheduled",
    "buckets",
)
OTHER_LENGTHS: list[Any] = [[*LENGTHS, 3], LENGTHS[:-1], [*LENGTHS[:-1], LENGTHS[-1] + 1], LENGTHS[::-1]]
OTHER_SOURCES: list[dict[str, int]] = [{"a": 5, "b": 11, "d": 8}, {"a": 5, "b": 12, "c": 8}, {"a": 5, "b": 11}]
OTHERS: dict[str, Callable[[], Any]] = {
    "sampler": lambda: StatefulDistributedSampler(LENGTH, 1, 0, seed=99),
    "loader": lambda: StatefulLoader(list(range(LENGTH)), sampler=SequentialOrder(LENGTH - 1), drop_last=True),
}


@pytest.mark.parametrize("name", IMPLEMENTERS)
def test_every_implementer_obeys_every_law(name: str) -> None:
    make = Recorder(IMPLEMENTERS[name])
    everywhere = name in STOPPED_EVERYWHERE
    options: dict[str, dict[str, Any]] = {law: {"stops": "every" if everywhere else "spread"} for law in LAWS}
    options["rank-free"]["drop_last"] = "tail dropped" in name
    options["rank-free"]["resize"] = () if name in STEPS_OF_SEVERAL_SOURCES else (1, 3, 4)
    options["not configuration"]["make_other"] = OTHERS["loader" if name.startswith("loader") else "sampler"]
    for law in LAWS if everywhere else ("echo", "rank-free"):
        LAWS[law](make, **options[law])


def test_a_loader_with_two_workers_obeys_the_laws_on_resuming() -> None:
    make = Recorder(a_loader(7, batch_size=2, shuffle=True, num_workers=2))
    for law in ("fresh", "suffix", "echo"):
        LAWS[law](make, num_epochs=1, stops=[1])


# What else decides about batches stands in the configurations; see the tests of mixture, bucketing and the state.
MIXTURES: list[dict[str, Any]] = [{"weights": [3, 1, 2]}, {"by": "sample"}, {"block": 12}, {"temperature": 2}]
BUCKETS: list[dict[str, Any]] = [{"max_tokens": 33}, {"drop_last": True}, {"seed": 1}, {"num_buckets": 4}]
REFUSALS: dict[str, tuple[Make, list[Callable[[], Any]]]] = {
    "loader": (
        a_loader(batch_size=3, shuffle=True),
        [
            lambda: StatefulLoader(list(range(LENGTH)), batch_size=3, shuffle=True, seed=1),
            lambda: StatefulLoader(list(range(LENGTH)), batch_size=3, shuffle=False),
            lambda: StatefulLoader(list(range(LENGTH)), batch_size=3, shuffle=True, drop_last=True),
            lambda: StatefulLoader(list(range(LENGTH + 1)), batch_size=3, shuffle=True),
            lambda: StatefulLoader(list(range(LENGTH)), sampler=RandomSampler(range(LENGTH), num_samples=LENGTH - 1)),
            lambda: StatefulLoader(list(range(LENGTH)), sampler=RandomSampler(range(LENGTH), replacement=True)),
            lambda: StatefulLoader(list(range(LENGTH)), sampler=BlockShuffledOrder(LENGTH)),
        ],
    ),
    "round robin": (
        round_robin(),
        [partial(round_robin(**options), 1, 0) for options in ({"batch_size": 3}, {"stop": "cycle"}, {"seed": 1})],
    ),
    "mixture": (
        a_mixture(weights=[3, 2, 1]),
        [partial(a_mixture(**{"weights": [3, 2, 1], **options}), 1, 0) for options in MIXTURES],
    ),
    "loader, other sources": (
        over_sources(round_robin()),
        [partial(over_sources(a_mixture()), 1, 0), partial(over_sources(round_robin(shuffle=False)), 1, 0)],
    ),
    "other sources": (a_mixture(), [partial(MixtureBatchSampler, other, 2) for other in OTHER_SOURCES]),
    "buckets": (buckets(), [partial(buckets(**options), 1, 0) for options in BUCKETS]),
    "loader, buckets": (over_lengths(buckets()), [partial(over_lengths(buckets(max_tokens=33)), 1, 0)]),
    "other lengths": (buckets(), [partial(buckets(lengths), 1, 0) for lengths in OTHER_LENGTHS]),
}


@pytest.mark.parametrize(("make", "others"), REFUSALS.values(), ids=REFUSALS)
def test_every_single_other_setting_is_refused(make: Make, others: list[Callable[[], Any]]) -> None:
    recorder = Recorder(make)
    for other in others:
        LAWS["not configuration"](recorder, make_other=other, num_epochs=1, stops=[0, 3])


def test_the_same_lengths_of_another_type_are_not_refused() -> None:
    state = buckets()(1, 0).state_dict()
    for lengths in (np.array(LENGTHS, dtype=np.uint8), np.array(LENGTHS, dtype=">i4"), torch.tensor(LENGTHS)):
        sampler = buckets(lengths)(1, 0)
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
