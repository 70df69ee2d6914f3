"""Batches of like lengths, within a budget of tokens or of fixed size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lightning_stateful.bucketing.budget import QuadraticCost
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.bucket_order import BucketOrder
from lightning_stateful.index.buckets import Boundaries, Buckets
from lightning_stateful.index.too_long import TooLong
from lightning_stateful.index.window_order import WindowOrder
from lightning_stateful.index.windows import Windows
from lightning_stateful.samplers.batch_sampler import StatefulBatchSampler
from lightning_stateful.samplers.lengths import open_lengths
from lightning_stateful.samplers.rng import seed_or_default

Lengths = Sequence[int] | str | Path | Any


class BucketBatchSampler(StatefulBatchSampler):
    """Batches of samples of like lengths, for a DataLoader over their dataset.

    Samples are sorted into buckets by length. All ranks of a step take a batch of the same bucket with the same number
    of samples, and as many steps as each other; only the last step of an epoch may have fewer samples. What a bucket
    lacks for a full step is taken from the next shorter one. The number of steps follows from the lengths and the
    configuration and is the same in every epoch, while the samples that meet, and the order of the batches, are not.

    With ``window``, consecutive samples of a shuffled order are sorted and cut instead: batches are more random, and
    hold more padding.

    Args:
        lengths: Tokens (or frames, or whatever the budget counts) of every sample: integers, or the path of a ``.npy``
            file of them, which is memory-mapped.
        max_tokens: What a batch may hold, padding included: its number of samples times its longest.
        batch_size: In place of ``max_tokens``: samples in a batch; one for all, or one for each bucket, the shortest
            first.
        max_samples: Samples that a batch never exceeds, beside ``max_tokens``.
        multiple: Batches of at least so many samples have a multiple of it, for example 8 for tensor cores.
        cost: What samples cost beside their tokens, as a :class:`QuadraticCost`.
        num_buckets: Number of buckets. By default 128, or fewer where that would leave a bucket fewer than 4 batches on
            average.
        boundaries: Where buckets end: ``"least_padding"`` (the default, as None is) and ``"equal_counts"`` choose, or
            the longest length of each bucket, rising.
        window: Sort and cut windows of so many samples, counted over all ranks, in place of buckets. It should be many
            times the batch size times the number of ranks.
        boundary_key: With ``window``: an integer for every sample; a batch holds samples of one. A window is sorted by
            key, and then by length. Samples change windows only with others of their key and of about their length.
        shuffle_batches: With ``window``: shuffle the batches of each window, in groups of as many as there are ranks.
        too_long: What to do about samples longer than the budget: ``"error"`` refuses them, ``"drop"`` leaves them out
            and ``"alone"`` serves each in a batch of its own.
        shuffle: False to serve the longest bucket first, or windows of the dataset's order, alike in every epoch.
        drop_last: Leave out the last step if it is not full; of windows, if it has no batch for every rank.
        seed: Chooses the orders; by default that of Lightning's ``seed_everything``, or 0.
        num_replicas: Number of ranks; by default that of the process group at the first batch, or 1.
        rank: This rank; by default that of the process group, or 0.
        accept: Names of differences between a state and this configuration to let pass on load. What decides about
            batches can only change between epochs.

    Attributes:
        num_dropped: Samples left out because they are too long.
        num_alone: Samples in batches of their own because they are too long.

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
        batch_size: int | Sequence[int] | None = None,
        max_samples: int | None = None,
        multiple: int = 1,
        cost: QuadraticCost | None = None,
        num_buckets: int | None = None,
        boundaries: Boundaries | None = None,
        window: int | None = None,
        boundary_key: Lengths | None = None,
        shuffle_batches: bool = True,
        too_long: TooLong = "error",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        lengths = open_lengths(lengths)
        boundaries = "least_padding" if boundaries is None else boundaries
        seed = seed_or_default(seed)
        budget: dict[str, Any] = {
            "max_tokens": max_tokens,
            "batch_size": batch_size,
            "max_samples": max_samples,
            "multiple": multiple,
            "cost": cost,
            "too_long": too_long,
        }
        samples: Buckets | Windows
        order: BucketOrder | WindowOrder
        if window is None:
            if boundary_key is not None:
                raise ConfigurationError("boundary_key divides windows; pass window, or leave it out.")
            samples = Buckets.of(lengths, **budget, num_buckets=num_buckets, boundaries=boundaries)
            order = BucketOrder(samples, seed=seed, shuffle=shuffle, drop_last=drop_last)
        else:
            if num_buckets is not None or not isinstance(boundaries, str) or boundaries != "least_padding":
                raise ConfigurationError("window takes the place of buckets; leave num_buckets and boundaries out.")
            key = None if boundary_key is None else open_lengths(boundary_key, what="boundary_key")
            samples = Windows.of(lengths, **budget, window=window, boundary_key=key, shuffle=shuffle, seed=seed)
            order = WindowOrder(samples, shuffle_batches=shuffle and shuffle_batches, drop_last=drop_last)
        super().__init__(order, num_replicas=num_replicas, rank=rank, accept=accept)
        self.num_dropped, self.num_alone = samples.num_dropped, samples.num_alone
