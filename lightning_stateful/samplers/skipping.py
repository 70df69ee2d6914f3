"""Keeps what a run leaves out: which batches are meant on these ranks, and what was trained on before.

A range of batches is given by numbers of this run's batches, and kept in states in the unit of ``Progress.consumed``:
after a resume on other ranks or with another batch size it is still the same samples, where the order counts samples.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.core.samples import SampleEpochPlan
from lightning_stateful.core.skip import BatchRange, Gaps, Skip, name_of_function, plan_without, unit_of
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.shapes import COUNT, refuse_unless

# Passes whose gaps are kept, by their epoch and cycle: finding them may need a look at every sample.
_KEPT = 4


class Placed(NamedTuple):
    """A range of batches of an epoch, and where it lies.

    It goes from batch ``first`` up to ``stop``, as they were given, and lies from ``begin`` to ``end`` in the unit of
    ``Progress.consumed``.
    """

    epoch: int
    first: int
    stop: int
    begin: int
    end: int

    @property
    def given(self) -> BatchRange:
        """The range as it was given."""
        return self.epoch, self.first, self.stop

    def is_within(self, others: Iterable[Placed], begun: Progress) -> bool:
        """Whether other ranges cover what comes of it behind a progress."""
        begin = max(self.begin, begun.consumed) if self.epoch == begun.epoch else self.begin
        gaps = Gaps.of((one.begin, one.end) for one in others if one.epoch == self.epoch)
        return gaps.before(self.end) - gaps.before(begin) == self.end - begin

    def __str__(self) -> str:
        one = self.stop - self.first == 1
        batches = f"batch {self.first}" if one else f"batches {self.first} to {self.stop - 1}"
        return f"{batches} of epoch {self.epoch}"


class Skipping:
    """Takes steps and samples out of plans, as ``skip=`` and the states that were loaded say."""

    def __init__(self, skip: Skip) -> None:
        self.skip = skip
        # Of the state that was loaded: its ranges, where the run went on (of ranges, how far in the first pass of the
        # epoch), and what had been left out of the pass then.
        self._saved: dict[BatchRange, Placed] = {}
        self._begun, self._passed = Progress(), 0
        self._skipped, self._same_samples, self._samples_before = 0, True, dict[str, Any]()
        # What a step of all ranks adds to ``Progress.consumed``, and the ranks; known once something was planned.
        self._unit = self._ranks = 0
        self._gaps: dict[tuple[int, int], Gaps] = {}

    def fresh(self) -> Skipping:
        """One that leaves out the same, of a run that begins."""
        return Skipping(self.skip)

    def take_over(self, other: Skipping) -> None:
        """Go on as another one, whose loader is replaced by another over the same data."""
        vars(self).update({name: value for name, value in vars(other).items() if name not in ("skip", "_gaps")})

    def applied(self, plan: Any, epoch: int, progress: Progress | None, num_replicas: int) -> Any:
        """A plan of an epoch, or of its rest from a progress in it, without what is left out."""
        here = progress if progress is not None and progress.epoch == epoch else Progress(epoch=epoch)
        unit = unit_of(plan)
        if (unit, num_replicas) != (self._unit, self._ranks):
            self._unit, self._ranks = unit, num_replicas
            self._gaps.clear()
        return plan_without(plan, self._gaps_of(plan, epoch, here.cycle), here.consumed)

    def skipped_before(self, progress: Progress) -> int:
        """The parts left out of an epoch that was planned before a progress in it, in the unit of ``consumed``."""
        gaps = self._gaps.get((progress.epoch, progress.cycle))
        return 0 if gaps is None or not progress.consumed else gaps.before(progress.consumed)

    def to_dict(self, progress: Progress) -> dict[str, Any]:
        """The contents of a state: plain data, equal on all ranks; empty before anything was planned."""
        if not self._unit:
            return {}
        found = {
            "ranks": self._ranks,
            "unit": self._unit,
            "skipped": self.skipped_before(progress),
            "ranges": [list(one) for one in self._placed()],
        }
        samples = _samples_of(self.skip)
        return {**found, "samples": samples} if samples else found

    def load(
        self, saved: Mapping[str, Any] | None, progress: Progress, *, topology: tuple[int, int], exact: bool, where: str
    ) -> None:
        """Go on from a state.

        Args:
            saved: What :meth:`to_dict` wrote; None of a run that left out nothing.
            progress: The progress in the state, on the present ranks.
            topology: The number of ranks, and what a step of them all adds to ``Progress.consumed``.
            exact: Whether samples are counted, so that ranges are the same on any ranks.
            where: A name for the state, with which warnings begin.

        Warns:
            StatefulWarning: That run was to leave out what this one does not, or counted it on other ranks.
        """
        saved = {"ranges": [], "skipped": 0, "ranks": topology[0], "unit": topology[1], **(saved or {})}
        self._saved = {placed.given: placed for placed in (Placed(*one) for one in saved["ranges"])}
        self._ranks, self._unit = topology
        # In a later pass within an epoch, all of the first one is over.
        self._begun, self._passed = progress, UNKNOWN if progress.cycle else progress.consumed
        self._skipped = saved["skipped"]
        self._samples_before = saved.get("samples", {})
        self._same_samples = self._samples_before == _samples_of(self.skip)
        self._gaps.clear()
        ahead = [one for one in self._saved.values() if self._is_ahead(one)]
        present = self._placed()
        dropped = [str(one) for one in ahead if not one.is_within(present, progress)]
        if "samples" in saved and not self.skip.names_samples:
            dropped.append(_in_words(saved["samples"]))
        if dropped:
            warnings.warn(
                f"{where} is of a run that was to leave out {', '.join(dropped)}, which this one has no skip= for and "
                "trains on. Pass the same skip= to go on leaving it out.",
                StatefulWarning,
                stacklevel=5,
            )
        kept = [str(one) for one in ahead if one.given in self.skip.ranges]
        if kept and not exact and (saved["ranks"], saved["unit"]) != topology:
            warnings.warn(
                f"{where} counts {', '.join(kept)}, which skip= leaves out, in steps of {saved['ranks']} ranks. On "
                f"{topology[0]} ranks, or with another batch size, steps of these data hold other samples, so others "
                "are left out.",
                StatefulWarning,
                stacklevel=5,
            )

    def described(self) -> dict[str, Any]:
        """All that is to be left out as plain data, the same on all ranks."""
        return {"ranges": [list(given) for given in self.skip.ranges], **_samples_of(self.skip)}

    def notes(self) -> list[str]:
        """Sentences on what is left out from here on, and on what was trained on before it was to be left out."""
        epoch, said, late = self._begun.epoch, [], []
        ahead = [str(one) for one in self._placed() if self._is_ahead(one)]
        if self.skip.names_samples:
            ahead.append(_in_words(_samples_of(self.skip)))
        if ahead:
            said.append(f"skip= leaves out {', '.join(ahead)}.")
        for given in self.skip.ranges:
            if given in self._saved or given[0] > epoch or not (epoch or self._passed):
                continue
            done = -(-self._passed // self._unit) if given[0] == epoch else UNKNOWN
            if done > given[1]:
                late.append(str(Placed(*given[:2], min(given[2], done), 0, 0)))
        if self._samples_before and not self._same_samples:
            said.append(f"Before the checkpoint it was {_in_words(self._samples_before)}.")
        if late:
            said.append(f"{', '.join(late).capitalize()} came before the checkpoint, which stays as it is.")
        return said

    @property
    def longest(self) -> int:
        """Batches of an epoch that are left out one after the other, at most."""
        by_epoch = Counter[int]()
        for epoch, first, stop in self.skip.ranges:
            by_epoch[epoch] += stop - first
        return max(sum(one.stop - one.first for one in self._saved.values()), *by_epoch.values(), 0)

    def _is_ahead(self, placed: Placed) -> bool:
        epoch = self._begun.epoch
        return placed.epoch > epoch or (placed.epoch == epoch and placed.end > self._passed)

    def _placed(self) -> list[Placed]:
        """All ranges, those that were left out before among them, in order."""
        at, found = self._begun.epoch, []
        for one in self._saved.values():
            if one.given not in self.skip.ranges:
                if one.epoch > at:
                    continue
                one = one._replace(end=min(one.end, self._passed)) if one.epoch == at else one
            found.append(one)
        for epoch, first, stop in self.skip.ranges:
            if (epoch, first, stop) in self._saved or epoch < at:
                continue
            begin = max(first * self._unit, self._passed if epoch == at else 0)
            found.append(Placed(epoch, first, stop, begin, min(stop * self._unit, COUNT.stop - 1)))
        return sorted(one for one in found if one.begin < one.end)

    def _gaps_of(self, plan: Any, epoch: int, cycle: int) -> Gaps:
        if (epoch, cycle) not in self._gaps:
            while len(self._gaps) >= _KEPT:
                del self._gaps[next(iter(self._gaps))]
            self._gaps[epoch, cycle] = self._found_gaps(plan, epoch, cycle)
        return self._gaps[epoch, cycle]

    def _found_gaps(self, plan: Any, epoch: int, cycle: int) -> Gaps:
        """The parts left out of a pass; those before the state that was loaded, as it was then."""
        ranges = Gaps.of((one.begin, one.end) for one in self._placed() if one.epoch == epoch and not cycle)
        samples = Gaps.of(())
        if self.skip.names_samples and isinstance(plan, SampleEpochPlan):
            samples = plan.order.gaps(self.skip, epoch, cycle)
        if (epoch, cycle) != (self._begun.epoch, self._begun.cycle) or not self._begun.consumed:
            return ranges | samples
        begun = self._begun.consumed
        before = (ranges | samples if self._same_samples else ranges).within(0, begun)
        if before.before(begun) != self._skipped:
            # Other samples were left out. How many is what counts: they are over.
            before = Gaps.of([(0, self._skipped)])
        return before | (ranges | samples).within(begun, UNKNOWN)


def check_saved(saved: Any, progress: Progress) -> None:
    """Refuse what a state says of what was left out, if that cannot be."""
    for number, one in enumerate(saved["ranges"]):
        _, first, stop, begin, end = one
        refuse_unless(
            first < stop and begin < end, one, "a range that ends behind its beginning", f"skip.ranges[{number}]"
        )
    refuse_unless(
        saved["skipped"] <= progress.consumed, saved["skipped"], f"at most {progress.consumed}", "skip.skipped"
    )


def _samples_of(skip: Skip) -> dict[str, Any]:
    """A description of the samples that are left out by their index, to be compared; empty for none."""
    found: dict[str, Any] = {}
    if skip.indices is not None:
        found |= {"count": int(skip.indices.size), "digest": hex_digest(skip.indices.astype("<i8").tobytes())}
    if skip.function is not None:
        found["function"] = name_of_function(skip.function)
    return found


def _in_words(samples: Mapping[str, Any]) -> str:
    """The description of samples in words."""
    said = [f"{samples['count']:,} sample{'s' * (samples['count'] != 1)} by index"] if "count" in samples else []
    said += [f"the samples that {samples['function']} names"] if "function" in samples else []
    return " and ".join(said)
