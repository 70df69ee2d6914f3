"""The dataset that all entries read, and what samplers of all kinds ask for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset

# Divisible by 1, 2 and 3 ranks with batches of four: no epoch has a tail.
LENGTH = 24
LABELS = [index % 4 for index in range(LENGTH)]
NAMES = [f"class {label}" for label in LABELS]
# Of every sample, as of sentences: between 3 and 9 tokens.
LENGTHS = [3 + index * 5 % 7 for index in range(LENGTH)]


class Indices(Dataset[torch.Tensor]):
    """Samples that are their own index, whatever a sampler yields in place of one."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(number_of(index))


def number_of(index: Any) -> int:
    """The sample behind a number, a tuple that ends in one, or a name such as ``"sample 7"``."""
    if isinstance(index, tuple):
        index = index[-1]
    return int(index.split()[-1]) if isinstance(index, str) else int(index)


def loader(workers: int, **options: Any) -> DataLoader[Any]:
    """A DataLoader over :class:`Indices`, with batches of four unless told otherwise."""
    if not {"batch_sampler", "batch_size"} & set(options):
        options["batch_size"] = 4
    kind = options.pop("kind", DataLoader)
    return kind(options.pop("dataset", None) or Indices(), num_workers=workers, **options)


def num_ranks() -> int:
    """As samplers ask torch for it."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def own_rank() -> int:
    """As samplers ask torch for it."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def permutation(seed: int, length: int = LENGTH) -> list[int]:
    """A shuffled range."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
