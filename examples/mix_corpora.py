"""Train the byte model on three corpora in changing proportions, stop in the middle of an epoch, and go on.

The corpora are parts of Python's standard library: its modules, the text of its help pages, and its encoding tables.
Each has windows of a length of its own, so a batch comes from one of them. The weights move from mostly tables to
mostly modules over the first sixty steps. The run is stopped, resumed in fresh objects, and compared with one that is
not stopped.
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
from byte_model import ByteModel, SourceBytes

from lightning_stateful import MixtureDataModule, WeightSchedule


class Shares(pl.Callback):
    """Remembers which corpus every batch came from, and which samples it held."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the corpus and the samples."""
        self.batches.append((batch["corpus"], batch["index"].tolist()))


def corpora() -> MixtureDataModule:
    """The data; a new module for every run."""
    return MixtureDataModule(
        {
            "modules": SourceBytes(4000, 64),
            "help": SourceBytes(2000, 96, pattern="pydoc_data/*.py"),
            "tables": SourceBytes(1000, 32, pattern="encodings/*.py"),
        },
        batch_size={"modules": 16, "help": 8, "tables": 32},
        schedule=WeightSchedule(
            {0: {"modules": 1, "help": 2, "tables": 7}, 60: {"modules": 7, "help": 2, "tables": 1}}, between="linear"
        ),
        num_steps=40,
        tag="corpus",
        seed=0,
    )


def train(shares: Shares, *, max_steps: int, ckpt_path: Path | None = None) -> tuple[pl.Trainer, ByteModel]:
    """Fit a fresh model on fresh data."""
    torch.manual_seed(0)
    model = ByteModel()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[shares],
    )
    trainer.fit(model, datamodule=corpora(), ckpt_path=ckpt_path)
    return trainer, model


def main() -> None:
    """Train without a stop, and with one; print the shares of every twenty steps and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop", type=int, default=47, help="step after which the second run is stopped")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    whole, first, second = Shares(), Shares(), Shares()
    _, expected = train(whole, max_steps=options.steps)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "stopped.ckpt"
        trainer, _ = train(first, max_steps=options.stop)
        trainer.save_checkpoint(checkpoint)
        _, resumed = train(second, max_steps=options.steps, ckpt_path=checkpoint)

    print("steps      modules  help  tables")
    for begin in range(0, options.steps, 20):
        names = [name for name, _ in whole.batches[begin : begin + 20]]
        counts = [names.count(name) for name in ("modules", "help", "tables")]
        print(f"{begin:3d} to {begin + 19:3d}  {counts[0]:7d}  {counts[1]:4d}  {counts[2]:6d}")
    same_batches = first.batches + second.batches == whole.batches
    pairs = zip(expected.state_dict().values(), resumed.state_dict().values(), strict=True)
    same_weights = all(torch.equal(a, b) for a, b in pairs)
    print(f"stopped after step {options.stop} and resumed: same batches {same_batches}, same weights {same_weights}")
    if not (same_batches and same_weights):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
