"""Runs ended from outside: SLURM requeues, Ctrl-C, SIGTERM, and SIGKILL at a moment that nobody chose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support import killed
from support.ledger import LedgerModel
from support.runs import assert_same_end, assert_stitches, seeded, train
from support.signalled import SignalledInStep, enter_slurm_job

TESTS = Path(__file__).parents[2]


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


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.killed", str(folder), "2"]
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def lines(folder: Path) -> list[Any]:
    path = folder / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_killed_twice_trains_on_exactly_the_uninterrupted_batches(tmp_path: Path) -> None:
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    for count in (15, 50):
        process = start(folder)
        deadline = time.monotonic() + 120
        while len(lines(folder)) < count and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None, "the run was over before it was killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert start(folder).wait(timeout=120) == 0
    killed.main(whole, workers=0)
    # A kill between the step and its checkpoint repeats that step, to the same weights.
    ours = lines(folder)
    once = [line for i, line in enumerate(ours) if line not in ours[max(i - 3, 0) : i]]
    assert once == lines(whole)
    assert len(ours) - len(once) <= 2
    assert json.loads((folder / "weights.json").read_text()) == json.loads((whole / "weights.json").read_text())
