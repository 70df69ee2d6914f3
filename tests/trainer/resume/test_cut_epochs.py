"""An epoch that ``max_steps`` has cut ends twice: what counts its end counts it once."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelPruning, Timer
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel
from support.ranks import Ranks
from support.runs import Outcome, assert_same_end, ended, numbers_module, train, training
from torchmetrics import MeanMetric

from lightning_stateful.errors import StatefulWarning


class Worsens(LedgerModel):
    """Logs a loss that is the worse the later it is; its learning rate follows that, by epochs."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("worse", 1.0 + self.current_epoch, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return [optimizer], [{"scheduler": plateau, "monitor": "worse"}]


def waiting(patience: int = 2) -> EarlyStopping:
    return EarlyStopping("worse", patience=patience, check_on_train_epoch_end=True)


def counts(run: Outcome) -> dict[str, Any]:
    """What the run's EarlyStopping says of itself."""
    trainer: Any = run.trainer
    found: dict[str, Any] = next(one.state_dict() for one in trainer.callbacks if isinstance(one, EarlyStopping))
    return found


CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "in the first epoch": (5, {}),
    "in a later one": (13, {}),
    "in the one that it stops after": (25, {}),
    "in a window": (7, {"accumulate_grad_batches": 2}),
    "while it waits to stop": (16, {"min_epochs": 4, "patience": 1}),
}


@pytest.mark.parametrize(("steps", "options"), CUTS.values(), ids=CUTS)
def test_39_early_stopping_counts_an_epoch_that_max_steps_has_cut_once(
    tmp_path: Path, steps: int, options: dict[str, Any]
) -> None:
    options = {"patience": 2, "max_epochs": 6, **options}
    run = training(Worsens, lambda: [waiting(patience)])
    patience = options.pop("patience")
    whole = run(**options)
    assert whole.current_epoch < 6
    ended(tmp_path / "cut.ckpt", run=run, **options, max_steps=steps)
    resumed = run(ckpt_path=tmp_path / "cut.ckpt", **options)
    assert_same_end(resumed, whole)
    assert counts(resumed) == counts(whole)


def test_what_has_stopped_in_a_cut_epoch_has_not_stopped_on_the_resume(tmp_path: Path) -> None:
    run = training(Worsens, lambda: [waiting(1)])
    options = {"max_epochs": 6, "min_epochs": 3}
    whole = run(**options)
    # After the first batches of epoch 1 nothing is better, by which it would stop.
    stopped = ended(tmp_path / "cut.ckpt", run=run, **options, max_steps=14)
    assert counts(stopped)["stopped_epoch"] == 1
    resumed = run(ckpt_path=tmp_path / "cut.ckpt", **options)
    assert_same_end(resumed, whole)
    assert counts(resumed) == counts(whole)


class SavesAtEnd(pl.Callback):
    """Saves when the end of an epoch has been counted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_it_is_so_for_a_checkpoint_of_on_train_end_and_from_stop_to_stop(tmp_path: Path) -> None:
    run = training(Worsens, lambda: [waiting()])
    whole, path = run(max_epochs=6), tmp_path / "cut.ckpt"
    run(callbacks=[SavesAtEnd(path)], max_epochs=6, max_steps=4)
    for steps in (4, 7, 15, 27):
        ended(path, run=run, ckpt_path=path, max_epochs=6, max_steps=steps)
    resumed = run(ckpt_path=path, max_epochs=6)
    assert_same_end(resumed, whole)
    assert counts(resumed) == counts(whole)


def test_a_second_fit_counts_it_once_too() -> None:
    whole = train(model=Worsens(), callbacks=[waiting()], max_epochs=6)
    run = train(model=Worsens(), callbacks=[waiting()], max_epochs=6, max_steps=5)
    trainer: Any = run.trainer
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(trainer.lightning_module, datamodule=numbers_module())
    assert trainer.global_step == whole.global_step
    assert counts(run) == counts(whole)


class Sums(Worsens):
    """Logs the number of the batch, by itself and in an object of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("number", float(batch_idx), on_step=False, on_epoch=True)
        self.metric.update(float(batch_idx))
        self.log("object", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def logged(run: Outcome) -> list[float]:
    return [float(run.trainer.callback_metrics[name]) for name in ("number", "object")]


def test_a_second_fit_goes_on_with_what_the_epoch_has_summed_up() -> None:
    run = train(model=Sums(), max_epochs=1, max_steps=5)
    trainer: Any = run.trainer
    for steps in (5, 7, -1):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(trainer.lightning_module, datamodule=numbers_module())
    assert logged(run) == [5.0, 5.0]


@pytest.mark.parametrize("is_fitted_again", [False, True])
def test_what_was_summed_up_is_kept_where_nothing_is_left_to_train_on(tmp_path: Path, is_fitted_again: bool) -> None:
    path, run = tmp_path / "cut.ckpt", training(Sums, lambda: [waiting()])
    first = ended(path, run=run, max_steps=5)
    if is_fitted_again:
        first.trainer.fit(first.trainer.lightning_module, datamodule=numbers_module())
        first.trainer.save_checkpoint(path)
    else:
        ended(path, run=run, ckpt_path=path, max_steps=5)
    resumed = run(ckpt_path=path, max_epochs=1)
    assert logged(resumed) == [5.0, 5.0]
    assert counts(resumed)["wait_count"] == 0


class Counts(pl.Callback):
    """Counts epochs, and saves that."""

    epochs = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Decays(LedgerModel):
    """Changes its weights at the end of an epoch."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)


class Manual(LedgerModel):
    """Steps its schedule itself, at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Unsavable(Counts):
    """Cannot be saved, and is not saved."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


OTHERS: dict[str, tuple[type[LedgerModel], type[pl.Callback], str]] = {
    "callback": (LedgerModel, Counts, "Counts changed"),
    "weights": (Decays, pl.Callback, "weights or buffers of the module changed"),
    "pruning": (LedgerModel, partial(ModelPruning, "l1_unstructured", amount=0.5), "weights or buffers of"),
    "schedule": (Manual, Counts, "Counts and learning rate schedulers changed"),
}


@pytest.mark.parametrize(("model", "callback", "words"), OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("ignore:The checkpoint was written:UserWarning")
def test_what_else_the_end_of_a_cut_epoch_has_changed_is_named(
    tmp_path: Path, model: Any, callback: Any, words: str
) -> None:
    run = training(model, lambda: [callback()])
    ended(tmp_path / "cut.ckpt", run=run, max_steps=5)
    with pytest.warns(StatefulWarning, match=f"The epoch that goes on was cut.* {words}"):
        run(ckpt_path=tmp_path / "cut.ckpt", max_epochs=1)


def test_nothing_is_said_where_nothing_counts_twice(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [waiting(), Timer(interval="epoch"), SavesAtEnd(tmp_path / "cut.ckpt")]

    train(callbacks=[Unsavable()], max_steps=5)
    run = training(Worsens, callbacks)
    for steps in (5, 11):
        ended(tmp_path / f"{steps}.ckpt", run=run, max_steps=steps)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StatefulWarning)
            run(ckpt_path=tmp_path / f"{steps}.ckpt", max_epochs=2)
    # At the end of an epoch nothing is to be put back.
    for steps in (5, 11):
        state = torch.load(tmp_path / f"{steps}.ckpt", weights_only=True)["callbacks"]["StatefulDataCallback"]
        assert ("cut" in str(state["results"])) == (steps == 5)


class OfRank(LedgerModel):
    """Monitors a value of each rank alone, which grows the worse with the batches of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        value = (self.current_epoch + 1.0) * (self.global_rank + 1)
        self.log("worse", value, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def of_each_rank(folder: Path) -> list[Any]:
    """What each rank's EarlyStopping has counted in a run, whole and resumed, and the steps of these."""
    options = on_ranks(max_epochs=6)
    run = training(OfRank, lambda: [waiting()])
    ended(folder / "cut.ckpt", run=run, **{**options, "max_steps": 8})
    found = [run(**options), run(ckpt_path=folder / "cut.ckpt", **options)]
    return [[one.global_step, float(counts(one)["best_score"]), counts(one)["wait_count"]] for one in found]


def test_each_rank_counts_a_cut_epoch_once(ranks: Ranks) -> None:
    for rank, (whole, resumed) in enumerate(ranks.of(of_each_rank)):
        assert resumed == whole == [18, rank + 1.0, 2]
