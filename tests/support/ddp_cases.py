"""What the DDP tests run on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from support.ledger import LedgerModel, Numbers
from support.runs import Outcome, StopAt, numbers_module, seeded, train
from support.signalled import SignalledInStep, enter_slurm_job
from support.stream_runs import chunks
from support.stream_runs import module as stream_module

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_epochs": 2}

MOMENTS = [
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_start", 0, 2),
    ("on_before_backward", 1, 1),
    ("on_train_batch_end", 0, 2),
    ("on_train_batch_end", 0, 5),
    ("on_validation_start", 0, 0),
    ("on_validation_batch_end", 1, 0),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
]
CHAIN = [("on_train_batch_end", 0, 1), ("on_before_backward", 0, 2), ("on_train_batch_end", 1, 0)]


def plain(run: Outcome, stopped: StopAt | None = None) -> dict[str, Any]:
    """What a test compares, as plain data."""
    return {
        "ledger": run.ledger if stopped is None else stopped.ledger,
        "logged": run.logged,
        "weights": {name: value.tolist() for name, value in run.weights.items()},
        "end": (run.global_step, run.current_epoch, run.total_batches),
    }


def shared(folder: Path, name: str) -> Path:
    torch.distributed.barrier()
    return folder / name


def uninterrupted(folder: Path) -> dict[str, Any]:
    return plain(train(**DDP))


def uninterrupted_with_windows(folder: Path) -> dict[str, Any]:
    return plain(train(**DDP, accumulate_grad_batches=4))


def every_moment(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    pairs = []
    for number, (hook, epoch, batch) in enumerate(MOMENTS):
        path = folder / f"{number}.ckpt"
        stop = StopAt(hook, path, epoch=epoch, batch=batch)
        first = train(callbacks=[stop], **DDP)
        pairs.append((plain(first, stop), plain(train(ckpt_path=path, seed=9, **DDP))))
    return pairs


def every_moment_in_windows(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    pairs = []
    for batch in range(6):
        path = folder / f"{batch}.ckpt"
        stop = StopAt("on_train_batch_end", path, epoch=1, batch=batch)
        first = train(callbacks=[stop], **DDP, accumulate_grad_batches=4)
        pairs.append((plain(first, stop), plain(train(ckpt_path=path, seed=9, **DDP, accumulate_grad_batches=4))))
    return pairs


def chain(folder: Path) -> list[dict[str, Any]]:
    parts, path = [], None
    for number, (hook, epoch, batch) in enumerate(CHAIN):
        stop = StopAt(hook, folder / f"{number}.ckpt", epoch=epoch, batch=batch)
        parts.append(plain(train(callbacks=[stop], ckpt_path=path, seed=1 if path is None else number, **DDP), stop))
        path = folder / f"{number}.ckpt"
    return [*parts, plain(train(ckpt_path=path, seed=9, **DDP))]


def with_workers(folder: Path) -> list[dict[str, Any]]:
    def make() -> Any:
        return numbers_module(num_workers=2)

    stop = StopAt("on_train_batch_end", folder / "stop.ckpt", epoch=1, batch=2)
    first = train(make, callbacks=[stop], **DDP)
    return [plain(first, stop), plain(train(make, ckpt_path=folder / "stop.ckpt", seed=9, **DDP))]


def callback_alone(folder: Path) -> list[dict[str, Any]]:
    def make() -> Any:
        return DataLoader(Numbers(22), batch_size=2, shuffle=True)

    def callback() -> StatefulDataCallback:
        return StatefulDataCallback(seed=7)

    stop = StopAt("on_train_batch_end", folder / "stop.ckpt", epoch=1, batch=2)
    first = train(make, callbacks=[callback(), stop], **DDP)
    resumed = train(make, callbacks=[callback()], ckpt_path=folder / "stop.ckpt", seed=9, **DDP)
    return [plain(first, stop), plain(resumed), plain(train(make, callbacks=[callback()], **DDP))]


def exception_on_one_rank(folder: Path) -> list[dict[str, Any]]:
    """Rank 0 saves in its exception hook; no collective is needed for the data's state."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 8:
                trainer.should_stop = True
                state = trainer.datamodule.state_dict()["lightning_stateful"] if trainer.is_global_zero else None
                self.state = state

    save = Save()
    first = train(callbacks=[save], **DDP)
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, save.state)
    return [plain(first), {"state": states[0]}]


def signals_inside_a_step(folder: Path) -> list[list[dict[str, Any]]]:
    """Every rank gets a signal in a step of its own, or only one rank gets it; with SLURM, the first then SIGTERM."""
    rank = torch.distributed.get_rank()
    enter_slurm_job(folder, os.environ.__setitem__, rank=rank, num_ranks=2)
    runs = []
    for signum, steps in [(signal.SIGUSR1, (7, 8)), (signal.SIGTERM, (-1, 8)), (signal.SIGINT, (8, 9))]:
        own = folder / signum.name
        first, saver = seeded(partial(SignalledInStep, signum, steps[rank])), OnExceptionCheckpoint(own)
        options = {**DDP, "plugins": [SLURMEnvironment()], "default_root_dir": own}
        with contextlib.suppress(SIGTERMException, SystemExit):
            train(model=first, callbacks=[saver], **options)
        saved = "hpc_ckpt_1.ckpt" if signum == signal.SIGUSR1 else "on_exception.ckpt"
        resumed = train(ckpt_path=own / saved, seed=9, **options)
        runs.append([{"ledger": first.ledger}, plain(resumed)])
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    return runs


def states_of_all_ranks(folder: Path) -> dict[str, Any]:
    run = train(**{**DDP, "max_steps": 8})
    return {
        "module": run.trainer.datamodule.state_dict(),
        "callback": next(c for c in run.trainer.callbacks if isinstance(c, StatefulDataCallback)).state_dict(),
    }


def saved_on_two_ranks(folder: Path) -> dict[str, Any]:
    run = train(**{**DDP, "max_steps": 8})
    run.trainer.save_checkpoint(folder / "two.ckpt")
    return plain(run)


def resumed_on_two_ranks(folder: Path) -> dict[str, Any]:
    return plain(train(ckpt_path=folder.parent / "one.ckpt", **DDP))


def other_lengths(folder: Path) -> Any:
    rank = torch.distributed.get_rank()
    return train(lambda: numbers_module(train=Numbers(22 + 4 * rank)), **DDP)


def other_seeds(folder: Path) -> Any:
    rank = torch.distributed.get_rank()
    return train(lambda: numbers_module(seed=rank), **DDP)


def fails_on_one_rank(folder: Path) -> Any:
    class Breaks(StatefulDataModule):
        def train_dataloader(self) -> Any:
            if torch.distributed.get_rank() == 1:
                raise OSError("disk not mounted")
            return super().train_dataloader()

    return train(lambda: Breaks(Numbers(22)), **DDP)


def evaluating_trainer(**options: Any) -> pl.Trainer:
    """A quiet trainer on two ranks."""
    return pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


def evaluation(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for length in (1, 2, 3, 5, 8, 9):
        for batch_size in (1, 2, 3):
            model = LedgerModel()
            trainer = evaluating_trainer()
            data = StatefulDataModule(val=Numbers(length), batch_size=batch_size)
            trainer.validate(model, datamodule=data, verbose=False)
            found[f"{length},{batch_size}"] = [event[4] for event in model.ledger]
    return found


def plain_evaluation_loaders(folder: Path) -> dict[str, Any]:
    model = LedgerModel()
    trainer = evaluating_trainer(callbacks=[StatefulDataCallback()])
    found = {}
    for how in ("validate", "test", "predict"):
        model.ledger.clear()
        options = {} if how == "predict" else {"verbose": False}
        getattr(trainer, how)(model, dataloaders=DataLoader(Numbers(7), batch_size=2), **options)
        found[how] = [event[-1] for event in model.ledger]
    return found


def tested_on_rank_0(folder: Path) -> dict[str, Any]:
    """Rank 0 alone tests what all ranks have been fitted on, within the fit and after it."""
    seen = {}

    def test_alone(name: str, data: Any) -> None:
        if torch.distributed.get_rank() == 0:
            model = LedgerModel()
            trainer = pl.Trainer(
                accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False
            )
            trainer.test(model, datamodule=data, verbose=False)
            seen[name] = [event[2] for event in model.ledger]

    class Tests(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            test_alone("within", numbers_module(test=Numbers(5)))

    data = numbers_module(test=Numbers(5))
    fitted = train(lambda: data, callbacks=[Tests()], **{**DDP, "max_epochs": 1})
    test_alone("after", data)
    stream = stream_module(chunks(), test=chunks((3, 2)), val=None)
    train(lambda: stream, **{**DDP, "max_epochs": 1})
    test_alone("stream", stream)
    return {"seen": seen, "steps": fitted.global_step}


def dropout_by_rank(folder: Path) -> list[float]:
    class Draws(LedgerModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.drawn = [*getattr(self, "drawn", []), float(torch.rand(()))]
            return super().training_step(batch, batch_idx)

    torch.manual_seed(1)
    model = Draws()
    train(model=model, **{**DDP, "max_epochs": 1})
    return model.drawn


ALL = [
    uninterrupted,
    uninterrupted_with_windows,
    every_moment,
    every_moment_in_windows,
    chain,
    with_workers,
    callback_alone,
    exception_on_one_rank,
    states_of_all_ranks,
    saved_on_two_ranks,
    resumed_on_two_ranks,
    other_lengths,
    other_seeds,
    fails_on_one_rank,
    evaluation,
    plain_evaluation_loaders,
    tested_on_rank_0,
    dropout_by_rank,
    signals_inside_a_step,
]
