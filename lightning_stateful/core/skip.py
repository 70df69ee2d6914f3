"""Batches and samples that are left out of epochs: what ``skip=`` names, and plans without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.order import UNKNOWN, EpochPlan, Progress
from lightning_stateful.core.permutation import Indices
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError

# Takes indices of the dataset, int64 of shape ``(n,)``, and gives a boolean array: True for those to leave out.
ChoosesSamples = Callable[[Indices], NDArray[np.bool_]]
# An epoch, and the numbers of its first batch to leave out and of the one behind the last.
BatchRange = tuple[int, int, int]

_MOST = 2**40
_FORMS = (
    "skip takes ranges of batches by epoch, skip={2: range(300, 350)} or skip=[(2, range(300, 350))]; indices of "
    "samples, skip={17, 912}; a function of an array of indices; or a list of these"
)


@dataclass(frozen=True, eq=False)
class Skip:
    """The batches and samples that a run leaves out.

    Attributes:
        ranges: Ranges of batches, numbered in each epoch as if none were left out.
        indices: Indices of the dataset, ascending; None for none.
        function: Says which indices are left out; None for none.
    """

    ranges: tuple[BatchRange, ...] = ()
    indices: Indices | None = None
    function: ChoosesSamples | None = None

    @property
    def names_samples(self) -> bool:
        """Whether samples are left out by their index."""
        return self.indices is not None or self.function is not None

    def refuse_several(self, loaders: Collection[Any]) -> None:
        """Refuse indices where there are several loaders.

        Raises:
            ConfigurationError: It would not be known which dataset they are of.
        """
        if self.names_samples and len(loaders) > 1:
            raise ConfigurationError(
                f"skip names samples by their index, and there are {len(loaders)} loaders. Pass it to the one that is "
                "meant: StatefulLoader(..., skip=...), or patch_dataloader(loader, skip=...)."
            )

    def leaves_out(self, indices: Indices) -> NDArray[np.bool_]:
        """Say which of some indices, int64 ``(n,)``, are left out: a boolean array of the same shape.

        Raises:
            ConfigurationError: The function gives something else.
        """
        left_out = np.zeros(indices.shape, dtype=np.bool_)
        if self.indices is not None:
            left_out |= np.isin(indices, self.indices)
        if self.function is not None:
            given = np.asarray(self.function(indices))
            if given.dtype != np.bool_ or given.shape != indices.shape:
                raise ConfigurationError(
                    f"The function {name_of_function(self.function)} of skip= takes an array of indices, and gives a "
                    f"boolean array of its shape {indices.shape}; it gave {given.dtype} of shape {given.shape}. "
                    "Write it as skip=lambda indices: numpy.isin(indices, bad)."
                )
            left_out |= given
        return left_out


def as_skip(value: Any) -> Skip | None:
    """Read the argument ``skip=`` of loaders and data modules; None where it leaves nothing out.

    Raises:
        ConfigurationError: It has none of the forms that are documented.
    """
    if value is None or isinstance(value, Skip):
        return value
    ranges: set[BatchRange] = set()
    chosen: list[Indices] = []
    functions: list[ChoosesSamples] = []
    for part in _parts_of(value):
        if isinstance(part, tuple):
            ranges.add(_as_range(*part))
        elif callable(part):
            functions.append(part)
        else:
            chosen.append(_as_indices(part))
    if len(functions) > 1:
        raise ConfigurationError(f"skip has {len(functions)} functions of indices. Pass one that asks them all.")
    indices = np.unique(np.concatenate(chosen)) if chosen else None
    if indices is not None and not indices.size:
        indices = None
    if not ranges and indices is None and not functions:
        return None
    return Skip(tuple(sorted(ranges)), indices, functions[0] if functions else None)


def _parts_of(value: Any) -> Iterator[Any]:
    """The parts of the argument: tuples of an epoch and a range, functions, and collections of indices."""
    if isinstance(value, Mapping):
        for epoch, ranges in value.items():
            is_one = isinstance(ranges, range) or _is_bounds(ranges)
            yield from ((epoch, one) for one in ([ranges] if is_one else ranges))
    elif _is_epoch_and_range(value):
        yield tuple(value)
    elif isinstance(value, (list, tuple)) and not all(map(_is_integer, value)):
        for part in value:
            yield from _parts_of(part)
    elif callable(value) or isinstance(value, (Collection, np.ndarray)) or hasattr(value, "tolist"):
        yield value
    else:
        raise ConfigurationError(f"{_FORMS}. It is {value!r}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_bounds(value: Any) -> bool:
    """Whether a value is a first batch and the one behind the last, as a configuration file writes a range."""
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_integer, value))


def _is_epoch_and_range(value: Any) -> bool:
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2 and _is_integer(value[0])
    return is_pair and (isinstance(value[1], range) or _is_bounds(value[1]))


def _as_range(epoch: Any, batches: Any) -> BatchRange:
    """A range of batches as whole numbers, of which there is at least one."""
    if isinstance(batches, range) and batches.step != 1:
        raise ConfigurationError(f"skip leaves out batches that follow one another, got {batches!r}.")
    if not isinstance(batches, range) and not _is_bounds(batches):
        raise ConfigurationError(f"{_FORMS}. Of epoch {epoch!r} it has {batches!r}.")
    first, stop = (batches.start, batches.stop) if isinstance(batches, range) else batches
    found = as_int("the epoch of skip", epoch, least=0), as_int("a batch of skip", first, least=0), int(stop)
    if stop > _MOST or epoch > _MOST:
        raise ConfigurationError(f"skip has range({first}, {stop}) of epoch {epoch}; numbers go up to 2**40.")
    if stop <= first:
        raise ConfigurationError(f"skip has no batch in range({first}, {stop}) of epoch {epoch}.")
    return found


def _as_indices(values: Any) -> Indices:
    """Indices of samples, int64."""
    listed = np.asarray(values.tolist() if hasattr(values, "tolist") else list(values)).reshape(-1)
    if listed.size and (listed.dtype.kind not in "iu" or int(listed.min()) < 0):
        raise ConfigurationError(f"skip takes indices of the dataset, integers from 0, got {listed[:5].tolist()}.")
    return listed.astype(np.int64)


def name_of_function(function: Any) -> str:
    """The name by which a function is compared."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


@dataclass(frozen=True, eq=False)
class Gaps:
    """Parts of a sequence that are left out.

    Attributes:
        starts: The first position of each, ascending, int64 of shape ``(gaps,)``.
        stops: The position behind each; below the next start.
    """

    starts: Indices
    stops: Indices

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]] | NDArray[np.int64]) -> Gaps:
        """The union of ranges ``(start, stop)``, given in any order; ones without a position count for nothing."""
        pairs = np.array(list(ranges) if not isinstance(ranges, np.ndarray) else ranges, dtype=np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        reached = np.maximum.accumulate(pairs[:, 1]) if len(pairs) else pairs[:, 1]
        is_first = np.ones(len(pairs), dtype=np.bool_)
        is_first[1:] = pairs[1:, 0] > reached[:-1]
        lasts = np.append(np.flatnonzero(is_first)[1:] - 1, len(pairs) - 1) if len(pairs) else np.zeros(0, np.int64)
        return cls(pairs[is_first, 0], reached[lasts])

    def __bool__(self) -> bool:
        return bool(self.starts.size)

    def __or__(self, other: Gaps) -> Gaps:
        return Gaps.of(np.concatenate([self.pairs, other.pairs]))

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Starts and stops, int64 of shape ``(gaps, 2)``."""
        return np.stack([self.starts, self.stops], axis=1)

    def within(self, first: int, stop: int) -> Gaps:
        """The parts of the gaps in ``first <= position < stop``."""
        return Gaps.of(np.clip(self.pairs, first, stop))

    def before(self, position: int) -> int:
        """Positions left out before ``position``."""
        if not self:
            return 0
        return int((np.minimum(self.stops, position) - np.minimum(self.starts, position)).sum())

    def positions(self, kept: Indices) -> Indices:
        """The positions of kept ones, by their number among all kept ones: int64 of any shape -> the same."""
        return kept + self._sums[np.searchsorted(self._kept_before, kept, side="right")] if self else kept

    @cached_property
    def _sums(self) -> Indices:
        """Positions left out before each gap, and before the end."""
        return np.concatenate([[0], np.cumsum(self.stops - self.starts)]).astype(np.int64)

    @cached_property
    def _kept_before(self) -> Indices:
        """Positions kept before each gap."""
        return self.starts - self._sums[:-1]


NO_GAPS = Gaps.of(())


@dataclass(frozen=True)
class SkippingPlan:
    """A plan without some of its steps; what is left keeps its numbers, indices and random numbers.

    Attributes:
        plan: The plan with all steps.
        steps: Numbers of the steps that are left out.
        skipped: Steps that were left out of the epoch before the plan begins.
    """

    plan: EpochPlan
    steps: Gaps
    skipped: int = 0

    @property
    def epoch(self) -> int:
        """The epoch that is planned."""
        return self.plan.epoch

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch that are not left out; UNKNOWN as in the plan with all of them."""
        whole = self.plan.num_steps
        return UNKNOWN if whole >= UNKNOWN else whole - self.steps.before(whole)

    def step_of(self, kept: int) -> int:
        """The number of the ``kept``-th step that is not left out, among all steps."""
        return int(self.steps.positions(np.int64(kept)))

    def all_before(self, kept: int) -> int:
        """Steps of the plan with all steps that are over after so many that are not left out.

        Those at the end of the epoch are over with the step before them; others only when the next step is taken, so
        that a run that is resumed before them may still be told to train on them.
        """
        if kept and kept == self.num_steps:
            return self.plan.num_steps
        return self.step_of(kept - 1) + 1 if kept else 0

    def kept_of(self, batches: Iterable[Any], first_step: int, *, drains: bool = False) -> Iterator[Any]:
        """Leave batches out of an iterable over those of the plan with all steps.

        Args:
            batches: The batches from step ``all_before(first_step)`` on.
            first_step: The first step, of those that are not left out.
            drains: Read what is left out at the end of the epoch before the last batch is handed over.
        """
        remaining, at, kept = iter(batches), self.all_before(first_step), first_step
        for batch in remaining:
            is_left_out, at = bool(self.steps.before(at + 1) - self.steps.before(at)), at + 1
            if is_left_out:
                continue
            kept += 1
            if drains and kept == self.num_steps:
                for _ in remaining:
                    pass
            yield batch

    def batches(self, rank: int, first_step: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of ``rank`` that are not left out."""
        return self.kept_of(self.plan.batches(rank, self.all_before(first_step)), first_step)

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps; what is left out counts as consumed once it is passed over."""
        return self.plan.progress_after(self.all_before(steps))

    def report_after(self, steps: int) -> dict[str, Any]:
        """The report of the plan with all steps, and how many of these were left out of the epoch."""
        over = self.all_before(steps)
        return {**self.plan.report_after(over), "skipped": self.skipped + self.steps.before(over)}

    def repeats(self) -> str:
        """Say what the plan with all steps says."""
        return self.plan.repeats()

    def num_left_out(self, step: int) -> int:
        """Steps left out between the step before ``step`` and the end of that, at the last one to the epoch's end."""
        return self.steps.before(self.all_before(step + 1)) - self.steps.before(self.all_before(step))


def unit_of(plan: Any) -> int:
    """The number that a full step of all ranks adds to ``Progress.consumed``."""
    rule = getattr(plan, "rule", None)
    return rule.full if isinstance(rule, StepRule) else 1


def plan_without(plan: Any, gaps: Gaps, consumed: int) -> Any:
    """A plan without what lies in gaps, which are counted in the unit of ``Progress.consumed``; itself without gaps.

    Args:
        plan: The plan of an epoch, or of the rest of it.
        gaps: What to leave out of the epoch.
        consumed: Where the plan begins.
    """
    if hasattr(plan, "gaps"):
        return replace(plan, gaps=gaps) if gaps else plan
    # Steps that begin in a gap.
    steps = Gaps.of(-(-np.maximum(gaps.pairs - consumed, 0) // unit_of(plan)))
    skipped = gaps.before(consumed) // unit_of(plan)
    return SkippingPlan(plan, steps, skipped) if steps or skipped else plan


def left_out_at(plan: Any, step: int) -> Any:
    """Indices, or a number of steps, left out from the end of the step before to that of a step; None for nothing.

    Those at the end of an epoch belong to its last step.
    """
    if isinstance(plan, SkippingPlan):
        return plan.num_left_out(step) or None
    if not getattr(plan, "gaps", None):
        return None
    found = plan.left_out(step)
    return found if found.size else None


def is_whole_at(plan: Any, step: int) -> bool:
    """Whether the batches of a step are those of a plan from there on that leaves nothing out."""
    if not getattr(plan, "gaps", None):
        return True
    # The last two steps are cut by what is left of the epoch.
    return left_out_at(plan, step) is None and step + 2 < plan.num_steps


def without_gaps(plan: Any) -> Any:
    """A plan of a whole epoch with all that is left out of it."""
    if isinstance(plan, SkippingPlan):
        return plan.plan
    return replace(plan, gaps=NO_GAPS) if getattr(plan, "gaps", None) else plan


def whole_plan(plan: Any, step: int) -> tuple[Any, int]:
    """A plan with all of its steps, and the number of a step in it; others as they are."""
    if not isinstance(plan, SkippingPlan):
        return plan, step
    return plan.plan, plan.step_of(step) if step < plan.num_steps else plan.plan.num_steps
