"""DataPipes of torch: workers and ranks divide a pass and shuffle it alike, as in a DataLoader alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, samples
from support.ranks import Ranks
from support.runs import assert_goes_on_from_every_moment, quiet_trainer, train_alone
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_stateful import StatefulDataCallback

MOMENTS = [("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 4)]

pytestmark = pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")


def sample(index: int) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor(index), "x": torch.full((4,), index / 100) + torch.rand(1)}


def made(num_workers: int = 0, *, is_shuffled: bool = True, persists: bool = True, **options: Any) -> Any:
    pipe: Any = IterableWrapper(range(24))
    pipe = pipe.shuffle(buffer_size=7) if is_shuffled else pipe
    pipe = pipe.sharding_filter().map(sample)
    return DataLoader(
        pipe, batch_size=2, num_workers=num_workers, persistent_workers=persists and num_workers > 0, **options
    )


@pytest.mark.parametrize(("num_workers", "persists"), [(0, False), (2, True), (2, False)])
def test_workers_share_an_epoch_and_a_resume_is_exact(tmp_path: Path, num_workers: int, persists: bool) -> None:
    def make() -> Any:
        return made(num_workers, persists=persists)

    ledger = train_alone(make, max_epochs=2).ledger
    for epoch in range(2):
        assert sorted(samples(ledger, epoch)) == list(range(24))
    assert_goes_on_from_every_moment(tmp_path, make, MOMENTS, train_alone, max_epochs=3)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_nothing_is_said_of_pipes_of_training_and_of_validation() -> None:
    model = LedgerModel()
    trainer = quiet_trainer(StatefulDataCallback(seed=1), max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(model, made(), made(is_shuffled=False))
    for epoch in range(2):
        assert sorted(samples(model.ledger, epoch)) == list(range(24))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("datapipes") / "2")


def ids_of_epochs(folder: Path, options: dict[str, Any]) -> list[list[int]]:
    ledger = train_alone(lambda: made(**options), **on_ranks(max_epochs=2)).ledger
    return [samples(ledger, epoch) for epoch in range(2)]


@pytest.mark.parametrize("options", [{}, {"is_shuffled": False}, {"num_workers": 1}])
def test_ranks_share_an_epoch(ranks: Ranks, options: dict[str, Any]) -> None:
    for found in zip(*ranks.of(ids_of_epochs, options), strict=True):
        assert len(found[0]) == len(found[1])
        assert sorted(found[0] + found[1]) == list(range(24))
