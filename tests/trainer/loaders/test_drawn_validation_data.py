"""Validation data that ``val_dataloader`` draws are the same on a resume, whatever is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.ledger import Numbers
from support.runs import stopped, train_alone
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Endless(IterableDataset[Any]):
    """Samples of an iterable without a length."""

    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers(10)
        return (numbers[index] for index in range(10))


class Drawn(Dataset[Any]):
    """Samples that nothing shows but reading them, drawn as it is built."""

    def __init__(self) -> None:
        self.of = {number: {"id": torch.randint(10**6, ()), "x": torch.randn(4)} for number in range(4)}

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: int) -> Any:
        return self.of[index]


class DrawsValidation(pl.LightningDataModule):
    """Training data of some kind, and validation data that are drawn.

    Args:
        train: What is trained on.
    """

    def __init__(self, train: Any) -> None:
        super().__init__()
        self.train = train

    def train_dataloader(self) -> Any:
        return DataLoader(self.train(), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Drawn(), batch_size=2)


@pytest.mark.filterwarnings("ignore:.*were read again")
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("train", [Endless, partial(Numbers, 10)], ids=["iterable", "map-style"])
def test_a_resume_draws_the_validation_data_of_the_run(tmp_path: Path, train: Any, every: int) -> None:
    options: dict[str, Any] = {"max_epochs": 4, "check_val_every_n_epoch": every}
    make = partial(DrawsValidation, train)
    whole = train_alone(make, **options)
    path = tmp_path / "last.ckpt"
    before = stopped(path, make, hook="on_train_batch_end", epoch=3, batch=2, run=train_alone, **options)

    rest = train_alone(make, ckpt_path=path, **options)

    assert before + rest.ledger == whole.ledger
    assert any(event[0] == "val" for event in rest.ledger)


class DrawsAsItIsRead(IterableDataset[Any]):
    """Samples that are drawn from the generators of the process."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            yield {"id": torch.randint(10**6, ()), "x": torch.randn(4)}


class DrawsAsValidationIsRead(DrawsValidation):
    """Training data of some kind, and validation data that are drawn as they are read, in so many workers."""

    def __init__(self, train: Any, workers: int) -> None:
        super().__init__(train)
        self.workers = workers

    def val_dataloader(self) -> Any:
        return DataLoader(DrawsAsItIsRead(), batch_size=2, num_workers=self.workers)


@pytest.mark.filterwarnings("ignore:.*were read again")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("hook", "batch"), [("on_train_batch_end", 1), ("on_train_batch_end", 3), ("on_validation_batch_end", 1)]
)
def test_a_validation_that_a_resume_begins_with_draws_as_in_the_run(
    tmp_path: Path, hook: str, batch: int, workers: int
) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 1 if hook == "on_validation_batch_end" else 2}
    make = partial(DrawsAsValidationIsRead, partial(Numbers, 10), workers)
    whole = train_alone(make, **options)
    path = tmp_path / "last.ckpt"
    stopped(path, make, hook=hook, epoch=1, batch=batch, run=train_alone, **options)

    rest = train_alone(make, ckpt_path=path, **options)

    assert rest.ledger == whole.ledger[-len(rest.ledger) :]
    assert rest.ledger[0][0] == "val"
    assert sum(event[0] == "val" for event in rest.ledger) > 2
