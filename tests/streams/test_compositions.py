"""Nodes of streams and torchdata's nodes go on where they stood over each other, with real threads and processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torchdata.nodes
from support.node_cases import NumberedShards, assert_resumes, is_kept, mixed, scan, started
from support.packing_cases import plain
from torchdata.nodes import (
    BaseNode,
    Batcher,
    Loader,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    StopCriteria,
)

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.packing import Packing
from lightning_stateful.stream_nodes.nodes import close
from lightning_stateful.stream_nodes.read_ahead import BlockShuffle, LengthBatcher
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.stream_nodes.transforms import FilterNode, MapNode, RunningStateNode, WindowNode
from lightning_stateful.streams import DocumentPacker

Over = Callable[[BaseNode[Any]], BaseNode[Any]]


def length_of(sample: Any) -> int:
    return 1 + mixed(sample) % 5


def reader(**options: Any) -> ShardReader:
    return ShardReader(NumberedShards([9, 0, 17, 4], **options), (2, 0, 1, 3), 0, seed=1)


def two_samplers(source: BaseNode[Any]) -> BaseNode[Any]:
    other = BlockShuffle(reader(), 5, seed=2)
    weights = {"one": 2.0, "other": 1.0}
    return MultiNodeWeightedSampler(
        {"one": source, "other": other}, weights, StopCriteria.ALL_DATASETS_EXHAUSTED, 0, 1, 7
    )


def unbatched(source: BaseNode[Any]) -> BaseNode[Any]:
    if not hasattr(torchdata.nodes, "Unbatcher"):
        pytest.skip("torchdata has an Unbatcher since 0.11")
    return torchdata.nodes.Unbatcher(Batcher(source, 4, drop_last=False))


def packed(source: BaseNode[Any]) -> BaseNode[Any]:
    documents = MapNode(source, lambda sample: [mixed(sample)] * length_of(sample))
    return MapNode(DocumentPacker(documents, Packing(6, how="whole", open_sequences=2)), plain)


OURS: dict[str, Over] = {
    "shuffle": partial(BlockShuffle, size=6, seed=3),
    "map": partial(MapNode, function=mixed),
    "filter": partial(FilterNode, function=is_kept),
    "window": partial(WindowNode, width=3, step=2),
    "running state": partial(RunningStateNode, function=scan, initial=0),
    "packed": packed,
    "length batches": partial(LengthBatcher, window=7, budget=Budget(max_tokens=12), length=length_of),
}
THEIRS: dict[str, Over] = {
    "Batcher": lambda source: Batcher(source, 4, drop_last=False),
    "Unbatcher": unbatched,
    "Mapper": lambda source: Mapper(source, mixed),
    "sampler": two_samplers,
}
PARALLEL: dict[str, Over] = {
    "threads": lambda source: ParallelMapper(source, mixed, num_workers=2, method="thread"),
    "processes": lambda source: ParallelMapper(source, mixed, 1, method="process", multiprocessing_context="fork"),
    "Prefetcher": lambda source: Prefetcher(source, 3, snapshot_frequency=2),
}


def assert_resumes_at(make: Callable[[], BaseNode[Any]], stops: list[int]) -> list[Any]:
    """A fresh node goes on from a state as JSON at some items."""
    whole = list(make())
    for stop in stops:
        node = started(make())
        for number in range(stop):
            assert next(node) == whole[number]
        state = json.dumps(node.state_dict())
        assert list(started(make(), json.loads(state))) == whole[stop:]
    return whole


# Each of ours with two of theirs.
PAIRS = [(ours, list(THEIRS)[(number + more) % 4]) for number, ours in enumerate(OURS) for more in range(2)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_nodes_over_each_other_resume_at_every_item(ours: str, theirs: str) -> None:
    # At a reset, their sampler draws anew.
    repeats = theirs != "sampler"
    assert_resumes(lambda: THEIRS[theirs](OURS[ours](reader())), repeats=repeats)
    assert_resumes(lambda: OURS[ours](THEIRS[theirs](reader())), repeats=repeats)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("ours", ["shuffle", "length batches"])
def test_threads_and_processes_over_and_under_ours_resume(ours: str, parallel: str) -> None:
    function = (lambda value: value) if parallel == "Prefetcher" else mixed
    over = assert_resumes_at(lambda: PARALLEL[parallel](OURS[ours](reader())), [1, 7])
    assert over == [function(item) for item in OURS[ours](reader())]
    under = assert_resumes_at(lambda: OURS[ours](PARALLEL[parallel](reader())), [0, 8])
    assert under == list(OURS[ours](MapNode(reader(), function)))


@pytest.mark.parametrize("stop", [0, 3])
def test_a_loader_over_a_whole_pipeline_resumes_and_begins_again(stop: int) -> None:
    def make() -> Loader[Any]:
        shuffled = BlockShuffle(reader(state_size=0), 6, seed=3)
        return Loader(Prefetcher(Batcher(ParallelMapper(shuffled, mixed, 2), 4, drop_last=False), 2))

    whole = list(make())
    loader = make()
    batches = iter(loader)
    assert [next(batches) for _ in range(stop)] == whole[:stop]
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(resumed) == whole[stop:]
    assert list(resumed) == whole


def test_closing_goes_through_torchdata_s_nodes() -> None:
    class Closing(ShardReader):
        is_closed = False

        def close(self) -> None:
            super().close()
            self.is_closed = True

    ends = [Closing(NumberedShards([3]), (0,), 0) for _ in range(2)]
    sampler = MultiNodeWeightedSampler(dict(zip("ab", ends, strict=True)), {"a": 1.0, "b": 1.0})
    close(WindowNode(Batcher(sampler, 2), 2))
    assert all(end.is_closed for end in ends)
