"""What every part of a stream is: an iterator that can say where it stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

# Plain JSON data that says where a stage stands. Whoever is given one leaves it as it is.
Place = dict[str, Any]


class Item(NamedTuple):
    """One sample of a stream.

    Attributes:
        shard: The number of the shard that it comes from.
        number: Its place in that shard, from 0.
        value: The sample.
    """

    shard: int
    number: int
    value: Any


class Run(NamedTuple):
    """Samples that come one after the other, without a name for each.

    Attributes:
        shard: The shard of the first.
        first: The place of the first in that shard.
        values: The samples.
    """

    shard: int
    first: int
    values: list[Any]


class Stage(ABC):
    """An iterator over a part of a stream that can be opened anew where it stands.

    A stage is opened at a place, or at the beginning; what it yields from there is a function of its configuration and
    the place alone. A stage that buffers keeps the place at which its buffer was begun and the number of items that it
    has yielded since; it never keeps what is in the buffer.
    """

    def __iter__(self) -> Stage:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """The next item, or batch."""

    @abstractmethod
    def place(self) -> Place:
        """Where the next item comes from: plain data that later calls leave as it is."""

    def skip(self, count: int) -> int:
        """Leave out items; returns how many there were."""
        return sum(1 for _ in islice(self, count))

    def take(self, number: int) -> list[Any]:
        """The next items, as many as there are up to ``number``."""
        return list(islice(self, number))

    def take_runs(self, number: int) -> list[Run]:
        """The next items, without an object for each where that can be avoided."""
        return [Run(item.shard, item.number, [item.value]) for item in self.take(number)]

    def close(self) -> None:  # noqa: B027  # many hold nothing
        """Let go of files and processes; nothing is read any more."""


# Opens a stage at a place, or at its beginning.
Open = Callable[[Place | None], Stage]
