"""Tracks where a loader or sampler stands in an order, and turns that into a state and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed

from lightning_stateful import state as format_
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import UNKNOWN, BatchOrder, EpochPlan
from lightning_stateful.core.progress import Progress
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    Difference,
    PositionError,
    StateMismatchError,
)

T = TypeVar("T")


def detect_topology(num_replicas: int | None = None, rank: int | None = None) -> Topology:
    """The topology given, or else that of the default process group; one replica where there is none.

    Raises:
        ConfigurationError: A value is out of range.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if running else 1
    if rank is None:
        rank = torch.distributed.get_rank() if running else 0
    return Topology(num_replicas=num_replicas, rank=rank)


class Tracker:
    """Holds the plan of the latest pass over an order, and how many of its steps were handed over.

    The end of a pass moves on to the next epoch. A pass that is abandoned leaves the beginning of the pass where it
    was, so that the next one begins there again.

    Args:
        order: What is served.
        config: What a state compares; by default that of the order.
        num_replicas: Number of ranks; by default that of the process group when a pass begins, or 1.
        rank: This rank; by default that of the process group, or 0.
        accept: Names of differences between a state and this configuration to let pass on load.

    State:
        An envelope of the order's kind (see :mod:`lightning_stateful.state`) with the progress after what was handed
        over.

    Raises:
        ConfigurationError: The topology is out of range.
    """

    def __init__(
        self,
        order: BatchOrder,
        config: Mapping[str, Any] | None = None,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        accept: Collection[str] = (),
    ) -> None:
        if num_replicas is not None or rank is not None:
            detect_topology(num_replicas, rank)
        self.order = order
        self.config: dict[str, Any] = dict(order.config() if config is None else config)
        self.num_replicas, self.rank = num_replicas, rank
        self.accept = format_.accepted_names(accept)
        # Where the next pass begins.
        self._held = Progress()
        # The pass that was iterated latest, what it has handed over, and which iterator that was.
        self._plan: EpochPlan | None = None
        self._handed = 0
        self._latest: object = None
        self._num_loads = 0
        self._planned: tuple[Progress, int, int, EpochPlan] | None = None
        # A pass that workers have fetched to its end, while training may still be in it.
        self._fetched: EpochPlan | None = None

    @property
    def topology(self) -> Topology:
        """The ranks, and which of them this is."""
        return detect_topology(self.num_replicas, self.rank)

    @property
    def handed(self) -> int:
        """Steps of the latest pass that were handed over."""
        return self._handed

    @property
    def progress(self) -> Progress:
        """Where the model stands that was trained on all that was handed over."""
        return self._progress_in(self.plan(), self._handed)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.progress.epoch

    def plan_of(self, epoch: int, progress: Progress | None = None) -> EpochPlan:
        """The plan of an epoch, or of the rest of it, for the present number of ranks."""
        ranks = self.topology.num_replicas
        if progress is None:
            return self.order.plan(epoch, ranks, None)
        # To plan the rest of an epoch may take long, and a state that is loaded is planned when it is checked, too.
        known = self._planned
        if known is None or known[0] is not progress or known[1:3] != (epoch, ranks):
            known = self._planned = (progress, epoch, ranks, self.order.plan(epoch, ranks, progress))
        return known[3]

    def plan(self) -> EpochPlan:
        """The plan of the latest pass or, where none has begun since the tracker was moved, of the next one."""
        return self._plan or self._next_plan()

    def iterate(self, read: Callable[[EpochPlan, int], Iterable[T]], *, resumes: bool = False) -> Iterator[T]:
        """Go through a pass, from wherever the tracker stands at the first ``next()``.

        A state that is loaded while the latest pass runs moves it: it goes on from there.

        Args:
            read: Gives one item for each step of a plan, from a first step on.
            resumes: Go on after what the latest pass has handed over, in place of beginning where that began.
        """
        # A generator: nothing here runs before the first next(), so a state may be loaded after iter().
        latest = self._latest = object()
        while True:
            if self._plan is None or not resumes:
                self._plan, self._handed = self._next_plan(), 0
            resumes, has_ended = False, False
            plan, loads = self._plan, self._num_loads
            end = plan.num_steps
            for done, item in enumerate(read(plan, self._handed), self._handed + 1):
                if end == UNKNOWN:
                    end = plan.num_steps
                if self._latest is latest:
                    self._handed = done
                    if done == end:
                        has_ended = True
                        self._end(plan, done)
                yield item
                if self._num_loads != loads and self._latest is latest:
                    break
            else:
                # An epoch without a step, or one whose end was not known beforehand.
                if self._latest is latest and not has_ended:
                    self._end(plan, self._handed)
                    # Nobody stands in an epoch that has no step.
                    self._plan = plan if self._handed else None
                return

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps of the latest pass; after its last, the beginning of the next epoch.

        Where :meth:`set_epoch` was told the epoch of a pass that workers had fetched to its end, that is this pass.

        Raises:
            ConfigurationError: The pass has fewer steps.
        """
        plan = self._plan or self._fetched or self._next_plan()
        if not 0 <= steps <= plan.num_steps:
            raise ConfigurationError(
                f"The number of batches or samples that this rank was trained on must be from 0 to {plan.num_steps}, "
                f"the length of this pass, got {steps}."
            )
        return self._progress_in(plan, steps)

    def _progress_in(self, plan: EpochPlan, steps: int) -> Progress:
        after = plan.progress_after(steps)
        if steps and steps == plan.num_steps:
            return self.plan_of(plan.epoch + 1, after).progress_after(0)
        return after

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; progress within that same epoch is kept."""
        epoch = as_int("epoch", epoch)
        if epoch != self._held.epoch:
            latest = self._plan
            self.seek(self.plan_of(epoch, self._held).progress_after(0))
            self._fetched = latest if latest is not None and latest.epoch == epoch else None

    def seek(self, progress: Progress) -> None:
        """Stand at ``progress``; the latest pass, if it is running, goes on from there."""
        self._held, self._plan, self._fetched, self._handed = progress, None, None, 0
        self._num_loads += 1

    def state_dict(self, progress: Progress | None = None) -> dict[str, Any]:
        """The state at ``progress``, by default after what was handed over: fresh plain data, equal on all ranks."""
        held = self.progress if progress is None else progress
        return format_.pack(self.order.kind, self.order.version, self.config, held.to_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, where: str) -> None:
        """Stand where ``state_dict`` was taken, on any number of ranks.

        Raises:
            StateError: The state is damaged, of a future version, or of another configuration; nothing changes then.
        """
        format_.check(state_dict, where=where)
        format_.refuse_differences(state_dict, self.state_dict(Progress()), accept=self.accept, where=where)
        self.seek(self.progress_in(state_dict, where=where))

    def progress_in(self, state: Mapping[str, Any], *, where: str) -> Progress:
        """The progress in a checked state of which every difference has been accepted.

        Raises:
            StateMismatchError: The state counts other things than this order.
            DamagedStateError, PositionError: The progress is of no use.
        """
        other_kind = state["kind"] != self.order.kind
        if other_kind and state["progress"].keys() != self.plan_of(0).progress_after(0).to_dict().keys():
            # Not to be accepted: a number of batches is no number of samples.
            remedy = "Use the order or sampler that the checkpoint was made with."
            changed = Difference(path="kind", saved=state["kind"], present=self.order.kind, remedy=remedy)
            raise StateMismatchError([changed], where=where)
        try:
            progress = Progress.from_dict(state["progress"])
            if format_.differences(state, self.state_dict(Progress()), fingerprints=False):
                progress = self.order.convert(progress, state["config"])
            self.plan_of(progress.epoch, progress)
        except DamagedStateError as error:
            raise DamagedStateError(f"{where}: {error} Resume from another checkpoint.") from None
        except PositionError as error:
            raise PositionError(f"{where}: {error}") from None
        return progress

    def report(self) -> dict[str, Any]:
        """Epoch, and what has been served; equal on all ranks."""
        plan = self.plan()
        if self._handed and self._handed == plan.num_steps:
            plan = self.plan_of(plan.epoch + 1, plan.progress_after(self._handed))
            return {"epoch": plan.epoch, **plan.report_after(0)}
        return {"epoch": plan.epoch, **plan.report_after(self._handed)}

    def _next_plan(self) -> EpochPlan:
        plan = self.plan_of(self._held.epoch, self._held)
        if not plan.num_steps and (self._held.consumed or self._held.cycle):
            # Fewer ranks, or dropped tails, may have left nothing of the epoch that a state was taken in.
            return self.plan_of(plan.epoch + 1, plan.progress_after(0))
        return plan

    def _end(self, plan: EpochPlan, steps: int) -> None:
        """The next pass begins with the next epoch."""
        self._held = self.plan_of(plan.epoch + 1, plan.progress_after(steps)).progress_after(0)


class TrackedSampler:
    """The methods that all samplers over a tracker share."""

    tracker: Tracker

    @property
    def epoch(self) -> int:
        """The epoch that the next item belongs to; to set it is to call :meth:`set_epoch`."""
        return self.tracker.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.tracker.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; progress within that same epoch is kept."""
        self.tracker.set_epoch(epoch)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on any number of ranks.

        Raises:
            StateError: The state is damaged, from a future version, or of another configuration. That a user's sampler
                yields another sequence now is found, and refused, at the first item.
        """
        self.tracker.load_state_dict(state_dict, where="The sampler's state")

    def position_report(self) -> dict[str, Any]:
        """Epoch, and what has been served of it or, in mixtures, of every source; equal on all ranks."""
        return self.tracker.report()

    def _state_dict(self, steps: int | None) -> dict[str, Any]:
        """The state after what was yielded, or after so many steps of the present pass."""
        return self.tracker.state_dict(None if steps is None else self.tracker.progress_after(steps))
