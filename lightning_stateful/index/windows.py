"""Windows of a shuffled order, sorted by length and cut into batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import keyed_permutation
from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.budget import Budget, QuadraticCost
from lightning_stateful.index.grouping import Grouping
from lightning_stateful.index.lengths import check_lengths, chunks, describe_lengths, digest, histogram
from lightning_stateful.index.too_long import TooLong, fit, num_samples

# Samples whose windows are cut at once when batches are counted.
_CHUNK = 2**18


class OpenWindows(NamedTuple):
    """Consecutive windows in one epoch.

    Attributes:
        samples: Their samples, each window sorted; int64 of shape ``(samples,)``.
        starts: Where each batch begins among them, int64 of shape ``(batches,)``.
        sizes: Its number of samples; of the same shape.
    """

    samples: Indices
    starts: Indices
    sizes: Indices


@dataclass(frozen=True, eq=False, kw_only=True)
class Windows:
    """A shuffled order in windows, of which each is sorted, the longest sample first, and cut into batches.

    Samples are of one class if equally many fit with them into a batch. In which order the classes come is drawn once;
    in every epoch, the samples of each class change places. So a window is filled anew every epoch and yet always cut
    alike: its number of batches, and the epoch's, is known beforehand. With a fixed batch size, all samples are of one
    class, and the order is a plain shuffle.

    Attributes:
        lengths: The length of every sample; held as given, not copied.
        boundary_key: The rank of every sample's key; a batch holds samples of one key. None if they may all meet.
        budget: What a batch may hold.
        window: Samples of a window; the last may have fewer.
        seed: Chooses the orders.
        shuffle: False to keep the dataset's order.
        samples: The samples by class.
        values: The lengths that are served, rising; int64 of shape ``(distinct,)``.
        sizes: Samples of a full batch whose longest has each of these lengths; of the same shape.
        num_dropped: Samples left out because they are too long.
        num_alone: Samples in batches of their own because they are too long.
        described: What was asked for, as plain data to be compared.
    """

    lengths: NDArray[Any]
    boundary_key: NDArray[Any] | None
    budget: Budget
    window: int
    seed: int
    shuffle: bool
    samples: Grouping
    values: Indices
    sizes: Indices
    num_dropped: int
    num_alone: int
    described: dict[str, Any]

    @classmethod
    def of(
        cls,
        lengths: Any,
        *,
        window: int,
        boundary_key: Any = None,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        max_samples: int | None = None,
        multiple: int = 1,
        cost: QuadraticCost | None = None,
        too_long: TooLong = "error",
        shuffle: bool = True,
        seed: int = 0,
    ) -> Windows:
        """Cut samples into windows; :class:`BucketBatchSampler` documents the arguments.

        Raises:
            ConfigurationError: An argument is out of range, or samples are too long for the budget.
        """
        lengths = check_lengths(lengths)
        if as_int("window", window) < 1:
            raise ConfigurationError(f"window must be at least 1, got {window}.")
        budget = Budget(
            max_tokens=max_tokens, batch_size=batch_size, max_samples=max_samples, multiple=multiple, cost=cost
        )
        fitting = fit(histogram(lengths), budget, too_long)
        values = fitting.lengths.values
        sizes = np.array([num_samples(budget, length) for length in values.tolist()], dtype=np.int64)
        described = {**budget.describe(), "window": int(window), "too_long": too_long}
        keys = None if boundary_key is None else _ranks(boundary_key, len(lengths))
        if keys is not None:
            described["boundary_key"] = digest(keys)
        return cls(
            lengths=lengths,
            boundary_key=keys,
            budget=budget,
            window=int(window),
            seed=seed,
            shuffle=shuffle,
            samples=_sort(lengths, keys, values, sizes),
            values=values,
            sizes=sizes,
            num_dropped=fitting.num_dropped,
            num_alone=fitting.num_alone,
            described={**described, "lengths": describe_lengths(lengths)},
        )

    def __len__(self) -> int:
        return -(-len(self.samples) // self.window)

    def count_batches(self) -> Indices:
        """Batches of each window, in every epoch; int64 of shape ``(windows,)``."""
        if len(np.unique(self.sizes)) == 1 and self.boundary_key is None:
            samples = np.minimum(np.arange(1, len(self) + 1) * self.window, len(self.samples))
            return -(-np.diff(samples, prepend=0) // int(self.sizes[0]))
        counts = np.zeros(len(self), dtype=np.int64)
        rows = max(_CHUNK // self.window, 1)
        for first in range(0, len(self), rows):
            last = min(first + rows, len(self))
            windows = self.open(first, last, 0).starts // self.window
            counts[first:last] = np.bincount(windows, minlength=last - first)
        return counts

    def open(self, first: int, last: int, epoch: int) -> OpenWindows:
        """The windows ``first <= window < last`` in an epoch, sorted and cut.

        By key, the longest first, and in shuffled order where equally long. A batch ends where its budget is used up,
        where the key changes, and with the window.
        """
        parts = [self._open(start, stop, size, epoch) for start, stop, size in self._alike(first, last)]
        samples, starts, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return OpenWindows(samples, starts - first * self.window, sizes)

    def _alike(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Runs of windows of one size: all are, but perhaps the last."""
        full = min(last, len(self.samples) // self.window)
        if first < full:
            yield first, full, self.window
        if full < last:
            yield max(first, full), last, len(self.samples) - full * self.window

    def _open(self, first: int, last: int, size: int, epoch: int) -> OpenWindows:
        begin, num_windows = first * self.window, last - first
        samples = self._samples(np.arange(begin, begin + num_windows * size), epoch).reshape(num_windows, size)
        lengths = np.searchsorted(self.values, self.lengths[samples])
        keys = np.zeros_like(lengths) if self.boundary_key is None else self.boundary_key[samples].astype(np.int64)
        codes = keys * len(self.values) - lengths
        # Two bytes where they do: NumPy sorts those by counting.
        small = int(codes.min()) >= -(2**15) and int(codes.max()) < 2**15
        order = np.argsort(codes.astype(np.int16) if small else codes, axis=1, kind="stable")
        lengths, keys = (np.take_along_axis(array, order, axis=1) for array in (lengths, keys))
        fits = self.sizes[lengths]
        ends = _ends_of_runs(keys)
        # All windows at once, batch by batch.
        begun, rows, found = np.zeros(num_windows, dtype=np.int64), np.arange(num_windows), []
        while rows.size:
            starts = begun[rows]
            stops = np.minimum(starts + fits[rows, starts], ends[rows, starts])
            found.append(np.stack([rows * size + starts + begin, stops - starts]))
            begun[rows] = stops
            rows = rows[stops < size]
        starts, sizes = np.concatenate(found, axis=1)
        in_order = np.argsort(starts)
        return OpenWindows(np.take_along_axis(samples, order, axis=1).ravel(), starts[in_order], sizes[in_order])

    def _samples(self, places: Indices, epoch: int) -> Indices:
        if not self.shuffle:
            return self.samples.in_order(places)
        classes = keyed_permutation(len(self.samples), derive_seed("order of classes", self.seed))
        return self.samples.take(classes.take(places), self.seed, epoch)


def _ranks(keys: Any, length: int) -> NDArray[Any]:
    keys = check_lengths(keys, what="boundary_key")
    if len(keys) != length:
        raise ConfigurationError(f"boundary_key has {len(keys)} keys for {length} samples; give one a sample.")
    return np.unique(keys, return_inverse=True)[1].astype(np.int32)


def _sort(lengths: NDArray[Any], keys: NDArray[Any] | None, values: Indices, sizes: Indices) -> Grouping:
    """Sort samples by key and by how many fit into a batch."""
    fits, class_of_value = np.unique(sizes, return_inverse=True)

    def code(first: int, part: NDArray[Any]) -> Indices:
        part = part.astype(np.int64)
        by_size = class_of_value[np.minimum(np.searchsorted(values, part), len(values) - 1)]
        by_key = np.int64(0) if keys is None else keys[first : first + len(part)].astype(np.int64)
        return np.where(part > values[-1], -1, by_key * len(fits) + by_size)

    # Of many keys and sizes, few come together.
    found = [np.unique(code(first, part), return_counts=True) for first, part in chunks(lengths)]
    codes, place = np.unique(np.concatenate([codes for codes, _ in found]), return_inverse=True)
    counts = np.bincount(place, np.concatenate([counts for _, counts in found])).astype(np.int64)
    dropped = int(codes[0] < 0)
    return Grouping.of(
        lengths, lambda first, part: np.searchsorted(codes, code(first, part)) - dropped, counts[dropped:].tolist()
    )


def _ends_of_runs(keys: Indices) -> Indices:
    """Behind which place the run of equal keys ends that each place belongs to, row by row."""
    ends = np.full(keys.shape, keys.shape[1], dtype=np.int64)
    changes = keys[:, 1:] != keys[:, :-1]
    ends[:, :-1][changes] = np.nonzero(changes)[1] + 1
    result: Indices = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return result
