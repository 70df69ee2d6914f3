"""What was left out of a stream, as places count it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_stateful.streams.stage import Place


class Skipped(NamedTuple):
    """Counts of what was left out.

    Attributes:
        shards: Shards of which the rest could not be read.
        samples: Samples on which a function failed.
        too_long: Samples longer than a batch may be.
    """

    shards: int = 0
    samples: int = 0
    too_long: int = 0

    def plus(self, other: Skipped) -> Skipped:
        """Both together."""
        return Skipped(*(a + b for a, b in zip(self, other, strict=True)))


# Where the places of stages keep these counts.
_NAMES = ("skipped_shards", "skipped_samples", "dropped")


def skipped_at(place: Mapping[str, Any] | None) -> Skipped:
    """What the stages of a portion had left out where they stand."""
    total = Skipped()
    while place is not None:
        total = total.plus(Skipped(*(place.get(name, 0) for name in _NAMES)))
        place = place.get("at")
    return total


def without_skipped(place: Place) -> Place:
    """A place that counts from here on: what was left out before is counted elsewhere."""
    cleared: Place = {**place, **{name: 0 for name in _NAMES if name in place}}
    return {**cleared, "at": without_skipped(place["at"])} if "at" in place else cleared
