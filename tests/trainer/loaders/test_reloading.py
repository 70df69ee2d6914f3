"""Loaders that a run builds anew leave no worker processes behind."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import Numbers
from support.runs import train
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
