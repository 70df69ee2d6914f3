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
    """

    draws = True
    pinned = True

    def __init__(self, dataset: Any, num_replicas: int, num_workers: int) -> None:
        self._dataset, self._num_replicas, self._num_workers = dataset, num_replicas, num_workers
        if not _has_state(dataset):
            self.reread = "it has no state_dict and load_state_dict"

    @property
    def num_shards(self) -> int:
        """Lanes of all ranks."""
        return self._num_replicas * self._num_workers

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        """What the dataset gives to a lane."""
        dataset = self._dataset
        if _has_state(dataset):
            # What it counts while it is read stays in a copy: the next reading begins from the beginning.
            dataset = copy.copy(dataset)
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        if state is not None and _has_state(dataset):
            dataset.load_state_dict(from_plain(state))
        iterator: Any = iter(dataset)
        if state is not None and not _has_state(dataset):
            iterator.load_state_dict(from_plain(state))
        return _OwnIterator(iterator, next((held for held in (dataset, iterator) if _has_state(held)), None))

    def name(self, shard: int) -> str:
        """The dataset's class, and the lane."""
        worker, rank = divmod(shard, self._num_replicas)
        return f"{type(self._dataset).__qualname__} (rank {rank}, worker {worker})"

    def describe(self) -> dict[str, Any]:
        """The dataset's class."""
        return {"class": type(self._dataset).__qualname__}


class _OwnIterator(ShardIterator):
    def __init__(self, iterator: Iterator[Any], holder: Any) -> None:
        self._iterator, self._holder = iterator, holder

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def state(self) -> Any:
        return None if self._holder is None else to_plain(self._holder.state_dict())

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


def _has_state(holder: Any) -> bool:
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))
