"""Runs jobs in processes of their own, several runs at once, each with a time limit; nothing outlives it.

Processes are forked from servers, which have imported torch and Lightning; the user's code is imported in the fork.
``PYTHONHASHSEED`` is that of the process that forks, so there is a server for each of two values.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.verify.records import Job, Record

# Seconds between two looks at what has been written.
_LOOK = 0.02
# Seconds that other ranks are given once one has ended, or has ended by an error.
_GRACE, _GRACE_AFTER_ERROR = 30.0, 5.0
_LOG_CHARACTERS = 2000


@dataclass
class _Server:
    """A server, and what it is asked over."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]


@dataclass
class _Running:
    """A run whose processes have been started.

    Attributes:
        jobs: By the number of the process.
        ended: Exit codes of processes that have ended.
        size: Bytes written when last looked, and when that was.
    """

    position: int
    jobs: dict[int, Job]
    ended: dict[int, int] = field(default_factory=dict)
    size: tuple[int, float] = (-1, 0.0)
    deadline: float = float("inf")

    def is_done(self, number: int) -> bool:
        return number in self.ended or self.jobs[number].record.with_suffix(".done").exists()


class Launcher:
    """Starts processes for runs, and reads what they record.

    Args:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.

    Attributes:
        timeout: Seconds without a new batch after which a run counts as hung.
        is_open: Whether it has not been closed.
    """

    def __init__(self, package: str) -> None:
        if not hasattr(os, "fork"):
            raise ConfigurationError("verify starts processes by fork, which this system does not have.")
        self.package, self.is_open, self.timeout = package, True, float("inf")
        self.folder = Path(tempfile.mkdtemp(prefix="lightning-stateful-verify-"))
        self._servers: dict[int, _Server] = {}
        self._numbers = self._runs = 0
        atexit.register(self.close)

    def close(self) -> None:
        """Kill all processes and remove all files."""
        self.is_open = False
        for server in self._servers.values():
            # It kills what it has started.
            server.connection.close()
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(5)
            server.process.kill()
            server.process.wait()
        self._servers.clear()
        # A server may have removed it.
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    def path(self, name: str) -> Path:
        """A file of this launcher's."""
        return self.folder / name

    def run(self, runs: Sequence[Sequence[Job]], at_once: int, ended: Callable[[], None]) -> list[list[Record]]:
        """Run jobs.

        Args:
            runs: The jobs of the ranks of each run.
            at_once: Runs that go on at the same time.
            ended: Is called as each has ended.

        Returns:
            The records of the ranks of each run.
        """
        found: dict[int, list[Record]] = {}
        running: list[_Running] = []
        waiting = list(enumerate(runs))
        # Both import side by side.
        self._server(0), self._server(1)
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(self._start(*waiting.pop(0)))
                self._hear(running)
                for one in [one for one in running if self._is_over(one)]:
                    running.remove(one)
                    found[one.position] = self._end(one)
                    ended()
        finally:
            for one in running:
                self._kill(one)
        return [found[position] for position in range(len(runs))]

    def _start(self, position: int, jobs: Sequence[Job]) -> _Running:
        self._runs += 1
        environments = environments_of_ranks(len(jobs)) if len(jobs) > 1 else [{}]
        started: dict[int, Job] = {}
        for job, environment in zip(jobs, environments, strict=True):
            self._numbers += 1
            record = self.path(f"run{self._runs}-rank{job.rank}.jsonl")
            # Of a server the environment is that of its start.
            job = replace(job, package=self.package, record=record, environment={**_own_environment(), **environment})
            started[self._numbers] = job
            self._server(job.conditions.hash_seed).connection.send(("start", self._numbers, job))
        return _Running(position, started, size=(-1, time.monotonic()))

    def _server(self, hash_seed: int) -> _Server:
        # A user who sets it has it so in every run.
        fixed = os.environ.get("PYTHONHASHSEED", "random")
        key = hash_seed if fixed == "random" else 0
        if key not in self._servers:
            self._servers[key] = self._launched(str(key + 1) if fixed == "random" else fixed)
        return self._servers[key]

    def _launched(self, hash_seed: str) -> _Server:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        told = f"{theirs.fileno()}, {self.package!r}, {str(self.folder)!r}"
        call = f"from lightning_stateful.verify.launcher import serve; serve({told})"
        with self.path("server.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603  # this very interpreter
                [sys.executable, "-c", call],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        return _Server(process, Connection(ours.detach()))

    def _hear(self, running: Sequence[_Running]) -> None:
        """Wait a moment for news, and note which processes have ended."""
        connections = {server.connection: server for server in self._servers.values()}
        for connection in wait(list(connections), _LOOK):
            try:
                number, code = cast("Connection[Any, Any]", connection).recv()
            except (EOFError, OSError):
                log = self.path("server.log").read_text(errors="replace")[-_LOG_CHARACTERS:]
                raise ConfigurationError(f"The process that others are forked from has died:\n{log}") from None
            for one in running:
                if number in one.jobs:
                    one.ended[number] = code

    def _is_over(self, one: _Running) -> bool:
        done = [number for number in one.jobs if one.is_done(number)]
        if len(done) == len(one.jobs):
            return True
        now = time.monotonic()
        written = sum(job.record.stat().st_size for job in one.jobs.values() if job.record.exists())
        if written != one.size[0]:
            one.size = written, now
        if done and one.deadline == float("inf"):
            records = [Record.read(one.jobs[number].record) for number in done]
            is_bad = any(record.refused or record.failed for record in records)
            one.deadline = now + (_GRACE_AFTER_ERROR if is_bad else _GRACE)
        return now > min(one.deadline, one.size[1] + self.timeout)

    def _end(self, one: _Running) -> list[Record]:
        unfinished = [number for number in one.jobs if not one.is_done(number)]
        self._kill(one)
        records = []
        for number, job in one.jobs.items():
            record = Record.read(job.record)
            log = job.record.with_suffix(".log")
            record.log = log.read_text(errors="replace")[-_LOG_CHARACTERS:] if log.exists() else ""
            if number in unfinished:
                record.failed = f"hung: no new batch in {self.timeout:g} seconds, after {len(record.batches)} batches"
            elif number in one.ended and not job.record.with_suffix(".done").exists() and job.run.kill_after is None:
                record.failed = f"died, with exit code {one.ended[number]}"
            records.append(record)
        return records

    def _kill(self, one: _Running) -> None:
        for number, job in one.jobs.items():
            if number not in one.ended:
                with suppress(OSError):
                    self._server(job.conditions.hash_seed).connection.send(("kill", number))


def _own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONHASHSEED", "OMP_NUM_THREADS")}


def environments_of_ranks(num_ranks: int) -> list[dict[str, str]]:
    """The environment variables of each rank on this machine, as torchrun sets them, with a free port."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "ranks",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def free_port() -> int:
    """A port of this machine on which nothing listens.

    Raises:
        OSError: If none of a hundred is free.
    """
    # Not the one that the system gives for port 0: it takes those for outgoing connections too, and may give the same
    # one away before rank 0 listens on it. No system takes them from below 32,768 unless it is told to.
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free among 100 that were drawn between 20000 and 32767: close what listens there")


def serve(descriptor: int, package: str, folder: str) -> None:
    """Do what is asked for over a connection, until its other end is closed.

    Args:
        descriptor: Of the connection. Messages are ``("start", number, job)`` and ``("kill", number)``; answers are
            ``(number, exit code)``.
        package: ``lightning.pytorch`` or ``pytorch_lightning``, which is imported first.
        folder: A folder that is removed at the end, also if the other process was killed.
    """
    connection: Connection[Any, Any] = Connection(descriptor)
    # Whichever is imported first is the one that this package builds on.
    import_module(package)
    train = import_module("lightning_stateful.verify.training").run
    gc.collect()
    gc.freeze()
    running: dict[int, Any] = {}
    # The other process may end at any moment, whatever it was about to be told.
    with suppress(EOFError, OSError):
        while True:
            _answer(connection, running, train)
    for process in running.values():
        _kill(process)
        process.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _answer(connection: Connection[Any, Any], running: dict[int, Any], train: Callable[[Job], None]) -> None:
    """Wait until something is asked for or a process has ended, and see to it."""
    sentinels = {process.sentinel: number for number, process in running.items()}
    ready = wait([connection, *sentinels])
    for sentinel in sentinels.keys() & set(ready):
        process = running.pop(number := sentinels[sentinel])
        process.join()
        _kill(process)
        connection.send((number, process.exitcode))
    if connection not in ready:
        return
    kind, number, *job = connection.recv()
    if kind == "start":
        running[number] = multiprocessing.get_context("fork").Process(target=_begin, args=(train, *job))
        running[number].start()
    elif number in running:
        _kill(running[number])


def _begin(train: Any, job: Any) -> None:
    # Its workers are of the same session, so that they are killed with it.
    os.setsid()
    log = os.open(job.record.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(job)


def _kill(process: Any) -> None:
    """Kill a process, and the workers that it has left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
