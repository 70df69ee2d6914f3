"""A batch sampler over a batch order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder, SlotPlan
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.world import detect_topology
from lightning_stateful.state import accepted_names


class StatefulBatchSampler(Sampler[list[int]]):
    """Deals the batches of an order out over the ranks, from any position.

    Every rank gets the same number of batches. The end of a pass moves on to the next epoch; :meth:`set_epoch` chooses
    one, and keeps a loaded position within the same epoch. An iterator that is abandoned leaves the beginning of its
    pass where it was.

    Args:
        order: The canonical sequence of batches.
        num_replicas: Number of ranks; by default that of the process group at the first batch, or 1.
        rank: This rank; by default that of the process group, or 0.
        accept: Names of differences between a state and this configuration to let pass on load.

    State:
        The position after the batches that the latest iterator has yielded. DataLoader workers fetch ahead of
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
        if num_replicas is not None or rank is not None:
            detect_topology(num_replicas, rank)
        self.order = order
        self.num_replicas, self.rank = num_replicas, rank
        self.accept = accepted_names(accept)
        self._cursor = Cursor(order, {})
        # Where the pass began that was iterated latest, what it has yielded, and which iterator that was.
        self._began: Position | None = None
        self._yielded = 0
        self._latest: object = None

    @property
    def plan(self) -> SlotPlan:
        """The batches of this rank, as a function of a position."""
        return SlotPlan(self.order, detect_topology(self.num_replicas, self.rank))

    @property
    def position(self) -> Position:
        """Where the model stands that was trained on all batches yielded."""
        return self._after(self._yielded)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.position.epoch

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self.plan.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: nothing here runs before the first next(), so a state may be loaded after iter().
        latest = self._latest = object()
        plan = self.plan
        began = self._began = self._here(plan)
        self._yielded = 0
        count = plan.num_batches(began)
        for done, batch in enumerate(plan.indices(began), start=1):
            if self._latest is latest:
                self._yielded = done
                if done == count:
                    self._cursor.position = plan.begin(began.epoch + 1, began)
            yield batch

    def _here(self, plan: SlotPlan) -> Position:
        held = self._cursor.position
        # Fewer ranks, or dropped tails, may have left nothing of the epoch that a state was taken in.
        return plan.begin(held.epoch + 1, held) if held.consumed and plan.is_over(held) else held

    def _after(self, num_batches: int) -> Position:
        plan = self.plan
        began = self._here(plan) if self._began is None else self._began
        count = plan.num_batches(began)
        if not 0 <= num_batches <= count:
            raise ConfigurationError(
                f"num_batches must be from 0 to {count}, the length of this pass, got {num_batches}."
            )
        return plan.begin(began.epoch + 1, began) if num_batches == count else plan.after(began, num_batches)

    def unshuffled(self) -> StatefulBatchSampler:
        """A fresh sampler of the same batches in the same order in every epoch."""
        return StatefulBatchSampler(
            self.order.unshuffled(), num_replicas=self.num_replicas, rank=self.rank, accept=self.accept
        )

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; a position within that same epoch is kept."""
        epoch = as_int("epoch", epoch)
        if epoch != self._cursor.position.epoch:
            self._move(self.plan.begin(epoch, self._cursor.position))

    def state_dict(self, *, num_batches: int | None = None) -> dict[str, Any]:
        """The state after what the latest iterator has yielded.

        Args:
            num_batches: Batches of this rank that the present pass has trained on, if workers have fetched more.

        Raises:
            ConfigurationError: ``num_batches`` is more than the pass has.
        """
        return self._cursor.state_dict(self._after(self._yielded if num_batches is None else num_batches))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on any number of ranks.

        Raises:
            StateError: The state is damaged, from a future version, or of another configuration.
        """
        self._move(self._cursor.read(state_dict, accept=self.accept, where="The sampler's state"))

    def position_report(self) -> dict[str, Any]:
        """Epoch, and what has been served of it or, in mixtures, of every source; equal on all ranks."""
        position = self.position
        return {"epoch": position.epoch, **self.order.report(position)}

    def _move(self, position: Position) -> None:
        self._cursor.position = position
        self._began, self._yielded, self._latest = None, 0, None
