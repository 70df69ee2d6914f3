"""One window of samples that have just been read, sorted by length and cut into batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lightning_stateful.core.ranges import Indices

# NumPy sorts numbers of two bytes by counting.
_MOST_COUNTED = 2**15


class SortedWindow(NamedTuple):
    """Samples of a window in the order of their batches.

    Attributes:
        order: The place of each in the window; int64 of shape ``(samples,)``.
        lengths: The length of each.
        bounds: Where each batch begins among them, and, at last, their number.
    """

    order: Indices
    lengths: list[int]
    bounds: list[int]


def cut_window(lengths: Indices, num_samples: Callable[[int], int], keys: Indices | None = None) -> SortedWindow:
    """Sort a window and cut it.

    By key, the longest first, and in the given order where equally long. A batch ends where its budget is used up,
    where the key changes, and with the window.

    Args:
        lengths: The length of every sample, not negative; int64 of shape ``(samples,)``.
        num_samples: From the longest of a batch to the samples of a full one, at least 1.
        keys: A batch holds samples of one of these; of the same shape. None if they may all meet.
    """
    negative = -lengths
    small = int(lengths.max(initial=0)) < _MOST_COUNTED
    order = np.argsort(negative.astype(np.int16) if small else negative, kind="stable")
    ends = [len(lengths)]
    if keys is not None:
        order = order[np.argsort(keys[order], kind="stable")]
        ends = [*(np.flatnonzero(np.diff(keys[order])) + 1).tolist(), len(lengths)]
    in_order: list[int] = lengths[order].tolist()
    bounds, start = [0], 0
    for end in ends:
        while start < end:
            start = min(start + num_samples(in_order[start]), end)
            bounds.append(start)
    return SortedWindow(order, in_order, bounds)
