"""What a user's sampler yields, and how it is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch


def knows_how_to_split(item: Any) -> bool:
    """Whether a batch is an object that can be joined with others and split, as lhotse's are."""
    others = (str, bytes, bytearray, torch.Tensor)
    return not isinstance(item, others) and all(hasattr(type(item), name) for name in ("__add__", "__len__", "split"))


def copied(batch: Any) -> Any:
    """A batch that stays as it was yielded."""
    # A sampler may fill or shuffle the very list again that it has yielded.
    if type(batch) is list:
        return batch.copy()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    return batch.clone() if isinstance(batch, torch.Tensor) else batch


def only_next(iterator: Iterator[Any]) -> Iterator[Any]:
    """An iterator of which only ``next`` is asked: a sampler that is its own iterator may begin anew at ``iter()``."""
    if not hasattr(type(iterator).__iter__, "__code__"):
        return iterator
    step: Callable[[Iterator[Any]], Any] = next
    return map(step, repeat(iterator))
