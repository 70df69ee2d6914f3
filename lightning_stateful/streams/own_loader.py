"""Iterables of batches that are no DataLoader, as shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset

from lightning_stateful.samplers.state_codec import from_plain
from lightning_stateful.streams.own_stream import OwnIterator, OwnStream, begin_pass, has_state, load_into
from lightning_stateful.streams.shards import ShardIterator


class IterableBatches(IterableDataset[Any]):
    """An iterable of batches as the dataset of a DataLoader that hands them over as they are.

    Args:
        iterable: The iterable.
    """

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


class OwnLoader(OwnStream):
    """An iterable of batches that is no DataLoader; what it gives to a rank is a shard.

    Every epoch begins it anew by ``iter()``, as Lightning does. Where it or its iterator has a state, that is kept for
    each batch, and the state at the end of a pass is what the next one goes on from in another process.

    Args:
        loader: The iterable.
        num_replicas: Ranks, each of which has its own.
        is_checked: Whether its first batches tell that it is read again as before.
    """

    draws = False
    is_loader = True

    def __init__(self, loader: Any, num_replicas: int, *, is_checked: bool = True) -> None:
        super().__init__(loader, num_replicas, 1, is_checked=is_checked)
        # The latest pass in this process.
        self._latest: _OwnBatches | None = None

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        """The batches of a pass; ``state`` is one within it, or what :func:`carried` made of the pass before."""
        _set_epoch(self._dataset, epoch)
        if state is None:
            return self._pass(begin_pass(self._dataset, self._dataset), epoch)
        if "after" not in state:
            return self._pass(self._load(state), epoch, state["batches"])
        where = state["pass"], state["after"]["batches"] + state["since"]
        if self._latest is None or (self._latest.epoch, self._latest.number) != where:
            iterator = self._load(state["after"])
            deque(islice(iterator, state["since"]), maxlen=0)
            # At the end some loaders begin anew at once, and others once they have found nothing.
            found = list(islice(iterator, 1))
            if found and state["is_ended"]:
                return self._pass(chain(found, iterator), epoch, of=iterator)
            _set_epoch(self._dataset, epoch)
        return self._pass(begin_pass(self._dataset, self._dataset), epoch)

    def name(self, shard: int) -> str:
        """The iterable's class, and the rank."""
        return f"{type(self._dataset).__qualname__} (rank {shard})"

    def _load(self, state: Any) -> Any:
        if state["dataset"] is not None and has_state(self._dataset):
            self._dataset.load_state_dict(from_plain(state["dataset"]))
        iterator = begin_pass(self._dataset, self._dataset)
        load_into(iterator, self._dataset, state)
        return iterator

    def _pass(self, batches: Iterator[Any], epoch: int, number: int = 0, of: Any = None) -> _OwnBatches:
        self._latest = _OwnBatches(batches, self._dataset, of, epoch, number, marks=self._is_checked)
        return self._latest


class _OwnBatches(OwnIterator):
    """The batches of a pass over a loader, of which ``number`` have been given out."""

    def __init__(
        self, batches: Iterator[Any], loader: Any, iterator: Any, epoch: int, number: int, *, marks: bool
    ) -> None:
        super().__init__(batches, loader, marks=marks)
        if iterator is not None and iterator is not loader:
            self._holders["iterator"] = iterator
        self.epoch, self.number = epoch, number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = super().__next__()
        self.number += 1
        return batch

    def state(self) -> Any:
        state = super().state()
        return None if state is None else {**state, "batches": self.number}


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader its epoch, and the sampler that it has, as Lightning does."""
    batches = getattr(loader, "batch_sampler", None)
    for holder in (loader, getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        if callable(set_epoch := getattr(holder, "set_epoch", None)):
            set_epoch(epoch)
