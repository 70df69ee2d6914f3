"""Runs of a tiny model that records the samples it trains on: with the callback and without it, stopped and resumed."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed

from harm.basics import num_ranks
from harm.table import Entry, WithCallback
from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

EPOCHS = 3
# A warning counts that says that a resume is not exact; that something was read again, or took long, does not.
_SAID = re.compile(r"exact|other (samples|batches|data)|begins? (anew|again)|from the beginning", re.IGNORECASE)


@dataclass
class Run:
    """What a run did on one rank, as plain data.

    Attributes:
        trained: Of every batch, the epoch and the samples.
        error: What ended the run, with its type; nothing of one that came to its end.
        said: Warnings of the package that a resume is not exact.
    """

    trained: list[tuple[int, list[int]]] = field(default_factory=list)
    error: str = ""
    said: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Ended by an error before its first step."""
        return bool(self.error) and not self.trained

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of an epoch."""
        return [batch for epoch, batch in self.trained if epoch == number]


class Records(pl.LightningModule):
    """One weight; it writes down the samples of every batch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.run = run

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.run.trained.append((self.current_epoch, batch.flatten().tolist()))
        if len(self.run.trained) > 200:
            raise RuntimeError("the epoch does not end")
        return self.weight * batch.float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class OfEntry(pl.LightningDataModule):
    """Makes the loader in its hook, as most users do: Lightning can rebuild a batch sampler for ranks only there."""

    def __init__(self, entry: Entry, workers: int) -> None:
        super().__init__()
        self.callbacks: list[pl.Callback] = []
        self.make = partial(entry.make, workers)
        if isinstance(entry.make, WithCallback):
            self.make, callback = entry.make(workers)
            self.callbacks.append(callback)

    def train_dataloader(self) -> Any:
        return self.make()


def train(
    entry: Entry,
    *,
    own: bool = True,
    workers: int = 0,
    max_steps: int = -1,
    ckpt_path: Path | None = None,
    save: Path | None = None,
) -> Run:
    """Train on fresh objects of an entry.

    Args:
        entry: Of the table.
        own: With the callback.
        workers: Of the loader.
        max_steps: Where the run is stopped.
        ckpt_path: What it goes on from.
        save: Where a checkpoint is written at the end.
    """
    run = Run()
    with _heard(run):
        try:
            _fit(entry, run, own, workers, max_steps, ckpt_path, save)
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"
    return run


def _fit(
    entry: Entry, run: Run, own: bool, workers: int, max_steps: int, ckpt_path: Path | None, save: Path | None
) -> None:
    pl.seed_everything(7, verbose=False)
    options: dict[str, Any] = dict(entry.trainer)
    if torch.distributed.is_initialized():
        options.update(strategy="ddp", devices=num_ranks())
    if entry.deals == "itself":
        options["use_distributed_sampler"] = False
    data = OfEntry(entry, workers)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        max_steps=max_steps,
        callbacks=[*data.callbacks, *([StatefulDataCallback()] if own else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(Records(run), datamodule=data, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)


@contextlib.contextmanager
def _heard(run: Run) -> Iterator[None]:
    """Keeps warnings, and what the package logs as such."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: run.said.append(record.getMessage())
    log = logging.getLogger("lightning_stateful")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        log.removeHandler(handler)
    run.said += [str(warning.message) for warning in caught if issubclass(warning.category, StatefulWarning)]
    run.said = [text for text in run.said if _SAID.search(text)]


@dataclass
class Trial:
    """The runs of an entry on one rank.

    Attributes:
        plain: Without the callback.
        own: With it.
        stopped: With it, stopped in the middle of the second epoch.
        resumed: From there, with fresh objects.
    """

    plain: Run
    own: Run
    stopped: Run = field(default_factory=Run)
    resumed: Run = field(default_factory=Run)


def try_entry(entry: Entry, checkpoint: Path, workers: int = 0) -> Trial:
    """All runs of an entry on the ranks that there are; the checkpoint is left behind."""
    is_compared = num_ranks() == 1 or entry.deals != "nobody"
    trial = Trial(train(entry, own=False, workers=workers) if is_compared else Run(), train(entry, workers=workers))
    if not trial.own.error and (stop := stop_of(trial.own)):
        trial.stopped = train(entry, workers=workers, max_steps=stop, save=checkpoint)
        if not trial.stopped.error:
            trial.resumed = train(entry, workers=workers, ckpt_path=checkpoint)
    return trial


def stop_of(run: Run) -> int:
    """The number of batches up to the middle of the second epoch; 0 where there is none."""
    first, second = len(run.epoch(0)), len(run.epoch(1))
    return first + second // 2 if second else 0
