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
    """The record of a run on one rank, as plain data.

    Attributes:
        trained: Of every batch, the epoch and the samples.
        error: What ended the run, with its type; nothing of one that came to its end.
        said: Warnings of the package that a resume is not exact.
        saved: The number of batches before the checkpoint was written; 0 where none was.
    """

    trained: list[tuple[int, list[int]]] = field(default_factory=list)
    error: str = ""
    said: list[str] = field(default_factory=list)
    saved: int = 0

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


class Saves(pl.Callback):
    """Writes a checkpoint after so many batches, by default after half as many in the second epoch as the first had."""

    def __init__(self, run: Run, path: Path, after: int | None) -> None:
        self.run, self.path, self.after = run, path, after

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        in_middle = trainer.current_epoch == 1 and len(self.run.epoch(1)) == max(len(self.run.epoch(0)) // 2, 1)
        if in_middle if self.after is None else len(self.run.trained) == self.after:
            trainer.save_checkpoint(self.path)
            self.run.saved = len(self.run.trained)


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
    ckpt_path: Path | None = None,
    save: Path | None = None,
    after: int | None = None,
) -> Run:
    """Train on fresh objects of an entry.

    Args:
        entry: Of the table.
        own: With the callback.
        workers: Of the loader.
        ckpt_path: The checkpoint that it goes on from.
        save: Where a checkpoint is written.
        after: After so many batches; by default in the middle of the second epoch.
    """
    run = Run()
    with _heard(run):
        try:
            _fit(entry, run, own, workers, ckpt_path, save, after)
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"
    return run


def _fit(
    entry: Entry, run: Run, own: bool, workers: int, ckpt_path: Path | None, save: Path | None, after: int | None
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
        callbacks=[
            *data.callbacks,
            *([StatefulDataCallback()] if own else []),
            *([Saves(run, save, after)] if save else []),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(Records(run), datamodule=data, ckpt_path=ckpt_path)


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
        own: With it; a checkpoint is written in the middle of the second epoch.
        resumed: From there, with fresh objects.
    """

    plain: Run
    own: Run
    resumed: Run = field(default_factory=Run)


def try_entry(entry: Entry, checkpoint: Path, workers: int = 0) -> Trial:
    """All runs of an entry on the ranks that there are; the checkpoint is left behind."""
    is_compared = num_ranks() == 1 or entry.deals != "nobody"
    plain = train(entry, own=False, workers=workers) if is_compared else Run()
    trial = Trial(plain, train(entry, workers=workers, save=checkpoint))
    if trial.own.saved and not trial.own.error:
        trial.resumed = train(entry, workers=workers, ckpt_path=checkpoint)
    return trial
