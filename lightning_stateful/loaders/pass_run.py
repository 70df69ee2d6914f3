"""One pass over a stream on this rank: reads ahead, agrees with the other ranks on its end, knows where it stood."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import PositionError, StreamError
from lightning_stateful.loaders.lanes import LaneTask
from lightning_stateful.loaders.rank_reader import RankReader
from lightning_stateful.streams.exchange import Exchange
from lightning_stateful.streams.place_text import PlaceTexts, Text, as_place, text_of_list
from lightning_stateful.streams.stage import Place
from lightning_stateful.streams.standing import Standing

END = object()


class _Read(NamedTuple):
    """A batch that was read, and where this rank's lanes stand after it."""

    batch: Any
    places: list[Place | Text]


class PassRun:
    """The batches of this rank from where a pass stands to where it ends on all ranks.

    Args:
        standing: Where to begin.
        reader: Reads this rank's lanes.
        topology: The ranks.
        connect: Makes that by which ranks tell each other where they stand, from what says in words what a rank reads;
            None if there is nobody to tell.
        seed: Seeds the workers.
        keep: How many steps back :meth:`standing_at` can look.
    """

    def __init__(
        self,
        standing: Standing,
        reader: RankReader,
        topology: Topology,
        connect: Callable[[Callable[[int, str], str]], Exchange] | None,
        *,
        seed: int = 0,
        keep: int = 64,
    ) -> None:
        self._begun, self._reader, self._topology = standing, reader, topology
        self._seed, self._keep = seed, keep
        self._exchange = None if connect is None else connect(self._say_reading)
        self._buffer: deque[_Read] = deque()
        self._num_read = 0
        self._is_read = False
        # For the places of workers that have handed over nothing yet, or of none.
        self._texts = [PlaceTexts() for _ in range(standing.num_workers)]
        # Met where this rank reads ahead, and where it has to be raised.
        self._error: Exception | None = None
        self._broken: Exception | None = None
        self._is_over = self.is_closed = False
        self._sure = -1  # The step of which it is known that it happens.
        self.served = 0
        self._start(standing)
        self._places: dict[int, list[Place | Text]] = {0: reader.places}
        self._skip_unknown(standing)

    def next(self) -> Any:
        """The next batch; :data:`END` where the pass ends on all ranks.

        Raises:
            StreamError: A stream broke off, here or on another rank.
        """
        if not self.has_next():
            return END
        if self._broken:
            self.close()
            raise self._broken
        read = self._buffer.popleft()
        self.served += 1
        self._places[self.served] = read.places
        self._places.pop(self.served - self._keep, None)
        return read.batch

    def has_next(self) -> bool:
        """Whether another batch follows, or an error in its place."""
        if self._is_over or self._broken or self._sure == self.served:
            return not self._is_over
        exchange = self._exchange
        self._read_until(self.served + 1 if exchange is None else exchange.horizon(self.served))
        if self._error is not None and not self._buffer:
            self._broken = self._error
        elif exchange is None:
            self._is_over = not self._buffer
        else:
            try:
                self._is_over = not exchange.happens(self.served)
            except StreamError as error:
                self._broken = error
        if not self._is_over:
            self._sure = self.served
        return not self._is_over

    @property
    def is_empty(self) -> bool:
        """Whether no step of the pass has happened."""
        return not self.served and not self._begun.steps

    @property
    def is_broken(self) -> bool:
        """Whether asking for the next batch raises."""
        return self._broken is not None

    def standing_at(self, served: int) -> Standing:
        """Where all lanes stood after ``served`` batches of each rank.

        Raises:
            StreamError: That is too long ago, or another rank's place is not there.
        """
        if not served:
            return self._begun
        if self._exchange is not None:
            return self._gathered(self._told(self._exchange.places_at(served)), served)
        if served not in self._places:
            raise StreamError(
                f"Where the stream stood after {served} batches is not known any more, {self.served - served} batches "
                f"later; the last {self._keep} are kept."
            )
        return self._gathered(self._alone(self._places[served]), served)

    def final(self) -> Standing:
        """Where all lanes stand at the end of the pass."""
        if self._exchange is not None:
            return self._gathered(self._told(self._exchange.gather_places(self.served)), self.served)
        return self._gathered(self._alone(self._reader.places), self.served)

    def goes_on(self, served: int) -> bool:
        """Whether the next batch is the one after ``served``."""
        return served == self.served and not self.is_closed

    def close(self) -> None:
        """Stop reading; where it stood can still be asked for until another pass begins."""
        if self.is_closed:
            return
        self.is_closed = True
        self._reader.end()

    def _start(self, standing: Standing) -> None:
        tasks = []
        for worker in standing.workers_in_turn(self._topology.rank):
            lane = worker * standing.num_replicas + self._topology.rank
            tasks.append(LaneTask(worker, standing.shares[lane], standing.places[lane], standing.epoch))
        seed = derive_seed("stream", self._seed, standing.epoch, self._topology.rank)
        rank, replicas = self._topology.rank, standing.num_replicas
        self._reader.begin(tasks, seed, lambda worker, place: standing.shards_at(worker * replicas + rank, place))

    def _skip_unknown(self, standing: Standing) -> None:
        """Where nobody has written where this rank stood: read again what it was given."""
        own = standing.places[self._topology.rank :: standing.num_replicas]
        if not standing.steps or any(place is not None for place in own):
            return
        for number in range(standing.steps):
            try:
                self._reader.next()
            except StopIteration:
                raise PositionError(
                    f"The state says that each rank was given {standing.steps} batches, but not where rank "
                    f"{self._topology.rank} stood, and this rank has only {number}. Ranks without a process group, and "
                    "in evaluation, write down only where they stood themselves: resume each from its own state, or "
                    "have the process group begin before the stream is read."
                ) from None
        self._places[0] = self._reader.places

    def _read_until(self, number: int) -> None:
        while self._num_read < number and self._error is None and not self._is_read:
            try:
                batch = self._reader.next()
            except StopIteration:
                self._is_read = True
                if self._exchange is not None:
                    self._exchange.announce_end(self._said(self._reader.places))
                return
            except Exception as error:
                # What was read before comes first.
                self._error = error
                if self._exchange is not None:
                    self._exchange.fail(f"{type(error).__name__}: {error}")
                return
            self._num_read += 1
            self._buffer.append(_Read(batch, self._reader.places))
            if self._exchange is not None:
                self._exchange.announce(self._said(self._reader.places))

    def _said(self, places: Sequence[Place | Text]) -> Text:
        texts = zip(places, self._texts, strict=True)
        return text_of_list([says.text(place) if isinstance(place, dict) else place for place, says in texts])

    def _say_reading(self, rank: int, text: str) -> str:
        begun, names = self._begun, set()
        for worker, place in enumerate(json.loads(text)):
            names.update(begun.shards_at(worker * begun.num_replicas + rank, place))
        return f"last known to read {', '.join(sorted(names)) or 'nothing more'}"

    def _alone(self, places: list[Place | Text]) -> dict[int, list[Place]]:
        return {self._topology.rank: [as_place(place) for place in places]}

    def _told(self, ranks: Sequence[str | None]) -> dict[int, list[Place]]:
        return {rank: json.loads(text) for rank, text in enumerate(ranks) if text is not None}

    def _gathered(self, ranks: dict[int, list[Place]], served: int) -> Standing:
        begun = self._begun
        # Where the others stand by now, a rank that is alone does not know.
        places: list[Place | None] = [None] * begun.num_lanes if self._exchange is None else list(begun.places)
        for rank, told in ranks.items():
            places[rank :: begun.num_replicas] = told
        return begun.at(tuple(places), steps=begun.steps + served)
