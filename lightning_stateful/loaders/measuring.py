"""Measuring every sample of a dataset once, in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.lengths import MAX_SAMPLE_LENGTH
from lightning_stateful.samplers.rng import keep_randomness

# Fewer samples than that are measured before processes would have started.
_WORTH_WORKERS = 4096
_BATCH = 256


def measure_samples(
    dataset: Any, length: Callable[[Any], int], *, num_workers: int | None = None, what: str = "lengths"
) -> NDArray[Any]:
    """Call a function on every sample, with a progress bar.

    Args:
        dataset: A map-style dataset.
        length: From a sample to its length.
        num_workers: Processes; by default one a core, or none for few samples.
        what: How an error calls the lengths.

    Returns:
        Non-negative integers of the smallest type that holds them, of shape ``(len(dataset),)``.

    Raises:
        ConfigurationError: The function returned something else; with the sample.
        Exception: Whatever reading or measuring a sample raises.
    """
    total = len(dataset)
    if num_workers is not None and num_workers < 0:
        raise ConfigurationError(f"The number of processes that measure must not be negative, got {num_workers}.")
    if num_workers is None:
        num_workers = os.cpu_count() or 1 if total >= _WORTH_WORKERS else 0
    loader: DataLoader[Any] = DataLoader(
        _Measured(dataset, length, what),
        batch_size=_BATCH,
        num_workers=num_workers,
        collate_fn=np.array,
        generator=torch.Generator(),
    )
    found = np.empty(total, dtype=np.int64)
    with keep_randomness(), tqdm(total=total, desc=f"Measuring {what}", unit=" samples") as bar:
        for start, batch in zip(range(0, total, _BATCH), loader, strict=True):
            found[start : start + len(batch)] = batch
            bar.update(len(batch))
    return found.astype(np.min_scalar_type(int(found.max(initial=0))))


class _Measured(Dataset[int]):
    """The length of each sample in place of the sample."""

    def __init__(self, dataset: Any, length: Callable[[Any], int], what: str) -> None:
        self._dataset, self._length, self._what = dataset, length, what

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        return measure_one(self._dataset, self._length, index, what=self._what)


def measure_one(dataset: Any, length: Callable[[Any], int], index: int, *, what: str = "lengths") -> int:
    """The length of one sample.

    Raises:
        ConfigurationError: It is no integer, or negative.
    """
    found = length(dataset[index])
    try:
        number = as_int("a length", found)
    except ConfigurationError:
        number = -1
    if not 0 <= number < MAX_SAMPLE_LENGTH:
        raise ConfigurationError(
            f"{what}: the function says {found!r} of sample {index}, and not a length from 0 up to 2**42."
        )
    return number
