"""Shuffled batches and batches of like lengths, by this package and by others, each from the start or from the middle.

All are built for rank 0 of so many ranks, which no process of another rank needs to be there for.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from infinibatch.iterators import BucketedReadaheadBatchIterator, InfinitePermutationSourceIterator
from lhotse.cut import MonoCut
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_stateful import BucketBatchSampler
from lightning_stateful.core import Progress
from lightning_stateful.loaders import StatefulLoader

BATCH, BUDGET, READ_AHEAD, SHARD, NODE = 32, 16_384, 10_000, 10_000, 8
OURS = "lightning_stateful"


@dataclass(frozen=True)
class Peer:
    """A way to make batches.

    Attributes:
        package: Its name on PyPI.
        batches: An iterator over the batches of rank 0, of data, a number of ranks and a state; without one from the
            start.
        middle: The state in the middle of an epoch, of data and a number of ranks, without iterating there.
        module: What is imported, where that is not the package's name.
        loads: Whether it loads samples, rather than that it computes their indices.
        by_length: Whether its batches hold the lengths of samples, rather than samples.
    """

    package: str
    batches: Callable[[Any, int, Any], Iterator[Any]]
    middle: Callable[[Any, int], Any]
    module: str = ""
    loads: bool = True
    by_length: bool = False

    @property
    def missing(self) -> bool:
        """Whether it is not installed here."""
        return importlib.util.find_spec(self.module or self.package) is None

    @property
    def version(self) -> str:
        """Its version, as installed."""
        return version(self.package.replace("_", "-"))


def _steps(data: Any, ranks: int) -> int:
    """Batches that each rank has had in the middle of an epoch."""
    return len(data) // (2 * BATCH * ranks)


# Shuffled samples


def _ours(data: range, ranks: int, state: Any) -> Iterator[Any]:
    loader = StatefulLoader(data, batch_size=BATCH, shuffle=True, seed=1, num_replicas=ranks, rank=0)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader)


def _ours_middle(data: range, ranks: int) -> Any:
    loader = StatefulLoader(data, batch_size=BATCH, shuffle=True, seed=1, num_replicas=ranks, rank=0)
    return loader.tracker.state_dict(Progress(consumed=_steps(data, ranks) * BATCH * ranks))


def _sampler(data: range, ranks: int) -> Sampler[int]:
    if ranks > 1:
        return DistributedSampler(data, num_replicas=ranks, rank=0, seed=1)
    return RandomSampler(data, generator=torch.Generator().manual_seed(1))


class _Later(Sampler[list[int]]):
    """The batches of a sampler, without the first ones."""

    def __init__(self, batches: BatchSampler, skipped: int) -> None:
        self.batches, self.skipped = batches, skipped

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.batches, self.skipped, None)


def _torch(data: range, ranks: int, state: int | None) -> Iterator[Any]:
    batches = BatchSampler(_sampler(data, ranks), BATCH, drop_last=False)
    return iter(DataLoader(data, batch_sampler=_Later(batches, state or 0)))


def _torchdata_loader(data: range, ranks: int) -> Any:
    if ranks > 1:
        sampler = StatefulDistributedSampler(data, num_replicas=ranks, rank=0, seed=1)
        return StatefulDataLoader(data, batch_size=BATCH, sampler=sampler)
    return StatefulDataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))


def _torchdata(data: range, ranks: int, state: Any) -> Iterator[Any]:
    loader = _torchdata_loader(data, ranks)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader)


def _torchdata_middle(data: range, ranks: int) -> Any:
    # Its state counts batches and samples, and holds nothing else that depends on the number of samples.
    loader = _torchdata_loader(range(8 * BATCH * ranks), ranks)
    next(iter(loader))
    state, steps = loader.state_dict(), _steps(data, ranks)
    state["_sampler_iter_yielded"] = state["_num_yielded"] = steps
    inner = state["_sampler_iter_state"]
    inner["samples_yielded"] = steps * BATCH
    inner["sampler_iter_state" if ranks == 1 else "sampler_state"]["yielded"] = steps * BATCH
    return state


def _accelerate(data: range, ranks: int, state: int | None) -> Iterator[Any]:
    given = importlib.import_module("accelerate.data_loader")
    sampler = given.SeedableRandomSampler(data, data_seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    options: dict[str, Any] = {"put_on_device": False, "rng_types": []}
    loader = given.prepare_data_loader(loader, num_processes=ranks, process_index=0, **options)
    return iter(given.skip_first_batches(loader, state) if state else loader)


def _grain(data: range, ranks: int, state: Any) -> Iterator[Any]:
    grain = importlib.import_module("grain")
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    samples = grain.MapDataset.source(data).shuffle(seed=1)[0::ranks].to_iter_dataset(options)
    iterator = iter(samples.batch(BATCH))
    if state is not None:
        iterator.set_state(state)
    found: Iterator[Any] = iterator
    return found


def _shards(samples: int) -> list[tuple[int, int]]:
    """Equal shards of so many samples: their first samples and those behind their last."""
    starts = range(0, samples, SHARD)
    return [(start, min(start + SHARD, samples)) for start in starts]


def _litdata(data: range, ranks: int, state: int | None) -> Iterator[Any]:
    shuffle = importlib.import_module("litdata.streaming.shuffle")
    dataset = importlib.import_module("litdata.streaming.dataset")
    env = importlib.import_module("litdata.utilities.env")
    # It asks its cache for the bounds of chunks alone.
    intervals = [(first, first, end, end) for first, end in _shards(len(data))]
    cache = types.SimpleNamespace(
        get_chunk_intervals=lambda: intervals,
        _reader=types.SimpleNamespace(_config=types.SimpleNamespace(_chunks=None), _max_cache_size=0),
    )
    shuffler = shuffle.FullShuffle(cache, seed=1, drop_last=True)
    rank = env._DistributedEnv(ranks, 0, math.ceil(ranks / NODE))
    chunks, bounds = shuffler.get_chunks_and_intervals_per_workers(rank, 1, BATCH, 1)
    skipped = dataset._replay_sampling((state or 0) * BATCH, BATCH, 1)
    begun, skipped = dataset._replay_chunks_sampling({0: bounds[0]}, skipped)
    held: list[int] = []
    for number in range(begun[0], len(chunks[0])):
        _, first, end, _ = bounds[0][number]
        order = shuffler(np.arange(first, end), len(intervals), 1, int(chunks[0][number]))
        held += order[skipped[0] if number == begun[0] else 0 :]
        while len(held) >= BATCH:
            yield held[:BATCH]
            held = held[BATCH:]


def _without_init(name: str) -> None:
    """Make a package's modules importable without its ``__init__``, which imports clients of every cloud."""
    found = importlib.util.find_spec(name)
    if name not in sys.modules and found is not None:
        sys.modules[name] = importlib.util.module_from_spec(found)


def _streaming(data: range, ranks: int, state: int | None) -> Iterator[Any]:
    _without_init("streaming")
    _without_init("streaming.base")
    partition = importlib.import_module("streaming.base.partition")
    shuffle = importlib.import_module("streaming.base.shuffle")
    nodes, seen = math.ceil(ranks / NODE), (state or 0) * BATCH * ranks
    # As in its StreamingDataset: one canonical node a node, and the shuffle that is its default.
    ids = partition.get_partitions("relaxed", len(data), nodes, nodes, min(ranks, NODE), 1, BATCH, seen)
    order = shuffle.get_shuffle("py1e", np.array([end - first for first, end in _shards(len(data))]), nodes, 9176, 0)
    yield from np.where(ids != -1, order[ids], -1)[0, 0, 0]


SHUFFLED: dict[str, Peer] = {
    "torch DataLoader": Peer("torch", _torch, _steps),
    "torchdata StatefulDataLoader": Peer("torchdata", _torchdata, _torchdata_middle),
    "accelerate": Peer("accelerate", _accelerate, _steps),
    "grain": Peer("grain", _grain, lambda data, ranks: {"next_index": _steps(data, ranks) * BATCH}),
    "litdata": Peer("litdata", _litdata, _steps, loads=False),
    "Streaming": Peer("mosaicml-streaming", _streaming, _steps, module="streaming", loads=False),
    "StatefulLoader": Peer(OURS, _ours, _ours_middle),
}


# Batches of like lengths: their data are lengths


def _buckets(lengths: Any, ranks: int) -> BucketBatchSampler:
    return BucketBatchSampler(lengths, max_tokens=BUDGET, num_replicas=ranks, rank=0, seed=1)


def _ours_bucketed(lengths: Any, ranks: int, state: Any) -> Iterator[Any]:
    sampler = _buckets(lengths, ranks)
    if state is not None:
        sampler.load_state_dict(state)
    return iter(sampler)


def _ours_bucketed_middle(lengths: Any, ranks: int) -> Any:
    sampler = _buckets(lengths, ranks)
    plan = sampler.order.plan(0, ranks)
    return sampler.tracker.state_dict(plan.progress_after(plan.num_steps // 2))


@dataclass(frozen=True)
class _Cuts:
    """Cuts whose seconds are the lengths; one cut for each length."""

    lengths: Any

    def __iter__(self) -> Iterator[MonoCut]:
        kinds: dict[int, MonoCut] = {}
        for length in self.lengths:
            if length not in kinds:
                kinds[length] = MonoCut(str(length), start=0, duration=float(length), channel=0)
            yield kinds[length]


def _lhotse(lengths: Any, ranks: int, state: Any) -> Iterator[Any]:
    options: dict[str, Any] = {"num_buckets": 30, "shuffle": True, "world_size": ranks, "rank": 0, "seed": 1}
    sampler = DynamicBucketingSampler(_Cuts(lengths), max_duration=float(BUDGET), **options)
    if state is not None:
        sampler.diagnostics.current_epoch_stats.kept_batches = state
        saved = sampler.state_dict()
        sampler.load_state_dict(saved)
    return ([int(cut.duration) for cut in batch] for batch in sampler)


def _lhotse_middle(lengths: Any, ranks: int) -> int:
    # A batch holds its budget but for about a tenth; each step of all ranks counts once.
    tokens = float(np.mean(lengths[:READ_AHEAD])) * len(lengths)
    return int(0.45 * tokens / BUDGET / ranks)


def _window(lengths: Any, ranks: int) -> int:
    # No more than an epoch: its source would begin anew within a window.
    return min(READ_AHEAD, len(lengths) // ranks)


def _infinibatch(lengths: Any, ranks: int, state: Any) -> Iterator[Any]:
    items = list(range(len(lengths)))
    source = InfinitePermutationSourceIterator(items, seed=1, num_instances=ranks, instance_rank=0)
    iterator = BucketedReadaheadBatchIterator(
        source,
        _window(lengths, ranks),
        key=lengths.item,
        batch_size=lambda longest: BUDGET // lengths.item(longest),
    )
    if state is not None:
        iterator.setstate(state)
    # Its source begins anew behind the epoch.
    left = -(-len(lengths) // ranks)
    for batch in iterator:
        yield batch
        left -= len(batch)
        if left <= 0:
            return


def _infinibatch_middle(lengths: Any, ranks: int) -> Any:
    window = _window(lengths, ranks)
    seen = len(lengths) // ranks // window // 2 * window
    source = {"random_state": random.Random(1).getstate(), "index": seen * ranks}
    return {"source_state": source, "random_state": random.Random(0).getstate(), "num_served": 1}


BUCKETED: dict[str, Peer] = {
    "infinibatch": Peer("infinibatch", _infinibatch, _infinibatch_middle),
    "lhotse": Peer("lhotse", _lhotse, _lhotse_middle, by_length=True),
    "BucketBatchSampler": Peer(OURS, _ours_bucketed, _ours_bucketed_middle),
}
