"""Array operations on many ranges of integers at once, given by arrays of their starts and sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def bounds_of(sizes: Indices) -> Indices:
    """Cumulative sizes, led by 0: ``(ranges,)`` -> int64 ``(ranges + 1,)``."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def concatenated_ranges(starts: Indices, sizes: Indices, step: int = 1) -> Indices:
    """Concatenate ``start, start + step, ...`` with ``size`` elements, of every range.

    Args:
        starts: The first element of each range, int64 of shape ``(ranges,)``.
        sizes: Its number of elements, of the same shape.
        step: The distance between elements.

    Returns:
        int64 of shape ``(sizes.sum(),)``.
    """
    if not sizes.size:
        return starts
    size = int(sizes[0])
    if (sizes == size).all():
        return (starts[:, None] + np.arange(size) * step).ravel() if size != 1 else starts
    ends = np.cumsum(sizes)
    within = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
    result: Indices = np.repeat(starts, sizes) + within * step
    return result
