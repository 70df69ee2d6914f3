"""What a stream is made of: a fixed list of shards, each of which a node can read by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torchdata.nodes import BaseNode


class Shards(ABC):
    """A fixed list of shards, numbered from 0, the same on every rank and worker.

    It is pickled into worker processes.

    Attributes:
        draws: Whether code of the user's runs at every sample, which may draw random numbers.
        pinned: Whether each shard belongs to the worker slot of its own number, because the stream divides itself.
        is_loader: Whether what it gives are batches, and every epoch begins it anew, as a trainer does with loaders.
        warning: What a user should know before training, and what to do about it; empty for nothing.
        reread: Why a shard has to be read again from its beginning on a resume, in words; empty where that is quick.
    """

    draws: bool = False
    pinned: bool = False
    is_loader: bool = False
    warning: str = ""
    reread: str = ""

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards."""

    @abstractmethod
    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        """A node that reads the samples of a shard in some epoch, and was not reset yet.

        Its ``get_state()`` is plain JSON data, or None where only reading again leads there. An error while it is reset
        or read is the node's own; the caller says which shard it was. A generator that may draw at every sample says so
        by an attribute ``draws``; by default that is the shards' :attr:`draws`.
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

    def begin_passes(self, epoch: int, *, surely: bool = False) -> None:  # noqa: B027  # most do not count them
        """Begin the passes before ``epoch`` that training has begun, for what counts its passes itself.

        Args:
            epoch: The pass that is to be read next.
            surely: Begin all of them, even if the first ones begin alike.
        """
