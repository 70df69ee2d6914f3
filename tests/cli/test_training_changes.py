"""What commands say of data that a run's own code has changed: no more than a checkpoint shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support import command_data
from support.runs import quiet_trainer

from lightning_stateful import StatefulDataCallback

DATA = "support.command_data"


class Grows(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.datamodule
        data.pool = list(range(len(data.pool) + 4))


class Shifts(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.sampler.first += 3


class Zeros(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer.weight.sum()


def checkpoints(folder: Path, data: Any, hook: pl.Callback, *, every: int, **when: Any) -> None:
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **when)
    trainer = quiet_trainer(
        hook,
        StatefulDataCallback(),
        saver,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=every,
        enable_checkpointing=True,
    )
    trainer.fit(Zeros(), data)


def test_check_restores_what_a_data_module_does_and_names_what_nothing_restores(tmp_path: Path, tell: Any) -> None:
    for name in ("KeptPool", "Pool"):
        made, folder = getattr(command_data, name)(), tmp_path / name
        checkpoints(folder, made, Grows(), every=1, every_n_train_steps=1)
        checkpoints(folder / "ends", getattr(command_data, name)(), Grows(), every=1, save_on_train_epoch_end=True)
    kept = tell("check", tmp_path / "KeptPool" / "step=3.ckpt", f"{DATA}:KeptPool")
    assert (kept.code, kept.out) == (0, "resumes on 1 rank: next is batch 2 of 3 of epoch 1\n"), kept.out + kept.err
    ended = tell("check", tmp_path / "KeptPool" / "ends" / "step=2.ckpt", f"{DATA}:KeptPool")
    # How many batches the loader will have that is built then is not known.
    assert ended.code == 0
    assert ended.out.startswith("resumes on 1 rank: next is batch 1 of epoch 1\nnote: The training loader is another")
    lost = tell("check", tmp_path / "Pool" / "ends" / "step=2.ckpt", f"{DATA}:Pool")
    assert "if your code sets again what training had changed" in lost.out
    assert "Training had changed pool when the checkpoint was written" in lost.out
    listed = tell("trained", tmp_path / "KeptPool" / "step=3.ckpt", f"{DATA}:KeptPool", "--epoch", 1)
    assert (listed.code, "epoch 1 may have had others" in listed.err) == (0, True)


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs")
def test_indices_of_a_sampler_that_training_changed_are_not_made_up(tmp_path: Path, tell: Any) -> None:
    checkpoints(tmp_path, command_data.curriculum(), Shifts(), every=0, every_n_train_steps=1)
    first = tell("trained", tmp_path / "step=2.ckpt", f"{DATA}:curriculum", "--epoch", 0)
    assert (first.code, first.out.splitlines()[0]) == (0, "epoch 0, step 0, rank 0: 0 1 2 3")
    later = tell("trained", tmp_path / "step=4.ckpt", f"{DATA}:curriculum", "--epoch", 1)
    assert (later.code, later.out) == (2, "")
    assert "FromFirst had been changed in training" in later.err
    checked = tell("check", tmp_path / "step=4.ckpt", f"{DATA}:curriculum")
    assert "resumes on 1 rank, if your code sets again what training had changed" in checked.out
