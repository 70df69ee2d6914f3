"""Orders whose slots are whole batches, and the share of one rank in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.topology import Topology
from lightning_stateful.index.position import Position

# The first batch should not wait for many; later ones are computed many at a time.
_FIRST, _LARGEST, _MOST_WORK = 8, 8192, 2**17


class Batches(NamedTuple):
    """Consecutive batches of one rank.

    Attributes:
        indices: Their samples one after the other, int64 of shape ``(n,)``.
        sizes: Samples in each, int64 of shape ``(batches,)``.
        passes: Which pass over its source each sample belongs to, of the shape of ``indices``.
    """

    indices: Indices
    sizes: Indices
    passes: Indices


@runtime_checkable
class BatchOrder(Protocol):
    """A canonical sequence of batches for every epoch.

    A slot is a batch. Slots come in groups that are alike, as many as the epoch had ranks when it was planned
    (``position.width``), so that all ranks of a step do the same work. Implementations are frozen values.
    """

    @property
    def kind(self) -> str:
        """The name under which a state knows this order."""
        ...

    @property
    def order_version(self) -> int:
        """Raised whenever the same configuration gives another sequence."""
        ...

    @property
    def carries_over(self) -> bool:
        """Whether an epoch goes on where the last one ended."""
        ...

    def begin(self, epoch: int, width: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``, after whatever an earlier position of the run leaves behind."""
        ...

    def reopen(self, position: Position, width: int) -> Position:
        """The same position, from which the rest of the epoch is planned for ``width`` ranks."""
        ...

    def steps(self, position: Position) -> int:
        """Steps of the position's epoch from its beginning, on as many ranks as the position is wide."""
        ...

    def batches(self, position: Position, first: int, last: int, rank: int) -> Batches:
        """The batches of ``rank`` in the steps ``first <= step < last`` of the position's epoch."""
        ...

    def report(self, position: Position) -> dict[str, Any]:
        """What has been served, as plain data."""
        ...

    def repeats(self, width: int) -> list[str]:
        """What is served twice because ranks take equal steps, in words."""
        ...

    def work(self, width: int) -> int:
        """Samples that have to be looked at to find one batch of one rank."""
        ...

    def unshuffled(self) -> BatchOrder:
        """The same batches in the same order in every epoch."""
        ...

    def describe(self) -> dict[str, Any]:
        """The configuration that determines the sequence, as plain data to be compared."""
        ...

    def save(self, position: Position) -> dict[str, Any]:
        """A position as plain data."""
        ...

    def restore(self, data: Mapping[str, Any], saved: Mapping[str, Any], *, changed: bool) -> Position:
        """The position that :meth:`save` wrote under the configuration ``saved``."""
        ...


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The batches of one rank in a batch order.

    Attributes:
        order: The canonical sequence.
        topology: The ranks, and which one.
    """

    order: BatchOrder
    topology: Topology

    @property
    def num_replicas(self) -> int:
        """Data-parallel ranks."""
        return self.topology.num_replicas

    def num_slots(self) -> int:
        """Slots of a whole epoch."""
        return self.num_batches() * self.num_replicas

    def num_samples(self) -> int:
        """Samples of this rank in a whole epoch; they are counted batch by batch."""
        here, samples = self.begin(0), 0
        for first in range(0, self.num_batches(), _LARGEST):
            last = min(first + _LARGEST, self.num_batches())
            samples += int(self.order.batches(here, first, last, self.topology.rank).sizes.sum())
        return samples

    def repeats(self) -> list[str]:
        """What is served twice, in words; empty if nothing is."""
        return self.order.repeats(self.num_replicas)

    def begin(self, epoch: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``; ``held`` is any earlier position of the run."""
        return self.order.begin(epoch, self.topology.num_replicas, held)

    def here(self, position: Position) -> Position:
        """A position of any topology, as one of this."""
        return self.order.reopen(position, self.topology.num_replicas)

    def is_over(self, position: Position) -> bool:
        """Whether nothing is left of the position's epoch."""
        return not self.num_batches(position)

    def in_first_pass(self, position: Position) -> bool:
        """True: a batch order has no later passes within an epoch."""
        return True

    def num_batches(self, position: Position | None = None) -> int:
        """Batches from ``position`` (by default: a whole epoch) to the end of the epoch."""
        here = self.begin(0) if position is None else self.here(position)
        return max(self.order.steps(here) - here.consumed // here.width, 0)

    def after(self, position: Position, steps: int) -> Position:
        """The position within the same epoch after ``steps`` more steps."""
        if not steps:
            return position
        here = self.here(position)
        return replace(here, consumed=min(here.consumed // here.width + steps, self.order.steps(here)) * here.width)

    def end(self, position: Position) -> Position:
        """The end of the position's epoch."""
        here = self.here(position)
        return replace(here, consumed=self.order.steps(here) * here.width)

    def indices(self, position: Position) -> Iterator[list[int]]:
        """The rank's batches from ``position`` to the end of the epoch."""
        for found in self._batches(position):
            yield from _cut(found.indices, found.sizes)

    def numbered(self, position: Position) -> Iterator[tuple[int, list[int]]]:
        """:meth:`indices`, each batch with the number of its slot."""
        here = self.here(position)
        return zip(count(here.consumed + self.topology.rank, self.num_replicas), self.indices(position), strict=False)

    def _batches(self, position: Position) -> Iterator[Batches]:
        """More and more batches at a time."""
        here = self.here(position)
        step, end, size = here.consumed // here.width, self.order.steps(here), _FIRST
        largest = min(max(_MOST_WORK // self.order.work(self.num_replicas), 1), _LARGEST)
        while step < end:
            stop = min(step + min(size, largest), end)
            yield self.order.batches(here, step, stop, self.topology.rank)
            step, size = stop, min(2 * size, largest)


def say_repeats(repeated: int, total: int) -> list[str]:
    """What is served twice, in words; empty if nothing is."""
    return [f"{repeated} of {total} samples are served twice in every epoch"] if repeated else []


def _cut(values: Indices, sizes: Indices) -> Iterator[list[int]]:
    """Consecutive parts of ``sizes``, as lists."""
    # One by one: many lists made at once would set the garbage collector off.
    flat, start = values.tolist(), 0
    for size in sizes.tolist():
        yield flat[start : start + size]
        start += size
