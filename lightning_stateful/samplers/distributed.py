"""A drop-in for torch's DistributedSampler that resumes where it stands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sized
from typing import Any, cast

from torch.utils.data import DistributedSampler

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import EpochPlan
from lightning_stateful.core.samples import (
    SampleBatchOrder,
    SampleEpochPlan,
    SampleOrder,
    SequentialOrder,
    ShuffledOrder,
)
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.samplers.tracker import Tracked, Tracker


class StatefulDistributedSampler(Tracked, DistributedSampler[Any]):
    """Deals an epoch out over the ranks, one sample a rank in turn, from any progress.

    Every rank gets the same number of samples. If the last round has fewer samples than ranks, some of them are given
    out twice, or none of them with ``drop_last=True``. Shuffling is a keyed permutation, so an epoch starts, and
    resumes, in constant time and memory.

    A pass that ends, or is broken off, is followed by the next epoch; :meth:`set_epoch` chooses one, and keeps progress
    within it that was loaded.

    Args:
        dataset: The dataset, or its length. Not an order: that goes to ``StatefulLoader(sampler=order)``, and here no
            more than its length would be read.
        num_replicas: Number of ranks; by default taken from the process group, or 1.
        rank: This rank; by default taken from the process group, or 0.
        shuffle: True for another random order in each epoch, False for the dataset's order.
        seed: Chooses the orders; by default that of Lightning's ``seed_everything``, or 0.
        drop_last: Drop the last incomplete round instead of filling it.
        accept: Names of differences between a state and this configuration to let pass on load.

    State:
        The progress after the samples that the latest iterator has yielded. DataLoader workers fetch ahead of
        training; give :meth:`state_dict` the number of samples that this rank was trained on to leave those out.

    Raises:
        ConfigurationError: An argument is out of range, or ``dataset`` is an order: this sampler has its own. Pass an
            order to the loader, ``StatefulLoader(dataset, sampler=order)``.
    """

    drop_last: bool
    num_replicas: int
    rank: int
    seed: int
    shuffle: bool

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        *,
        accept: Collection[str] = (),
    ) -> None:
        seed = seed_or_default(seed)
        if isinstance(dataset, SampleOrder):
            raise ConfigurationError(
                f"StatefulDistributedSampler shuffles a dataset, and a {type(dataset).__qualname__} is an order. Pass "
                "it to the loader: StatefulLoader(dataset, sampler=order)."
            )
        if isinstance(dataset, Sized):
            length, described = len(dataset), describe_dataset(dataset)
        else:
            length = as_int("dataset", dataset)
            described = {"length": length}
        samples = ShuffledOrder(length, seed) if shuffle else SequentialOrder(length)
        order = SampleBatchOrder(samples=samples, drop_last=drop_last)
        self.tracker: Tracker = Tracker(
            order, {**order.config(), "dataset": described}, num_replicas=num_replicas, rank=rank, accept=accept
        )
        # Not torch's constructor: it demands a dataset, and computes counts that the step rule computes here.
        self.dataset = dataset  # type: ignore[assignment]  # torch wants a Dataset, we also take a length
        topology = self.tracker.topology
        self.num_replicas, self.rank = topology.num_replicas, topology.rank
        self.tracker.num_replicas, self.tracker.rank = topology.num_replicas, topology.rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.num_samples: int = self.tracker.plan_epoch(0).num_steps
        self.total_size: int = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return self.tracker.iterate(self._read)

    def _read(self, plan: EpochPlan, first_step: int) -> Iterator[int]:
        return cast(SampleEpochPlan, plan).samples(self.rank, first_step)

    def state_dict(self, *, num_samples: int | None = None) -> dict[str, Any]:
        """The state after the samples that the latest iterator has yielded.

        Args:
            num_samples: Samples of this rank that the present pass has trained on, if workers have fetched more.

        Raises:
            ConfigurationError: ``num_samples`` is more than the pass has.
        """
        return self.tracker.state_after(num_samples)
