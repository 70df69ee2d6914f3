"""The traps of Lightning's mid-epoch resume that moments alone do not show; ``docs/traps.md`` numbers them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, TQDMProgressBar
from lightning.pytorch.tuner import Tuner
from support.ledger import Asks, LedgerModel, Numbers, batches, samples, trained
from support.runs import (
    assert_goes_on_from_every_moment,
    ended,
    numbers_module,
    quiet_trainer,
    seeded,
    stopped,
    train,
    train_alone,
    training,
    uninterrupted,
)
from support.stream_runs import chunks, module
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning

WITHIN = [("on_train_batch_end", 1, 4)]


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_1_loaders_with_workers_begin_at_the_right_epoch(tmp_path: Path, persistent: bool) -> None:
    def make() -> Any:
        return numbers_module(num_workers=1, persistent_workers=persistent)

    moments = [*WITHIN, ("on_train_epoch_end", 1, 0)]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, served_again=0, max_epochs=3)
    assert whole.ledger == uninterrupted().ledger


def asking_at(hook: str) -> tuple[type[LedgerModel], list[pl.Callback]]:
    """A model, and a callback, of which one asks for the number of steps before Lightning loads a checkpoint."""

    def ask(asked: Any, *args: Any, **kwargs: Any) -> None:
        trainer = args[0] if args else asked.trainer
        assert trainer.estimated_stepping_batches > 0

    holder, name = hook.split(".")
    model = type("AsksFirst", (LedgerModel,), {name: ask} if holder == "module" else {})
    # Set up before the callback that the data module brings along.
    return model, [type("AsksToo", (pl.Callback,), {name: ask})()] if holder == "callback" else []


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("hook", ["callback.setup", "module.setup", "module.configure_model", "configure_optimizers"])
def test_2_loaders_built_before_the_checkpoint_is_loaded_are_thrown_away(tmp_path: Path, hook: str) -> None:
    model, asking = asking_at(hook) if "." in hook else (Asks, [])
    run = training(model, lambda: asking)
    moments = [("on_train_batch_end", 1, 2)]
    assert_goes_on_from_every_moment(
        tmp_path, lambda: module(chunks(), steps_per_epoch=8), moments, run, served_again=0
    )
    before = stopped(tmp_path / "batches.ckpt", run=run, epoch=1, batch=1, max_epochs=2)
    resumed = run(lambda: numbers_module(batch_size=3), ckpt_path=tmp_path / "batches.ckpt", max_epochs=2)
    assert sorted(samples(before + resumed.ledger, 1)) == list(range(22))


def test_2_workers_of_loaders_that_are_thrown_away_end() -> None:
    class AsksInSetup(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            assert self.trainer.estimated_stepping_batches == 22

        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(22), batch_size=2, num_workers=1, persistent_workers=True)

    # Others may have been left by whatever ran here before.
    workers, before = [], set(psutil.Process().children())

    def count(*args: Any) -> None:
        workers.append(len(set(psutil.Process().children()) - before))

    train_alone(AsksInSetup, callbacks=[LambdaCallback(on_train_batch_start=count)], max_epochs=2)
    assert set(workers) == {1}


def test_7_the_state_is_small_plain_and_the_same_in_both_places(tmp_path: Path) -> None:
    # With a batch in flight.
    stopped(tmp_path / "stop.ckpt", hook="on_before_backward", epoch=1, batch=2)
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    state, own = checkpoint["StatefulDataModule"]["lightning_stateful"], checkpoint["callbacks"]["StatefulDataCallback"]
    assert state == json.loads(json.dumps(state))
    assert state["progress"] == {"epoch": 1, "cycle": 0, "consumed": 4}
    assert len(json.dumps(state)) + len(json.dumps(own)) < 1400
    assert own["data"] is None


@pytest.mark.parametrize(
    "meddle",
    [
        pytest.param(lambda shown: shown.sampler.set_epoch(17), id="10 tells it an epoch"),
        pytest.param(lambda shown: [iter(shown) for _ in range(4)], id="17 begins passes"),
        pytest.param(lambda shown: shown.load_state_dict({"progress": {"epoch": 1}}), id="loads a state"),
    ],
)
def test_what_hooks_do_with_the_loader_moves_nothing(meddle: Any) -> None:
    kept = []
    meddles = LambdaCallback(on_train_epoch_start=lambda trainer, _: kept.append(meddle(trainer.train_dataloader)))
    assert train(callbacks=[meddles]).ledger == uninterrupted().ledger
    assert len(kept) == 3


def test_12_max_steps_does_not_lengthen_a_run_resumed_between_epochs(tmp_path: Path) -> None:
    moments = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 0, 10)]
    options: dict[str, Any] = {"max_steps": 25, "max_epochs": -1}
    whole = assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, served_again=0, **options)
    assert len(trained(whole.ledger)) == 25


def test_12_a_run_that_reached_max_steps_trains_no_more(tmp_path: Path) -> None:
    ended(tmp_path / "stop.ckpt", max_steps=15)
    again = train(ckpt_path=tmp_path / "stop.ckpt", max_steps=15)
    assert again.ledger == []
    assert again.global_step == 15


class Skips(LedgerModel):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 6 else None


def test_15_skipping_the_rest_of_an_epoch_does_not_shift_later_resumes(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, numbers_module, WITHIN, training(Skips), served_again=0)


@pytest.mark.filterwarnings("ignore:.*yielded None")
def test_15_a_batch_of_none_does_not_shift_later_resumes(tmp_path: Path) -> None:
    def make() -> Any:
        def collate(samples: list[Any]) -> Any:
            return None if samples[0]["id"] == 5 else torch.utils.data.default_collate(samples)

        return numbers_module(collate_fn=collate, shuffle=False, batch_size=1, val=None)

    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 1, 9)], served_again=0)


def test_18_the_length_of_an_epoch_stays_the_whole_one_after_a_resume(tmp_path: Path) -> None:
    ended(tmp_path / "stop.ckpt", max_steps=13)
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", max_steps=14)
    assert resumed.trainer.num_training_batches == len(resumed.trainer.train_dataloader) == 11


def test_20_a_save_after_an_evaluation_that_followed_fit_knows_the_position(tmp_path: Path) -> None:
    run = train(max_steps=16)
    run.trainer.validate(run.trainer.lightning_module, datamodule=numbers_module(), verbose=False)
    run.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["StatefulDataCallback"]["progress"]["batch"] == 5


class Reloads(StatefulDataModule):
    """A training set of another size in each epoch."""

    sizes = (10, 16, 12, 8)

    def __init__(self) -> None:
        super().__init__(seed=3)

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        return DataLoader(Numbers(self.sizes[epoch], first=1000 * epoch), batch_size=2, shuffle=True)


@pytest.mark.parametrize("every", [1, 2])
def test_24_loaders_reload_on_schedule_after_a_resume(tmp_path: Path, every: int) -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 4}
    moments = [("on_train_batch_end", 1, 2), ("on_train_batch_end", 2, 1), ("on_train_epoch_end", 1, 0)]
    assert_goes_on_from_every_moment(tmp_path, Reloads, moments, served_again=0, **options)


def test_24_loaders_built_once_more_before_training_keep_the_place_on_another_batch_size(tmp_path: Path) -> None:
    run, how = training(Asks), {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}
    first = ended(tmp_path / "stop.ckpt", run=run, max_steps=15, **how)
    resumed = run(lambda: numbers_module(batch_size=5), ckpt_path=tmp_path / "stop.ckpt", **how)
    assert sorted(samples(first.ledger + resumed.ledger, 1)) == list(range(22))


def test_25_seed_everything_does_not_replay_the_first_epoch(tmp_path: Path) -> None:
    def run(make: Any, **options: Any) -> Any:
        pl.seed_everything(5, verbose=False)
        return training(make_callbacks=lambda: [StatefulDataCallback(seed=2)])(make, **options)

    def make() -> Any:
        return DataLoader(Numbers(22), batch_size=2, shuffle=True)

    whole = assert_goes_on_from_every_moment(tmp_path, make, WITHIN, run, served_again=0)
    assert batches(whole.ledger, 0) != batches(whole.ledger, 1)


@pytest.mark.filterwarnings("ignore:overfit_batches trains on the same batches.* is not shuffled")
@pytest.mark.parametrize("shuffle", [True, False])
def test_29_overfitting_trains_on_the_same_batches_in_every_epoch(tmp_path: Path, shuffle: bool) -> None:
    def make() -> Any:
        return numbers_module(shuffle=shuffle, val=None)

    moments = [("on_train_batch_end", 1, 1)]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, served_again=0, overfit_batches=3, max_epochs=3)
    assert set(batches(whole.ledger)) == {(0, 1), (2, 3), (4, 5)}


class IterModel(LedgerModel):
    """A step that fetches by itself."""

    takes = 1

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        for _ in range(self.takes):
            batch, batch_idx, _ = next(dataloader_iter)
        loss = self._loss(batch)
        self.ledger.append(("train", self.current_epoch, batch_idx, self.global_step, self._ids(batch)))
        return loss


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_30_steps_that_fetch_by_themselves_resume_exactly_and_hooks_count_on(tmp_path: Path) -> None:
    counted: list[tuple[str, int, int]] = []

    def note(name: str) -> Any:
        return lambda trainer, module, *args: counted.append((name, trainer.current_epoch, args[-1]))

    hooks: Any = {name: note(name) for name in ("on_train_batch_start", "on_train_batch_end")}

    def run(*args: Any, **options: Any) -> Any:
        counted.clear()
        found = training(IterModel, lambda: [LambdaCallback(**hooks)])(*args, **options)
        # Compared as the weights are, from where the last epoch begins.
        found.weights["counted"] = torch.tensor([number for _, epoch, number in counted if epoch == 2])
        return found

    moments = [*WITHIN, ("on_train_epoch_end", 0, 0), ("on_validation_start", 1, 0), ("on_validation_end", 1, 0)]
    moments += [("on_train_batch_end", 1, 10), ("on_train_batch_end", 0, 2)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=3)


def test_a_progress_bar_knows_the_total_of_a_resumed_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped(tmp_path / "stop.ckpt", batch=2)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[TQDMProgressBar()], logger=False, enable_checkpointing=False
    )
    trainer.fit(seeded(), datamodule=numbers_module(val=None), ckpt_path=tmp_path / "stop.ckpt")
    shown = capsys.readouterr().out
    assert f"4/{trainer.num_training_batches}" in shown
    assert "4/?" not in shown
    # It begins where the run goes on.
    total = trainer.num_training_batches
    assert next(number for number in range(1, total + 1) if re.search(rf"\b{number}/{total}\b", shown)) >= 3


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_30_steps_that_take_several_batches_are_refused() -> None:
    model: Any = seeded(IterModel)
    model.takes = 2
    with pytest.raises(ConfigurationError, match="has taken 2 batches in 1 step"):
        train(lambda: numbers_module(val=None), model=model)


def test_31_a_saved_state_does_not_change_when_training_goes_on() -> None:
    kept: list[dict[str, Any]] = []

    def keep(trainer: Any, *args: Any) -> None:
        kept.append(trainer.datamodule.state_dict()["lightning_stateful"])

    train(callbacks=[LambdaCallback(on_train_batch_end=keep)])
    assert [state["progress"]["consumed"] for state in kept[:5]] == [2, 4, 6, 8, 10]


# What callbacks and schedulers monitor


class Plateau(LedgerModel):
    """Its learning rate falls whenever the validation loss does not halve."""

    monitor, interval = "val_loss", "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        config = {"scheduler": schedule, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}


class PlateauByStep(Plateau):
    monitor, interval = "loss", "step"


@pytest.mark.parametrize("make_model", [Plateau, PlateauByStep])
def test_schedulers_that_monitor_a_metric_step_as_in_an_uninterrupted_run(tmp_path: Path, make_model: Any) -> None:
    def run(make: Any, **options: Any) -> Any:
        found = training(make_model)(make, **options)
        # Compared as the weights are.
        found.weights["lr"] = torch.tensor(found.trainer.optimizers[0].param_groups[0]["lr"])
        return found

    moments = [
        ("on_train_batch_end", 1, 10),
        ("on_before_backward", 1, 4),
        ("on_validation_end", 1, 0),
        ("on_train_epoch_end", 1, 0),
    ]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=4)


@pytest.mark.filterwarnings("ignore:Early stopping conditioned on metric")  # in epoch 0, before any validation
def test_a_metric_logged_before_the_stop_is_monitored_after_it(tmp_path: Path) -> None:
    def fit(make: Any = numbers_module, *, callbacks: Any = (), **options: Any) -> int:
        stopper = EarlyStopping("val_loss", patience=9, min_delta=100.0, check_on_train_epoch_end=True, strict=False)
        train(make, callbacks=[stopper, *callbacks], check_val_every_n_epoch=2, max_epochs=4, **options)
        return stopper.wait_count

    stopped(tmp_path / "stop.ckpt", run=fit, epoch=2, batch=4)
    assert fit(ckpt_path=tmp_path / "stop.ckpt") == fit() == 2


class ScalesByMetric(pl.Callback):
    """Scales batches by the latest validation loss, which nothing monitors."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        batch["x"] *= 1 if loss is None else 1 + loss


def test_a_metric_that_a_hook_reads_and_nothing_monitors_is_what_it_was(tmp_path: Path) -> None:
    def run(make: Any, *, callbacks: Any = (), **options: Any) -> Any:
        return training(LedgerModel)(make, callbacks=[ScalesByMetric(), *callbacks], **options)

    moments = [("on_train_batch_end", 1, 10), ("on_train_epoch_end", 1, 0)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=3)


def test_persistent_workers_end_with_the_training() -> None:
    before = set(psutil.Process().children(recursive=True))
    run = train(lambda: numbers_module(num_workers=1, persistent_workers=True), max_epochs=1)
    left = [child for child in set(psutil.Process().children(recursive=True)) - before if child.status() != "zombie"]
    assert run.current_epoch == 1
    assert left == []


class Manual(LedgerModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_resumes_exactly(tmp_path: Path) -> None:
    moments = [*WITHIN, ("on_before_backward", 1, 4)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, training(Manual))


# One trainer, fitted or evaluated several times


def fit_again(data: Any, **options: Any) -> Any:
    """The trainer of a run that was stopped and is then fitted on data up to the end of the third epoch."""
    trainer = train(**options).trainer
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = -1, 3
    trainer.fit(trainer.lightning_module, datamodule=data)
    return trainer


def test_a_second_fit_on_the_same_trainer_goes_on_within_the_epoch() -> None:
    trainer = fit_again(numbers_module(), max_steps=15)
    assert trained(trainer.lightning_module.ledger) == trained(uninterrupted().ledger)
    assert trainer.current_epoch == 3


def test_a_second_fit_on_other_data_says_that_the_rest_of_the_epoch_is_dropped() -> None:
    with pytest.warns(StatefulWarning, match="stopped after batch 4 of epoch 1"):
        fit_again(numbers_module(train=Numbers(18)), max_steps=15)


def test_a_second_fit_after_finished_epochs_goes_on_with_the_next_epoch() -> None:
    trainer = fit_again(numbers_module(), max_epochs=1)
    assert batches(trainer.lightning_module.ledger) == batches(uninterrupted().ledger)


def test_finding_a_learning_rate_leaves_the_data_where_it_was(tmp_path: Path) -> None:
    model, data = seeded(), numbers_module()
    trainer = quiet_trainer(max_epochs=2, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, datamodule=data, num_training=7, update_attr=False)
    model.ledger.clear()
    trainer.fit(model, datamodule=data)
    assert trained(model.ledger) == trained(uninterrupted(max_epochs=2).ledger)


def test_scaling_the_batch_size_trains_with_the_size_found(tmp_path: Path) -> None:
    model, data = seeded(), numbers_module()
    # With max_steps Lightning restores what the tuner has saved as a run that restarts.
    trainer = quiet_trainer(max_epochs=2, max_steps=100, num_sanity_val_steps=2, default_root_dir=tmp_path)
    Tuner(trainer).scale_batch_size(model, datamodule=data, mode="power", max_trials=2, steps_per_trial=2)
    assert data.batch_size in (4, 8)  # as Lightning 2.6 and 2.5 count trials
    model.ledger.clear()
    trainer.fit(model, datamodule=data)
    assert sorted(samples(model.ledger)) == sorted([*range(22), *range(22)])


def test_weights_only_checkpoints_are_refused_by_lightning_and_still_evaluate(tmp_path: Path) -> None:
    train(max_steps=13).trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert checkpoint["StatefulDataModule"]["lightning_stateful"]["progress"] == {"epoch": 1, "cycle": 0, "consumed": 4}
    with pytest.raises(KeyError, match="contains only the model"):
        train(ckpt_path=tmp_path / "weights.ckpt")
    model = seeded()
    quiet_trainer().validate(model, datamodule=numbers_module(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert len(model.ledger) == 3


def test_the_users_own_callback_is_not_added_twice() -> None:
    mine = StatefulDataCallback(seed=7)
    run = train(callbacks=[mine], max_epochs=1)
    assert [c for c in run.trainer.callbacks if isinstance(c, StatefulDataCallback)] == [mine]
