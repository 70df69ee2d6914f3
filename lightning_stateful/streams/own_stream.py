"""Any iterable dataset, which divides itself, or does not, and may know where it stands."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from lightning_stateful.samplers.own_words import from_plain, to_plain
from lightning_stateful.streams.shards import ShardIterator, Shards


class OwnStream(Shards):
    """An iterable dataset; what it gives to one worker of one rank is a shard.

    The dataset may find out its worker from ``torch.utils.data.get_worker_info()``, as torch has it. If it, or its
    iterator, has ``state_dict`` and ``load_state_dict``, as torchdata has it, that is where a resume goes on.

    Args:
        dataset: The dataset. With a ``set_epoch`` it is told the epoch.
        num_replicas: Ranks.
        num_workers: Lanes of a rank.
        beginning: What :func:`beginning_of` said of the dataset before anybody read it.
    """

    draws = True
    pinned = True

    def __init__(self, dataset: Any, num_replicas: int, num_workers: int, beginning: Any = None) -> None:
        self._dataset, self._num_replicas, self._num_workers = dataset, num_replicas, num_workers
        self._beginning = beginning
        if not _has_state(dataset):
            self.reread = "it has no state_dict and load_state_dict"

    @property
    def num_shards(self) -> int:
        """Lanes of all ranks."""
        return self._num_replicas * self._num_workers

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        """What the dataset gives to a lane."""
        dataset, held = self._dataset, state or {"dataset": self._beginning, "iterator": None}
        if _has_state(dataset):
            # What it counts while it is read stays in a copy: the next reading begins from the beginning.
            dataset = copy.copy(dataset)
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        if held["dataset"] is not None and _has_state(dataset):
            dataset.load_state_dict(from_plain(held["dataset"]))
        iterator: Any = iter(dataset)
        if held["iterator"] is not None:
            iterator.load_state_dict(from_plain(held["iterator"]))
        return _OwnIterator(iterator, dataset)

    def name(self, shard: int) -> str:
        """The dataset's class, and the lane."""
        worker, rank = divmod(shard, self._num_replicas)
        return f"{type(self._dataset).__qualname__} (rank {rank}, worker {worker})"

    def describe(self) -> dict[str, Any]:
        """The dataset's class."""
        return {"class": type(self._dataset).__qualname__}


class _OwnIterator(ShardIterator):
    def __init__(self, iterator: Iterator[Any], dataset: Any) -> None:
        self._iterator = iterator
        self._holders = {"dataset": dataset, "iterator": None if iterator is dataset else iterator}

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def state(self) -> Any:
        states = {
            name: to_plain(holder.state_dict(), owner=name) if _has_state(holder) else None
            for name, holder in self._holders.items()
        }
        return states if any(state is not None for state in states.values()) else None

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


def beginning_of(dataset: Any) -> Any:
    """The state of a dataset that nobody has read yet, as plain data; None if it has none."""
    if not _has_state(dataset):
        return None
    try:
        return to_plain(dataset.state_dict())
    except Exception:
        # Some have a state only once they are iterated.
        return None


def _has_state(holder: Any) -> bool:
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))
