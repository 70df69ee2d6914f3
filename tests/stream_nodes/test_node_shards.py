"""Graphs of torchdata nodes as shards: every pass is the same in every process, and goes on at every item."""

from __future__ import annotations

import inspect
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchdata.nodes
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
)

from lightning_stateful import MixedStream
from lightning_stateful.errors import ConfigurationError, StateError
from lightning_stateful.generators.rng import seed_randomness
from lightning_stateful.stream_nodes import shard_reader
from lightning_stateful.stream_nodes.node_shards import NodeShards
from lightning_stateful.stream_nodes.shard_reader import ShardReader

LENGTH = 6


def times_ten(number: int) -> int:
    return number * 10


def told(length: int = LENGTH, seed: int = 0) -> SamplerWrapper[int]:
    """Numbers in an order of each epoch's own."""
    return SamplerWrapper(DistributedSampler(range(length), num_replicas=1, rank=0, seed=seed))  # type: ignore[arg-type]


def drawn(length: int = LENGTH) -> SamplerWrapper[int]:
    """Numbers in an order that follows from how often it was begun."""
    return SamplerWrapper(RandomSampler(range(length), generator=torch.Generator().manual_seed(4)))


def mixed(stop: str = "CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED", make: Callable[..., Any] = told) -> BaseNode[int]:
    sources = {"many": make(6), "few": Mapper(make(2), (100).__add__)}
    return MultiNodeWeightedSampler(sources, {"many": 0.7, "few": 0.3}, stop_criteria=stop, rank=0, world_size=1)


class IsTold:
    """An iterable whose order follows from the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(LENGTH), LENGTH)


class KeepsItsPlace:
    """An iterable that goes on where it was left, until it has ended."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        while self.number < LENGTH:
            self.number += 1
            yield self.number - 1
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def unbatched() -> BaseNode[Any]:
    if not hasattr(torchdata.nodes, "Unbatcher"):
        pytest.skip("torchdata has an Unbatcher since 0.11")
    return torchdata.nodes.Unbatcher(Prefetcher(Batcher(ParallelMapper(drawn(), times_ten, 1), 3, False), 2))


# torchdata can do that since 0.11.
PREBATCH: Any = {"prebatch": 3} if "prebatch" in inspect.signature(ParallelMapper).parameters else {}
GRAPHS: dict[str, Callable[[], BaseNode[Any]]] = {
    "sampler": told,
    "generator": drawn,
    "batches": lambda: Batcher(SamplerWrapper(BatchSampler(RandomSampler(range(LENGTH)), 2, False)), 2),
    "iterable": lambda: Mapper(IterableWrapper(IsTold()), times_ten),
    "threads": lambda: ParallelMapper(drawn(), times_ten, num_workers=2, **PREBATCH),
    "snapshots": lambda: Prefetcher(Batcher(told(), 2), 3, snapshot_frequency=2),
    "unbatched": unbatched,
    "mixed": lambda: Prefetcher(mixed(), 2),
    "mixed generators": lambda: mixed(make=drawn),
    "all once": lambda: mixed("ALL_DATASETS_EXHAUSTED", make=drawn),
    "first": lambda: Batcher(mixed("FIRST_DATASET_EXHAUSTED"), 2),
}


def reads(graph: Any, epoch: int, state: Any = None, **options: Any) -> ShardReader:
    """A reader of the shards in a process that has read nothing yet."""
    shards = NodeShards(graph, **options)
    reader = ShardReader(shards, range(shards.num_shards), epoch, seed=3)
    reader.reset(json.loads(json.dumps(state)))
    return reader


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_graph_goes_on_at_every_item_of_every_epoch(name: str, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_reader, "_LEAST_GAP", 1)
    monkeypatch.setattr(shard_reader, "_CHARACTERS_A_SAMPLE", 10**6)
    monkeypatch.setattr(shard_reader, "_RUN", 2)
    reader = reads(GRAPHS[name](), epoch)
    states, items = [reader.get_state()], []
    for item in reader:
        items.append(item)
        states.append(reader.get_state())
    assert len(items) >= LENGTH // 4
    for number, state in enumerate(states):
        seed_randomness(number)
        assert list(reads(GRAPHS[name](), epoch, state)) == items[number:]
    assert items != list(reads(GRAPHS[name](), epoch + 1))


@pytest.mark.parametrize("is_mixed", [False, True])
def test_an_iterable_that_keeps_its_place_is_read_whole_in_every_epoch(is_mixed: bool) -> None:
    def graph() -> BaseNode[int]:
        place = IterableWrapper(KeepsItsPlace())
        return (
            mixed("ALL_DATASETS_EXHAUSTED", make=lambda length: IterableWrapper(KeepsItsPlace())) if is_mixed else place
        )

    whole = sorted([*range(LENGTH), *range(100, 100 + LENGTH)] if is_mixed else range(LENGTH))
    for epoch in range(3):
        reader = reads(graph(), epoch)
        begun, state = reader.next_many(4), reader.get_state()
        assert sorted([*begun, *reads(graph(), epoch, state)]) == whole


def test_a_graph_in_processes_goes_on() -> None:
    def graph() -> BaseNode[int]:
        return ParallelMapper(drawn(), times_ten, num_workers=2, method="process", multiprocessing_context="fork")

    node = NodeShards(graph()).node(0, 1)
    node.reset()
    begun = [next(node) for _ in range(3)]
    state = node.state_dict()
    again = NodeShards(graph()).node(0, 1)
    again.reset(json.loads(json.dumps(state)))
    assert sorted([*begun, *again]) == [10 * number for number in range(LENGTH)]
    assert list(node) == list(NodeShards(Mapper(drawn(), times_ten)).node(0, 1))[3:]


def test_each_source_of_a_weighted_sampler_has_an_order_of_each_epochs_own() -> None:
    def graph() -> BaseNode[int]:
        sources = {"often": told(LENGTH), "seldom": Mapper(told(LENGTH), (100).__add__)}
        return MultiNodeWeightedSampler(
            sources, {"often": 0.999, "seldom": 0.001}, "ALL_DATASETS_EXHAUSTED", rank=0, world_size=1
        )

    for first in (0, 100):
        orders = [
            tuple(number for number in reads(graph(), epoch) if first <= number < first + 100) for epoch in range(4)
        ]
        assert len(set(orders)) == 4


class TestFunctions:
    def test_each_shard_is_a_graph_of_its_own(self) -> None:
        def make(shard: int) -> BaseNode[int]:
            return Mapper(told(3 + shard), (100 * shard).__add__)

        shards = NodeShards(make, 3)
        assert sorted(ShardReader(shards, [2, 0], 0)) == [0, 1, 2, 200, 201, 202, 203, 204]
        assert shards.name(2).startswith("shard 2 of TestFunctions.")
        assert sorted(reads(make, 1, num_shards=2)) == [0, 1, 2, 100, 101, 102, 103]
        assert list(reads(make, 1, num_shards=1)) != list(reads(make, 0, num_shards=1))

    def test_a_function_that_takes_the_epoch_is_told_it(self) -> None:
        assert list(reads(lambda shard, epoch: IterableWrapper(range(epoch, epoch + 2)), 5, num_shards=1)) == [5, 6]


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"gave a range for shard 0"):
        NodeShards(lambda shard: range(shard), 2)  # type: ignore[arg-type, return-value]  # gives no node
    with pytest.raises(ConfigurationError, match="torchdata node alone"):
        NodeShards(told(), 2)
    with pytest.raises(ConfigurationError, match="num_shards=None"):
        NodeShards(lambda shard: told())
    with pytest.raises(ConfigurationError, match="got 3"):
        NodeShards(3, 1)  # type: ignore[arg-type]  # neither
    with pytest.raises(ConfigurationError, match="at least 1, got 0"):
        NodeShards(lambda shard: told(), 0)


def test_all_ranks_read_the_same_graph() -> None:
    def graph(rank: int) -> BaseNode[int]:
        shares = [SamplerWrapper(DistributedSampler(range(LENGTH), 2, rank)) for _ in range(2)]  # type: ignore[arg-type]
        weights = {"one": 0.5, "other": 0.5}
        sources = dict(zip(weights, shares, strict=True))
        return MultiNodeWeightedSampler(sources, weights, "ALL_DATASETS_EXHAUSTED", rank=rank, world_size=2)

    samples = [list(reads(graph(rank), 1)) for rank in range(2)]
    assert samples[0] == samples[1]
    assert sorted(samples[0]) == sorted([*range(LENGTH)] * 2)


def test_a_graph_is_known_by_its_classes_and_a_function_by_its_name_too() -> None:
    shards = NodeShards(Batcher(mixed(), 2))
    assert shards.describe() == {
        "shards": 1,
        "nodes": "Batcher(MultiNodeWeightedSampler(SamplerWrapper, ParallelMapper(SamplerWrapper)))",
    }
    assert shards.name(0) == shards.describe()["nodes"]
    assert NodeShards(make_told, 4).describe() == {
        "shards": 4, "nodes": "SamplerWrapper", "function": "make_told",
    }  # fmt: skip


def make_told(shard: int) -> BaseNode[int]:
    return told(seed=shard)


def test_a_dataset_that_was_split_by_rank_is_refused() -> None:
    rows = Dataset.from_dict({"number": list(range(LENGTH))}).to_iterable_dataset(num_shards=2)
    graph = Prefetcher(IterableWrapper(split_dataset_by_node(rows, 0, 2)), 2)
    for make, options in ((graph, {}), (lambda shard: graph, {"num_shards": 2})):
        with pytest.raises(ConfigurationError, match=r"rank 0 of 2.*leave out split_dataset_by_node"):
            NodeShards(make, **options)  # type: ignore[arg-type]  # one of several kinds


def test_a_dataset_that_would_divide_itself_among_workers_is_refused_in_a_plain_loader() -> None:
    rows = Dataset.from_dict({"number": list(range(LENGTH))}).to_iterable_dataset(num_shards=2)
    stream = MixedStream([IterableWrapper(rows)])
    assert len(list(DataLoader(stream, batch_size=None))) == LENGTH
    with pytest.raises(ConfigurationError, match=r"divide itself among the 2 workers.*num_workers=0"):
        list(DataLoader(stream, batch_size=None, num_workers=2))


def test_what_cannot_be_copied_for_each_pass_is_refused() -> None:
    graph = Prefetcher(IterableWrapper(number for number in range(3)), 2)
    with pytest.raises(
        ConfigurationError, match=r"Prefetcher\(IterableWrapper\) cannot be copied .*generator.*function"
    ):
        list(reads(graph, 0))


def test_datasets_are_not_copied() -> None:
    class Dataset:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> int:
            return number

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("it is large")

    dataset = Dataset()
    graph = Mapper(SamplerWrapper(SequentialSampler(dataset)), dataset.__getitem__)  # type: ignore[arg-type]  # sized
    assert list(reads(graph, 1)) == [0, 1, 2]


def test_a_state_of_other_nodes_is_refused() -> None:
    node = NodeShards(told()).node(0, 0)
    node.reset()
    for other in (Batcher(told(), 2), mixed(), told(2)):
        state = {"graph": {**node.state_dict()["graph"], "_num_yielded": 5}}
        with pytest.raises(StateError, match=r"cannot go on from their state: (KeyError|ValueError).*same nodes"):
            NodeShards(other).node(0, 0).reset(state)


def test_what_is_begun_again_in_another_order_is_read_again_and_said() -> None:
    assert NodeShards(mixed(make=drawn)).reread
    node = NodeShards(mixed(make=drawn)).node(0, 0)
    assert node.state_dict() is None
    for graph in (mixed(), mixed("ALL_DATASETS_EXHAUSTED", make=drawn), drawn()):
        assert not NodeShards(graph).reread


def test_samples_are_seeded_where_functions_are_called_by_whoever_reads() -> None:
    assert [NodeShards(GRAPHS[name]()).draws for name in ("sampler", "batches", "iterable", "mixed generators")] == [
        True, True, True, True,
    ]  # fmt: skip
    assert not any(NodeShards(GRAPHS[name]()).draws for name in ("threads", "snapshots", "unbatched"))
    drawing = Mapper(told(), lambda number: (number, random.random(), float(torch.rand(()))))
    reader = reads(drawing, 1)
    begun, state = reader.next_many(3), reader.get_state()
    random.seed(5)
    assert [*begun, *reads(drawing, 1, state)] == list(reads(drawing, 1))


def test_samples_that_come_as_they_are_ready_are_warned_of() -> None:
    assert "in_order=False" in NodeShards(ParallelMapper(told(), abs, 2, in_order=False)).warning
    assert not NodeShards(ParallelMapper(told(), abs, 0, in_order=False)).warning
    assert not NodeShards(GRAPHS["threads"]()).warning


def test_threads_end_where_a_pass_is_left() -> None:
    before = threading.active_count()
    node = NodeShards(Prefetcher(GRAPHS["threads"](), 2)).node(0, 0)
    node.reset()
    next(node)
    assert threading.active_count() > before
    node.close()
    assert threading.active_count() == before
