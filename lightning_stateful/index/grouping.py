"""Samples sorted into classes, shuffled within them, with random access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.permutation import ClassShuffle
from lightning_stateful.core.ranges import Indices, bounds_of
from lightning_stateful.index.lengths import chunks


@dataclass(frozen=True, eq=False)
class Grouping:
    """Samples class by class: 4 bytes a sample (8 from 2**32 samples on), none if there is one class of them all.

    Attributes:
        starts: The first place of each class and, last, their number; int64 of shape ``(classes + 1,)``.
        members: The samples, class by class and rising within each; None if place and sample are the same.
    """

    starts: Indices
    members: NDArray[Any] | None
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls, lengths: NDArray[Any], classes: Callable[[int, NDArray[Any]], Indices], counts: Sequence[int]
    ) -> Grouping:
        """Sort samples into classes.

        Args:
            lengths: One a sample, read part by part.
            classes: From a part's first sample and its lengths to their classes; negative for samples to leave out.
            counts: Samples of each class.
        """
        starts = bounds_of(np.asarray(counts, dtype=np.int64))
        if len(counts) == 1 and starts[-1] == len(lengths):
            return cls(starts, None)
        members = np.empty(int(starts[-1]), dtype=np.uint32 if len(lengths) <= 2**32 else np.int64)
        ends = starts[:-1].copy()
        for first, part in chunks(lengths):
            found = classes(first, part)
            # Two bytes where they do: NumPy sorts those by counting.
            order = np.argsort(found.astype(np.int16) if len(counts) < 2**15 else found, kind="stable")
            numbers = np.bincount(found[found >= 0], minlength=len(counts))
            start = int(np.count_nonzero(found < 0))
            for number in np.flatnonzero(numbers):
                stop = start + int(numbers[number])
                members[ends[number] : ends[number] + stop - start] = order[start:stop] + first
                ends[number] += stop - start
                start = stop
        return cls(starts, members)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, places: Indices, seed: int | None, epoch: int) -> Indices:
        """The samples at ``places``, each class in an order of its own each epoch; unshuffled if ``seed`` is None."""
        if seed is None:
            return self._samples(places)
        if self._kept.get("of") != (seed, epoch):
            self._kept["of"], self._kept["shuffle"] = (seed, epoch), ClassShuffle(self.starts, seed, epoch)
        shuffle: ClassShuffle = self._kept["shuffle"]
        return self._samples(shuffle.take(places))

    def in_order(self, places: Indices) -> Indices:
        """The samples at ``places`` of the dataset's own order."""
        if self.members is None:
            return places
        if "in order" not in self._kept:
            self._kept["in order"] = np.sort(self.members)
        found: Indices = self._kept["in order"][places].astype(np.int64)
        return found

    def _samples(self, places: Indices) -> Indices:
        return places if self.members is None else self.members[places].astype(np.int64)
