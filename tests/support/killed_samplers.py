"""A training script of several ranks on loaders with all kinds of samplers that is killed; ranks write what they do."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from support import samplers
from support.ledger import LedgerModel, Numbers
from support.runs import Outcome, seeded
from support.sampler_cases import cuts_loader, torchdatas_distributed, train_with
from support.samplers import BATCHES, LENGTH, loader

NUM_EPOCHS, NUM_STEPS = 3, 10
KINDS = 10


class Writes(LedgerModel):
    """Appends every batch of every loader to a file before it is trained on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def train_dataloader(self) -> Any:
        made = {
            "replaced": loader(sampler=RandomSampler(range(LENGTH), replacement=True)),
            "subset": loader(sampler=SubsetRandomSampler(range(LENGTH))),
            "weighted": loader(sampler=WeightedRandomSampler(samplers.WEIGHTS, LENGTH)),
            "balanced": loader(batch_sampler=samplers.ClassBalanced(num_batches=2 * NUM_STEPS)),
            "shuffled": loader(batch_sampler=samplers.ShuffledBatches(3 * BATCHES)),
            "global": loader(sampler=samplers.GlobalRandom()),
            "unsized": loader(sampler=samplers.WithoutLen()),
            "torchdata's sampler": torchdatas_distributed(batch_size=1),
            "torchdata's loader": StatefulDataLoader(Numbers(LENGTH), sampler=samplers.GlobalRandom()),
            "lhotse's": cuts_loader(65),
        }
        return CombinedLoader(made, "min_size")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        served = {name: part["id"].tolist() for name, part in batch.items()}
        with self.path.open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, served]) + "\n")
        return super().training_step(batch, batch_idx)


def run(folder: Path) -> Outcome:
    """Train, from the last checkpoint if there is one."""
    last = folder / "last.ckpt"
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    path = folder / f"ledger{os.environ['RANK']}.jsonl"
    return train_with(
        None,
        model=seeded(lambda: Writes(path)),
        callbacks=[saver],
        ckpt_path=last if last.exists() else None,
        max_epochs=NUM_EPOCHS,
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
