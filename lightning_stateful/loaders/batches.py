"""The batches of one rank from a position on, as lists of indices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Sampler

from lightning_stateful.index.orders import Order
from lightning_stateful.index.permutation import Indices
from lightning_stateful.index.position import Position
from lightning_stateful.index.seeding import derive_seed
from lightning_stateful.index.slots import BatchOrder, SlotPlan, say_repeats
from lightning_stateful.index.steps import StepRule
from lightning_stateful.index.topology import Topology
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.world import detect_topology

_BLOCK = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Cuts an order into the batches of one rank.

    Attributes:
        order: The canonical sequence.
        rule: How steps are cut.
        rank: Whose share.
    """

    order: Order
    rule: StepRule
    rank: int

    @property
    def num_replicas(self) -> int:
        """Data-parallel ranks."""
        return self.rule.num_replicas

    def num_slots(self) -> int:
        """Slots of a whole epoch."""
        return len(self.order)

    def repeats(self) -> list[str]:
        """What is served twice, in words; empty if nothing is."""
        repeated, length = self.rule.num_repeated(len(self.order)), len(self.order)
        return say_repeats(repeated, length)

    def begin(self, epoch: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``, whatever the run held before."""
        return Position(epoch=epoch, width=self.num_replicas)

    def end(self, position: Position) -> Position:
        """The end of the position's epoch."""
        return replace(position, consumed=len(self.order))

    def is_over(self, position: Position) -> bool:
        """Whether nothing is left of the position's epoch."""
        return not self.in_first_pass(position) or not self.num_batches(position)

    def in_first_pass(self, position: Position) -> bool:
        """Whether a position lies before the end of the epoch, and in no later pass within it."""
        return position.consumed < len(self.order)

    def pass_after(self, position: Position, passes: int) -> Position:
        """The beginning of a later pass within the epoch, ``passes`` after the one that ``position`` lies in."""
        length = len(self.order)
        return replace(position, consumed=(position.consumed // length + passes) * length)

    def remaining(self, position: Position) -> int:
        """Slots left in the epoch, or in the pass within the epoch that a cyclic position lies in."""
        length = len(self.order)
        return length - position.consumed % length if length else 0

    def num_batches(self, position: Position | None = None) -> int:
        """Batches from ``position`` (by default: a whole epoch) to the end of the pass."""
        return self.rule.num_steps(len(self.order) if position is None else self.remaining(position))

    def after(self, position: Position, steps: int) -> Position:
        """The position within the same epoch after ``steps`` more steps of this pass."""
        served = self.rule.served(self.remaining(position), steps)
        return replace(position, consumed=position.consumed + served)

    def num_samples(self) -> int:
        """Samples of this rank in a whole epoch."""
        plain = self._num_plain(len(self.order))
        tail = len(self.order) - plain * self.rule.full
        return plain * self.rule.batch_size + sum(share.size for share in self._shares(tail))

    def keyed(self, position: Position, seed: int) -> Iterator[tuple[int, list[int]]]:
        """:meth:`indices`, each batch with a key to seed its samples by."""
        # A second pass over the same samples within an epoch (max_size_cycle) draws anew.
        number = position.consumed // max(len(self.order), 1)
        key = derive_seed("samples", seed, position.epoch, number)
        return ((key, indices) for indices in self.indices(position))

    def indices(self, position: Position) -> Iterator[list[int]]:
        """The rank's batches from ``position`` to the end of the pass."""
        rule, epoch, slot = self.rule, position.epoch, position.consumed
        remaining = self.remaining(position)
        size = rule.batch_size
        own = self.rank * size + np.arange(size, dtype=np.int64)
        plain = self._num_plain(remaining)
        block = max(_BLOCK // size, 1)
        for start in range(0, plain, block):
            count = min(block, plain - start)
            starts = slot + np.arange(count, dtype=np.int64) * rule.full
            table = self.order.take((starts[:, None] + own).ravel(), epoch).reshape(count, size)
            slot += count * rule.full
            yield from table.tolist()
        for share in self._shares(remaining - plain * rule.full):
            yield self.order.take(slot + share, epoch).tolist()

    def _num_plain(self, remaining: int) -> int:
        """Steps that are full and alike, computed many at a time: all but the last two."""
        return max(remaining // self.rule.full - 1, 0)

    def _shares(self, remaining: int) -> Iterator[Indices]:
        """The last steps one by one: offsets from the first of ``remaining`` slots."""
        done = 0
        while self.rule.num_steps(remaining - done):
            yield done + self.rule.share(remaining - done, self.rank)
            done += self.rule.step_size(remaining - done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How an order is cut into batches, on however many ranks there turn out to be.

    Attributes:
        order: The canonical sequence.
        batch_size: Samples in a full batch of one rank.
        drop_last: Leave out an incomplete last step.
        exact: Never repeat a sample for evaluation.
        num_replicas: Number of ranks; None for those of the process group.
        rank: This rank; None for that of the process group.
    """

    order: Order
    batch_size: int
    drop_last: bool = False
    exact: bool = False
    num_replicas: int | None = None
    rank: int | None = None

    def topology(self) -> Topology:
        """The ranks that batches are dealt out to."""
        return detect_topology(self.num_replicas, self.rank)

    def plan(self) -> BatchPlan:
        """The batches of this rank."""
        topology = self.topology()
        rule = StepRule(
            batch_size=self.batch_size,
            num_replicas=topology.num_replicas,
            drop_last=self.drop_last,
            exact=self.exact,
        )
        return BatchPlan(order=self.order, rule=rule, rank=topology.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCut:
    """Whole batches, dealt out to however many ranks there turn out to be.

    Attributes:
        order: The canonical sequence of batches.
        num_replicas: Number of ranks; None for those of the process group.
        rank: This rank; None for that of the process group.
    """

    order: BatchOrder
    num_replicas: int | None = None
    rank: int | None = None

    def topology(self) -> Topology:
        """The ranks that batches are dealt out to."""
        return detect_topology(self.num_replicas, self.rank)

    def plan(self) -> SlotPlan:
        """The batches of this rank."""
        return SlotPlan(self.order, self.topology())


class PositionedBatches:
    """A batch sampler that begins wherever :attr:`start` says when it is iterated.

    Args:
        plan: Which batches.
        seed: Seed of the samples, or None to yield bare indices. With a seed each batch is ``(key, indices)``, as
            :class:`~lightning_stateful.loaders.seeded.SeededDataset` wants them.
    """

    def __init__(self, plan: BatchPlan | SlotPlan, seed: int | None) -> None:
        self.plan = plan
        self.seed = seed
        self.start = Position()

    def __iter__(self) -> Iterator[Any]:
        return self.plan.indices(self.start) if self.seed is None else self.plan.keyed(self.start, self.seed)

    def __len__(self) -> int:
        return self.plan.num_batches()


class PassIndices(DistributedSampler[int]):
    """The loader's indices from the beginning of its pass, for those who look at ``loader.sampler``.

    It is a DistributedSampler by type, so that Lightning and Fabric see that the ranks are taken care of; the epoch
    that they set here is a count of their ``iter()`` calls and says nothing about where the loader stands.
    """

    def __init__(self, cut: Cut | SlotCut, cursor: Cursor) -> None:
        self._cut = cut
        self._cursor = cursor

    def __iter__(self) -> Iterator[int]:
        for batch in self._cut.plan().indices(self._cursor.position):
            yield from batch

    def __len__(self) -> int:
        return self._cut.plan().num_samples()

    def set_epoch(self, epoch: int) -> None:
        """Nothing: see :meth:`StatefulLoader.set_epoch`."""


class PassBatches(Sampler[list[int]]):
    """The loader's batches from the beginning of its pass, for those who look at ``loader.batch_sampler``."""

    def __init__(self, cut: SlotCut, cursor: Cursor) -> None:
        self._cut = cut
        self._cursor = cursor

    def __iter__(self) -> Iterator[list[int]]:
        return self._cut.plan().indices(self._cursor.position)

    def __len__(self) -> int:
        return self._cut.plan().num_batches()
