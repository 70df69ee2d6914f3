"""Consecutive runs of whole numbers, given by where they begin and how long they are."""

from __future__ import annotations

import numpy as np

from lightning_stateful.index.permutation import Indices


def bounds_of(sizes: Indices) -> Indices:
    """Where runs begin that follow each other and, last, where they end: ``(runs,)`` -> int64 ``(runs + 1,)``."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def spell_out(starts: Indices, sizes: Indices, step: int = 1) -> Indices:
    """``start, start + step, ...``, ``size`` of them, for each pair."""
    if not sizes.size:
        return starts
    size = int(sizes[0])
    if (sizes == size).all():
        return (starts[:, None] + np.arange(size) * step).ravel() if size != 1 else starts
    ends = np.cumsum(sizes)
    within = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
    result: Indices = np.repeat(starts, sizes) + within * step
    return result
