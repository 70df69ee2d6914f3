"""How much of what batches hold is padding, how full their budgets are, and how ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.ranges import Indices
from lightning_stateful.index.budget import Budget
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import BatchOrder

# Samples looked at at once.
_CHUNK = 2**20


@runtime_checkable
class BudgetedOrder(BatchOrder, Protocol):
    """A batch order that knows how long its samples are and what a batch may hold."""

    @property
    def lengths(self) -> NDArray[Any]:
        """The length of every sample."""
        ...

    @property
    def budget(self) -> Budget:
        """What a batch may hold."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPadding:
    """Batches measured, step by step and rank by rank.

    Attributes:
        longest: The longest sample of each batch; int64 of shape ``(steps, ranks)``.
        counts: Its number of samples; of the same shape.
        tokens: The sum of their lengths; of the same shape.
    """

    longest: Indices
    counts: Indices
    tokens: Indices

    @property
    def padded(self) -> Indices:
        """Tokens of each batch, padding included; int64 of shape ``(steps, ranks)``."""
        return self.longest * self.counts

    def padding(self) -> float:
        """The share of all tokens that are padding."""
        total = int(self.padded.sum())
        return 1 - int(self.tokens.sum()) / total if total else 0.0

    def straggling(self) -> float:
        """The share of all ranks' time in which they wait for the longest batch of their step.

        One less the mean over the maximum of padded tokens in a step, each step weighing as much as it takes.
        """
        padded = self.padded
        waited = int(padded.max(axis=1, initial=0).sum())
        return 1 - float(padded.mean(axis=1).sum()) / waited if waited else 0.0

    def budget_use(self, budget: Budget) -> float:
        """The share of a batch's budget that is used, padding included, on average."""
        return float(self.uses(budget).mean()) if self.counts.size else 0.0

    def uses(self, budget: Budget) -> NDArray[np.float64]:
        """The share of the budget that each batch uses; of shape ``(steps, ranks)``."""
        pairs, place = np.unique(np.stack([self.longest.ravel(), self.counts.ravel()]), axis=1, return_inverse=True)
        used = np.array([budget.use(longest, count) for longest, count in pairs.T.tolist()])
        return used[place.ravel()].reshape(self.counts.shape)

    def where(self, steps: NDArray[np.bool_]) -> StepPadding:
        """Some of the steps."""
        return StepPadding(longest=self.longest[steps], counts=self.counts[steps], tokens=self.tokens[steps])


def measure(
    order: BatchOrder, lengths: NDArray[Any], position: Position, first: int = 0, last: int | None = None
) -> StepPadding:
    """Measure steps of an epoch on as many ranks as the position is wide.

    Args:
        order: Batches.
        lengths: The length of every sample.
        position: A position in the epoch.
        first: The first step, counted from the epoch's beginning.
        last: The step behind the last; by default that behind the epoch's.
    """
    stop = order.steps(position) if last is None else last
    shape = (stop - first, position.width)
    longest, counts, tokens = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    size = max(_CHUNK // order.work(position.width), 1)
    for start in range(first, stop, size):
        end = min(start + size, stop)
        rows = slice(start - first, end - first)
        for rank in range(position.width):
            found = order.batches(position, start, end, rank)
            of_sample = lengths[found.indices].astype(np.int64)
            begins = np.cumsum(found.sizes) - found.sizes
            longest[rows, rank] = np.maximum.reduceat(of_sample, begins)
            tokens[rows, rank] = np.add.reduceat(of_sample, begins)
            counts[rows, rank] = found.sizes
    return StepPadding(longest=longest, counts=counts, tokens=tokens)
