"""Runs functions on real DDP ranks: processes of their own, joined by gloo."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]


def environment_of_ranks(num_ranks: int) -> dict[str, str]:
    """What all ranks of one run find in their environment, on a port of their own; ``RANK`` and ``LOCAL_RANK`` lack."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_TESTS),
    }


def run_on_ranks(
    cases: list[tuple[str, str]], num_ranks: int, folder: Path, timeout: float = 240
) -> list[dict[str, Any]]:
    """Run cases one after the other on the same processes, which are costly to start.

    Args:
        cases: Pairs of a module below ``tests`` and the name of a function ``f(folder)`` in it.
        num_ranks: Number of processes.
        folder: A folder that all ranks share; each function gets a folder of its own in it.
        timeout: Seconds after which the ranks count as hung.

    Returns:
        For every rank a dict from the function's name to what it returned, or to the text of its exception.
    """
    common = environment_of_ranks(num_ranks)
    (folder / "cases.pkl").write_bytes(pickle.dumps(cases))
    with ExitStack() as logs_open:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "support.ranks", str(folder)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs_open.enter_context((folder / f"rank{rank}.log").open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank in range(num_ranks)
        ]
        codes: list[int | None] = []
        try:
            codes = [process.wait(timeout) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(num_ranks))
    assert codes == [0] * num_ranks, f"ranks ended with {codes}:\n{logs}"
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(num_ranks)]


def start_ranks(module: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Two ranks that run a module as a script, each the leader of its own processes."""
    environment = environment_of_ranks(2)
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in ("0", "1")
    ]


def ledger_of(folder: Path, rank: int) -> list[Any]:
    """What a rank has written down so far."""
    path = folder / f"ledger{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """End ranks, and their workers, with SIGKILL."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_after(count: int, module: str, folder: Path) -> None:
    """Run two ranks that are killed once the first has begun so many steps."""
    processes = start_ranks(module, folder)
    try:
        deadline = time.monotonic() + 60
        while len(ledger_of(folder, 0)) < count and time.monotonic() < deadline:
            assert all(process.poll() is None for process in processes), "the run was over before it was killed"
            time.sleep(0.005)
        assert len(ledger_of(folder, 0)) >= count
    finally:
        kill(processes)


def _main(folder: Path) -> None:
    import warnings

    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for module, name in pickle.loads((folder / "cases.pkl").read_bytes()):
        own = folder / name
        own.mkdir(exist_ok=True)
        try:
            results[name] = getattr(importlib.import_module(module), name)(own)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
