"""Streams as people hold them: iterable datasets that can be shuffled, mapped, windowed, mixed and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lightning_stateful import state as format_
from lightning_stateful.errors import DamagedStateError
from lightning_stateful.index.checks import as_int
from lightning_stateful.samplers.world import detect_topology
from lightning_stateful.streams.hugging_face import HuggingFaceShards, is_hugging_face
from lightning_stateful.streams.lane import ALONE, Lane, StreamConfig
from lightning_stateful.streams.mixing import Mixing
from lightning_stateful.streams.shards import Shards
from lightning_stateful.streams.source import Source, Step
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
        self._place: dict[str, Any] | None = None
        self._lane: Lane | None = None

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
        """Keep the samples of which a function is true."""
        return self._with_step(Filtered(function))

    def windowed(self, width: int, step: int = 1) -> Stream:
        """Sliding windows: tuples of ``width`` consecutive samples of what one worker reads."""
        return self._with_step(Windowed(as_int("width", width), as_int("step", step)))

    def recurrent(self, function: Callable[[Any, Any], tuple[Any, Any]], initial: Any) -> Stream:
        """Carry a state from sample to sample: ``value, state = function(state, sample)`` gives ``value``.

        The state goes on through the samples that one worker reads and is part of a checkpoint; on other ranks or
        workers, shards that nobody has begun begin with ``initial``.
        """
        return self._with_step(Recurrent(function, initial))

    def config(self, **batching: Any) -> StreamConfig:
        """The configuration by which this stream is read."""
        return StreamConfig(sources=self.sources, mixing=self.mixing, **batching)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next iteration; a place within that same epoch is kept."""
        if as_int("epoch", epoch) != self._epoch:
            self._epoch, self._place, self._lane = int(epoch), None, None

    def __iter__(self) -> Iterator[Any]:
        standing, number = self._share()
        lane = Lane(
            standing.config,
            standing.shares[number],
            self._place,
            epoch=self._epoch,
            worker=number // standing.num_replicas,
            num_workers=standing.num_workers,
        )
        self._lane = lane
        for batch in lane:
            yield batch.values[0]
        if self._lane is lane:
            self._epoch, self._place, self._lane = self._epoch + 1, None, None

    def state_dict(self) -> dict[str, Any]:
        """Where the next sample comes from: fresh plain data."""
        standing, number = self._share()
        place = self._place if self._lane is None else self._lane.place()
        position = {"epoch": self._epoch, "lane": number, "lanes": standing.num_lanes, "place": place}
        return format_.pack(KIND, ORDER_VERSION, self.config(is_batched=False).describe(), position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with the next iteration.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        where = "The stream's state"
        format_.check(state_dict, where=where)
        format_.refuse_differences(state_dict, self.state_dict(), where=where)
        position = state_dict["position"]
        standing, number = self._share()
        share = {"lane": number, "lanes": standing.num_lanes}
        if any(position.get(name) != value for name, value in share.items()):
            raise DamagedStateError(
                f"{where} is that of share {position.get('lane')} of {position.get('lanes')}, and this process reads "
                f"share {number} of {standing.num_lanes}. Resume on the same ranks and workers, or through "
                "StreamDataModule or patch_dataloader, whose states fit any."
            )
        if type(position.get("epoch")) is not int or not isinstance(position.get("place"), (dict, type(None))):
            raise DamagedStateError(f"{where} holds no epoch and place: {position!r}.")
        self._epoch, self._place = position["epoch"], format_.copy_plain(position["place"])
        self._lane = None

    def _share(self) -> tuple[Standing, int]:
        info, topology = get_worker_info(), detect_topology()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        standing = Standing.beginning(self.config(is_batched=False), self._epoch, topology.num_replicas, workers)
        return standing, worker * topology.num_replicas + topology.rank

    def _with_step(self, step: Step) -> Stream:
        return self._with(lambda source: replace(source, steps=(*source.steps, step)))

    def _with(self, change: Callable[[Source], Source]) -> Stream:
        return Stream({name: change(source) for name, source in self.sources.items()}, self.mixing)


def as_stream(dataset: Any, seed: int = 0, *, seed_samples: bool = True) -> Stream | None:
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
