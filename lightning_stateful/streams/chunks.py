"""Chunks of samples behind references: files, keys, queries."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.streams.shards import ShardIterator, Shards


class Chunks(Shards):
    """Chunks as shards; a place in one is reached by reading it again up to there.

    Args:
        refs: What stands for each chunk: a path, or anything that can be pickled.
        read_chunk: Opens a chunk: gives its samples, one after the other or all at once.
        chunk_sizes: Samples of each chunk, if they are known.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        read_chunk: Callable[[Any], Iterable[Any]],
        chunk_sizes: Sequence[int] | None = None,
    ) -> None:
        self._refs, self._read_chunk = list(refs), read_chunk
        self._sizes = None if chunk_sizes is None else [int(size) for size in chunk_sizes]
        if self._sizes is not None and len(self._sizes) != len(self._refs):
            raise ConfigurationError(f"chunk_sizes has {len(self._sizes)} sizes for {len(self._refs)} chunks.")

    @property
    def num_shards(self) -> int:
        """Number of chunks."""
        return len(self._refs)

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        """The samples of a chunk from its beginning: there are no other states."""
        return _ChunkIterator(self._read_chunk(self._refs[shard]))

    def name(self, shard: int) -> str:
        """Number and reference of a chunk."""
        return f"chunk {shard} of {len(self._refs)} ({_said(self._refs[shard])})"

    def describe(self) -> dict[str, Any]:
        """The number of chunks, and a digest of their names."""
        named = "\n".join(_said(ref) for ref in self._refs)
        return {"chunks": len(self._refs), "names": hashlib.blake2b(named.encode(), digest_size=8).hexdigest()}

    def sizes(self) -> list[int] | None:
        """Samples of each chunk, if they were given."""
        return self._sizes


class _ChunkIterator(ShardIterator):
    def __init__(self, samples: Iterable[Any]) -> None:
        self._iterator: Iterator[Any] = iter(samples)

    def __iter__(self) -> Iterator[Any]:
        # Without a call in between where many are taken at once.
        return self._iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


def _said(ref: Any) -> str:
    """A reference in words that are the same in another folder or process."""
    if isinstance(ref, (str, os.PathLike)):
        return PurePath(ref).name or str(ref)
    return str(ref) if isinstance(ref, (int, float, tuple)) else type(ref).__qualname__
