"""Steps through each source in the rest of an epoch, each with a batch for every rank, and the last steps of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_stateful.core.permutation import Indices
from lightning_stateful.core.steps import StepRule


def shares_of_steps(length: int, rule: StepRule, steps: Indices, rank: int) -> tuple[Indices, Indices]:
    """The samples of ``rank`` in each of many steps through ``length`` samples.

    Args:
        length: Samples that ``rule`` cuts into steps.
        rule: How they are cut.
        steps: Which steps, int64 of shape ``(n,)``.
        rank: Which rank.

    Returns:
        The first sample, and the number of consecutive ones; each of shape ``(n,)``.
    """
    starts = steps * rule.full + rank * rule.batch_size
    sizes = np.full(steps.shape, rule.batch_size, dtype=np.int64)
    # Only the last two steps may differ from the others.
    for number in np.flatnonzero(steps >= rule.num_alike(length)).tolist():
        served = rule.served(length, int(steps[number]))
        share = rule.share(length - served, rank)
        starts[number], sizes[number] = served + share[0], share.size
    return starts, sizes


class SourceSteps:
    """Cuts what the rest of an epoch takes of one source into steps in which every rank has a batch of it.

    Every such step has at least one sample for each rank. What is left after them is gathered with what is left of
    other sources: fewer samples than ranks or, where incomplete batches are dropped, full batches for fewer than all.

    Args:
        served: Samples that were served of it before.
        remaining: Samples that the epoch has yet to serve.
        rule: How they are cut.

    Attributes:
        num_steps: Steps.
        left: Samples that are left after them.
    """

    def __init__(self, served: int, remaining: int, rule: StepRule) -> None:
        self._served, self._remaining, self._rule = served, remaining, rule
        self.num_steps = rule.num_steps(remaining) - (rule.num_repeated(remaining) > 0)
        self._in_steps = rule.served(remaining, self.num_steps) - rule.num_dropped(remaining)
        self.left = remaining - self._in_steps
        if rule.drop_last:
            self.left -= self.left % rule.batch_size

    def served_after(self, steps: int) -> int:
        """Samples served after ``steps`` more steps."""
        return self._served + min(self._rule.served(self._remaining, steps), self._in_steps)

    def shares(self, steps: Indices, rank: int) -> tuple[Indices, Indices]:
        """The samples of ``rank`` in each of ``steps``: the first one, and the number of consecutive ones."""
        starts, sizes = shares_of_steps(self._remaining, self._rule, steps, rank)
        return self._served + starts, sizes


class LastSteps(NamedTuple):
    """The last steps of an epoch, in which ranks serve different sources: what is left of each.

    Attributes:
        sources: The source of every batch, int64 of shape ``(steps, ranks)``.
        starts: Its first sample, counted from the first that is left of the source; of the same shape.
        sizes: Its number of samples; of the same shape.
        num_repeated: Batches of the last step that some rank serves a second time.
    """

    sources: Indices
    starts: Indices
    sizes: Indices
    num_repeated: int

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.sources)

    def served(self, steps: int, num_sources: int) -> Indices:
        """Samples of every source that the first ``steps`` steps serve; shape ``(num_sources,)``."""
        batches = min(steps * self.sources.shape[1], self.sources.size - self.num_repeated)
        sizes = self.sizes.ravel()[:batches]
        return np.bincount(self.sources.ravel()[:batches], sizes, minlength=num_sources).astype(np.int64)


def gather(left: Sequence[int], batch_sizes: Sequence[int], num_ranks: int, *, drop_last: bool = False) -> LastSteps:
    """Give every sample that is left to one rank, in as few steps as it takes, each with a batch for every rank.

    If there are too few samples for a batch for every rank of the last step, some are served twice there.

    Args:
        left: Samples of each source.
        batch_sizes: Samples that a batch of each source may have.
        num_ranks: Ranks of a step.
        drop_last: Only serve full batches, in full steps.
    """
    if drop_last:
        pieces = [count // size for count, size in zip(left, batch_sizes, strict=True)]
        num_steps = sum(pieces) // num_ranks
    else:
        pieces = [-(-count // size) for count, size in zip(left, batch_sizes, strict=True)]
        num_steps = -(-sum(pieces) // num_ranks)
        while sum(pieces) < min(num_steps * num_ranks, sum(left)):
            # The source with the largest batches is cut once more.
            pieces[max(range(len(pieces)), key=lambda source: left[source] / max(pieces[source], 1))] += 1
    sources = np.repeat(np.arange(len(pieces)), pieces)
    bounds = [
        np.arange(count + 1) * size if drop_last else np.arange(count + 1) * total // max(count, 1)
        for count, size, total in zip(pieces, batch_sizes, left, strict=True)
    ]
    starts = np.concatenate([bound[:-1] for bound in bounds])
    sizes = np.concatenate([np.diff(bound) for bound in bounds])
    # Where batches are too few, those of the last step come once more; where they are too many, the last are dropped.
    short = max(num_steps * num_ranks - sources.size, 0)
    in_last = num_ranks - short
    again = sources.size - in_last + np.arange(short) % max(in_last, 1)
    batches = np.concatenate([np.arange(num_steps * num_ranks - short), again]).astype(np.int64)
    order = batches.reshape(num_steps, num_ranks)
    return LastSteps(sources[order], starts[order], sizes[order], short)
