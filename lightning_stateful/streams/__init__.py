"""Sources without random access: streams of shards, as people hold them, and the nodes that they are made of."""

from lightning_stateful.stream_nodes.document_packer import DocumentPacker
from lightning_stateful.stream_nodes.node_shards import NodeShards
from lightning_stateful.stream_nodes.nodes import Shards, StreamNode
from lightning_stateful.stream_nodes.read_ahead import BlockShuffle, LengthBatcher
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.stream_nodes.transforms import FilterNode, MapNode, RunningStateNode, WindowNode
from lightning_stateful.streams.chunks import ChunkedDataset, Chunks
from lightning_stateful.streams.indexed import IndexedStream
from lightning_stateful.streams.mixed_stream import MixedStream
from lightning_stateful.streams.stream import Stream, as_stream

__all__ = [
    "BlockShuffle",
    "ChunkedDataset",
    "Chunks",
    "DocumentPacker",
    "FilterNode",
    "IndexedStream",
    "LengthBatcher",
    "MapNode",
    "MixedStream",
    "NodeShards",
    "RunningStateNode",
    "ShardReader",
    "Shards",
    "Stream",
    "StreamNode",
    "WindowNode",
    "as_stream",
]
