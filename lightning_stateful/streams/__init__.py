"""Floor 1: sources without random access: shards read in turn, shuffled in blocks, mixed, and cut into batches."""

from lightning_stateful.streams.chunked_dataset import ChunkedDataset
from lightning_stateful.streams.exchange import Exchange
from lightning_stateful.streams.mixed_stream import MixedStream
from lightning_stateful.streams.shards import ShardIterator, Shards
from lightning_stateful.streams.stream import Stream, as_stream

__all__ = ["ChunkedDataset", "Exchange", "MixedStream", "ShardIterator", "Shards", "Stream", "as_stream"]
