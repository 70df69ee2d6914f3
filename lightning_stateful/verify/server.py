"""A process that has imported torch and Lightning, and forks a process for each job; the user's code is imported there.

``PYTHONHASHSEED`` is that of the process that forks, so there is a server for each of two values.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any


def serve(descriptor: int, package: str) -> None:
    """Do what is asked for over a connection, until its other end is closed.

    Args:
        descriptor: Of the connection. Messages are ``("start", number, job)`` and ``("kill", number)``; answers are
            ``(number, exit code)``.
        package: ``lightning.pytorch`` or ``pytorch_lightning``, which is imported first.
    """
    connection: Connection[Any, Any] = Connection(descriptor)
    # Whichever is imported first is the one that this package builds on.
    import_module(package)
    train = import_module("lightning_stateful.verify.training").run
    gc.collect()
    gc.freeze()
    forking = multiprocessing.get_context("fork")
    running: dict[int, Any] = {}
    while True:
        sentinels = {process.sentinel: number for number, process in running.items()}
        ready = wait([connection, *sentinels])
        for sentinel in ready:
            if sentinel in sentinels:
                number = sentinels[sentinel]  # type: ignore[index]
                process = running.pop(number)
                process.join()
                _kill_group(process.pid)
                connection.send((number, process.exitcode))
        if connection not in ready:
            continue
        try:
            kind, number, *job = connection.recv()
        except EOFError:
            break
        if kind == "start":
            process = forking.Process(target=_begin, args=(train, *job))
            process.start()
            running[number] = process
        elif number in running:
            _kill_group(running[number].pid)
            running[number].kill()
    for process in running.values():
        _kill_group(process.pid)
        process.kill()
    os._exit(0)


def _begin(train: Any, job: Any) -> None:
    # Its workers are of the same session, so that they are killed with it.
    os.setsid()
    log = os.open(job.record.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.unfreeze()
    train(job)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
