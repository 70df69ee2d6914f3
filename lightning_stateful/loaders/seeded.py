"""Randomness inside a dataset as a function of (seed, epoch, sample)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.seeding import derive_seed


def seed_randomness(seed: int) -> None:
    """Seed the CPU generators of torch, NumPy and ``random`` that augmentation uses; other devices are left alone."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def keep_randomness() -> Iterator[None]:
    """Put the CPU generators of torch, NumPy and ``random`` back at the end."""
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy: Any = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        # NumPy takes a list here many times faster than the array it gave.
        np.random.set_state((of_numpy[0], of_numpy[1].tolist(), *of_numpy[2:]))


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

    def __getitem__(self, index: int) -> Any:
        """A sample by its bare index, unseeded: for a ``worker_init_fn`` that looks into its dataset."""
        return self.__dict__["dataset"][index]

    def __getitems__(self, keyed: tuple[int | list[int], list[int]]) -> Any:
        """Read ``indices`` of ``(key, indices)``, each under its own seed; there may be a key for each of them."""
        key, indices = keyed
        keys = key if isinstance(key, list) else [key] * len(indices)
        dataset = self.__dict__["dataset"]
        if _runs_no_user_code(dataset):
            seed_randomness(derive_seed(keys[-1], indices[-1]))
            return dataset.__getitems__(indices)
        if _fetches_batches(dataset):
            return [_fetch_one(dataset, key, index) for key, index in zip(keys, indices, strict=True)]
        samples = []
        for key, index in zip(keys, indices, strict=True):
            seed_randomness(derive_seed(key, index))
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


def _fetch_one(dataset: Any, key: int, index: int) -> Any:
    seed_randomness(derive_seed(key, index))
    samples = dataset.__getitems__([index])
    if not isinstance(samples, list) or len(samples) != 1:
        raise ConfigurationError(
            f"{type(dataset).__name__}.__getitems__([{index}]) returned a {type(samples).__name__} and not a list of "
            "one sample, so its samples cannot be seeded one by one. Pass seed_samples=False to read whole batches."
        )
    return samples[0]
