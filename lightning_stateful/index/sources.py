"""Several datasets, each with a place of its own, cut into groups of batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import MAX_LENGTH, keyed_permutation
from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import Label, derive_seed
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError


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
            if as_int(f"The length of source {name!r}", length) == 0:
                raise ConfigurationError(f"Source {name!r} is empty; leave it out.")
            if not 0 < length <= MAX_LENGTH:
                raise ConfigurationError(f"Source {name!r} must have 1 to 2**40 samples, got {length}.")
            if as_int(f"The batch size of source {name!r}", batch_size) < 1 or isinstance(batch_size, bool):
                raise ConfigurationError(f"The batch size of source {name!r} must be at least 1, got {batch_size!r}.")

    def __len__(self) -> int:
        return len(self.names)

    def refuse_large_batches(self) -> None:
        """Refuse a source that dropping incomplete batches would leave out altogether.

        Raises:
            ConfigurationError: With the source's name.
        """
        for name, length, batch_size in zip(self.names, self.lengths, self.batch_sizes, strict=True):
            if batch_size > length:
                raise ConfigurationError(
                    f"Source {name!r} has {length} samples, fewer than a batch of {batch_size}; with drop_last=True it "
                    "would never be served. Give it a smaller batch size, or pass drop_last=False."
                )

    def look_up(self, source: int, places: Indices, seed: tuple[Label, ...] | None) -> tuple[Indices, Indices | int]:
        """Samples of one source, as they count over all of them.

        Args:
            source: Which source.
            places: Places in it, counted on over all passes; int64 of shape ``(n,)``, ascending, not empty.
            seed: Labels that choose the order of every pass; None for the order of the dataset.

        Returns:
            Indices of shape ``(n,)``, and the pass of each, or of all.
        """
        length = self.lengths[source]
        first, last = int(places[0]) // length, int(places[-1]) // length
        if first == last:
            return self._in_pass(source, first, places - first * length, seed), first
        passes, within = np.divmod(places, length)
        if seed is None or length == 1:
            return within + sum(self.lengths[:source]), passes
        result = np.empty_like(places)
        borders = np.flatnonzero(np.diff(passes)) + 1
        for begin, end in pairwise([0, *borders.tolist(), places.size]):
            result[begin:end] = self._in_pass(source, int(passes[begin]), within[begin:end], seed)
        return result, passes

    def _in_pass(self, source: int, number: int, places: Indices, seed: tuple[Label, ...] | None) -> Indices:
        offset = sum(self.lengths[:source])
        if seed is None:
            return places + offset
        # By name: a source keeps its order when others come and go.
        key = derive_seed("source", *seed, self.names[source], number)
        return keyed_permutation(self.lengths[source], key).take(places) + offset


def present(numbers: Indices) -> list[int]:
    """The different ones of non-negative and not too large integers, ascending: faster than ``numpy.unique``."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def deal_out_steps(length: int, rule: StepRule, steps: Indices, rank: int) -> tuple[Indices, Indices]:
    """What ``rank`` serves in each of many steps through ``length`` slots: first slot, and number of consecutive ones.

    Args:
        length: Slots that ``rule`` cuts into steps.
        rule: How they are cut.
        steps: Which steps, int64 of shape ``(n,)``.
        rank: Whose share.
    """
    starts = steps * rule.full + rank * rule.batch_size
    sizes = np.full(steps.shape, rule.batch_size, dtype=np.int64)
    # Only the last two steps may differ from the others.
    for step in range(max(length // rule.full - 1, 0), rule.num_steps(length)):
        chosen = steps == step
        if chosen.any():
            served = rule.served(length, step)
            share = rule.share(length - served, rank)
            starts[chosen], sizes[chosen] = served + share[0], share.size
    return starts, sizes


class EpochCut:
    """What an epoch has yet to serve of a source, cut into groups of one batch a rank.

    Every group has at least one sample for each rank. What remains after them are the ``leftovers``: fewer samples than
    ranks, or, where incomplete batches are dropped, full batches for fewer than all ranks.

    Args:
        amount: Samples that the epoch serves of the source.
        place: Samples served before.
        rule: How they are cut.
    """

    def __init__(self, amount: int, place: int, rule: StepRule) -> None:
        self._place, self._rule = place, rule
        self._left = max(amount - place, 0)
        self.num_groups = rule.num_steps(self._left)
        if rule.drop_last:
            self._in_groups = self.num_groups * rule.full
            self.leftovers = (self._left - self._in_groups) // rule.batch_size * rule.batch_size
            return
        before_last = rule.served(self._left, self.num_groups - 1) if self.num_groups else 0
        short = self._left - before_last < rule.num_replicas
        self._in_groups = before_last if short else self._left
        self.num_groups -= short and self.num_groups > 0
        self.leftovers = self._left - self._in_groups

    def place_after(self, groups: int) -> int:
        """Samples served after ``groups`` more groups."""
        served = self._rule.served(self._left, groups) if groups < self.num_groups else self._in_groups
        return self._place + served

    def shares(self, groups: Indices, rank: int) -> tuple[Indices, Indices]:
        """What ``rank`` serves in each of ``groups``: the first place, and the number of consecutive places."""
        starts, sizes = deal_out_steps(self._left, self._rule, groups, rank)
        return self._place + starts, sizes


class StreamCut:
    """A source pass after pass, cut into full groups of one batch a rank.

    Args:
        place: Samples served before, over all passes.
        rule: Size of a group.
    """

    def __init__(self, place: int, rule: StepRule) -> None:
        self._place, self._rule = place, rule

    def place_after(self, groups: int) -> int:
        """Samples served, over all passes, after ``groups`` more groups."""
        return self._place + groups * self._rule.full

    def shares(self, groups: Indices, rank: int) -> tuple[Indices, Indices]:
        """What ``rank`` serves in each of ``groups``: the first place, and the number of consecutive places."""
        size = self._rule.batch_size
        return self._place + groups * self._rule.full + rank * size, np.full(groups.shape, size, dtype=np.int64)
