"""What one lane reads of one source: portion after portion."""

from __future__ import annotations

from typing import Any

from lightning_stateful.streams.reading import Reading
from lightning_stateful.streams.share import Share
from lightning_stateful.streams.skipped import Skipped, skipped_at
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Place, Run, Stage


class SourceLane(Stage):
    """The items, or the batches, of a share of a source, one portion after the other.

    Args:
        source: The source.
        share: The lane's share of it.
        place: Where to begin; None for the beginning.
    """

    def __init__(self, source: Source, share: Share, place: Place | None = None) -> None:
        self._source, self._share = source, share
        begun = place or {"round": 0, "portion": 0, "opened": 0, "skipped": [0, 0, 0], "place": None}
        self.round: int = begun["round"]
        self._portions = share.in_round(self.round, source)
        self._number: int = begun["portion"]
        self._begin: Place | None = begun["place"]
        self._opened: int = begun["opened"]
        # In portions that are done.
        self._skipped = Skipped(*begun["skipped"])
        self._carried: Any = begun.get("carried")
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
        return not self._share.in_round(1, self._source)

    def begin_again(self) -> None:
        """Read the lane's part of all shards, as those of another epoch."""
        self.close()
        self.round += 1
        self._portions = self._share.in_round(self.round, self._source)
        self._number, self._begin, self._opened = 0, None, 0

    def place(self) -> Place:
        """The portion, and where in it."""
        if self._stage is None or self._reading is None:
            at, opened = self._begin, self._opened
        else:
            at, opened = self._stage.place(), self._reading.num_opened
        place = {
            "round": self.round,
            "portion": self._number,
            "opened": opened,
            "skipped": list(self._skipped),
            "place": at,
        }
        return {**place, "carried": self._carried} if self._source.shards.is_loader else place

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
        if self._reading is not None:
            self._carried = self._reading.carried
        self.close()
        self._number, self._begin, self._opened = self._number + 1, None, 0
