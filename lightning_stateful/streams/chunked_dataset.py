"""A stream of chunks, opened by a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.streams.chunks import Chunks
from lightning_stateful.streams.lane import ALONE
from lightning_stateful.streams.reading import OnError
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.steps import Mapped
from lightning_stateful.streams.stream import Stream


class ChunkedDataset(Stream):
    """Samples in chunks, such as compressed files, of which each is opened by a function.

    Args:
        chunk_refs: What stands for each chunk: a path, or anything that can be pickled. All ranks pass the same list. A
            resume asks for the same chunks: the same paths below the folder common to all, or the same values; of
            objects that are neither numbers, strings, bytes nor containers of these only the classes are compared.
        read_chunk_fn: Opens a chunk: ``read_chunk_fn(ref)`` gives its samples, one after the other or all at once. What
            it draws at random as it is opened follows from (seed, epoch, chunk).
        shuffle: Read the chunks of each epoch in an order of its own, and shuffle samples in blocks.
        buffer_size: Samples of a block, which are held in memory; 1 to leave samples in the order of their chunks.
        seed: Chooses the orders and the randomness; by default the seed of Lightning's ``seed_everything``, or 0.
        transform: A function of a sample, applied after shuffling, under a seed of (seed, epoch, chunk, sample).
        on_error: ``"skip"`` to leave out the rest of a chunk that cannot be read, and count it.
        chunk_sizes: Samples of each chunk, if they are known.

    State:
        See :class:`Stream`.

    Raises:
        ConfigurationError: There are no chunks, or an argument is out of range.

    Source:
        ``chunked_dataset_iterator`` of infinibatch gave the idea of chunks and blocks.
    """

    def __init__(
        self,
        chunk_refs: Iterable[Any],
        read_chunk_fn: Callable[[Any], Iterable[Any]],
        shuffle: bool = True,
        buffer_size: int = 1024,
        seed: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        chunk_sizes: Sequence[int] | None = None,
    ) -> None:
        if isinstance(chunk_refs, (str, bytes, os.PathLike)) or not isinstance(chunk_refs, Iterable):
            raise ConfigurationError(
                f"chunk_refs is a list with what stands for each chunk, got {chunk_refs!r}. Pass "
                "sorted(glob.glob(pattern)) for the files of a pattern, or [path] for a single one."
            )
        refs = list(chunk_refs)
        if not refs:
            raise ConfigurationError("ChunkedDataset was given no chunks. Look at the pattern that should find them.")
        source = Source(
            shards=Chunks(refs, read_chunk_fn, chunk_sizes),
            shuffle=shuffle,
            buffer_size=buffer_size if shuffle else 0,
            seed=seed,
            on_error=on_error,
            steps=() if transform is None else (Mapped(transform),),
        )
        super().__init__({ALONE: source})
