"""Remembers how far the passes over an iterable dataset went in this process, and whether their ends changed it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import repeat
from typing import Any

from torch.utils.data import Dataset

from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.user_samplers.sampler_copy import SamplerParts, digest_of_contents


class PassHistory(list[int]):
    """The passes over a dataset in this process: of each the batches read, or ``-1 - batches`` of one that ended.

    Attributes:
        changes: Whether the dataset has changed between the first batch of a pass and its end.
    """

    changes = False


# By the id of a dataset: a reference to it, and its passes in this process.
_histories: dict[int, tuple[Callable[[], Any], PassHistory]] = {}


def digest_of_dataset(dataset: Any) -> str:
    """Digest of what a dataset holds, and the datasets in it."""
    held = [part for part in SamplerParts(dataset).shared if isinstance(part, Dataset)]
    return digest(digest_of_contents(dataset), *map(digest_of_contents, held))


def history_of(dataset: Any) -> PassHistory:
    """The passes over a dataset in this process."""
    key = id(dataset)
    holder, history = _histories.get(key, (None, PassHistory()))
    if holder is None or holder() is not dataset:
        history = PassHistory()
        try:
            held: Callable[[], Any] = weakref.ref(dataset, lambda _: _histories.pop(key, None))
        except TypeError:
            # Its class has no weak references: it is held for good.
            held = repeat(dataset).__next__
        _histories[key] = held, history
    return history
