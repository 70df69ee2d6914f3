"""Loaders, data modules and trainers can be pickled with all they hold: workers and ranks may be spawned.

Those of multiprocessing's server are sent what spawned ones are sent, and begin within a moment.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.ledger import LedgerModel, Numbers, samples
from support.runs import numbers_module, quiet_trainer, seeded, stopped, train, train_alone
from support.stream_runs import chunks
from torch.utils.data import DataLoader, default_collate

from lightning_stateful import StatefulDataModule
from lightning_stateful.loops.lightning import pl


class Collates(StatefulDataModule):
    """Workers need one of its methods."""

    def __init__(self, context: str) -> None:
        options: Any = {"num_workers": 1, "multiprocessing_context": context, "persistent_workers": True}
        super().__init__(Numbers(8), batch_size=2, collate_fn=self.collate, seed=7, **options)

    def collate(self, samples: list[Any]) -> Any:
        return {**default_collate(samples), "x": torch.ones(len(samples), 4)}


class Plain(pl.LightningDataModule):
    """The same in Lightning's own words; a worker gets the whole trainer with it."""

    def __init__(self, context: str) -> None:
        super().__init__()
        self.options: Any = {"num_workers": 1, "multiprocessing_context": context, "persistent_workers": True}

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(8), batch_size=2, collate_fn=self.collate, **self.options)

    collate = Collates.collate


@pytest.mark.parametrize("kind", [Collates, Plain])
def test_workers_that_are_spawned_have_methods_of_data_modules(kind: Any) -> None:
    def run(context: str) -> Any:
        return train_alone(lambda: kind(context), max_epochs=1).ledger

    assert run("forkserver") == run("fork")


class Pickles(pl.Callback):
    """Pickles a trainer, with all that hangs on it, in hooks of a resumed run."""

    done = 0

    def _pickle(self, trainer: pl.Trainer, *args: Any) -> None:
        for again in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
            assert again.global_step == trainer.global_step
        self.done += 1

    on_train_start = on_train_batch_end = on_validation_batch_end = _pickle


@pytest.mark.parametrize(
    ("make", "run", "times"),
    [(numbers_module, train, 1 + 8 + 3), (lambda: DataLoader(chunks(), batch_size=2), train_alone, 1 + 8)],
    ids=["sized", "stream"],
)
def test_a_trainer_can_be_pickled_at_any_moment_of_a_resumed_run(
    tmp_path: Path, make: Any, run: Any, times: int
) -> None:
    stopped(tmp_path / "stop.ckpt", make, run=run, batch=2)
    pickles = Pickles()
    run(make, callbacks=[pickles], ckpt_path=tmp_path / "stop.ckpt", max_epochs=1)
    assert pickles.done == times


def test_ranks_that_are_spawned_train_on_all_samples(tmp_path: Path) -> None:
    trainer = quiet_trainer(Writes(tmp_path), strategy=DDPStrategy(start_method="forkserver"), devices=2)
    trainer.fit(seeded(LedgerModel), datamodule=numbers_module())
    found = [torch.load(path, weights_only=True) for path in sorted(tmp_path.iterdir())]
    assert len(found) == 2
    assert sorted(index for of_rank in found for index in of_rank) == list(range(22))


class Writes(pl.Callback):
    """Writes down what a rank was trained on, for the process that spawned it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        torch.save(samples(module.ledger), self.folder / str(trainer.global_rank))
