"""The last steps of an epoch: samples of several sources, too few of each for one a rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_stateful.core.ranges import Indices


class Leftovers(NamedTuple):
    """Batches of one source each, dealt out to ranks step by step.

    Attributes:
        sources: The source of every batch, int64 of shape ``(steps, ranks)``.
        starts: Its first sample, counted from the source's first leftover; of the same shape.
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
        cells = min(steps * self.sources.shape[1], self.sources.size - self.num_repeated)
        weights = self.sizes.ravel()[:cells]
        return np.bincount(self.sources.ravel()[:cells], weights, minlength=num_sources).astype(np.int64)


def deal_out(counts: list[int], batch_sizes: list[int], num_ranks: int, *, drop_last: bool = False) -> Leftovers:
    """Give every sample to one rank, a batch from one source to every rank in every step, in as few steps as it goes.

    If the number of samples does not allow a batch for every rank of the last step, some are served twice there.

    Args:
        counts: Samples of each source.
        batch_sizes: Samples that a batch of each source may have.
        num_ranks: Ranks of a step.
        drop_last: Only serve full batches, in full steps.
    """
    if drop_last:
        return _full_batches(counts, batch_sizes, num_ranks)
    total = sum(counts)
    pieces = [-(-count // size) for count, size in zip(counts, batch_sizes, strict=True)]
    num_steps = -(-sum(pieces) // num_ranks)
    while sum(pieces) < min(num_steps * num_ranks, total):
        # The source with the largest batches is cut once more.
        largest = max(range(len(pieces)), key=lambda source: counts[source] / max(pieces[source], 1))
        pieces[largest] += 1
    sources = np.repeat(np.arange(len(pieces)), pieces)
    ends = [np.arange(1, count + 1) * of // max(count, 1) for count, of in zip(pieces, counts, strict=True)]
    starts = np.concatenate([np.concatenate([[0], end[:-1]]) if end.size else end for end in ends]).astype(np.int64)
    sizes = (np.concatenate(ends) if ends else starts).astype(np.int64) - starts
    short = num_steps * num_ranks - sources.size
    in_last = num_ranks - short
    again = sources.size - in_last + np.arange(short) % max(in_last, 1)
    order = np.concatenate([np.arange(sources.size), again]).astype(np.int64).reshape(num_steps, num_ranks)
    return Leftovers(sources[order], starts[order], sizes[order], short)


def _full_batches(counts: list[int], batch_sizes: list[int], num_ranks: int) -> Leftovers:
    pieces = [count // size for count, size in zip(counts, batch_sizes, strict=True)]
    num_steps = sum(pieces) // num_ranks
    sources = np.repeat(np.arange(len(pieces)), pieces)[: num_steps * num_ranks]
    numbers = np.concatenate([np.arange(count) for count in pieces])[: num_steps * num_ranks]
    sizes = np.array(batch_sizes, dtype=np.int64)[sources]
    shape = (num_steps, num_ranks)
    return Leftovers(sources.reshape(shape), (numbers * sizes).reshape(shape), sizes.reshape(shape), 0)
