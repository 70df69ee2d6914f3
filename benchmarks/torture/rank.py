"""The processes of a run: ranks that train with a Trainer, and go wrong where they are told to."""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from benchmarks.torture.kinds import KINDS, How, keys_of, samples_of
from lightning_stateful import StatefulDataCallback
from lightning_stateful.verify.launcher import environments_of_ranks

# Floats of the weights: one for each number of each epoch, and as many more as make a checkpoint the largest file.
NUM_WEIGHTS = 1 << 15
# Bytes that a file may have on a full disk: more than lines and the ledger take, fewer than a checkpoint.
FULL_DISK = 1 << 16
_SERVER = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Inside:
    """Something that a rank does to itself.

    Attributes:
        what: ``"raise"``, ``"kill"`` or ``"full disk"``.
        hook: In which hook, or in ``"training_step"``.
        after: After so many calls of it.
        rank: On which rank; None for all.
    """

    what: str
    hook: str = "on_train_batch_start"
    after: int = 0
    rank: int | None = 0


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        number: Its number, from 0.
        kind: The kind of data.
        folder: The folder of the run.
        how: How the data are read.
        num_epochs: Epochs of the run.
        every: Steps from checkpoint to checkpoint.
        saves_on_exception: Whether a checkpoint is written on an exception too.
        ckpt_path: The checkpoint that it goes on from.
        inside: What goes wrong inside.
    """

    number: int
    kind: str
    folder: Path
    how: How
    num_epochs: int
    every: int
    saves_on_exception: bool = False
    ckpt_path: Path | None = None
    inside: Inside | None = None

    def lines(self, rank: int) -> Path:
        """The file in which a rank writes what it trains on."""
        return self.folder / "lines" / f"{self.number:03}-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        """The file that has what a rank prints."""
        return self.folder / "logs" / f"{self.number:03}-{rank}.txt"

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints" / f"{self.number:03}"


class Counting(pl.LightningModule):
    """A model whose weights count how often it was trained on each number in each epoch.

    The gradient of a number's weight is one for each time it is in a batch, summed over ranks, and the optimizer takes
    steps of one. So a checkpoint proves by its weights alone what they were trained on.
    """

    def __init__(self, start: Start, rank: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(NUM_WEIGHTS))
        self.start, self.num_keys = start, KINDS[start.kind].num_keys
        self.file = os.open(start.lines(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Write down the batch, and count it."""
        samples = samples_of(batch)
        line = [self.current_epoch, batch_idx, self.global_step, samples]
        os.write(self.file, json.dumps(line).encode() + b"\n")
        os.fsync(self.file)
        go_wrong(self.trainer, "training_step")
        at = torch.tensor([key for one in samples for key in one]) + self.current_epoch * self.num_keys
        return -self.counts[at].sum() * self.trainer.world_size

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Steps of one."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


class GoWrong(pl.Callback):
    """Does to this rank what was drawn, once."""

    def __init__(self, inside: Inside) -> None:
        self.inside, self.calls = inside, 0
        if inside.hook != "training_step":
            setattr(self, inside.hook, self.call)

    def call(self, trainer: pl.Trainer, *args: Any) -> None:
        """Count a call of the hook."""
        self.calls += 1
        inside = self.inside
        if self.calls != inside.after + 1 or inside.rank not in (None, trainer.global_rank):
            return
        if inside.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if inside.what == "full disk":
            # A write beyond this fails with EFBIG, once SIGXFSZ is ignored, as Python does.
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return
        raise RuntimeError(f"torture: in {inside.hook}")


class Settle(pl.Callback):
    """Waits before workers are forked: a fork that meets gloo's threads at work may hang in CPython 3.11."""

    def on_train_epoch_start(self, *args: Any) -> None:
        """The first batch is asked for after this hook."""
        time.sleep(0.05)


def go_wrong(trainer: pl.Trainer, hook: str) -> None:
    """Let happen what is to happen in the model."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GoWrong) and callback.inside.hook == hook:
            callback.call(trainer)


def train(start: Start) -> None:
    """Train on this rank to the end, or to where something goes wrong."""
    kind, rank = KINDS[start.kind], int(os.environ["RANK"])
    key = {} if kind.has_index else {"ledger_key": keys_of}
    # Before or behind the package's own callback.
    wrong, is_first = [GoWrong(start.inside)] if start.inside else [], start.number % 2
    callbacks: list[Any] = [
        *(wrong if is_first else []),
        StatefulDataCallback(seed=3, ledger=start.folder / "ledger", **key),  # type: ignore[arg-type]
        ModelCheckpoint(start.checkpoints, "{step:06}", every_n_train_steps=start.every, save_top_k=-1),
        *([OnExceptionCheckpoint(start.checkpoints, "exception")] if start.saves_on_exception else []),
        *([] if is_first else wrong),
        *([Settle()] if start.how.workers else []),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp" if start.how.ranks > 1 else "auto",
        devices=start.how.ranks,
        max_epochs=start.num_epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = kind.make(start.folder, start.how)
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders"
    trainer.fit(Counting(start, rank), ckpt_path=start.ckpt_path, **{keyword: data})
    trainer.save_checkpoint(start.checkpoints / "end.ckpt")


def begin_ranks(start: Start) -> list[ForkServerProcess]:
    """Begin the ranks of a start, each in a session of its own, as torchrun would."""
    folder = {"TORTURE_FOLDER": str(start.folder)}
    return [
        begin(train, start, log=start.log(rank), **folder, **environment)
        for rank, environment in enumerate(environments_of_ranks(start.how.ranks))
    ]


def begin(function: Callable[..., Any], *arguments: Any, log: Path, **environment: str) -> ForkServerProcess:
    """Begin a function of a module in a process of its own, whose output goes to a file."""
    process = _SERVER.Process(target=_in_process, args=(function, arguments, log, environment))
    process.start()
    return process


def _in_process(
    function: Callable[..., Any], arguments: tuple[Any, ...], log: Path, environment: dict[str, str]
) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environment)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A run that hangs is sent SIGABRT, and its log then says where.
    faulthandler.enable(sys.stderr)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = function(*arguments)
    if isinstance(found, int):
        sys.exit(found)
