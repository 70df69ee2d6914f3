"""What the tests of streams under DDP run on every rank."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from support.runs import Outcome, StopAt, seeded, train
from support.sources import SourcesModel
from support.stream_runs import MODULES

CHAIN = [("on_train_batch_end", 0, 1), ("on_before_backward", 0, 0), ("on_train_batch_end", 1, 0)]



def files(folder: Path) -> Path:
    """Where the files are that all cases read."""
    return folder.parent / "files"


def on_ranks(**options: Any) -> dict[str, Any]:
    """A trainer's options for all ranks that there are."""
    return {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 3, **options}


def run(make: Any, **options: Any) -> Outcome:
    """A run on all ranks."""
    return train(make, **on_ranks(model=seeded(SourcesModel), **options))


def plain(found: Outcome) -> dict[str, Any]:
    """What a test compares, as plain data."""
    return {
        "ledger": found.ledger,
        "weights": {name: value.tolist() for name, value in found.weights.items()},
        "end": (found.global_step, found.current_epoch, found.total_batches),
        "state": found.trainer.datamodule.state_dict(),
        "report": found.trainer.datamodule.position_report(),
    }


def chain_of(make: Any, folder: Path, chain: Any = CHAIN, **options: Any) -> list[Any]:
    """The ledgers of runs that are stopped one after the other, and what the last does."""
    ledgers, path = [], None
    for number, (hook, epoch, batch) in enumerate(chain):
        stop = StopAt(hook, folder / f"{number}.ckpt", epoch=epoch, batch=batch)
        run(make, callbacks=[stop], ckpt_path=path, **options)
        torch.distributed.barrier()
        ledgers.append(stop.ledger)
        path = folder / f"{number}.ckpt"
    return [*ledgers, plain(run(make, ckpt_path=path, **options))]


def of_each(folder: Path, names: Any, **options: Any) -> dict[str, Any]:
    """Of every kind of stream an uninterrupted run, and a chain of stops."""
    found = {}
    for name in names:
        own = folder / name
        own.mkdir(exist_ok=True)
        make = partial(MODULES[name], files(folder), **options)
        found[name] = plain(run(make)), chain_of(make, own)
    return found


def every_kind(folder: Path) -> dict[str, Any]:
    return of_each(folder, MODULES)


def padded(folder: Path) -> dict[str, Any]:
    return of_each(folder, ["chunks", "json", "mixed by sample", "tokens"], tail="pad")
