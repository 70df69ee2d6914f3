"""Iterable datasets, and iterables of batches, as the shards of a stream."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice, repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode

from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.streams.node_shards import draws_orders
from lightning_stateful.streams.nodes import NodeState, Shards, StreamNode

# Samples by which a pass is told from others, and what of each counts.
_NUM_FIRST = 8
_MOST_NESTED = 8
_MOST_NUMBERS = 2**14
# Labels and tokens; bytes are mostly images.
_LABEL_TYPES = (torch.int16, torch.int32, torch.int64)
# How many passes over a dataset were begun in this process, by its id, beside a reference to it.
_begun: dict[int, tuple[Callable[[], Any], int]] = {}
# The samples of a pass, the dataset, and its iterator: either may have a state.
_Pass: TypeAlias = tuple[Iterator[Any], Any, Any]


class IterableShards(Shards):
    """An iterable dataset that divides itself; what it gives to one worker of one rank is a shard.

    The dataset may find out its worker from ``torch.utils.data.get_worker_info()``. If it, or its iterator, has
    ``state_dict`` and ``load_state_dict``, a resume goes on from that state. One without may count its passes itself,
    as by ``self.epoch += 1`` in its ``__iter__``: the earlier ones are begun again then.

    Args:
        dataset: The dataset. With a ``set_epoch`` it is told the epoch.
        num_replicas: Ranks.
        num_workers: Worker slots of a rank.
        beginning: What :func:`beginning_of` gave for the dataset before anybody read it.
        stays: Whether the same object is read in every pass, and not a copy in a worker that ends with the pass.
        is_checked: Whether its first samples tell that it is read again as before.
    """

    draws = True
    pinned = True

    def __init__(
        self,
        dataset: Any,
        num_replicas: int,
        num_workers: int,
        beginning: Any = None,
        *,
        stays: bool = True,
        is_checked: bool = True,
    ) -> None:
        self._dataset, self._num_replicas, self._num_workers = dataset, num_replicas, num_workers
        self._beginning, self._stays, self._is_checked = beginning, stays, is_checked
        if not has_state(dataset):
            self.reread = "it has no state_dict and load_state_dict"

    @property
    def num_shards(self) -> int:
        """Worker slots of all ranks."""
        return self._num_replicas * self._num_workers

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        """The samples of a pass in this process."""
        return IterableNode(self._open_pass, epoch, is_checked=self._is_checked, counts=self.is_loader)

    def begin_passes(self, epoch: int, *, surely: bool = False) -> None:
        """Begin the passes before ``epoch`` for a dataset without state and ``set_epoch``, unless two begin alike."""
        dataset = self._dataset
        begins_at_its_state = has_state(dataset) and not self.is_loader
        if not self._stays or begins_at_its_state or callable(getattr(dataset, "set_epoch", None)):
            return
        before: str | None = None
        while (begun := _num_begun(dataset)) < epoch:
            node = IterableNode(self._open_pass, begun, is_checked=True, counts=False)
            node.reset()
            node.next_many(_NUM_FIRST)
            if begun and node.first() == before and not surely:
                _note_begun(dataset, epoch)
            before = node.first()
            node.close()

    def name(self, shard: int) -> str:
        """The dataset's class, rank and worker."""
        worker, rank = divmod(shard, self._num_replicas)
        return f"{type(self._dataset).__qualname__} (rank {rank}, worker {worker})"

    def describe(self) -> dict[str, Any]:
        """The dataset's class."""
        return {"class": type(self._dataset).__qualname__}

    def _open_pass(self, node: IterableNode, state: NodeState | None) -> _Pass:
        dataset = self._dataset
        if has_state(dataset):
            # What it counts while it is read stays in a copy: the next pass begins from the beginning.
            dataset = copy.copy(dataset)
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(node.epoch)
        iterator = _begin_pass(self._dataset, dataset, state or {"dataset": self._beginning, "iterator": None})
        return iterator, dataset, iterator


class LoaderShards(IterableShards):
    """An iterable of batches that is no DataLoader; what it gives to a rank is a shard.

    Every epoch begins it anew by ``iter()``, as Lightning does. Where it or its iterator has a state, that is kept for
    each batch, and the state at the end of a pass is what the next one goes on from in another process: its node is
    reset to ``{"after": state, "since": batches since that state, "pass": epoch of the state, "is_ended": bool}``.

    Args:
        loader: The iterable.
        num_replicas: Ranks, each of which has its own.
        is_checked: Whether its first batches tell that it is read again as before.
    """

    draws = False
    is_loader = True

    def __init__(self, loader: Any, num_replicas: int, *, is_checked: bool = True) -> None:
        super().__init__(loader, num_replicas, 1, is_checked=is_checked)
        root = getattr(loader, "root", None)
        if isinstance(root, BaseNode) and draws_orders(root):
            self.warning = (
                f"{type(loader).__qualname__} has a sampler that draws its order from a generator, and its state does "
                "not say which order: a resume within an epoch repeats samples and leaves out others. Train on the "
                "graph, with StreamDataModule(graph), which seeds the sampler by epoch; or give it a sampler with "
                "set_epoch."
            )
        # The node that was reset last in this process.
        self._latest: IterableNode | None = None

    def name(self, shard: int) -> str:
        """The iterable's class, and the rank."""
        return f"{type(self._dataset).__qualname__} (rank {shard})"

    def _open_pass(self, node: IterableNode, state: NodeState | None) -> _Pass:
        loader, epoch = self._dataset, node.epoch
        latest, self._latest = self._latest, node
        _set_epoch(loader, epoch)
        if state is not None and "after" in state:
            stood = state["pass"], state["after"]["batches"] + state["since"]
            if latest is None or (latest.epoch, latest.num_given) != stood:
                iterator = _begin_pass(loader, loader, state["after"])
                deque(islice(iterator, state["since"]), maxlen=0)
                # At the end some loaders begin anew at once, and others once they have found nothing.
                found = list(islice(iterator, 1))
                if found and state["is_ended"]:
                    return chain(found, iterator), loader, iterator
                _set_epoch(loader, epoch)
            state = None
        iterator = _begin_pass(loader, loader, state)
        return iterator, loader, iterator


class IterableBatches(IterableDataset[Any]):
    """An iterable of batches as the dataset of a DataLoader that hands them over as they are.

    Args:
        iterable: The iterable.
    """

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


class IterableNode(StreamNode[Any]):
    """The samples of one pass over an iterable dataset.

    Args:
        open_pass: Begins the pass, at a state or at the beginning, for this node.
        epoch: The epoch.
        is_checked: Whether the first samples tell the pass from others.
        counts: Whether samples are counted.

    State:
        ``dataset`` and ``iterator``: their ``state_dict()``, or None; ``batches`` given, where they are counted. None
        where neither has a state.
    """

    def __init__(
        self, open_pass: Callable[[IterableNode, Any], _Pass], epoch: int, *, is_checked: bool, counts: bool
    ) -> None:
        super().__init__()
        self.epoch, self.num_given = epoch, 0
        self._open_pass, self._is_checked, self._counts = open_pass, is_checked, counts
        self._samples: Any = None
        self._first: str | None = None

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin the pass, or go to where a state was taken."""
        super().reset(initial_state)
        self.close()
        self._samples, dataset, iterator = self._open_pass(self, initial_state)
        self.num_given = (initial_state or {}).get("batches", 0)
        self._holders = {"dataset": dataset, "iterator": None if iterator is dataset else iterator}
        # What has a state is not read again.
        is_read_again = not any(map(has_state, self._holders.values()))
        self._num_looked_at = _NUM_FIRST if self._is_checked and is_read_again else 0
        self._first = None

    def __iter__(self) -> Iterator[Any]:
        # Without a call in between, once there is nothing to count.
        return self if self._samples is None or self._counts or self._num_looked_at else self._samples

    def next(self) -> Any:
        """The next sample."""
        sample = next(self._samples)
        self.num_given += 1
        if self._num_looked_at:
            self._num_looked_at -= 1
            self._first = digest_of_sample(sample, self._first)
        return sample

    def first(self) -> str | None:
        """Digest of the first samples of what is read again, as it has no state."""
        return self._first

    def get_state(self) -> Any:
        """The states of the dataset and the iterator."""
        if not any(map(has_state, self._holders.values())):
            return None
        states = {
            name: to_plain(holder.state_dict(), owner=name) if has_state(holder) else None
            for name, holder in self._holders.items()
        }
        return {**states, "batches": self.num_given} if self._counts else states

    def close(self) -> None:
        """Close a generator."""
        if callable(close := getattr(self._samples, "close", None)):
            close()
        self._samples = None


def digest_of_sample(sample: Any, before: str | None = None) -> str:
    """Digest of a sample's labels, or of all that it holds if there are none, chained to that of the samples before.

    Floats and images may be augmented otherwise each time, and are not looked at where a label tells samples apart.
    """
    return digest(_parts_of(sample, only_labels=True) or _parts_of(sample, only_labels=False), before or "")


def _parts_of(value: Any, *, only_labels: bool, depth: int = 0) -> list[Any]:
    """The numbers and strings in a sample, and shapes and first numbers of arrays; or only integers and strings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth < _MOST_NESTED:
        return [part for item in value for part in _parts_of(item, only_labels=only_labels, depth=depth + 1)]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        is_label = value.dtype in _LABEL_TYPES
        parts = [*value.shape, value.detach().reshape(-1)[:_MOST_NUMBERS]]
    elif isinstance(value, np.ndarray):
        is_label = value.dtype.kind in "iuSU" and value.itemsize > 1
        parts = [*value.shape, value.reshape(-1)[:_MOST_NUMBERS]]
    else:
        is_label = isinstance(value, (int, str, bytes, np.integer))
        parts = [value if is_label or isinstance(value, float) else type(value).__qualname__]
    return parts if is_label or not only_labels else []


def _begin_pass(counted: Any, dataset: Any, state: NodeState | None = None) -> Any:
    """The iterator of a dataset, or of a copy of it, where a state was taken; the pass is counted."""
    held = None if state is None else state["dataset"]
    if held is not None:
        dataset.load_state_dict(from_plain(held))
    _note_begun(counted, _num_begun(counted) + 1)
    iterator = iter(dataset)
    if state is not None and state["iterator"] is not None:
        iterator.load_state_dict(from_plain(state["iterator"]))
    elif iterator is dataset and held is not None and to_plain(dataset.state_dict()) != held:
        # It is its own iterator, and has begun anew at iter().
        dataset.load_state_dict(from_plain(held))
    return iterator


def _num_begun(dataset: Any) -> int:
    held, number = _begun.get(id(dataset), (None, 0))
    return number if held is not None and held() is dataset else 0


def _note_begun(dataset: Any, number: int) -> None:
    key = id(dataset)
    try:
        held: Callable[[], Any] = weakref.ref(dataset, lambda _: _begun.pop(key, None))
    except TypeError:
        # Its class has no weak references: it is held for good.
        held = repeat(dataset).__next__
    _begun[key] = held, number


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader its epoch, and the sampler that it has, as Lightning does."""
    batches = getattr(loader, "batch_sampler", None)
    for holder in (loader, getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        if callable(set_epoch := getattr(holder, "set_epoch", None)):
            set_epoch(epoch)


def beginning_of(dataset: Any) -> Any:
    """The state of a dataset that nobody has read yet, as plain data; None if it has none."""
    if not has_state(dataset):
        return None
    try:
        return to_plain(dataset.state_dict())
    except Exception:
        # Some have a state only once they are iterated.
        return None


def has_state(holder: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))
