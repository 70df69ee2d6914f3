"""Buffers that no checkpoint holds: those that training has changed are named on a resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning


class Mean(torch.nn.Module):
    """A running mean, and a table that stays as it was built."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()), persistent=persistent)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Model(BoringModel):
    """Averages its losses over an epoch."""

    def __init__(self, *, persistent: bool, restores: bool = False) -> None:
        super().__init__()
        self.mean, self.restores = Mean(persistent=persistent), restores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.total += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.mean.total.zero_()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["total"] = self.mean.total.clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.restores:
            self.mean.total.copy_(checkpoint["total"])


def run(folder: Path, path: Path | None = None, **how: bool) -> list[str]:
    """The warnings of a run of two epochs of four batches, which saves after each batch."""
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = quiet_trainer(
        *([] if path else [saver]),
        StatefulDataCallback(),
        max_epochs=2,
        limit_val_batches=0,
        enable_checkpointing=not path,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Model(**how), DataLoader([torch.ones(32)] * 8, batch_size=2), ckpt_path=path)
    return [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize(
    ("how", "step", "is_told"),
    [
        ({"persistent": False}, 2, True),
        ({"persistent": False}, 6, True),
        # Of the last batch of an epoch, at whose end it is summed up.
        ({"persistent": False}, 4, True),
        ({"persistent": False, "restores": True}, 2, False),
        ({"persistent": True}, 2, False),
    ],
)
def test_what_training_has_changed_and_a_resume_lacks_is_named(
    tmp_path: Path, how: dict[str, bool], step: int, is_told: bool
) -> None:
    assert run(tmp_path, **how) == []
    said = run(tmp_path, tmp_path / f"step={step}.ckpt", **how)
    told = ["no checkpoint holds (persistent=False)" in one and "mean.total" in one for one in said]
    assert told == [True] * is_told
    assert "table" not in "".join(said)
