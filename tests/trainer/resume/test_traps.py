"""The traps of Lightning's mid-epoch resume that moments alone do not show; ``docs/traps.md`` numbers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from support.ledger import LedgerModel, Numbers
from support.runs import Outcome, StopAt, assert_same_end, assert_stitches, numbers_module, seeded, train
from support.sources import assert_goes_on_from_every_moment, trained
from support.stream_runs import chunks, module
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import ConfigurationError, StatefulWarning

WITHIN = [("on_train_batch_end", 1, 4)]


def fitting(make_model: Any = LedgerModel, make_callbacks: Any = tuple) -> Any:
    """Trains as :func:`train` does, a model and with callbacks that are made anew for each run."""

    def run(make: Any, *, seed: int = 1, callbacks: Any = (), **options: Any) -> Outcome:
        return train(make, model=seeded(make_model, seed), callbacks=[*make_callbacks(), *callbacks], **options)

    return run


@pytest.mark.parametrize("persistent", [False, True])
def test_1_loaders_with_workers_begin_at_the_right_epoch(tmp_path: Path, persistent: bool) -> None:
    def make() -> Any:
        return numbers_module(num_workers=1, persistent_workers=persistent)

    moments = [*WITHIN, ("on_train_epoch_end", 1, 0)]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, served_again=0, max_epochs=3)
    assert whole.ledger == train().ledger


def test_2_asking_for_the_number_of_steps_in_configure_optimizers_changes_nothing(tmp_path: Path) -> None:
    class Asks(LedgerModel):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 22
            return super().configure_optimizers()

    whole = assert_goes_on_from_every_moment(tmp_path, numbers_module, WITHIN, fitting(Asks), served_again=0)
    assert whole.ledger == train(max_epochs=2).ledger


def asking_at(hook: str) -> tuple[type[LedgerModel], list[pl.Callback]]:
    """A model, and a callback, of which one asks for the number of steps before Lightning loads a checkpoint."""

    def ask(asked: Any, *args: Any, **kwargs: Any) -> None:
        trainer = args[0] if args else asked.trainer
        assert trainer.estimated_stepping_batches > 0

    holder, name = hook.split(".")
    model = type("Asks", (LedgerModel,), {name: ask} if holder == "module" else {})
    # Set up before the callback that the data module brings along.
    return model, [type("AsksToo", (pl.Callback,), {name: ask})()] if holder == "callback" else []


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("hook", ["callback.setup", "module.setup", "module.configure_model"])
def test_2_loaders_built_before_the_checkpoint_is_loaded_are_thrown_away(tmp_path: Path, hook: str) -> None:
    model, asking = asking_at(hook)
    run = fitting(model, lambda: asking)
    moments = [("on_train_batch_end", 1, 2)]
    assert_goes_on_from_every_moment(
        tmp_path, lambda: module(chunks(), steps_per_epoch=8), moments, run, served_again=0
    )

    stop = StopAt("on_train_batch_end", tmp_path / "batches.ckpt", epoch=1, batch=1)
    run(numbers_module, callbacks=[stop], max_epochs=2)
    resumed = run(lambda: numbers_module(batch_size=3), ckpt_path=tmp_path / "batches.ckpt", max_epochs=2)
    assert stop.ledger is not None
    served = [index for event in trained(stop.ledger + resumed.ledger) if event[1] == 1 for index in event[4]]
    assert sorted(served) == list(range(22))


def test_2_workers_of_loaders_that_are_thrown_away_end(tmp_path: Path) -> None:
    class Asks(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            assert self.trainer.estimated_stepping_batches == 22

        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(22), batch_size=2, num_workers=1, persistent_workers=True)

    # Others may have been left by whatever ran here before.
    workers, before = [], set(psutil.Process().children())

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            workers.append(len(set(psutil.Process().children()) - before))

    train(Asks, callbacks=[StatefulDataCallback(seed=7), Counts()], max_epochs=2)
    assert set(workers) == {1}


def test_7_the_state_is_small_plain_and_the_same_in_both_places(tmp_path: Path) -> None:
    run = train(max_steps=13)
    run.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    state = checkpoint["StatefulDataModule"]["lightning_stateful"]
    assert state == json.loads(json.dumps(state))
    assert state["progress"] == {"epoch": 1, "cycle": 0, "consumed": 4}
    assert len(json.dumps(state)) + len(json.dumps(checkpoint["callbacks"]["StatefulDataCallback"])) < 1024
    assert checkpoint["callbacks"]["StatefulDataCallback"]["data"] is None


class Meddles(pl.Callback):
    """Does something with the training loader that hooks are shown, as an epoch starts."""

    def __init__(self, meddle: Any) -> None:
        self.meddle = meddle
        self.kept: list[Any] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.kept.append(self.meddle(trainer.train_dataloader))


@pytest.mark.parametrize(
    "meddle",
    [
        pytest.param(lambda shown: shown.sampler.set_epoch(17), id="10 tells it an epoch"),
        pytest.param(lambda shown: [iter(shown) for _ in range(4)], id="17 begins passes"),
        pytest.param(lambda shown: shown.load_state_dict({"progress": {"epoch": 1}}), id="loads a state"),
    ],
)
def test_what_hooks_do_with_the_loader_moves_nothing(meddle: Any) -> None:
    assert train(callbacks=[Meddles(meddle)]).ledger == train().ledger


def test_12_max_steps_does_not_lengthen_a_run_resumed_between_epochs(tmp_path: Path) -> None:
    moments = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 0, 10)]
    options: dict[str, Any] = {"max_steps": 25, "max_epochs": -1}
    whole = assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, served_again=0, **options)
    assert len(trained(whole.ledger)) == 25


def test_12_a_run_that_reached_max_steps_trains_no_more(tmp_path: Path) -> None:
    run = train(max_steps=15)
    run.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    again = train(ckpt_path=tmp_path / "stop.ckpt", max_steps=15)
    assert again.ledger == []
    assert again.global_step == 15


def test_15_skipping_the_rest_of_an_epoch_does_not_shift_later_resumes(tmp_path: Path) -> None:
    class Skips(LedgerModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 6 else None

    assert_goes_on_from_every_moment(tmp_path, numbers_module, WITHIN, fitting(Skips), served_again=0)


@pytest.mark.filterwarnings("ignore:.*yielded None")
def test_15_a_batch_of_none_does_not_shift_later_resumes(tmp_path: Path) -> None:
    def make() -> Any:
        def collate(samples: list[Any]) -> Any:
            return None if samples[0]["id"] == 5 else torch.utils.data.default_collate(samples)

        return numbers_module(train=Numbers(22), collate_fn=collate, shuffle=False, batch_size=1, val=None)

    assert_goes_on_from_every_moment(tmp_path, make, [("on_train_batch_end", 1, 9)], served_again=0)


def test_18_the_length_of_an_epoch_stays_the_whole_one_after_a_resume(tmp_path: Path) -> None:
    train(max_steps=13).trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", max_steps=14)
    assert resumed.trainer.num_training_batches == 11
    assert len(resumed.trainer.train_dataloader) == 11


def test_20_a_save_after_fit_returned_knows_the_position(tmp_path: Path) -> None:
    run = train(max_epochs=2)
    run.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", seed=99)
    whole = train()
    assert_stitches([run.ledger, resumed.ledger], whole.ledger, 0)
    assert_same_end(resumed, whole)


def test_20_a_save_after_an_evaluation_that_followed_fit_knows_the_position(tmp_path: Path) -> None:
    model = seeded(LedgerModel)
    run = train(max_steps=16, model=model)
    run.trainer.validate(model, datamodule=numbers_module(), verbose=False)
    run.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["StatefulDataCallback"]["progress"]["batch"] == 5


def reloading(sizes: dict[int, int]) -> Any:
    class Reloads(StatefulDataModule):
        """A training set of another size in each epoch."""

        def __init__(self) -> None:
            super().__init__(batch_size=2, seed=3)
            self.asked: list[int] = []

        def train_dataloader(self) -> Any:
            epoch = self.trainer.current_epoch
            self.asked.append(epoch)
            return DataLoader(Numbers(sizes[epoch], first=1000 * epoch), batch_size=2, shuffle=True)

    return Reloads


@pytest.mark.parametrize("every", [1, 2])
def test_24_loaders_reload_on_schedule_after_a_resume(tmp_path: Path, every: int) -> None:
    make = reloading({0: 10, 1: 16, 2: 12, 3: 8})
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 4}
    moments = [("on_train_batch_end", 1, 2), ("on_train_batch_end", 2, 1), ("on_train_epoch_end", 1, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, served_again=0, **options)


def test_24_loaders_built_once_more_before_training_keep_the_place_on_another_batch_size(tmp_path: Path) -> None:
    class Asks(LedgerModel):
        def configure_optimizers(self) -> Any:
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    how = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}
    first = train(model=seeded(Asks), **{**how, "max_steps": 15})
    first.trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed = train(lambda: numbers_module(batch_size=5), ckpt_path=tmp_path / "stop.ckpt", model=seeded(Asks), **how)
    seen = [index for event in trained(first.ledger + resumed.ledger) if event[1] == 1 for index in event[4]]
    assert sorted(seen) == list(range(22))


def test_25_seed_everything_does_not_replay_the_first_epoch(tmp_path: Path) -> None:
    def run(make: Any, **options: Any) -> Outcome:
        pl.seed_everything(5, verbose=False)
        return fitting(make_callbacks=lambda: [StatefulDataCallback(seed=2)])(make, **options)

    def make() -> Any:
        return DataLoader(Numbers(22), batch_size=2, shuffle=True)

    whole = assert_goes_on_from_every_moment(tmp_path, make, WITHIN, run, served_again=0)
    epochs = [[event[4] for event in trained(whole.ledger) if event[1] == epoch] for epoch in range(2)]
    assert epochs[0] != epochs[1]


@pytest.mark.filterwarnings("ignore:overfit_batches trains on the same batches.* is not shuffled")
@pytest.mark.parametrize("shuffle", [True, False])
def test_29_overfitting_trains_on_the_same_batches_in_every_epoch(tmp_path: Path, shuffle: bool) -> None:
    def make() -> Any:
        return numbers_module(shuffle=shuffle, val=None)

    moments = [("on_train_batch_end", 1, 1)]
    whole = assert_goes_on_from_every_moment(tmp_path, make, moments, served_again=0, overfit_batches=3, max_epochs=3)
    assert {event[4] for event in trained(whole.ledger)} == {(0, 1), (2, 3), (4, 5)}


def test_29_overfitting_says_that_it_does_not_shuffle() -> None:
    with pytest.warns(StatefulWarning, match="not shuffled"):
        train(lambda: numbers_module(val=None), overfit_batches=1, max_epochs=1)


class IterModel(LedgerModel):
    """A step that fetches by itself."""

    takes = 1

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        for _ in range(self.takes):
            batch, _, _ = next(dataloader_iter)
        loss = self._loss(batch)
        self.ledger.append(("train", self.current_epoch, self.global_step, self._ids(batch)))
        return loss


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_30_steps_that_fetch_by_themselves_resume_exactly(tmp_path: Path) -> None:
    moments = [*WITHIN, ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(
        tmp_path, lambda: numbers_module(val=None), moments, fitting(IterModel), served_again=0
    )


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_30_steps_that_take_several_batches_are_refused() -> None:
    model = seeded(IterModel)
    model.takes = 2
    with pytest.raises(ConfigurationError, match="has taken 2 batches in 1 step"):
        train(lambda: numbers_module(val=None), model=model)


def test_31_a_saved_state_does_not_change_when_training_goes_on(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                kept.append(trainer.datamodule.state_dict()["lightning_stateful"])

    train(callbacks=[Keep()])
    assert kept[0]["progress"]["consumed"] == 10


def test_early_stopping_within_an_epoch_resumes_with_its_patience(tmp_path: Path) -> None:
    def stopper() -> list[EarlyStopping]:
        return [EarlyStopping("val_loss", patience=2, min_delta=100.0, check_on_train_epoch_end=False)]

    run = fitting(make_callbacks=stopper)
    options: dict[str, Any] = {"val_check_interval": 3, "max_epochs": 4}
    moments = [("on_train_batch_end", 0, 4)]
    whole = assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, served_again=0, **options)
    assert len(trained(whole.ledger)) < 11 * 4


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
    def run(make: Any, **options: Any) -> Outcome:
        found = fitting(make_model)(make, **options)
        # Compared as the weights are.
        found.weights["lr"] = torch.tensor(found.trainer.optimizers[0].param_groups[0]["lr"])
        return found

    moments = [
        ("on_train_batch_end", 1, 4),
        ("on_train_batch_end", 1, 10),
        ("on_before_backward", 1, 4),
        ("on_validation_end", 1, 0),
        ("on_train_epoch_end", 1, 0),
        ("on_train_epoch_start", 1, 0),
    ]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=4)


@pytest.mark.filterwarnings("ignore:Early stopping conditioned on metric")  # in epoch 0, before any validation
def test_a_metric_logged_before_the_stop_is_monitored_after_it(tmp_path: Path) -> None:
    def fit(ckpt: Path | None = None, *others: Any) -> int:
        stopper = EarlyStopping("val_loss", patience=9, min_delta=100.0, check_on_train_epoch_end=True, strict=False)
        train(callbacks=[stopper, *others], ckpt_path=ckpt, check_val_every_n_epoch=2, max_epochs=4)
        return stopper.wait_count

    fit(None, StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=2, batch=4))
    assert fit(tmp_path / "stop.ckpt") == fit() == 2


def test_persistent_workers_end_with_the_training(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    run = train(lambda: numbers_module(num_workers=1, persistent_workers=True), max_epochs=1)
    left = [child for child in set(psutil.Process().children(recursive=True)) - before if child.status() != "zombie"]
    assert run.current_epoch == 1
    assert left == []


def test_manual_optimization_resumes_exactly(tmp_path: Path) -> None:
    class Manual(LedgerModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    moments = [*WITHIN, ("on_before_backward", 1, 4)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, fitting(Manual))


def test_a_second_fit_on_the_same_trainer_goes_on_within_the_epoch() -> None:
    model = seeded(LedgerModel)
    run = train(model=model, max_steps=15)
    run.trainer.fit_loop.epoch_loop.max_steps = -1
    run.trainer.fit(model, datamodule=numbers_module())
    whole = train()
    assert trained(model.ledger) == trained(whole.ledger)
    assert run.trainer.current_epoch == 3


def test_a_second_fit_on_other_data_says_that_the_rest_of_the_epoch_is_dropped() -> None:
    model = seeded(LedgerModel)
    run = train(model=model, max_steps=15)
    run.trainer.fit_loop.epoch_loop.max_steps = -1
    with pytest.warns(StatefulWarning, match="stopped after batch 4 of epoch 1"):
        run.trainer.fit(model, datamodule=numbers_module(train=Numbers(18)))


def test_a_second_fit_after_finished_epochs_goes_on_with_the_next_epoch() -> None:
    model = seeded(LedgerModel)
    run = train(model=model, max_epochs=1)
    run.trainer.fit_loop.max_epochs = 3
    run.trainer.fit(model, datamodule=numbers_module())
    assert [event[4] for event in trained(model.ledger)] == [event[4] for event in trained(train().ledger)]


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def test_finding_a_learning_rate_leaves_the_data_where_it_was(tmp_path: Path) -> None:
    model, data = seeded(LedgerModel), numbers_module()
    trainer = pl.Trainer(**QUIET, max_epochs=2, num_sanity_val_steps=0, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, datamodule=data, num_training=7, update_attr=False)
    model.ledger.clear()
    trainer.fit(model, datamodule=data)
    assert trained(model.ledger) == trained(train(max_epochs=2).ledger)


def test_scaling_the_batch_size_trains_with_the_size_found(tmp_path: Path) -> None:
    model = seeded(LedgerModel)
    trainer = pl.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path)
    data = numbers_module()
    Tuner(trainer).scale_batch_size(model, datamodule=data, mode="power", max_trials=2, steps_per_trial=2)
    assert data.batch_size in (4, 8)  # as Lightning 2.6 and 2.5 count trials
    model.ledger.clear()
    trainer.fit(model, datamodule=data)
    assert sorted(index for event in trained(model.ledger) for index in event[4]) == list(range(22))


def test_weights_only_checkpoints_are_refused_by_lightning_and_still_evaluate(tmp_path: Path) -> None:
    run = train(max_steps=13)
    run.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert checkpoint["StatefulDataModule"]["lightning_stateful"]["progress"] == {"epoch": 1, "cycle": 0, "consumed": 4}
    with pytest.raises(KeyError, match="contains only the model"):
        train(ckpt_path=tmp_path / "weights.ckpt")
    model = seeded(LedgerModel)
    pl.Trainer(**QUIET).validate(model, datamodule=numbers_module(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert len(model.ledger) == 3


def test_the_users_own_callback_is_not_added_twice() -> None:
    mine = StatefulDataCallback(seed=11)
    run = train(callbacks=[mine])
    assert [c for c in run.trainer.callbacks if isinstance(c, StatefulDataCallback)] == [mine]


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda data: RandomSampler(data, num_samples=13),
        lambda data: DistributedSampler(data, num_replicas=1, rank=0),
        SequentialSampler,
    ],
)
def test_9_torchs_own_samplers_are_patched_and_resume_exactly(tmp_path: Path, make_sampler: Any) -> None:
    class Theirs(StatefulDataModule):
        def train_dataloader(self) -> Any:
            data = Numbers(22)
            return DataLoader(data, batch_size=2, sampler=make_sampler(data))

    assert_goes_on_from_every_moment(tmp_path, Theirs, [("on_train_batch_end", 1, 3)], served_again=0)


def test_model_checkpoint_callbacks_keep_their_best_over_a_resume(tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=1, save_last=True)

    first = train(callbacks=[saver()], max_epochs=2)
    resumed = train(callbacks=[saver()], ckpt_path=tmp_path / "best" / "last.ckpt", seed=99)
    whole = train()
    assert trained(first.ledger) + trained(resumed.ledger) == trained(whole.ledger)
    assert_same_end(resumed, whole)
