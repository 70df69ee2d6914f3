"""Sorts samples into buckets of like lengths and shuffles them within these, with random access."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.bucketing.boundaries import check_boundaries, equal_counts, least_padding
from lightning_stateful.bucketing.budget import Budget, drop_too_long
from lightning_stateful.bucketing.lengths import Histogram, LengthArray, chunks, digest, histogram, open_lengths
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import ClassShuffle, Indices, bounds_of
from lightning_stateful.core.seeding import Label
from lightning_stateful.errors import ConfigurationError

Choose = Callable[[Histogram, int], tuple[int, ...]]
Boundaries = Sequence[int] | Literal["least_padding", "equal_counts"]

# Measured on text (docs/buckets.md): more buckets save little padding, and cost a shuffle its room.
NUM_BUCKETS = 128
# On one rank a bucket should have some batches, so that its samples meet others in every epoch.
_BATCHES_A_BUCKET = 4
# Times the batches that the best number of buckets would give an epoch.
_MOST_BATCHES = 1.25
# Up to this length a table tells the bucket.
_LONGEST_TABLE = 2**16


@dataclass(frozen=True, eq=False, kw_only=True)
class Buckets:
    """Samples sorted by length into buckets, the longest bucket first.

    Beside the lengths it holds 4 bytes a sample (8 from 2**32 samples on), or none if one bucket has them all.

    Attributes:
        lengths: The length of every sample; held as given, not copied.
        budget: The budget of a batch.
        ends: The longest length in each bucket, falling.
        sizes: Samples of a full batch of each bucket, never falling.
        starts: The number of samples before each bucket and, last, of all; int64 of shape ``(buckets + 1,)``.
        members: The samples, bucket by bucket and rising within each; None if they are ``range(len(lengths))``.
        num_dropped: Samples left out because they are too long.
        config: The options that were given, as plain data to be compared.
    """

    lengths: LengthArray
    budget: Budget
    ends: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: Indices
    members: NDArray[Any] | None
    num_dropped: int
    config: dict[str, Any]

    @classmethod
    def of(
        cls,
        lengths: Any,
        budget: Budget,
        *,
        num_buckets: int | None = None,
        boundaries: Boundaries = "least_padding",
    ) -> Buckets:
        """Sort samples into buckets; :class:`BucketBatchSampler` documents the arguments.

        Raises:
            ConfigurationError: An argument is out of range, or samples are too long for the budget.
        """
        lengths = open_lengths(lengths)
        counted = histogram(lengths)
        fitting, num_dropped = drop_too_long(counted, budget)
        ends, asked = _choose_ends(boundaries, num_buckets, fitting, budget, longest=int(counted.values[-1]))
        counts, longest = _fill(ends, fitting)
        starts = bounds_of(counts[::-1])
        return cls(
            lengths=lengths,
            budget=budget,
            ends=tuple(reversed(longest)),
            # A given bucket may end beyond the budget and hold no sample.
            sizes=tuple(max(budget.num_samples(length), 1) for length in reversed(longest)),
            starts=starts,
            members=_sort(lengths, ends, fitting, starts),
            num_dropped=num_dropped,
            config={
                **budget.config(),
                **asked,
                "lengths": {"samples": len(lengths), "digest": digest(lengths)},
            },
        )

    def __len__(self) -> int:
        """Samples in all buckets."""
        return int(self.starts[-1])

    def shuffle(self, *labels: Label) -> ClassShuffle:
        """Shuffle samples within their buckets, by a key derived from the labels."""
        return ClassShuffle(self.starts, *labels)

    def take(self, offsets: Indices, shuffle: ClassShuffle | None = None) -> Indices:
        """Look up samples: offsets, counted from the longest bucket on, int64 ``(n,)`` -> dataset indices ``(n,)``."""
        if shuffle is not None:
            offsets = shuffle.take(offsets)
        return offsets if self.members is None else self.members[offsets].astype(np.int64)


def default_num_buckets(lengths: Histogram, budget: Budget, choose: Choose = least_padding) -> int:
    """Choose the number of buckets: 128, or fewer if a bucket would have fewer than 4 batches on average.

    Never so few, though, that an epoch on one rank has over a quarter more batches than with any number up to 128:
    where a batch holds much of a small dataset, its longest sample would decide how few samples fit into each.
    """
    if budget.max_tokens is None:
        batches = int(lengths.counts.sum()) / budget.num_samples(int(lengths.values[-1]))
    else:
        batches = lengths.total / budget.max_tokens
    few = max(min(NUM_BUCKETS, int(batches / _BATCHES_A_BUCKET)), 1)
    if budget.max_tokens is None or few == NUM_BUCKETS:
        return few
    numbers = [few, *(1 << power for power in range(NUM_BUCKETS.bit_length()) if 1 << power > few)]
    steps = [_num_batches(choose(lengths, number), lengths, budget) for number in numbers]
    most = _MOST_BATCHES * min(steps)
    return next(number for number, count in zip(numbers, steps, strict=True) if count <= most)


def _num_batches(ends: tuple[int, ...], lengths: Histogram, budget: Budget) -> int:
    """Batches of an epoch on one rank, in buckets with these ends."""
    counts, longest = _fill(ends, lengths)
    sizes = [max(budget.num_samples(length), 1) for length in longest]
    return sum(math.ceil(count / size) for count, size in zip(counts.tolist(), sizes, strict=True))


def _choose_ends(
    boundaries: Boundaries, num_buckets: int | None, lengths: Histogram, budget: Budget, *, longest: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Choose the ends of the buckets.

    Returns:
        The longest length that each bucket may hold, rising, and the options that decided, as plain data.
    """
    if not isinstance(boundaries, str):
        ends = check_boundaries(boundaries, longest)
        if num_buckets is not None:
            raise ConfigurationError("boundaries say how many buckets there are; leave num_buckets out.")
        return ends, {"boundaries": digest(np.array(ends)), "num_buckets": len(ends)}
    choices: dict[str, Choose] = {"least_padding": least_padding, "equal_counts": equal_counts}
    if boundaries not in choices:
        raise ConfigurationError(
            f"boundaries must be a list of lengths or one of {tuple(choices)}, got {boundaries!r}."
        )
    asked: dict[str, Any] = {"boundaries": boundaries}
    if num_buckets is None:
        # It follows from the rest, so that it need not be compared.
        num_buckets = default_num_buckets(lengths, budget, choices[boundaries])
    else:
        num_buckets = asked["num_buckets"] = as_int("num_buckets", num_buckets, least=1)
    return choices[boundaries](lengths, num_buckets), asked


def _fill(ends: tuple[int, ...], lengths: Histogram) -> tuple[Indices, list[int]]:
    """Count the samples of each bucket, and find the longest length in it; of an empty bucket, its end."""
    stops = np.searchsorted(lengths.values, np.array(ends), side="right")
    counts = np.diff(bounds_of(lengths.counts)[np.concatenate([[0], stops])])
    longest = [
        int(lengths.values[stop - 1]) if count else end for stop, count, end in zip(stops, counts, ends, strict=True)
    ]
    return counts, longest


def _sort(lengths: LengthArray, ends: tuple[int, ...], fitting: Histogram, starts: Indices) -> NDArray[Any] | None:
    """Sort the samples that fit by bucket, the longest bucket first; None if one bucket holds all samples."""
    num_buckets, longest = len(ends), int(fitting.values[-1])
    if num_buckets == 1 and starts[-1] == len(lengths):
        return None
    bounds = np.array(ends)
    table = num_buckets - 1 - np.searchsorted(bounds, np.arange(min(longest, _LONGEST_TABLE) + 1))
    members = np.empty(int(starts[-1]), dtype=np.uint32 if len(lengths) <= 2**32 else np.int64)
    filled = starts[:-1].copy()
    for first, part in chunks(lengths):
        if longest <= _LONGEST_TABLE:
            found = table[np.minimum(part, longest)]
        else:
            found = num_buckets - 1 - np.searchsorted(bounds, part.astype(np.int64))
        found = np.where(part > longest, -1, found)
        # Two bytes where they do: NumPy sorts those by counting.
        order = np.argsort(found.astype(np.int16) if num_buckets < 2**15 else found, kind="stable")
        numbers = np.bincount(found[found >= 0], minlength=num_buckets)
        start = int(np.count_nonzero(found < 0))
        for bucket in np.flatnonzero(numbers):
            count = int(numbers[bucket])
            members[filled[bucket] : filled[bucket] + count] = order[start : start + count] + first
            filled[bucket] += count
            start += count
    return members
