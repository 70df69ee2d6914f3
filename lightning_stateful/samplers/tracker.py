"""Tracks how far a loader or sampler has got in an order, and turns that into a state and back."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch.distributed

from lightning_stateful import state as format_
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import BatchOrder, EpochPlan, Progress
from lightning_stateful.core.samples import SampleEpochPlan
from lightning_stateful.core.skip import Skip, unit_of
from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    Difference,
    PositionError,
    StateError,
    StatefulWarning,
    StateMismatchError,
    some_of,
)
from lightning_stateful.samplers.skipping import Skipping, check_saved
from lightning_stateful.shapes import DAMAGED, check_shape

_log = logging.getLogger("lightning.pytorch.lightning_stateful")

T = TypeVar("T")

# Where a Trainer asks loaders for their states, if no callback of this package stands between.
_LIGHTNINGS = tuple(f"{package}.utilities.combined_loader" for package in ("lightning.pytorch", "pytorch_lightning"))


def detect_topology(num_replicas: int | None = None, rank: int | None = None) -> Topology:
    """Find the number of ranks and this rank: as given, or from the default process group, or one rank without it.

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
    """Holds the plan of the latest pass over an order, and the number of its steps that were handed over.

    A pass goes from its start to the end of an epoch; the next one begins with the next epoch, also where a pass was
    broken off after its first item. Loading a state or :meth:`set_epoch` say otherwise.

    Args:
        order: The order that is served.
        config: The configuration that a state holds and is compared with; by default the order's.
        num_replicas: Number of ranks; by default taken from the process group when a pass begins, or 1.
        rank: This rank; by default taken from the process group, or 0.
        accept: Names of differences between a state and this configuration to let pass on load.

    State:
        An envelope of the order's kind (see :mod:`lightning_stateful.state`) with the progress after the steps that
        were handed over.

    Raises:
        ConfigurationError: The topology is out of range.
    """

    num_replicas: int | None
    rank: int | None
    # The shapes of what a tracker adds to the details of its order.
    more_details: ClassVar[Mapping[str, Any]] = {}

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
        self.config: dict[str, Any] = _checked_config(order, config)
        self.num_replicas, self.rank = num_replicas, rank
        self.accept: tuple[str, ...] = format_.accepted_names(accept)
        # Tells what is no longer as in the configuration, by name with dots; None where nothing changes.
        self.changed: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
        # Those that states hold from now on, whatever changes; None for those of the moment.
        self.kept_changes: Mapping[str, Any] | None = None
        # Those in a state that was loaded.
        self.loaded_changes: dict[str, Any] = {}
        # What plans leave out; None for nothing.
        self.skipping: Skipping | None = None
        # Where the next pass begins.
        self._start = Progress()
        # The pass that began last: its plan (None before the first, and after a seek), the steps it has handed over,
        # and its number, by which an iterator knows whether a later one has begun.
        self._plan: EpochPlan | None = None
        self._num_handed = 0
        self._num_passes = 0
        self._has_warned = False
        # Whether set_epoch() named the epoch of the latest pass once more: the next one begins that epoch anew.
        self._again = False
        # Counted, so that a running pass notices that it was moved.
        self._num_seeks = 0
        # A pass that workers have fetched to its end, so that set_epoch() begins its epoch again; training may still
        # be in it, and counts its steps from where it began.
        self._prefetched_plan: EpochPlan | None = None
        # The latest answer of plan_epoch() for a progress, with its arguments.
        self._known_plan: tuple[Progress, int, int, EpochPlan] | None = None

    @property
    def topology(self) -> Topology:
        """The ranks, and which of them this is."""
        return detect_topology(self.num_replicas, self.rank)

    @property
    def progress(self) -> Progress:
        """The progress of a model that has been trained on everything that was handed over."""
        return self._progress_in(self.current_plan(), self._num_handed)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.progress.epoch

    @property
    def latest_epoch(self) -> int:
        """The epoch of the pass that began last, also at its end; until then, and after a choice, of the next one."""
        return self._start.epoch if self._plan is None else self._plan.epoch

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> EpochPlan:
        """Plan an epoch, or the rest of it, for the present number of ranks; the tracker stays where it is."""
        ranks = self.topology.num_replicas
        if progress is None:
            whole: EpochPlan = self.without_skipped(self.order.plan(epoch, ranks, None), epoch, None)
            return whole
        # To plan the rest of an epoch may take long, and a state that is loaded is planned when it is checked, too.
        known = self._known_plan
        if known is None or known[0] is not progress or known[1:3] != (epoch, ranks):
            plan = self.without_skipped(self.order.plan(epoch, ranks, progress), epoch, progress)
            known = self._known_plan = (progress, epoch, ranks, plan)
        return known[3]

    def plan_by(self, order: BatchOrder, config: Mapping[str, Any]) -> None:
        """Plan by another order of the same kind from now on."""
        self.order, self.config, self._known_plan = order, _checked_config(order, config), None

    def without_skipped(self, plan: Any, epoch: int, progress: Progress | None) -> Any:
        """A plan of the order without what is to be left out; that plan itself where this is nothing."""
        if self.skipping is None:
            return plan
        return self.skipping.applied(plan, epoch, progress, self.topology.num_replicas)

    def take_over_skip(self, before: Tracker) -> None:
        """Leave out what the tracker of a loader did that this one's loader takes the place of."""
        if before.skipping is not None:
            self.skipping = self.skipping or Skipping(Skip())
            self.skipping.take_over(before.skipping)

    def load_skip(self, state: Mapping[str, Any], progress: Progress, *, where: str) -> None:
        """Leave out from a progress on what is to be left out, and before it what a checked state says."""
        saved = state.get("skip")
        if saved is None and self.skipping is None:
            return
        if self.skipping is None:
            self.skipping = Skipping(Skip())
        ranks = self.topology.num_replicas
        plan, self._known_plan = self.order.plan(progress.epoch, ranks), None
        exact = isinstance(plan, SampleEpochPlan)
        self.skipping.load(saved, progress, topology=(ranks, unit_of(plan)), exact=exact, where=where)

    def current_plan(self) -> EpochPlan:
        """The plan of the latest pass or, before the first one and after a :meth:`seek`, of the next one."""
        return self._plan or self._plan_next_pass()

    def iterate(self, read: Callable[[EpochPlan, int], Iterable[T]], *, resumes: bool = False) -> Iterator[T]:
        """Iterate over a pass, which begins at the first ``next()``.

        The tracker counts the items of the pass that began last; an older iterator goes on uncounted, and that is
        warned of. A state that is loaded meanwhile moves the pass: its next item is the first one after that state.

        Args:
            read: Called with a plan and a first step; gives one item for each step from there on.
            resumes: Go on after the last item of the latest pass, instead of beginning where that pass began.
        """
        # A generator: nothing here runs before the first next(), so a state may be loaded after iter().
        self._num_passes = number = self._num_passes + 1
        plan = self._plan if resumes and self._plan is not None else self._begin_pass()
        while True:
            num_seeks = self._num_seeks
            for step, item in enumerate(read(plan, self._num_handed), self._num_handed + 1):
                if self._num_passes == number:
                    self._num_handed = step
                    # Before the last item is yielded: a state taken with it is that of the next epoch. Where the end
                    # was not known, it may be by now.
                    if step == plan.num_steps:
                        self._end_pass(plan)
                else:
                    self._warn_of_older(plan)
                yield item
                if self._num_seeks != num_seeks and self._num_passes == number:
                    break
            if self._num_passes != number:
                return
            if self._num_seeks == num_seeks:
                # An epoch without a step, or one whose end was not known beforehand, has not ended above.
                if self._start.epoch <= plan.epoch:
                    self._end_pass(plan)
                return
            plan = self._begin_pass()

    def _warn_of_older(self, plan: EpochPlan) -> None:
        # Of an iterable dataset a warning speaks that its order gives.
        if not (self._has_warned or getattr(self.order, "is_read_twice", False)):
            self._has_warned = True
            warnings.warn(
                f"A pass of epoch {plan.epoch} goes on, though a later pass of the same loader or sampler has begun. A "
                "state says where the later one stands, so a resume is not exact: it lacks what this one has left. "
                "Look at batches of another loader, and make one for each pass of a zip().",
                StatefulWarning,
                stacklevel=3,
            )

    def _begin_pass(self) -> EpochPlan:
        latest = self._plan
        if latest is not None and self._num_handed and self._start.epoch <= latest.epoch:
            # It was broken off.
            if self._again:
                self._start = self.plan_epoch(latest.epoch).progress_after(0)
            else:
                if self._num_handed == 1 < latest.num_steps and latest.progress_after(0).consumed:
                    warnings.warn(
                        f"The pass that went on within epoch {latest.epoch} was left behind its first batch, and what "
                        "was left of that epoch is not read: a break ends an epoch, as in torch. If that batch was "
                        "only looked at, as by next(iter(loader)), load the state after that, not before.",
                        StatefulWarning,
                        stacklevel=3,
                    )
                self._end_pass(latest)
        self._again = False
        plan = self._plan_next_pass()
        self._plan, self._num_handed = plan, 0
        return plan

    def _plan_next_pass(self) -> EpochPlan:
        plan = self.plan_epoch(self._start.epoch, self._start)
        if not plan.num_steps and (self._start.consumed or self._start.cycle):
            # Fewer ranks, or dropped tails, may have left nothing of the epoch that a state was taken in.
            return self.plan_epoch(plan.epoch + 1, plan.progress_after(0))
        return plan

    def _end_pass(self, plan: EpochPlan) -> None:
        """Let the next pass begin with the next epoch."""
        self._again = False
        self._start = self.plan_epoch(plan.epoch + 1, plan.progress_after(self._num_handed)).progress_after(0)
        if not self._num_handed:
            # An epoch without a step is over: the tracker is at the beginning of the next one.
            self._plan = None

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps of the latest pass; after its last, the beginning of the next epoch.

        If workers had fetched the latest pass to its end when :meth:`set_epoch` was told its epoch again, steps are
        still counted in that pass.

        Raises:
            ConfigurationError: The pass has fewer steps.
        """
        plan = self._plan or self._prefetched_plan or self._plan_next_pass()
        if not 0 <= steps <= plan.num_steps:
            raise ConfigurationError(
                f"The number of batches or samples that this rank was trained on must be from 0 to {plan.num_steps}, "
                f"the length of this pass, got {steps}."
            )
        return self._progress_in(plan, steps)

    def _progress_in(self, plan: EpochPlan, steps: int) -> Progress:
        after = plan.progress_after(steps)
        if steps and steps == plan.num_steps:
            return self.plan_epoch(plan.epoch + 1, after).progress_after(0)
        return after

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass begin with ``epoch``; with the rest of it, if a state within it was loaded since."""
        epoch, latest = as_int("epoch", epoch), self._plan
        if epoch == self._start.epoch:
            self._again = True
            if latest is not None and latest.epoch != epoch:
                # Of a pass that is over nothing counts any more.
                self._plan, self._num_handed = None, 0
        else:
            self.seek(self.plan_epoch(epoch, self._start).progress_after(0))
            self._prefetched_plan = latest if latest is not None and latest.epoch == epoch else None

    def seek(self, progress: Progress) -> None:
        """Move to ``progress``; the latest pass, if it is running, goes on from there."""
        self._start, self._plan, self._prefetched_plan, self._num_handed = progress, None, None, 0
        self._again = False
        self._num_seeks += 1

    def state_dict(self, progress: Progress | None = None) -> dict[str, Any]:
        """The state at ``progress``, by default :attr:`progress`: fresh plain data, equal on all ranks."""
        progress = self.progress if progress is None else progress
        # Before anything was trained on, nothing has changed.
        changed = {} if progress == Progress() else self._changes()
        skip = None if self.skipping is None else self.skipping.to_dict(progress)
        of_progress = progress.to_dict()
        return format_.pack(self.order.kind, self.order.version, self.config, of_progress, changed=changed, skip=skip)

    def keep_changes(self) -> None:
        """Let states hold the changes of this moment, until :attr:`kept_changes` is set to None."""
        self.kept_changes = self._changes()

    def _changes(self) -> Mapping[str, Any]:
        if self.kept_changes is not None:
            return self.kept_changes
        return {} if self.changed is None else self.changed(self.config)

    def state_after(self, steps: int | None) -> dict[str, Any]:
        """The state after ``steps`` steps of the latest pass; None for those that were handed over."""
        return self.state_dict(None if steps is None else self.progress_after(steps))

    def load_state_dict(self, state_dict: Mapping[str, Any], *, where: str) -> None:
        """Move to the progress in ``state_dict``, which may be from another number of ranks.

        Raises:
            StateError: The state is damaged, of a future version, or of another configuration; nothing changes then.
        """
        format_.check(state_dict, where=where)
        present = self.state_dict(Progress())
        format_.refuse_differences(state_dict, present, accept=self.accept, where=where)
        if self.accept:
            left = {one.path for one in format_.differences(state_dict, present, accept=self.accept)}
            passed = [one.path for one in format_.differences(state_dict, present) if one.path not in left]
            if passed:
                _log.info("%s differs from the present configuration, as was accepted: %s.", where, some_of(passed))
        progress = self.progress_in(state_dict, where=where)
        self.load_skip(state_dict, progress, where=where)
        self.loaded_changes = dict(state_dict.get("changed", {}))
        self.seek(progress)

    def progress_in(self, state: Mapping[str, Any], *, where: str) -> Progress:
        """Read the progress from a checked state whose differences from this configuration have been accepted.

        Raises:
            StateMismatchError: The state counts in another unit than this order, or the run cannot go on from there
                under this configuration.
            DamagedStateError: A part of the progress is missing or no integer.
            PositionError: The progress lies beyond the end of the epoch.

        Warns:
            StatefulWarning: Samples of the epoch may come in another order now, and some of them a second time.
        """
        other_kind = state["kind"] != self.order.kind
        if other_kind and state["progress"].keys() != self.plan_epoch(0).progress_after(0).to_dict().keys():
            # Not to be accepted: a number of batches is no number of samples.
            remedy = "Use the order or sampler that the checkpoint was made with."
            changed = Difference(path="kind", saved=state["kind"], present=self.order.kind, remedy=remedy)
            raise StateMismatchError([changed], where=where)
        try:
            progress = Progress.from_dict(state["progress"])
            # An order of the user's may say nothing of its details.
            if (shape := getattr(self.order, "details_shape", None)) is not None:
                check_shape(progress.details, {**shape, **self.more_details}, "progress")
            if "skip" in state:
                check_saved(state["skip"], progress)
            accepted = format_.differences(state, self.state_dict(Progress()), fingerprints=False)
            if accepted:
                progress = self.order.convert(progress, state["config"])
            self.plan_epoch(progress.epoch, progress)
            if progress.consumed:
                harmless = getattr(self.order, "harmless", ())
                format_.warn_of_other_order(accepted, harmless, where=f"{where}, within epoch {progress.epoch},")
        except DamagedStateError as error:
            raise DamagedStateError(f"{where}: {error}{DAMAGED}") from None
        except PositionError as error:
            raise PositionError(f"{where}: {error}") from None
        except StateMismatchError as error:
            raise StateMismatchError(error.differences, where=where) from error.__cause__
        return progress

    def position(self) -> tuple[EpochPlan, int]:
        """A plan, and how many steps of it were handed over: of a plan that is over, the one after it."""
        plan = self.current_plan()
        if self._num_handed and self._num_handed == plan.num_steps:
            return self.plan_epoch(plan.epoch + 1, plan.progress_after(self._num_handed)), 0
        return plan, self._num_handed

    def report(self) -> dict[str, Any]:
        """The epoch, and counts of what it has served; equal on all ranks."""
        plan, steps = self.position()
        return {"epoch": plan.epoch, **plan.report_after(steps)}


def _checked_config(order: Any, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The configuration, by default that of the order, which may be a user's, if a state can hold it."""
    name = type(order).__qualname__
    if not callable(getattr(order, "plan", None)):
        hint = " A SampleOrder is served by StatefulLoader(dataset, sampler=order)." if hasattr(order, "take") else ""
        raise ConfigurationError(f"A {name} is no BatchOrder: it has no plan(epoch, num_replicas, progress).{hint}")
    kind, version = getattr(order, "kind", None), getattr(order, "version", None)
    if type(kind) is not str or type(version) is not int:
        raise ConfigurationError(
            f"{name} has kind={kind!r} and version={version!r}, which a state names it by: set a string and an integer."
        )
    config = order.config() if config is None else config
    if taken := sorted({"kind", "order_version"} & config.keys()):
        raise ConfigurationError(
            f"{name}.config() has {taken}, which a state holds beside it, so that they would not be compared: give "
            "them other names."
        )
    try:
        format_.copy_plain(config, f"{name}.config()")
    except StateError as error:
        raise ConfigurationError(f"{error} Give plain numbers and strings, as int(...) or a digest.") from None
    return dict(config)


class Tracked:
    """Methods that all samplers and loaders over a :class:`Tracker` share.

    Attributes:
        tracker: The tracker.
        state_name: A name for the state, with which errors begin.
    """

    tracker: Tracker
    state_name: ClassVar[str] = "The sampler's state"

    @property
    def order(self) -> BatchOrder:
        """The order that is served; a loader has derived its seed for the loader's path."""
        return self.tracker.order

    @property
    def accept(self) -> tuple[str, ...]:
        """Names of differences between a state and this configuration that are let pass."""
        return self.tracker.accept

    @property
    def topology(self) -> Topology:
        """The ranks that batches are dealt out to, and this one."""
        return self.tracker.topology

    @property
    def epoch(self) -> int:
        """The epoch that the next batch or item belongs to; to set it is to call :meth:`set_epoch`."""
        return self.tracker.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass begin with ``epoch``; with the rest of it, if a state within it was loaded since."""
        self.tracker.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after what was handed over: fresh plain data, equal on all ranks."""
        if sys._getframe(1).f_globals.get("__name__") in _LIGHTNINGS:
            warnings.warn(
                f"A Trainer without StatefulDataCallback saves the state of this {type(self).__qualname__}, which "
                "counts batches that were fetched and not yet trained on: a resume may leave out batches, or the rest "
                "of an epoch that max_steps has cut. Add StatefulDataCallback() to the Trainer's callbacks.",
                StatefulWarning,
                stacklevel=2,
            )
        return self.tracker.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on any number of ranks; a pass that is running moves there.

        Raises:
            StateError: The state is damaged, from a future version, or of another configuration; nothing changes then.
                A wrapped sampler that yields another sequence now is refused later, at the first item.
        """
        self.tracker.load_state_dict(state_dict, where=self.state_name)

    def position_report(self) -> dict[str, Any]:
        """The epoch, and counts of what it has served, in mixtures of every source; equal on all ranks.

        Of a stream: steps, the pass over it, and shards not read to their end or left out.
        """
        return self.tracker.report()
