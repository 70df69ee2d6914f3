"""A dataset in persistent workers that reads the epoch from a Trainer or a module is warned of, and no other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

TOLD = "persistent workers keep the copy of it that they were started with"


class Items(Dataset[torch.Tensor]):
    """Samples that a function makes of their index, beside anything else that it holds."""

    def __init__(self, make: Callable[[int], Any] = float, **held: Any) -> None:
        self.make = make
        vars(self).update(held)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(self.make(index)))

    @property
    def epoch(self) -> int:
        raise AssertionError("a property was called")


class Data(pl.LightningDataModule):
    """Transforms of a data module's, of which one reads the trainer."""

    def train_dataloader(self) -> Any:
        return None

    def plain(self, index: int) -> int:
        return index

    def by_epoch(self, index: int) -> int:
        assert self.trainer is not None
        return index + self.trainer.current_epoch


class Keeps:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, index: int) -> int:
        return index


class OfAll(Items):
    """Has the trainer in its class."""

    trainer: Any = None


def of_class(trainer: Any) -> OfAll:
    OfAll.trainer = trainer
    return OfAll()


def attached(trainer: Any) -> Data:
    data = Data()
    data.trainer = trainer
    return data


HOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda trainer, module: Items(trainer=trainer),
    "closure": lambda trainer, module: Items(lambda index: index + trainer.current_epoch),
    "module in a list": lambda trainer, module: Items(held=[{"model": module}]),
    "slot": lambda trainer, module: Items(Keeps(module)),
    "method of the module": lambda trainer, module: Items(module.at),
    "method of a data module": lambda trainer, module: Items(attached(trainer).by_epoch),
    "data module": lambda trainer, module: Items(data=attached(trainer)),
    "class": lambda trainer, module: of_class(trainer),
}
DOES_NOT: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda trainer, module: Items(),
    "transform of a data module": lambda trainer, module: Items(attached(trainer).plain),
    "torch module": lambda trainer, module: Items(layer=torch.nn.Linear(1, 1)),
}


class Model(BoringModel):
    def at(self, index: int) -> int:
        return index + self.current_epoch


def said(make: Callable[[Any, Any], Any], **options: Any) -> list[str]:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StatefulDataCallback(seed=0)],
    )
    model = Model()
    loader = DataLoader(make(trainer, model), batch_size=4, multiprocessing_context="fork", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader)
    return [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize("name", HOLDS)
def test_a_trainer_in_persistent_workers_is_warned_of_once(name: str) -> None:
    (text,) = said(HOLDS[name], num_workers=1, persistent_workers=True)
    assert TOLD in text
    assert "Pass persistent_workers=False" in text


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_reads_no_trainer_is_not(name: str) -> None:
    assert not said(DOES_NOT[name], num_workers=1, persistent_workers=True)


def test_workers_that_end_with_the_epoch_are_not() -> None:
    assert not said(HOLDS["attribute"], num_workers=1)


class AsksForRank(Sampler[int]):
    """Asks the trainer of its data module for the rank, and counts its passes."""

    def __init__(self, data: pl.LightningDataModule) -> None:
        self.data, self.passes = data, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        trainer: Any = self.data.trainer
        return iter(torch.randperm(8).tolist()[trainer.global_rank :: trainer.world_size])


class WithValidation(pl.LightningDataModule):
    """Training data in the order of such a sampler, and validation data."""

    def train_dataloader(self) -> Any:
        return DataLoader(Items(), sampler=AsksForRank(self))

    def val_dataloader(self) -> Any:
        return DataLoader(Items())


def test_what_a_validation_notes_in_the_trainer_is_no_change_of_a_sampler_that_asks_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StatefulWarning)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=3,
            callbacks=[StatefulDataCallback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(BoringModel(), datamodule=WithValidation())
    assert trainer.global_step == 24
