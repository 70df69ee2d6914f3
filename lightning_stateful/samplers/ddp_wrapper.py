"""Any sampler or batch sampler, dealt out to ranks and with a state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.position import Position
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.items import knows_how_to_split
from lightning_stateful.samplers.rng import seed_or_default
from lightning_stateful.samplers.sampler_plan import SamplerCut, SamplerPlan, Tail
from lightning_stateful.samplers.user_sampler import Length, UserSampler
from lightning_stateful.samplers.world import detect_topology
from lightning_stateful.state import accepted_names


class DDPSamplerWrapper(DistributedSampler[Any]):
    """Deals what any sampler or batch sampler yields out to the ranks, in turn, from any position.

    All ranks see one and the same sequence: the wrapped sampler runs under randomness seeded from (seed, epoch), is
    told the epoch where it has ``set_epoch``, and believes that there is one rank. Every rank gets the same number
    of items. Nothing but a few thousand items ahead is held in memory, so a sampler may be endless.

    The end of a pass moves on to the next epoch; :meth:`set_epoch` chooses one, and keeps a loaded position within
    the same epoch. A loader that is given the wrapper as ``sampler`` or ``batch_sampler`` can be handed to
    ``patch_dataloader`` or to Lightning with the callback: its wrapped sampler is then dealt out batch by batch.

    Args:
        sampler: Any iterable that yields an epoch of indices, or of batches of them, whenever it is iterated.
        num_replicas: Number of ranks; by default that of the process group at the first item, or 1.
        rank: This rank; by default that of the process group, or 0.
        tail: What becomes of the last items of an epoch, fewer than ranks. ``"split"``: batches are split over the
            ranks sample by sample, so that every sample comes once (single samples, of which there are fewer than
            ranks, are served twice); ``"pad"``: some items are served twice; ``"drop"``: they are left out.
        shuffle_samples_between_gpus: Let the items of a step go to ranks in a random order, which changes from step
            to step.
        length: Items that the sampler yields in an epoch: ``"len"`` for its own ``len()`` if it has one,
            ``"unknown"`` to find out where it ends, or a number after which an epoch is cut off.
        seed: Chooses the sampler's randomness; by default the loader's seed, or that of Lightning's
            ``seed_everything``, or 0.
        accept: Names of differences between a state and this configuration to let pass on load;
            ``"nondeterministic"`` lets pass a sampler that yields something else every time.

    State:
        The position after the items that the latest iterator has yielded. A sampler with ``state_dict`` and
        ``load_state_dict`` is brought there by its own words, another one is wound forward by its indices.
        DataLoader workers fetch ahead of training; give :meth:`state_dict` the number of items that this rank was
        trained on to leave those out, or let a ``StatefulLoader`` do it.

    Raises:
        ConfigurationError: An argument is out of range, or the sampler cannot be iterated.
    """

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
        if num_replicas is not None or rank is not None:
            detect_topology(num_replicas, rank)
        # Wrapping twice is wrapping once; what is left at its default stays as the first wrapper has it.
        if isinstance(sampler, DDPSamplerWrapper):
            first: DDPSamplerWrapper = sampler
            tail = first.tail if tail == "split" else tail
            shuffle_samples_between_gpus = shuffle_samples_between_gpus or first.shuffle_samples_between_gpus
            length = first.length if length == "len" else length
            seed, accept = first.seed_given if seed is None else seed, (*accepted_names(accept), *first.accept)
            sampler = first.sampler
        # Not torch's constructor: it wants a dataset, and to know the ranks now.
        self.sampler: Any = sampler
        self.num_replicas, self.rank = num_replicas, rank  # type: ignore[assignment]  # None until there are ranks
        self.tail: Tail = tail
        self.shuffle_samples_between_gpus: bool = shuffle_samples_between_gpus
        self.length: Length = length
        self.seed_given: int | None = None if seed is None else as_int("seed", seed)
        self.seed: int = seed_or_default(seed)
        self.accept: tuple[str, ...] = accepted_names(accept)
        source = UserSampler(sampler, seed=self.seed, length=length, accept=self.accept)
        source.whole_batches = _yields_batches(source)
        self._cursor = Cursor(source, self._cut(source).describe())
        # Where the pass began that was iterated latest, what it has yielded, and which iterator that was.
        self._began: Position | None = None
        self._yielded = 0
        self._latest: object = None

    def _cut(self, source: UserSampler) -> SamplerCut:
        return SamplerCut(
            order=source,
            tail=self.tail,
            shuffles=self.shuffle_samples_between_gpus,
            num_replicas=self.num_replicas,
            rank=self.rank,
        )

    @property
    def source(self) -> UserSampler:
        """The wrapped sampler as one sequence for all ranks."""
        source: Any = self._cursor.order
        return source  # type: ignore[no-any-return]  # always that

    @property
    def plan(self) -> SamplerPlan:
        """The share of this rank, as a function of a position."""
        return self._cut(self.source).plan()

    @property
    def position(self) -> Position:
        """Where the model stands that was trained on all items yielded."""
        return self._after(self._yielded)

    @property
    def epoch(self) -> int:  # type: ignore[override]  # torch keeps it in an attribute
        """The epoch that the next item belongs to."""
        return self.position.epoch

    def __len__(self) -> int:
        """Items of this rank in a whole epoch.

        Raises:
            TypeError: The sampler does not know its length.
        """
        if not self.source.is_sized:
            raise TypeError(f"{self.source.name} has no len().")
        return self.plan.num_batches()

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing here runs before the first next(), so a state may be loaded after iter().
        latest = self._latest = object()
        plan = self.plan
        began = self._began = self._here(plan)
        self._yielded = 0
        source, total = self.source, plan.num_batches(began)
        items = plan.indices(began) if source.whole_batches else _single(plan, began)
        for done, item in enumerate(items, 1):
            if self._latest is latest:
                self._yielded = done
                if done == total or (not source.is_sized and plan.is_over(plan.after(began, done))):
                    self._cursor.position = plan.begin(began.epoch + 1)
            yield item
        if self._latest is latest and not self._yielded:
            # An epoch without items is over as well.
            self._cursor.position = plan.begin(began.epoch + 1)

    def _here(self, plan: SamplerPlan) -> Position:
        held = self._cursor.position
        return plan.begin(held.epoch + 1) if held.consumed and plan.is_over(held) else held

    def _after(self, num_items: int) -> Position:
        plan = self.plan
        began = self._here(plan) if self._began is None else self._began
        if not 0 <= num_items <= plan.num_batches(began):
            raise ConfigurationError(
                f"num_items must be from 0 to {plan.num_batches(began)}, the length of this pass, got {num_items}."
            )
        after = plan.after(began, num_items)
        return plan.begin(began.epoch + 1) if num_items and plan.is_over(after) else after

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; a position within that same epoch is kept."""
        epoch = as_int("epoch", epoch)
        if epoch != self._cursor.position.epoch:
            self._move(self.plan.begin(epoch))

    def state_dict(self, *, num_items: int | None = None) -> dict[str, Any]:
        """The state after what the latest iterator has yielded.

        Args:
            num_items: Items of this rank that the present pass has trained on, if workers have fetched more.

        Raises:
            ConfigurationError: ``num_items`` is more than the pass has.
        """
        return self._cursor.state_dict(self._after(self._yielded if num_items is None else num_items))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on any number of ranks.

        Raises:
            StateError: The state is damaged, from a future version, or of another configuration. That the sampler
                yields another sequence now is found, and refused, at the first item.
        """
        self._move(self._cursor.read(state_dict, accept=self.accept, where="The sampler's state"))

    def position_report(self) -> dict[str, Any]:
        """Epoch, what has been served of it, and how the sampler is brought to a place; equal on all ranks."""
        position = self.position
        return {"epoch": position.epoch, **self.source.report(position)}

    def _move(self, position: Position) -> None:
        self._cursor.position = position
        self._began, self._yielded, self._latest = None, 0, None
        self.source.live = None


def _single(plan: SamplerPlan, began: Position) -> Iterator[Any]:
    return (batch[0] for batch in plan.indices(began))


def _yields_batches(source: UserSampler) -> bool:
    if source.is_known:
        return isinstance(source.sampler, BatchSampler)
    first = source.examine().first
    if isinstance(first, (np.ndarray, torch.Tensor)):
        return first.ndim > 0
    # A tuple names a sample, of a dataset of several, say.
    listed = isinstance(first, Sequence) and not isinstance(first, (str, bytes, tuple))
    return listed or knows_how_to_split(first)
