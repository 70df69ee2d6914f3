"""What one rank reads of a stream: the batches of its lanes, in turn, and where each lane stands after each."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind, _InfiniteConstantSampler

from lightning_stateful.errors import ConfigurationError, StatefulError, StreamError
from lightning_stateful.loaders.lanes import Delivery, LaneDataset, LaneTask, Sealed
from lightning_stateful.samplers.user_class import copied
from lightning_stateful.streams.lane import Lane, StreamConfig
from lightning_stateful.streams.place_text import Text, as_place, heard
from lightning_stateful.streams.stage import Place

# What torch says when a worker is gone, or slow.
_OF_WORKERS = re.compile(r"DataLoader (worker|timed out)|Pin memory thread")


class RankReader:
    """Runs the lanes of a rank in a copy of the user's loader, pass after pass.

    Args:
        loader: The user's loader; a copy of it is run, of its class and with its options.
        config: How the stream is read.
        seed: Seeds the workers; what ``collate_fn`` draws follows from it too.
        seed_samples: Whether that is so.
    """

    def __init__(self, loader: DataLoader[Any], config: StreamConfig, seed: int, *, seed_samples: bool) -> None:
        self._original = loader
        self._name, self._config = type(loader).__qualname__, config
        self.num_workers = loader.num_workers
        self._dataset = LaneDataset(config, loader.collate_fn, loader.dataset, seed if seed_samples else None)
        self._generator = torch.Generator()
        self._arrived: deque[Delivery] = deque()
        self.loader: Any = copied(loader)
        # Past torch's guard against changes.
        vars(self.loader).update(
            dataset=self._dataset,
            batch_size=None,
            batch_sampler=None,
            sampler=_InfiniteConstantSampler(),
            collate_fn=_as_it_is,
            drop_last=False,
            generator=self._generator,
            _dataset_kind=_DatasetKind.Iterable,
            _iterator=None,
            _arrived=self._arrived,
        )
        kind: Any = type(loader)
        self._is_plain = kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
        # A class: a function that knew the loader would keep its workers alive until the garbage collector came.
        self.loader.__class__ = _unwrapping(kind)
        if loader.num_workers and loader.persistent_workers:
            context: Any = loader.multiprocessing_context or torch.multiprocessing
            self._dataset.queues = [context.SimpleQueue() for _ in range(loader.num_workers)]
        self._batches: Iterator[Any] | None = None
        # A worker's is JSON until somebody wants it.
        self.places: list[Place | Text] = []

    def begin(self, tasks: Sequence[LaneTask], seed: int, name_shards: Callable[[int, Place], list[str]]) -> None:
        """Begin to read.

        Args:
            tasks: What each lane reads, the one first whose batch comes first.
            seed: Seeds torch's workers.
            name_shards: The shards that a worker has open at a place, by name, for errors.
        """
        self.end()
        self._name_shards = name_shards
        self._arrived.clear()
        self._generator.manual_seed(seed)
        self.places = [self._begun(task) for task in sorted(tasks, key=lambda task: task.worker)]
        self._dataset.tasks = list(tasks)
        # What was set since the last pass.
        vars(self.loader).update({name: getattr(self._original, name) for name in ("worker_init_fn", "timeout")})
        self._batches = self._iterated()

    def _iterated(self) -> Iterator[Any]:
        loader = self.loader
        if self._is_plain and not loader.num_workers and not loader.pin_memory:
            # What torch's iterator does here, without its bookkeeping for each batch.
            return _Unwrapping(iter(self._dataset), self._arrived)
        return iter(loader)

    def next(self) -> Any:
        """The next batch; :attr:`places` then says where the lanes stand after it.

        Raises:
            StopIteration: The rank's share is read.
            StreamError: A worker is gone, or a shard could not be read.
        """
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self._note_ends()
            if self._arrived:
                raise self._other_count("fewer") from None
            self._batches = None
            raise
        except Exception as error:
            self.end()
            if self.num_workers:
                _forget_frames(error)
            ours = isinstance(error, StatefulError) or not isinstance(error, RuntimeError)
            if ours or not _OF_WORKERS.search(str(error)):
                raise error
            # Those that persist are not all there, or still at it.
            self.shut_down()
            raise self._broken_off(error) from error
        self._note_ends()
        if not self._arrived:
            raise self._other_count("more")
        self._note(self._arrived.popleft())
        return batch

    def end(self) -> None:
        """Stop reading; workers that are not persistent end."""
        self._batches = None

    def shut_down(self) -> None:
        """End persistent workers as well."""
        self.end()
        self.loader._iterator = None
        # Within Fabric.launch, Lightning records what is set on loaders, iterators too.
        vars(self.loader).pop("__pl_attrs_record", None)

    def _begun(self, task: LaneTask) -> Place:
        return Lane(self._config, task.shares, task.place).place() if task.place is None else task.place

    def _note_ends(self) -> None:
        while self._arrived and self._arrived[0].is_end:
            self._note(self._arrived.popleft())

    def _note(self, delivery: Delivery) -> None:
        # A new list: the old one is part of the history.
        self.places = [*self.places]
        worker, place = delivery.worker, delivery.place
        self.places[worker] = place.place if isinstance(place, Sealed) else heard(place, self.places[worker])

    def _other_count(self, which: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._name}.__iter__ gives {which} batches than it reads, so nobody can say what the model was trained "
            "on. Give one for each."
        )

    def _broken_off(self, error: Exception) -> StreamError:
        lanes = ((task.worker, as_place(self.places[task.worker])) for task in self._dataset.tasks)
        reading = sorted({shard for worker, place in lanes for shard in self._name_shards(worker, place)})
        return StreamError(
            f"The workers broke off: {error} They were reading {', '.join(reading)}. Nothing is lost: the state is "
            "that of the last batch handed over. Look for a worker out of memory or a slow disk, and resume."
        )


def _forget_frames(error: BaseException | None) -> None:
    """Frames of torch's would keep workers alive as long as the error."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@cache
def _unwrapping(kind: Any) -> Any:
    """A class of loaders that hand over the batches of deliveries."""

    def get_iterator(self: Any) -> Any:
        iterator = _Unwrapping(kind._get_iterator(self), self._arrived)
        self.dataset.hand_out()
        return iterator

    return type(kind.__name__, (kind,), {"_get_iterator": get_iterator, "__doc__": kind.__doc__})


class _Unwrapping:
    """torch's iterator, which hands over the batches and puts aside where they come from."""

    def __init__(self, iterator: Any, arrived: deque[Delivery]) -> None:
        self._iterator, self._arrived = iterator, arrived

    def __iter__(self) -> _Unwrapping:
        return self

    def __next__(self) -> Any:
        while True:
            delivery = next(self._iterator)
            batch = delivery.batch
            self._arrived.append(Delivery(delivery.worker, delivery.place, None, delivery.is_end))
            if not delivery.is_end:
                return batch

    def __len__(self) -> int:
        return len(self._iterator)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # Of persistent workers, for another pass.
        self._iterator._reset(loader, first_iter)
        loader.dataset.hand_out()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_iterator" not in vars(self):
            raise AttributeError(name)
        return getattr(self._iterator, name)


def _as_it_is(delivery: Any) -> Any:
    return delivery
