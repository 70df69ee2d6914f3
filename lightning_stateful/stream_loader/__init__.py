"""Loaders over streams, and how the ranks that read one stay in step."""

from lightning_stateful.stream_loader.loader import IterableLoader, StreamLoader
from lightning_stateful.stream_loader.options import StreamOptions
from lightning_stateful.stream_loader.rank_sync import RankSync

__all__ = ["IterableLoader", "RankSync", "StreamLoader", "StreamOptions"]
