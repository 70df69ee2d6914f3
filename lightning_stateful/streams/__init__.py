"""Sources without random access: shards, and the torchdata nodes that read them."""

from lightning_stateful.streams.chunks import ChunkedDataset
from lightning_stateful.streams.document_packer import DocumentPacker
from lightning_stateful.streams.indexed import IndexedStream
from lightning_stateful.streams.mixed_stream import MixedStream
from lightning_stateful.streams.nodes import Shards
from lightning_stateful.streams.stream import Stream, as_stream

__all__ = ["ChunkedDataset", "DocumentPacker", "IndexedStream", "MixedStream", "Shards", "Stream", "as_stream"]
