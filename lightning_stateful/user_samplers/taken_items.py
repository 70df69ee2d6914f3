"""Items of a pass that were taken last, with digests that tell a resume whether it yields the same."""

from __future__ import annotations

import copy
from array import array
from collections import UserDict, UserList, deque
from typing import Any

import numpy as np
import torch

from lightning_stateful.generators.attributes import PLAIN
from lightning_stateful.samplers.fingerprint import digest

# Prefetching workers and open accumulation windows are as far as training may lie behind what was drawn.
KEPT_NOTES = 512
# Samples before the present one of which a digest is taken when a state is asked for; of whole batches it is one.
NUM_LATEST = 64

_INTEGERS = (int, np.integer)
# Containers that a sampler may fill again after it has yielded them; of another object nothing is known.
_CONTAINERS = (list, tuple, dict, set, deque, UserList, UserDict, array, bytearray, np.ndarray, torch.Tensor)


class TakenItems(deque[tuple[int, list[Any]]]):
    """Items that were taken from a pass, each time with the index behind them; of whole batches the last."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT_NOTES)

    def latest_before(self, index: int, least: int) -> list[Any] | None:
        """First, end and digest of up to 64 items before ``index``; None where it is not between two steps."""
        found = self._before(index, NUM_LATEST, is_one=True)
        first = max(index - len(found), index - NUM_LATEST, least)
        return [first, index, digest(found[first - index :])] if first < index else None

    def between(self, first: int, index: int) -> list[Any]:
        """The same of those from ``first`` on that are still known without a gap; empty if there are none."""
        found = self._before(index, index - first) if first < index else []
        first = max(index - len(found), first)
        return [first, index, digest(found[first - index :])] if found else []

    def _before(self, index: int, count: int, *, is_one: bool = False) -> list[Any]:
        """At least so many items before ``index``, as far as they are known; of whole batches one if ``is_one``."""
        found: list[Any] = []
        for end, taken in reversed(self):
            if end == index - len(found):
                found = [*taken, *found]
                if len(found) >= count or (is_one and not isinstance(taken[-1], _INTEGERS)):
                    break
        return found


def snapshot(items: list[Any]) -> list[Any]:
    """Indices; of other items the last one as it is now, though its sampler may change it later."""
    last = items[-1]
    kind = type(last)
    # Batches are mostly of indices alone, which show at both ends.
    if (kind is list or kind is tuple) and last and type(last[0]) is type(last[-1]) is int:
        return [tuple(last)]
    if isinstance(last, _INTEGERS):
        return items
    if kind not in (tuple, list):
        return [last if kind is str else digest(last)]
    return [tuple(last) if PLAIN.issuperset(map(type, last)) else digest(last)]


def kept(batch: Any) -> Any:
    """Copy a batch, so that it stays as it was yielded: a sampler may fill the very container again."""
    # The common case at the speed of a list: batches hold things of one kind.
    if type(batch) is list and (not batch or isinstance(batch[0], _INTEGERS)):
        return batch.copy()
    return copy.deepcopy(batch) if isinstance(batch, _CONTAINERS) else batch
