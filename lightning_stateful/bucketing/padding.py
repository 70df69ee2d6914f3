"""Measures batches of like lengths: their padding, their use of the budget, and the time ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.bucketing.order import BucketEpochPlan
from lightning_stateful.core.permutation import Indices

# Samples looked at at once.
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPadding:
    """The measures of batches, by step and rank.

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
        pairs, inverse = np.unique(np.stack([self.longest.ravel(), self.counts.ravel()]), axis=1, return_inverse=True)
        used = np.array([budget.use(longest, count) for longest, count in pairs.T.tolist()])
        return used[inverse.ravel()].reshape(self.counts.shape)

    def where(self, steps: NDArray[np.bool_]) -> StepPadding:
        """The measures of the chosen steps; a mask of shape ``(steps,)``."""
        return StepPadding(longest=self.longest[steps], counts=self.counts[steps], tokens=self.tokens[steps])


def measure(plan: BucketEpochPlan, first: int = 0, last: int | None = None) -> StepPadding:
    """Measure steps of an epoch on all its ranks, without reading any sample.

    Args:
        plan: An epoch, or the rest of one.
        first: The first step, counted from the plan's beginning.
        last: The step behind the last; by default that behind the plan's.
    """
    stop, lengths = plan.num_steps if last is None else last, plan.order.lengths
    shape = (stop - first, plan.num_replicas)
    longest, counts, tokens = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    size = max(_CHUNK * plan.num_steps // max(len(lengths), 1), 1)
    for start in range(first, stop, size):
        end = min(start + size, stop)
        rows = slice(start - first, end - first)
        for rank in range(plan.num_replicas):
            indices, sizes = plan.read(rank, start, end)
            of_sample = lengths[indices].astype(np.int64)
            begins = np.cumsum(sizes) - sizes
            longest[rows, rank] = np.maximum.reduceat(of_sample, begins)
            tokens[rows, rank] = np.add.reduceat(of_sample, begins)
            counts[rows, rank] = sizes
    return StepPadding(longest=longest, counts=counts, tokens=tokens)
