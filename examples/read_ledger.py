"""Reads the ledger of a run that was stopped and resumed, in cells that editors show as a notebook."""

# %% [markdown]
# # What was a run trained on?
#
# A run writes a ledger, is stopped in the middle of an epoch, and goes on from an older checkpoint. Then its ledger is
# read. Cells begin with `# %%`, so that editors show this file as a notebook; it runs as a script, too.

# %% A run in two starts, the second of which goes on from a checkpoint 12 batches before the end of the first.
from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from byte_model import ByteModel, SourceBytes
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.audit import read_ledger

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
num_samples = 320 if "--fast" in sys.argv else 3200
steps = num_samples // 16
folder = Path(tempfile.mkdtemp())


def train(max_steps: int, ckpt_path: Path | None = None) -> None:
    """One start of the run."""
    torch.manual_seed(0)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps // 4, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver, StatefulDataCallback(ledger=folder / "ledger")],
    )
    data = StatefulDataModule(SourceBytes(num_samples), batch_size=16, seed=0)
    trainer.fit(ByteModel(), datamodule=data, ckpt_path=ckpt_path)


stop = steps // 2 + steps // 5
train(max_steps=stop)
train(max_steps=2 * steps, ckpt_path=folder / f"step={steps // 4 * 2}.ckpt")

# %% The ledger stitches both starts by the checkpoint: nothing came twice, nothing is missing.
ledger = read_ledger(folder / "ledger")
print(ledger)
assert ledger.findings() == []

# %% How many samples of the second epoch was the run trained on?
print("samples of epoch 1:", sum(ledger.items(epoch=1).values()), "of", num_samples)

# %% The same as a page with pictures, for people: open it in a browser.
if "--fast" not in sys.argv:
    from lightning_stateful.cli import main

    main(["report", str(folder / "ledger"), "-o", "report.html"])
