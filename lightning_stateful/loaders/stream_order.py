"""A stream's batches as an order and a plan of steps: all that is known is their number, if at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_stateful.core.steps import StepRule
from lightning_stateful.index.position import Position
from lightning_stateful.index.step_plan import ENDLESS, StepPlan


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """Batches of a stream, in the order in which they come.

    Attributes:
        name: What people know the stream by.
        config: What its batches follow from.
        num_steps: Steps of an epoch; :data:`ENDLESS` if they are known only at its end.
    """

    name: str
    config: dict[str, Any] = field(hash=False)
    num_steps: int = ENDLESS
    kind: ClassVar[str] = "stream"
    order_version: ClassVar[int] = 1

    def __len__(self) -> int:
        return self.num_steps

    def take(self, slots: Any, epoch: int) -> Any:
        """The batches by number: nothing else is known of them."""
        return slots

    def describe(self) -> dict[str, Any]:
        """What the batches follow from."""
        return self.config


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan(StepPlan):
    """Counts steps; a rank is given what its own lanes read.

    Attributes:
        rule: One batch a step.
        rank: 0: there is one sequence for each rank.
        width: Data-parallel ranks.
        num_steps: Steps of an epoch; :data:`ENDLESS` if they are known only at its end.
    """

    rule: StepRule = field(default_factory=lambda: StepRule(batch_size=1))
    rank: int = 0
    width: int = 1
    num_steps: int = ENDLESS

    def num_slots(self) -> int:
        """Steps of an epoch, or more than there will be."""
        return self.num_steps

    def begin(self, epoch: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``."""
        return Position(epoch=epoch, width=self.width)

    def is_over(self, position: Position) -> bool:
        """Whether all steps are known to be done."""
        return position.consumed >= self.num_steps

    def repeats(self) -> list[str]:
        """Nothing that is known."""
        return []
