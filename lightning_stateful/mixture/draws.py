"""The source that serves draw number k: whole draws in periods, with random access and counts in closed form.

A draw is one step of a mixture by batch, or one sample of a mixture by sample. Within a period the draws of a source
stand evenly spread: its j-th of c at ``(2 j + 1) / (2 c)`` of the period. With a key, draws are shuffled within short
windows of that sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lightning_stateful.core.permutation import Indices, concatenated_ranges, hashed_words
from lightning_stateful.mixture.weights import DrawSchedule

# Draws that are shuffled together: a period, or so many of a longer one, so that shares hold over short stretches too.
_LARGEST_WINDOW, _WINDOW = 256, 64

# A linear schedule goes from point to point in stages of at least so many draws, in at most so many stages, with
# periods of at most so many draws.
_SHORTEST_STAGE, _MOST_STAGES, _RAMP_PERIOD = 16, 1024, 512
# Successive multiples of the golden ratio's fraction fall evenly into any interval.
_GOLDEN = 0.6180339887498949

# More draws than are ever made.
_ENDLESS = 2**61


class Period:
    """Draws of several sources, evenly spread over a period that is repeated.

    Args:
        counts: Draws of each source in a period.

    Attributes:
        counts: The same, as int64 of shape ``(sources,)``.
        sources: The source of each draw of the period, int64 of shape ``(draws,)``; ties in the order of the sources.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = np.array(counts, dtype=np.int64)
        members = np.repeat(np.arange(self.counts.size), self.counts)
        number = concatenated_ranges(np.zeros_like(self.counts), self.counts)
        # Equal fractions are equal floats: a quotient of small integers is rounded correctly.
        self.sources = members[np.argsort((2 * number + 1) / self.counts[members], kind="stable")]

    def before(self, draw: int) -> Indices:
        """Draws of every source before ``draw``; shape ``(sources,)``."""
        periods, rest = divmod(draw, self.sources.size)
        begun = np.bincount(self.sources[:rest], minlength=self.counts.size)
        result: Indices = periods * self.counts + begun
        return result

    def draw_of(self, source: int, number: int) -> int:
        """The draw with which ``source`` is served for the ``number``-th time, counted from 0."""
        periods, rest = divmod(number, int(self.counts[source]))
        return periods * self.sources.size + int(np.flatnonzero(self.sources == source)[rest])


@lru_cache(maxsize=32)
def _period(counts: tuple[int, ...]) -> Period:
    return Period(counts)


class Draws:
    """A sequence of sources: stages, one after the other, each of a period that is repeated.

    Args:
        counts: Draws of each source in a period of each stage; int64 of shape ``(stages, sources)``.
        starts: The first draw of each stage, the first 0; shape ``(stages,)``.
        before: Draws of every source before each stage; shape ``(stages, sources)``.
        offsets: Draws that each stage leaves out at the beginning of its first period; shape ``(stages,)``.
        key: Chooses the order within windows, which end with their stage; None for the evenly spread one.
    """

    def __init__(
        self, counts: Indices, starts: Indices, before: Indices, offsets: Indices, *, key: int | None = None
    ) -> None:
        self.key = key
        self._counts, self._before, self._offsets = counts, before, offsets
        self._starts = np.append(starts, _ENDLESS)

    @classmethod
    def repeated(cls, counts: Sequence[int], *, key: int | None = None) -> Draws:
        """One period, over and over."""
        zero = np.zeros(1, dtype=np.int64)
        return cls(np.array([counts], dtype=np.int64), zero, np.zeros((1, len(counts)), np.int64), zero, key=key)

    @classmethod
    def until_exhausted(
        cls, counts: Sequence[int], totals: Sequence[int], *, start: int = 0, key: int | None = None
    ) -> Draws:
        """One period, over and over, without the draws of sources that have been served whole.

        Args:
            counts: Draws of each source in a period.
            totals: Draws of each source in all.
            start: Draws that are left out at the beginning of the first period.
            key: Chooses the order within windows.
        """
        if not any(totals):
            return cls.repeated(counts, key=key)
        each = [count if total else 0 for count, total in zip(counts, totals, strict=True)]
        period = _period(tuple(each))
        start %= period.sources.size
        last = (period.before(start) + np.array(totals) - 1).tolist()
        ends = {period.draw_of(source, last[source]): source for source, total in enumerate(totals) if total}
        stages, begin, before = [], 0, np.zeros_like(period.counts)
        for _, source in sorted(ends.items()):
            period = _period(tuple(each))
            stop = period.draw_of(source, last[source]) + 1
            if stop > start:
                stages.append((period.counts, begin, before, start))
                before = before + period.before(stop) - period.before(start)
                begin += stop - start
            # Of the draws so far, those of the source that leaves are counted no more.
            start, each[source] = stop - last[source] - 1, 0
        return cls(*(np.array(column, dtype=np.int64) for column in zip(*stages, strict=True)), key=key)

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
        for number, length in enumerate(np.diff(schedule.steps).tolist()):
            final = points[number + 1] if schedule.between == "linear" else points[number]
            counts, lengths = _between(points[number], final, length * per_step, number)
            stages.append(counts)
            sizes.append(lengths)
        all_counts = np.concatenate([*stages, points[-1][None]])
        lengths = np.concatenate([*sizes, np.zeros(1, dtype=np.int64)])
        # All but the last have whole periods.
        served = all_counts * (lengths // all_counts.sum(axis=1))[:, None]
        before, starts = np.cumsum(served, axis=0) - served, np.cumsum(lengths) - lengths
        return cls(all_counts, starts, before, np.zeros_like(starts), key=key)

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
        stage = self._stage(draw)
        period, start = self._period(stage), int(self._offsets[stage])
        begin = draw if self.key is None else self._window_start(stage, draw)
        evenly = period.before(begin - int(self._starts[stage]) + start) - period.before(start)
        shuffled = np.bincount(self.sources(begin, draw), minlength=evenly.size)
        result: Indices = self._before[stage] + evenly + shuffled
        return result

    def _stage(self, draw: int) -> int:
        return int(np.searchsorted(self._starts, draw, side="right")) - 1

    def _period(self, stage: int) -> Period:
        return _period(tuple(self._counts[stage].tolist()))

    def _window_start(self, stage: int, draw: int) -> int:
        """The first draw of the window of ``draw``."""
        start = int(self._starts[stage])
        return max(draw - (draw - start + int(self._offsets[stage])) % _window(self._period(stage)), start)

    def _in_stage(self, stage: int, first: int, last: int) -> Indices:
        period = self._period(stage)
        # From a draw to its number in the repeated period.
        shift = int(self._offsets[stage] - self._starts[stage])
        if self.key is None:
            return period.sources[np.arange(first + shift, last + shift) % period.sources.size]
        window, low = _window(period), self._window_start(stage, first)
        high = min(last + -(last + shift) % window, int(self._starts[stage + 1]))
        draws = np.arange(low, high)
        numbers = draws + shift
        windows = (numbers // window - numbers[0] // window).astype(np.uint64)
        words = hashed_words(draws, "draws", self.key)
        # Stable: words are cut short to make room for the window, and two may be equal.
        order = np.argsort((windows << np.uint64(40)) | (words >> np.uint64(24)), kind="stable")
        return period.sources[numbers[order][first - low : last - low] % period.sources.size]


def _window(period: Period) -> int:
    return period.sources.size if period.sources.size <= _LARGEST_WINDOW else _WINDOW


def _between(first: Indices, final: Indices, length: int, number: int) -> tuple[Indices, Indices]:
    """Periods from one point of a schedule to the next: counts of each stage, and its number of draws."""
    changes = (first * final.sum() != final * first.sum()).any()
    num_stages = min(max(length // _SHORTEST_STAGE, 1), _MOST_STAGES) if changes else 1
    draws = np.diff(length * np.arange(num_stages + 1, dtype=np.int64) // num_stages)
    # Periods of a fixed length and, if that leaves any draws, a shorter one.
    period = min(int(draws.max()), _RAMP_PERIOD) if changes else int(first.sum())
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
