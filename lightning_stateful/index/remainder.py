"""What is left of a sequence when ranges of it have been served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_stateful.core.ranges import Indices, bounds_of


@dataclass(frozen=True, slots=True, eq=False)
class Remainder:
    """A part of ``range(n)``, as stretches in rising order, each with random access.

    Attributes:
        firsts: The first element of each stretch, int64 of shape ``(stretches,)``.
        places: How many elements come before each stretch and, last, in all; of shape ``(stretches + 1,)``.
    """

    firsts: Indices
    places: Indices

    @classmethod
    def whole(cls, length: int) -> Remainder:
        """All of ``range(length)``."""
        return cls(np.zeros(1, dtype=np.int64), np.array([0, length], dtype=np.int64))

    def __len__(self) -> int:
        return int(self.places[-1])

    def take(self, places: Indices) -> Indices:
        """The elements at ``places``."""
        if len(self.firsts) == 1:
            return places + int(self.firsts[0])
        stretch = np.searchsorted(self.places, places, side="right") - 1
        result: Indices = self.firsts[stretch] + places - self.places[stretch]
        return result

    def num_below(self, bounds: Indices) -> Indices:
        """How many elements lie below each of ``bounds``."""
        if not len(self):
            return np.zeros_like(bounds)
        stretch = np.maximum(np.searchsorted(self.firsts, bounds, side="left") - 1, 0)
        sizes = np.diff(self.places)
        within = np.clip(bounds - self.firsts[stretch], 0, sizes[stretch])
        result: Indices = self.places[stretch] + within
        return result

    def without(self, starts: Indices, stops: Indices) -> Remainder:
        """What is left when the places ``start <= place < stop`` are taken out; these ranges do not overlap."""
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        left_from = np.concatenate([[0], stops])
        left_to = np.concatenate([starts, [len(self)]])
        # Cut what is left at the ends of the stretches: each piece then lies in one of them.
        cuts = np.unique(np.concatenate([left_from, left_to, self.places]))
        pieces = cuts[:-1]
        gap = np.searchsorted(left_from, pieces, side="right") - 1
        kept = pieces < left_to[gap]
        sizes = np.diff(cuts)[kept]
        return Remainder(self.take(pieces[kept]), bounds_of(sizes))
