"""A training script of several ranks on streams of all kinds that is killed; ranks write what they do."""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_stateful import MixedStream, StatefulDataCallback, StreamDataModule
from support.ledger import LedgerModel
from support.runs import Outcome, seeded, train
from support.stream_ranks import files, on_ranks
from support.stream_runs import Own, OwnWithState, chunks, hugging_face, length_of, two_streams
from support.text_cases import Settle

NUM_EPOCHS, NUM_STEPS = 2, 12
KINDS = 10


def loaders(folder: Path) -> dict[str, Any]:
    """Of each kind a loader, with and without workers, that gives a batch to every step."""

    def loader(stream: Any, num_workers: int = 0, **options: Any) -> Any:
        if "max_tokens" not in options:
            options["batch_size"] = 2
        # Those who wait for the dead give up before the tests do.
        options |= {"steps_per_epoch": NUM_STEPS, "buffer_size": 5, "timeout": 20}
        more = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        return StreamDataModule(stream, seed=7, **options, **more).train_dataloader()

    return {
        "chunks": loader(chunks()),
        "chunks, workers": loader(chunks(), 2),
        "tokens": loader(chunks(), max_tokens=18, length=length_of, read_ahead=6),
        "parquet": loader(hugging_face(folder, "parquet")),
        "json, workers": loader(hugging_face(folder, "json"), 2),
        "batched map": loader(hugging_face(folder, "batched map")),
        "mixed": loader(MixedStream(two_streams(folder), weights=[2, 1], by="sample")),
        "own with a state": loader(OwnWithState()),
        "own with a state, workers": loader(OwnWithState(), 2),
        "own": loader(Own()),
    }


class Writes(LedgerModel):
    """Appends every batch of every loader to a file before it is trained on."""

    def __init__(self, path: Path, data: Path) -> None:
        super().__init__()
        self.path, self.data = path, data

    def train_dataloader(self) -> Any:
        return loaders(self.data)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        served = {name: part["id"].tolist() for name, part in batch.items()}
        with self.path.open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, served]) + "\n")
        return super().training_step(batch, batch_idx)


def run(folder: Path) -> Outcome:
    """Train, from the last checkpoint if there is one."""
    last = folder / "last.ckpt"
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    return train(
        lambda: None,
        model=seeded(partial(Writes, folder / f"ledger{os.environ['RANK']}.jsonl", files(folder))),
        callbacks=[saver, StatefulDataCallback(seed=7), Settle()],
        ckpt_path=last if last.exists() else None,
        **on_ranks(max_epochs=NUM_EPOCHS),
    )


def killed_run(folder: Path) -> Any:
    """Go on where ranks were killed; the weights in the end."""
    return {name: value.tolist() for name, value in run(folder).weights.items()}


def not_killed(folder: Path) -> Any:
    """The same without being killed."""
    return killed_run(folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(Path(sys.argv[1]))
