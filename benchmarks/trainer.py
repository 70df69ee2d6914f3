"""Bytes and seconds that a Lightning checkpoint gains by the state of the data."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Row, interleave, report, seconds, target
from lightning_stateful import StatefulDataModule

CLAIM = (
    "A checkpoint of a Trainer with a StatefulDataModule beside one with a plain LightningDataModule: both in the "
    "middle of an epoch of ten million samples, with a small model, so that the difference can be seen."
)
SAMPLES = 10**7
STEPS = 50
SAVES = 20
ROUNDS = 7


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
    report("trainer", CLAIM, {"A checkpoint of a small model": rows}, targets)


if __name__ == "__main__":
    main()
