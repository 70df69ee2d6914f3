"""What is run on every rank with data that differ, or seem to differ, between ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed
import torch.utils.data

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from lightning_stateful.errors import StatefulWarning
from support.ddp_cases import DDP, evaluating_trainer
from support.ledger import LedgerModel, Numbers
from support.runs import StopAt, numbers_module, train

ONE_EPOCH = {**DDP, "max_epochs": 1}


def rows() -> Any:
    data = {"id": list(range(22)), "x": torch.arange(88.0).reshape(22, 4).div(100).tolist()}
    return datasets.Dataset.from_dict(data).with_format("torch")


class Mapped(StatefulDataModule):
    """Maps its rows by a method: ``datasets`` cannot tell that it is the same in every process."""

    def __init__(self) -> None:
        super().__init__(batch_size=2)
        self.process = os.urandom(8)

    def setup(self, stage: str) -> None:
        self.train = rows().map(self.double)

    def double(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"x": [2 * value for value in row["x"]]}


def fingerprints_of_its_own(folder: Path) -> dict[str, Any]:
    """A run that is stopped and resumed, with what was warned of."""
    path = folder / "stop.ckpt"
    stop = StopAt("on_train_batch_end", path, batch=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StatefulWarning)
        first = train(Mapped, callbacks=[stop], **ONE_EPOCH)
        fingerprint = first.trainer.datamodule.train._fingerprint
        resumed = train(Mapped, ckpt_path=path, **ONE_EPOCH)
    return {
        "fingerprint": fingerprint,
        "parts": [stop.ledger, resumed.ledger],
        "warned": [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)],
    }


def other_rows(folder: Path) -> Any:
    return train(lambda: StatefulDataModule(rows().shuffle(seed=torch.distributed.get_rank())), **ONE_EPOCH)


def other_rows_accepted(folder: Path) -> int:
    def make() -> Any:
        data = rows().shuffle(seed=torch.distributed.get_rank())
        return StatefulDataModule(data, batch_size=2, accept=("dataset.rows", "dataset.fingerprint"))

    return len(train(make, **ONE_EPOCH).ledger)


def other_lengths_accepted(folder: Path) -> Any:
    rank = torch.distributed.get_rank()
    return train(lambda: numbers_module(train=Numbers(22 + 4 * rank), accept=("dataset", "length")), **ONE_EPOCH)


def described_in_another_order(folder: Path) -> int:
    class Described(Numbers):
        def describe(self) -> dict[Any, Any]:
            said = {"mean": np.float32(0.5), "std": float("nan"), 3: np.int64(1)}
            return said if torch.distributed.get_rank() else dict(reversed(said.items()))

    return len(train(lambda: numbers_module(train=Described(22)), **ONE_EPOCH).ledger)


def loaders_in_another_order(folder: Path) -> Any:
    data = {"a": Numbers(8), "b": Numbers(8)}
    if torch.distributed.get_rank():
        data = dict(reversed(data.items()))
    return train(lambda: StatefulDataModule(data), **ONE_EPOCH)


class Shapes(Numbers):
    """Samples with as many rows as are given, which can only be stacked if they are alike."""

    def __init__(self, *rows: int) -> None:
        super().__init__(len(rows))
        self.rows = rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "x": torch.ones(self.rows[index], 4)}


class Pairs(torch.utils.data.Sampler[list[int]]):
    """Batches of one sample, backwards."""

    def __iter__(self) -> Any:
        return iter([[index] for index in range(5)][::-1])

    def __len__(self) -> int:
        return 5


def evaluation_of_shapes(folder: Path) -> dict[str, Any]:
    """What each rank has evaluated, and what it was told."""
    ways = {
        "alike": StatefulDataModule(val=Shapes(1, 1, 1, 1, 1)),
        "differing": StatefulDataModule(val=Shapes(*range(1, 6))),
        "workers": StatefulDataModule(val=Shapes(*range(1, 6)), num_workers=1),
        "fitting pair": StatefulDataModule(val=Shapes(1, 2, 3, 3, 4)),
        "shuffled": torch.utils.data.DataLoader(Shapes(*range(1, 6)), shuffle=True),
        "batches": torch.utils.data.DataLoader(Shapes(*range(1, 6)), batch_sampler=Pairs()),
    }
    found = {}
    for way, data in ways.items():
        model = LedgerModel()
        is_module = isinstance(data, StatefulDataModule)
        trainer = evaluating_trainer(callbacks=None if is_module else [StatefulDataCallback()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StatefulWarning)
            trainer.validate(model, **{"datamodule" if is_module else "dataloaders": data}, verbose=False)
        said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
        found[way] = ([event[4] for event in model.ledger], said)
    return found


ALL = [
    evaluation_of_shapes,
    fingerprints_of_its_own,
    other_rows,
    other_rows_accepted,
    other_lengths_accepted,
    described_in_another_order,
    loaders_in_another_order,
]
