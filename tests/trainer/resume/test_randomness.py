"""Augmentation and dropout are functions of where training is, and of nothing else."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from support.ledger import LedgerModel, Numbers
from support.runs import (
    StopAt,
    assert_resumes,
    assert_same_end,
    numbers_module,
    quiet_trainer,
    seeded,
    stopped,
    train,
    training,
)
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, StateMismatchError


class Noisy(Dataset[Any]):
    """Augments with torch, NumPy and `random`, and with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        import random

        noise = [float(torch.rand(())), float(np.random.rand()), random.random(), self.generator.random()]
        return {"id": torch.tensor(index), "x": torch.tensor(noise)}


class Recorder(LedgerModel):
    def __init__(self) -> None:
        super().__init__()
        self.noise: dict[tuple[int, int], list[float]] = {}
        self.drawn: dict[tuple[int, int], float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for index, x in zip(batch["id"].tolist(), batch["x"].tolist(), strict=True):
            self.noise[self.current_epoch, index] = x
        self.drawn[self.current_epoch, batch_idx] = float(torch.rand(()))
        return super().training_step(batch, batch_idx)


def record(ckpt_path: Path | None = None, steps: int = -1, model_seed: int = 1, **options: Any) -> tuple[Recorder, Any]:
    model = seeded(Recorder, model_seed)
    run = train(
        lambda: numbers_module(train=Noisy(), val=None, **options),
        model=model, ckpt_path=ckpt_path, max_steps=steps, max_epochs=2,
    )  # fmt: skip
    return model, run.trainer


def test_augmentation_does_not_depend_on_workers() -> None:
    assert record()[0].noise == record(num_workers=2)[0].noise


def test_augmentation_differs_between_epochs_samples_and_seeds() -> None:
    noise = {tuple(values) for values in record()[0].noise.values()}
    other = {tuple(values) for values in record(seed=8)[0].noise.values()}
    # Of each of the four generators.
    assert [len(set(drawn)) for drawn in zip(*noise, *other, strict=True)] == [48] * 4


def test_augmentation_and_dropout_go_on_exactly_after_a_resume(tmp_path: Path) -> None:
    whole = record()[0]
    first, trainer = record(steps=8)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    second = record(tmp_path / "stop.ckpt", model_seed=77)[0]
    assert {**first.noise, **second.noise} == whole.noise
    assert {**first.drawn, **second.drawn} == whole.drawn
    assert not set(first.drawn) & set(second.drawn)


def test_seeding_of_the_model_can_be_switched_off() -> None:
    assert record(model_seed=1)[0].drawn == record(model_seed=2)[0].drawn
    free = record(model_seed=1, seed_model=False)[0].drawn
    assert free != record(model_seed=2, seed_model=False)[0].drawn
    assert free != record(model_seed=1)[0].drawn


def test_seed_everything_chooses_order_augmentation_and_dropout() -> None:
    def run(number: int | None, **options: Any) -> Any:
        if number is not None:
            pl.seed_everything(number, verbose=False)
        model = record(**{"seed": None, **options})[0]
        return list(model.noise.items()), model.drawn

    zero, three = run(None), run(3)
    assert three == run(None)
    assert run(4, seed=3) == three
    assert zero == run(3, seed=0)
    assert all(one != other for one, other in zip(zero, three, strict=True))


def test_a_resume_under_another_seed_everything_is_refused(tmp_path: Path) -> None:
    pl.seed_everything(3, verbose=False)
    record(steps=8, seed=None, shuffle=False)[1].save_checkpoint(tmp_path / "stop.ckpt")
    pl.seed_everything(4, verbose=False)
    with pytest.raises(StateMismatchError, match="seed: saved 3, now 4"):
        record(tmp_path / "stop.ckpt", seed=None, shuffle=False)
    record(tmp_path / "stop.ckpt", seed=None, shuffle=False, accept="seed")


class Reseeds(LedgerModel):
    def on_fit_start(self) -> None:
        pl.seed_everything(7, verbose=False)


def test_a_seed_that_a_hook_has_changed_is_refused_with_the_remedy_for_it(tmp_path: Path) -> None:
    pl.seed_everything(3, verbose=False)
    make = partial(numbers_module, seed=None)
    stopped(tmp_path / "x.ckpt", make, run=training(Reseeds), batch=2)
    pl.seed_everything(3, verbose=False)
    with pytest.raises(StateMismatchError, match=r"a hook calls seed_everything .*Callback\(seed=...\)"):
        train(make, model=seeded(Reseeds), ckpt_path=tmp_path / "x.ckpt")


def test_seeding_of_samples_can_be_switched_off() -> None:
    noise = record(seed_model=False)[0].noise
    assert record(model_seed=2, seed_model=False)[0].noise == noise
    assert record(model_seed=2, seed_model=False, seed_samples=False)[0].noise != noise


def test_reading_samples_in_the_main_process_leaves_the_models_randomness_alone() -> None:
    in_main_process = record(seed_model=False)[0].drawn
    assert record(seed_model=False, num_workers=1)[0].drawn == in_main_process


class DrawsInValidation(LedgerModel):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ledger.append(("val", float(torch.rand(())), float(np.random.rand())))


def test_what_a_validation_draws_does_not_depend_on_where_the_run_was_stopped(tmp_path: Path) -> None:
    run = training(DrawsInValidation)
    before = stopped(tmp_path / "stop.ckpt", run=run, batch=10)
    resumed = assert_resumes(tmp_path / "stop.ckpt", before, 0, run=run)
    assert sum(event[0] == "val" for event in resumed.ledger) == 9


class SeedsInSetup(DrawsInValidation):
    def setup(self, stage: str) -> None:
        pl.seed_everything(9, verbose=False)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["another process", "the same process"])
def test_a_seed_set_in_setup_is_that_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fresh: bool
) -> None:
    # Put back behind the test.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    run = training(SeedsInSetup)

    def make() -> Any:
        return numbers_module(seed=None)

    before = stopped(tmp_path / "stop.ckpt", run=run, make=make, batch=10)
    if is_fresh:
        monkeypatch.delenv("PL_GLOBAL_SEED")
    resumed = assert_resumes(tmp_path / "stop.ckpt", before, 0, run=run, make=make)
    assert resumed.trainer.callbacks[0].state_dict()["seed"] == 9
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")
    assert train(make, model=seeded(DrawsInValidation)).ledger == run(make).ledger


class ChoosesSubsets(pl.LightningDataModule):
    """Draws the samples of every epoch from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)

    def train_dataloader(self) -> Any:
        chosen = self.random.choice(22, 8, replace=False).tolist()
        return DataLoader(Subset(Numbers(22), chosen), batch_size=2, shuffle=True)


@pytest.mark.filterwarnings("ignore:The training loader of epoch 1 is another here")  # until the generator is put back
@pytest.mark.parametrize("moment", [{"batch": 3}, {"hook": "on_train_epoch_end"}], ids=str)
def test_a_generator_of_a_data_module_goes_on_behind_an_epoch(tmp_path: Path, moment: dict[str, Any]) -> None:
    def run(*callbacks: Any, **options: Any) -> Any:
        options |= {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
        return train(ChoosesSubsets, callbacks=[StatefulDataCallback(seed=7), *callbacks], **options)

    whole, path = run(), tmp_path / "x.ckpt"
    run(StopAt(moment.get("hook", "on_train_batch_end"), path, epoch=1, batch=moment.get("batch", 0)))
    resumed = run(ckpt_path=path, seed=99)
    assert [event for event in whole.ledger if event[:2] in (("train", 2), ("train", 3))] == [
        event for event in resumed.ledger if event[0] == "train"
    ]
    assert_same_end(resumed, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_on_a_gpu_goes_on_exactly_after_a_resume(tmp_path: Path) -> None:
    class OnGpu(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.drawn[self.current_epoch, batch_idx] = float(torch.rand((), device=self.device))
            return loss

    def run(model: Recorder, **how: Any) -> Any:
        return train(
            lambda: numbers_module(train=Noisy(), val=None), model=model, accelerator="gpu", max_epochs=2, **how
        )

    whole, first, second = seeded(OnGpu), seeded(OnGpu), seeded(OnGpu, 5)
    run(whole)
    run(first, max_steps=8).trainer.save_checkpoint(tmp_path / "stop.ckpt")
    run(second, ckpt_path=tmp_path / "stop.ckpt")
    assert {**first.drawn, **second.drawn} == whole.drawn


class DrawsAtStart(pl.Callback):
    """Draws the strength of an epoch as it starts."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.strength = float(np.random.rand())


@pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "ours last"])
def test_a_callback_that_draws_as_an_epoch_starts_is_seeded_or_warned_of(is_first: bool) -> None:
    ours, theirs = StatefulDataCallback(), DrawsAtStart()
    trainer = quiet_trainer(*((ours, theirs) if is_first else (theirs, ours)), max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(BoringModel(), DataLoader(torch.ones(8, 32), batch_size=2))
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    assert len(said) == (not is_first), said
    assert all("A callback that comes before StatefulDataCallback has drawn random numbers" in one for one in said)
