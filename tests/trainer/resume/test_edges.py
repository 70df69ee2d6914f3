"""Rare moments and settings of a resume, each found by trying to break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    OnExceptionCheckpoint,
)
from support.ledger import LedgerModel, Numbers, trained
from support.runs import (
    SaveAt,
    SaveOnException,
    StoppedError,
    assert_goes_on_from_every_moment,
    assert_log_goes_on,
    assert_resumes,
    assert_same_end,
    assert_stitches,
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
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback, StatefulDataModule, StatefulLoader
from lightning_stateful.errors import ConfigurationError, StateError, StatefulWarning, StateMismatchError


class TwoLoaders(StatefulDataModule):
    def train_dataloader(self) -> Any:
        return [DataLoader(Numbers(22), batch_size=2), DataLoader(Numbers(8), batch_size=2)]


@pytest.mark.parametrize("make", [numbers_module, TwoLoaders])
def test_a_window_that_a_resume_broke_into_loses_nothing_at_the_next_stop(tmp_path: Path, make: Any) -> None:
    stopped(tmp_path / "a.ckpt", make, batch=4)
    stopped(tmp_path / "b.ckpt", make, ckpt_path=tmp_path / "a.ckpt", accumulate_grad_batches=4)
    last = train(make, ckpt_path=tmp_path / "b.ckpt", accumulate_grad_batches=4)
    assert trained(last.ledger)[0][1:3] == (0, 5)


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_a_finder_is_refused_on_a_resume_and_would_start_over(tmp_path: Path, finder: Any) -> None:
    ended(tmp_path / "stop.ckpt", max_steps=15)
    with pytest.raises(ConfigurationError, match=f"{finder.__name__} would restart the run"):
        train(ckpt_path=tmp_path / "stop.ckpt", callbacks=[finder()])


def test_a_checkpoint_of_a_run_that_had_not_restored_itself_is_refused(tmp_path: Path) -> None:
    ended(tmp_path / "stop.ckpt", max_steps=15)
    stopped(tmp_path / "hollow.ckpt", hook="on_fit_start", ckpt_path=tmp_path / "stop.ckpt")
    with pytest.raises(StateError, match="had not yet restored its optimizers"):
        train(ckpt_path=tmp_path / "hollow.ckpt")


class WithoutOptimizer(LedgerModel):
    def configure_optimizers(self) -> Any:
        raise ValueError("no optimizer")


@pytest.mark.parametrize(("seed", "model"), [(8, LedgerModel), (7, WithoutOptimizer)], ids=["refused", "error later"])
def test_a_resume_that_fails_does_not_write_over_its_checkpoint(tmp_path: Path, seed: int, model: Any) -> None:
    path = tmp_path / "on_exception.ckpt"
    train(max_steps=15).trainer.save_checkpoint(path)
    written = path.read_bytes()
    with pytest.raises((StateMismatchError, ValueError), match=r"seed: saved 7, now 8|no optimizer"):
        train(
            lambda: numbers_module(seed=seed),
            model=model(),
            callbacks=[OnExceptionCheckpoint(tmp_path)],
            ckpt_path=path,
        )
    assert path.read_bytes() == written


def test_a_checkpoint_between_the_restoring_and_the_first_batch_resumes_exactly(tmp_path: Path) -> None:
    stopped(tmp_path / "a.ckpt", epoch=1, batch=3)
    module = numbers_module()
    build = module.val_dataloader

    def save_and_build() -> Any:
        # As the handler of a signal may do just then.
        assert module.trainer is not None
        module.trainer.save_checkpoint(tmp_path / "b.ckpt")
        return build()

    module.val_dataloader = save_and_build  # type: ignore[method-assign]
    train(lambda: module, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
    assert_resumes(tmp_path / "b.ckpt", [])


def test_a_finished_run_that_is_resumed_and_saved_again_can_be_extended(tmp_path: Path) -> None:
    first = ended(tmp_path / "last.ckpt", max_epochs=1)
    idle = ended(tmp_path / "last.ckpt", max_epochs=1, ckpt_path=tmp_path / "last.ckpt")
    assert idle.ledger == []
    assert_resumes(tmp_path / "last.ckpt", first.ledger, 0, max_epochs=2)


def test_a_checkpoint_of_a_callback_that_starts_before_ours_resumes(tmp_path: Path) -> None:
    saves = LambdaCallback(on_train_start=lambda trainer, module: trainer.save_checkpoint(tmp_path / "b.ckpt"))
    stopped(tmp_path / "a.ckpt", epoch=1, batch=3)
    train(callbacks=[saves], ckpt_path=tmp_path / "a.ckpt")
    assert_resumes(tmp_path / "b.ckpt", [])


@pytest.mark.parametrize(("hook", "epoch"), [("on_train_start", 1), ("on_train_batch_start", 2)])
def test_a_checkpoint_taken_as_a_resumed_run_begins_resumes_exactly(tmp_path: Path, hook: str, epoch: int) -> None:
    stopped(tmp_path / "a.ckpt", epoch=1, batch=10)
    stopped(tmp_path / "b.ckpt", hook=hook, epoch=epoch, ckpt_path=tmp_path / "a.ckpt", seed=9)
    assert_resumes(tmp_path / "b.ckpt", [])


def test_a_schedule_of_accumulation_goes_on_with_its_factor(tmp_path: Path) -> None:
    run = training(make_callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})])
    moments = [("on_train_batch_end", 1, 3), ("on_before_backward", 1, 2), ("on_train_batch_end", 2, 4)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=3)


@pytest.mark.parametrize(("hook", "batch"), [("on_train_batch_end", 10), ("on_validation_start", 0)])
def test_a_validation_due_at_max_steps_is_made_up_for(tmp_path: Path, hook: str, batch: int) -> None:
    before = stopped(tmp_path / "stop.ckpt", hook=hook, batch=batch, max_steps=11)
    resumed = train(ckpt_path=tmp_path / "stop.ckpt", max_steps=11)
    assert_stitches([before, resumed.ledger], uninterrupted(max_steps=11).ledger, 0)
    assert resumed.trainer.max_steps == resumed.global_step == 11


class CrashesInValidation(LedgerModel):
    armed = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.armed and self.current_epoch == 1 and batch_idx == 1:
            raise StoppedError
        super().validation_step(batch, batch_idx, dataloader_idx)


def test_a_save_after_a_crash_in_a_validation_makes_up_for_the_validation(tmp_path: Path) -> None:
    first = ended(tmp_path / "stop.ckpt", model=seeded(CrashesInValidation))
    resumed = assert_resumes(tmp_path / "stop.ckpt", first.ledger, 1)
    assert_log_goes_on(first.logged, resumed.logged, uninterrupted().logged)


def test_a_crash_in_the_validation_that_a_resumed_run_begins_with_does_not_lose_it(tmp_path: Path) -> None:
    before = stopped(tmp_path / "a.ckpt", hook="on_validation_start", epoch=1)
    ended(tmp_path / "b.ckpt", model=seeded(CrashesInValidation), ckpt_path=tmp_path / "a.ckpt")
    assert_resumes(tmp_path / "b.ckpt", before, 0)


def test_a_second_fit_after_a_crash_in_a_validation_makes_up_for_the_validation() -> None:
    model: Any = seeded(CrashesInValidation)
    trainer = train(model=model).trainer
    count, model.armed = len(model.ledger), False
    model.train()  # the crash has left it in evaluation mode
    trainer.fit(model, datamodule=numbers_module())
    assert [event[:2] for event in model.ledger[count : count + 3]] == [("val", 1)] * 3


def test_a_logger_that_fails_on_a_step_does_not_lose_the_validation_after_it(tmp_path: Path) -> None:
    class LosesConnection(SaveOnException):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 17:
                trainer.logger.log_metrics = self.fail

        def fail(self, *args: Any, **kwargs: Any) -> None:
            raise StoppedError

    first = train(callbacks=[LosesConnection(tmp_path / "stop.ckpt")], val_check_interval=3)
    resumed = assert_resumes(tmp_path / "stop.ckpt", first.ledger, 0, val_check_interval=3)
    whole = uninterrupted(val_check_interval=3)
    assert resumed.logged == whole.logged[len(whole.logged) - len(resumed.logged) :]


class Averages(LedgerModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("average", loss, on_step=False, on_epoch=True)
        return loss


def test_an_average_of_the_epoch_is_monitored_after_a_stop_at_its_end(tmp_path: Path) -> None:
    def fit(*others: Any, ckpt: Path | None = None) -> tuple[Any, ...]:
        stopper = EarlyStopping("average", patience=9, check_on_train_epoch_end=True)
        train(callbacks=[stopper, *others], ckpt_path=ckpt, model=seeded(Averages), max_epochs=2)
        return stopper.wait_count, float(stopper.best_score)

    moments = [("on_train_batch_end", 0, 10), ("on_validation_end", 1, 0), ("on_train_batch_end", 1, 10)]
    saver = SaveAt(tmp_path, moments)
    whole = fit(saver)
    assert [fit(ckpt=saver.path(number)) for number in saver.ledgers] == [whole] * 3


class ValidationByEpoch(StatefulDataModule):
    def __init__(self) -> None:
        super().__init__(Numbers(10), batch_size=2, seed=3)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(4, first=1000 * self.trainer.current_epoch), batch_size=2)


@pytest.mark.parametrize("every", [0, 2, 3])
def test_validation_loaders_are_those_of_the_uninterrupted_run(tmp_path: Path, every: int) -> None:
    moments = [("on_train_batch_end", 1, 1), ("on_train_epoch_end", 2, 0), ("on_validation_end", 3, 0)]
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 5}
    assert_goes_on_from_every_moment(tmp_path, ValidationByEpoch, moments, served_again=0, **options)


class WithVersion(StatefulDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": 3, "config": "mine"}


class WithoutSuper(StatefulDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {"version": 3}


@pytest.mark.parametrize("kind", [WithVersion, WithoutSuper])
def test_a_state_of_the_users_own_is_kept_beside_that_of_the_data(tmp_path: Path, kind: Any) -> None:
    def make() -> Any:
        return kind(Numbers(22), batch_size=2, seed=7)

    before = stopped(tmp_path / "stop.ckpt", make, epoch=1, batch=4)
    assert_resumes(tmp_path / "stop.ckpt", before, 0, make=make)
    assert torch.load(tmp_path / "stop.ckpt", weights_only=True)[kind.__qualname__]["version"] == 3


class Uninitialised(StatefulDataModule):
    def __init__(self) -> None:
        self.own = 1


def test_a_module_that_does_not_initialise_itself_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"Uninitialised.__init__ must call super\(\).__init__\(\)"):
        train(Uninitialised)


def test_samples_that_equal_steps_serve_twice_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    train_alone(lambda: StatefulLoader(Numbers(5), batch_size=1, num_replicas=2, rank=0), max_epochs=1)
    assert "1 of 5 samples are served twice in every epoch, because 2 ranks" in caplog.text


def test_a_loader_whose_state_a_trainer_keeps_without_the_callback_is_warned_of(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(LedgerModel(), StatefulLoader(Numbers(8), batch_size=2))
    with pytest.warns(StatefulWarning, match=r"this StatefulLoader, which counts batches that were fetched"):
        trainer.save_checkpoint(tmp_path / "stop.ckpt")


def test_a_data_module_that_serves_two_trainers_is_saved_by_each_at_its_own_place(tmp_path: Path) -> None:
    data = numbers_module()
    runs = [train(lambda: data, max_steps=steps) for steps in (13, 5)]
    for run in runs:
        run.trainer.save_checkpoint(tmp_path / "stop.ckpt")
        resumed = train(ckpt_path=tmp_path / "stop.ckpt")
        assert_stitches([trained(run.ledger), trained(resumed.ledger)], trained(uninterrupted().ledger), 0)
        assert_same_end(resumed, uninterrupted())


def test_a_callback_that_has_served_another_trainer_since_saves_nothing_of_the_first(tmp_path: Path) -> None:
    callback = StatefulDataCallback(seed=7)
    first = train(callbacks=[callback], max_steps=13)
    second = train(callbacks=[callback], max_steps=5)
    assert second.ledger == uninterrupted(max_steps=5).ledger
    with pytest.raises(StateError, match="Give every trainer a callback of its own"):
        first.trainer.save_checkpoint(tmp_path / "first.ckpt")


def test_a_checkpoint_without_loops_begins_at_epoch_0_with_a_warning(tmp_path: Path) -> None:
    ended(tmp_path / "stop.ckpt", max_steps=15)
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    del checkpoint["loops"]
    torch.save(checkpoint, tmp_path / "stop.ckpt")
    with pytest.warns(StatefulWarning, match="has no loop counters .*state_dict.* begins at epoch 0"):
        resumed = train(ckpt_path=tmp_path / "stop.ckpt", max_epochs=1)
    whole = uninterrupted(max_epochs=1)
    assert [event[-1] for event in trained(resumed.ledger)] == [event[-1] for event in trained(whole.ledger)]
