"""A drop-in for torch's DistributedSampler that knows where it stands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.orders import Order, SequentialOrder, ShuffledOrder
from lightning_stateful.index.position import Position
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.identity import describe_dataset
from lightning_stateful.samplers.randomness import seed_or_default
from lightning_stateful.samplers.world import detect_topology
from lightning_stateful.state import accepted_names

_BLOCK = 4096


class StatefulDistributedSampler(DistributedSampler[Any]):
    """Deals an epoch out over the ranks, one sample a rank in turn, from any position.

    Every rank gets the same number of samples. If the last round has fewer samples than ranks, some of them are given
    out twice, or none of them with ``drop_last=True``. Shuffling is a keyed permutation, so an epoch starts, and
    resumes, in constant time and memory.

    The end of a pass moves on to the next epoch; :meth:`set_epoch` chooses one, and keeps a loaded position within
    the same epoch. An iterator that is abandoned leaves the beginning of its pass where it was.

    Args:
        dataset: The dataset, or its length.
        num_replicas: Number of ranks; by default that of the process group, or 1.
        rank: This rank; by default that of the process group, or 0.
        shuffle: Whether each epoch has an order of its own.
        seed: Chooses the orders; by default that of Lightning's ``seed_everything``, or 0.
        drop_last: Drop the last incomplete round in place of filling it.
        accept: Names of differences between a state and this configuration to let pass on load.

    State:
        The position after the samples that the latest iterator has yielded. DataLoader workers fetch ahead of
        training; give :meth:`state_dict` the number of samples that this rank was trained on to leave those out.

    Raises:
        ConfigurationError: An argument is out of range.
    """

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
        topology = detect_topology(num_replicas, rank)
        seed = seed_or_default(seed)
        if isinstance(dataset, Sized):
            length, described = len(dataset), describe_dataset(dataset)
        else:
            length = as_int("dataset", dataset)
            described = {"length": length}
        order: Order = ShuffledOrder(length, seed) if shuffle else SequentialOrder(length)
        # Not torch's constructor: it demands a dataset, and computes counts that the step rule computes here.
        self.dataset = dataset  # type: ignore[assignment]  # torch wants a Dataset, we also take a length
        self.num_replicas, self.rank = topology.num_replicas, topology.rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._accept = accepted_names(accept)
        self._rule = StepRule(batch_size=1, num_replicas=self.num_replicas, drop_last=drop_last)
        self.num_samples = self._rule.num_steps(length)
        self.total_size = self.num_samples * self.num_replicas
        self._order = order
        self._cursor = Cursor(order, {"drop_last": drop_last, "dataset": described})
        self._cursor.position = Position(width=self.num_replicas)
        # Where the counted pass began, and where the latest one did that was iterated, which workers may have drained.
        self._began = self._pass = self._cursor.position
        self._yielded = 0
        self._latest: object = None

    @property
    def epoch(self) -> int:  # type: ignore[override]  # torch keeps it in an attribute
        """The epoch that the next pass belongs to."""
        return self._cursor.position.epoch

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        # A generator: nothing here runs before the first next(), so a state may be loaded after iter().
        began = self._began = self._pass = self._cursor.position
        latest = self._latest = object()
        self._yielded = 0
        rounds = self._rounds(began)
        if not rounds and began.consumed:
            # With drop_last nothing may be left on another number of ranks.
            self._cursor.position = self._next_epoch(began)
        for start in range(0, rounds, _BLOCK):
            for done, index in enumerate(self._indices(began, start, min(start + _BLOCK, rounds)), start + 1):
                if self._latest is latest:
                    self._yielded = done
                    if done == rounds:
                        self._cursor.position = self._next_epoch(began)
                yield index

    def _rounds(self, began: Position) -> int:
        return self._rule.num_steps(len(self._order) - began.consumed)

    def _next_epoch(self, began: Position) -> Position:
        return Position(epoch=began.epoch + 1, width=self.num_replicas)

    def _indices(self, began: Position, start: int, stop: int) -> list[int]:
        order = self._order
        slots = began.consumed + np.arange(start, stop, dtype=np.int64) * self.num_replicas
        last = int(self._rule.share(len(order) - int(slots[-1]), self.rank)[0])
        slots += self.rank
        slots[-1] += last - self.rank
        indices: list[int] = order.take(slots, began.epoch).tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; a position within that same epoch is kept."""
        epoch = as_int("epoch", epoch)
        if epoch != self._cursor.position.epoch:
            iterated = self._pass
            self._move(Position(epoch=epoch, width=self.num_replicas))
            if iterated.epoch == epoch:
                self._pass = iterated

    def state_dict(self, *, num_samples: int | None = None) -> dict[str, Any]:
        """The state after what the latest iterator has yielded.

        Args:
            num_samples: Samples of this rank that the present pass has trained on, if workers have fetched more.

        Raises:
            ConfigurationError: ``num_samples`` is more than the pass has.
        """
        began = self._began if num_samples is None else self._pass
        rounds = self._rounds(began)
        done = self._yielded if num_samples is None else num_samples
        if not 0 <= done <= rounds:
            raise ConfigurationError(f"num_samples must be from 0 to {rounds}, the length of this pass, got {done}.")
        if done and done == rounds:
            return self._cursor.state_dict(self._next_epoch(began))
        served = self._rule.served(len(self._order) - began.consumed, done)
        return self._cursor.state_dict(replace(began, consumed=began.consumed + served))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on any number of ranks.

        Raises:
            StateError: The state is damaged, from a future version, or of another configuration.
        """
        self._move(self._cursor.read(state_dict, accept=self._accept, where="The sampler's state"))

    def _move(self, position: Position) -> None:
        self._cursor.position = self._began = self._pass = position
        self._yielded = 0
        self._latest = None
