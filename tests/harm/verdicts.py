"""Tries entries on ranks and judges them, for the tests and for the table in docs/others.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harm import laws
from harm.launch import Trials, checkpoint_of, try_on_ranks
from harm.runs import train, try_entry
from harm.table import ENTRIES, Entry

# How a run went, and why.
Outcome = tuple[str, str]


@dataclass(frozen=True)
class Verdict:
    """The outcomes of an entry's runs on some ranks.

    Attributes:
        run: The uninterrupted run.
        same: A resume on as many ranks; empty where there was none.
        other: A resume on one rank of a run on two; empty likewise.
    """

    run: Outcome
    same: Outcome = ("", "")
    other: Outcome = ("", "")

    def faults(self, entry: Entry) -> Iterator[str]:
        """Outcomes against the rule, and those that are less than the table states."""
        for way, what in (("run", "uninterrupted run"), ("same", "resume"), ("other", "resume on one rank of two")):
            outcome, why = getattr(self, way)
            if outcome and laws.is_harm(outcome):
                yield f"HARM, {what}: {outcome}: {why}"
            elif outcome == "refused" and not laws.is_by_name(why):
                yield f"LESS, {what}: refused by an error that is not of the package: {why}"
            elif outcome and laws.falls_short(entry, outcome, way):
                yield f"LESS, {what}: {outcome}, where {entry.expected(way)} is stated: {why}"


def assert_lawful(name: str, verdict: Verdict) -> None:
    """Fail with all faults of an entry."""
    if faults := list(verdict.faults(ENTRIES[name])):
        pytest.fail("\n".join(faults), pytrace=False)


def judge_alone(name: str, folder: Path, workers: int = 0) -> Verdict:
    """Try an entry in this process."""
    entry = ENTRIES[name]
    trial = try_entry(entry, folder / "alone.ckpt", workers)
    return _judge(name, [trial], folder, workers)


def judge_on_ranks(num_ranks: int, names: list[str], folder: Path, workers: int = 0) -> dict[str, Verdict]:
    """Try entries on ranks, and what two of them leave in this process."""
    trials: Trials = try_on_ranks(num_ranks, names, folder, workers)
    return {name: _judge(name, trials[name], folder, workers) for name in names}


def _judge(name: str, trials: list[laws.Trial] | str, folder: Path, workers: int) -> Verdict:
    entry = ENTRIES[name]
    if isinstance(trials, str):
        return Verdict(("hung", trials))
    needs_plain = len(trials) > 1 and entry.deals == "nobody"
    alone = [train(entry, own=False, workers=workers)] if needs_plain else None
    run = laws.uninterrupted(entry, trials, alone)
    whole = [trial.own for trial in trials]
    if any(found.error or not found.saved for found in whole):
        return Verdict(run)
    same = laws.resumed(whole, [trial.resumed for trial in trials])
    if len(trials) != 2:
        return Verdict(run, same)
    after = train(entry, workers=workers, ckpt_path=checkpoint_of(folder, name))
    return Verdict(run, same, laws.elsewhere(entry, whole, [after]))
