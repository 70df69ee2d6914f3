"""What reads batches behind a StatefulLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_stateful.loaders.batches import PositionedBatches


class Engine(NamedTuple):
    """torch's loader behind this one; kept, because persistent workers live in it."""

    loader: DataLoader[Any]
    batches: PositionedBatches
    generator: torch.Generator

    def fetch_in_process(self) -> Callable[[], Any]:
        """What torch's iterator does without workers or pinned memory, without its bookkeeping for each batch."""
        dataset: Any = self.loader.dataset
        collate = self.loader.collate_fn
        fetch_many = getattr(dataset, "__getitems__", None)
        batches = iter(self.batches)
        if fetch_many is not None:
            return lambda: collate(fetch_many(next(batches)))
        return lambda: collate([dataset[index] for index in next(batches)])
