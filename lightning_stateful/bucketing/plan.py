"""Cuts samples in buckets into steps, and finds the samples that are left after some of these steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_stateful.core.permutation import Indices, bounds_of, concatenated_ranges, keyed_permutation


class StepRanges(NamedTuple):
    """Steps as ranges of offsets into the samples left, which are sorted from the longest bucket to the shortest.

    Attributes:
        starts: The first offset of each step; int64 of shape ``(steps,)``.
        stops: The offset behind the last one of each step; of the same shape.
    """

    starts: Indices
    stops: Indices


class BucketSteps:
    """Cuts samples, sorted from the longest bucket to the shortest, into steps.

    A step takes as many samples as the bucket of its first one allows to every rank. Where that bucket has too few
    left, the next shorter one fills the step up: so every step is full but the last, and no batch exceeds the budget of
    its longest sample. There is no way to do with fewer steps; and whatever is taken away, what is left never takes
    more steps than the whole.

    If the last step would have fewer samples than ranks, the step before gives it some of its own.

    Args:
        counts: Samples left of each bucket, the longest bucket first; int64 of shape ``(buckets,)``.
        sizes: Samples of a full batch of each bucket, never falling.
        num_replicas: Number of ranks.
        drop_last: Leave out the last step if it is not full.

    Attributes:
        num_steps: Number of steps.
        num_full: Number of full steps: all but a short last one, and but the one before if it gave some samples away.
        num_repeated: Samples of the last step that are served a second time, because there are fewer than ranks and the
            step before has none to give.
    """

    def __init__(self, counts: Indices, sizes: tuple[int, ...], num_replicas: int, *, drop_last: bool = False) -> None:
        self.num_replicas = num_replicas
        starts, first_steps, step_sizes, start, steps = [], [], [], 0, 0
        for end, size in zip(np.cumsum(counts).tolist(), sizes, strict=True):
            if start < end:
                number = -(-(end - start) // (size * num_replicas))
                starts.append(start)
                first_steps.append(steps)
                step_sizes.append(size * num_replicas)
                start += number * size * num_replicas
                steps += number
        self._starts = np.array(starts, dtype=np.int64)
        self._first_steps = np.array(first_steps, dtype=np.int64)
        self._sizes = np.array(step_sizes, dtype=np.int64)
        self._total = int(counts.sum())
        short = start > self._total
        left = self._total - (start - step_sizes[-1]) if short else 0
        lacks = num_replicas - left if short and left < num_replicas and not drop_last else 0
        # Batches of one sample have none to give.
        can_give = steps > 1 and self._size_at(steps - 2) >= 2 * num_replicas
        self._given = lacks if can_give else 0
        self.num_repeated = lacks - self._given
        self.num_steps = steps - (short and drop_last)
        self.num_full = steps - short - (self._given > 0)

    def ranges(self, numbers: Indices) -> StepRanges:
        """The ranges of some steps, given by their numbers counted from the longest bucket on."""
        runs = np.searchsorted(self._first_steps, numbers, side="right") - 1
        starts = self._starts[runs] + (numbers - self._first_steps[runs]) * self._sizes[runs]
        stops = np.minimum(starts + self._sizes[runs], self._total)
        if self._given:
            stops[numbers == self.num_steps - 2] -= self._given
            starts[numbers == self.num_steps - 1] -= self._given
        return StepRanges(starts, stops)

    def share(self, steps: StepRanges, rank: int) -> tuple[Indices, Indices]:
        """The samples of one rank in some steps.

        Samples are dealt out in turn, so that each rank gets its part of the longest. In a step of fewer samples than
        ranks, some ranks have the same sample.

        Returns:
            The offsets of all steps one after the other, and their number in each step.
        """
        sizes = steps.stops - steps.starts
        first = rank % np.minimum(sizes, self.num_replicas)
        counts = (sizes - first + self.num_replicas - 1) // self.num_replicas
        return concatenated_ranges(steps.starts + first, counts, self.num_replicas), counts

    def _size_at(self, step: int) -> int:
        return int(self._sizes[np.searchsorted(self._first_steps, step, side="right") - 1])


@dataclass(frozen=True, slots=True, eq=False)
class Remainder:
    """The part of ``range(n)`` that is left after ranges were removed: consecutive runs, with random access.

    Attributes:
        firsts: The first element of each run, rising; int64 of shape ``(runs,)``.
        bounds: The number of elements before each run and, last, of all; of shape ``(runs + 1,)``.
    """

    firsts: Indices
    bounds: Indices

    @classmethod
    def whole(cls, length: int) -> Remainder:
        """All of ``range(length)``."""
        return cls(np.zeros(1, dtype=np.int64), np.array([0, length], dtype=np.int64))

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def take(self, offsets: Indices) -> Indices:
        """Look up elements: offsets among those left, int64 ``(n,)`` -> elements ``(n,)``."""
        if len(self.firsts) == 1:
            return offsets + int(self.firsts[0])
        run = np.searchsorted(self.bounds, offsets, side="right") - 1
        result: Indices = self.firsts[run] + offsets - self.bounds[run]
        return result

    def num_below(self, limits: Indices) -> Indices:
        """The number of elements below each of ``limits``; int64 of the same shape."""
        if not len(self):
            return np.zeros_like(limits)
        run = np.maximum(np.searchsorted(self.firsts, limits, side="left") - 1, 0)
        within = np.clip(limits - self.firsts[run], 0, np.diff(self.bounds)[run])
        result: Indices = self.bounds[run] + within
        return result

    def without(self, taken: StepRanges) -> Remainder:
        """Remove ranges of offsets, which must not overlap."""
        order = np.argsort(taken.starts)
        left_from = np.concatenate([[0], taken.stops[order]])
        left_to = np.concatenate([taken.starts[order], [len(self)]])
        # Cut what is left at the ends of the runs: each piece then lies in one of them.
        cuts = np.unique(np.concatenate([left_from, left_to, self.bounds]))
        pieces = cuts[:-1]
        gap = np.searchsorted(left_from, pieces, side="right") - 1
        kept = pieces < left_to[gap]
        return Remainder(self.take(pieces[kept]), bounds_of(np.diff(cuts)[kept]))


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The rest of an epoch, cut into steps for one number of ranks.

    Attributes:
        left: The samples that were left when it began, as offsets into the buckets.
        steps: The steps that these are cut into.
        key: Chooses the order of the full steps; None for the longest bucket first.
    """

    left: Remainder
    steps: BucketSteps
    key: int | None

    def ranges(self, first: int, last: int) -> StepRanges:
        """The ranges of the steps ``first <= step < last``, in the order of serving; those not full stay last."""
        numbers = np.arange(first, last)
        if self.key is not None:
            full = numbers[: max(self.steps.num_full - first, 0)]
            shuffled = keyed_permutation(self.steps.num_full, self.key).take(full)
            numbers = np.concatenate([shuffled, numbers[full.size :]])
        return self.steps.ranges(numbers)

    def share(self, first: int, last: int, rank: int) -> tuple[Indices, Indices]:
        """The samples of one rank in the steps ``first <= step < last``, as offsets into the buckets.

        Returns:
            The offsets of all steps one after the other, and their number in each step.
        """
        offsets, sizes = self.steps.share(self.ranges(first, last), rank)
        return self.left.take(offsets), sizes

    def left_after(self, steps: int) -> Remainder:
        """The samples that are left after the first ``steps`` steps."""
        return self.left.without(self.ranges(0, steps))

    def num_samples(self, steps: int) -> int:
        """Samples of the first ``steps`` steps, each counted once."""
        starts, stops = self.ranges(0, steps)
        return int((stops - starts).sum())
