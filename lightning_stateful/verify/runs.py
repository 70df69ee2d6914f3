"""Runs of one user's data: on some ranks, under some conditions, from the beginning or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.verify.conditions import Conditions
from lightning_stateful.verify.launcher import Launcher
from lightning_stateful.verify.records import Job, Record, Run

# By the package of Lightning; their servers take seconds to start, and serve one call after the other.
_LAUNCHERS: dict[str, Launcher] = {}


class Runs:
    """Starts runs of one user's data.

    Args:
        job: What all processes of all runs are told.
        timeout: Seconds without a new batch after which a run counts as hung.
        ended: Is called as each run has ended.
    """

    def __init__(self, job: Job, timeout: float, ended: Callable[[], None]) -> None:
        self.job, self._timeout, self._ended = job, timeout, ended
        self._num_files = 0

    def checkpoint(self) -> Path:
        """A new file for a checkpoint."""
        self._num_files += 1
        return self._launcher().path(f"{self._num_files}.ckpt")

    def clear(self) -> None:
        """Remove all files of these runs; the servers stay."""
        for path in self._launcher().folder.glob("*"):
            if path.name != "server.log":
                path.unlink()

    def __call__(self, *runs: Run) -> list[list[Record]]:
        """Do runs, some of them at the same time.

        Returns:
            The records of the ranks of each.

        Raises:
            ConfigurationError: The data cannot be made, or nothing can be started.
        """
        most = max(run.ranks * (1 + (run.workers or 0)) for run in runs)
        at_once = max(1, (os.cpu_count() or 1) // most)
        for _ in range(2):
            jobs = [[self._job(run, rank) for rank in range(run.ranks)] for run in runs]
            found = self._launcher().run(jobs, at_once, self._ended)
            other = next((record.other_package for records in found for record in records if record.other_package), "")
            if not other:
                return found
            # Their data are of the package that the servers have not imported first.
            self.job = replace(self.job, package=other)
        raise ConfigurationError(f"{self.job.factory} makes data of both lightning.pytorch and pytorch_lightning.")

    def _launcher(self) -> Launcher:
        package = self.job.package
        if package not in _LAUNCHERS or not _LAUNCHERS[package].is_open:
            _LAUNCHERS[package] = Launcher(package)
        _LAUNCHERS[package].timeout = self._timeout
        return _LAUNCHERS[package]

    def _job(self, run: Run, rank: int) -> Job:
        turn = (rank + run.resumed) % 2
        conditions = run.alike or Conditions(hash_seed=turn, reversed_files=bool(turn))
        conditions = replace(conditions, seed=self.job.conditions.seed if conditions.seed is None else conditions.seed)
        return replace(self.job, run=run, rank=rank, conditions=conditions)


def failure_of(records: Sequence[Record]) -> tuple[Literal["refused", "failed", ""], str]:
    """Whether a run was refused or has failed, and why; empty words if it has come to its end.

    A rank that waits for one that has failed may hang, so a reason is looked for on all.
    """
    kinds: tuple[Literal["refused", "failed"], ...] = ("refused", "failed")
    for kind in kinds:
        said = [getattr(record, kind) for record in records if getattr(record, kind)]
        # A rank that was left alone says less than the one that has left.
        said.sort(key=lambda text: text.startswith(("hung", "died")))
        if said:
            return kind, said[0]
    return "", ""
