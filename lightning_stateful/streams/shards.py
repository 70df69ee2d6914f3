"""What a stream is made of: a fixed list of shards, each of which can be read by itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple


class ShardIterator(ABC):
    """The samples of one shard, one after the other.

    Attributes:
        draws: Whether code of the user's that runs as it is iterated may draw random numbers.
    """

    draws: bool = True

    @abstractmethod
    def __next__(self) -> Any:
        """The next sample."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def state(self) -> Any:
        """Where the next sample comes from, as fresh plain JSON data; None if only reading again leads there."""
        return None

    def first(self) -> str | None:
        """Digest of the first samples of a pass that is read from its beginning, where that tells it from others."""
        return None

    def close(self) -> None:  # noqa: B027  # many hold nothing
        """Let go of files."""


class Shards(ABC):
    """A fixed list of shards, numbered from 0, the same on every rank and worker.

    It is pickled into worker processes.

    Attributes:
        draws: Whether code of the user's runs at every sample, which may draw random numbers.
        pinned: Whether each shard belongs to the lane of its own number, because the stream divides itself.
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

    def begin_passes(self, epoch: int, *, surely: bool = False) -> None:  # noqa: B027  # most do not count them
        """Begin the passes before ``epoch`` that training has begun, for what counts its passes itself.

        Args:
            epoch: The pass that is to be read next.
            surely: Begin all of them, even if the first ones begin alike.
        """


def carried(epoch: int, state: Any, since: int, *, is_ended: bool) -> dict[str, Any] | None:
    """The state that the next pass over a loader begins with; None where the loader has no state.

    Args:
        epoch: The pass.
        state: The loader's state in it.
        since: Batches since that state.
        is_ended: Whether the pass was read to its end, and not cut by a limit.
    """
    return None if state is None else {"after": state, "since": since, "pass": epoch, "is_ended": is_ended}


# A part of a shard goes by a number of its own: how many parts there are from this bit on, and below it which part of
# which shard. Whole shards keep their numbers.
_PARTS_FROM = 34
_MOST_PARTS = 2**17


def num_parts_for(num_shards: int, num_lanes: int) -> int:
    """Into how many parts each shard has to be divided so that all lanes have equally many; 1 where there are enough.

    Args:
        num_shards: Shards of the source.
        num_lanes: Lanes that read it.
    """
    return 1 if num_shards >= num_lanes else num_lanes // math.gcd(num_lanes, num_shards)


def parts_of(shard: int, num_parts: int, num_shards: int) -> list[int]:
    """The numbers of a shard's parts; that of the shard itself where it is not divided.

    Args:
        shard: Number of the shard.
        num_parts: Into how many parts it is divided.
        num_shards: Shards of the source.
    """
    if num_parts == 1:
        return [shard]
    return [(num_parts << _PARTS_FROM) + part * num_shards + shard for part in range(num_parts)]


class Part(NamedTuple):
    """Every ``num_parts``-th sample of a shard, from the sample ``which`` on.

    Attributes:
        shard: Number of the shard.
        which: The part, from 0.
        num_parts: Into how many parts the shard is divided.
    """

    shard: int
    which: int
    num_parts: int

    @classmethod
    def of(cls, number: int, num_shards: int) -> Part | None:
        """The part with a number; a whole shard is its only part. None if there is no such part.

        Args:
            number: What :func:`parts_of` gave.
            num_shards: Shards of the source.
        """
        num_parts, below = number >> _PARTS_FROM, number & ((1 << _PARTS_FROM) - 1)
        which, shard = divmod(below, max(num_shards, 1))
        is_one = not which if not num_parts else 1 < num_parts <= _MOST_PARTS and which < num_parts
        return cls(shard, which, max(num_parts, 1)) if is_one and number >= 0 and num_shards else None

    def size_in(self, size: int) -> int:
        """Samples of the part of a shard of ``size`` samples."""
        return max(-(-(size - self.which) // self.num_parts), 0)


class Parts(Shards):
    """Parts of shards, by their numbers: each reads its whole shard, and gives its own samples.

    Args:
        shards: The shards.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.draws, self.pinned, self.reread = shards.draws, shards.pinned, shards.reread

    @property
    def num_shards(self) -> int:
        """Shards, not parts."""
        return self._shards.num_shards

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        """The samples of a part."""
        part = Part.of(shard, self.num_shards)
        if part is None or part.num_parts == 1:
            return self._shards.read(shard, epoch, state)
        inner, left_out = (None, part.which) if state is None else state
        return _EveryNth(self._shards.read(part.shard, epoch, inner), left_out, part.num_parts)

    def name(self, shard: int) -> str:
        """The shard's name, and which part of it."""
        part = Part.of(shard, self.num_shards)
        if part is None or part.num_parts == 1:
            return self._shards.name(shard)
        return f"{self._shards.name(part.shard)} (part {part.which + 1} of {part.num_parts})"

    def describe(self) -> dict[str, Any]:
        """As the shards do."""
        return self._shards.describe()


class _EveryNth(ShardIterator):
    """Every n-th sample of a shard, after so many that are left out first."""

    def __init__(self, inner: ShardIterator, left_out: int, step: int) -> None:
        self._inner, self._left_out, self._step = inner, left_out, step
        self._samples = islice(inner, left_out, None, step)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        sample = next(self._samples)
        self._left_out = self._step - 1
        return sample

    def state(self) -> Any:
        inner = self._inner.state()
        return None if inner is None else [inner, self._left_out]

    def close(self) -> None:
        self._inner.close()
