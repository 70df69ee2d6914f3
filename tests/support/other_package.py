"""Runs by ``pytorch_lightning`` that are stopped and resumed; prints whether they went on exactly."""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler, LearningRateFinder
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import ConfigurationError


class Model(pl.LightningModule):
    """Lists the batches that it saw; those of validation as one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch) if isinstance(batch, list) else [batch]
        self.batches.append([int(sample) for part in parts for sample in part])
        return self.layer(torch.stack(parts).float().flatten()[:, None]).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.batches.append([-1, *batch.tolist()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def module_run() -> tuple[list[Any], dict[str, Any]]:
    """Callbacks, and what to fit: a data module."""
    data: Dataset[Any] = torch.arange(24)  # type: ignore[assignment]  # as good as one
    return [], {"datamodule": StatefulDataModule(data, data, batch_size=4, seed=1)}


def loaders_run() -> tuple[list[Any], dict[str, Any]]:
    """Callbacks, and what to fit: loaders of Lightning's own, with accumulation of its own."""
    loaders = [DataLoader(range(24), 4, shuffle=True), DataLoader(range(24, 48), 4)]
    callbacks = [StatefulDataCallback(seed=1), GradientAccumulationScheduler({0: 2, 1: 3})]
    return callbacks, {"train_dataloaders": CombinedLoader(loaders, "min_size")}


def fit(make: Any, *more: Any, ckpt_path: str | None = None, **limits: Any) -> tuple[pl.Trainer, Model]:
    """Train a new model."""
    callbacks, data = make()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, *more],
        **limits,
    )
    model = Model()
    trainer.fit(model, ckpt_path=ckpt_path, **data)
    return trainer, model


def main(path: str) -> None:
    """Stop within the second epoch, and go on."""
    for make, num_steps in ((module_run, 9), (loaders_run, 4)):
        whole = fit(make, max_epochs=3)[1]
        trainer, first = fit(make, max_steps=num_steps)
        trainer.save_checkpoint(path)
        rest = fit(make, max_epochs=3, ckpt_path=path)[1]
        goes_on = first.batches + rest.batches == whole.batches
        ends_alike = torch.equal(rest.layer.weight, whole.layer.weight)
        print(f"{make.__name__}: {len(first.batches)} + {len(rest.batches)} batches, {goes_on} {ends_alike}")
        try:
            fit(make, LearningRateFinder(), max_epochs=3, ckpt_path=path)
        except ConfigurationError as error:
            print(error)
    print("Beside it:", "lightning" in sys.modules)


if __name__ == "__main__":
    main(sys.argv[1])
