"""A training script of several ranks on several sources that is killed; each rank writes what it trains on."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from support.ledger import LedgerModel
from support.runs import Outcome, seeded
from support.source_cases import UNEVEN
from support.sources import datasets, mixture, train_on


class Writes(LedgerModel):
    """Appends every batch to a file before it is trained on: a rank is killed at any moment, another may save first."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, batch["id"].tolist()]) + "\n")
        return super().training_step(batch, batch_idx)


def run(folder: Path) -> Outcome:
    """Train, from the last checkpoint if there is one."""
    last = folder / "last.ckpt"
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    path = folder / f"ledger{os.environ['RANK']}.jsonl"
    return train_on(
        lambda: mixture(
            train=datasets(**UNEVEN), val=None, weights=[1, 2, 1], num_steps=10, num_workers=1, persistent_workers=True
        ),
        model=seeded(lambda: Writes(path)),
        callbacks=[saver],
        ckpt_path=last if last.exists() else None,
        max_epochs=5,
        strategy="ddp",
        devices=2,
    )


def not_killed(folder: Path) -> Any:
    """The same without being killed, among the other cases that the ranks run."""
    return {name: value.tolist() for name, value in run(folder).weights.items()}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    weights = {name: value.tolist() for name, value in run(folder).weights.items()}
    (folder / f"weights{os.environ['RANK']}.json").write_text(repr(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
