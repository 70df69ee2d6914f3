"""What the tests of streams under DDP run on every rank."""

from __future__ import annotations

import os
import time
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
    chunks,
    files_of,
    mapped,
    module,
    read_chunk,
    sample,
)
from support.text_cases import Settle

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
    seed, makes_model = options.pop("seed", 1), options.pop("makes_model", SourcesModel)
    return train(make, model=seeded(makes_model, seed), **on_ranks(**options))


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


def chain_of(make: Any, folder: Path, stops: Any = STOPS, *, settles: bool = False, **options: Any) -> list[Any]:
    """Of an uninterrupted run, and of each that goes on from the one before: what it does, and had done at its stop."""
    parts, path = [], None
    for number in range(len(stops) + 1):
        saver = SaveAt(folder / str(number), stops[number : number + 1])
        parts.append((plain(run(make, callbacks=[saver, *[Settle()] * settles], ckpt_path=path, seed=number, **options)), saver.ledgers.get(0)))
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


def side_by_side(folder: Path) -> list[Any]:
    """Two streams of one class, and one that is Hugging Face's, give a batch each to every step."""
    of_files = mapped(files_of("parquet", files(folder), "other"))

    def make() -> Any:
        streams = {"a": chunks(), "b": chunks(OTHER_SIZES, OTHER_FIRST), "c": of_files}
        return module(streams, steps_per_epoch=4)

    return chain_of(make, folder, max_epochs=4, makes_model=LedgerModel)


def reloaded(folder: Path) -> list[Any]:
    """Loaders are made anew for every epoch."""
    return chain_of(partial(MODULES["chunks"], folder), folder, reload_dataloaders_every_n_epochs=1, max_epochs=3)


def limited(folder: Path) -> list[Any]:
    """Short epochs, within which gradients are accumulated."""
    return chain_of(
        partial(MODULES["chunks"], folder), folder, limit_train_batches=3, accumulate_grad_batches=2, max_epochs=6
    )


def in_steps(folder: Path) -> list[Any]:
    """Epochs of so many steps, across passes."""
    return chain_of(partial(MODULES["json"], files(folder), steps_per_epoch=4), folder, max_epochs=7)


def in_long_steps(folder: Path) -> list[Any]:
    """Epochs of several passes."""
    return chain_of(
        partial(MODULES["chunks"], files(folder), steps_per_epoch=13, val_check=None) if False else partial(MODULES["chunks"], files(folder), steps_per_epoch=13), folder, max_epochs=2, val_check_interval=5
    )


def callback_alone(folder: Path) -> list[Any]:
    """A plain loader over a stream of Hugging Face's."""
    parts = []
    path = None
    for number in range(3):
        saver = SaveAt(folder / str(number), STOPS[number : number + 1])
        found = run(
            lambda: DataLoader(mapped(files_of("parquet", files(folder))), batch_size=2),
            callbacks=[StatefulDataCallback(seed=7), saver],
            ckpt_path=path,
            seed=number,
        )
        parts.append((plain(found), saver.ledgers.get(0)))
        torch.distributed.barrier()
        path = saver.path(0)
    return parts


class States(pl.Callback):
    """Keeps every state that a rank would write."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def _keep(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.found.append((trainer.datamodule.state_dict(), trainer.datamodule.position_report()))

    on_train_epoch_start = on_train_batch_start = on_train_batch_end = on_validation_end = on_train_epoch_end = _keep


def states(folder: Path) -> list[Any]:
    """What each rank would write at every moment."""
    found = []
    for name, options in (("chunks", {}), ("json", {"accumulate_grad_batches": 3}), ("own with a state", {}), ("cycle", {"limit_train_batches": 5})):
        kept = States()
        run(partial(MODULES[name], files(folder)), callbacks=[kept], **options)
        found.append(kept.found)
    return found


def workers(folder: Path) -> dict[str, Any]:
    """Persistent workers, stopped and resumed."""
    found = {}
    for name in ("chunks", "json", "own with a state"):
        (folder / name).mkdir(exist_ok=True)
        make = partial(MODULES[name], files(folder), num_workers=2, persistent_workers=True, val=None)
        found[name] = chain_of(make, folder / name, settles=True)
    return found


def evaluated(folder: Path) -> dict[str, Any]:
    """Streams for every stage of evaluation, of enough shards and of one."""
    found = {}
    several = {
        "chunks": chunks(VAL_SIZES, VAL_FIRST),
        "one chunk": chunks((4,), VAL_FIRST),
        "hf": mapped(files_of("parquet", files(folder), "val")),
        "mixed": MixedStream({"a": chunks(VAL_SIZES, VAL_FIRST, transform=None).map(sample), "b": chunks((1,2,1,1), 600)}),
    }
    for name, stream in several.items():
        data = StreamDataModule(None, stream, stream, stream, batch_size=2)
        trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", **on_ranks())
        model = seeded(SourcesModel)
        trainer.test(model, datamodule=data, verbose=False)
        trainer.predict(model, datamodule=data)
        found[name] = model.ledger
        trained_too = run(lambda: module(chunks(), val=stream), val_check_interval=2)
        found[name + " in fit"] = trained_too.ledger
    return found


def fails_at(number: int, rank: int, ref: Any) -> Any:
    """A chunk that one rank cannot read."""
    for found in read_chunk(ref):
        if found == number and torch.distributed.get_rank() == rank:
            raise OSError("the disk is gone")
        yield found


def broken(folder: Path) -> dict[str, Any]:
    """A reader fails on rank 1; what stands in the last checkpoint goes on."""
    ledger = []
    class Keeps(SourcesModel):
        def __init__(self): super().__init__(); self.ledger = ledger
    def make(read: Any = read_chunk) -> Any:
        return module(chunks(read=read, buffer_size=1), val=None)
    whole = run(make)
    number = [index for event in trained(whole.ledger) if event[1]==1 for index in event[4]][4]
    numbers = [None, None]
    torch.distributed.all_gather_object(numbers, number)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    error = refusal(lambda: make(partial(fails_at, numbers[1], 1)), callbacks=[saver], model=seeded(Keeps))
    torch.distributed.barrier()
    resumed = run(make, ckpt_path=folder / "last.ckpt", seed=9)
    return {"error": error, "before": ledger, "after": plain(resumed), "whole": plain(whole)}


def waits_for(path: Path, ref: Any) -> Any:
    """A chunk that rank 1 cannot read before the other is done."""
    for found in read_chunk(ref):
        deadline = time.monotonic() + 30
        while torch.distributed.get_rank() and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield found


def slow(folder: Path) -> str:
    """Rank 1 stands still while the other waits."""
    began = time.monotonic()
    path = folder / "go"
    class Done(pl.Callback):
        def on_exception(self, trainer, module, exception):
            path.touch()
    read = partial(waits_for, path)
    said = refusal(lambda: module(chunks(read=read), val=None, timeout=1), callbacks=[Done()])
    return f"{time.monotonic()-began:.1f} {said}"


def refusal(make: Any, **options: Any) -> str:
    try:
        run(make, **options)
    except StatefulError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def other_seeds(folder: Path) -> str:
    return refusal(lambda: module(chunks(seed=torch.distributed.get_rank())))


def other_chunks(folder: Path) -> str:
    return refusal(lambda: module(chunks(SIZES[: 8 + torch.distributed.get_rank()])))


def too_many_lanes(folder: Path) -> str:
    return refusal(lambda: module(chunks((4,))))


def no_samples_on_a_rank(folder: Path) -> dict[str, Any]:
    """One of two shards is empty: a rank has nothing at all."""
    return {t: plain(run(lambda: module(chunks((4, 0)), tail=t))) if t=="next" else refusal(lambda: module(chunks((4, 0)), tail=t)) for t in ("pad",)}


def again(folder: Path) -> dict[str, Any]:
    """A trainer is fitted, stopped, and fitted again."""
    whole = plain(run(partial(MODULES["chunks"], folder)))
    model, logger = seeded(SourcesModel), StepLogger()
    data = MODULES["chunks"](folder)
    trainer = pl.Trainer(accelerator="cpu", logger=logger, log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, max_steps=4, **on_ranks())
    trainer.fit(model, datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.should_stop = False
    trainer.fit(model, datamodule=data)
    return {"whole": whole, "again": plain(outcome_of(trainer, model, logger))}
