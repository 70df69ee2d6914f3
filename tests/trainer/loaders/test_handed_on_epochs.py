"""A sampler that hands the epoch on to its dataset: the dataset is told what it is told without the callback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harm.basics import LENGTH, Indices, loader, permutation
from harm.laws import resumed
from harm.runs import train
from harm.table import Entry
from torch.utils.data import Sampler

from lightning_stateful import patch_dataloader


class Told(Indices):
    """Its samples are their index and the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([int(index), self.epoch])


class OfClass(Indices):
    epoch = 0


class TakesEpoch(Told):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Assigns(Sampler[int]):
    def __init__(self, dataset: Any) -> None:
        self.dataset, self.number = dataset, 0

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        self.number = self.dataset.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.number))


class Calls(Assigns):
    def set_epoch(self, epoch: int) -> None:
        self.number = epoch
        self.dataset.set_epoch(epoch)


class AssignsInPass(Assigns):
    def set_epoch(self, epoch: int) -> None:
        self.number = epoch

    def __iter__(self) -> Iterator[int]:
        self.dataset.epoch = self.number
        return super().__iter__()


class HoldsNoEpoch(Assigns):
    def set_epoch(self, epoch: int) -> None:
        self.dataset.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.dataset.epoch))


class AssignsToClass(Assigns):
    def set_epoch(self, epoch: int) -> None:
        type(self.dataset).epoch = epoch


CASES = [(Assigns, Told), (Assigns, TakesEpoch), (Calls, TakesEpoch), (AssignsInPass, TakesEpoch), (HoldsNoEpoch, Told)]


def made(sampler: Any, dataset: Any, workers: int = 0) -> Any:
    held = dataset()
    return loader(workers, dataset=held, sampler=sampler(held))


# In workers, a set_epoch that hands the epoch on is the same whichever way it does.
@pytest.mark.parametrize(
    ("sampler", "dataset", "workers"),
    [
        pytest.param(*case, workers, marks=pytest.mark.slow if workers and number else ())
        for number, case in enumerate(CASES)
        for workers in (0, 2)
    ],
)
def test_a_run_is_as_without_the_callback_and_each_stop_is_resumed_exactly(
    sampler: Any, dataset: Any, workers: int, tmp_path: Path
) -> None:
    entry = Entry(lambda workers: made(sampler, dataset, workers), "runs")
    plain, whole = train(entry, own=False, workers=workers), train(entry, workers=workers)
    assert (whole.trained, whole.error, whole.said) == (plain.trained, "", [])
    for stop in (8,) if workers else (3, 6, 8, 12):
        saved = train(entry, workers=workers, save=tmp_path / "stop.ckpt", after=stop)
        again = train(entry, workers=workers, ckpt_path=tmp_path / "stop.ckpt")
        assert saved.trained == whole.trained
        assert (resumed([saved], [again]), again.said) == (("exact", ""), [])


@pytest.mark.parametrize(("sampler", "dataset"), CASES)
def test_a_loop_of_ones_own_is_as_with_torch_whenever_a_state_is_asked_for(sampler: Any, dataset: Any) -> None:
    found = []
    for ours in (made(sampler, dataset), patch_dataloader(made(sampler, dataset))):
        batches = []
        for epoch in range(3):
            ours.sampler.set_epoch(epoch)
            for batch in ours:
                batches.append(batch.tolist())
                assert not hasattr(ours, "state_dict") or ours.state_dict()
        found.append(batches)
    assert found[0] == found[1]


def test_one_that_tells_the_class_of_its_dataset_is_refused_by_name() -> None:
    run = train(Entry(lambda workers: made(AssignsToClass, OfClass, workers), "refused"))
    assert run.refused
    assert "AssignsToClass changes `OfClass.epoch`" in run.error
