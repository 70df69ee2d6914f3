"""Which source serves draw number k: whole draws in periods, with random access and counts in closed form.

A draw is one step of a mixture by batch, or one sample of a mixture by sample. Within a period the draws of a source
stand evenly spread: its j-th of c at ``(2 j + 1) / (2 c)`` of the period. With a key, draws are shuffled within short
windows of that sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lightning_stateful.core.permutation import hashed_words
from lightning_stateful.core.ranges import Indices, concatenated_ranges
from lightning_stateful.mixture.weights import DrawSchedule

# Draws that are shuffled together: a period, or so many of a longer one, so that shares hold over short stretches too.
_LARGEST_WINDOW, _WINDOW = 256, 64

# A linear schedule goes from point to point in stages of at least so many draws, in at most so many stages, with
# periods of at most so many draws.
_SHORTEST_STAGE, _MOST_STAGES, _RAMP_PERIOD = 16, 1024, 512
# Successive multiples of the golden ratio's fraction fall evenly into any interval.
_GOLDEN = 0.6180339887498949

# More draws than are ever made, and few enough to be added.
_ENDLESS = 2**61


class Draws:
    """An endless sequence of sources: stages, one after the other, each of a period that is repeated.

    Args:
        counts: Draws of each source in a period of each stage; int64 of shape ``(stages, sources)``.
        starts: The first draw of each stage, the first 0; shape ``(stages,)``. But for the last, a stage has whole
            periods.
        key: Chooses the order within windows; None for the evenly spread one.
        start: The first draw that is made. What lies before belongs to no window.
        stop: The draw after the last one that is made.
    """

    def __init__(
        self, counts: Indices, starts: Indices, *, key: int | None = None, start: int = 0, stop: int = _ENDLESS
    ) -> None:
        self.counts, self.key, self.start, self.stop = counts, key, start, stop
        self._periods = counts.sum(axis=1)
        self._starts = np.append(starts, _ENDLESS)
        repeats = np.diff(starts) // self._periods[:-1]
        zero = np.zeros((1, counts.shape[1]), dtype=np.int64)
        # Draws of every source before each stage.
        self._before = np.concatenate([zero, np.cumsum(counts[:-1] * repeats[:, None], axis=0)])

    @classmethod
    def repeated(cls, counts: Sequence[int], *, key: int | None = None, start: int = 0, stop: int = _ENDLESS) -> Draws:
        """One period, over and over."""
        return cls(np.array([counts], dtype=np.int64), np.zeros(1, dtype=np.int64), key=key, start=start, stop=stop)

    @classmethod
    def scheduled(cls, schedule: DrawSchedule, per_step: int, *, key: int | None = None) -> Draws:
        """Periods that change as a schedule says.

        Args:
            schedule: Draws in a period, by step.
            per_step: Draws in a step.
            key: Chooses the order within windows.
        """
        points = [np.array(point, dtype=np.int64) for point in schedule.draws]
        stages, sizes = [], []
        for number, (first, begin) in enumerate(zip(points[:-1], schedule.steps[:-1], strict=True)):
            length = (schedule.steps[number + 1] - begin) * per_step
            final = points[number + 1] if schedule.between == "linear" else first
            changes = (first * final.sum() != final * first.sum()).any()
            counts, lengths = (_ramp if changes else _steady)(first, final, length, number)
            stages.append(counts)
            sizes.append(lengths)
        starts = np.cumsum(np.concatenate([[0], *sizes])).astype(np.int64)
        return cls(np.concatenate([*stages, points[-1][None]]), starts, key=key)

    def sources(self, first: int, last: int) -> Indices:
        """The source of each of the draws ``first <= k < last``; int64 of shape ``(last - first,)``."""
        parts = [np.empty(0, dtype=np.int64)]
        stage = self._stage(first)
        while first < last:
            end = min(last, int(self._starts[stage + 1]))
            parts.append(self._in_stage(stage, first, end))
            first, stage = end, stage + 1
        return np.concatenate(parts) if len(parts) != 2 else parts[1]

    def counts_before(self, draw: int) -> Indices:
        """Draws of every source before ``draw``; shape ``(sources,)``."""
        if self.key is None:
            return self.spread_before(draw)
        stage = self._stage(draw)
        begin = max(draw - (draw - int(self._starts[stage])) % self._window(stage), self.start)
        return self.spread_before(begin) + np.bincount(self.sources(begin, draw), minlength=self.counts.shape[1])

    def spread_before(self, draw: int) -> Indices:
        """:meth:`counts_before`, of the evenly spread sequence."""
        stage = self._stage(draw)
        periods, rest = divmod(draw - int(self._starts[stage]), int(self._periods[stage]))
        begun = np.bincount(self._spread(stage)[:rest], minlength=self.counts.shape[1])
        whole: Indices = self._before[stage] + periods * self.counts[stage]
        return whole + begun

    def draw_after(self, source: int, count: int) -> int:
        """The draw after the one that is the ``count``-th of ``source``, evenly spread and in the first stage."""
        periods, number = divmod(count - 1, int(self.counts[0, source]))
        within = np.flatnonzero(self._spread(0) == source)[number]
        return periods * int(self._periods[0]) + int(within) + 1

    def when(self, source: int, count: int) -> tuple[int, float, int]:
        """Sorts sources by when they have their ``count``-th draw, evenly spread and in the first stage."""
        each = int(self.counts[0, source])
        periods, number = divmod(count - 1, each)
        return periods, (2 * number + 1) / each, source

    def _stage(self, draw: int) -> int:
        return int(np.searchsorted(self._starts, draw, side="right")) - 1

    def _window(self, stage: int) -> int:
        period = int(self._periods[stage])
        return period if period <= _LARGEST_WINDOW else _WINDOW

    def _spread(self, stage: int) -> Indices:
        return _spread(tuple(self.counts[stage].tolist()))

    def _in_stage(self, stage: int, first: int, last: int) -> Indices:
        spread, begin = self._spread(stage), int(self._starts[stage])
        if self.key is None:
            return spread[np.arange(first - begin, last - begin) % spread.size]
        window = self._window(stage)
        low = max(first - (first - begin) % window, self.start)
        high = min(last + (begin - last) % window, int(self._starts[stage + 1]), self.stop)
        numbers = np.arange(low, high)
        offsets = numbers - begin
        windows = (offsets // window - offsets[0] // window).astype(np.uint64)
        words = hashed_words(numbers, "draws", self.key)
        # Stable: words are cut short to make room for the window, and two may be equal.
        order = np.argsort((windows << np.uint64(40)) | (words >> np.uint64(24)), kind="stable")
        return spread[offsets[order][first - low : last - low] % spread.size]


@lru_cache(maxsize=32)
def _spread(counts: tuple[int, ...]) -> Indices:
    """A period's sources, evenly spread; ties in the order of the sources."""
    each = np.array(counts, dtype=np.int64)
    members = np.repeat(np.arange(each.size), each)
    number = concatenated_ranges(np.zeros_like(each), each)
    # Equal fractions are equal floats: a quotient of small integers is rounded correctly.
    result = members[np.argsort((2 * number + 1) / each[members], kind="stable")]
    result.setflags(write=False)
    return result


def _steady(first: Indices, final: Indices, length: int, number: int) -> tuple[Indices, Indices]:
    """Periods all alike, and a shorter one to end with: counts of each stage, and its number of draws."""
    rest = length % int(first.sum())
    short = _interpolated(first, first, np.array([rest]), np.array([1]), 2, number)
    counts, lengths = np.concatenate([first[None], short]), np.array([length - rest, rest])
    return counts[lengths > 0], lengths[lengths > 0]


def _ramp(first: Indices, final: Indices, length: int, number: int) -> tuple[Indices, Indices]:
    """Periods that change from one point to the next: counts of each stage, and its number of draws."""
    num_stages = min(max(length // _SHORTEST_STAGE, 1), _MOST_STAGES)
    borders = length * np.arange(num_stages + 1, dtype=np.int64) // num_stages
    draws = np.diff(borders)
    # Periods of a fixed length and, if that leaves any draws, a shorter one.
    period = min(int(draws.max()), _RAMP_PERIOD)
    rest = draws % period
    sizes = np.stack([np.full_like(rest, period), rest], axis=1).ravel()
    lengths = np.stack([draws - rest, rest], axis=1).ravel()
    middles = np.repeat(2 * np.arange(num_stages, dtype=np.int64) + 1, 2)
    served = lengths > 0
    return _interpolated(first, final, sizes[served], middles[served], 2 * num_stages, number), lengths[served]


def _interpolated(first: Indices, final: Indices, sizes: Indices, done: Indices, of: int, number: int) -> Indices:
    """Whole draws in periods of given sizes, ``done / of`` of the way from one point to the other.

    Laid end to end, the shares of a period are a ruler; a source gets a draw for each whole number between its ends,
    so that it has its share rounded down or up, and a period its size. The ruler is shifted from period to period, so
    that what is rounded off evens out.

    Args:
        first: Draws of each source in a period of the first point.
        final: Draws in one of the other point.
        sizes: Draws in each period, at most 2**16; int64 of shape ``(periods,)``.
        done: How far each is on the way; of the same shape.
        of: At most 2**11.
        number: By how many periods the ruler has been shifted before.

    Returns:
        int64 of shape ``(periods, sources)``.

    Source:
        Systematic sampling: Madow, "On the theory of systematic sampling, II", 1949.
    """
    zero = np.zeros(1, dtype=np.int64)
    marks = [np.concatenate([zero, np.cumsum(point)]) for point in (first, final)]
    unit = int(first.sum()) * int(final.sum()) * of
    line = marks[0] * int(final.sum()) * (of - done)[:, None] + marks[1] * int(first.sum()) * done[:, None]
    shifts = ((np.arange(number, number + sizes.size) + 0.5) * _GOLDEN % 1 * unit).astype(np.int64)
    result: Indices = np.diff((line * sizes[:, None] + shifts[:, None]) // unit, axis=1).astype(np.int64)
    return result
