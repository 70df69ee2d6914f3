"""The life of a run: starts that go wrong, one after the other, as a job script makes them, until the run is over."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.torture.audit import Found, Trail, audit, compare_order, compare_weights
from benchmarks.torture.faults import CUT_OFF, NAMED, Fault, damage, drawn, faults_of, mend, prepare, strike
from benchmarks.torture.kinds import KINDS, How, write_shards
from benchmarks.torture.rank import Start, begin, begin_ranks
from lightning_stateful.cli import main

NUM_EPOCHS, MOST_FAULTS = 4, 8
# Seconds after which a start, and a rank whose peers have died, count as hung.
LIMIT, GRACE = 120.0, 45.0


@dataclass
class Outcome:
    """What became of one fault.

    Attributes:
        kind: The kind of data.
        fault: The name of the fault; empty for a start that none was drawn for.
        found: What the audit found after it.
        hung: Ranks that hung.
        named: Whether the run was refused, or ended, with the name of what was wrong.
        start: The number of the start.
        batches: Batches of all ranks that it trained on.
    """

    kind: str
    fault: str
    found: Found = field(default_factory=Found)
    hung: int = 0
    named: bool = False
    start: int = 0
    batches: int = 0

    def __str__(self) -> str:
        found = self.found
        counts = f"{self.batches} batches; {found.replayed} replayed, {found.lost} lost, {self.hung} hung"
        problems = "".join(f"\n    PROBLEM {problem}" for problem in found.problems)
        return f"start {self.start:2}, {self.kind}: {self.fault or 'none'}; {counts}{problems}"


class Life:
    """A run that faults are inflicted upon.

    Args:
        kind: The kind of data.
        folder: An empty folder.
        seed: Chooses faults, moments, ranks, workers and batch sizes.
        most_faults: The most faults of the run.
    """

    def __init__(self, kind: str, folder: Path, seed: str, most_faults: int = MOST_FAULTS) -> None:
        self.most_faults = most_faults
        self.name, self.kind, self.folder, self.draws = kind, KINDS[kind], folder, random.Random(seed)
        self.trail = Trail()
        # Runs on the same ranks, workers and batch size throughout are compared with one that nothing happens to.
        self.is_steady = not self.kind.changes or self.draws.random() < 0.4
        self.how = self._drawn_how(How(), ("ranks", "workers", "batch_size"))
        for name in ("lines", "logs", "checkpoints"):
            (folder / name).mkdir(parents=True)
        write_shards(folder / "shards")

    def live(self) -> Iterator[Outcome]:
        """Run to the end, through faults.

        Yields:
            What became of each fault, and of the last start.
        """
        names = faults_of(self.name)
        self.draws.shuffle(names)
        for name in names[: self.most_faults]:
            outcome = self._start(name)
            if outcome is not None:
                yield outcome
            if self._is_over():
                return
        while not self._is_over() and len(self.trail.starts) < 3 * MOST_FAULTS:
            yield self._start("") or Outcome(self.name, "")
        if not self._is_over():
            yield Outcome(self.name, "", Found(problems=["the run came to no end"]))

    def _start(self, name: str) -> Outcome | None:
        """One start; None where the run is too far for another fault, or the fault did not come."""
        how = self._next_how(name)
        if name == "SIGKILL of a worker" and not how.workers:
            return None
        outcome = Outcome(self.name, name, start=len(self.trail.starts))
        path = self._newest(how, outcome)
        is_late = path is not None and self._epoch_of(path) >= NUM_EPOCHS - 1
        if is_late and name:
            return None
        if not name and not self.is_steady and "ranks" in self.kind.changes:
            how = replace(how, ranks=1)
        fault = drawn(name, self.name, self.folder, how, self.draws)
        start = Start(
            len(self.trail.starts), self.name, self.folder, how, NUM_EPOCHS, self.draws.randint(1, 6),
            fault.of_all and self.draws.random() < 0.5, path, fault.inside,
        )  # fmt: skip
        self.trail.starts.append(start)
        ended = self._run(start, fault, outcome)
        self._audit(start, fault, outcome, ended)
        came = bool(name) and not (ended and self._is_over())
        return outcome if came or not name or outcome.found.problems else replace(outcome, fault="")

    def _run(self, start: Start, fault: Fault, outcome: Outcome) -> bool:
        """Run a start; whether all its ranks ended without an error."""
        before = set(_starts_in(self.folder))
        prepare(fault, start)
        ranks = begin_ranks(start)
        began, struck, died = time.monotonic(), not fault.after, None
        while any(rank.is_alive() for rank in ranks):
            now = time.monotonic()
            if not struck and _num_lines(start) >= fault.after:
                time.sleep(fault.delay)
                with contextlib.suppress(ProcessLookupError):
                    strike(fault, [rank.pid or 0 for rank in ranks if rank.is_alive()])
                struck = True
            if died is None and any(rank.exitcode for rank in ranks):
                died = now
            if now - began > LIMIT or (died is not None and now - died > GRACE):
                outcome.hung = sum(rank.is_alive() for rank in ranks)
                for rank in ranks:
                    if rank.is_alive():
                        os.kill(rank.pid or 0, signal.SIGABRT)
                        rank.join(5)
                outcome.found.problems.append(f"{self.folder}: start {start.number} hung")
                break
            time.sleep(0.005)
        for rank in ranks:
            # Workers that have outlived their rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid or 0, signal.SIGKILL)
            rank.join()
        mend(fault, self.folder)
        if written := set(_starts_in(self.folder)) - before:
            self.trail.names[start.number] = written.pop()
        self._explain(start, fault, [rank.exitcode or 0 for rank in ranks], outcome)
        return not any(rank.exitcode for rank in ranks)

    def _explain(self, start: Start, fault: Fault, codes: list[int], outcome: Outcome) -> None:
        """Look whether a start ended as its fault makes it end."""
        logs = [start.log(rank).read_text() for rank in range(start.how.ranks)]
        expected = (fault.missing.name,) if fault.missing else NAMED.get(fault.name, ())
        outcome.named |= any(all(text in log for text in expected) for log in logs) and bool(expected)
        if not any(codes) or outcome.hung:
            return
        by_signal = fault.name in ("SIGKILL of a rank", "SIGKILL of all ranks", "truncated checkpoint", "flipped bit")
        is_explained = -signal.SIGKILL in codes if by_signal else fault.name == "SIGTERM" or outcome.named
        if fault.name == "SIGKILL of a worker":
            is_explained = is_explained or any(text in log for text in CUT_OFF for log in logs)
        if not is_explained:
            said = "\n".join(f"rank {rank}: {log[-1500:]}" for rank, log in enumerate(logs))
            outcome.found.problems.append(
                f"start {start.number} ended with {codes} by {fault.name or 'nothing'}:\n{said}"
            )

    def _audit(self, start: Start, fault: Fault, outcome: Outcome, ended: bool) -> None:
        is_over = ended and self._is_over()
        found = audit(self.trail, is_over=is_over)
        outcome.found.replayed, outcome.found.lost = found.replayed, found.lost
        outcome.found.problems += found.problems
        outcome.batches = sum(_num_lines(start, rank) for rank in range(start.how.ranks))
        if is_over:
            outcome.found.problems += compare_weights(self.trail, start.checkpoints / "end.ckpt", start.number)[1]
            if self.is_steady:
                outcome.found.problems += compare_order(self.trail, self._uninterrupted())
        elif fault.name in ("truncated checkpoint", "flipped bit") and (paths := self._checkpoints()):
            damage(fault, paths[0])
            outcome.named = self._check(paths[0], self.how)[0] != 0

    def _uninterrupted(self) -> Start:
        """A run that nothing happens to."""
        whole = Start(0, self.name, self.folder / "whole", self.how, NUM_EPOCHS, 1000)
        for name in ("lines", "logs", "checkpoints"):
            (whole.folder / name).mkdir(parents=True)
        write_shards(whole.folder / "shards")
        for rank in begin_ranks(whole):
            rank.join(LIMIT)
        return whole

    def _is_over(self) -> bool:
        return bool(self.trail.starts) and (self.trail.starts[-1].checkpoints / "end.ckpt").exists()

    def _checkpoints(self) -> list[Path]:
        """All checkpoints, the newest first."""
        paths = (self.folder / "checkpoints").glob("*/*.ckpt")
        return sorted(paths, key=lambda path: (path.parent.name, path.stat().st_mtime_ns), reverse=True)

    def _newest(self, how: How, outcome: Outcome) -> Path | None:
        """The newest checkpoint that ``lightning-stateful check`` lets pass, as a job script takes it."""
        for path in self._checkpoints():
            code, said = self._check(path, how)
            if bool(code) is is_whole(path):
                outcome.found.problems.append(
                    f"{path} is {'' if is_whole(path) else 'not '}whole, and check exits with {code} and says: {said}"
                )
            if not code:
                writer = int(path.parent.name)
                step, problems = compare_weights(self.trail, path, writer)
                outcome.found.problems += problems
                self.trail.origins[len(self.trail.starts)] = (writer, step)
                return path
        return None

    def _check(self, path: Path, how: How) -> tuple[int, str]:
        """What ``lightning-stateful check`` says of a checkpoint: its exit code, and its words."""
        log, data = path.with_suffix(".txt"), {"kind": self.name, "how": asdict(how)}
        log.unlink(missing_ok=True)
        given = {"TORTURE_DATA": json.dumps(data), "TORTURE_FOLDER": str(self.folder)}
        checking = begin(_check, path, how.ranks, log=log, **given)
        checking.join(LIMIT)
        return checking.exitcode or 0, log.read_text()

    def _epoch_of(self, path: Path) -> int:
        number, until = self.trail.origins[len(self.trail.starts)]
        lines = [line for _, ranks in self.trail.kept(number, until) for of in ranks for line in of]
        return max((line.epoch for line in lines), default=0)

    def _next_how(self, name: str) -> How:
        if self.is_steady:
            return self.how
        self.how = self._drawn_how(self.how, self.kind.changes)
        if name == "SIGKILL of a worker" and "workers" in self.kind.changes:
            self.how = replace(self.how, workers=2)
        return self.how

    def _drawn_how(self, how: How, changes: Sequence[str]) -> How:
        drawn = {"ranks": self.draws.choice(self.kind.ranks), "workers": self.draws.choice((0, 2))}
        drawn["batch_size"] = self.draws.choice((2, 3)) if "batch_size" in self.kind.changes else 2
        return replace(how, **{name: drawn[name] for name in changes})


def torture(
    num_faults: int,
    seed: int,
    folder: Path,
    *,
    kinds: Sequence[str],
    jobs: int = 1,
    most_faults: int = MOST_FAULTS,
) -> list[Outcome]:
    """Inflict at least so many faults on runs of some kinds of data, one kind after the other.

    Args:
        num_faults: A number of faults after which no more runs are begun.
        seed: Chooses all that is drawn.
        folder: Where the files of all runs stay.
        kinds: Names of kinds of data.
        jobs: Runs side by side.
        most_faults: The most faults of one run.

    Returns:
        What became of each fault, and of the last start of each run.
    """
    outcomes: list[Outcome] = []
    began = time.monotonic()

    def live(number: int) -> None:
        if sum(bool(outcome.fault) for outcome in outcomes) >= num_faults:
            return
        kind = kinds[number % len(kinds)]
        for outcome in Life(kind, folder / f"{number:03}", f"{seed} {number}", most_faults).live():
            outcomes.append(outcome)
            print(f"{time.monotonic() - began:6.0f} s, {len(outcomes):4}: run {number:3}, {outcome}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        # In order, so that all errors are raised.
        list(pool.map(live, range(num_faults)))
    return outcomes


def _check(path: Path, ranks: int) -> int:
    """Ask the command whether a checkpoint resumes; its exit code."""
    code: int = main(["check", str(path), "benchmarks.torture.kinds:made", "--devices", str(ranks)])
    return code


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is as it was written, by the checksums in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, struct.error, ValueError):
        return False


def _num_lines(start: Start, rank: int = 0) -> int:
    path = start.lines(rank)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _starts_in(folder: Path) -> Iterator[str]:
    """The names of the starts in the ledger whose first rank has written a header."""
    ledger = folder / "ledger"
    return (path.name for path in ledger.iterdir() if any(path.iterdir())) if ledger.exists() else iter(())
