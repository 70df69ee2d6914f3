"""The batches of one rank from a position on, as lists of indices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Sampler

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.core.topology import Topology
from lightning_stateful.index.orders import Order
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder, SlotPlan, say_repeats
from lightning_stateful.index.step_plan import StepPlan
from lightning_stateful.loaders.seeded import Keyed
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.sampler_plan import SamplerCut, SamplerPlan
from lightning_stateful.samplers.world import detect_topology

_BLOCK = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(StepPlan):
    """Cuts an order into the batches of one rank.

    Attributes:
        order: The canonical sequence.
        rule: How steps are cut.
        rank: Whose share.
    """

    order: Order
    rule: StepRule
    rank: int

    def num_slots(self) -> int:
        """Slots of a whole epoch."""
        return len(self.order)

    def repeats(self) -> list[str]:
        """What is served twice, in words; empty if nothing is."""
        repeated, length = self.rule.num_repeated(len(self.order)), len(self.order)
        return say_repeats(repeated, length)

    def is_over(self, position: Position) -> bool:
        """Whether nothing is left of the position's epoch."""
        return not self.in_first_pass(position) or not self.num_batches(position)

    def num_samples(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.num_shared()

    def indices(self, position: Position) -> Iterator[list[int]]:
        """The rank's batches from ``position`` to the end of the pass."""
        return (indices for _, indices in self.numbered(position))

    def numbered(self, position: Position) -> Iterator[tuple[int, list[int]]]:
        """:meth:`indices`, each batch with the number of its first slot."""
        rule, epoch, slot = self.rule, position.epoch, position.consumed
        remaining = self.remaining(position)
        size = rule.batch_size
        own = self.rank * size + np.arange(size, dtype=np.int64)
        plain = self.num_plain(remaining)
        block = max(_BLOCK // size, 1)
        for start in range(0, plain, block):
            count = min(block, plain - start)
            starts = slot + np.arange(count, dtype=np.int64) * rule.full
            table = self.order.take((starts[:, None] + own).ravel(), epoch).reshape(count, size)
            firsts = range(slot + self.rank * size, slot + count * rule.full, rule.full)
            slot += count * rule.full
            yield from zip(firsts, table.tolist(), strict=True)
        for share in self.last_shares(remaining - plain * rule.full):
            yield slot + int(share[0]), self.order.take(slot + share, epoch).tolist()


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


AnyPlan = BatchPlan | SlotPlan | SamplerPlan
AnyCut = Cut | SlotCut | SamplerCut


class PositionedBatches:
    """A batch sampler that begins wherever :attr:`start` says when it is iterated.

    Args:
        plan: Which batches.
        seed: Seeds each batch by (seed, epoch, first slot of the batch), which it then comes with, as
            :class:`~lightning_stateful.loaders.seeded.SeededDataset` wants it; None to yield bare indices.
        is_batched: Whether the loader collates batches; if not, each "batch" is one index of the dataset.
    """

    def __init__(self, plan: AnyPlan, seed: int | None, *, is_batched: bool = True) -> None:
        self.plan = plan
        self.seed = seed
        self.is_batched = is_batched
        self.start = Position()

    def __iter__(self) -> Iterator[Any]:
        # Of single samples, an order has lists of one.
        unwrap = not self.is_batched and isinstance(self.plan, BatchPlan)
        if self.seed is None:
            batches: Iterator[Any] = self.plan.indices(self.start)
            return (batch[0] for batch in batches) if unwrap else batches
        seed = derive_seed("batch", self.seed, self.start.epoch)
        numbered: Iterator[tuple[int, Any]] = self.plan.numbered(self.start)
        if self.is_batched:
            # Plain tuples are sent to workers faster.
            return ((mixed_seed(seed, slot), batch) for slot, batch in numbered)
        return (Keyed(mixed_seed(seed, slot), batch[0] if unwrap else batch) for slot, batch in numbered)

    def __len__(self) -> int:
        return self.plan.num_batches()


class PassIndices(DistributedSampler[Any]):
    """The loader's indices from the beginning of its pass, for those who look at ``loader.sampler``.

    It is a DistributedSampler by type, so that Lightning and Fabric see that the ranks are taken care of; the epoch
    that they set here is a count of their ``iter()`` calls and says nothing about where the loader stands.
    """

    def __init__(self, cut: AnyCut, cursor: Cursor, *, is_batched: bool = True) -> None:
        self._cut = cut
        self._cursor = cursor
        self._is_batched = is_batched

    def __iter__(self) -> Iterator[Any]:
        plan = self._cut.plan()
        for batch in plan.indices(self._cursor.position):
            if self._is_batched or isinstance(plan, BatchPlan):
                yield from batch
            else:
                yield batch

    def __len__(self) -> int:
        plan = self._cut.plan()
        return plan.num_samples() if self._is_batched else plan.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Nothing: see :meth:`StatefulLoader.set_epoch`."""


class PassBatches(Sampler[Any]):
    """The loader's batches from the beginning of its pass, for those who look at ``loader.batch_sampler``."""

    def __init__(self, cut: SlotCut | SamplerCut, cursor: Cursor) -> None:
        self._cut = cut
        self._cursor = cursor

    def __iter__(self) -> Iterator[Any]:
        return self._cut.plan().indices(self._cursor.position)

    def __len__(self) -> int:
        return self._cut.plan().num_batches()
