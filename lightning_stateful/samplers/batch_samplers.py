"""Batch samplers over any order of batches, and over buckets of like lengths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from lightning_stateful.bucketing.buckets import Boundaries, Buckets
from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.bucketing.order import BucketOrder
from lightning_stateful.core.order import BatchOrder, EpochPlan
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.samplers.tracker import Tracked, Tracker

Lengths = Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor | str | Path


class StatefulBatchSampler(Tracked, Sampler[list[int]]):
    """Deals the batches of an order out over the ranks, from any progress.

    Every rank gets the same number of batches. A pass that ends, or is broken off, is followed by the next epoch;
    :meth:`set_epoch` chooses one, and keeps progress within it that was loaded.

    Args:
        order: The order to serve, a :class:`~lightning_stateful.core.order.BatchOrder`: of mixtures, of buckets, or one
            of your own. One of samples goes to ``StatefulLoader(sampler=order)``, or is cut into batches by a
            :class:`~lightning_stateful.core.samples.SampleBatchOrder`.
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
        self.tracker: Tracker = Tracker(order, num_replicas=num_replicas, rank=rank, accept=accept)

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
        return self.tracker.state_after(num_batches)


class BucketBatchSampler(StatefulBatchSampler):
    """Batches of samples of like lengths, for a DataLoader over their dataset.

    Samples are sorted into buckets by length. All ranks of a step take a batch of the same bucket with the same number
    of samples, and as many steps as each other; only the last step of an epoch may have fewer samples. What a bucket
    lacks for a full step is taken from the next shorter one. The number of steps follows from the lengths and the
    configuration and is the same in every epoch, while the samples that meet, and the order of the batches, are not.

    Args:
        lengths: Tokens (or frames, or whatever the budget counts) of every sample: integers, or the path of a ``.npy``
            file of them, which is memory-mapped.
        max_tokens: The most tokens of a batch, padding included: its number of samples times its longest.
        batch_size: In place of ``max_tokens``: samples in a batch.
        budget: In place of both: a :class:`Budget`, with further limits.
        num_buckets: Number of buckets. By default 128, or fewer where that would leave a bucket fewer than 4 batches on
            average.
        boundaries: Where buckets end: ``"least_padding"`` (the default, as None is) and ``"equal_counts"`` choose, or
            the longest length of each bucket, rising.
        shuffle: False to serve the longest bucket first, in the same order in every epoch.
        drop_last: Leave out the last step if it is not full.
        seed: Chooses the orders; by default that of Lightning's ``seed_everything``, or 0.
        num_replicas: As in :class:`StatefulBatchSampler`.
        rank: As in :class:`StatefulBatchSampler`.
        accept: As in :class:`StatefulBatchSampler`. Settings that decide which samples form a batch can only change
            between epochs.

    Attributes:
        num_dropped: Samples left out because they are too long.

    State:
        See :class:`StatefulBatchSampler`. It is good for any number of ranks.

    Raises:
        ConfigurationError: An argument is out of range, arguments contradict each other, or samples are too long.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        budget: Budget | None = None,
        num_buckets: int | None = None,
        boundaries: Boundaries | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        buckets = Buckets.of(
            lengths,
            Budget.of(budget, max_tokens=max_tokens, batch_size=batch_size),
            num_buckets=num_buckets,
            boundaries="least_padding" if boundaries is None else boundaries,
        )
        order = BucketOrder(buckets, seed=seed_or_default(seed), shuffle=shuffle, drop_last=drop_last)
        super().__init__(order, num_replicas=num_replicas, rank=rank, accept=accept)
        self.num_dropped: int = buckets.num_dropped
