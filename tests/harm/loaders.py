"""Loaders that are more than torch's DataLoader, and iterable datasets, of others and of users."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from harm.basics import LENGTH, num_ranks, own_rank, permutation


class Prefetches:
    """Reads a DataLoader ahead in a thread."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue()
        end = object()

        def read() -> None:
            for batch in self.loader:
                batches.put(batch)
            batches.put(end)

        threading.Thread(target=read, daemon=True).start()
        while (batch := batches.get()) is not end:
            yield batch


class Batches:
    """A plain iterable of batches, shuffled anew whenever it is iterated."""

    def __len__(self) -> int:
        return LENGTH // 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.permutation(LENGTH)
        return (torch.from_numpy(order[start : start + 2]) for start in range(0, LENGTH, 2))


class Samples(IterableDataset[int]):
    """Yields the samples in order, on each rank and in each worker."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class SizedSamples(Samples):
    """The same with a len."""

    def __len__(self) -> int:
        return LENGTH


class CountsPasses(Samples):
    """Has another order in each pass, by a count of its own."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(permutation(self.passes))


class CountsWithState(CountsPasses):
    """The same, with a state: pass and place in it."""

    place = begins_at = 0

    def __iter__(self) -> Iterator[int]:
        self.place, self.begins_at = self.begins_at, 0
        for index in permutation(self.passes)[self.place :]:
            self.place += 1
            yield index
        self.passes, self.place = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.begins_at = state["passes"], state["place"]


class GoesOnReading(Samples):
    """Goes on where the last ``iter()`` was left, in steps of an epoch's samples."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            self.read += 1
            yield (self.read - 1) * 5 % LENGTH


class OwnIterable(Samples):
    """Is its own iterator, which begins anew at ``iter()``."""

    def __iter__(self) -> OwnIterable:
        self.left = list(range(LENGTH))
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


class DividesItself(Samples):
    """Gives each worker of each rank its samples, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        return iter(range(own_rank() * workers + number, LENGTH, num_ranks() * workers))


class ShuffledByTorch(Samples):
    """Draws its order from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


class HuggingFaceText(Samples):
    """torchtitan: its rank's samples for ever, a buffer of tokens, and both in its state."""

    def __init__(self) -> None:
        self._sample_idx, self._all_tokens = 0, list[int]()
        self._data = list(range(own_rank(), LENGTH, num_ranks()))

    def __iter__(self) -> Iterator[int]:
        while True:
            for sample in self._data[self._sample_idx :]:
                self._all_tokens.append(sample)
                self._sample_idx += 1
                while len(self._all_tokens) >= 2:
                    pair, self._all_tokens = self._all_tokens[:2], self._all_tokens[2:]
                    yield from pair
            self._sample_idx = 0

    def state_dict(self) -> dict[str, Any]:
        return {"sample_idx": self._sample_idx, "token_buffer": list(self._all_tokens)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sample_idx, self._all_tokens = state["sample_idx"], list(state["token_buffer"])
