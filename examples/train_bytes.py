"""Train the byte model: an ordinary Lightning script with a StatefulDataModule.

Run it, kill it however you like, run it again: it goes on at the very next batch after its last checkpoint, on
as many processes as you say this time. ``kill_and_resume.py`` does just that and checks the result.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from byte_model import ByteModel, SourceBytes
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_stateful import StatefulDataModule


class Ledger(pl.Callback):
    """Writes down which samples each step of this rank trained on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open a file of this run's own."""
        run = len(list(self.folder.glob(f"rank{trainer.global_rank}-*.jsonl")))
        self.file = (self.folder / f"rank{trainer.global_rank}-{run}.jsonl").open("w", buffering=1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note step, epoch, batch and samples."""
        line = [trainer.global_step - 1, trainer.current_epoch, batch_idx, batch["index"].tolist()]
        self.file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train, from the last checkpoint in the folder if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for checkpoints and the ledger")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--quiet", action="store_true", help="no progress bar of its own")
    options = parser.parse_args()
    if options.quiet:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    torch.manual_seed(0)
    data = StatefulDataModule(
        SourceBytes(options.samples),
        val=SourceBytes(200, skip=options.samples),
        batch_size=options.batch_size,
        num_workers=1,
        seed=0,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.processes,
        strategy="ddp" if options.processes > 1 else "auto",
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=not options.quiet,
        enable_model_summary=False,
        callbacks=[
            Ledger(options.folder),
            ModelCheckpoint(options.folder, filename="last", every_n_train_steps=25, enable_version_counter=False),
        ],
    )
    last = options.folder / "last.ckpt"
    model = ByteModel()
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), options.folder / "weights.pt")


if __name__ == "__main__":
    main()
