"""The lanes of a rank as a dataset that torch's loader runs, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.samplers.rng import seed_randomness
from lightning_stateful.streams.lane import Lane, LaneBatch, StreamConfig
from lightning_stateful.streams.place_text import News, PlaceTexts
from lightning_stateful.streams.share import Share
from lightning_stateful.streams.stage import Place


class LaneTask(NamedTuple):
    """What a lane is to read.

    Attributes:
        worker: Which of the rank's lanes it is; torch's worker of another number may run it.
        shares: Its share of every source.
        place: Where to begin.
        epoch: The pass it belongs to.
    """

    worker: int
    shares: Mapping[str, Share]
    place: Place | None
    epoch: int


class Sealed:
    """A place that torch hands on as it is: it would pin each number in it to memory.

    Attributes:
        place: The place.
    """

    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        self.place = place


class Delivery(NamedTuple):
    """What a lane hands over.

    Attributes:
        worker: The lane.
        place: Where it stands afterwards; as JSON, and without large states that it had before, if it comes from a
            worker.
        batch: The batch; None with the last delivery, which only says where the lane ended.
        is_end: Whether it is the last.
    """

    worker: int
    place: Sealed | News
    batch: Any
    is_end: bool


class LaneDataset(IterableDataset[Delivery]):
    """One lane for each worker process, or the only one in this process.

    Every other attribute is the user's dataset's, as a ``worker_init_fn`` may ask for.

    Args:
        config: How the stream is read.
        collate: Makes a batch of samples; of a single sample where the loader does not batch.
        dataset: The user's dataset.
        seed: Seeds what ``collate`` draws; None to leave it.
    """

    tasks: list[LaneTask]
    queues: list[Any]
    _process: int | None

    def __init__(self, config: StreamConfig, collate: Callable[[Any], Any], dataset: Any, seed: int | None) -> None:
        seeds = seed is not None and collate not in (default_collate, default_convert)
        seed = derive_seed("collate", seed or 0) if seeds else None
        # Persistent workers hold a copy of this dataset from their first pass: tasks reach them through queues.
        own: dict[str, Any] = {"tasks": [], "queues": [], "_process": None}
        vars(self).update(own, _config=config, _collate=collate, _dataset=dataset, _seed=seed)

    def __iter__(self) -> Iterator[Delivery]:
        info = get_worker_info()
        if info is None:
            task = self.tasks[0]
        else:
            # The number of this process, before it takes on that of its lane.
            self._process = info.id if self._process is None else self._process
            task = self.queues[self._process].get() if self.queues else self.tasks[self._process]
            # Datasets that divide themselves see the lane's number.
            torch_worker._worker_info = replace(info, id=task.worker, dataset=self._dataset)
        say: Callable[[Place], Sealed | News] = Sealed if info is None else PlaceTexts().news
        lane = Lane(
            self._config,
            task.shares,
            task.place,
            epoch=task.epoch,
            worker=task.worker,
        )
        try:
            for batch in lane:
                yield Delivery(task.worker, say(lane.place()), self._made(batch, task.epoch), False)
            yield Delivery(task.worker, say(lane.place()), None, True)
        finally:
            lane.close()

    def _made(self, batch: LaneBatch, epoch: int) -> Any:
        if self._seed is not None:
            seed_randomness(mixed_seed(self._seed, epoch, batch.shard, batch.number))
        return self._collate(batch.values if self._config.is_batched else batch.values[0])

    def hand_out(self) -> None:
        """Let workers that wait for them have their tasks."""
        for queue, task in zip(self.queues, self.tasks, strict=False):
            queue.put(task)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._dataset, name, value)
