"""The steps of an epoch over buckets, from what is left of it, for one number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_stateful.core.ranges import Indices, concatenated_ranges


class Steps(NamedTuple):
    """Steps as ranges of the samples left, sorted from the longest bucket to the shortest.

    Attributes:
        starts: The first place of each; int64 of shape ``(steps,)``.
        stops: The place behind its last; of the same shape.
    """

    starts: Indices
    stops: Indices


class BucketCourse:
    """Cuts samples, sorted from the longest bucket to the shortest, into steps.

    A step takes as many samples as the bucket of its first one allows to every rank. Where that bucket has too few
    left, the next shorter one fills the step up: so every step is full but the last, and no batch exceeds the budget of
    its longest sample. There is no way to do with fewer steps; and whatever is taken away, what is left never takes
    more steps than the whole.

    Where the last step would have fewer samples than ranks, the step before gives it some of its own.

    Args:
        counts: Samples left of each bucket, the longest bucket first; int64 of shape ``(buckets,)``.
        sizes: Samples of a full batch of each bucket, never falling.
        width: Number of ranks.
        drop_last: Leave out the last step if it is not full.

    Attributes:
        num_steps: Steps.
        num_full: Those before the last, which may not be full, and before one that gave to it.
        num_repeated: Samples of the last step that are served a second time, where there are fewer than ranks and no
            step before could give any.
    """

    def __init__(self, counts: Indices, sizes: tuple[int, ...], width: int, *, drop_last: bool = False) -> None:
        self.width = width
        starts, first_steps, step_sizes, start, steps = [], [], [], 0, 0
        for end, size in zip(np.cumsum(counts).tolist(), sizes, strict=True):
            if start < end:
                number = -(-(end - start) // (size * width))
                starts.append(start)
                first_steps.append(steps)
                step_sizes.append(size * width)
                start += number * size * width
                steps += number
        self._starts = np.array(starts, dtype=np.int64)
        self._first_steps = np.array(first_steps, dtype=np.int64)
        self._sizes = np.array(step_sizes, dtype=np.int64)
        self._total = int(counts.sum())
        short = start > self._total
        left = self._total - (start - step_sizes[-1]) if short else 0
        lacks = width - left if short and left < width and not drop_last else 0
        # Batches of one sample have none to give.
        can_give = steps > 1 and self._size_at(steps - 2) >= 2 * width
        self._given = lacks if can_give else 0
        self.num_repeated = lacks - self._given
        self.num_steps = steps - (short and drop_last)
        self.num_full = steps - short - (self._given > 0)

    def steps(self, numbers: Indices) -> Steps:
        """The steps ``numbers``, counted from the longest bucket on."""
        runs = np.searchsorted(self._first_steps, numbers, side="right") - 1
        starts = self._starts[runs] + (numbers - self._first_steps[runs]) * self._sizes[runs]
        stops = np.minimum(starts + self._sizes[runs], self._total)
        if self._given:
            stops[numbers == self.num_steps - 2] -= self._given
            starts[numbers == self.num_steps - 1] -= self._given
        return Steps(starts, stops)

    def share(self, steps: Steps, rank: int) -> tuple[Indices, Indices]:
        """The places of one rank in these steps, one after the other, and how many it has in each.

        Ranks take turns, so that each gets its part of the longest samples. In a step of fewer samples than ranks some
        take what others have, too.
        """
        sizes = steps.stops - steps.starts
        turns = rank % np.minimum(sizes, self.width)
        counts = (sizes - turns + self.width - 1) // self.width
        return concatenated_ranges(steps.starts + turns, counts, self.width), counts

    def _size_at(self, step: int) -> int:
        return int(self._sizes[np.searchsorted(self._first_steps, step, side="right") - 1])
