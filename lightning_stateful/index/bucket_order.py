"""Batches of like lengths, bucket by bucket, as a function of position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import DamagedStateError
from lightning_stateful.index.bucket_course import BucketCourse
from lightning_stateful.index.buckets import Buckets
from lightning_stateful.index.budget import Budget
from lightning_stateful.index.position import Position
from lightning_stateful.index.remainder import Remainder
from lightning_stateful.index.replanning import no_step, read_position, refuse_within_epoch, save_position
from lightning_stateful.index.slots import Batches, say_repeats

_MOST_COURSES = 4


@dataclass(frozen=True, slots=True)
class BucketOrder:
    """A canonical sequence of batches, each of samples of like lengths and within a budget.

    A step gives every rank a batch of the same bucket with the same number of samples; only the last may have fewer.
    Every sample is served once an epoch, in an order of its own within its bucket, and the steps come in an order of
    their own: both differ from epoch to epoch, the number of steps does not.

    The rest of an epoch that is resumed on another number of ranks is planned anew from what is left of each bucket.

    Attributes:
        buckets: The samples.
        seed: Chooses the orders.
        shuffle: False to serve the longest bucket first, each in the dataset's order.
        drop_last: Leave out the last step if it is not full.
    """

    buckets: Buckets
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    _courses: dict[Any, _Planned] = field(default_factory=dict, init=False, compare=False, repr=False)
    kind: ClassVar[str] = "buckets"
    order_version: ClassVar[int] = 1

    @property
    def carries_over(self) -> bool:
        """False: every epoch is complete."""
        return False

    @property
    def lengths(self) -> NDArray[Any]:
        """The length of every sample."""
        return self.buckets.lengths

    @property
    def budget(self) -> Budget:
        """What a batch may hold."""
        return self.buckets.budget

    # Positions

    def begin(self, epoch: int, width: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``."""
        return Position(epoch=epoch, width=width)

    def reopen(self, position: Position, width: int) -> Position:
        """The same position, from which the rest of the epoch is planned for ``width`` ranks.

        Its ``origin`` is the epoch's history: how many steps were served on how many ranks, pair by pair.
        """
        if width == position.width:
            return position
        done = position.steps_since
        history = (*position.origin, position.width, done) if done else position.origin
        slots = position.consumed // position.width * width
        return Position(epoch=position.epoch, consumed=slots, width=width, since=slots, origin=history)

    def steps(self, position: Position) -> int:
        """Steps of the position's epoch, counted from its beginning, on as many ranks as the position is wide."""
        return position.steps_before + self._plan(position).course.num_steps

    def batches(self, position: Position, first: int, last: int, rank: int) -> Batches:
        """The batches of ``rank`` in the steps ``first <= step < last`` of the position's epoch."""
        plan, begun = self._plan(position), position.steps_before
        steps = plan.course.steps(plan.take(np.arange(first - begun, last - begun)))
        places, sizes = plan.course.share(steps, rank)
        seed = self.seed if self.shuffle else None
        indices = self.buckets.samples.take(plan.left.take(places), seed, position.epoch)
        return Batches(indices, sizes, np.zeros_like(indices))

    def _plan(self, position: Position) -> _Planned:
        key = (position.epoch if position.origin or self.shuffle else 0, position.width, position.origin)
        if key not in self._courses:
            planned = self._replay(position.epoch, position.width, position.origin)
            if len(self._courses) >= _MOST_COURSES:
                self._courses.clear()
            self._courses[key] = planned
        return self._courses[key]

    def _replay(self, epoch: int, width: int, history: tuple[int, ...]) -> _Planned:
        left = Remainder.whole(len(self.buckets.samples))
        pairs = list(zip(history[::2], history[1::2], strict=True))
        for number, (ranks, served) in enumerate(pairs):
            plan = self._planned(left, epoch, ranks, number)
            if not 0 < served <= plan.course.num_steps:
                raise DamagedStateError(
                    f"a history of steps on ranks, {pairs}, has {served} steps on {ranks} ranks where "
                    f"{plan.course.num_steps} were left"
                )
            left = left.without(*plan.course.steps(plan.take(np.arange(served))))
        planned = self._planned(left, epoch, width, len(pairs))
        if not pairs and not planned.course.num_steps:
            raise no_step(len(self.buckets.samples), width)
        return planned

    def _planned(self, left: Remainder, epoch: int, width: int, resizings: int) -> _Planned:
        counts = np.diff(left.num_below(self.buckets.samples.starts))
        course = BucketCourse(counts, self.buckets.sizes, width, drop_last=self.drop_last)
        key = derive_seed("steps of buckets", self.seed, epoch, resizings)
        return _Planned(left, course, KeyedPermutation(course.num_full, key) if self.shuffle else None)

    def report(self, position: Position) -> dict[str, Any]:
        """Samples served of this epoch."""
        plan = self._plan(position)
        steps = plan.course.steps(plan.take(np.arange(position.steps_since)))
        before = len(self.buckets.samples) - len(plan.left)
        return {"samples": before + int((steps.stops - steps.starts).sum())}

    def repeats(self, width: int) -> list[str]:
        """What is served twice because ranks take equal steps, in words."""
        return say_repeats(self._plan(self.begin(0, width)).course.num_repeated, len(self.buckets.samples))

    def work(self, width: int) -> int:
        """Samples that have to be looked at to find one batch of one rank."""
        return max(len(self.buckets.samples) // max(self.steps(self.begin(0, 1)), 1), 1)

    def unshuffled(self) -> BucketOrder:
        """The same samples, the longest bucket first, each in the dataset's order, in every epoch."""
        return replace(self, shuffle=False)

    # State

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        return {**self.buckets.described, "shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last}

    def save(self, position: Position) -> dict[str, Any]:
        """A position as plain data, with the epoch's history of ranks."""
        return save_position(position, "history")

    def restore(self, data: Mapping[str, Any], saved: Mapping[str, Any], *, changed: bool) -> Position:
        """The position that :meth:`save` wrote.

        Args:
            data: What it wrote.
            saved: The configuration that wrote it.
            changed: Whether that differs from this one.

        Raises:
            DamagedStateError: Keys are missing, or contradict each other.
            PositionError: A value is out of range.
            StateMismatchError: Within an epoch of other batches, whatever is accepted.
        """
        position = read_position(data, "history")
        if changed:
            refuse_within_epoch(position, saved, self.describe())
        history = position.origin
        if len(history) % 2 or position.since != sum(history[1::2]) * position.width:
            raise DamagedStateError(f"history and since of a position contradict each other: {dict(data)}")
        self._plan(position)
        return position


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """The rest of an epoch: what is left, its steps, and in which order they come."""

    left: Remainder
    course: BucketCourse
    shuffled: KeyedPermutation | None

    def take(self, places: Indices) -> Indices:
        """The steps at ``places``: those that are not full stay last."""
        if self.shuffled is None:
            return places
        result: Indices = places.copy()
        full = places < self.shuffled.length
        result[full] = self.shuffled.take(places[full])
        return result
