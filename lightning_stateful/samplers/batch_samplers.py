"""Batch samplers over any order of batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch.utils.data import Sampler

from lightning_stateful.core.order import BatchOrder, EpochPlan
from lightning_stateful.samplers.tracker import TrackedSampler, Tracker


class StatefulBatchSampler(TrackedSampler, Sampler[list[int]]):
    """Deals the batches of an order out over the ranks, from any progress.

    Every rank gets the same number of batches. The end of a pass moves on to the next epoch; :meth:`set_epoch` chooses
    one, and keeps loaded progress within the same epoch. If an iterator is abandoned, the next one begins where it did.

    Args:
        order: The order to serve: of mixtures, buckets, plain samples or one of your own.
        num_replicas: Number of ranks; by default taken from the process group at the first batch, or 1.
        rank: This rank; by default taken from the process group, or 0.
        accept: Names of differences between a state and this configuration to let pass on load.

    State:
        The progress after the batches that the latest iterator has yielded. DataLoader workers fetch ahead of
        training; give :meth:`state_dict` the number of batches that this rank was trained on to leave those out, or
        let a ``StatefulLoader`` do it.
    """

    def __init__(
        self,
        order: BatchOrder,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        self.tracker = Tracker(order, num_replicas=num_replicas, rank=rank, accept=accept)

    @property
    def order(self) -> BatchOrder:
        """The order that the sampler serves."""
        return self.tracker.order

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self.tracker.plan_epoch(0).num_steps

    def __iter__(self) -> Iterator[list[int]]:
        return self.tracker.iterate(self._read)

    def _read(self, plan: EpochPlan, first_step: int) -> Iterator[list[int]]:
        return (batch for _, batch in plan.batches(self.tracker.topology.rank, first_step))

    def state_dict(self, *, num_batches: int | None = None) -> dict[str, Any]:
        """The state after the batches that the latest iterator has yielded.

        Args:
            num_batches: Batches of this rank that the present pass has trained on, if workers have fetched more.

        Raises:
            ConfigurationError: ``num_batches`` is more than the pass has.
        """
        return self._state_dict(num_batches)
