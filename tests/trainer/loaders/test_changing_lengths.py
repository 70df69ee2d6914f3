"""Epochs of different lengths: Lightning is told each before its first batch, and resumes within any of them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.ddp_runs import Link, assert_chains, chain_of, steps_of
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import assert_goes_on_from_every_moment, quiet_trainer, seeded, stopped, train_alone
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import StatefulDataCallback, StatefulLoader
from lightning_stateful.core import EpochPlan, Progress, SampleBatchOrder, ShuffledOrder
from lightning_stateful.errors import StatefulWarning

SAMPLES = (10, 16, 6, 14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing(SampleBatchOrder):
    """Epochs of 10, 16, 6 and 14 samples."""

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> EpochPlan:
        samples = ShuffledOrder(SAMPLES[epoch % 4], 3)
        whole = SampleBatchOrder(samples=samples, batch_size=self.batch_size)
        return whole.plan(epoch, num_replicas, progress)


def growing(batch_size: int = 2) -> StatefulLoader:
    order = Growing(samples=ShuffledOrder(max(SAMPLES)), batch_size=batch_size)
    return StatefulLoader(Numbers(16), batch_sampler=order)


class Lengths(pl.Callback):
    """Notes what Lightning says of every epoch as it begins, and what it takes for the last batch."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.told.append((trainer.num_training_batches, trainer.val_check_batch, len(trainer.train_dataloader)))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        self.told.append((progress.is_last_batch, progress.current.processed))


MOMENTS = [
    ("on_train_batch_end", 0, 2),
    ("on_train_batch_end", 1, 6),
    ("on_validation_end", 1, 0),
    ("on_train_batch_end", 2, 2),
    ("on_train_epoch_start", 3, 0),
    ("on_train_batch_end", 3, 5),
]


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"val_check_interval": 0.5}], ids=str)
def test_every_epoch_has_its_own_length_and_resumes_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    run: Any = partial(train_with_validation, **options)
    assert_goes_on_from_every_moment(tmp_path, growing, MOMENTS, run, max_epochs=4)

    lengths = Lengths()
    run(growing, callbacks=[lengths], max_epochs=4)
    share = options.get("val_check_interval", 1.0)
    expected = [((n, int(n * share), n), (True, n)) for n in (count // 2 for count in SAMPLES)]
    assert lengths.told == [told for epoch in expected for told in epoch]


def train_with_validation(make: Any, *, callbacks: Any = (), **options: Any) -> Any:
    class Module(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return make()

        def val_dataloader(self) -> Any:
            return DataLoader(Numbers(3, first=100))

    return train_alone(Module, callbacks=callbacks, **options)


def test_other_loaders_cycle_or_end_with_the_epoch(tmp_path: Path) -> None:
    def beside() -> Any:
        return {"a": growing(), "b": DataLoader(Numbers(8, first=50), batch_size=2, shuffle=True)}

    assert_goes_on_from_every_moment(tmp_path, beside, MOMENTS[:2] + MOMENTS[3:], train_alone, max_epochs=4)


def test_the_log_says_each_length_that_is_another(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train_alone(growing, max_epochs=3)
    said = [record.message for record in caplog.records if "as its len() says now" in record.message]
    assert [message.split(" of the")[0] for message in said] == ["Epoch 1 has 8 batches", "Epoch 2 has 3 batches"]


class FirstOnes(Sampler[int]):
    """As many samples as it is set to."""

    length = 4

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class AllOf(FirstOnes):
    """As many samples as a dataset has."""

    def __init__(self, dataset: Numbers) -> None:
        self.dataset = dataset

    length = property(lambda self: len(self.dataset))  # type: ignore[assignment]  # the dataset's


class Adds(pl.Callback):
    """Sets the count at the end of each epoch; asks how long the next one is, and counts the steps of each."""

    def __init__(self, holder: Any) -> None:
        self.holder, self.steps, self.asks = holder, Counter[int](), False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps[trainer.current_epoch] += 1
        assert not self.asks or len(trainer.train_dataloader)

    def on_train_epoch_end(self, *_: Any) -> None:
        self.holder.length += 4


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs by something else")
@pytest.mark.filterwarnings("ignore:AllOf no longer yields what it did before training")
@pytest.mark.parametrize("asks", ["nothing", "a checkpoint", "len()"])
@pytest.mark.parametrize("of_dataset", [False, True])
def test_a_length_that_a_hook_sets_is_that_of_the_next_epoch_whatever_asks_before(
    of_dataset: bool, asks: str, tmp_path: Path
) -> None:
    dataset = Numbers(4 if of_dataset else 16)
    sampler = AllOf(dataset) if of_dataset else FirstOnes()
    adds = Adds(dataset if of_dataset else sampler)
    adds.asks = asks == "len()"
    saves = [ModelCheckpoint(tmp_path, every_n_train_steps=1)] if asks == "a checkpoint" else []
    trainer = quiet_trainer(StatefulDataCallback(), adds, *saves, max_epochs=3, enable_checkpointing=bool(saves))
    trainer.fit(LedgerModel(), DataLoader(dataset, batch_size=4, sampler=sampler))
    assert adds.steps == {0: 1, 1: 2, 2: 3}


def test_an_epoch_without_a_validation_is_warned_of() -> None:
    with pytest.warns(StatefulWarning, match="Epoch 2 has 3 batches, and val_check_interval=5: it has no validation"):
        train_with_validation(growing, max_epochs=3, val_check_interval=5)


def test_in_a_loop_the_length_is_that_of_the_epoch_that_was_begun_or_chosen() -> None:
    loader = growing()
    found = [len(loader)]
    for _ in loader:
        found.append(len(loader))
    assert found == [5] * 6
    loader.set_epoch(1)
    assert (len(loader), len(list(loader))) == (8, 8)


def chain(folder: Path) -> list[Link]:
    stops = [("on_train_batch_end", 1, 2), ("on_train_batch_end", 2, 0), ("on_train_epoch_end", 2, 0)]
    return chain_of(growing, folder, stops, callbacks=lambda: [StatefulDataCallback(seed=5)], max_epochs=4)


def test_two_ranks_resume_within_every_length(tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = assert_chains(Ranks(2, tmp_path_factory.mktemp("lengths")).of(chain))
    assert [len(steps_of(runs, epoch)) for epoch in range(4)] == [3, 4, 2, 4]


class Estimates(LedgerModel):
    """Asks how many steps a schedule has."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_schedule_is_planned_by_the_first_epoch_on_a_resume_too(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    stopped(path, growing, epoch=2, batch=1, run=train_alone, max_epochs=4)
    estimates = []
    for ckpt_path in (None, path):
        model = seeded(Estimates)
        train_alone(growing, model=model, max_epochs=4, ckpt_path=ckpt_path)
        estimates.append(model.estimate)
    assert estimates == [4 * SAMPLES[0] // 2] * 2


class LongerByEpoch(Sampler[int]):
    """Is as long as the epoch says that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8 + 2 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def test_a_length_by_the_epoch_is_none_that_a_hook_has_set(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Numbers(16), batch_size=2, sampler=LongerByEpoch())

    whole = train_alone(make)
    before = stopped(tmp_path / "a.ckpt", make, epoch=0, batch=3, run=train_alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StatefulWarning)
        rest = train_alone(make, ckpt_path=tmp_path / "a.ckpt")
    assert before + rest.ledger == whole.ledger
