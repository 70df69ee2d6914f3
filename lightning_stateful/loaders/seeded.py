"""Randomness inside a dataset as a function of (seed, epoch, sample)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.seeding import derive_seed
from lightning_stateful.samplers.marks import digest, is_plain_index
from lightning_stateful.samplers.randomness import seed_randomness


class Keyed(NamedTuple):
    """An index that a dataset is asked for by itself (``batch_size=None``), and the key to seed it by."""

    key: int
    index: Any


class SeededDataset(Dataset[Any]):
    """A dataset that seeds torch, NumPy and ``random`` before it reads each sample.

    It answers to batches of the form ``(key, indices)``, where ``key`` stands for (seed, epoch). Whoever reads a
    sample, in whatever process and company, finds the same random numbers; what the collate function draws follows
    from the last sample of its batch. Generators that the dataset holds itself are out of reach.

    A dataset with ``__getitems__`` is asked for one sample at a time; a Hugging Face dataset without a transform
    runs no random code and is read batch by batch. Every other attribute is the wrapped dataset's.

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
        """What stands at a :class:`Keyed` index; at a bare one unseeded, for a ``worker_init_fn`` that looks in."""
        if isinstance(index, Keyed):
            seed_randomness(derive_seed(index.key, _label(index.index, 0)))
            index = index.index
        return self.__dict__["dataset"][index]

    def __getitems__(self, keyed: tuple[int | list[int], Any]) -> Any:
        """Read ``indices`` of ``(key, indices)``, each under its own seed; there may be a key for each of them."""
        key, indices = keyed[0], list(keyed[1])
        keys = key if isinstance(key, list) else [key] * len(indices)
        dataset = self.__dict__["dataset"]
        if _runs_no_user_code(dataset):
            seed_randomness(derive_seed(keys[-1], _label(indices[-1], 0)))
            return dataset.__getitems__(indices)
        if _fetches_batches(dataset):
            fetched = zip(keys, indices, strict=True)
            return [_fetch_one(dataset, key, index, number) for number, (key, index) in enumerate(fetched)]
        samples = []
        for number, (key, index) in enumerate(zip(keys, indices, strict=True)):
            seed_randomness(derive_seed(key, _label(index, number)))
            samples.append(dataset[index])
        return samples


def _fetches_batches(dataset: Any) -> bool:
    # torch's Subset always has __getitems__ and passes it on.
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _runs_no_user_code(dataset: Any) -> bool:
    arrow = type(dataset).__module__.split(".")[0] == "datasets"
    return arrow and getattr(dataset, "_format_type", "custom") != "custom"


def _label(index: Any, number: int) -> Any:
    """What a sample's randomness goes by: its index, or, of an index that is no number, its place in the batch."""
    if isinstance(index, (int, str)):
        return index
    if not is_plain_index(index):
        return f"item {number}"
    single = isinstance(index, (np.generic, torch.Tensor)) and index.ndim == 0
    return int(index) if single else digest(index)


def _fetch_one(dataset: Any, key: int, index: Any, number: int) -> Any:
    seed_randomness(derive_seed(key, _label(index, number)))
    samples = dataset.__getitems__([index])
    if not isinstance(samples, list) or len(samples) != 1:
        raise ConfigurationError(
            f"{type(dataset).__name__}.__getitems__([{index}]) returned a {type(samples).__name__} and not a list of "
            "one sample, so its samples cannot be seeded one by one. Pass seed_samples=False to read whole batches."
        )
    return samples[0]
