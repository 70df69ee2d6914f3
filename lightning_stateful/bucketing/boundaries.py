"""Chooses the boundaries of buckets, by least padding or by equal counts, and checks those that a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_stateful.bucketing.lengths import Histogram
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import Indices
from lightning_stateful.errors import ConfigurationError

# Lengths among which boundaries are looked for.
_MOST_CANDIDATES = 2048


def least_padding(lengths: Histogram, num_buckets: int) -> tuple[int, ...]:
    """Choose the boundaries that pad the fewest tokens, if each sample is padded to the end of its bucket.

    With ``f_k(j)`` the tokens of the ``j`` shortest lengths in ``k`` buckets, padding included, and ``C_j`` the samples
    of these lengths, ``f_k(j) = min over i of f_{k-1}(i) + v_j * (C_j - C_i)``. For each ``k`` that is the lower
    envelope of lines with falling slopes ``-C_i``, asked at rising ``v_j``, so a layer takes O(D) and all of them
    O(num_buckets * D) for ``D`` distinct lengths, in O(num_buckets * D) memory.

    Exact for up to 2,048 distinct lengths; of more, boundaries are looked for among about as many, chosen by equal
    counts of samples and by equal distance.

    Args:
        lengths: The number of samples of each length.
        num_buckets: Number of buckets; if there are fewer lengths, each gets a bucket of its own.

    Returns:
        The longest length of each bucket, rising.

    Source:
        The recursion and its envelope: Brucker, "Efficient algorithms for some path partitioning problems", Discrete
        Applied Mathematics 62, 1995.
    """
    values, totals = _candidates(lengths)
    if len(values) <= num_buckets:
        return tuple(values)
    found = [value * total for value, total in zip(values, totals[1:], strict=True)]
    tokens: list[int] = [0, *found]
    layers = []
    for layer in range(1, num_buckets):
        tokens, chosen = _add_bucket(tokens, values, totals, layer)
        layers.append(chosen)
    end, ends = len(values), [values[-1]]
    for chosen in reversed(layers):
        end = chosen[end]
        ends.append(values[end - 1])
    return tuple(reversed(ends))


def equal_counts(lengths: Histogram, num_buckets: int) -> tuple[int, ...]:
    """Choose boundaries that put about as many samples into every bucket; fewer buckets if one length fills several.

    Returns:
        The longest length of each bucket, rising.
    """
    below = np.cumsum(lengths.counts)
    wanted = np.arange(1, num_buckets + 1) * int(below[-1]) / num_buckets
    chosen = np.unique(np.searchsorted(below, wanted - 0.5))
    return tuple(lengths.values[chosen].tolist())


def check_boundaries(boundaries: Sequence[Any], longest: int) -> tuple[int, ...]:
    """Check boundaries that the user gives; ``longest`` is added if they end before it.

    Raises:
        ConfigurationError: They do not rise, or are no positive integers.
    """
    if not isinstance(boundaries, (Sequence, np.ndarray)):
        raise ConfigurationError(f"boundaries are lengths, one for each bucket, got {boundaries!r}.")
    ends = [as_int("a boundary", boundary) for boundary in boundaries]
    if not ends or ends[0] < 1 or any(left >= right for left, right in pairwise(ends)):
        raise ConfigurationError(
            f"boundaries are the longest lengths of the buckets, positive and rising, got {list(boundaries)}."
        )
    return (*ends, longest) if ends[-1] < longest else tuple(ends)


def _candidates(lengths: Histogram) -> tuple[list[int], list[int]]:
    """Choose the lengths that may end a bucket.

    Returns:
        The lengths, rising, and the number of samples up to and with each, led by 0.
    """
    below = np.cumsum(lengths.counts)
    chosen: Indices = np.arange(len(below))
    if len(below) > _MOST_CANDIDATES:
        third = _MOST_CANDIDATES // 3
        by_count = np.searchsorted(below, np.linspace(0, below[-1], third))
        by_distance = np.searchsorted(lengths.values, np.linspace(lengths.values[0], lengths.values[-1], third))
        # With the lengths before them, so that what lies beyond a wide gap need not share a bucket.
        before = np.maximum(by_distance - 1, 0)
        chosen = np.unique(np.concatenate([by_count, by_distance, before, [len(below) - 1]]))
    return lengths.values[chosen].tolist(), [0, *below[chosen].tolist()]


def _add_bucket(before: list[int], values: list[int], totals: list[int], fewest: int) -> tuple[list[int], list[int]]:
    """Add a bucket: one step of the recursion in :func:`least_padding`.

    Args:
        before: Tokens of the ``j`` shortest lengths in ``fewest`` buckets; meaningless below ``j = fewest``.
        values: The lengths.
        totals: Samples below each.
        fewest: Number of buckets so far; fewer lengths than these cannot fill them.

    Returns:
        Tokens of the ``j`` shortest lengths with one bucket more, and the number of lengths before that bucket.
    """
    tokens, chosen = list(before), [0] * len(before)
    lines: list[int] = []
    first = 0

    def at(line: int, value: int) -> int:
        return before[line] - value * totals[line]

    for end in range(fewest + 1, len(values) + 1):
        line = end - 1
        while len(lines) - first >= 2 and _is_above(before, totals, lines[-2], lines[-1], line):
            lines.pop()
        lines.append(line)
        value = values[end - 1]
        while len(lines) - first >= 2 and at(lines[first + 1], value) <= at(lines[first], value):
            first += 1
        chosen[end] = lines[first]
        tokens[end] = at(lines[first], value) + value * totals[end]
    return tokens, chosen


def _is_above(before: list[int], totals: list[int], left: int, middle: int, right: int) -> bool:
    """Whether the middle of three lines is nowhere the lowest, so that it is no part of the envelope."""
    return (before[right] - before[left]) * (totals[middle] - totals[left]) <= (before[middle] - before[left]) * (
        totals[right] - totals[left]
    )
