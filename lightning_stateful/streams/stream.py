"""Streams as people hold them: iterable datasets that can be shuffled, mapped, windowed, mixed and resumed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lightning_stateful import state as format_
from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.streams.hugging_face import HuggingFaceShards, is_hugging_face
from lightning_stateful.streams.lane import ALONE, Lane, StreamConfig
from lightning_stateful.streams.mixing import Mixing
from lightning_stateful.streams.place_check import check_lane_place
from lightning_stateful.streams.shards import Shards
from lightning_stateful.streams.source import Source, Step
from lightning_stateful.streams.stage import Place
from lightning_stateful.streams.standing import Standing
from lightning_stateful.streams.steps import Filtered, Mapped, Recurrent, Windowed

KIND = "stream"
ORDER_VERSION = 1


class Stream(IterableDataset[Any]):
    """A stream of samples out of shards, which knows where it stands.

    Iterated by itself, it gives the share of this process: of this rank, and of this worker of a DataLoader. A
    :class:`StreamDataModule`, or a loader patched by this package, deals its shards out instead, and resumes on any
    ranks and workers. Every method that changes something returns a new stream.

    Args:
        sources: What is read.
        mixing: Whose turn it is, of several sources.

    State:
        Where this process's share stands. Loading one taken in another share is refused.
    """

    def __init__(self, sources: Mapping[str, Source], mixing: Mixing | None = None) -> None:
        self.sources = dict(sources)
        self.mixing = mixing
        self._epoch = 0
        self._place: Place | None = None
        # Whose place it is, and whether it was loaded.
        self._held: tuple[dict[str, int], bool] = ({}, False)
        # The latest pass, which is over where nobody holds it any more, and where that was then.
        self._latest: weakref.ref[StreamIterator] | None = None
        self._left: tuple[int, Place | None] = (0, None)
        self._described: dict[str, Any] | None = None

    def shuffle(self, *, buffer_size: int = 0, seed: int | None = None) -> Stream:
        """Shuffle the order of the shards in every epoch, and their samples in blocks of ``buffer_size``.

        A sample travels less than a block, within the shards that a worker reads. Blocks are read again on a resume,
        and never saved.
        """
        changes: dict[str, Any] = {"shuffle": True, "buffer_size": buffer_size}
        return self._with(lambda source: replace(source, **changes, seed=source.seed if seed is None else seed))

    def map(self, function: Callable[[Any], Any]) -> Stream:
        """Apply a function to every sample, after shuffling; what it draws follows from (seed, epoch, sample)."""
        return self._with_step(Mapped(function))

    def filter(self, function: Callable[[Any], Any]) -> Stream:
        """Keep the samples of which a function is true; what it draws follows from (seed, epoch, sample)."""
        return self._with_step(Filtered(function))

    def windowed(self, width: int, step: int = 1) -> Stream:
        """Sliding windows: tuples of ``width`` consecutive samples of what one worker reads."""
        return self._with_step(Windowed(as_int("width", width), as_int("step", step)))

    def recurrent(self, function: Callable[[Any, Any], tuple[Any, Any]], initial: Any) -> Stream:
        """Carry a state from sample to sample: ``value, state = function(state, sample)`` gives ``value``.

        The state goes on through the samples that one worker reads and is part of a checkpoint; on other ranks or
        workers, shards that nobody has begun begin with ``initial``. The function is not seeded, and is run again over
        a few samples on a resume: what it returns has to follow from its arguments alone.
        """
        return self._with_step(Recurrent(function, initial))

    def config(self, **batching: Any) -> StreamConfig:
        """The configuration by which this stream is read."""
        return StreamConfig(sources=self.sources, mixing=self.mixing, **batching)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next iteration; a place within that same epoch is kept.

        Raises:
            ConfigurationError: It is no epoch.
        """
        epoch = as_int("epoch", epoch)
        if epoch < 0:
            raise ConfigurationError(f"epoch must be at least 0, got {epoch}.")
        if epoch != self._epoch:
            self._epoch, self._place, self._latest = epoch, None, None

    def __iter__(self) -> Iterator[Any]:
        return StreamIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """Where the next sample comes from: fresh plain data. To know, one sample may be read ahead."""
        return self.pack(*self._stand())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with the next iteration.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        self._epoch, self._place = self.unpack(state_dict)
        self._latest, self._held = None, (self._seat(), True)

    def pack(self, epoch: int, place: Place | None) -> dict[str, Any]:
        """A state of this process's share at a place."""
        position = {"epoch": epoch, **self._seat(), "place": place}
        if self._described is None:
            self._described = self.config(is_batched=False).describe()
        return format_.pack(KIND, ORDER_VERSION, self._described, position)

    def unpack(self, state_dict: Mapping[str, Any]) -> tuple[int, Place | None]:
        """The epoch and the place in a state.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        where = "The stream's state"
        format_.check(state_dict, where=where)
        format_.refuse_differences(state_dict, self.pack(0, None), where=where)
        position, seat = state_dict["progress"], self._seat()
        if "place" not in position:
            raise DamagedStateError(f"{where} is that of a loader: {sorted(position)}. Load it into its loader.")
        epoch, place = position["epoch"], position["place"]
        if any(position.get(name) != value for name, value in seat.items()):
            saved = {name: position.get(name) for name in seat}
            raise DamagedStateError(
                f"{where} is that of the share {saved}, and this process reads the share {seat}. Resume on the same "
                "ranks and workers, or through StreamDataModule or patch_dataloader, whose states fit any."
            )
        standing, lane = self.share(epoch)
        if place is not None:
            try:
                check_lane_place(place, standing.config, standing.shares[lane])
            except (DamagedStateError, PositionError) as error:
                raise type(error)(f"{where}: {error} Resume from another checkpoint.") from None
        return epoch, format_.copy_plain(place)

    def share(self, epoch: int) -> tuple[Standing, int]:
        """What is dealt out in an epoch, and which lane this process is."""
        seat = self._seat()
        standing = Standing.beginning(self.config(is_batched=False), epoch, seat["ranks"], seat["workers"])
        return standing, seat["worker"] * seat["ranks"] + seat["rank"]

    def begin_of(self, iterator: StreamIterator) -> tuple[int, Place | None]:
        """Where a pass begins that is the latest from now on."""
        seat, loaded = self._held
        if self._place is not None and seat != self._seat():
            if loaded:
                raise DamagedStateError(
                    f"The stream was loaded for the share {seat}, and is read here as {self._seat()}. Load the state "
                    "where it is read: in each worker, as torchdata's StatefulDataLoader does."
                )
            # Only looked at, in another process.
            self._place = None
        self._latest = iterator.reference
        return self._epoch, self._place

    def end_of(self, iterator: StreamIterator, epoch: int) -> None:
        """Go on with the next epoch, if this was the latest pass."""
        if self._latest is iterator.reference:
            self._epoch, self._place, self._latest = epoch + 1, None, None

    def leave(self, iterator: StreamIterator, epoch: int, place: Place | None) -> None:
        """Know where a pass stood that nobody holds any more, if this was the latest."""
        if self._latest is iterator.reference:
            self._left = epoch, place

    def _stand(self) -> tuple[int, Place | None]:
        if self._latest is None:
            return self._epoch, self._place
        # One that was left is opened again to know whether a sample follows, and left again.
        iterator = self._latest() or StreamIterator(self, self._left)
        return iterator.stand()

    def __getstate__(self) -> dict[str, Any]:
        # Open files stay here.
        epoch, place = self._stand()
        held = self._held if self._latest is None else (self._seat(), False)
        return {**vars(self), "_epoch": epoch, "_place": place, "_held": held, "_latest": None}

    @staticmethod
    def _seat() -> dict[str, int]:
        info, topology = get_worker_info(), detect_topology()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return {"rank": topology.rank, "ranks": topology.num_replicas, "worker": worker, "workers": workers}

    def _with_step(self, step: Step) -> Stream:
        return self._with(lambda source: replace(source, steps=(*source.steps, step)))

    def _with(self, change: Callable[[Source], Source]) -> Stream:
        return Stream({name: change(source) for name, source in self.sources.items()}, self.mixing)


class StreamIterator:
    """One pass over this process's share of a stream, which can be resumed by itself as well.

    Args:
        stream: The stream; the pass begins where it stands at the first ``next()``.
        begin: Epoch and place where it begins instead.

    Attributes:
        reference: By this the stream knows the pass without holding it.
    """

    def __init__(self, stream: Stream, begin: tuple[int, Place | None] | None = None) -> None:
        self._stream, self._begin = stream, begin
        # Where its lane was opened, once it is begun.
        self._opened: tuple[int, Place | None] | None = None
        self._lane: Lane | None = None
        # A sample that was read ahead, and where that was.
        self._ahead: list[Any] = []
        self._place: Place | None = None
        self.reference = weakref.ref(self)

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        epoch, lane = self._open()
        try:
            return next(lane).values[0]
        except StopIteration:
            lane.close()
            self._stream.end_of(self, epoch)
            raise
        except BaseException:
            self._break_off(epoch, lane)
            raise

    def stand(self) -> tuple[int, Place | None]:
        """Epoch and place of the next sample, which is read to know that there is one."""
        epoch, lane = self._open()
        if not self._ahead:
            self._place = lane.place()
            try:
                self._ahead.append(next(lane).values[0])
            except StopIteration:
                return epoch + 1, None
            except BaseException as error:
                self._break_off(epoch, lane)
                # Whoever asks for that sample is told.
                if not isinstance(error, Exception):
                    raise
        return epoch, self._place

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, be it at its end: fresh plain data."""
        epoch, lane = self._open()
        return self._stream.pack(epoch, self._place if self._ahead else lane.place())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with a pass where ``state_dict`` was taken.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        self._begin = self._stream.unpack(state_dict)
        self._close()
        self._opened, self._ahead = None, []

    def _open(self) -> tuple[int, Lane]:
        if self._opened is None:
            began = self._stream.begin_of(self)
            self._opened = self._begin or began
        epoch, place = self._opened
        if self._lane is None:
            standing, lane = self._stream.share(epoch)
            worker = lane // standing.num_replicas
            self._lane = Lane(standing.config, standing.shares[lane], place, epoch=epoch, worker=worker)
        return epoch, self._lane

    def _break_off(self, epoch: int, lane: Lane) -> None:
        """Open the lane anew before the next sample: stages that an error went through have lost what they held."""
        self._opened = epoch, lane.place()
        self._close()

    def _close(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()

    def __del__(self) -> None:
        if self._opened is not None:
            epoch, place = self._opened
            if self._lane is not None:
                place = self._place if self._ahead else self._lane.place()
            self._stream.leave(self, epoch, place)
        self._close()


def as_stream(dataset: Any, seed: int | None = None, *, seed_samples: bool = True) -> Stream | None:
    """A dataset as a stream of shards; None where it has none that can be told apart.

    Args:
        dataset: Any dataset.
        seed: The seed of one that has none of its own.
        seed_samples: Whether its samples are seeded.
    """
    if isinstance(dataset, Stream):
        return dataset
    if is_hugging_face(dataset):
        dataset = HuggingFaceShards(dataset)
    if not isinstance(dataset, Shards):
        return None
    return Stream({ALONE: Source(shards=dataset, seed=seed, seed_samples=seed_samples)})
