"""Everything with a state obeys the eight laws: samplers and loaders, over orders and over other samplers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from support.quick import is_thorough, thinned
from support.samplers import (
    BATCHED,
    DRAWS,
    LOADERS,
    PERMUTATIONS,
    BatchesWithoutLen,
    Endless,
    GlobalRandom,
    ShuffledBatches,
    WithoutLen,
)
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, Sampler

from lightning_stateful.bucketing import Budget
from lightning_stateful.core import BlockShuffledOrder, SequentialOrder
from lightning_stateful.loaders import PackedDataset, StatefulLoader, build_patched
from lightning_stateful.packing import Packing
from lightning_stateful.samplers import (
    BucketBatchSampler,
    MixtureBatchSampler,
    RoundRobinBatchSampler,
    StatefulDistributedSampler,
)
from lightning_stateful.testing import LAWS, Recorder
from lightning_stateful.user_samplers import DDPSamplerWrapper

SOURCES = {"a": 5, "b": 11, "c": 8}
TOKENS = {"a": [9] * 5, "b": [2] * 11, "c": list(range(1, 9))}
LENGTHS = [3, 7, 1, 12, 5, 5, 9, 2, 16, 4, 6, 3, 11, 8, 1, 14, 2, 10, 7, 3, 5, 13, 4]
DATA = list(range(11))
OF_SOURCES = ConcatDataset([[1000 * place + index for index in range(n)] for place, n in enumerate(SOURCES.values())])

Make = Callable[[int, int], Any]

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Names(Sampler[str]):
    """Names in place of numbers."""

    def __iter__(self) -> Any:
        return iter([f"sample {number}" for number in torch.randperm(22).tolist()])


class Longer(Endless):
    """Has more than anybody wants, and an end after all, which is soon found when it is looked into."""

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), 100)


def ranked(kind: Any, *arguments: Any, **options: Any) -> Make:
    return lambda num_replicas, rank: kind(*arguments, num_replicas=num_replicas, rank=rank, **options)


def fresh(name: str, **options: Any) -> Make:
    return lambda num_replicas, rank: DDPSamplerWrapper(SAMPLERS[name](), num_replicas, rank, **options)


def patched(make: Callable[[], Any]) -> Make:
    return lambda num_replicas, rank: build_patched(make(), num_replicas=num_replicas, rank=rank, seed=3)


def of_tokens(sequences: list[dict[str, Any]]) -> list[str]:
    """A batch of packed sequences, each as its tokens."""
    return [str(sequence["input_ids"].tolist()) for sequence in sequences]


def packed(packing: Packing) -> Make:
    """A loader over documents of 1 to 16 tokens, packed."""
    lengths = LENGTHS[:12]
    documents = [[100 * number + token for token in range(length)] for number, length in enumerate(lengths)]
    data = PackedDataset(documents, lengths=lengths, packing=packing)
    return loader(data, sampler=data.order, batch_size=2, collate_fn=of_tokens)


def without_batches(num_replicas: int, rank: int) -> Any:
    """A loader that leaves the same samples out on any ranks, which have them in other batches."""
    count = 12 // (2 * num_replicas)
    skip = {0: range(count, 2 * count), 1: range(count), 2: range(count), 3: range(count, 2 * count)}
    how: Any = {"num_replicas": num_replicas, "rank": rank}
    return StatefulLoader(list(range(29)), batch_size=2, shuffle=True, skip=skip, **how)


sampler, loader = partial(ranked, StatefulDistributedSampler), partial(ranked, StatefulLoader)
round_robin, mixture = partial(ranked, RoundRobinBatchSampler, SOURCES), partial(ranked, MixtureBatchSampler, SOURCES)
buckets, wrapper = partial(ranked, BucketBatchSampler, LENGTHS), partial(ranked, DDPSamplerWrapper)
over_samples = partial(loader, list(range(22)), batch_size=3)
scheduled = MixtureBatchSampler(SOURCES, 2, schedule={0: [8, 1, 1], 6: [1, 8, 1]}, num_steps=5)

# The laws of each order are in the tests of core, mixture, bucketing and samplers. Here are the faces that serve them.
OURS: dict[str, Make] = {
    "sampler, shuffled": sampler(11),
    "sampler, sequential, tail dropped": sampler(11, shuffle=False, drop_last=True),
    "sampler, fewer samples than ranks": sampler(1),
    "sampler, no samples": sampler(0),
    "round robin, batch sizes of their own": round_robin({"a": 1, "b": 4, "c": 3}),
    "round robin, cycle": round_robin([1, 4, 3], stop="cycle"),
    "mixture by sample": mixture(3, by="sample"),
    "mixture by token": mixture(2, by="token", token_lengths=TOKENS, weights=[1, 1, 1]),
    "mixture, first exhausted": mixture(2, temperature=2, block=7, shuffle=False, stop="first_exhausted"),
    "buckets": buckets(max_tokens=32, num_buckets=3),
    "buckets, too long dropped": buckets(budget=Budget(max_tokens=11, too_long="drop"), num_buckets=3),
    "loader, shuffled": loader(DATA, batch_size=3, shuffle=True),
    "loader, one batch": loader(DATA, batch_size=20, shuffle=True),
    "loader, no samples": loader([], batch_size=2),
    "loader, samples not seeded": loader(DATA, batch_size=3, shuffle=True, seed_samples=False),
    "loader, for evaluation": loader(DATA, exact=True),
    "loader, in shuffled blocks": loader(DATA, sampler=BlockShuffledOrder(11, block_size=3, window=2), batch_size=2),
    "loader, batches left out": without_batches,
    "loader, samples left out": loader(DATA, batch_size=2, shuffle=True, skip={3, 4, 9}),
    "loader, RandomSampler with more": loader(DATA, sampler=RandomSampler(DATA, num_samples=25), batch_size=4),
    "loader, BatchSampler": loader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)),
    "loader, mixture": loader(OF_SOURCES, batch_sampler=MixtureBatchSampler(SOURCES, 4, by="sample")),
    "loader, buckets, tail dropped": loader(
        list(range(len(LENGTHS))), batch_sampler=BucketBatchSampler(LENGTHS, max_tokens=32, drop_last=True)
    ),
    "loader, packed, split": packed(Packing(8)),
    "loader, packed, whole": packed(Packing(8, how="whole", too_long="split")),
    "patched, round robin": patched(
        lambda: DataLoader(list(range(24)), batch_sampler=RoundRobinBatchSampler(SOURCES, 3))
    ),
}
# More ranks serve more in as many steps.
OF_STEPS: dict[str, Make] = {
    "mixture, steps": mixture([1, 4, 3], weights=[0.21, 0.5, 0.3], num_steps=7),
    "loader, mixture, scheduled": loader(OF_SOURCES, batch_sampler=scheduled),
}
SAMPLERS = {**PERMUTATIONS, **DRAWS, **BATCHED}
# Samplers and loaders that the toolkit has not written.
THEIRS: dict[str, Make] = {
    **{
        f"wrapper, {name}": fresh(name)
        for name in ("without len", "own state", "class balanced", "batches without len")
    },
    "wrapper, without len, tail dropped": wrapper(WithoutLen(), tail="drop", seed=4),
    "wrapper, between ranks": wrapper(BatchesWithoutLen(), shuffle_samples_between_gpus=True),
    "wrapper, cut": wrapper(Longer(), length=9),
    "wrapper, length not believed": wrapper(ShuffledBatches(), length="unknown"),
    "wrapper, names": wrapper(Names()),
    "wrapper, one batch": wrapper([[7, 8]]),
    **{
        f"patched, {name}": patched(LOADERS[name])
        for name in ("random", "weighted", "own state", "class balanced", "unbatched", "torchdata's loader")
    },
    "loader, without len, tail dropped": over_samples(sampler=WithoutLen(), drop_last=True),
    "loader, sampler for evaluation": loader(list(range(22)), sampler=GlobalRandom(), exact=True),
    "loader, one by one": loader(list(range(22)), sampler=GlobalRandom(), batch_size=None),
    "loader, wrapper, cut": over_samples(sampler=DDPSamplerWrapper(Longer(), length=17)),
    "loader, wrapper of batches, tail dropped": loader(
        list(range(22)), batch_sampler=DDPSamplerWrapper(BatchesWithoutLen(), tail="drop")
    ),
}
IMPLEMENTERS = {**OURS, **OF_STEPS, **THEIRS}
WHOLE_BATCHES = {
    *("wrapper, between ranks", "wrapper, length not believed", "wrapper, one batch"),
    "patched, torchdata's loader",
    *(f"{how}, {name}" for how in ("wrapper", "patched") for name in BATCHED),
}
# One of each way obeys all laws wherever it is stopped; the others go on on as many and on other ranks from a spread of
# stops, and give back the state they have loaded.
STOPPED_EVERYWHERE = (
    "sampler, shuffled",
    "sampler, no samples",
    "loader, shuffled",
    "loader, for evaluation",
    "loader, BatchSampler",
    "loader, batches left out",
    "round robin, cycle",
    "mixture by sample",
    "mixture, steps",
    "loader, mixture, scheduled",
    "buckets",
    "loader, packed, split",
    "patched, own state",
)
# Of these, every stop is tried in make test too.
EVERY_STOP = ("sampler, shuffled", "sampler, no samples", "loader, shuffled", "round robin, cycle", "buckets")
# What others here stand for: the same sampler behind another face, or the same face over another sampler.
SLOW = (
    "loader, batches left out",
    "patched, random",
    "patched, weighted",
    "patched, class balanced",
    "patched, unbatched",
    "patched, torchdata's loader",
    "patched, round robin",
    "wrapper, own state",
    "wrapper, cut",
    "wrapper, without len",
    "wrapper, class balanced",
    "round robin, batch sizes of their own",
    "wrapper, without len, tail dropped",
    "loader, without len, tail dropped",
    "loader, wrapper of batches, tail dropped",
    "loader, wrapper, cut",
    "loader, packed, whole",
)


def samples_of(item: Any) -> list[Hashable]:
    if isinstance(item, dict):
        item = item["id"]
    if isinstance(item, torch.Tensor):
        return list(item.reshape(-1).tolist())
    return list(item) if isinstance(item, (list, tuple)) else [item]


def batch_of(item: Any) -> list[Hashable]:
    """A whole batch as one thing: what is fewer than the ranks is served twice, and no batch is cut."""
    return [str(samples_of(item))]


def another(name: str) -> Any:
    if name.startswith(("loader", "patched")):
        return StatefulLoader(list(range(25)), sampler=SequentialOrder(25), seed=99, drop_last=True)
    return StatefulDistributedSampler(11, 1, 0, seed=99)


@pytest.mark.parametrize("name", thinned(IMPLEMENTERS, SLOW))
def test_every_implementer_obeys_every_law(name: str) -> None:
    make, everywhere = Recorder(IMPLEMENTERS[name]), name in STOPPED_EVERYWHERE
    is_every = everywhere and name not in THEIRS and (name in EVERY_STOP or is_thorough())
    stops = "every" if is_every else "spread"
    options: dict[str, dict[str, Any]] = {law: {"stops": stops} for law in LAWS}
    key = batch_of if name in WHOLE_BATCHES else samples_of
    options["rank-free"] = {"stops": stops, "key": key, "drop_last": "tail dropped" in name}
    options["rank-free"]["resize"] = () if name in OF_STEPS else (1, 3) if everywhere else (3,)
    options["not configuration"]["make_other"] = partial(another, name)
    for law in LAWS if everywhere else ("echo", "rank-free"):
        LAWS[law](make, **options[law])


@pytest.mark.parametrize("name", thinned(["plain", "own state", "batches without len"], ["plain", "own state"]))
def test_with_two_workers_a_loader_obeys_the_laws_on_resuming(name: str) -> None:
    def make() -> Any:
        if name == "plain":
            return DataLoader(list(range(7)), batch_size=2, shuffle=True, num_workers=2)
        plain = LOADERS[name]()
        how = {"batch_sampler": plain.batch_sampler} if name in BATCHED else {"sampler": plain.sampler, "batch_size": 2}
        return DataLoader(plain.dataset, num_workers=2, **how)

    recorder = Recorder(patched(make))
    for law in ("suffix", "echo"):
        LAWS[law](recorder, num_epochs=1, stops=[3])


# The settings of loaders, mixtures and buckets are in tests/trainer/resume/test_refusals.py,
# tests/samplers/test_accepted_changes.py and tests/data_modules/test_bucket_changes.py.
OTHER_WRAPPERS: list[Make] = [
    *(wrapper(ShuffledBatches(), **{name: value}) for name, value in [("seed", 1), ("tail", "drop")]),
    *(wrapper(ShuffledBatches(), length=length) for length in (5, "unknown")),
    *(fresh(name) for name in sorted(SAMPLERS) if name != "shuffled batches"),
]


def test_a_wrapper_with_another_setting_or_sampler_is_refused() -> None:
    recorder = Recorder(wrapper(ShuffledBatches()))
    for other in OTHER_WRAPPERS:
        LAWS["not configuration"](recorder, make_other=partial(other, 1, 0), num_epochs=1, stops=[0, 3])
