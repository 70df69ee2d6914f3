"""Batches from sorted windows of a shuffled order, as a function of position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.permutation import ClassShuffle
from lightning_stateful.core.ranges import Indices, bounds_of, concatenated_ranges
from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.index.budget import Budget
from lightning_stateful.index.leftovers import deal_out
from lightning_stateful.index.position import Position
from lightning_stateful.index.replanning import no_step, read_position, refuse_within_epoch, save_position
from lightning_stateful.index.slots import Batches, say_repeats
from lightning_stateful.index.windows import OpenWindows, Windows


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """A canonical sequence of batches, cut from windows of a shuffled order that are each sorted by length.

    The sequence is the same on any number of ranks; they take one batch each in turn. Within a window batches may be
    shuffled: in groups of as many as the epoch had ranks at its beginning, so that the ranks of a step serve neighbours
    in length. The last step deals out what is left, so that every rank has a batch.

    Attributes:
        windows: The samples.
        shuffle_batches: Shuffle the batches of each window.
        drop_last: Leave out the last step if there is not a batch for every rank.
    """

    windows: Windows
    shuffle_batches: bool = True
    drop_last: bool = False
    _kept: dict[str, Indices] = field(default_factory=dict, init=False, compare=False, repr=False)
    kind: ClassVar[str] = "windows"
    order_version: ClassVar[int] = 1

    @property
    def carries_over(self) -> bool:
        """False: every epoch is complete."""
        return False

    @property
    def lengths(self) -> NDArray[Any]:
        """The length of every sample."""
        return self.windows.lengths

    @property
    def budget(self) -> Budget:
        """What a batch may hold."""
        return self.windows.budget

    @property
    def slots(self) -> Indices:
        """Batches before each window and, last, in all; int64 of shape ``(windows + 1,)``."""
        if "slots" not in self._kept:
            self._kept["slots"] = bounds_of(self.windows.count_batches())
        return self._kept["slots"]

    # Positions

    def begin(self, epoch: int, width: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``."""
        return Position(epoch=epoch, width=width)

    def reopen(self, position: Position, width: int) -> Position:
        """The same position, from which the rest of the epoch is dealt out to ``width`` ranks.

        Its ``origin`` is the number of batches served, and the number of ranks that the epoch had at its beginning.
        """
        if width == position.width:
            return position
        slots = position.consumed // position.width * width
        served, group = self._slot(position, position.steps_since), self._group(position)
        origin = (served, group) if served else ()
        return Position(epoch=position.epoch, consumed=slots, width=width, since=slots, origin=origin)

    def steps(self, position: Position) -> int:
        """Steps of the position's epoch, counted from its beginning, on as many ranks as the position is wide."""
        left = int(self.slots[-1]) - self._slot(position, 0)
        full, rest = divmod(left, position.width)
        if not full and self.drop_last and not position.consumed:
            raise no_step(len(self.windows.samples), position.width)
        return position.steps_before + full + (rest > 0 and not self.drop_last)

    def batches(self, position: Position, first: int, last: int, rank: int) -> Batches:
        """The batches of ``rank`` in the steps ``first <= step < last`` of the position's epoch."""
        begun, width = position.steps_before, position.width
        served, total = self._slot(position, 0), int(self.slots[-1])
        num_full, rest = divmod(total - served, width)
        slots = served + np.arange(first - begun, min(last - begun, num_full)) * width + rank
        indices, sizes = self._read(slots, position)
        if rest and last - begun > num_full:
            left, of_batch = self._read(np.arange(total - rest, total), position)
            share = _share(of_batch.tolist(), width, rank)
            indices = np.concatenate([indices, left[share]])
            sizes = np.append(sizes, share.stop - share.start)
        return Batches(indices, sizes, np.zeros_like(indices))

    def _slot(self, position: Position, steps: int) -> int:
        """Batches served before a step that comes ``steps`` after the rest of the epoch was dealt out."""
        served = position.origin[0] if position.origin else 0
        return min(served + steps * position.width, int(self.slots[-1]))

    @staticmethod
    def _group(position: Position) -> int:
        return position.origin[1] if position.origin else position.width

    def _read(self, slots: Indices, position: Position) -> tuple[Indices, Indices]:
        """The samples of the batches ``slots``, one after the other, and their sizes."""
        if not slots.size:
            return slots, slots
        slots = self._shuffled(slots, position)
        of_slot = np.searchsorted(self.slots, slots, side="right") - 1
        samples: list[Indices] = []
        # Neighbouring windows are opened together.
        order = np.argsort(of_slot, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(of_slot[order]) > 1) + 1)
        places: Indices = np.zeros_like(slots)
        counts: Indices = np.zeros_like(slots)
        offset = 0
        for run in runs:
            first, last = int(of_slot[run[0]]), int(of_slot[run[-1]]) + 1
            opened: OpenWindows = self.windows.open(first, last, position.epoch)
            batch = slots[run] - self.slots[first]
            places[run], counts[run] = opened.starts[batch] + offset, opened.sizes[batch]
            samples.append(opened.samples)
            offset += len(opened.samples)
        return np.concatenate(samples)[concatenated_ranges(places, counts)], counts

    def _shuffled(self, slots: Indices, position: Position) -> Indices:
        """Batches in the order in which they are served: groups of neighbours change places within their window."""
        if not self.shuffle_batches:
            return slots
        width = self._group(position)
        groups = slots // width
        first, last = np.searchsorted(self.slots, [slots.min(), slots.max()], side="right") - 1
        bounds = self.slots[first : last + 2]
        begins, ends = -(-bounds[:-1] // width), bounds[1:] // width
        # Each window's whole groups are a class; one that reaches into another window stays alone, where it is.
        starts = np.stack([begins, np.maximum(ends, begins)], axis=1).ravel()
        inside = (groups >= starts[0]) & (groups < starts[-1])
        shuffle = ClassShuffle(starts, "batches of windows", self.windows.seed, position.epoch)
        groups[inside] = shuffle.take(groups[inside])
        result: Indices = groups * width + slots % width
        return result

    def report(self, position: Position) -> dict[str, Any]:
        """Samples served of this epoch."""
        served = self._slot(position, position.steps_since)
        window = int(np.searchsorted(self.slots, served, side="right")) - 1
        _, sizes = self._read(np.arange(self.slots[window], served), position)
        return {"samples": min(window * self.windows.window, len(self.windows.samples)) + int(sizes.sum())}

    def repeats(self, width: int) -> list[str]:
        """What is served twice because ranks take equal steps, in words."""
        total = int(self.slots[-1])
        rest = 0 if self.drop_last else total % width
        left = int(self._read(np.arange(total - rest, total), self.begin(0, width))[1].sum())
        return say_repeats(max(width - left, 0) if rest else 0, len(self.windows.samples))

    def work(self, width: int) -> int:
        """Samples that have to be looked at to find one batch of one rank."""
        return max(len(self.windows.samples) * width // max(int(self.slots[-1]), 1), 1)

    def unshuffled(self) -> WindowOrder:
        """The same windows in every epoch, in the dataset's order."""
        if not self.windows.shuffle and not self.shuffle_batches:
            return self
        return replace(self, windows=replace(self.windows, shuffle=False), shuffle_batches=False)

    # State

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        return {
            **self.windows.described,
            "shuffle": self.windows.shuffle,
            "shuffle_batches": self.shuffle_batches,
            "seed": self.windows.seed,
            "drop_last": self.drop_last,
        }

    def save(self, position: Position) -> dict[str, Any]:
        """A position as plain data, with what was served before the number of ranks changed."""
        return save_position(position, "served")

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
        position = read_position(data, "served")
        if changed:
            refuse_within_epoch(position, saved, self.describe())
        if position.origin and len(position.origin) != 2:
            raise DamagedStateError(f"served and since of a position contradict each other: {dict(data)}")
        if position.origin and position.origin[0] > int(self.slots[-1]):
            raise PositionError(
                f"{position.origin[0]} batches of an epoch were served, which has only {self.slots[-1]}"
            )
        return position


def _share(sizes: list[int], width: int, rank: int) -> slice:
    """What one rank has of the last batches, of which there are fewer than ranks: a part of one of them."""
    dealt = deal_out(sizes, sizes, width)
    batch, start, size = (int(column[0, rank]) for column in dealt[:3])
    begin = sum(sizes[:batch]) + start
    return slice(begin, begin + size)
