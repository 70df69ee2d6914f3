"""Settings of layers and of the Trainer that hooks set in training: a resume that nothing sets them on says so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from support.ledger import LedgerModel
from support.runs import stopped, training

from lightning_stateful.errors import StatefulWarning

STARTS = "Settings of the Trainer, or of layers of the module, had been changed in training"


class Smoothed(LedgerModel):
    """Has a loss of torch's beside its Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = torch.nn.SmoothL1Loss(beta=1.0)

    def _loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.smooth(super()._loss(batch), torch.zeros(()))
        return loss


class AtEpochEnd(pl.Callback):
    """Sets something for all epochs to come when the first one ends."""

    def __init__(self, owner: str, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value

    def set(self, trainer: Any, model: Any) -> None:
        owners = {"trainer": trainer, "trainer.fit_loop": trainer.fit_loop}
        owner = owners.get(self.owner) or model.get_submodule(self.owner)
        setattr(owner, self.name, self.value)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            self.set(trainer, pl_module)


class AtStartToo(AtEpochEnd):
    """Sets it on a resume as well."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch > 0:
            self.set(trainer, pl_module)


class AtEachBatch(AtEpochEnd):
    """Sets another value at each step."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Nothing."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.value = 0.01 * (1 + trainer.global_step)
        self.set(trainer, pl_module)


class NewOptimizer(pl.Callback):
    """Puts an optimizer in the place of the module's as the second epoch starts."""

    def __init__(self, *, on_resume: bool = False) -> None:
        self.on_resume = on_resume

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.optimizers = [torch.optim.RAdam(pl_module.parameters(), lr=0.01)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.on_resume and trainer.current_epoch == 1:
            (was,) = trainer.strategy.optimizers
            self.on_train_epoch_start(trainer, pl_module)
            trainer.strategy.optimizers[0].load_state_dict(was.state_dict())


P, SMOOTH = ("net.1", "p", 0.7), ("smooth", "beta", 0.5)
SET: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (lambda: AtEpochEnd(*P), r"net\.1\.p was 0\.7 and is 0\.3"),
    "loss": (lambda: AtEpochEnd(*SMOOTH), r"smooth\.beta was 0\.5 and is 1\.0"),
    "windows": (lambda: AtEpochEnd("trainer", "accumulate_grad_batches", 2), r"accumulate_grad_batches was 2 and is 1"),
    "clipping": (lambda: AtEpochEnd("trainer", "gradient_clip_val", 0.1), r"gradient_clip_val was 0\.1 and is None"),
    "validations": (lambda: AtEpochEnd("trainer", "check_val_every_n_epoch", 2), r"_n_epoch was 2 and is 1"),
    "epochs": (lambda: AtEpochEnd("trainer.fit_loop", "max_epochs", 4), r"trainer\.max_epochs was 4 and is 3"),
    "epochs, set again": (lambda: AtStartToo("trainer.fit_loop", "max_epochs", 4), ""),
    "another loss": (
        lambda: AtEpochEnd("", "smooth", torch.nn.L1Loss()),
        r"smooth\.__class__ was L1Loss and is SmoothL1Loss",
    ),
    "another optimizer": (NewOptimizer, r"trainer\.optimizers\[0\]\.__class__ was RAdam and is Adam"),
    "another optimizer, set again": (lambda: NewOptimizer(on_resume=True), ""),
    "dropout, set again": (lambda: AtStartToo(*P), ""),
    "windows, set again": (lambda: AtStartToo("trainer", "accumulate_grad_batches", 2), ""),
    "dropout, by step": (lambda: AtEachBatch(*P), ""),
    "another loss, set again": (lambda: AtStartToo("", "smooth", torch.nn.L1Loss()), ""),
    "windows, by Lightning": (lambda: GradientAccumulationScheduler({1: 2}), ""),
}


def said_by(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [
        str(one.message) for one in caught if issubclass(one.category, StatefulWarning) and STARTS in str(one.message)
    ]


@pytest.mark.parametrize(("make", "said"), SET.values(), ids=SET)
def test_settings_that_nothing_sets_on_a_resume_are_named(tmp_path: Path, make: Any, said: str) -> None:
    run, path = training(Smoothed, lambda: [make()]), tmp_path / "a.ckpt"
    assert not said_by(lambda: stopped(path, epoch=1, batch=2, run=run))
    found = said_by(lambda: run(ckpt_path=path))
    assert [bool(re.search(said, one)) for one in found] == [True] * bool(said)
