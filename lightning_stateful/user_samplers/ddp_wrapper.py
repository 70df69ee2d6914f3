"""Deals any sampler or batch sampler out to ranks, and resumes it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import EpochPlan
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.samplers.tracker import Tracked, Tracker, detect_topology
from lightning_stateful.state import accepted_names
from lightning_stateful.user_samplers.user_sampler import Length, Tail
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


class DDPSamplerWrapper(Tracked, DistributedSampler[Any]):
    """Deals what any sampler or batch sampler yields out to the ranks, in turn, from any progress.

    All ranks see one and the same sequence: in every epoch the sampler is iterated under randomness seeded from (seed,
    epoch); if it has ``set_epoch``, it is told the epoch. One that deals out to ranks by itself is left to it, unless
    it provably yields what all ranks yield together when it is told that there is one rank. Every rank gets the same
    number of items. No more than a step is drawn ahead, so a sampler may be endless.

    The end of a pass moves on to the next epoch; :meth:`set_epoch` chooses one, and keeps loaded progress within the
    same epoch. A loader that is given the wrapper as ``sampler`` or ``batch_sampler`` can be handed to
    ``patch_dataloader`` or to Lightning with the callback: its wrapped sampler is then dealt out batch by batch.

    Args:
        sampler: Any iterable that yields an epoch of indices, or of batches of them, whenever it is iterated.
        num_replicas: Number of ranks; by default taken from the process group at the first item, or 1.
        rank: This rank; by default taken from the process group, or 0.
        tail: How to treat the last items of an epoch when they are fewer than a step takes. ``"split"``: samples are
            split over the ranks as evenly as it goes, and what is fewer than the ranks is served twice, as whole
            batches are, which are never cut; ``"pad"``: a step is filled with items of its own; ``"drop"``: they are
            left out.
        shuffle_samples_between_gpus: Give the items of a step to ranks in a random order, which changes from step to
            step.
        length: The number of items that the sampler yields in an epoch: ``"len"`` for its own ``len()`` if it has one,
            ``"unknown"`` if only its end shows it, or a number after which an epoch is cut off.
        seed: Chooses the sampler's randomness; by default the loader's seed, or that of Lightning's
            ``seed_everything``, or 0.
        accept: Names of differences between a state and this configuration to let pass on load;
            ``"nondeterministic"`` lets pass a sampler that yields something else every time.

    State:
        The progress after the items that the latest iterator has yielded. A sampler with ``state_dict`` and
        ``load_state_dict`` is brought there by its own state, another one is fast-forwarded by its indices.
        DataLoader workers fetch ahead of training; give :meth:`state_dict` the number of items that this rank was
        trained on to leave those out, or let a ``StatefulLoader`` do it.

    Raises:
        ConfigurationError: An argument is out of range, or the sampler cannot be iterated.
    """

    num_replicas: int | None  # type: ignore[assignment]  # None until there are ranks
    rank: int | None  # type: ignore[assignment]  # see above

    def __init__(
        self,
        sampler: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        tail: Tail = "split",
        shuffle_samples_between_gpus: bool = False,
        length: Length = "len",
        seed: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        # Wrapping twice is wrapping once; arguments left at their default are those of the first wrapper.
        if isinstance(sampler, DDPSamplerWrapper):
            first: DDPSamplerWrapper = sampler
            tail = first.tail if tail == "split" else tail
            shuffle_samples_between_gpus = shuffle_samples_between_gpus or first.shuffle_samples_between_gpus
            length = first.length if length == "len" else length
            seed, accept = first.seed_given if seed is None else seed, (*accepted_names(accept), *first.accept)
            sampler = first.sampler
        # Not torch's constructor: it wants a dataset, and to know the ranks now.
        self.sampler: Any = sampler
        self.num_replicas, self.rank = num_replicas, rank
        self.tail: Tail = tail
        self.shuffle_samples_between_gpus: bool = shuffle_samples_between_gpus
        self.length: Length = length
        self.seed_given: int | None = None if seed is None else as_int("seed", seed)
        self.seed: int = seed_or_default(seed)
        order = WrappedSampler(
            sampler,
            seed=self.seed,
            length=length,
            shuffles=shuffle_samples_between_gpus,
            is_wrapped=True,
            accept=accept,
        )
        order = order.replaced(batch_size=None if _yields_batches(order) else 1, tail=tail)
        if (num_replicas, rank) != (None, None):
            ranks = detect_topology(num_replicas, rank)
            order.meet(ranks.num_replicas, ranks.rank)
        self.tracker: Tracker = Tracker(order, num_replicas=num_replicas, rank=rank, accept=accept)

    @property
    def order(self) -> WrappedSampler:
        """The wrapped sampler as one sequence for all ranks."""
        return cast(WrappedSampler, self.tracker.order)

    def __len__(self) -> int:
        """Items of this rank in a whole epoch.

        Raises:
            TypeError: The sampler does not know its length.
        """
        if not self.order.is_sized:
            raise TypeError(f"{self.order.name} has no len().")
        return self.tracker.plan_epoch(0).num_steps

    def __iter__(self) -> Iterator[Any]:
        return self.tracker.iterate(self._read)

    def _read(self, plan: EpochPlan, first_step: int) -> Iterator[Any]:
        batches = plan.batches(self.tracker.topology.rank, first_step)
        return (batch if self.order.whole_batches else batch[0] for _, batch in batches)

    def state_dict(self, *, num_items: int | None = None) -> dict[str, Any]:
        """The state after the items that the latest iterator has yielded.

        Args:
            num_items: Items of this rank that the present pass has trained on, if workers have fetched more.

        Raises:
            ConfigurationError: ``num_items`` is more than the pass has.
        """
        self.order.memory.note_state()
        return self.tracker.state_after(num_items)


def _yields_batches(order: WrappedSampler) -> bool:
    """Whether the sampler's items are batches and not single samples, judged by the first one."""
    if order.is_known:
        return isinstance(order.sampler, BatchSampler)
    first = order.facts.first
    if isinstance(first, (np.ndarray, torch.Tensor)):
        return first.ndim > 0
    if isinstance(first, (str, bytes)):
        return False
    # A tuple names a sample, of a dataset of several, say.
    is_listed = isinstance(first, Sequence) and not isinstance(first, tuple)
    # Objects that can be joined with others and split are batches too, such as lhotse's.
    return is_listed or all(hasattr(type(first), name) for name in ("__add__", "__len__", "split"))
