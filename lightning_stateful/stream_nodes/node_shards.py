"""Graphs of torchdata nodes as the shards of a stream."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torchdata.nodes
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
    Stateful,
)

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, StateError
from lightning_stateful.sampler_copies.sampler_copy import SamplerCopy
from lightning_stateful.sampler_copies.sampler_ranks import settings_of_one_rank, tell
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.stream_nodes import nodes
from lightning_stateful.stream_nodes.hugging_face import is_hugging_face
from lightning_stateful.stream_nodes.nodes import NodeState, Shards, StreamNode, sources_of

# torchdata 0.10 has none.
_Unbatcher: Any = getattr(torchdata.nodes, "Unbatcher", Batcher)
# What comes in the same order however often it is begun.
_ALWAYS_ALIKE = (list, tuple, range, SequentialSampler)
_END_OF_SEEDS = 2**31  # Of a MultiNodeWeightedSampler, which adds to its own.
# Samplers that draw from the generator of the process if they have none.
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_REREAD = (
    "a MultiNodeWeightedSampler begins it again within a pass, which changes its order, and the states of "
    "torchdata.nodes do not say how often"
)


class NodeShards(Shards):
    """A graph of torchdata nodes as a single shard, or a function that makes the graph of each shard.

    All ranks and workers read the same shards, each its part: samplers in a graph are told that there is one rank. Each
    pass reads a fresh copy of the graph, in which samplers and iterables with ``set_epoch`` are told the epoch, and
    torch's samplers and ``MultiNodeWeightedSampler`` draw anew. Anything else begins each pass as the first, also what
    counts its passes itself, unless ``make_node`` is told the epoch. Functions are shared among copies. What they draw
    at random in threads and processes of the graph is not seeded. A dataset in a graph must not divide itself among
    ranks; worker processes of a stream loader tell it that it has a single worker.

    Args:
        make_node: The graph, that nobody has read yet; or ``make_node(shard)``, or ``make_node(shard, epoch=epoch)`` if
            it has an argument of that name. A graph with mappers cannot be pickled, as workers started by ``"spawn"``
            need it: pass a function then.
        num_shards: How many shards the function makes.

    Raises:
        ConfigurationError: Neither a node nor a function, or the function gives no node, or ``num_shards`` is missing,
            below 1, or given with a graph; or a dataset of Hugging Face's in it was split by rank.
    """

    hides_workers = True

    def __init__(self, make_node: BaseNode[Any] | Callable[..., BaseNode[Any]], num_shards: int | None = None) -> None:
        self._make_node: Any = make_node
        self._graph = make_node if isinstance(make_node, BaseNode) else None
        is_function = self._graph is None and callable(make_node)
        if is_function != (num_shards is not None) or (self._graph is None and not is_function):
            raise ConfigurationError(
                "NodeShards takes a torchdata node alone, or a function that makes the node of a shard and num_shards, "
                f"got {make_node!r} and num_shards={num_shards}."
            )
        self._num_shards = as_int("num_shards", 1 if num_shards is None else num_shards)
        if self._num_shards < 1:
            raise ConfigurationError(f"num_shards must be at least 1, got {num_shards}.")
        self._takes_epoch = not isinstance(make_node, BaseNode) and "epoch" in inspect.signature(make_node).parameters
        example = self._made(0, 0) if self._graph is None else self._graph
        _refuse_split_datasets(example)
        self._classes = _classes_of(example)
        # Seeds reach what is called where the graph is read, not its threads and processes.
        self.draws: bool = _is_called_here(example)
        if any(map(_changes_when_begun_again, _nodes_of(example))):
            self.reread = _REREAD
        mappers = [node for node in _nodes_of(example) if isinstance(node, ParallelMapper)]
        if any(mapper.num_workers and not mapper.in_order for mapper in mappers):
            self.warning = (
                "ParallelMapper(in_order=False) gives samples in another order each time, and its states do not say "
                "which: a resume is not exact. Leave out in_order=False."
            )

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return self._num_shards

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        """The graph of a shard."""
        return GraphNode(partial(self._begun, shard, epoch), has_state=not self.reread)

    def name(self, shard: int) -> str:
        """The classes of the graph, or the function and the shard."""
        return self._classes if self._graph is not None else f"shard {shard} of {self._function()}"

    def describe(self) -> dict[str, Any]:
        """The number of shards, the classes of the nodes, and the function."""
        described = {"shards": self._num_shards, "nodes": self._classes}
        return described if self._graph is not None else {**described, "function": self._function()}

    def _function(self) -> str:
        return str(getattr(self._make_node, "__qualname__", type(self._make_node).__qualname__))

    def _made(self, shard: int, epoch: int) -> BaseNode[Any]:
        if self._graph is not None:
            return _copy_of(self._graph)
        graph = self._make_node(shard, epoch=epoch) if self._takes_epoch else self._make_node(shard)
        if isinstance(graph, BaseNode):
            return graph
        raise ConfigurationError(
            f"{self._function()} gave a {type(graph).__qualname__} for shard {shard}. Let it return a "
            "torchdata.nodes.BaseNode."
        )

    def _begun(self, shard: int, epoch: int) -> BaseNode[Any]:
        """A fresh graph for an epoch."""
        graph = self._made(shard, epoch)
        _refuse_to_divide(graph)
        for node in _nodes_of(graph):
            if isinstance(node, MultiNodeWeightedSampler):
                # All ranks read the same shard, and each keeps its part of it.
                node.rank, node.world_size = 0, 1
            if isinstance(node, SamplerWrapper):
                node.sampler = _copy_of_sampler(node.sampler, 0 if self._takes_epoch else epoch)
            if epoch and not self._takes_epoch:
                _tell_epoch(node, epoch)
        return graph


class GraphNode(StreamNode[Any]):
    """A pass over a graph of nodes that is made for it.

    Args:
        make_graph: Makes the graph, at the beginning of the pass.
        has_state: Whether its state leads to where it was taken.

    State:
        ``graph``: the state of the graph as plain data. None without ``has_state``.
    """

    def __init__(self, make_graph: Callable[[], BaseNode[Any]], *, has_state: bool = True) -> None:
        super().__init__()
        self._make_graph, self._has_state = make_graph, has_state
        self._graph: Any = None

    def held_objects(self) -> Any:
        """The graph."""
        return self._graph

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin the pass, or go to where a state was taken."""
        super().reset(initial_state)
        self.close()
        self._graph = self._make_graph()
        if initial_state is None:
            self._graph.reset()
            return
        try:
            self._graph.reset(from_plain(initial_state["graph"]))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise StateError(
                f"The nodes {_classes_of(self._graph)} cannot go on from their state: {type(error).__name__}: "
                f"{error}. Build the same nodes over the same data as when it was saved, or resume from another "
                "checkpoint."
            ) from error

    def __iter__(self) -> Iterator[Any]:
        return self if self._graph is None else iter(self._graph)

    def skip(self, number: int) -> int:
        """Leave out items, up to ``number``; returns how many there were."""
        return nodes.skip(self._graph, number)

    def get_state(self) -> Any:
        """The state of the graph."""
        return {"graph": to_plain(self._graph.state_dict(), owner="graph")} if self._has_state else None

    def close(self) -> None:
        """Close the graph, and let go of its threads and processes."""
        graph, self._graph = self._graph, None
        if graph is not None:
            nodes.close(graph)


def draws_orders(graph: Any) -> bool:
    """Whether it is a graph with a sampler that draws its order from a generator, which torchdata's states lack.

    One without a generator of its own draws as a pass begins, from the process's generators, which are seeded for that;
    several may begin anew within a pass.
    """
    found = list(_nodes_of(graph)) if isinstance(graph, BaseNode) else []
    samplers = [node.sampler for node in found if isinstance(node, SamplerWrapper)]
    drawing = [sampler for sampler in samplers if isinstance(sampler, _DRAWING)]
    return any(len(samplers) > 1 or sampler.generator is not None for sampler in drawing)


def _nodes_of(graph: BaseNode[Any]) -> Iterator[Any]:
    yield graph
    for source in sources_of(graph):
        yield from _nodes_of(source)


def _classes_of(graph: BaseNode[Any]) -> str:
    """The classes of a graph, such as ``Batcher(ParallelMapper(SamplerWrapper))``."""
    sources = ", ".join(map(_classes_of, sources_of(graph)))
    return f"{type(graph).__qualname__}({sources})" if sources else type(graph).__qualname__


def _is_called_here(graph: Any) -> bool:
    """Whether reading a graph calls functions and datasets in the thread that reads."""
    if isinstance(graph, (Prefetcher, PinMemory)) or (isinstance(graph, ParallelMapper) and graph.num_workers > 0):
        return False
    return not isinstance(graph, (Batcher, _Unbatcher)) or any(map(_is_called_here, sources_of(graph)))


def _copy_of(graph: BaseNode[Any]) -> BaseNode[Any]:
    # Functions work on datasets, which are not copied; mappers hold a module; samplers are copied on their own.
    shared = [torch.multiprocessing]
    for node in _nodes_of(graph):
        shared += [getattr(node, name) for name in ("map_fn", "sampler") if hasattr(node, name)]
    try:
        return copy.deepcopy(graph, {id(held): held for held in shared})
    except Exception as error:
        raise ConfigurationError(
            f"The nodes {_classes_of(graph)} cannot be copied for a pass ({type(error).__name__}: {error}). Pass nodes "
            "that nobody has read yet and that hold no iterator or open file; or a function that makes them."
        ) from error


def _copy_of_sampler(sampler: Any, epoch: int) -> Any:
    """A copy of a sampler for one rank and an epoch, with a generator of its own: threads share the process's."""
    copied = inner = SamplerCopy(sampler).sampler
    tell(settings_of_one_rank(copied, by_dataset=isinstance(copied, DistributedSampler)))
    while inner is not None:
        if isinstance(inner, _DRAWING) and inner.generator is None:
            inner.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        elif isinstance(inner, _DRAWING) and epoch:
            inner.generator.manual_seed(derive_seed("sampler", inner.generator.initial_seed(), epoch))
        inner = getattr(inner, "sampler", None)
    return copied


def _tell_epoch(node: BaseNode[Any], epoch: int) -> None:
    """Have a node begin as it would in an epoch after the first."""
    if isinstance(node, SamplerWrapper):
        for _ in range(epoch):
            node.epoch = node.epoch_updater(node.epoch)
    elif isinstance(node, MultiNodeWeightedSampler):
        node.seed = derive_seed("weighted sampler", node.seed, epoch) % _END_OF_SEEDS
    elif isinstance(node, IterableWrapper) and callable(set_epoch := getattr(node.iterable, "set_epoch", None)):
        set_epoch(epoch)


def _refuse_to_divide(graph: BaseNode[Any]) -> None:
    """Refuse workers in which a dataset of a graph may give each its part of what each would take a part of again.

    Raises:
        ConfigurationError: There are such workers: those of a loader over streams are told that there is one.
    """
    info = get_worker_info()
    datasets = [node.iterable for node in _nodes_of(graph) if isinstance(node, IterableWrapper)]
    dividing = [type(dataset).__qualname__ for dataset in datasets if isinstance(dataset, IterableDataset)]
    if info is not None and info.num_workers > 1 and dividing:
        raise ConfigurationError(
            f"The {dividing[0]} in a graph of nodes may divide itself among the {info.num_workers} workers of this "
            "DataLoader, and each worker keeps only its part of the graph's samples: the others would be lost. Pass "
            "num_workers=0, or let patch_dataloader or StreamDataModule make the loader."
        )


def _refuse_split_datasets(graph: BaseNode[Any]) -> None:
    for node in _nodes_of(graph):
        dataset = getattr(node, "iterable", None)
        part = getattr(dataset, "_distributed", None) if is_hugging_face(dataset) else None
        if part is not None:
            raise ConfigurationError(
                f"The dataset in {_classes_of(graph)} is the part of rank {part.rank} of {part.world_size}. All ranks "
                "read the same graph here, and each keeps its part, so samples would be lost: leave out "
                "split_dataset_by_node."
            )


def _changes_when_begun_again(node: Any) -> bool:
    """Whether a node begins others again within a pass, and these come in another order then."""
    if not isinstance(node, MultiNodeWeightedSampler) or not node.stop_criteria.startswith("CYCLE"):
        return False
    samplers = [inner.sampler for inner in _nodes_of(node) if isinstance(inner, SamplerWrapper)]
    iterables = [inner.iterable for inner in _nodes_of(node) if isinstance(inner, IterableWrapper)]
    unknown = [sampler for sampler in samplers if not hasattr(sampler, "set_epoch")] + iterables
    return not all(isinstance(begun, (Stateful, *_ALWAYS_ALIKE)) for begun in unknown)
