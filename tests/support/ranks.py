"""Runs functions on real DDP ranks: processes of their own, joined by gloo.

A case is a function ``f(folder)`` at the level of a test file or of a module in ``tests/support``; every rank calls it.
To add one, write it beside its test:

1. The case trains with ``support.ddp_runs.run``, or with a Trainer of ``on_ranks()``, and returns plain data. It may
   write into its folder, which all ranks share. When it begins, ``torch.distributed`` is set up.
2. The test asks the fixture ``ranks = Ranks(2, folder)`` of its file for it. ``ranks.of(case)`` has what each rank
   returned; ``ranks.errors_of(case)`` what each raised, where all are to raise. Both take arguments for the case.

A case runs when a test first asks for it, once in a file, on processes forked for it alone: it finds nothing of
another's, and where it dies or hangs, the tests that ask for it fail with what its ranks have printed, and no others.
The server that ranks are forked from has imported torch, Lightning and datasets, so that they start within a moment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import datasets.fingerprint
import numpy as np
import torch.distributed

from lightning_stateful.verify.launcher import environments_of_ranks

Case = Callable[..., Any]

_SERVER = multiprocessing.get_context("forkserver")
# Seconds that the other ranks are given once one has raised.
_GRACE = 20


class Ranks:
    """Runs cases on some ranks, each once.

    Args:
        num_ranks: Number of processes.
        folder: A folder that all ranks share; each case gets a folder of its own in it.
        timeout: Seconds after which a case counts as hung.
    """

    def __init__(self, num_ranks: int, folder: Path, timeout: float = 120) -> None:
        self.num_ranks, self.folder, self.timeout = num_ranks, folder, timeout
        folder.mkdir(exist_ok=True)
        self._done: dict[Path, list[tuple[Any, str]]] = {}

    def of(self, case: Case, *arguments: Any) -> list[Any]:
        """The values that a case returned on each rank."""
        found, folder = self._run(case, arguments), self.folder_of(case, *arguments)
        for rank, (_, error) in enumerate(found):
            assert not error, f"{folder.name} on rank {rank}: {error}\n{_log(folder, rank).read_text()[-3000:]}"
        return [value for value, _ in found]

    def errors_of(self, case: Case, *arguments: Any) -> list[str]:
        """The errors that a case raised on each rank: the name of the exception, and its text."""
        errors = [error for _, error in self._run(case, arguments)]
        assert all(errors), f"{case.__name__} raised nothing on some ranks: {errors}"
        return errors

    def folder_of(self, case: Case, *arguments: Any) -> Path:
        """The folder that a case is given."""
        return self.folder / re.sub(r"[^\w, .-]", "", "-".join(map(str, (case.__name__, *arguments))))

    def _run(self, case: Case, arguments: tuple[Any, ...]) -> list[tuple[Any, str]]:
        folder = self.folder_of(case, *arguments)
        if folder not in self._done:
            folder.mkdir(exist_ok=True)
            pipes = [_SERVER.Pipe() for _ in range(self.num_ranks)]
            ranks = [
                start(_report, theirs, case, folder, *arguments, log=_log(folder, rank), **environment)
                for rank, ((_, theirs), environment) in enumerate(
                    zip(pipes, environments_of_ranks(self.num_ranks), strict=True)
                )
            ]
            for _, theirs in pipes:
                theirs.close()
            try:
                self._done[folder] = self._collect(ranks, [ours for ours, _ in pipes])
            finally:
                # A rank stays until it is told to leave: rank 0 has the store that others may still ask.
                for ours, _ in pipes:
                    ours.close()
                for process in ranks:
                    process.join(5)
                kill(ranks)
        return self._done[folder]

    def _collect(self, ranks: list[ForkServerProcess], pipes: list[Connection]) -> list[tuple[Any, str]]:
        found: dict[int, tuple[Any, str]] = {}
        deadline = time.monotonic() + self.timeout
        while len(found) < len(ranks) and time.monotonic() < deadline:
            waiting = [rank for rank in range(len(ranks)) if rank not in found]
            ready = wait([pipes[rank] for rank in waiting], deadline - time.monotonic())
            for rank in waiting:
                if pipes[rank] in ready:
                    found[rank] = _received(pipes[rank], ranks[rank])
            if any(error for _, error in found.values()):
                deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in set(range(len(ranks))) - set(found):
            _abort(ranks[rank])
            found[rank] = (None, "hung")
        return [found[rank] for rank in range(len(ranks))]


def _abort(process: ForkServerProcess) -> None:
    """End a process that hangs; its log then says where."""
    os.kill(process.pid or 0, signal.SIGABRT)
    process.join(5)


def _received(pipe: Connection, process: ForkServerProcess) -> tuple[Any, str]:
    try:
        value, error = pipe.recv()
    except EOFError:
        process.join(5)
        return None, f"died, with exit code {process.exitcode}"
    return value, error


def _report(pipe: Connection, case: Case, folder: Path, *arguments: Any) -> None:
    """Call a case on this rank, and stay until all ranks have."""
    torch.distributed.init_process_group("gloo")
    value, error = None, ""
    try:
        value = case(folder, *arguments)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    pipe.send((value, error))
    with contextlib.suppress(EOFError):
        pipe.recv()


def start(function: Callable[..., Any], *arguments: Any, log: Path, **environment: str) -> ForkServerProcess:
    """Start a function in a process of its own, which is the leader of a session.

    Args:
        function: At the level of a module.
        arguments: Its arguments.
        log: Where all that it prints goes.
        environment: What it finds in its environment beside what is in ours.
    """
    process = _SERVER.Process(target=_begin, args=(function, arguments, log, {**os.environ, **environment}))
    process.start()
    return process


def _begin(function: Callable[..., Any], arguments: tuple[Any, ...], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)
    # A shell has those that it starts in the background ignore Ctrl-C, and they all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(sys.stderr)
    # Processes that are forked share these; those that are launched one by one do not.
    np.random.seed()
    datasets.fingerprint.fingerprint_rng.seed()
    warnings.simplefilter("ignore")
    function(*arguments)


def start_ranks(function: Case, folder: Path) -> list[ForkServerProcess]:
    """Start a function on two ranks, which are not waited for."""
    environments = environments_of_ranks(2)
    return [start(function, folder, log=_log(folder, rank), **environments[rank]) for rank in range(2)]


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def ledger_of(folder: Path, rank: int = 0) -> list[Any]:
    """The steps that a rank has written down so far."""
    path = folder / f"ledger{rank}.jsonl"
    # A rank may be writing the last line.
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill(processes: list[ForkServerProcess]) -> None:
    """End processes, and their workers, with SIGKILL."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            # It leads its session once it has begun.
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def wait_for_steps(count: int, processes: list[ForkServerProcess], folder: Path) -> None:
    """Wait until the first rank has begun so many steps, while all go on."""
    deadline = time.monotonic() + 120
    while len(ledger_of(folder, 0)) < count:
        assert all(process.is_alive() for process in processes), "the run was over before it was to be killed"
        if time.monotonic() > deadline:
            _abort(processes[0])
            raise AssertionError(f"it hung; where is in {folder}")
        time.sleep(0.005)


def kill_after(count: int, function: Case, folder: Path) -> None:
    """Run two ranks that are killed once the first has begun so many steps."""
    processes = start_ranks(function, folder)
    try:
        wait_for_steps(count, processes, folder)
    finally:
        kill(processes)
