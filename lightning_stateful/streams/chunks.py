"""Streams of chunks, such as files, each of which is opened by a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import takewhile
from pathlib import PurePath
from types import GeneratorType
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.nodes import BaseNode

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.stream_nodes.nodes import NodeState, Shards, StreamNode
from lightning_stateful.stream_nodes.shard_reader import OnError
from lightning_stateful.stream_nodes.transforms import MapNode, name_of
from lightning_stateful.streams.source import Source, Transform
from lightning_stateful.streams.stream import Stream
from lightning_stateful.streams.worker_slot import ALONE

# Of a name in an error; what stands for a chunk may be all its samples.
_MOST_CHARACTERS = 80


class Chunks(Shards):
    """Chunks as shards; a resume reads a chunk again up to where it stood.

    A chunk is known by the value of its reference: by numbers, strings, bytes, and containers of these, and by paths
    below the longest folder that is common to all. Of any other object only its class counts.

    Args:
        refs: What stands for each chunk: a path, or anything that can be pickled.
        read_chunk: Opens a chunk: gives its samples, one after the other or all at once.
        chunk_sizes: Samples of each chunk, if they are known.

    Raises:
        ConfigurationError: ``read_chunk`` is no function, or the sizes are none of these chunks.
    """

    draws = True

    def __init__(
        self,
        refs: Sequence[Any],
        read_chunk: Callable[[Any], Iterable[Any]],
        chunk_sizes: Sequence[int] | None = None,
    ) -> None:
        if not callable(read_chunk):
            raise ConfigurationError(f"read_chunk_fn must be a function, got {read_chunk!r}.")
        self._refs, self._read_chunk = list(refs), read_chunk
        self._sizes = None if chunk_sizes is None else _checked(chunk_sizes, len(self._refs))
        self._depth = _common_depth(self._refs)

    @property
    def num_shards(self) -> int:
        """Number of chunks."""
        return len(self._refs)

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        """The samples of a chunk."""
        return ChunkNode(self._read_chunk, self._refs[shard])

    def name(self, shard: int) -> str:
        """Number and reference of a chunk."""
        name = _name_of(self._refs[shard], self._depth)
        more = "..." if len(name) > _MOST_CHARACTERS else ""
        return f"chunk {shard} of {len(self._refs)} ({name[:_MOST_CHARACTERS]}{more})"

    def describe(self) -> dict[str, Any]:
        """The number of chunks, and a digest of their names; of a ``functools.partial`` also what it is given."""
        function = {"function": name_of(self._read_chunk)} if isinstance(self._read_chunk, partial) else {}
        return {"chunks": len(self._refs), "names": self._digest, **function}

    def sizes(self) -> list[int] | None:
        """Samples of each chunk, if they were given."""
        return self._sizes

    @cached_property
    def _digest(self) -> str:
        # A name may hold what is no text.
        return hex_digest(*(f"{_name_of(ref, self._depth)}\n".encode(errors="surrogatepass") for ref in self._refs))


class ChunkNode(StreamNode[Any]):
    """The samples that ``read_chunk(ref)`` gives; it has no state: only reading again leads to a sample.

    Attributes:
        draws: Whether the chunk is made as it is read, by code that may draw at each sample; a list is there at once.
    """

    def __init__(self, read_chunk: Callable[[Any], Iterable[Any]], ref: Any) -> None:
        super().__init__()
        self._read_chunk, self._ref = read_chunk, ref
        self._samples: Any = None
        self.draws = True

    def held_objects(self) -> Any:
        """What stands for the chunk, and what gives its samples; into a generator nobody can look."""
        return self._ref if isinstance(self._samples, GeneratorType) else (self._ref, self._samples)

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Open the chunk at its beginning."""
        super().reset(initial_state)
        self.close()
        samples = self._read_chunk(self._ref)
        _refuse_to_divide(samples)
        self._samples, self.draws = iter(samples), not hasattr(samples, "__getitem__")

    def __iter__(self) -> Iterator[Any]:
        # Without a call in between where many are taken at once.
        return self if self._samples is None else self._samples

    def get_state(self) -> Any:
        """None: there is no state."""
        return None

    def close(self) -> None:
        """Close a generator."""
        if callable(close := getattr(self._samples, "close", None)):
            # A thread of a node behind this one may be reading just now; it ends with that node.
            with suppress(ValueError):
                close()
        self._samples = None


def _refuse_to_divide(samples: Any) -> None:
    """Refuse a dataset for the samples of a chunk, which may leave some of them to other workers.

    Raises:
        ConfigurationError: There are other workers: they read other chunks.
    """
    info = get_worker_info()
    if isinstance(samples, IterableDataset) and info is not None and info.num_workers > 1:
        name = type(samples).__qualname__
        raise ConfigurationError(
            f"read_chunk_fn gave a {name}, which may divide a chunk among the {info.num_workers} workers, though one "
            f"of them reads it: the others' samples would be lost. Pass NodeShards(lambda shard: IterableWrapper({name}"
            "(...)), num_shards=...), where it is told that there is one worker; or num_workers=0."
        )


def _name_of(ref: Any, depth: int) -> str:
    """A reference as text that is equal in other folders and processes; of a path, what is below ``depth`` folders."""
    if isinstance(ref, (str, os.PathLike)):
        parts = _parts(ref)[depth:]
        return PurePath(*parts).as_posix() if parts else str(ref)
    return _text_of(ref)


def _text_of(ref: Any) -> str:
    if callable(getattr(ref, "tolist", None)):
        # Numbers and arrays of NumPy and torch.
        ref = ref.tolist()
    if ref is None or isinstance(ref, (int, float, complex, str, bytes)):
        return repr(ref)
    if isinstance(ref, Mapping):
        return f"{{{', '.join(f'{_text_of(key)}: {_text_of(value)}' for key, value in ref.items())}}}"
    if isinstance(ref, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text_of, ref)))}}}"
    if isinstance(ref, (list, tuple)):
        inside = ", ".join(map(_text_of, ref))
        return f"[{inside}]" if isinstance(ref, list) else f"({inside})"
    return repr(os.fspath(ref)) if isinstance(ref, os.PathLike) else type(ref).__qualname__


def _common_depth(refs: Sequence[Any]) -> int:
    """The number of leading folders that all paths among references have in common."""
    folders = [_parts(ref)[:-1] for ref in refs if isinstance(ref, (str, os.PathLike))]
    pairs = zip(min(folders), max(folders), strict=False) if folders else ()
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _parts(path: str | os.PathLike[Any]) -> tuple[str, ...]:
    return PurePath(os.fsdecode(path)).parts


def _checked(sizes: Any, num_chunks: int) -> list[int]:
    try:
        checked = [as_int("A size in chunk_sizes", size) for size in sizes]
    except TypeError:
        raise ConfigurationError(f"chunk_sizes must be a size for each chunk, got {sizes!r}.") from None
    if len(checked) != num_chunks:
        raise ConfigurationError(f"chunk_sizes has {len(checked)} sizes for {num_chunks} chunks.")
    if min(checked, default=0) < 0:
        raise ConfigurationError(f"A size in chunk_sizes must not be negative, got {min(checked)}.")
    return checked


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
        seed: Chooses the orders and the randomness; by default the seed of the data module or loader that serves it, as
            ``StreamDataModule(seed=...)``, or that of Lightning's ``seed_everything``, or 0.
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
            steps=() if transform is None else (Transform(MapNode, {"function": transform}),),
        )
        super().__init__({ALONE: source})
