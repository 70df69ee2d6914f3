"""What the tests of streams under DDP run on every rank."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from support.runs import Outcome
from support.sources import SaveAt, train_on
from support.stream_runs import MODULES

# Where runs are saved, one after the other: each but the first goes on from the one before.
STOPS = [("on_before_backward", 0, 2), ("on_train_batch_end", 1, 0)]


def files(folder: Path) -> Path:
    """Where the files are that all cases read."""
    return folder.parent / "files"


def on_ranks(**options: Any) -> dict[str, Any]:
    """A trainer's options for all ranks that there are."""
    return {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 2, **options}


def run(make: Any, **options: Any) -> Outcome:
    """A run on all ranks."""
    return train_on(make, **on_ranks(**options))


def plain(found: Outcome) -> dict[str, Any]:
    """What a test compares, as plain data."""
    return {
        "ledger": found.ledger,
        "weights": {name: value.tolist() for name, value in found.weights.items()},
        "end": (found.global_step, found.current_epoch, found.total_batches),
        "state": found.trainer.datamodule.state_dict(),
        "report": found.trainer.datamodule.position_report(),
    }


def chain_of(make: Any, folder: Path, stops: Any = STOPS, **options: Any) -> list[Any]:
    """Of an uninterrupted run, and of each that goes on from the one before: what it does, and had done at its stop."""
    parts, path = [], None
    for number in range(len(stops) + 1):
        saver = SaveAt(folder / str(number), stops[number : number + 1])
        parts.append((plain(run(make, callbacks=[saver], ckpt_path=path, seed=number, **options)), saver.ledgers.get(0)))
        torch.distributed.barrier()
        path = saver.path(0)
    return parts


def of_each(folder: Path, names: Any, **options: Any) -> dict[str, Any]:
    """A chain of every kind of stream."""
    found = {}
    for name in names:
        own = folder / name
        own.mkdir(exist_ok=True)
        found[name] = chain_of(partial(MODULES[name], files(folder), **options), own)
    return found


def every_kind(folder: Path) -> dict[str, Any]:
    return of_each(folder, MODULES)


def padded(folder: Path) -> dict[str, Any]:
    return of_each(folder, ["chunks", "json", "mixed by sample", "tokens"], tail="pad")
