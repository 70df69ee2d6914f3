"""A training script that is killed: writes what it trains on, line by line, and a checkpoint every step."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from support.ledger import LedgerModel
from support.runs import numbers_module, train


class Writes(LedgerModel):
    """Appends every batch to a file that survives the process, before it is trained on and so before its checkpoint."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, batch["id"].tolist()]) + "\n")
        return super().training_step(batch, batch_idx)


def main(folder: Path, workers: int) -> None:
    """Train, from the last checkpoint if there is one."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    last = folder / "last.ckpt"
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    model = Writes(folder / "ledger.jsonl")
    run = train(
        lambda: numbers_module(num_workers=workers),
        callbacks=[saver],
        ckpt_path=last if last.exists() else None,
        model=model,
        max_epochs=12,
    )
    weights = {name: value.tolist() for name, value in run.weights.items()}
    (folder / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
