"""Batches of one lane: what one worker of one rank reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.streams.mixing import Mixing
from lightning_stateful.streams.share import Share
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.source_lane import SourceLane
from lightning_stateful.streams.stage import Item, Place, Run, Stage

# The name of a source that stands alone.
ALONE = ""


class LaneBatch(NamedTuple):
    """Samples that make a batch.

    Attributes:
        values: The samples.
        source: The source that they come from; None if from several.
        shard: The shard of the first.
        number: The place of the first in that.
    """

    values: list[Any]
    source: str | None
    shard: int
    number: int


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a stream is read: the same on all ranks, and pickled into workers.

    Attributes:
        sources: The sources by name; a single one is called :data:`ALONE`.
        mixing: Whose turn it is; None for a single source.
        batch_size: Items in a batch; None where the sources give batches themselves, or items are not batched.
        is_batched: Whether the loader collates batches.
        drop_last: Leave the items of a batch that is not full to the next epoch.

    Raises:
        ConfigurationError: An argument is out of range, or they contradict each other.
    """

    sources: Mapping[str, Source]
    mixing: Mixing | None = None
    batch_size: int | None = 1
    is_batched: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.gives_batches and self.mixing is not None and self.mixing.by == "sample":
            raise ConfigurationError(
                "Batches of like lengths are cut from the samples of one source: with max_tokens or read_ahead, mix "
                'streams by="batch".'
            )
        if self.batch_size is not None and as_int("batch_size", self.batch_size) < 1:
            raise ConfigurationError(f"batch_size must be at least 1, got {self.batch_size}.")

    @property
    def gives_batches(self) -> bool:
        """Whether the sources cut their batches themselves."""
        return self.is_batched and self.batch_size is None

    def at(self, path: str) -> StreamConfig:
        """The same stream as one of several that are read side by side, whose randomness it does not share."""
        sources = {name: source.at(path) for name, source in self.sources.items()}
        return replace(self, sources=sources, mixing=None if self.mixing is None else self.mixing.at(path))

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared."""
        described: dict[str, Any] = {"drop_last": self.drop_last}
        if self.batch_size is not None:
            described["batch_size"] = self.batch_size
        if self.mixing is None:
            return {**self.sources[ALONE].describe(), **described}
        sources = {name: source.describe() for name, source in self.sources.items()}
        return {**self.mixing.describe(), "sources": sources, **described}


class Lane(Stage):
    """The batches of a lane.

    Args:
        config: How the stream is read.
        shares: The lane's share of every source.
        place: Where to begin; None for the beginning.
        epoch: The pass that the lane belongs to: it chooses the order of turns.
        worker: Which of its rank's lanes it is.
    """

    def __init__(
        self,
        config: StreamConfig,
        shares: Mapping[str, Share],
        place: Place | None = None,
        *,
        epoch: int = 0,
        worker: int = 0,
    ) -> None:
        self._config, self._epoch, self._worker = config, epoch, worker
        places = {} if place is None else place["of"]
        self._turn: int = 0 if place is None else place["turn"]
        self._served: int = 0 if place is None else place["batches"]
        self._over: bool = place is not None and place["over"]
        # Sources that have begun again and given nothing since, and those that gave nothing in a whole round.
        self._begun_again: set[str] = set() if place is None else set(place["again"])
        self._gone: set[str] = set() if place is None else set(place["gone"])
        self._ended: set[str] = set() if place is None else set(place["ended"])
        self._lanes = {
            name: SourceLane(source, shares[name], places.get(name)) for name, source in config.sources.items()
        }
        # After the latest batch: a lane may have read more, which then was no batch.
        self._places = {name: lane.place() for name, lane in self._lanes.items()}
        self._note_ends()
        # Too little for a batch, of sources that begin again.
        self._tails: dict[str, list[Run]] = {}
        self._keeps_tails = config.drop_last and config.mixing is not None and config.mixing.stop == "cycle"
        self._size = (config.batch_size or 1) if config.is_batched else 1

    def __next__(self) -> LaneBatch:
        mixing = self._config.mixing
        if self._over:
            raise StopIteration
        if mixing is None:
            batch = self._of_source(ALONE)
        else:
            batch = self._in_turn(mixing) if mixing.by == "batch" else self._of_samples(mixing)
        if mixing is not None:
            self._note_ends()
        if batch is None:
            self._over = True
            raise StopIteration
        self._served += 1
        return batch

    def place(self) -> Place:
        """Where each source stands after the latest batch."""
        return {
            "batches": self._served,
            "over": self._over,
            "turn": self._turn,
            **{name: list(names) for name, names in self._ends.items()},
            "of": dict(self._places),
        }

    def close(self) -> None:
        """Close all sources."""
        for lane in self._lanes.values():
            lane.close()

    def _in_turn(self, mixing: Mixing) -> LaneBatch | None:
        while active := self._active(mixing):
            # Each worker goes through the whole sequence, one turn ahead of the worker before: the same on all ranks.
            name = mixing.source_at(self._turn + self._worker, active, self._epoch)
            batch = self._of_source(name)
            if batch is not None:
                self._turn += 1
                self._begun_again.discard(name)
                return batch
            self._end(name, mixing)
        return None

    def _of_samples(self, mixing: Mixing) -> LaneBatch | None:
        items: list[Item] = []
        size = self._size
        while len(items) < size and (active := self._active(mixing)):
            name = mixing.source_at(self._turn + len(items), active, self._epoch)
            item = next(self._lanes[name], None)
            if item is None:
                self._end(name, mixing)
            else:
                items.append(item)
                self._begun_again.discard(name)
        if not items or (len(items) < size and self._config.drop_last):
            return None
        self._places = {name: lane.place() for name, lane in self._lanes.items()}
        self._turn += len(items)
        return LaneBatch([item.value for item in items], None, items[0].shard, items[0].number)

    def _of_source(self, name: str) -> LaneBatch | None:
        """The next batch of a source, or None if there is none."""
        return self._cut_by_source(name) if self._config.gives_batches else self._filled(name)

    def _cut_by_source(self, name: str) -> LaneBatch | None:
        items: list[Item] = next(self._lanes[name], [])
        self._places[name] = self._lanes[name].place()
        return LaneBatch([item.value for item in items], name, items[0].shard, items[0].number) if items else None

    def _filled(self, name: str) -> LaneBatch | None:
        lane = self._lanes[name]
        runs = self._taken(name) if self._keeps_tails else lane.take_runs(self._size)
        values = runs[0].values if len(runs) == 1 else [value for run in runs for value in run.values]
        drops = bool(values) and len(values) < self._size and self._config.drop_last
        if not drops or self._config.sources[name].shards.pinned:
            # Else they stay where they are, for the next epoch; what has no shards would be read again for them.
            self._places[name] = lane.place()
        return LaneBatch(values, name, runs[0].shard, runs[0].first) if values and not drops else None

    def _taken(self, name: str) -> list[Run]:
        """What the round before had left, and what makes a batch of it, as much as there is."""
        runs = self._tails.pop(name, [])
        runs = runs + self._lanes[name].take_runs(self._size - sum(len(run.values) for run in runs))
        if sum(len(run.values) for run in runs) < self._size:
            self._tails[name] = runs
        return runs

    def _note_ends(self) -> None:
        """As the places: an error may come after a source has ended, and before the batch."""
        self._ends = {"ended": sorted(self._ended), "again": sorted(self._begun_again), "gone": sorted(self._gone)}

    def _active(self, mixing: Mixing) -> tuple[str, ...]:
        """The sources that may have a turn; none if the lane is over."""
        is_over = mixing.stop == "first_exhausted" and self._ended
        if is_over or len(self._ended) == len(self._lanes):
            return ()
        if mixing.stop == "cycle":
            return tuple(name for name in mixing.names if not self._lanes[name].is_empty and name not in self._gone)
        return tuple(name for name in mixing.names if name not in self._ended)

    def _end(self, name: str, mixing: Mixing) -> None:
        self._ended.add(name)
        if mixing.stop == "cycle":
            self._ended.update(name for name, lane in self._lanes.items() if lane.is_empty)
            if name in self._begun_again:
                # Else it would begin again for ever.
                self._gone.add(name)
            elif len(self._ended) < len(self._lanes):
                self._lanes[name].begin_again()
                self._begun_again.add(name)
