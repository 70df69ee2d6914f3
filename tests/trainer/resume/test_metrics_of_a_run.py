"""torchmetrics objects that live longer than an epoch, such as the best value of a run, go on after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.ledger import LedgerModel
from support.runs import (
    assert_goes_on_from_every_moment,
    assert_same_end,
    ended,
    numbers_module,
    seeded,
    stopped,
    train,
    training,
)
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from lightning_stateful.errors import StatefulWarning


class Best(LedgerModel):
    """Weights its loss by the best validation and by the samples of the run so far."""

    def __init__(self) -> None:
        super().__init__()
        self.of_validation, self.best = MeanMetric(), MaxMetric()
        self.run = MetricCollection({"seen": SumMetric(), "mean": MeanMetric()})
        self.latest = Running(MeanMetric(), window=3)
        self.range = MinMaxMetric(MeanMetric())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.run.update(torch.tensor(float(batch_idx)))
        self.latest.update(batch_idx)
        self.range.update(batch["x"].mean())
        known = [*self.run.compute().values(), self.latest.compute(), *self.range.compute().values()]
        best = self.best.compute() if self.best.update_called else 0
        return super().training_step(batch, batch_idx) * (1 + best + sum(one.float() for one in known) / 50)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.of_validation.update(5.0 / (self.trainer.current_epoch + 1))
        self.log("of_validation", self.of_validation)

    def on_validation_epoch_end(self) -> None:
        self.best(self.of_validation.compute())

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.range.reset()


class Template(Best):
    """Forgets what the sanity check of validation has left, as lightning-hydra-template does."""

    def on_train_start(self) -> None:
        for metric in (self.of_validation, self.best, self.run):
            metric.reset()


MOMENTS = [
    ("on_train_epoch_end", 0, 0),
    ("on_validation_end", 0, 0),
    ("on_validation_epoch_start", 1, 0),
    ("on_train_epoch_start", 1, 0),
    ("on_train_batch_end", 1, 5),
]


@pytest.mark.parametrize("make_model", [Best, Template])
def test_the_best_value_of_a_run_is_that_of_all_its_epochs(tmp_path: Path, make_model: Any) -> None:
    assert_goes_on_from_every_moment(tmp_path, numbers_module, MOMENTS, training(make_model), max_epochs=3)


def test_a_validation_in_an_open_window_is_not_forgotten_with_the_window(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": 1}
    moments = [("on_train_batch_end", 0, 6), ("on_validation_end", 1, 6), ("on_validation_start", 1, 5)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, training(Best), **options)


@pytest.mark.parametrize("options", [{}, {"monitor": "of_validation"}], ids=str)
def test_checkpoints_as_lightning_writes_them_hold_the_best_value(tmp_path: Path, options: dict[str, Any]) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, **options)
    whole = training(Template)(callbacks=[saver], max_epochs=3)
    resumed = training(Template)(ckpt_path=tmp_path / "epoch=0.ckpt", seed=99, max_epochs=3)
    assert_same_end(resumed, whole)


class Tracked(LedgerModel):
    """Gets a further object for every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.tracker.update(float(batch_idx))
        return super().training_step(batch, batch_idx)


def test_an_object_that_a_resumed_module_lacks_is_named(tmp_path: Path) -> None:
    stopped(tmp_path / "x.ckpt", run=training(Tracked), hook="on_train_epoch_end")
    with pytest.warns(StatefulWarning, match=r"objects tracker\.1, and neither the module"):
        train(ckpt_path=tmp_path / "x.ckpt", model=seeded(Tracked), max_epochs=2)


class Watches(Callback):
    """Sums up what it sees of a run in a torchmetrics object of its own."""

    def __init__(self) -> None:
        self.seen, self.of_epochs = SumMetric(), MetricCollection({"first": MaxMetric()})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.update(float(batch_idx))
        self.of_epochs.update(float(trainer.current_epoch))
        batch["x"] = batch["x"] * (1 + self.seen.compute() + self.of_epochs.compute()["first"]) / 50


@pytest.mark.parametrize("moment", [{"batch": 4}, {"hook": "on_train_epoch_end"}], ids=str)
def test_objects_of_a_callback_go_on_as_those_of_the_module(tmp_path: Path, moment: dict[str, Any]) -> None:
    run, path = training(LedgerModel), tmp_path / "x.ckpt"
    whole = run(callbacks=[Watches()], max_epochs=2)
    stopped(path, run=run, **moment, callbacks=[Watches()])
    assert_same_end(run(ckpt_path=path, seed=99, callbacks=[Watches()], max_epochs=2), whole)


class ReadsLogged(LedgerModel):
    """Weights its loss by what it has logged, as the Trainer shows it to loggers and to the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        shown = {**self.trainer.logged_metrics, **self.trainer.progress_bar_metrics}
        known = [
            float(shown[name]) for name in ("of_loader_step", "of_loader_epoch", "bar", "val_loss") if name in shown
        ]
        loss = super().training_step(batch, batch_idx) * (1 + sum(known))
        self.log("average", loss, on_step=True, on_epoch=True)
        self.log("bar", loss, prog_bar=True, logger=False)
        return loss


@pytest.mark.parametrize("moment", [("on_train_batch_end", 1, 5), ("on_train_epoch_end", 0, 0)], ids=str)
def test_what_loggers_and_the_progress_bar_are_shown_goes_on(tmp_path: Path, moment: Any) -> None:
    assert_goes_on_from_every_moment(tmp_path, numbers_module, [moment], training(ReadsLogged), max_epochs=2)


def test_what_loggers_are_shown_within_an_epoch_that_was_cut_is_that_of_before_its_end(tmp_path: Path) -> None:
    run = training(ReadsLogged)
    ended(tmp_path / "x.ckpt", run=run, max_steps=15)
    assert_same_end(run(ckpt_path=tmp_path / "x.ckpt", seed=99, max_epochs=2), run(max_epochs=2))
