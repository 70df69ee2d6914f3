"""Plain orders: the samples of one dataset, shuffled or not, cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from lightning_stateful.core.checks import as_int, check_length
from lightning_stateful.core.order import Progress, say_repeats, seeded_at
from lightning_stateful.core.permutation import Indices, KeyedPermutation, concatenated_ranges, keyed_permutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.core.skip import NO_GAPS, Gaps, Skip
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import PositionError

# Samples that are looked up at a time.
_CHUNK = 8192
_LOOKED_THROUGH = 2**18


@runtime_checkable
class SampleOrder(Protocol):
    """A sequence of samples for every epoch, with random access. Implementations are frozen values.

    A loader takes one as ``sampler``. Nothing tries an order before training, as a sampler is: whether it is a pure
    function is shown by :func:`lightning_stateful.check_resume`.

    Attributes:
        kind: The name of this kind of order in a state, other than that of any order of the package.
        version: A number that is raised whenever the same configuration gives another sequence than before.
    """

    kind: ClassVar[str]
    version: ClassVar[int]

    def __len__(self) -> int:
        """Samples of one epoch."""
        ...

    def take(self, offsets: Indices, epoch: int, cycle: int) -> Indices:
        """Look up samples: offsets in the sequence, int64 of shape ``(n,)`` -> indices of the dataset, ``(n,)``.

        A pure function: of the arguments, which have no number of ranks among them, and of the fields of the order.

        Args:
            offsets: Offsets in the sequence of the epoch, each in ``range(len(self))``, in no certain order.
            epoch: The epoch, from 0.
            cycle: 0, but where a short loader starts over beside a longer one in the same epoch: how often it has.

        Returns:
            An int64 array, each element in ``range(len(dataset))``.
        """
        ...

    def config(self) -> dict[str, Any]:
        """All settings that determine the sequence, as plain data: compared when a state is loaded, never applied.

        What is left out here may change on a resume without a word. The keys ``dataset``, ``drop_last``, ``sources``
        and ``lengths`` are the package's.
        """
        ...


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """Every sample in turn, the same in every epoch.

    Attributes:
        length: Number of samples.
    """

    length: int
    kind: ClassVar[str] = "sequential"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_length(self.length)

    def __len__(self) -> int:
        return self.length

    def take(self, offsets: Indices, epoch: int, cycle: int) -> Indices:
        """The offsets themselves."""
        return offsets

    def find(self, indices: Indices, epoch: int, cycle: int) -> Indices:
        """The offsets of samples, which are their indices."""
        return indices

    def config(self) -> dict[str, Any]:
        """Plain data to be compared."""
        return {"shuffle": False}


@dataclass(frozen=True, slots=True)
class ShuffledOrder:
    """Every sample once, in another random order each epoch.

    Attributes:
        length: Number of samples.
        seed: Chooses the orders.
    """

    length: int
    seed: int = 0
    kind: ClassVar[str] = "shuffled"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_length(self.length)

    def __len__(self) -> int:
        return self.length

    def take(self, offsets: Indices, epoch: int, cycle: int) -> Indices:
        """The samples at ``offsets``."""
        return self._permutation(epoch, cycle).take(offsets)

    def find(self, indices: Indices, epoch: int, cycle: int) -> Indices:
        """The offsets of samples."""
        return self._permutation(epoch, cycle).find(indices)

    def _permutation(self, epoch: int, cycle: int) -> KeyedPermutation:
        return keyed_permutation(self.length, derive_seed("shuffled", self.seed, epoch, cycle))

    def config(self) -> dict[str, Any]:
        """Plain data to be compared."""
        return {"shuffle": True, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class BlockShuffledOrder:
    """Blocks of consecutive samples in a shuffled order, and samples shuffled within a window of blocks.

    While a window is served, only ``window`` blocks of the dataset are read. A sample can meet any sample of its own
    block and of the ``window - 1`` blocks that the epoch puts beside it; another epoch puts others there.

    Attributes:
        length: Number of samples.
        seed: Chooses the orders.
        block_size: Consecutive samples in a block, at least 1; the dataset's last block may be shorter.
        window: Blocks that are shuffled together, at least 1.

    Raises:
        ConfigurationError: A value is out of range.
    """

    length: int
    seed: int = 0
    block_size: int = 1024
    window: int = 16
    kind: ClassVar[str] = "block_shuffled"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_length(self.length)
        for name in ("block_size", "window"):
            object.__setattr__(self, name, as_int(name, getattr(self, name), least=1))

    def __len__(self) -> int:
        return self.length

    def take(self, offsets: Indices, epoch: int, cycle: int) -> Indices:
        """The samples at ``offsets``."""
        key = derive_seed("block_shuffled", self.seed, epoch, cycle)
        return self._take(key, offsets) if offsets.size else offsets

    def _take(self, key: int, offsets: Indices) -> Indices:
        num_blocks = -(-self.length // self.block_size)
        window = min(self.window, num_blocks)
        blocks = keyed_permutation(num_blocks - 1, derive_seed("blocks", key))
        # The last block, which may be short, stands somewhere among the others; all after it come `missing` earlier.
        missing = num_blocks * self.block_size - self.length
        short_at = derive_seed("last block", key) % num_blocks
        short_window = short_at // window
        span = window * self.block_size

        windows = np.where(offsets < (short_window + 1) * span - missing, offsets, offsets + missing) // span
        starts = windows * span - missing * (windows > short_window)
        result = np.empty_like(offsets)
        for number in np.unique(windows):
            chosen = windows == number
            end = min((int(number) + 1) * span - missing * (number >= short_window), self.length)
            start = int(starts[chosen][0])
            within = keyed_permutation(end - start, derive_seed("window", key, int(number)))
            unshuffled = start + within.take(offsets[chosen] - start)
            # Now an unshuffled offset among the permuted blocks: skip the hole behind the short block.
            unshuffled += missing * (unshuffled >= (short_at + 1) * self.block_size - missing)
            place, sample = np.divmod(unshuffled, self.block_size)
            block = np.full_like(place, num_blocks - 1)
            full = place != short_at
            block[full] = blocks.take(place[full] - (place[full] > short_at))
            result[chosen] = block * self.block_size + sample
        return result

    def config(self) -> dict[str, Any]:
        """Plain data to be compared."""
        return {"shuffle": "blocks", "seed": self.seed, "block_size": self.block_size, "window": self.window}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatchOrder:
    """Samples of one dataset, cut into batches by the step rule.

    Attributes:
        samples: The sequence of samples.
        batch_size: Samples in a full batch of one rank, which may change from one checkpoint to the next; None for
            single samples that are not collated.
        drop_last: Leave out the last step of an epoch if it is not full.
        exact: For evaluation: never serve a sample twice unless there are fewer samples than ranks.
    """

    samples: SampleOrder
    batch_size: int | None = 1
    drop_last: bool = False
    exact: bool = False
    carries_over: ClassVar[bool] = False
    details_shape: ClassVar[dict[str, Any]] = {}

    @property
    def kind(self) -> str:
        """The kind of the sample order: how samples are cut makes no kind of its own."""
        return self.samples.kind

    @property
    def version(self) -> int:
        """The version of the sample order."""
        return self.samples.version

    @property
    def is_indexed(self) -> bool:
        """Whether it gives indices of samples, and not numbers of packed sequences."""
        return not hasattr(self.samples, "converted")

    def gaps(self, skip: Skip, epoch: int, cycle: int) -> Gaps:
        """Offsets of a pass whose samples are left out by their index.

        Of a set of indices a plain or shuffled order tells the offsets. Else the whole pass is looked through.
        """
        find = getattr(self.samples, "find", None)
        if find is not None and skip.function is None and skip.indices is not None:
            chosen = find(skip.indices[skip.indices < len(self.samples)], epoch, cycle)
        else:
            found = [np.zeros(0, np.int64)]
            for start in range(0, len(self.samples), _LOOKED_THROUGH):
                offsets = np.arange(start, min(start + _LOOKED_THROUGH, len(self.samples)), dtype=np.int64)
                found.append(offsets[skip.leaves_out(self.samples.take(offsets, epoch, cycle))])
            chosen = np.concatenate(found)
        return Gaps.of(np.stack([chosen, chosen + 1], axis=1))

    def config(self) -> dict[str, Any]:
        """The settings that decide which samples are served, as plain data; the batch size is not among them."""
        return {**self.samples.config(), "drop_last": self.drop_last}

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> SampleEpochPlan:
        """Plan ``epoch``, or the rest of it.

        Raises:
            PositionError: More samples were consumed than the epoch has.
        """
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        if here.consumed > len(self.samples):
            raise PositionError(
                f"{here.consumed} samples of epoch {epoch} were consumed, but an epoch has only {len(self.samples)}. "
                "Train on the dataset that the checkpoint was made with, or resume from a checkpoint of this one."
            )
        rule = StepRule(
            batch_size=1 if self.batch_size is None else self.batch_size,
            num_replicas=num_replicas,
            drop_last=self.drop_last,
            exact=self.exact and self.batch_size is not None,
        )
        return SampleEpochPlan(self, rule, epoch, here.cycle, here.consumed)

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """``progress`` itself where samples are counted alike under any configuration, as all but packed sequences."""
        converted = getattr(self.samples, "converted", None)
        return progress if converted is None else replace(progress, consumed=converted(progress.consumed, saved))

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> SampleBatchOrder:
        """A copy for one of several loaders, or for evaluation; see :meth:`BatchOrder.adapted`."""
        samples = seeded_at(self.samples, path) if shuffle else SequentialOrder(len(self.samples))
        return replace(self, samples=samples, exact=self.exact or exact)

    def with_repeats(self) -> SampleBatchOrder:
        """A copy without ``exact``, for samples that cannot be collated in pairs: some are served twice instead."""
        return replace(self, exact=False)


@dataclass(frozen=True)
class SampleEpochPlan:
    """The rest of an epoch of samples.

    Attributes:
        order: The order that was planned.
        rule: Cuts the samples into steps.
        epoch: The epoch.
        cycle: Number of the pass within the epoch.
        consumed: Samples of the pass that were consumed before this plan begins; those left out count.
        gaps: Offsets of the pass whose samples are left out: the others follow one another, and are cut into steps.
    """

    order: SampleBatchOrder
    rule: StepRule
    epoch: int
    cycle: int
    consumed: int
    gaps: Gaps = NO_GAPS

    @cached_property
    def remaining(self) -> int:
        """Samples of the pass that this plan serves, or drops at its end."""
        length = len(self.order.samples)
        return length - self.gaps.before(length) - self._first

    @cached_property
    def num_steps(self) -> int:
        """Steps to the end of the epoch."""
        return self.rule.num_steps(self.remaining)

    @property
    def ends_in_pairs(self) -> bool:
        """Whether single samples that are left at the end are served in batches of two."""
        return self.rule.ends_in_pairs(self.remaining)

    def num_samples(self, rank: int) -> int:
        """Samples of ``rank`` in this plan."""
        return self.rule.num_samples(self.remaining, rank)

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of ``rank``, or its samples if they are not collated; numbered by the offset of the first."""
        for offsets, indices in self._chunks(rank, first_step):
            numbers = offsets[:, 0] + self.cycle * len(self.order.samples)
            batches = indices[:, 0] if self.order.batch_size is None else indices
            yield from zip(numbers.tolist(), batches.tolist(), strict=True)

    def samples(self, rank: int, first_step: int = 0) -> Iterator[int]:
        """The samples of ``rank``, batch after batch."""
        for _, indices in self._chunks(rank, first_step):
            yield from indices.ravel().tolist()

    def _chunks(self, rank: int, first_step: int) -> Iterator[tuple[Indices, Indices]]:
        """Look up many batches of one size at once.

        Yields:
            Offsets, and the samples there: both int64 of shape ``(batches, size)``.
        """
        rule, size = self.rule, self.rule.batch_size
        served = rule.served(self.remaining, first_step)
        begin, left = self._first + served, self.remaining - served
        num_alike = rule.num_alike(left)
        own = begin + rank * size + np.arange(size, dtype=np.int64)
        per_chunk = max(_CHUNK // size, 1)
        for start in range(0, num_alike, per_chunk):
            steps = np.arange(start, min(start + per_chunk, num_alike), dtype=np.int64)
            offsets = self.gaps.positions((steps * rule.full)[:, None] + own)
            yield offsets, self._take(offsets)
        for share in rule.last_shares(left, rank):
            offsets = self.gaps.positions(begin + share)
            yield offsets[None], self._take(offsets)[None]

    @cached_property
    def _first(self) -> int:
        """The number of the first sample of this plan among all of the pass that are not left out."""
        return self.consumed - self.gaps.before(self.consumed)

    def _take(self, offsets: Indices) -> Indices:
        return self.order.samples.take(offsets.ravel(), self.epoch, self.cycle).reshape(offsets.shape)

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps."""
        # After 0 steps nothing counts as served, even what drop_last drops here: fewer ranks may still serve it.
        return Progress(epoch=self.epoch, cycle=self.cycle, consumed=self._consumed_after(steps))

    def _consumed_after(self, steps: int) -> int:
        served = self.rule.served(self.remaining, steps) if steps else 0
        if not self.gaps or not served:
            return self.consumed + served
        if served == self.remaining:
            return len(self.order.samples)
        # Behind the last sample: what is left out after it may still be trained on by a run that leaves out less.
        return int(self.gaps.positions(np.int64(self._first + served - 1))) + 1

    def report_after(self, steps: int) -> dict[str, Any]:
        """Samples served in the epoch, over all ranks, and those left out."""
        consumed = self._consumed_after(steps)
        served = self.cycle * len(self.order.samples) + consumed
        if not self.gaps:
            return {"samples": served}
        left_out = self.gaps.before(consumed)
        return {"samples": served - left_out, "skipped": left_out}

    def left_out(self, step: int) -> Indices:
        """The samples left out from the end of the step before ``step`` to its own, at the last to the epoch's end."""
        first, stop = self._consumed_after(step), self._consumed_after(step + 1)
        ranges = self.gaps.within(first, stop)
        offsets = concatenated_ranges(ranges.starts, ranges.stops - ranges.starts)
        return self._take(offsets) if offsets.size else offsets

    def repeats(self) -> str:
        """A sentence on what is served twice; empty if nothing is."""
        return say_repeats(self.rule.num_repeated(self.remaining), len(self.order.samples))
