"""Several datasets, each with a place of its own, cut into groups of batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.checks import as_int, check_length
from lightning_stateful.index.permutation import Indices, keyed_permutation
from lightning_stateful.index.seeding import Label, derive_seed
from lightning_stateful.index.steps import StepRule


@dataclass(frozen=True)
class Sources:
    """Datasets that stand one after the other, as in ``torch.utils.data.ConcatDataset``.

    Attributes:
        names: A name for each.
        lengths: Samples in each.
        batch_sizes: Samples in a full batch of each, on one rank.

    Raises:
        ConfigurationError: There is none, one is empty, or a batch size is not positive; with the source's name.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigurationError("There are no sources; give at least one dataset.")
        for name, length, batch_size in zip(self.names, self.lengths, self.batch_sizes, strict=True):
            check_length(as_int(f"The length of source {name!r}", length))
            if length < 1:
                raise ConfigurationError(f"Source {name!r} is empty; leave it out.")
            if as_int(f"The batch size of source {name!r}", batch_size) < 1 or isinstance(batch_size, bool):
                raise ConfigurationError(f"The batch size of source {name!r} must be at least 1, got {batch_size!r}.")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def offsets(self) -> Indices:
        """Index of each source's first sample."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64)

    def refuse_large_batches(self, num_replicas: int = 1, names: Collection[str] | None = None) -> None:
        """Refuse a source that dropping incomplete steps would leave out altogether.

        Raises:
            ConfigurationError: With the source's name.
        """
        for name, length, batch_size in zip(self.names, self.lengths, self.batch_sizes, strict=True):
            if batch_size * num_replicas > length:
                ranks = f" on each of {num_replicas} ranks" if num_replicas > 1 else ""
                raise ConfigurationError(
                    f"Source {name!r} has {length} samples, fewer than a batch of {batch_size}{ranks}; with "
                    "drop_last=True it would never be served. Give it a smaller batch size, or pass drop_last=False."
                )

    def indices(self, sources: Indices, passes: Indices, places: Indices, seed: Iterable[Label] | None) -> Indices:
        """Indices of samples, as they count over all sources.

        Args:
            sources: Which source, int64 of shape ``(n,)``.
            passes: Which pass over it, of the same shape.
            places: Which place in that pass, of the same shape.
            seed: Labels that choose the order of every pass; None for the order of the dataset.
        """
        result = places + self.offsets[sources]
        if seed is None:
            return result
        labels = tuple(seed)
        for source in np.unique(sources).tolist():
            of_source = np.flatnonzero(sources == source)
            numbers = passes[of_source]
            for number in np.unique(numbers).tolist():
                chosen = of_source[numbers == number]
                # By name: a source keeps its order when others come and go.
                key = derive_seed("source", *labels, self.names[source], number)
                order = keyed_permutation(self.lengths[source], key)
                result[chosen] = order.take(places[chosen]) + self.offsets[source]
        return result


class SourceCut:
    """One source from a place on, cut into groups of one batch a rank, pass after pass.

    Args:
        length: Samples of the source.
        place: Samples served before, over all passes.
        rule: How a pass is cut.
    """

    def __init__(self, length: int, place: int, rule: StepRule) -> None:
        self._length, self._rule = length, rule
        self._whole = rule.num_steps(length)
        number, offset = divmod(place, length)
        first = rule.num_steps(length - offset)
        #: Groups until every sample has been served once.
        self.num_unseen = first if number == 0 else 0
        if not first:
            number, offset, first = number + 1, 0, self._whole
        self._number, self._offset, self._first = number, offset, first

    def place_after(self, groups: int) -> int:
        """Samples served, over all passes, after ``groups`` more groups."""
        if groups < self._first:
            served = self._rule.served(self._length - self._offset, groups)
            return self._number * self._length + self._offset + served
        passes, rest = divmod(groups - self._first, self._whole)
        return (self._number + 1 + passes) * self._length + self._rule.served(self._length, rest)

    def shares(self, groups: Indices, rank: int) -> tuple[Indices, Indices, Indices]:
        """What ``rank`` serves in each of ``groups``: pass, first place in it, and number of consecutive places."""
        later = groups >= self._first
        passes, number = np.divmod(groups - self._first, self._whole)
        passes = np.where(later, passes + 1, 0) + self._number
        number = np.where(later, number, groups)
        size = self._rule.batch_size
        starts = np.where(later, 0, self._offset) + number * self._rule.full + rank * size
        sizes = np.full(groups.shape, size, dtype=np.int64)
        for is_later, offset in ((False, self._offset), (True, 0)):
            remaining = self._length - offset
            # Only the last two groups of a pass may differ from the others.
            irregular = max(remaining // self._rule.full - 1, 0)
            for group in range(irregular, self._whole if is_later else self._first):
                chosen = (later == is_later) & (number == group)
                if chosen.any():
                    served = self._rule.served(remaining, group)
                    share = self._rule.share(remaining - served, rank)
                    starts[chosen], sizes[chosen] = offset + served + share[0], share.size
        return passes, starts, sizes
