"""An order of batches of like lengths, and its epoch plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from lightning_stateful.bucketing.buckets import Buckets
from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.bucketing.lengths import LengthArray
from lightning_stateful.bucketing.plan import BucketSteps, Remainder, Segment
from lightning_stateful.core.order import Progress, read_in_chunks, say_repeats, seeded_at
from lightning_stateful.core.permutation import ClassShuffle, Indices
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, Difference, PositionError, StateMismatchError
from lightning_stateful.shapes import COUNT, RANKS

# Samples that are looked up at a time.
_CHUNK = 2**17
# More batches than a pass has: the numbers of the next pass begin here.
_BATCHES_A_CYCLE = 2**44


@dataclass(frozen=True, slots=True)
class BucketOrder:
    """Batches of samples of like lengths, each within a budget, in step on all ranks.

    A step gives every rank a batch of the same bucket with the same number of samples; only the last may have fewer.
    Every sample is served once an epoch. Samples are shuffled within their buckets, and so are the full steps, both
    anew in each epoch; the number of steps is the same in all.

    The rest of an epoch that is resumed on another number of ranks is planned anew from the samples left in each
    bucket. So its progress counts steps, and lists under ``segments`` the ranks and steps of each plan so far:
    ``[[64, 300], [48, 20]]`` after 300 steps on 64 ranks and 20 on 48.

    Attributes:
        buckets: The samples, sorted into buckets.
        seed: Chooses the orders.
        shuffle: False to serve the longest bucket first, each in the dataset's order.
        drop_last: Leave out the last step if it is not full.
    """

    buckets: Buckets
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    kind: ClassVar[str] = "buckets"
    version: ClassVar[int] = 1
    carries_over: ClassVar[bool] = False
    details_shape: ClassVar = {"segments": [(RANKS, COUNT)]}
    # Within an epoch, where the steps stay the same; anything else is refused there.
    harmless: ClassVar = ("batch_size",)

    @property
    def lengths(self) -> LengthArray:
        """The length of every sample of the dataset."""
        return self.buckets.lengths

    @property
    def budget(self) -> Budget:
        """The budget of a batch."""
        return self.buckets.budget

    def config(self) -> dict[str, Any]:
        """Plain data to be compared."""
        return {**self.buckets.config, "shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last}

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> BucketEpochPlan:
        """Plan an epoch, or the rest of it.

        Raises:
            ConfigurationError: ``drop_last`` leaves an epoch without a step.
            PositionError: More steps were taken than there were.
        """
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        before = [(ranks, steps) for ranks, steps in here.details.get("segments", ())]
        if sum(steps for _, steps in before) != here.consumed:
            raise PositionError(f"{here.consumed} steps of epoch {epoch} were taken, and segments={before} differ.")
        taken = before.pop()[1] if before and before[-1][0] == num_replicas else 0
        left = Remainder.whole(len(self.buckets))
        for number, (ranks, steps) in enumerate(before):
            segment = self._segment(left, epoch, here.cycle, ranks, number)
            _check_taken(steps, segment, epoch)
            left = segment.left_after(steps)
        segment = self._segment(left, epoch, here.cycle, num_replicas, len(before))
        _check_taken(taken, segment, epoch)
        if not before and not segment.steps.num_steps:
            raise ConfigurationError(
                f"With drop_last=True and {num_replicas} ranks, an epoch of {len(self.buckets)} samples would have no "
                "full step. Train on fewer ranks, with a smaller budget, or without drop_last."
            )
        return BucketEpochPlan(self, epoch, here.cycle, num_replicas, tuple(before), taken, segment)

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """Return ``progress``, if it is the beginning of an epoch; within one, only the same configuration will do.

        But for another ``batch_size`` in as many buckets: there the segments are counted in ranks that would have taken
        the same steps with it, so that on such ranks the rest of the epoch goes on in the same steps.

        Raises:
            StateMismatchError: The progress is within an epoch of other batches; with every difference.
        """
        remedy = (
            "Which samples were served follows from it, so it cannot change within an epoch. Train to the epoch's end "
            "under the saved value, or resume from a checkpoint at the beginning of an epoch."
        )
        present = self.config()
        found = [
            Difference(path=name, saved=saved.get(name, "<nothing>"), present=value, remedy=remedy)
            for name, value in sorted({**dict.fromkeys(saved, "<nothing>"), **present}.items())
            if name != "dataset" and saved.get(name, "<nothing>") != value
        ]
        if not (progress.consumed and found):
            return progress
        scaled = self._with_other_batches(progress, saved["batch_size"]) if self._is_scaled(found) else None
        if scaled is None:
            raise StateMismatchError(found, where="The position within an epoch")
        return scaled

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> BucketOrder:
        """A copy for one of several loaders, or for evaluation; see :meth:`BatchOrder.adapted`."""
        return seeded_at(self, path) if shuffle else replace(self, shuffle=False)

    def _is_scaled(self, found: Sequence[Difference]) -> bool:
        """Whether differences leave the buckets as they are, each with batches of another size."""
        present = self.config()
        is_size = [one.path for one in found] == ["batch_size"] and all(type(one.saved) is int for one in found)
        # Without a number of buckets, that follows from the batch size.
        return is_size and "num_buckets" in present and "multiple" not in present

    def _with_other_batches(self, progress: Progress, batch_size: int) -> Progress | None:
        """A progress in batches of so many samples, counted in ranks of the present batches; None if it cannot be."""
        left, segments = Remainder.whole(len(self.buckets)), []
        for number, (ranks, steps) in enumerate(progress.details["segments"]):
            now, rest = divmod(ranks * batch_size, self.buckets.sizes[0])
            if rest:
                return None
            before = self._segment(left, progress.epoch, progress.cycle, ranks, number, size=batch_size)
            after = self._segment(left, progress.epoch, progress.cycle, now, number)
            if steps > min(before.steps.num_steps, after.steps.num_steps):
                return None
            pairs = zip(before.ranges(0, steps), after.ranges(0, steps), strict=True)
            # The last two steps may share what is left in other ways.
            if not all(np.array_equal(one, other) for one, other in pairs):
                return None
            left = after.left_after(steps)
            segments.append([now, steps])
        return replace(progress, details={"segments": segments})

    def _segment(
        self, left: Remainder, epoch: int, cycle: int, num_replicas: int, number: int, size: int | None = None
    ) -> Segment:
        counts = np.diff(left.num_below(self.buckets.starts))
        sizes = self.buckets.sizes if size is None else (size,) * len(self.buckets.sizes)
        steps = BucketSteps(counts, sizes, num_replicas, drop_last=self.drop_last)
        key = derive_seed("steps of buckets", self.seed, epoch, cycle, number) if self.shuffle else None
        return Segment(left, steps, key)


@dataclass(frozen=True, eq=False)
class BucketEpochPlan:
    """The rest of an epoch of batches of like lengths.

    Attributes:
        order: The order that was planned.
        epoch: The epoch.
        cycle: Number of the pass within the epoch.
        num_replicas: Number of ranks.
        before: Ranks and steps of the segments of the epoch before this one.
        taken: Steps of this segment that were taken before this plan begins.
        segment: The rest of the epoch since the number of ranks last changed.
    """

    order: BucketOrder
    epoch: int
    cycle: int
    num_replicas: int
    before: tuple[tuple[int, int], ...]
    taken: int
    segment: Segment

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch."""
        return self.segment.steps.num_steps - self.taken

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, list[int]]]:
        """The batches of ``rank``; numbers count the batches of all ranks since the epoch's beginning."""
        earlier = sum(ranks * steps for ranks, steps in self.before)
        number = earlier + (self.taken + first_step) * self.num_replicas + rank + self.cycle * _BATCHES_A_CYCLE
        # Steps that hold so many samples of a rank, on average.
        largest = max(_CHUNK * self.num_replicas * self.num_steps // max(len(self.segment.left), 1), 1)
        read = partial(self.read, rank)
        for indices in read_in_chunks(read, first_step, self.num_steps, largest=largest):
            yield number, indices
            number += self.num_replicas

    def read(self, rank: int, first: int, last: int) -> tuple[Indices, Indices]:
        """The batches of ``rank`` in the steps ``first <= step < last`` of this plan, as arrays.

        Returns:
            Their samples one after the other, int64 of shape ``(n,)``, and the size of each batch, ``(last - first,)``.
        """
        offsets, sizes = self.segment.share(self.taken + first, self.taken + last, rank)
        return self.order.buckets.take(offsets, self._shuffle), sizes

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps: the steps taken, and the ranks that took them."""
        taken = self.taken + steps
        segments = [*self.before, (self.num_replicas, taken)] if taken else self.before
        return Progress(
            epoch=self.epoch,
            cycle=self.cycle,
            consumed=sum(count for _, count in segments),
            details={"segments": [list(segment) for segment in segments]},
        )

    def report_after(self, steps: int) -> dict[str, Any]:
        """Samples served in the epoch, over all ranks."""
        earlier = (1 + self.cycle) * len(self.order.buckets) - len(self.segment.left)
        return {"samples": earlier + self.segment.num_samples(self.taken + steps)}

    def repeats(self) -> str:
        """A sentence on what is served twice; empty if nothing is."""
        return say_repeats(self.segment.steps.num_repeated, len(self.order.buckets))

    @cached_property
    def _shuffle(self) -> ClassShuffle | None:
        if not self.order.shuffle:
            return None
        return self.order.buckets.shuffle(self.order.seed, self.epoch, self.cycle)


def _check_taken(steps: int, segment: Segment, epoch: int) -> None:
    if steps > segment.steps.num_steps:
        raise PositionError(
            f"{steps} steps of epoch {epoch} were taken on {segment.steps.num_replicas} ranks, where only "
            f"{segment.steps.num_steps} were left. Train on the lengths that the checkpoint was made with, or resume "
            "from a checkpoint of these."
        )
