"""Several datasets one after the other, and how they are mixed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import MAX_LENGTH, Indices, concatenated_ranges, keyed_permutation
from lightning_stateful.core.seeding import Label, derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture.draws import Period
from lightning_stateful.mixture.weights import DrawSchedule

Stop = Literal["all_exhausted", "first_exhausted", "cycle"]
By = Literal["batch", "sample", "token"]


@dataclass(frozen=True)
class Sources:
    """Named datasets that stand one after the other, as in ``torch.utils.data.ConcatDataset``.

    Attributes:
        names: A name for each.
        lengths: Samples in each.
        batch_sizes: Samples in a full batch of each, on one rank.

    Raises:
        ConfigurationError: There is none, names are equal, a source is empty, or a batch size is not positive.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigurationError("There are no sources; give at least one dataset.")
        if len(set(self.names)) < len(self.names):
            raise ConfigurationError(f"Sources need different names, got {list(self.names)}.")
        for name, length, batch_size in zip(self.names, self.lengths, self.batch_sizes, strict=True):
            if as_int(f"The length of source {name!r}", length) == 0:
                raise ConfigurationError(f"Source {name!r} is empty; leave it out.")
            if not 0 < length <= MAX_LENGTH:
                raise ConfigurationError(f"Source {name!r} must have 1 to 2**40 samples, got {length}.")
            as_int(f"The batch size of source {name!r}", batch_size, least=1)
        # States hold no other integers than Python's.
        object.__setattr__(self, "lengths", tuple(map(int, self.lengths)))
        object.__setattr__(self, "batch_sizes", tuple(map(int, self.batch_sizes)))

    def __len__(self) -> int:
        return len(self.names)

    def take(self, numbers: Indices, offsets: Indices, sizes: Indices, seed: tuple[Label, ...] | None) -> Indices:
        """The samples of many runs, each of consecutive samples of one source, one run after the other.

        Args:
            numbers: The source of each run; int64 of shape ``(runs,)``.
            offsets: Its first sample, counted on from pass to pass over the source; of the same shape, and rising
                within a source.
            sizes: Its number of samples; of the same shape.
            seed: Labels that choose the order of every pass; None for the order of the dataset.

        Returns:
            Indices as they count over all datasets; int64 of shape ``(sizes.sum(),)``.
        """
        ends = np.cumsum(sizes)
        indices = np.empty(int(ends[-1]) if ends.size else 0, dtype=np.int64)
        for source in present(numbers):
            runs = np.flatnonzero(numbers == source)
            where = concatenated_ranges(ends[runs] - sizes[runs], sizes[runs])
            indices[where] = self._take_of(source, concatenated_ranges(offsets[runs], sizes[runs]), seed)
        return indices

    def _take_of(self, source: int, offsets: Indices, seed: tuple[Label, ...] | None) -> Indices:
        """The samples of one source at ``offsets``, which rise."""
        length, before = self.lengths[source], sum(self.lengths[:source])
        if seed is None or length == 1:
            return offsets % length + before
        first, last = int(offsets[0]) // length, int(offsets[-1]) // length
        borders = np.searchsorted(offsets, np.arange(first + 1, last + 1) * length)
        result = np.empty_like(offsets)
        for number, (begin, end) in enumerate(pairwise([0, *borders.tolist(), offsets.size]), first):
            if begin < end:
                # By name: a source keeps its order when others come and go.
                key = derive_seed("source", *seed, self.names[source], number)
                result[begin:end] = keyed_permutation(length, key).take(offsets[begin:end] - number * length)
        return result + before


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Configuration of a mixture: its sources, their shares, and when an epoch ends.

    Attributes:
        sources: The datasets.
        draws: Draws of each source in a period. A draw is a step or, by sample, a sample.
        stop: When an epoch ends, unless ``num_steps`` says it; by default, when all are exhausted.
        num_steps: Steps of an epoch; each source goes on in the next one where it was.
        seed: Chooses the orders.
        shuffle: Whether samples, and draws within a period, have an order of their own.
        drop_last: Serve full batches only, and leave out the last step if it is not full.
        in_turn: Round robin: draws stand evenly spread in their period.
        by: What the weights were shares of. By sample, a batch holds several sources, and all batch sizes are equal.
        tokens: Tokens in every source, if they are known.
        schedule: Draws that change as training goes on, in place of ``draws``.

    Raises:
        ConfigurationError: The values contradict each other.
    """

    sources: Sources
    draws: tuple[int, ...]
    stop: Stop | None = None
    num_steps: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    in_turn: bool = False
    by: By = "batch"
    tokens: tuple[int, ...] | None = None
    schedule: DrawSchedule | None = None

    def __post_init__(self) -> None:
        if self.num_steps is None:
            object.__setattr__(self, "stop", "all_exhausted" if self.stop is None else self.stop)
            if self.stop not in get_args(Stop):
                raise ConfigurationError(f"stop must be one of {get_args(Stop)}, got {self.stop!r}.")
        else:
            if self.stop is not None:
                raise ConfigurationError(
                    f"num_steps takes the place of stop; got num_steps={self.num_steps} and stop={self.stop!r}."
                )
            object.__setattr__(self, "num_steps", as_int("num_steps", self.num_steps, least=1))
        if self.schedule is not None and self.num_steps is None:
            raise ConfigurationError(
                "With a schedule, an epoch that ends with its sources would have another length each time; pass "
                "num_steps, and each source goes on in the next epoch where it was."
            )
        if self.drop_last and self.by != "sample":
            for name, length, size in zip(
                self.sources.names, self.sources.lengths, self.sources.batch_sizes, strict=True
            ):
                if size > length:
                    raise ConfigurationError(
                        f"Source {name!r} has {length} samples, fewer than a batch of {size}; with drop_last=True it "
                        "would never be served. Give it a smaller batch size, or pass drop_last=False."
                    )

    @property
    def by_sample(self) -> bool:
        """Whether a draw is a sample, and not a step."""
        return self.by == "sample"

    def rule(self, batch_size: int, num_replicas: int) -> StepRule:
        """The rule that cuts samples into steps."""
        return StepRule(batch_size=batch_size, num_replicas=num_replicas, drop_last=self.drop_last)

    @cached_property
    def amounts(self) -> tuple[int, ...]:
        """Samples that an epoch serves of every source, where a stop rule ends it.

        They are those of a run on one rank with draws evenly spread, so that they depend on neither ranks nor epochs.
        """
        lengths = self.sources.lengths
        if self.stop == "all_exhausted":
            return lengths
        sizes = [1] * len(lengths) if self.by_sample else self.sources.batch_sizes
        whole = [(n if self.drop_last else n + size - 1) // size for n, size in zip(lengths, sizes, strict=True)]
        period = Period(self.draws)
        if self.stop == "cycle":
            end = max(period.draw_of(source, count - 1) for source, count in enumerate(whole)) + 1
        else:
            end = min(period.draw_of(source, count) for source, count in enumerate(whole))
        # A source that has just been served whole does not begin again for the sake of a full batch.
        return tuple(
            length if count == of_a_pass else count * size
            for count, of_a_pass, length, size in zip(period.before(end).tolist(), whole, lengths, sizes, strict=True)
        )


def present(numbers: Indices) -> list[int]:
    """The different ones of non-negative and not too large integers, ascending: faster than ``numpy.unique``."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found
