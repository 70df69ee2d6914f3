"""What the DDP tests run on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from lightning_stateful import DDPSamplerWrapper, StatefulDataCallback, StatefulDataModule
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


OWN: dict[str, Any] = {**DDP, "use_distributed_sampler": False}


def data_of_each_rank(**options: Any) -> StatefulDataModule:
    first = 100 * torch.distributed.get_rank()
    defaults = {"train": Numbers(11, first=first), "val": Numbers(2 + first // 100, first=first), "test": None}
    return numbers_module(**{**defaults, **options})


def own_data(folder: Path) -> list[dict[str, Any]]:
    """Each rank trains, and is validated, on all of its own; it is not resumed on one rank."""
    stop = StopAt("on_train_batch_end", shared(folder, "own.ckpt"), epoch=1, batch=2)
    first = train(data_of_each_rank, callbacks=[stop], **OWN)
    resumed = train(data_of_each_rank, ckpt_path=folder / "own.ckpt", seed=9, **OWN)
    return [plain(first, stop), plain(resumed), plain(train(data_of_each_rank, **OWN))]


class Share(Sampler[int]):
    """Leaves each rank its share of a shuffle, and has a state that is true on its own rank only."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_replicas, self.start, self.at = rank, 2, 0, 0

    def __iter__(self) -> Iterator[int]:
        indices = torch.randperm(22).tolist()[self.rank :: self.num_replicas]
        self.at, self.start = self.start, 0
        for index in indices[self.at :]:
            self.at += 1
            yield index

    def __len__(self) -> int:
        return 22 // self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank
        self.start = state["at"]


def samplers_of_each_rank(folder: Path) -> dict[str, list[dict[str, Any]]]:
    rank, data, found = torch.distributed.get_rank(), Numbers(22), {}
    makers = {
        "torch": lambda: DataLoader(data, 2, sampler=DistributedSampler(data, 2, rank, seed=3)),
        "with a state": lambda: DataLoader(data, 2, sampler=Share(rank)),
        "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(Share(rank), 2, drop_last=False)),
        "wrapped": lambda: DataLoader(data, 2, sampler=DDPSamplerWrapper(RandomSampler(range(22)))),
    }
    for name, make in makers.items():

        def run(*callbacks: Any, make: Any = make, **options: Any) -> Outcome:
            return train(make, callbacks=[StatefulDataCallback(seed=7), *callbacks], **OWN, **options)

        path = shared(folder, f"{name}.ckpt")
        stop = StopAt("on_train_batch_end", path, epoch=1, batch=2)
        found[name] = [plain(run(stop), stop), plain(run(ckpt_path=path)), plain(run())]
    return found


def own_lengths_differ(folder: Path) -> Any:
    return train(lambda: data_of_each_rank(train=Numbers(22 + 4 * torch.distributed.get_rank())), **OWN)


def own_streams(folder: Path) -> Any:
    return train(lambda: stream_module(chunks()), **OWN)


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
    own_data,
    samplers_of_each_rank,
    own_lengths_differ,
    own_streams,
    dropout_by_rank,
    signals_inside_a_step,
]
