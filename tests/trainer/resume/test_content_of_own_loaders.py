"""Batches of a loader with an ``__iter__`` of its own are compared on a resume, where it hands on what is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from support.ledger import LedgerModel
from support.runs import StopAt, assert_goes_on_from_every_moment, stopped, train_alone
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_stateful.errors import StatefulWarning


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Shows nothing of what samples hold."""

    def __init__(self, plus: int = 0) -> None:
        self._sample = lambda index: index + plus

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(self._sample(index)), "x": torch.rand(4)}


class HandsOn(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Repacks(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield dict(batch)


class Pairs(DataLoader[Any]):
    """Reads lists, and gives tuples."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, collate_fn=in_list, **options)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield tuple(batch)


def in_list(samples: list[Any]) -> list[Any]:
    return [default_collate(samples), torch.zeros(1)]


class TakesFirst(LedgerModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


class Doubles(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield {**batch, "x": batch["x"] * 2}


class Samples(Repacks):
    """Collates by a method that draws from a generator of the loader's, as samplers of neighbours do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, collate_fn=self.sample, **options)
        self.rng, self.calls = np.random.default_rng(3), 0

    def sample(self, samples: list[Any]) -> Any:
        return {**default_collate(samples), "x": torch.from_numpy(self.rng.random((len(samples), 4))).float()}


class Counts(Samples):
    def sample(self, samples: list[Any]) -> Any:
        self.calls += 1
        batch = default_collate(samples)
        return {**batch, "id": batch["id"] + 100 * self.calls}


class ByEpoch(Rows):
    """Has other samples in each epoch, which the loader tells it."""

    epoch = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "id": sample["id"] + 100 * self.epoch}


class Tells(DataLoader[Any]):
    passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch

    def __iter__(self) -> Iterator[Any]:
        self.dataset.epoch = self.passes  # type: ignore[attr-defined]
        yield from super().__iter__()


class Tell(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.train_dataloader.set_epoch(trainer.current_epoch)


def stop(path: Path, kind: Any, **options: Any) -> None:
    stopped(path, lambda: kind(Rows(), 2, **options), epoch=1, batch=3, run=train_alone)


def test_a_list_that_is_given_as_a_tuple_is_the_same_batch(tmp_path: Path) -> None:
    def run(plus: int, **options: Any) -> Any:
        return train_alone(lambda: Pairs(Rows(plus), 2), model=TakesFirst(), **options)

    run(0, callbacks=[StopAt("on_train_batch_end", tmp_path / "stop.ckpt", epoch=1, batch=3)])
    run(0, ckpt_path=tmp_path / "stop.ckpt")
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 1 has another content than when"):
        run(7, ckpt_path=tmp_path / "stop.ckpt")


@pytest.mark.parametrize("kind", [HandsOn, Repacks])
def test_other_content_is_warned_of(tmp_path: Path, kind: Any) -> None:
    stop(tmp_path / "stop.ckpt", kind)
    train_alone(lambda: kind(Rows(), 2), ckpt_path=tmp_path / "stop.ckpt")
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 1 has another content than when"):
        train_alone(lambda: kind(Rows(7), 2), ckpt_path=tmp_path / "stop.ckpt")


def test_that_of_a_sampler_of_the_users_is_warned_of(tmp_path: Path) -> None:
    order = [*range(21, -1, -1)]
    stop(tmp_path / "stop.ckpt", Repacks, sampler=order)
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 1 has another content than when"):
        train_alone(lambda: Repacks(Rows(7), 2, sampler=order), ckpt_path=tmp_path / "stop.ckpt")


def test_a_batch_that_it_has_changed_is_not_compared(tmp_path: Path) -> None:
    stop(tmp_path / "stop.ckpt", Doubles)
    train_alone(lambda: Doubles(Rows(7), 2), ckpt_path=tmp_path / "stop.ckpt")


@pytest.mark.filterwarnings("ignore:.*whenever batches are collated:lightning_stateful.errors.StatefulWarning")
def test_a_collate_fn_of_the_loaders_that_counts_in_workers_is_warned_of(tmp_path: Path) -> None:
    options = {"num_workers": 1, "persistent_workers": True}
    stop(tmp_path / "stop.ckpt", Counts, **options)
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 1 has another content whenever it is read"):
        train_alone(lambda: Counts(Rows(), 2, **options), ckpt_path=tmp_path / "stop.ckpt")


@pytest.mark.filterwarnings("ignore::lightning_stateful.errors.StatefulWarning")
def test_reading_a_batch_twice_leaves_no_trace_in_the_loader(tmp_path: Path) -> None:
    stopped(tmp_path / "stop.ckpt", lambda: Counts(Rows(), 2), batch=3, run=train_alone)
    counted = []
    for check_content in (True, False):
        loader = Counts(Rows(), 2)
        settings = {"check_content": check_content}
        train_alone(lambda: loader, ckpt_path=tmp_path / "stop.ckpt", max_epochs=1, settings=settings)  # noqa: B023
        counted.append(loader.calls)
    assert counted[0] == counted[1] > 0


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_generator_of_the_loaders_that_its_collate_fn_draws_from_is_seeded(tmp_path: Path, workers: int) -> None:
    def make() -> Any:
        return Samples(Rows(), 2, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    moments = [("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 4)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone)


def test_a_loader_that_tells_its_dataset_the_epoch_is_not_warned_of(tmp_path: Path) -> None:
    def run(make: Any, *, callbacks: Any = (), **options: Any) -> Any:
        return train_alone(make, callbacks=[Tell(), *callbacks], **options)

    moments = [("on_train_batch_end", 0, 3), ("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 4)]
    assert_goes_on_from_every_moment(tmp_path, lambda: Tells(ByEpoch(), 2), moments, run, max_epochs=3)
