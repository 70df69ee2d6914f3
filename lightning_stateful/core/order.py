"""The protocol that all loaders and samplers are built on: orders of batches, and plans of the rest of an epoch.

A :class:`BatchOrder` says what an epoch holds, as a pure function of (configuration, epoch, number of ranks). From a
:class:`~lightning_stateful.core.progress.Progress` it makes an :class:`EpochPlan`: the steps from there to the end of
the epoch, with a batch for each rank. A run that is resumed, perhaps on other ranks, is planned from the progress that
its checkpoint holds; nothing is replayed.

Orders of samples are in :mod:`lightning_stateful.core.samples`, of several datasets in
:mod:`lightning_stateful.mixture`, of like lengths in :mod:`lightning_stateful.bucketing`, of any other sampler in
:mod:`lightning_stateful.samplers.wrapped_sampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from lightning_stateful.core.progress import Progress
from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import loader_seed

# Steps of an epoch whose end is known only when it is there. More than any epoch has, so that min() and max() hold.
UNKNOWN = 2**62

# The first batch should not wait for many; later ones are computed many at a time.
_FIRST_CHUNK, _LARGEST_CHUNK = 8, 8192


class EpochPlan(Protocol):
    """The rest of one epoch for one number of ranks, cut into steps; each step gives every rank one batch."""

    @property
    def epoch(self) -> int:
        """Which epoch."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch; :data:`UNKNOWN` until the end of a sampler without ``len`` has been seen."""
        ...

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of ``rank`` from ``first_step`` of this plan to its end.

        Yields:
            ``(number, indices)``. The number tells a batch from all others of its epoch, on all ranks: what is drawn
            while the batch is read is seeded from (seed, path of the loader, epoch, number). Only a batch that is
            served twice, to keep ranks in step, has its number twice. ``indices`` is what the dataset is asked for: a
            list of indices, or whatever a wrapped batch sampler yields.
        """
        ...

    def progress_after(self, steps: int) -> Progress:
        """The progress of a run that has taken the first ``steps`` steps of this plan, at most ``num_steps``."""
        ...

    def report_after(self, steps: int) -> dict[str, Any]:
        """What has been served of the epoch after ``steps`` steps of this plan, as plain data for people."""
        ...

    def repeats(self) -> str:
        """What is served twice because ranks take equal steps, in words; empty if nothing is."""
        ...


@runtime_checkable
class BatchOrder(Protocol):
    """What comes where: batches of an epoch, as a pure function of configuration, epoch and number of ranks.

    Implementations are frozen values.
    """

    @property
    def kind(self) -> str:
        """The name under which a state knows this order."""
        ...

    @property
    def version(self) -> int:
        """Raised whenever the same configuration gives another sequence."""
        ...

    @property
    def carries_over(self) -> bool:
        """Whether an epoch goes on where the one before has ended; such an order cannot start over within one."""
        ...

    def config(self) -> dict[str, Any]:
        """What determines the sequence, as plain data; compared when a state is loaded, never applied."""
        ...

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> EpochPlan:
        """Plan ``epoch``, or the rest of it, for ``num_replicas`` ranks.

        Args:
            epoch: Which epoch.
            num_replicas: Number of ranks.
            progress: Where the run stands: within this epoch, which is planned from there, whatever ranks it was on;
                or in another one, of which only orders that carry over take notice. None for the beginning.

        Raises:
            PositionError: The progress lies beyond the end of the epoch.
        """
        ...

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """A progress that was saved under another configuration, once the differences have been accepted.

        Args:
            progress: As it was saved.
            saved: The configuration that it was saved under.

        Raises:
            StateMismatchError: It cannot be continued, whatever is accepted.
        """
        ...

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> BatchOrder:
        """The same batches for another use.

        Args:
            path: The place of the loader among several that are served side by side; each draws from (seed, path).
            exact: For evaluation: no sample is served twice unless there are fewer samples than ranks. Orders of whole
                batches cannot promise it and stay as they are.
            shuffle: False for the same batches in the same order in every epoch.
        """
        ...


AnOrder = TypeVar("AnOrder")


def seeded_at(order: AnOrder, path: str) -> AnOrder:
    """The same dataclass with a seed drawn from (seed, path); itself for an empty path, or where it has no seed."""
    seed = getattr(order, "seed", None)
    if not path or seed is None or not is_dataclass(order):
        return order
    return replace(order, seed=loader_seed(seed, path))  # type: ignore[type-var]  # an instance


def read_in_chunks(
    read: Callable[[int, int], tuple[Indices, Indices]], first: int, last: int, *, largest: int = _LARGEST_CHUNK
) -> Iterator[list[int]]:
    """The batches of some steps as lists, computed in chunks that grow.

    Args:
        read: From a first step and the step behind the last one to the indices of their batches one after the other,
            int64 of shape ``(n,)``, and the size of each batch, of shape ``(steps,)``.
        first: The first step.
        last: The step behind the last.
        largest: Steps in a chunk, at most.
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
    """What is served twice, in words; empty if nothing is."""
    return f"{repeated} of {total} {unit} are served twice in every epoch" if repeated else ""
