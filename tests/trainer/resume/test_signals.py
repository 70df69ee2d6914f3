"""Runs ended from outside: SLURM requeues, Ctrl-C, SIGTERM, and SIGKILL at a moment that nobody chose."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.ledger import LedgerModel
from support.ranks import kill, ledger_of, start, wait_for_steps
from support.runs import assert_same_end, assert_stitches, numbers_module, seeded, train
from support.signalled import SignalledInStep, enter_slurm_job


def test_22_a_run_ended_by_sigterm_goes_on_exactly(tmp_path: Path) -> None:
    class Preempted(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 14:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "stop.ckpt")

    model = seeded(LedgerModel)
    with pytest.raises(SIGTERMException):
        train(callbacks=[Preempted()], model=model)
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = train()
    assert_stitches([model.ledger, resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_slurm_job(tmp_path, monkeypatch.setenv)


@pytest.mark.parametrize(
    ("step", "options"), [(1, {}), (10, {}), (14, {"accumulate_grad_batches": 2, "val_check_interval": 4})], ids=str
)
def test_a_slurm_job_requeued_inside_an_optimizer_step_goes_on_exactly(
    tmp_path: Path, slurm: Path, step: int, options: dict[str, Any]
) -> None:
    model = seeded(lambda: SignalledInStep(signal.SIGUSR1, step))
    with pytest.raises(SIGTERMException):
        train(model=model, default_root_dir=tmp_path, **options)
    assert slurm.read_text() == "requeue 1234\n"
    resumed = train(seed=99, default_root_dir=tmp_path, **options)  # Lightning finds hpc_ckpt_1.ckpt by itself
    whole = train(default_root_dir=tmp_path / "whole", **options)
    assert_stitches([model.ledger, resumed.ledger], whole.ledger)
    assert_same_end(resumed, whole)


class SignalledInValidation(LedgerModel):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        if (self.current_epoch, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("averaging", ["none", "WeightAveraging"])
@pytest.mark.filterwarnings("ignore:.*is in eval mode.*")
def test_a_slurm_job_requeued_in_a_validation_goes_on_exactly(tmp_path: Path, slurm: Path, averaging: str) -> None:
    def callbacks() -> list[Any]:
        kind = getattr(pl.callbacks, averaging, None)  # WeightAveraging swaps the weights in a validation
        return [] if kind is None else [kind()]

    model = seeded(SignalledInValidation)
    with pytest.raises(SIGTERMException):
        train(model=model, callbacks=callbacks(), default_root_dir=tmp_path)
    resumed = train(seed=99, callbacks=callbacks(), default_root_dir=tmp_path)
    whole = train(callbacks=callbacks(), default_root_dir=tmp_path / "whole")
    assert_stitches([model.ledger, resumed.ledger], whole.ledger)
    assert_same_end(resumed, whole)


def test_ctrl_c_inside_an_optimizer_step_ends_the_batch_first(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "stop.ckpt")

    model = seeded(lambda: SignalledInStep(signal.SIGINT, 14))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        train(callbacks=[Save()], model=model)
    assert signal.getsignal(signal.SIGINT) is before
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = train()
    assert_stitches([model.ledger, resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


def test_a_second_ctrl_c_does_not_wait_for_the_batch() -> None:
    class Stuck(LedgerModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                self.ledger.append("interrupted")
            return super().training_step(batch, batch_idx)

    model = seeded(Stuck)
    with pytest.raises(SystemExit):
        train(model=model)
    assert model.ledger == [("epoch start", 0), "interrupted"]


class Writes(LedgerModel):
    """Appends every batch to a file that survives the process, before it is trained on and so before its checkpoint."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, batch["id"].tolist()]) + "\n")
        return super().training_step(batch, batch_idx)


def run_in(folder: Path, workers: int) -> None:
    """Train twelve epochs, from the last checkpoint if there is one, with a checkpoint every step."""
    last = folder / "last.ckpt"
    found = train(
        lambda: numbers_module(num_workers=workers),
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)],
        ckpt_path=last if last.exists() else None,
        model=seeded(lambda: Writes(folder / "ledger0.jsonl")),
        max_epochs=12,
    )
    weights = {name: value.tolist() for name, value in found.weights.items()}
    (folder / "weights.json").write_text(json.dumps(weights))


def test_a_run_killed_twice_trains_on_exactly_the_uninterrupted_batches(tmp_path: Path) -> None:
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    for count in (15, 50):
        process = start(run_in, folder, 2, log=tmp_path / "log")
        wait_for_steps(count, [process], folder)
        kill([process])
    process = start(run_in, folder, 2, log=tmp_path / "log")
    process.join(120)
    assert process.exitcode == 0
    run_in(whole, 0)
    # A kill between the step and its checkpoint repeats that step, to the same weights.
    ours = ledger_of(folder)
    once = [line for i, line in enumerate(ours) if line not in ours[max(i - 3, 0) : i]]
    assert once == ledger_of(whole)
    assert len(ours) - len(once) <= 2
    assert json.loads((folder / "weights.json").read_text()) == json.loads((whole / "weights.json").read_text())
