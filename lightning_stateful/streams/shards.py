"""What a stream is made of: a fixed list of shards, each of which can be read by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class ShardIterator(ABC):
    """The samples of one shard, one after the other."""

    @abstractmethod
    def __next__(self) -> Any:
        """The next sample."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def state(self) -> Any:
        """Where the next sample comes from, as fresh plain JSON data; None if only reading again leads there."""
        return None

    def close(self) -> None:  # noqa: B027  # many hold nothing
        """Let go of files."""


class Shards(ABC):
    """A fixed list of shards, numbered from 0, the same on every rank and worker.

    It is pickled into worker processes.

    Attributes:
        draws: Whether code of the user's runs at every sample, which may draw random numbers.
        pinned: Whether each shard belongs to the lane of its own number, because the stream divides itself.
        warning: What a user should know before training, and what to do about it; empty for nothing.
        reread: Why a shard has to be read again from its beginning on a resume, in words; empty where that is quick.
    """

    draws: bool = False
    pinned: bool = False
    warning: str = ""
    reread: str = ""

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards."""

    @abstractmethod
    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        """The samples of a shard in some epoch, from its beginning or from where ``state`` was taken.

        An error while it is opened or read is the reader's own; the caller says which shard it was.
        """

    @abstractmethod
    def name(self, shard: int) -> str:
        """What people know the shard by, for errors: a file, or a number."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What tells other data apart cheaply, as plain data."""

    def sizes(self) -> list[int] | None:
        """Samples of each shard, where that is known without reading."""
        return None
