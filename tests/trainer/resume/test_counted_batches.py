"""Checkpoints of which callbacks have counted batches that a resume trains on again, or lack one that counts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning


class Counts(Callback):
    """Counts batches, optimizer steps and validations, and keeps the counts."""

    def __init__(self) -> None:
        self.batches = self.steps = self.validations = 0
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.batches += 1
        self.steps = trainer.global_step
        self.seen = [*self.seen, 0.0]

    def on_validation_end(self, *args: Any) -> None:
        self.validations += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("batches", "steps", "validations")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class CountsSteps(Counts):
    """Counts no batch."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps = trainer.global_step


class Averages(Counts):
    """Averages tensors in place, in a dict of a dict, and counts no batch otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"weights": {"first": torch.zeros(3)}}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps = trainer.global_step
        self.held["weights"]["first"].mul_(0.9).add_(0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "held": self.held}


class CountsInData(pl.LightningDataModule):
    """Counts samples as they reach the model, and keeps the count."""

    samples = 0

    def train_dataloader(self) -> Any:
        return DataLoader([torch.ones(32)] * 24, batch_size=2)

    val_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.samples += len(batch) * self.trainer.training
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


class Logs(BoringModel):
    """Its best validation is the one in the second window."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.global_step == 1))


class Counted(Logs):
    """Counts batches itself, in its own entry of a checkpoint."""

    batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]


class Fails(BoringModel):
    """Raises an error behind the step of the third batch."""

    fails_in = "optimizer_step"
    fails = True

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.fail("optimizer_step")

    def lr_scheduler_step(self, *args: Any) -> None:
        super().lr_scheduler_step(*args)
        self.fail("lr_scheduler_step")

    def fail(self, where: str) -> None:
        if self.fails and where == self.fails_in and self.trainer.global_step == 3:
            raise RuntimeError(where)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class FailsInSchedule(Fails):
    fails_in = "lr_scheduler_step"


def counting() -> list[Callback]:
    """Callbacks that do something at the end of each batch; an average of weights where this Lightning has one."""
    averages: Any = getattr(callbacks, "EMAWeightAveraging", None)
    return [Counts(), *([averages(decay=0.5)] if averages else [])]


def said_on_resume(model: Any, path: Path, *others: Any, data: Any = None, **options: Any) -> list[str]:
    trainer = quiet_trainer(*others, StatefulDataCallback(), max_epochs=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, data or DataLoader([torch.ones(32)] * 24, batch_size=2), ckpt_path=path)
    return [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "model", "named"),
    [
        (Counts, Logs, "Counts.batches"),
        (CountsSteps, Logs, ""),
        (CountsSteps, Counted, "batches"),
        (Averages, Logs, "Averages.held"),
    ],
)
def test_what_counts_the_batches_of_an_open_window_twice_is_named(
    tmp_path: Path, kind: Any, model: Any, named: str, is_first: bool
) -> None:
    options = {"accumulate_grad_batches": 4, "val_check_interval": 6, "limit_val_batches": 1}
    saver = ModelCheckpoint(tmp_path, filename="best", monitor="loss", mode="max")

    ours = StatefulDataCallback()
    ordered = [ours, kind(), saver] if is_first else [kind(), ours, saver]
    trainer = quiet_trainer(*ordered, max_steps=2, max_epochs=None, enable_checkpointing=True, **options)
    trainer.fit(model(), DataLoader([torch.ones(32)] * 24, batch_size=2))
    assert torch.load(tmp_path / "best.ckpt", weights_only=False)["global_step"] == 1
    said = said_on_resume(model(), tmp_path / "best.ckpt", kind(), **options)
    told = [one for one in said if "counts its batches twice" in one]
    assert [f"twice: {named}. If" in one for one in told] == [True] * bool(named), said


def test_so_is_what_a_data_module_counts(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 4, "val_check_interval": 6, "limit_val_batches": 1}
    saver = ModelCheckpoint(tmp_path, filename="best", monitor="loss", mode="max")
    trainer = quiet_trainer(
        StatefulDataCallback(), saver, max_steps=2, max_epochs=None, enable_checkpointing=True, **options
    )
    trainer.fit(Logs(), CountsInData())
    said = said_on_resume(Logs(), tmp_path / "best.ckpt", data=CountsInData(), **options)
    assert ["twice: CountsInData.samples. If" in one for one in said if "counts its batches" in one] == [True], said


# Lightning looks for a checkpoint in a callback that saves on errors alone.
@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint")
@pytest.mark.parametrize("model", [Fails, FailsInSchedule])
def test_a_batch_end_that_an_error_has_left_out_is_named(tmp_path: Path, model: Any) -> None:
    made = counting()
    saver = OnExceptionCheckpoint(tmp_path, "error")
    with pytest.raises(RuntimeError, match=model.fails_in):
        quiet_trainer(*made, StatefulDataCallback(), saver, limit_val_batches=0, enable_checkpointing=True).fit(
            model(), DataLoader([torch.ones(32)] * 24, batch_size=2)
        )
    resumed = model()
    resumed.fails = False
    made = counting()
    (said,) = said_on_resume(resumed, tmp_path / "error.ckpt", *made, limit_val_batches=0)
    named = ", ".join(type(one).__name__ for one in counting())
    assert f"So {named} may lack that batch" in said


def test_a_save_at_the_end_of_a_batch_says_nothing(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    made = counting()
    trainer = quiet_trainer(*made, StatefulDataCallback(), saver, limit_val_batches=0, enable_checkpointing=True)
    trainer.fit(Counted(), DataLoader([torch.ones(32)] * 24, batch_size=2))
    for step in (1, 6):
        made = counting()
        assert not said_on_resume(Counted(), tmp_path / f"step={step}.ckpt", *made, limit_val_batches=0)


class ShrinksEpochs(Callback):
    """Makes all weights smaller as an epoch starts."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.shrink(pl_module)

    def shrink(self, pl_module: Any) -> None:
        with torch.no_grad():
            for weight in pl_module.parameters():
                weight.mul_(0.9)


class ShrinksBatches(ShrinksEpochs):
    """Makes all weights smaller as a batch starts."""

    on_train_epoch_start = Callback.on_train_epoch_start  # type: ignore[assignment]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.shrink(pl_module)


class FailsOnce(BoringModel):
    """Raises an error in a hook of the second batch of the second epoch, or as that epoch starts."""

    def __init__(self, hook: str = "") -> None:
        super().__init__()
        self.hook = hook
        for part in self.parameters():
            torch.nn.init.constant_(part, 0.1)

    def fail(self, hook: str, batch_idx: int) -> None:
        if hook == self.hook and self.current_epoch == 1 and batch_idx in (-1, 1):
            raise ConnectionError("away")

    def on_train_epoch_start(self) -> None:
        self.fail("on_train_epoch_start", -1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fail("on_train_batch_start", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("on_train_batch_end", batch_idx)


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint")
@pytest.mark.parametrize(
    ("kind", "hook", "named"),
    [
        (ShrinksEpochs, "on_train_epoch_start", "ShrinksEpochs.on_train_epoch_start"),
        (ShrinksEpochs, "on_train_batch_start", ""),
        (ShrinksBatches, "on_train_batch_start", "ShrinksBatches.on_train_batch_start"),
        (ShrinksBatches, "training_step", "ShrinksBatches.on_train_batch_start"),
        (ShrinksBatches, "on_train_batch_end", ""),
        (ShrinksBatches, "on_train_epoch_start", ""),
        (Callback, "training_step", ""),
    ],
)
def test_hooks_that_change_weights_and_are_called_again_are_named(
    tmp_path: Path, kind: Any, hook: str, named: str
) -> None:
    data, options = [torch.full((32,), number / 20) for number in range(16)], {"limit_val_batches": 0, "max_epochs": 3}
    saver = OnExceptionCheckpoint(tmp_path, "error")
    trainer = quiet_trainer(kind(), StatefulDataCallback(seed=0), saver, enable_checkpointing=True, **options)
    with pytest.raises(ConnectionError):
        trainer.fit(FailsOnce(hook), DataLoader(data, batch_size=2))
    weights, said = [], []
    for path in (None, tmp_path / "error.ckpt"):
        model, trainer = FailsOnce(), quiet_trainer(kind(), StatefulDataCallback(seed=0), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, DataLoader(data, batch_size=2), ckpt_path=path)
        weights.append(model.layer.weight)
        said += [str(one.message) for one in caught if "is called again" in str(one.message)]
    assert torch.equal(*weights) is not bool(named)
    assert [named in one for one in said] == [True] * bool(named), said
