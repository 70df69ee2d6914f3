"""Randomness inside a dataset as a function of (seed, loader, epoch, batch)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import Dataset

from lightning_stateful.samplers.rng import seed_randomness


class Keyed(NamedTuple):
    """A single index (``batch_size=None``), told from a user's own tuple by its type, and the seed to read it under."""

    seed: int
    index: Any


class SeededDataset(Dataset[Any]):
    """A dataset that seeds torch, NumPy and ``random`` before it reads each batch.

    It answers to ``(seed, indices)`` of a batch, and to a :class:`Keyed` index. Whoever reads a batch, in whatever
    process, finds the same random numbers, and so does the collate function after it. Generators that the dataset holds
    itself are out of reach. A dataset with ``__getitems__`` is asked for whole batches, as torch does. Every other
    attribute is the wrapped dataset's.

    Args:
        dataset: A map-style dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before __dict__ is filled.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["dataset"], name, value)

    def __len__(self) -> int:
        return len(self.__dict__["dataset"])

    def __getitem__(self, index: Any) -> Any:
        """The sample at a :class:`Keyed` index; at a bare one unseeded, for a ``worker_init_fn`` that looks in."""
        if isinstance(index, Keyed):
            seed_randomness(index.seed)
            index = index.index
        return self.__dict__["dataset"][index]

    def __getitems__(self, batch: tuple[int, Any]) -> Any:
        """The samples of a batch, ``(seed, indices)``."""
        seed, indices = batch
        seed_randomness(seed)
        return read_batch(self.__dict__["dataset"], indices)


def read_batch(dataset: Any, indices: Any) -> Any:
    """The samples of a dataset at ``indices``, as torch reads them: all at once where it has ``__getitems__``."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
