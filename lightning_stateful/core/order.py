"""The protocol that all loaders and samplers are built on: orders, plans of the rest of an epoch, and progress.

A :class:`BatchOrder` gives the batches of an epoch, as a pure function of (configuration, epoch, number of ranks). From
a :class:`Progress` it makes an :class:`EpochPlan`: the steps from there to the end of
the epoch, with a batch for each rank. A run that is resumed, perhaps on other ranks, is planned from the progress that
its checkpoint holds.

Orders of samples are in :mod:`lightning_stateful.core.samples`, of several datasets in
:mod:`lightning_stateful.mixture`, of like lengths in :mod:`lightning_stateful.bucketing`, of any other sampler in
:mod:`lightning_stateful.user_samplers.wrapped_sampler`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import Indices
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.shapes import COUNT, CYCLE, EPOCH

# ``num_steps`` of an epoch whose end is not known beforehand. It is larger than any number of steps, so that min(),
# max() and comparisons with it need no special case.
UNKNOWN = 2**62

# The first batch should not wait for many; later ones are computed many at a time.
_FIRST_CHUNK = 8
# The counts of a progress, and their ranges.
_COUNTS = {"epoch": EPOCH, "cycle": CYCLE, "consumed": COUNT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A position in training: an epoch, and how much of it the model has been trained on. Equal on every rank.

    Attributes:
        epoch: The epoch that the next batch belongs to, from 0.
        cycle: Passes over the data that came before within the epoch: a short loader starts over beside a longer one
            (``max_size_cycle``).
        consumed: How much of this pass the model has been trained on, counted over all ranks. The unit is the order's:
            samples of a plain dataset, steps of mixtures, buckets and streams, items of a wrapped sampler.
        details: Whatever else the order needs to plan the rest of the epoch: plain JSON data of its own.

    Raises:
        PositionError: A count is negative.
    """

    epoch: int = 0
    cycle: int = 0
    consumed: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if min(self.epoch, self.cycle, self.consumed) < 0:
            raise PositionError(
                f"A progress counts from 0, got epoch={self.epoch}, cycle={self.cycle}, consumed={self.consumed}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Fresh plain data for a state."""
        return {name: getattr(self, name) for name in _COUNTS} | copy.deepcopy(dict(self.details))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Progress:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DamagedStateError: A count is missing or no integer.
            PositionError: A count is negative, or beyond any run.
        """
        for name, counts in _COUNTS.items():
            if type(data.get(name)) is not int:
                raise DamagedStateError(f"progress.{name} must be an int, got {data.get(name)!r}.")
            if data[name] >= counts.stop:
                raise PositionError(f"progress.{name} must be below {counts.stop}, got {data[name]}.")
        details = {name: copy.deepcopy(value) for name, value in data.items() if name not in _COUNTS}
        return cls(**{name: data[name] for name in _COUNTS}, details=details)


class EpochPlan(Protocol):
    """The rest of one epoch for one number of ranks, cut into steps; each step gives every rank one batch."""

    @property
    def epoch(self) -> int:
        """The epoch that is planned."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch; :data:`UNKNOWN` until the end of a sampler without ``len`` has been seen."""
        ...

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of ``rank`` from ``first_step`` of this plan to its end.

        Yields:
            ``(number, indices)``. The number tells a batch from all others of its epoch, on all ranks: random numbers
            drawn while it is read are seeded from (seed, path of the loader, epoch, number). Only a batch that is
            served twice, to keep ranks in step, has its number twice. ``indices`` are the dataset's indices: a list, a
            single one where nothing is collated, or a batch as a wrapped batch sampler yields it.
        """
        ...

    def progress_after(self, steps: int) -> Progress:
        """The progress of a run that has taken the first ``steps`` steps of this plan, at most ``num_steps``."""
        ...

    def report_after(self, steps: int) -> dict[str, Any]:
        """Counts of what the epoch has served after ``steps`` steps of this plan, as plain data for people to read."""
        ...

    def repeats(self) -> str:
        """A sentence on what is served twice to keep ranks in step; empty if nothing is."""
        ...


@runtime_checkable
class SampleCountingPlan(EpochPlan, Protocol):
    """A plan that cuts single samples into batches, and so can count them beforehand."""

    @property
    def ends_in_pairs(self) -> bool:
        """Whether single samples that are left at the end are served in batches of two."""
        ...

    def num_samples(self, rank: int) -> int:
        """Samples of ``rank`` in this plan.

        Raises:
            TypeError: The number is not known before the end.
        """
        ...


@runtime_checkable
class BatchOrder(Protocol):
    """The batches of every epoch, as a pure function of configuration, epoch and number of ranks.

    Implementations are frozen values.
    """

    @property
    def kind(self) -> str:
        """The name of this kind of order in a state."""
        ...

    @property
    def version(self) -> int:
        """A number that is raised whenever the same configuration gives another sequence than before."""
        ...

    @property
    def carries_over(self) -> bool:
        """Whether an epoch goes on where the one before has ended; such an order cannot start over within one."""
        ...

    def config(self) -> dict[str, Any]:
        """The settings that determine the sequence, as plain data: compared when a state is loaded, never applied."""
        ...

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> EpochPlan:
        """Plan ``epoch``, or the rest of it, for ``num_replicas`` ranks.

        Args:
            epoch: The epoch to plan.
            num_replicas: Number of ranks.
            progress: The progress of the run. One within this epoch: the rest is planned from there, on however many
                ranks it was made. One of another epoch: only orders that carry over look at it. None: plan the whole
                epoch.

        Raises:
            PositionError: The progress lies beyond the end of the epoch.
        """
        ...

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """Translate a progress that was saved under another configuration, whose differences have been accepted.

        Args:
            progress: The progress as it was saved.
            saved: The configuration that it was saved under.

        Returns:
            A progress of this order.

        Raises:
            StateMismatchError: The run cannot go on from there, whatever is accepted.
        """
        ...

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> BatchOrder:
        """A copy of this order for one of several loaders, or for evaluation.

        Args:
            path: The loader's place in the user's list or dict of loaders, with dots; each draws from (seed, path).
            exact: For evaluation: no sample is served twice unless there are fewer samples than ranks. Orders of whole
                batches cannot promise it and stay as they are.
            shuffle: False for the same batches in the same order in every epoch.
        """
        ...


AnOrder = TypeVar("AnOrder")


def seeded_at(order: AnOrder, path: str) -> AnOrder:
    """A copy of a dataclass with a seed derived from (seed, path); itself for an empty path, or if it has no seed."""
    seed = getattr(order, "seed", None)
    if not path or seed is None or not is_dataclass(order):
        return order
    return replace(order, seed=loader_seed(seed, path))  # type: ignore[type-var]  # an instance


def read_in_chunks(
    read: Callable[[int, int], tuple[Indices, Indices]], first: int, last: int, *, largest: int
) -> Iterator[list[int]]:
    """Iterate over one rank's batches of the steps ``first <= step < last``, computed in chunks that grow.

    Args:
        read: Called with the first step of a chunk and the step behind its last one. Returns the indices of their
            batches one after the other, int64 of shape ``(n,)``, and the size of each batch, of shape ``(steps,)``.
        first: The first step.
        last: The step behind the last one.
        largest: The most steps in a chunk.

    Yields:
        The indices of a batch, as a list.
    """
    size = _FIRST_CHUNK
    while first < last:
        stop = min(first + min(size, largest), last)
        indices, sizes = read(first, stop)
        # One by one: many lists made at once would set the garbage collector off.
        flat, start = indices.tolist(), 0
        for count in sizes.tolist():
            yield flat[start : start + count]
            start += count
        first, size = stop, 2 * size


def say_repeats(repeated: int, total: int, unit: str = "samples") -> str:
    """A sentence on how much is served twice; empty if nothing is."""
    return f"{repeated} of {total} {unit} are served twice in every epoch" if repeated else ""
