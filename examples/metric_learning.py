"""Metric learning in a Trainer with a batch sampler of one's own: stopped in the middle of an epoch, resumed.

The sampler draws class-balanced batches from Python's global generator, and knows nothing of checkpoints. One callback
is added to an ordinary Lightning script. The samples are names of functions in Python's standard library, the classes
the modules that they come from.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from names import ClassBalanced, Encoder, Names, contrastive_loss, digest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback


class MetricModel(pl.LightningModule):
    """An encoder, its loss, and its loader; notes what it is trained on."""

    def __init__(self, names: Names, num_batches: int) -> None:
        super().__init__()
        self.encoder, self.names, self.num_batches = Encoder(), names, num_batches
        self.trained: list[list[int]] = []

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of eight classes with four samples each."""
        return DataLoader(self.names, batch_sampler=ClassBalanced(self.names.labels, num_batches=self.num_batches))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        codes, labels = batch
        self.trained.append(codes.sum(1).tolist())
        loss = contrastive_loss(self.encoder(codes), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(
    names: Names, num_batches: int, *, max_steps: int, ckpt_path: Path | None = None
) -> tuple[pl.Trainer, MetricModel]:
    """Fit a fresh model, with a sampler of its own."""
    torch.manual_seed(1)
    model = MetricModel(names, num_batches)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StatefulDataCallback(seed=7)],
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


def main() -> None:
    """Compare a run that was stopped with one that was not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--stop", type=int, default=70, help="step after which the second run is stopped")
    parser.add_argument("--fast", action="store_true", help="30 steps, stopped after 14")
    options = parser.parse_args()
    if options.fast:
        options.steps, options.stop = 30, 14
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    names, num_batches = Names(), options.steps // 3
    trainer, whole = train(names, num_batches, max_steps=options.steps)
    loss = float(trainer.callback_metrics["loss"])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "stopped.ckpt"
        stopped, before = train(names, num_batches, max_steps=options.stop)
        stopped.save_checkpoint(checkpoint)
        _, after = train(names, num_batches, max_steps=options.steps, ckpt_path=checkpoint)

    same_batches = before.trained + after.trained == whole.trained
    same_weights = digest(after.encoder) == digest(whole.encoder)
    print(f"loss after {options.steps} steps, in epochs of {num_batches}: {loss:.3f}")
    print(f"stopped after step {options.stop} and resumed: same batches {same_batches}, same weights {same_weights}")
    if not (same_batches and same_weights):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
