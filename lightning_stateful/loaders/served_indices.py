"""The ``sampler`` and ``batch_sampler`` of a loader: the indices that a rank is served."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_stateful.core.order import SampleCountingPlan
from lightning_stateful.loaders.planned_batches import known_steps
from lightning_stateful.samplers.tracker import Tracker


class ServedIndices(DistributedSampler[Any]):
    """The loader's ``sampler`` or ``batch_sampler``: what this rank is served in the current pass, from its beginning.

    It is a DistributedSampler by type, so that Lightning and Fabric see that the ranks are taken care of. The epoch
    that they set here only counts their ``iter()`` calls, and is ignored.

    Args:
        tracker: The loader's.
        flat: Whether to yield the indices of batches one by one.
    """

    def __init__(self, tracker: Tracker, *, flat: bool = False) -> None:
        self._tracker, self._flat = tracker, flat

    def __iter__(self) -> Iterator[Any]:
        batches = (batch for _, batch in self._tracker.current_plan().batches(self._tracker.topology.rank))
        return chain.from_iterable(batches) if self._flat else batches

    def __len__(self) -> int:
        plan = self._tracker.plan_epoch(self._tracker.latest_epoch)
        if not self._flat:
            return known_steps(plan)
        if not isinstance(plan, SampleCountingPlan):
            raise TypeError("The samples of whole batches are counted only when they are served.")
        return plan.num_samples(self._tracker.topology.rank)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader's own :meth:`StatefulLoader.set_epoch` decides."""
