"""Runs that break off: by an error, Ctrl-C, SIGTERM and a SLURM requeue."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.ledger import LedgerModel, Numbers
from support.runs import (
    SaveOnException,
    assert_resumes,
    assert_same_end,
    assert_stitches,
    numbers_module,
    seeded,
    train,
    training,
)
from support.signalled import SignalledInStep, enter_slurm_job


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C counts where a shell has started the tests in the background, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at_step(step: int, does: Any) -> Any:
    """A hook that does something once, at a step of the optimizer."""
    return lambda trainer, *args: does() if trainer.global_step == step else None


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


class Crashes(LedgerModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 15:
            raise RuntimeError("out of memory")
        return super().training_step(batch, batch_idx)


Broken = tuple[type[BaseException], int, dict[str, Any]]
# The error that a run ends with, events that are done again after it, and what makes it break off.
BREAKS: dict[str, Broken] = {
    "a sample that cannot be read": (RuntimeError, 0, {"make": lambda: numbers_module(train=Numbers(22, fail_at=13))}),
    "an error in a step": (RuntimeError, 0, {"model": Crashes}),
    "Ctrl-C before backward": (SystemExit, 1, {"on_before_backward": at_step(14, interrupt)}),
    "33 Ctrl-C in optimizer.step": (SystemExit, 0, {"model": partial(SignalledInStep, signal.SIGINT, 14)}),
    "22 SIGTERM": (SIGTERMException, 0, {"on_train_batch_start": at_step(14, terminate)}),
}


@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*:UserWarning")
@pytest.mark.parametrize("name", BREAKS)
def test_a_run_that_breaks_off_is_saved_and_goes_on_exactly(tmp_path: Path, name: str) -> None:
    error, served_again, how = BREAKS[name]
    make, model = how.get("make", numbers_module), seeded(how.get("model", LedgerModel))
    hooks = LambdaCallback(**{hook: does for hook, does in how.items() if hook.startswith("on_")})
    before = signal.getsignal(signal.SIGINT)
    saver = SaveOnException(tmp_path / "stop.ckpt")
    if name == "an error in a step":
        saver = OnExceptionCheckpoint(tmp_path, filename="stop")
    with pytest.raises(error):
        train(make, callbacks=[hooks, saver], model=model)
    assert signal.getsignal(signal.SIGINT) is before
    assert_resumes(tmp_path / "stop.ckpt", model.ledger, served_again)


class FailsAfterStep(LedgerModel):
    """Fails within ``optimizer_step``, when the optimizer has stepped."""

    fail_at = 14

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        if self.global_step == self.fail_at:
            raise RuntimeError("NaN")


class FailsInScheduler(LedgerModel):
    """Fails before its scheduler takes the step that follows the same batch."""

    fail_at = 14

    def lr_scheduler_step(self, *args: Any) -> None:
        if self.global_step == self.fail_at + 1:
            raise RuntimeError("NaN")
        super().lr_scheduler_step(*args)


@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*:UserWarning")
@pytest.mark.parametrize("kind", [FailsAfterStep, FailsInScheduler])
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (14, {}),
        (21, {}),  # the last of an epoch
        (32, {}),  # the last of all
        (8, {"accumulate_grad_batches": 2, "val_check_interval": 4}),
    ],
    ids=str,
)
def test_a_batch_whose_step_is_taken_is_not_trained_on_twice(
    tmp_path: Path, step: int, options: dict[str, Any], kind: Any
) -> None:
    model = seeded(kind)
    model.fail_at = step
    with pytest.raises(RuntimeError, match="NaN"):
        train(model=model, callbacks=[OnExceptionCheckpoint(tmp_path, filename="stop")], **options)
    assert_resumes(tmp_path / "stop.ckpt", model.ledger, 0, **options)


class FailsBehindPlateau(LedgerModel):
    """Fails when a scheduler that monitors a metric has stepped, the third time."""

    interval, fail_at = "step", 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return [optimizer], [{"scheduler": schedule, "monitor": "loss", "interval": self.interval}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        if scheduler.last_epoch == self.fail_at:
            raise RuntimeError("NaN")


class FailsBehindPlateauOfEpochs(FailsBehindPlateau):
    interval = "epoch"


@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*:UserWarning")
@pytest.mark.parametrize("kind", [FailsBehindPlateau, FailsBehindPlateauOfEpochs])
@pytest.mark.parametrize("times", [1, 2])
def test_a_scheduler_that_monitors_a_metric_does_not_step_twice(tmp_path: Path, kind: Any, times: int) -> None:
    model = seeded(kind)
    model.fail_at = times
    run = training(kind)
    with pytest.raises(RuntimeError, match="NaN"):
        train(model=model, callbacks=[OnExceptionCheckpoint(tmp_path, filename="stop")])
    assert_resumes(tmp_path / "stop.ckpt", model.ledger, run=run, whole=run())


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
    assert_resumes(tmp_path / "hpc_ckpt_1.ckpt", model.ledger, **options)


class SignalledInValidation(LedgerModel):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        if (self.current_epoch, batch_idx) == (1, 1):
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("averaging", ["none", "WeightAveraging"])
@pytest.mark.filterwarnings("ignore:.*is in eval mode.*")
def test_a_slurm_job_requeued_in_a_validation_goes_on_exactly(tmp_path: Path, slurm: Path, averaging: str) -> None:
    def callbacks() -> list[Any]:
        kind = getattr(pl.callbacks, averaging, None)  # WeightAveraging swaps the weights in a validation
        return [] if kind is None else [kind()]

    model = seeded(SignalledInValidation)
    with pytest.raises(SIGTERMException):
        train(model=model, callbacks=callbacks(), default_root_dir=tmp_path)
    # Lightning finds hpc_ckpt_1.ckpt by itself.
    resumed = train(seed=99, callbacks=callbacks(), default_root_dir=tmp_path)
    whole = train(callbacks=callbacks(), default_root_dir=tmp_path / "whole")
    assert_stitches([model.ledger, resumed.ledger], whole.ledger)
    assert_same_end(resumed, whole)


def test_a_second_ctrl_c_does_not_wait_for_the_batch() -> None:
    class Stuck(LedgerModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
                self.ledger.append("interrupted")
            return super().training_step(batch, batch_idx)

    model = seeded(Stuck)
    with pytest.raises(SystemExit):
        train(model=model)
    assert model.ledger == [("epoch start", 0), "interrupted"]
