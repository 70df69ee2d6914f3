"""Samples in buckets of like lengths, and how many of each bucket make a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.ranges import Indices, bounds_of
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.boundaries import equal_counts, given, least_padding
from lightning_stateful.index.budget import Budget
from lightning_stateful.index.grouping import Grouping
from lightning_stateful.index.lengths import Histogram, check_lengths, describe_lengths, digest, histogram
from lightning_stateful.index.too_long import Fitting, TooLong, fit, num_samples

Boundaries = Sequence[int] | Literal["least_padding", "equal_counts"]

# Measured on text (docs/buckets.md): more buckets save little padding, and cost a shuffle its room.
NUM_BUCKETS = 128
# On one rank a bucket should have some batches, so that its samples meet others in every epoch.
_BATCHES_A_BUCKET = 4
# Up to this length a table tells the bucket.
_LONGEST_TABLE = 2**16


@dataclass(frozen=True, eq=False, kw_only=True)
class Buckets:
    """Samples sorted by length into buckets, the longest bucket first.

    Attributes:
        lengths: The length of every sample; held as given, not copied.
        budget: What a batch may hold.
        ends: The longest length in each bucket, falling.
        sizes: Samples of a full batch of each bucket, never falling.
        samples: The samples, bucket by bucket.
        num_dropped: Samples left out because they are too long.
        num_alone: Samples in batches of their own because they are too long.
        described: What was asked for, as plain data to be compared.
    """

    lengths: NDArray[Any]
    budget: Budget
    ends: tuple[int, ...]
    sizes: tuple[int, ...]
    samples: Grouping
    num_dropped: int
    num_alone: int
    described: dict[str, Any]

    @classmethod
    def of(
        cls,
        lengths: Any,
        *,
        max_tokens: int | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_samples: int | None = None,
        multiple: int = 1,
        cost: Any = None,
        num_buckets: int | None = None,
        boundaries: Boundaries = "least_padding",
        too_long: TooLong = "error",
    ) -> Buckets:
        """Sort samples into buckets; :class:`BucketBatchSampler` documents the arguments.

        Raises:
            ConfigurationError: An argument is out of range, or samples are too long for the budget.
        """
        lengths = check_lengths(lengths)
        found = histogram(lengths)
        own_ends = () if isinstance(boundaries, str) else given(boundaries, int(found.values[-1]))
        if np.ndim(batch_size):  # type: ignore[arg-type]  # None is a scalar, too
            if not own_ends:
                raise ConfigurationError("Several batch sizes belong to given boundaries; pass these, too.")
            batch_size = tuple(batch_size)  # type: ignore[arg-type]  # no scalar
        budget = Budget(
            max_tokens=max_tokens,
            batch_size=batch_size,  # type: ignore[arg-type]  # a number or tuple by now
            ends=own_ends,
            max_samples=max_samples,
            multiple=multiple,
            cost=cost,
        )
        fitting = fit(found, budget, too_long)
        ends, asked = _choose(own_ends or boundaries, num_buckets, fitting, budget)
        counts, longest = _fill(ends, fitting)
        return cls(
            lengths=lengths,
            budget=budget,
            ends=tuple(reversed(longest)),
            sizes=tuple(num_samples(budget, length) for length in reversed(longest)),
            samples=_sort(lengths, ends, fitting, counts),
            num_dropped=fitting.num_dropped,
            num_alone=fitting.num_alone,
            described={
                **budget.describe(),
                **asked,
                "too_long": too_long,
                "lengths": describe_lengths(lengths),
            },
        )


def _choose(
    boundaries: Boundaries, num_buckets: int | None, fitting: Fitting, budget: Budget
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Boundaries, rising, and what decided them."""
    if not isinstance(boundaries, str):
        if num_buckets is not None:
            raise ConfigurationError("boundaries say how many buckets there are; leave num_buckets out.")
        ends = tuple(boundaries)
        return _with_alone(ends, fitting), {"boundaries": digest(np.array(ends)), "num_buckets": len(ends)}
    choices = {"least_padding": least_padding, "equal_counts": equal_counts}
    if boundaries not in choices:
        raise ConfigurationError(
            f"boundaries must be a list of lengths or one of {tuple(choices)}, got {boundaries!r}."
        )
    asked: dict[str, Any] = {"boundaries": boundaries}
    if num_buckets is None:
        # It follows from the rest, so that it need not be compared.
        num_buckets = default_num_buckets(fitting.lengths, budget)
    else:
        num_buckets = asked["num_buckets"] = as_int("num_buckets", num_buckets)
    if num_buckets < 1:
        raise ConfigurationError(f"num_buckets must be at least 1, got {num_buckets}.")
    ends = choices[boundaries](fitting.lengths, num_buckets)
    return _with_alone(ends, fitting), asked


def default_num_buckets(lengths: Histogram, budget: Budget) -> int:
    """128, or fewer where that would leave a bucket fewer than 4 batches on average."""
    if budget.max_tokens is None:
        batches = int(lengths.counts.sum()) / budget.num_samples(int(lengths.values[-1]))
    else:
        batches = lengths.total / budget.max_tokens
    return max(min(NUM_BUCKETS, int(batches / _BATCHES_A_BUCKET)), 1)


def _with_alone(ends: tuple[int, ...], fitting: Fitting) -> tuple[int, ...]:
    """Keep samples that fit from sharing a bucket, and so its batches of one, with those that do not."""
    if not fitting.num_alone or not fitting.longest or fitting.longest in ends:
        return ends
    return tuple(sorted({*ends, fitting.longest}))


def _fill(ends: tuple[int, ...], fitting: Fitting) -> tuple[list[int], list[int]]:
    """Samples of each bucket, and the longest there is in it; of an empty one its end."""
    places = np.searchsorted(fitting.lengths.values, np.array(ends), side="right")
    below = bounds_of(fitting.lengths.counts)
    counts = np.diff(below[np.concatenate([[0], places])])
    longest = [
        int(fitting.lengths.values[place - 1]) if count else end
        for place, count, end in zip(places, counts, ends, strict=True)
    ]
    return counts.tolist(), longest


def _sort(lengths: NDArray[Any], ends: tuple[int, ...], fitting: Fitting, counts: list[int]) -> Grouping:
    last, longest = len(ends) - 1, int(fitting.lengths.values[-1])
    bounds = np.array(ends)
    table = last - np.searchsorted(bounds, np.arange(min(longest, _LONGEST_TABLE) + 1))

    def classes(first: int, part: NDArray[Any]) -> Indices:
        if longest <= _LONGEST_TABLE:
            return np.where(part > longest, -1, table[np.minimum(part, longest)])
        return np.where(part > longest, -1, last - np.searchsorted(bounds, part.astype(np.int64)))

    return Grouping.of(lengths, classes, counts[::-1])
