"""Positions and steps of one rank, for any sequence of slots that the step rule cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.steps import StepRule
from lightning_stateful.index.position import Position

# Slots of an epoch of which the end is not known before it is there.
ENDLESS = 2**62


class StepPlan(ABC):
    """Where steps begin and end, from the number of slots of an epoch.

    Attributes:
        rule: How steps are cut.
        rank: Whose share.
    """

    __slots__ = ()
    rule: StepRule
    rank: int

    @abstractmethod
    def num_slots(self) -> int:
        """Slots of a whole epoch."""

    @property
    def num_replicas(self) -> int:
        """Data-parallel ranks."""
        return self.rule.num_replicas

    def begin(self, epoch: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``, whatever the run held before."""
        return Position(epoch=epoch, width=self.num_replicas)

    def end(self, position: Position) -> Position:
        """The end of the position's epoch."""
        return replace(position, consumed=self.num_slots())

    def in_first_pass(self, position: Position) -> bool:
        """Whether a position lies before the end of the epoch, and in no later pass within it."""
        return position.consumed < self.num_slots()

    def pass_after(self, position: Position, passes: int) -> Position:
        """The beginning of a later pass within the epoch, ``passes`` after the one that ``position`` lies in."""
        length = self.num_slots()
        return replace(position, consumed=(position.consumed // length + passes) * length, carried="")

    def remaining(self, position: Position) -> int:
        """Slots left in the epoch, or in the pass within the epoch that a cyclic position lies in."""
        length = self.num_slots()
        return length - position.consumed % length if length else 0

    def num_batches(self, position: Position | None = None) -> int:
        """Batches from ``position`` (by default: a whole epoch) to the end of the pass."""
        return self.rule.num_steps(self.num_slots() if position is None else self.remaining(position))

    def after(self, position: Position, steps: int) -> Position:
        """The position within the same epoch after ``steps`` more steps of this pass."""
        served = self.rule.served(self.remaining(position), steps)
        return replace(position, consumed=position.consumed + served)

    def num_shared(self) -> int:
        """Slots that this rank is given in a whole epoch."""
        length = self.num_slots()
        plain = self.num_plain(length)
        tail = sum(share.size for share in self.last_shares(length - plain * self.rule.full))
        return plain * self.rule.batch_size + tail

    def num_plain(self, remaining: int) -> int:
        """Steps that are full and alike: all but the last two."""
        return max(remaining // self.rule.full - 1, 0)

    def last_shares(self, remaining: int) -> Iterator[Indices]:
        """The last steps one by one: offsets from the first of ``remaining`` slots."""
        done = 0
        while self.rule.num_steps(remaining - done):
            yield done + self.rule.share(remaining - done, self.rank)
            done += self.rule.step_size(remaining - done)
