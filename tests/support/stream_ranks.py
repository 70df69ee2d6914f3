"""What the tests of streams under DDP run on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_stateful import MixedStream, StatefulDataCallback, StreamDataModule
from lightning_stateful.errors import StatefulError
from support.ledger import LedgerModel, StepLogger
from support.runs import Outcome, outcome_of, seeded, train
from support.sources import SaveAt, SourcesModel, trained
from support.stream_runs import (
    MODULES,
    OTHER_FIRST,
    OTHER_SIZES,
    SIZES,
    VAL_FIRST,
    VAL_SIZES,
    Batches,
    BatchesWithState,
    chunks,
    files_of,
    mapped,
    module,
    read_chunk,
)
from support.text_cases import Settle

# Where runs are saved, one after the other: each but the first goes on from the one before.
STOPS = [("on_before_backward", 0, 2), ("on_train_batch_end", 1, 0)]
# After so many steps each number of ranks, with so many workers, leaves the rest to the next.
HANDED_OVER = {2: (2, 0), 1: (4, 2), 3: (5, 0)}
HANDED = ("chunks", "json", "filter", "batched map", "tokens", "in turn", "mixed by sample")


def files(folder: Path) -> Path:
    """Where the files are that all cases read."""
    return folder.parent / "files"


def on_ranks(**options: Any) -> dict[str, Any]:
    """A trainer's options for all ranks that there are."""
    return {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 2, **options}


def run(make: Any, **options: Any) -> Outcome:
    """A run on all ranks."""
    model = options.pop("model", None) or seeded(options.pop("makes", SourcesModel), options.pop("seed", 1))
    return train(make, model=model, **on_ranks(**options))


def plain(found: Outcome) -> dict[str, Any]:
    """What a test compares, as plain data."""
    own = next(callback for callback in found.trainer.callbacks if isinstance(callback, StatefulDataCallback))
    return {
        "ledger": found.ledger,
        "weights": {name: value.tolist() for name, value in found.weights.items()},
        "end": (found.global_step, found.current_epoch, found.total_batches),
        "state": own.data_state(),
        "report": own.position_report(),
    }


def chain_of(make: Any, folder: Path, callbacks: Any = list, **options: Any) -> list[Any]:
    """Of an uninterrupted run, and of each that goes on from the one before: what it does, and had done at its stop."""
    parts, path = [], None
    for number in range(len(STOPS) + 1):
        saver = SaveAt(folder / str(number), STOPS[number : number + 1])
        found = run(make, callbacks=[saver, *callbacks()], ckpt_path=path, seed=number, **options)
        parts.append((plain(found), saver.ledgers.get(0)))
        torch.distributed.barrier()
        path = saver.path(0)
    return parts


def of_each(folder: Path, names: Any, callbacks: Any = list, **options: Any) -> dict[str, Any]:
    """A chain of each of some kinds of streams."""
    found = {}
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        found[name] = chain_of(partial(MODULES[name], files(folder), **options), folder / name, callbacks)
    return found


def every_kind(folder: Path) -> dict[str, Any]:
    return of_each(folder, MODULES)


def workers(folder: Path) -> dict[str, Any]:
    """Persistent workers, forked when gloo is at rest."""
    options = {"num_workers": 2, "persistent_workers": True, "val": None}
    return of_each(folder, ("chunks", "json", "own with a state"), lambda: [Settle()], **options)


def schedules(folder: Path) -> dict[str, Any]:
    """Epochs cut, made of several passes, with windows of accumulated gradients, and of several streams."""
    streams = {
        "a": chunks(),
        "b": chunks(OTHER_SIZES, OTHER_FIRST),
        "c": mapped(files_of("json", files(folder), "other")),
    }
    on_chunks = partial(MODULES["chunks"], folder)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "side by side": (lambda: module(streams, steps_per_epoch=4), {"max_epochs": 4, "makes": LedgerModel}),
        "loaders made anew": (on_chunks, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
        "limited": (on_chunks, {"limit_train_batches": 3, "accumulate_grad_batches": 2, "max_epochs": 6}),
        "long accumulation": (partial(on_chunks, steps_per_epoch=26), {"accumulate_grad_batches": 20}),
        "short epochs": (partial(MODULES["json"], files(folder), steps_per_epoch=4), {"max_epochs": 7}),
        "long epochs": (partial(on_chunks, steps_per_epoch=13), {"val_check_interval": 5}),
        "callback alone": (
            lambda: DataLoader(mapped(files_of("parquet", files(folder))), batch_size=2),
            {"callbacks": lambda: [StatefulDataCallback(seed=7)]},
        ),
        "iterables": (Batches, {"callbacks": lambda: [StatefulDataCallback(seed=7)]}),
        "iterables with a state": (BatchesWithState, {"callbacks": lambda: [StatefulDataCallback(seed=7)]}),
        "iterables cut": (
            BatchesWithState,
            {
                "callbacks": lambda: [StatefulDataCallback(seed=7)],
                "limit_train_batches": 3,
                "max_epochs": 3,
                "use_distributed_sampler": False,
            },
        ),
    }
    found = {}
    for name, (make, options) in cases.items():
        (folder / name).mkdir(exist_ok=True)
        found[name] = chain_of(make, folder / name, **options)
    return found


class States(pl.Callback):
    """Keeps every state and report that a rank would give."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def _keep(self, trainer: pl.Trainer, *args: Any) -> None:
        own: Any = trainer.datamodule
        self.found.append((trainer.current_epoch, own.state_dict()["lightning_stateful"], own.position_report()))

    on_train_epoch_start = on_before_backward = on_train_batch_end = on_validation_end = on_train_epoch_end = _keep


def states(folder: Path) -> dict[str, Any]:
    """What each rank would write at every moment."""
    cases: dict[str, dict[str, Any]] = {
        "json": {"accumulate_grad_batches": 3},
        "own with a state": {},
        "cycle": {"limit_train_batches": 5},
    }
    found = {}
    for name, options in cases.items():
        kept = States()
        run(partial(MODULES[name], files(folder)), callbacks=[kept], **options)
        found[name] = kept.found
    return found


def evaluated(folder: Path) -> dict[str, Any]:
    """Streams for every stage of evaluation, of more shards than ranks and of one."""
    streams = {
        "chunks": chunks(VAL_SIZES, VAL_FIRST),
        "one chunk": chunks((4,), VAL_FIRST),
        "parquet": mapped(files_of("parquet", files(folder), "val")),
        "mixed": MixedStream({"a": chunks(VAL_SIZES, VAL_FIRST), "b": chunks((1, 2, 1, 1), 600)}),
    }
    found = {}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    for name, stream in streams.items():
        data = StreamDataModule(None, stream, stream, stream, batch_size=2)
        trainer, model = pl.Trainer(accelerator="cpu", **quiet, **on_ranks()), seeded(SourcesModel)
        trainer.test(model, datamodule=data, verbose=False)
        trainer.predict(model, datamodule=data)
        validating = run(partial(module, chunks(), val=stream), val_check_interval=3)
        found[name] = [*model.ledger, *validating.ledger]
    return found


# Faults


def fails_at(number: int, ref: Any) -> Iterator[int]:
    """A chunk that rank 1 cannot read."""
    for found in read_chunk(ref):
        if found == number and torch.distributed.get_rank() == 1:
            raise OSError("the disk is gone")
        yield found


def broken(folder: Path) -> dict[str, Any]:
    """A reader fails on rank 1; from the last checkpoint a run goes on."""

    def make(read: Any = read_chunk) -> Any:
        return module(chunks(read=read, buffer_size=1), val=None)

    whole, model = run(make), seeded(SourcesModel)
    numbers: list[Any] = [None, None]
    torch.distributed.all_gather_object(numbers, [index for event in trained(whole.ledger) for index in event[4]])
    # Read for the first time in the fourth step.
    read = partial(fails_at, numbers[1][6])
    error = refusal(
        partial(make, read), model=model, callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)]
    )
    torch.distributed.barrier()
    resumed = run(make, ckpt_path=folder / "last.ckpt", seed=9)
    return {"error": error, "before": model.ledger, "after": plain(resumed), "whole": plain(whole)}


def waits(path: Path, ref: Any) -> Iterator[int]:
    """A chunk that rank 1 cannot read before the other has given up."""
    for found in read_chunk(ref):
        deadline = time.monotonic() + 30
        while torch.distributed.get_rank() and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield found


class Touch(pl.Callback):
    """Leaves a file where a run breaks off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, *args: Any) -> None:
        self.path.touch()


def slow(folder: Path) -> str:
    """Rank 1 stands still while the other waits."""
    stream = chunks(read=partial(waits, folder / "over"))
    return refusal(lambda: module(stream, val=None, timeout=1), callbacks=[Touch(folder / "over")])


def refusal(make: Any, **options: Any) -> str:
    try:
        run(make, **options)
    except StatefulError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def refused(folder: Path) -> dict[str, str]:
    """Ranks that disagree, and streams that are too small."""
    rank = torch.distributed.get_rank()
    return {
        "seeds": refusal(lambda: module(chunks(seed=rank))),
        "chunks": refusal(lambda: module(chunks(SIZES[: 8 + rank]))),
        "steps": refusal(lambda: module(chunks(), steps_per_epoch=3 + rank)),
    }


def nothing_on_a_rank(folder: Path) -> dict[str, Any]:
    """One of two shards is empty, so that a rank may have nothing at all."""
    return {
        "next": run(lambda: module(chunks((4, 0)), val=None), max_epochs=4).ledger,
        "steps": refusal(lambda: module(chunks((4, 0)), steps_per_epoch=3, val=None)),
    }


def again(folder: Path) -> list[Any]:
    """A trainer is fitted, stopped within an epoch, and fitted again."""
    data, model, logger = MODULES["chunks"](folder), seeded(SourcesModel), StepLogger()
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", logger=logger, num_sanity_val_steps=0, max_steps=4, **quiet, **on_ranks())
    trainer.fit(model, datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(model, datamodule=data)
    return outcome_of(trainer, model, logger).ledger


# Other numbers of ranks


def hand_over(folder: Path, name: str, number: int, **options: Any) -> dict[str, Any]:
    """A few steps on ``number`` ranks, from the checkpoint that the ranks before them left."""
    steps, num_workers = HANDED_OVER[number]
    order = list(HANDED_OVER)
    before = order[order.index(number) - 1] if order.index(number) else None
    path = None if before is None else folder / f"{name}, {before}.ckpt"
    make = partial(MODULES[name], folder / "files", num_workers=num_workers, val=None)
    found = train(make, model=seeded(SourcesModel), ckpt_path=path, **{**options, "max_steps": steps, "max_epochs": -1})
    found.trainer.save_checkpoint(folder / f"{name}, {number}.ckpt")
    return plain(found)


def handed_over(folder: Path) -> dict[str, Any]:
    """Go on with what other ranks have left, if there is any, and leave the rest of the epoch to others again."""
    options = on_ranks()
    return {name: hand_over(folder.parent, name, options["devices"], **options) for name in HANDED}


ON_TWO = [
    workers,
    every_kind,
    schedules,
    states,
    evaluated,
    broken,
    slow,
    refused,
    nothing_on_a_rank,
    again,
    handed_over,
]
