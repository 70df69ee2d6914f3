"""Any iterable dataset, which divides itself, or does not, and may know where it stands."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.streams.shards import ShardIterator, Shards

# Samples by which a pass is told from others, and how much of each array counts.
_FIRST = 8
_MOST_BYTES = 2**16
# Passes over a dataset that were begun in this process, by its id.
_begun: dict[int, tuple[Any, int]] = {}


class OwnStream(Shards):
    """An iterable dataset; what it gives to one worker of one rank is a shard.

    The dataset may find out its worker from ``torch.utils.data.get_worker_info()``, as torch has it. If it, or its
    iterator, has ``state_dict`` and ``load_state_dict``, as torchdata has it, that is where a resume goes on. One
    without may count its passes itself, as by ``self.epoch += 1`` in its ``__iter__``: they are begun again then.

    Args:
        dataset: The dataset. With a ``set_epoch`` it is told the epoch.
        num_replicas: Ranks.
        num_workers: Lanes of a rank.
        beginning: What :func:`beginning_of` said of the dataset before anybody read it.
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
        """Lanes of all ranks."""
        return self._num_replicas * self._num_workers

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        """What the dataset gives to a lane."""
        dataset, held = self._dataset, state or {"dataset": self._beginning, "iterator": None}
        if has_state(dataset):
            # What it counts while it is read stays in a copy: the next reading begins from the beginning.
            dataset = copy.copy(dataset)
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        if held["dataset"] is not None and has_state(dataset):
            dataset.load_state_dict(from_plain(held["dataset"]))
        iterator = begin_pass(self._dataset, dataset)
        load_into(iterator, dataset, held)
        return OwnIterator(iterator, dataset, marks=self._is_checked)

    def begin_passes(self, epoch: int, *, surely: bool = False) -> None:
        """Begin the passes before ``epoch`` for a dataset without state and ``set_epoch``, unless two begin alike."""
        dataset = self._dataset
        begins_at_its_state = has_state(dataset) and not self.is_loader
        if not self._stays or begins_at_its_state or callable(getattr(dataset, "set_epoch", None)):
            return
        before: str | None = None
        while (begun := _passes_of(dataset)) < epoch:
            pass_ = OwnIterator(begin_pass(dataset, dataset), dataset)
            deque(islice(pass_, _FIRST), maxlen=0)
            pass_.close()
            if begun and pass_.first() == before and not surely:
                _note_passes(dataset, epoch)
            before = pass_.first()

    def name(self, shard: int) -> str:
        """The dataset's class, and the lane."""
        worker, rank = divmod(shard, self._num_replicas)
        return f"{type(self._dataset).__qualname__} (rank {rank}, worker {worker})"

    def describe(self) -> dict[str, Any]:
        """The dataset's class."""
        return {"class": type(self._dataset).__qualname__}


class OwnIterator(ShardIterator):
    """A pass over a dataset.

    Args:
        iterator: What ``iter()`` gave.
        dataset: The dataset.
        marks: Whether its first samples tell the pass from others.
    """

    def __init__(self, iterator: Iterator[Any], dataset: Any, *, marks: bool = True) -> None:
        self._iterator = iterator
        self._holders = {"dataset": dataset, "iterator": None if iterator is dataset else iterator}
        # What has a state is not read again.
        self._mark = _Mark() if marks and not has_state(dataset) and not has_state(iterator) else None

    def __iter__(self) -> Iterator[Any]:
        return self._iterator if self._mark is None or self._mark.is_full else self

    def __next__(self) -> Any:
        sample = next(self._iterator)
        if self._mark is not None and not self._mark.is_full:
            self._mark.add(sample)
        return sample

    def first(self) -> str | None:
        """Of what has no state, which is read again."""
        return None if self._mark is None else self._mark.digest()

    def state(self) -> Any:
        """The dataset's and the iterator's own."""
        states = {
            name: to_plain(holder.state_dict(), owner=name) if has_state(holder) else None
            for name, holder in self._holders.items()
        }
        return states if any(state is not None for state in states.values()) else None

    def close(self) -> None:
        """Close a generator."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


class _Mark:
    """Digest of the first samples of a pass: of the whole numbers and strings in them, or else of all that they hold.

    Floats and images may be augmented otherwise each time, and are not looked at where a label tells samples apart.
    """

    def __init__(self) -> None:
        self._of_names, self._of_all = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        self._has_names = False
        self._number = 0

    @property
    def is_full(self) -> bool:
        """Whether no further sample is looked at."""
        return self._number >= _FIRST

    def add(self, sample: Any) -> None:
        """Another sample."""
        self._number += 1
        self._feed(sample, 0)

    def digest(self) -> str | None:
        """Of the samples so far; None of none."""
        hashed = self._of_names if self._has_names else self._of_all
        return hashed.hexdigest() if self._number else None

    def _feed(self, value: Any, depth: int) -> None:
        if isinstance(value, (int, str, bytes, np.integer)):
            self._name(repr(value).encode())
        elif isinstance(value, torch.Tensor):
            if value.layout == torch.strided:
                plain = value.detach().reshape(-1)[:_MOST_BYTES].cpu().contiguous()
                self._array(value.shape, plain.view(torch.uint8).numpy(), plain.dtype in _NAMING)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._array(value.shape, value.reshape(-1)[:_MOST_BYTES], value.dtype.kind in "iuSU" and value.itemsize > 1)
        elif isinstance(value, Mapping) and depth < _FIRST:
            self._of_all.update(repr(list(value)).encode())
            self._feed(list(value.values()), depth + 1)
        elif isinstance(value, (list, tuple)) and depth < _FIRST:
            for part in value:
                self._feed(part, depth + 1)
        else:
            self._of_all.update((repr(value) if isinstance(value, float) else type(value).__qualname__).encode())

    def _array(self, shape: Any, values: Any, is_name: bool) -> None:
        text = f"{tuple(shape)}".encode() + values.tobytes()
        if is_name:
            self._name(text)
        else:
            self._of_all.update(text)

    def _name(self, text: bytes) -> None:
        self._has_names = True
        self._of_names.update(text + b";")
        self._of_all.update(text + b";")


# Labels and tokens; bytes are mostly images.
_NAMING = (torch.int16, torch.int32, torch.int64)


def begin_pass(dataset: Any, iterated: Any) -> Any:
    """Begin a pass over a dataset, or over a copy of it, and count it."""
    _note_passes(dataset, _passes_of(dataset) + 1)
    return iter(iterated)


def load_into(iterator: Any, dataset: Any, held: Mapping[str, Any]) -> None:
    """Load the state of an iterator that has one, or of a dataset that is its own and has begun anew at ``iter()``."""
    if held["iterator"] is not None:
        iterator.load_state_dict(from_plain(held["iterator"]))
    elif iterator is dataset and held["dataset"] is not None and to_plain(dataset.state_dict()) != held["dataset"]:
        dataset.load_state_dict(from_plain(held["dataset"]))


def _passes_of(dataset: Any) -> int:
    held, number = _begun.get(id(dataset), (None, 0))
    return number if held is not None and held() is dataset else 0


def _note_passes(dataset: Any, number: int) -> None:
    key = id(dataset)
    try:
        held: Any = weakref.ref(dataset, lambda _: _begun.pop(key, None))
    except TypeError:
        # Of a class that cannot be referred to weakly.
        def held() -> Any:
            return dataset

    _begun[key] = held, number


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
