"""The cost of the callback and the data module in a Trainer: CPU time of a batch, bytes and seconds of a checkpoint."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Row, interleave, median_ratio, report, seconds, target
from lightning_stateful import StatefulDataCallback, StatefulDataModule

CLAIM = (
    "A checkpoint of a Trainer with a StatefulDataModule beside one with a plain LightningDataModule, and batches of a "
    "Trainer with StatefulDataCallback beside one without: in an epoch of ten million samples, with a small model, so "
    "that the difference can be seen."
)
SAMPLES = 10**7
STEPS = 50
SAVES = 20
ROUNDS = 7
OVER = "over Lightning, best"
BATCHES = 1000
WARM = 100
# Seconds of a step beside which the ledger is measured.
STEP = 0.01


class Rows(Dataset[torch.Tensor]):
    """Many equal samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(32)


class Plain(pl.LightningDataModule):
    """What people have."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """A loader without a state."""
        return DataLoader(Rows(), batch_size=4)


def trained(data: pl.LightningDataModule) -> pl.Trainer:
    """A trainer that stopped in the middle of an epoch."""
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), datamodule=data)
    return trainer


class Clock(pl.Callback):
    """CPU seconds of this process for all batches but the first ones."""

    began = took = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note when the first ones, and all, have been trained on."""
        if trainer.global_step == WARM:
            self.began = time.process_time()
        self.took = time.process_time() - self.began


class Calls:
    """CPU seconds that a callback's ledger spends in what it is called for at every batch.

    Args:
        callback: The callback.
    """

    def __init__(self, callback: StatefulDataCallback) -> None:
        self.took = 0.0
        for name in ("note", "begin_batch", "end_batch"):
            setattr(callback.settings.ledger, name, self._timed(getattr(callback.settings.ledger, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            began = time.process_time()
            call(*args)
            self.took += time.process_time() - began

        return run


def of_ledger_alone(folder: str) -> float:
    """CPU seconds of a batch that the ledger's own calls take."""
    callback = StatefulDataCallback(ledger=folder)
    calls = Calls(callback)
    batches([callback], 0)
    return calls.took / (WARM + BATCHES)


def batches(callbacks: list[pl.Callback], num_workers: int) -> float:
    """CPU seconds of this process for ``BATCHES`` batches."""
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=WARM + BATCHES,
        callbacks=[*callbacks, clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), DataLoader(Rows(), batch_size=4, num_workers=num_workers))
    return clock.took


def costs(num_workers: int) -> tuple[list[Row], list[Row]]:
    """The CPU time of a batch with the callback and without."""
    plain, stateful, of_data = "Lightning", "StatefulDataCallback", "StatefulDataCallback(seed_model=False)"
    with_ledger = "StatefulDataCallback(ledger=...)"
    with tempfile.TemporaryDirectory() as folder:
        tasks = {
            plain: lambda: batches([], num_workers),
            stateful: lambda: batches([StatefulDataCallback()], num_workers),
            of_data: lambda: batches([StatefulDataCallback(seed_model=False)], num_workers),
            with_ledger: lambda: batches([StatefulDataCallback(ledger=folder)], num_workers),
        }
        figures = interleave(tasks, ROUNDS)
        alone = min(of_ledger_alone(folder) for _ in range(3))
    rows = [
        {
            "callback": name,
            "us of CPU a batch, best": min(took) / BATCHES * 1e6,
            OVER: min(took) / min(figures[plain]),
            "over Lightning, median": 1 / median_ratio(figures[plain], took),
        }
        for name, took in figures.items()
    ]
    of_ledger = (min(figures[with_ledger]) - min(figures[stateful])) / BATCHES / STEP
    return rows, [
        target(f"callback over Lightning, {num_workers} workers", rows[1][OVER], at_most=1.05),
        target(f"ledger, share of a step of 10 ms, {num_workers} workers", of_ledger, at_most=0.01),
        target("ledger, its calls alone, share of a step of 10 ms", alone / STEP, at_most=0.01),
    ]


def save(trainer: pl.Trainer, path: Path) -> Callable[[], float]:
    """Seconds of one save, over many."""

    def run() -> None:
        for _ in range(SAVES):
            trainer.save_checkpoint(path)

    return lambda: seconds(run) / SAVES


def main() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    modules: dict[str, Any] = {"LightningDataModule": Plain(), "StatefulDataModule": StatefulDataModule(Rows())}
    trainers = {name: trained(module) for name, module in modules.items()}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.ckpt" for name in trainers}
        tasks = {name: save(trainer, paths[name]) for name, trainer in trainers.items()}
        figures = interleave(tasks, ROUNDS)
        sizes = {name: path.stat().st_size for name, path in paths.items()}
    rows: list[Row] = [
        {"data module": name, "bytes": sizes[name], "ms for a save": min(figures[name]) * 1e3} for name in trainers
    ]
    gained = sizes["StatefulDataModule"] - sizes["LightningDataModule"]
    targets = [target("bytes gained in the file", gained, at_most=2048)]
    tables = {"A checkpoint of a small model": rows}
    for num_workers in (0, 2):
        tables[f"A batch of a small model, {num_workers} workers"], of_batches = costs(num_workers)
        targets += of_batches
    report("trainer", CLAIM, tables, targets)


if __name__ == "__main__":
    main()
