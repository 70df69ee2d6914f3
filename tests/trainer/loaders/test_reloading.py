"""Loaders are built as often as they have to be, and those that are built anew leave no worker processes behind."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import LedgerModel, Numbers
from support.runs import StopAt, seeded, train
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful import StatefulDataCallback


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Numbers(6).__getitem__, range(6))


def workers(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=2, num_workers=1, **options)


class Data(pl.LightningDataModule):
    """Gives the training loaders that a function makes, and a validation loader, with workers."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.make, self.options = make, options

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return workers(Numbers(4), **self.options)


class Counts(pl.Callback):
    """Counts worker processes at the end of every epoch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_epoch_end(self, *args: Any) -> None:
        self.counts.append(len(multiprocessing.active_children()))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.filterwarnings("ignore:.*were read again.*")
@pytest.mark.parametrize(
    ("make", "options", "most"),
    [
        (lambda: workers(Numbers(6), persistent_workers=True), {"persistent_workers": True}, 2),
        (lambda: workers(Rows(), persistent_workers=True), {"persistent_workers": True}, 2),
        (lambda: CombinedLoader([workers(Numbers(6)), workers(Rows())], "min_size"), {}, 3),
    ],
    ids=["samples", "stream", "combined, without persistent workers"],
)
def test_replaced_loaders_end_their_workers(make: Any, options: Any, most: int) -> None:
    counts = Counts()
    train(
        lambda: Data(make, **options),
        callbacks=[StatefulDataCallback(), counts],
        reload_dataloaders_every_n_epochs=1,
        limit_train_batches=2,
        max_epochs=3,
    )
    assert len(counts.counts) == 3
    assert max(counts.counts) == most
    assert multiprocessing.active_children() == []


class Asks(LedgerModel):
    """Asks for the number of steps before there are optimizers, as schedulers are built with it."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 9
        return super().configure_optimizers()


@pytest.mark.parametrize("model", [LedgerModel, Asks])
@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 3}], ids=["once", "reloading"])
def test_a_run_builds_its_training_loaders_once_on_a_resume_too(tmp_path: Path, model: Any, options: Any) -> None:
    built = []

    def make() -> Any:
        built.append(len(built))
        return DataLoader(Numbers(6), batch_size=2, shuffle=True)

    def run(**how: Any) -> Any:
        return train(lambda: Data(make), callbacks=[StatefulDataCallback(), *how.pop("stop", [])], **how, **options)

    run(model=seeded(model), stop=[StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=1)])
    assert len(built) == 1
    run(model=seeded(model), ckpt_path=tmp_path / "stop.ckpt")
    assert len(built) == 2
