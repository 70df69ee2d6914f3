"""What one lane reads of one source: portion after portion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_stateful.streams.portion import Portion, left_of
from lightning_stateful.streams.reading import Reading
from lightning_stateful.streams.skipped import Skipped, skipped_at
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Place, Run, Stage


class SourceLane(Stage):
    """The items, or the batches, of some portions, one portion after the other.

    Args:
        source: The source.
        portions: The lane's portions of it.
        place: Where to begin; None for the beginning.
    """

    def __init__(self, source: Source, portions: Sequence[Portion], place: Place | None = None) -> None:
        self._source = source
        begun = place or {"round": 0, "portion": 0, "opened": 0, "skipped": [0, 0, 0], "place": None}
        self.round: int = begun["round"]
        self._first = portions
        self._portions = in_round(portions, self.round)
        self._number: int = begun["portion"]
        self._begin: Place | None = begun["place"]
        self._opened: int = begun["opened"]
        # In portions that are done.
        self._skipped = Skipped(*begun["skipped"])
        self._stage: Stage | None = None
        self._reading: Reading | None = None

    def __next__(self) -> Any:
        while self._number < len(self._portions):
            stage = self._stage or self._open()
            try:
                return next(stage)
            except StopIteration:
                self._advance()
        raise StopIteration

    def take_runs(self, number: int) -> list[Run]:
        """The next samples, many at a time."""
        taken: list[Run] = []
        while number and self._number < len(self._portions):
            runs = (self._stage or self._open()).take_runs(number)
            number -= sum(len(run.values) for run in runs)
            if number:
                self._advance()
            taken = runs if not taken else taken + runs
        return taken

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read, however often it is begun again."""
        return not self._first

    def begin_again(self) -> None:
        """Read all portions once more, as those of another epoch."""
        self.close()
        self.round += 1
        self._portions, self._number, self._begin, self._opened = in_round(self._first, self.round), 0, None, 0

    def place(self) -> Place:
        """The portion, and where in it."""
        if self._stage is None or self._reading is None:
            at, opened = self._begin, self._opened
        else:
            at, opened = self._stage.place(), self._reading.num_opened
        return {
            "round": self.round,
            "portion": self._number,
            "opened": opened,
            "skipped": list(self._skipped),
            "place": at,
        }

    def close(self) -> None:
        """Close the portion that is open."""
        stage, self._stage, self._reading = self._stage, None, None
        if stage is not None:
            stage.close()

    def _open(self) -> Stage:
        portion = self._portions[self._number]
        self._stage, self._reading = self._source.open(portion, self._begin or portion.place)
        return self._stage

    def _advance(self) -> None:
        if self._stage is not None:
            self._skipped = self._skipped.plus(skipped_at(self._stage.place()))
        self.close()
        self._number, self._begin, self._opened = self._number + 1, None, 0


def in_round(portions: Sequence[Portion], number: int) -> list[Portion]:
    """A lane's portions when it reads them once more: whole, and as those of later epochs."""
    if not number:
        return list(portions)
    whole = [replace(portion, epoch=portion.epoch + number, place=None) for portion in portions]
    return [portion for portion in whole if portion.shards]


def left_of_lane(portions: Sequence[Portion], place: Place | None) -> list[Portion]:
    """What a lane that stands at ``place`` has not served of its portions."""
    if place is None:
        return list(portions)
    return left_of(in_round(portions, place["round"]), place["portion"], place["place"], place["opened"])
