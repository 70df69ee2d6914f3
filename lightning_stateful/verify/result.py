"""The result of trying a user's data: every stop that was tried, the first divergence and its cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_stateful.verify.comparison import Divergence

Outcome = Literal["equal", "exact", "once", "not compared", "refused", "differs", "failed"]

_IN_WORDS: dict[Outcome, str] = {
    "equal": "equal",
    "exact": "exact",
    "once": "every sample once",
    "not compared": "not compared",
    "refused": "refused",
    "differs": "DIFFERS",
    "failed": "FAILED",
}
_RIGHT = ("equal", "exact", "once", "not compared")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run that was compared with the run without a stop.

    Attributes:
        name: When it was stopped, or what it was resumed on.
        ranks: Ranks of the run that was stopped.
        workers: Workers of each loader of that run; None where they were left as they are.
        resumed_on: Ranks that it was resumed on.
        resumed_workers: Workers that it was resumed with.
        outcome: ``"equal"`` (two runs without a stop), ``"exact"``, ``"once"`` (each sample of the epoch, in other
            batches), ``"not compared"``, ``"refused"`` (by this package, by name), ``"differs"`` or ``"failed"``.
        said: A reason, or the error.
        num_batches: Batches that were compared.
    """

    name: str
    ranks: int
    workers: int | None
    resumed_on: int
    resumed_workers: int | None
    outcome: Outcome
    said: str = ""
    num_batches: int = 0


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The cause of a divergence.

    Attributes:
        name: ``"clock"``, ``"global generators"``, ``"generator"``, ``"sets"``, ``"files"``, ``"callback"``,
            ``"learns"``, ``"iter"``, ``"held batches"``, ``"state"``, or empty where none was found.
        said: The cause, and what to do.
        tried: What was tried in further runs to find it.
    """

    name: str
    said: str
    tried: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Verification:
    """The result of :func:`~lightning_stateful.testing.verify_datamodule`; true if all was right.

    Attributes:
        factory: The import path of the data.
        lengths: By number of ranks, the batches of a rank in the first epoch.
        is_cut: Whether epochs were cut, so that not all of their samples were read.
        trials: All that was tried, in turn.
        divergence: The first difference, or None.
        cause: Its cause, or that of a refusal; None where nothing was found.
        warned: Warnings of this package in the run that differs.
    """

    factory: str
    lengths: dict[int, int] = field(default_factory=dict)
    is_cut: bool = False
    trials: list[Trial] = field(default_factory=list)
    divergence: Divergence | None = None
    cause: Cause | None = None
    warned: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing diverged, failed or was refused."""
        return all(trial.outcome in _RIGHT for trial in self.trials)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def refused(self) -> list[Trial]:
        """Trials that this package refused by name."""
        return [trial for trial in self.trials if trial.outcome == "refused"]

    @property
    def faults(self) -> list[Trial]:
        """Trials on other data than without a stop, and those that failed."""
        return [trial for trial in self.trials if trial.outcome in ("differs", "failed")]

    def __str__(self) -> str:
        lines = [self._head(), *self._table(), *self._notes(), *self._faults()]
        return "\n".join([*lines, self._last()])

    def _head(self) -> str:
        lengths = [f"{batches} batches on {counted(ranks, 'rank')}" for ranks, batches in self.lengths.items()]
        cut = ", cut there" if self.is_cut else ""
        return f"{self.factory}: epochs of {', '.join(lengths) or 'no batches'}{cut}"

    def _table(self) -> list[str]:
        lines, before = [], ""
        width = max((len(trial.name) for trial in self.trials), default=0)
        for trial in self.trials:
            workers = "" if trial.workers is None else f", {counted(trial.workers, 'worker')}"
            head = f"trained on {counted(trial.ranks, 'rank')}{workers}"
            lines += [head] if head != before else []
            before = head
            lines.append(f"  {trial.name:<{width}}  {_IN_WORDS[trial.outcome]}")
        return lines

    def _notes(self) -> list[str]:
        """The reasons of refusals and failures, each once."""
        by_text: dict[str, list[Trial]] = {}
        for trial in self.trials:
            if trial.said:
                by_text.setdefault(trial.said, []).append(trial)
        return [
            f"{_IN_WORDS[trials[0].outcome].lower()} ({trials[0].name}): {said}" for said, trials in by_text.items()
        ]

    def _faults(self) -> list[str]:
        lines = []
        if self.divergence:
            lines.append(f"first difference: {self.divergence}")
        if self.cause and self.cause.said:
            lines.append(f"cause: {self.cause.said}")
            lines += [f"  tried: {tried}" for tried in self.cause.tried]
        return lines + [f"it was warned of: {text}" for text in self.warned[:3]]

    def _last(self) -> str:
        batches = sum(trial.num_batches for trial in self.trials)
        if self.ok:
            return f"right: {len(self.trials)} runs, {batches:,} batches compared"
        return "not right: " + ", ".join(
            f"{len(some)} {word}" for word, some in (("differ", self.faults), ("refused", self.refused)) if some
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"ok": self.ok, **asdict(self)}


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural where that is due."""
    return f"{number} {noun}{'s' * (number != 1)}"
