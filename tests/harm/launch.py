"""Tries many entries in one launch of DDP ranks, which is begun anew after an entry that raises or hangs."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from support.ranks import kill, start

from harm.runs import Trial, try_entry
from harm.table import ENTRIES
from lightning_stateful.verify.launcher import environments_of_ranks

# Seconds without any news, and seconds after one rank is through with an entry.
_PATIENCE, _LAST_RANK = 60, 20

Trials = dict[str, list[Trial] | str]


def try_on_ranks(num_ranks: int, names: list[str], folder: Path, workers: int = 0) -> Trials:
    """Try entries on ranks.

    Args:
        num_ranks: Number of processes.
        names: Of entries.
        folder: For results, logs and checkpoints, ``checkpoint_of`` each entry.
        workers: Of each loader.

    Returns:
        The runs of every rank by entry; where a rank hung or died, that.
    """
    folder.mkdir(exist_ok=True, parents=True)
    found: Trials = {}
    while left := [name for name in names if name not in found]:
        environments = environments_of_ranks(num_ranks)
        processes = [
            start(_serve, left, folder, workers, log=folder / f"rank{rank}.log", **environments[rank])
            for rank in range(num_ranks)
        ]
        try:
            for name in left:
                found[name] = _watch(name, processes, folder)
                if isinstance(found[name], str) or _has_errors(found[name]):
                    break
        finally:
            kill(processes)
    return found


def checkpoint_of(folder: Path, name: str) -> Path:
    """The path of an entry's checkpoint."""
    return folder / f"{sorted(ENTRIES).index(name)}.ckpt"


def _result(folder: Path, name: str, rank: int) -> Path:
    return checkpoint_of(folder, name).with_suffix(f".{rank}.result")


def _has_errors(trials: Any) -> bool:
    return any(run.error for trial in trials for run in vars(trial).values())


def _watch(name: str, processes: list[Any], folder: Path) -> list[Trial] | str:
    paths = [_result(folder, name, rank) for rank in range(len(processes))]
    deadline = time.monotonic() + _PATIENCE
    while not all(path.exists() for path in paths):
        if any(path.exists() for path in paths):
            deadline = min(deadline, time.monotonic() + _LAST_RANK)
        dead = [rank for rank, process in enumerate(processes) if not process.is_alive() and not paths[rank].exists()]
        if dead or time.monotonic() > deadline:
            what = "died" if dead else "hung"
            done = [rank for rank, path in enumerate(paths) if path.exists()]
            return f"{what}: rank {dead or '?'}; through with it: ranks {done}"
        time.sleep(0.005)
    return [pickle.loads(path.read_bytes()) for path in paths]


def _serve(names: list[str], folder: Path, workers: int) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=_PATIENCE))
    rank = torch.distributed.get_rank()
    for name in names:
        path = _result(folder, name, rank)
        trial = try_entry(ENTRIES[name], checkpoint_of(folder, name), workers)
        path.with_suffix(".part").write_bytes(pickle.dumps(trial))
        path.with_suffix(".part").rename(path)
        # After an error ranks may be out of step: they are killed, and others begin with the next entry.
        others = [_result(folder, name, other) for other in range(torch.distributed.get_world_size())]
        while not all(other.exists() for other in others):
            time.sleep(0.005)
        if _has_errors([pickle.loads(other.read_bytes()) for other in others]):
            time.sleep(_PATIENCE)
