"""What an audit found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_stateful.audit.compare import shorten


class _End:
    """The end of a pass, where an item might have been; ``None`` may be an item."""

    def __repr__(self) -> str:
        return "<end of the epoch>"


END = _End()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first thing that was not as in the uninterrupted run.

    Attributes:
        law: What was broken, a law of the contract or: ``"repeatable"`` (a second run of the same factory differs),
            ``"even"`` (ranks have different numbers of items), ``"snapshot"`` (a state changed after it was taken),
            ``"suffix"`` (a resumed run differs) or ``"rank-free"`` (on another number of ranks a sample came twice or
            never).
        what: The difference in words.
        epoch: Of the item, counted from the beginning of the run.
        step: Of the item within its epoch, or None where no item is to blame.
        rank: Whose item, or None.
        stop: Items that every rank had been given when the run was last stopped, or None for a run without a stop.
        expected: The item of the uninterrupted run, or the number that should have been found.
        got: What came in its place.
    """

    law: str
    what: str
    epoch: int
    step: int | None
    rank: int | None
    stop: int | None
    expected: Any
    got: Any

    def __str__(self) -> str:
        where = [f"epoch {self.epoch}"]
        where += [f"step {self.step}"] if self.step is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        stopped = "" if self.stop is None else f", stopped after {self.stop} items"
        return (
            f"{self.law}: {', '.join(where)}{stopped}: {self.what}\n"
            f"  expected {shorten(self.expected)}\n"
            f"  got      {shorten(self.got)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The outcome of :func:`check_resume`; true if everything agreed.

    Attributes:
        divergence: The first difference, or None.
        num_comparisons: Items that were compared with those of the uninterrupted run.
        num_resumes: Fresh objects that a state was loaded into.
        state_bytes: Size of the largest state, as JSON where it is plain data and pickled where it is not.
    """

    divergence: Divergence | None
    num_comparisons: int
    num_resumes: int
    state_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there was no difference."""
        return self.divergence is None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        tally = (
            f"{self.num_resumes} resumes, {self.num_comparisons} items compared, states up to {self.state_bytes} bytes"
        )
        return f"Resumes exactly: {tally}." if self.ok else f"Does not resume exactly ({tally}).\n{self.divergence}"
