"""A batch sampler of like lengths, within a budget of tokens or of fixed size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_stateful.bucketing.buckets import Boundaries, Buckets
from lightning_stateful.bucketing.budget import QuadraticCost, TooLong
from lightning_stateful.bucketing.lengths import open_lengths
from lightning_stateful.bucketing.order import BucketOrder
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.rng import seed_or_default

Lengths = Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor | str | Path


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
        max_samples: Samples that a batch never exceeds, beside ``max_tokens``.
        multiple: Batches of at least so many samples have a multiple of it, for example 8 for tensor cores.
        cost: A cost of samples beside their tokens, as a :class:`QuadraticCost`.
        num_buckets: Number of buckets. By default 128, or fewer where that would leave a bucket fewer than 4 batches on
            average.
        boundaries: Where buckets end: ``"least_padding"`` (the default, as None is) and ``"equal_counts"`` choose, or
            the longest length of each bucket, rising.
        too_long: How to treat samples longer than the budget: ``"error"`` refuses them, ``"drop"`` leaves them out.
        shuffle: False to serve the longest bucket first, in the same order in every epoch.
        drop_last: Leave out the last step if it is not full.
        seed: Chooses the orders; by default that of Lightning's ``seed_everything``, or 0.
        num_replicas: Number of ranks; by default taken from the process group at the first batch, or 1.
        rank: This rank; by default taken from the process group, or 0.
        accept: Names of differences between a state and this configuration to let pass on load. Settings that decide
            which samples form a batch can only change between epochs.

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
        max_samples: int | None = None,
        multiple: int = 1,
        cost: QuadraticCost | None = None,
        num_buckets: int | None = None,
        boundaries: Boundaries | None = None,
        too_long: TooLong = "error",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        buckets = Buckets.of(
            open_lengths(lengths),
            max_tokens=max_tokens,
            batch_size=batch_size,
            max_samples=max_samples,
            multiple=multiple,
            cost=cost,
            num_buckets=num_buckets,
            boundaries="least_padding" if boundaries is None else boundaries,
            too_long=too_long,
        )
        order = BucketOrder(buckets, seed=seed_or_default(seed), shuffle=shuffle, drop_last=drop_last)
        super().__init__(order, num_replicas=num_replicas, rank=rank, accept=accept)
        self.num_dropped = buckets.num_dropped
