"""What commands say of data that a run's own code has changed: no more than a checkpoint shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support import command_data
from support.runs import quiet_trainer

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StateMismatchError

DATA = "support.command_data"


class Grows(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.datamodule
        data.pool = list(range(len(data.pool) + 4))


class Shifts(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.sampler.first += 3


class Mines(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (0, 1):
            data: Any = trainer.datamodule
            data.weights = [float(index) for index in range(22)]
            trainer.train_dataloader.sampler.weights = torch.tensor(data.weights, dtype=torch.double)


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


NOT_CALLED = {
    "TensorPool": "TensorPool.load_state_dict is not called here",
    "TrainerPool": "TrainerPool.load_state_dict cannot be called here, because it asks for its Trainer: 'NoneType'",
}


@pytest.mark.parametrize(("name", "said"), NOT_CALLED.items(), ids=NOT_CALLED)
def test_a_check_does_not_refuse_what_a_method_may_restore_that_it_does_not_call(
    tmp_path: Path, tell: Any, name: str, said: str
) -> None:
    made, path, factory = getattr(command_data, name), tmp_path / "step=3.ckpt", f"{DATA}:{name}"
    checkpoints(tmp_path, made(), Grows(), every=1, every_n_train_steps=1)
    quiet_trainer(Grows(), StatefulDataCallback(), max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(
        Zeros(), made(), ckpt_path=path
    )
    told = tell("check", path, factory)
    assert told.code == 0, told.out + told.err
    assert told.out.startswith(
        "resumes on 1 rank, if your code sets again what training had changed: next is batch 2 of epoch 1\n"
    )
    assert f"note: {said}" in told.out
    assert "(dataset.length: saved 12, now 8; " in told.out
    found = json.loads(tell("check", path, factory, "--json", "--devices", 2).out)
    assert (found["resumes"], found["next_batch"], len(found["notes"])) == (True, None, 3)
    # What is the Trainer's no such method restores.
    refused = tell("check", path, factory, "--seed", 3)
    assert (refused.code, "seed: saved" in refused.out) == (1, True)


@pytest.mark.filterwarnings("ignore:.*(was changed between two epochs|no longer yields what it did before training)")
def test_weights_that_changed_within_an_epoch_are_not_those_of_its_beginning(tmp_path: Path, tell: Any) -> None:
    factory = f"{DATA}:KeptWeights"
    checkpoints(tmp_path, command_data.KeptWeights(), Mines(), every=0, every_n_train_steps=1)
    within, later = tmp_path / "step=3.ckpt", tmp_path / "step=8.ckpt"
    with pytest.raises(StateMismatchError, match="sequence at item"):
        quiet_trainer(StatefulDataCallback(), max_epochs=2).fit(Zeros(), command_data.KeptWeights(), ckpt_path=within)
    checked, listed = tell("check", within, factory), tell("trained", within, factory, "--epoch", 0)
    assert (checked.code, listed.code, listed.out) == (1, 2, ""), checked.out
    for said in (checked.out, listed.err):
        assert "sequence at item" in said
    # From the next epoch on they were so from its beginning.
    assert [tell("trained", later, factory, "--epoch", epoch).code for epoch in (0, 1)] == [2, 0]
    assert tell("check", later, factory).code == 0
    before = tmp_path / "step=1.ckpt"
    assert [tell("check", before, factory).code, tell("trained", before, factory, "--epoch", 0).code] == [0, 0]
