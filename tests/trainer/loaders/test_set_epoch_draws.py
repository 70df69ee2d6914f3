"""A set_epoch that draws from the process's generators draws by (seed, epoch): each stop is resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harm.basics import LENGTH, loader
from harm.laws import resumed
from harm.runs import train
from harm.table import Entry
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from lightning_stateful import patch_dataloader


class Draws:
    """Draws an order when it is told an epoch."""

    order = torch.arange(LENGTH)

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(LENGTH)[torch.from_numpy(np.random.permutation(LENGTH))]


class DrawsSamples(Draws, Sampler[int]):
    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())


class DrawsEverySecond(DrawsSamples):
    """Keeps an order for two epochs."""

    def set_epoch(self, epoch: int) -> None:
        if epoch % 2 == 0:
            super().set_epoch(epoch)


class KeepsFirst(DrawsSamples):
    """Draws an order for two epochs where it is told the first time of one of them."""

    def __init__(self) -> None:
        self.orders: dict[int, torch.Tensor] = {}

    def set_epoch(self, epoch: int) -> None:
        if epoch // 2 not in self.orders:
            super().set_epoch(epoch)
        self.order = self.orders.setdefault(epoch // 2, self.order)


class DrawsBatches(Draws, Sampler[list[int]]):
    def __len__(self) -> int:
        return LENGTH // 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.order.view(-1, 4).tolist())


class DrawsInARow(Draws, IterableDataset[Any]):
    """Divides what it has drawn among workers."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(self.order[first::step])


MAKES: dict[str, Callable[[int], Any]] = {
    "sampler": lambda workers: loader(workers, sampler=DrawsSamples()),
    "in every second epoch": lambda workers: loader(workers, sampler=DrawsEverySecond()),
    "once": lambda workers: loader(workers, sampler=KeepsFirst()),
    "batch sampler": lambda workers: loader(workers, batch_sampler=DrawsBatches()),
    "iterable": lambda workers: loader(workers, dataset=DrawsInARow()),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", MAKES)
def test_each_stop_is_resumed_exactly_and_nothing_is_said(name: str, workers: int, tmp_path: Path) -> None:
    entry = Entry(MAKES[name], "runs")
    whole = train(entry, workers=workers)
    assert not whole.error
    assert whole.said == []
    samples = [sorted(index for at, of in whole.trained if at == epoch for index in of) for epoch in range(3)]
    assert samples == [list(range(LENGTH))] * 3
    for stop in (8,) if workers else (3, 6, 8):
        saved = train(entry, workers=workers, save=tmp_path / "stop.ckpt", after=stop)
        again = train(entry, workers=workers, ckpt_path=tmp_path / "stop.ckpt")
        assert resumed([saved], [again]) == ("exact", "")
        assert saved.trained == whole.trained
        assert again.said == []


@pytest.mark.filterwarnings("ignore:.*were read again, and left out:UserWarning")
@pytest.mark.parametrize("name", MAKES)
def test_a_loop_of_ones_own_resumes_exactly_and_finds_its_generators_as_they_were(name: str) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    before, of_numpy = torch.get_rng_state(), np.random.get_state()[1].tolist()
    ours, states, whole = patch_dataloader(MAKES[name](0), seed=7), [], []
    for epoch in range(3):
        ours.set_epoch(epoch)
        for batch in ours:
            states.append(ours.state_dict())
            whole.append(batch.tolist())
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == of_numpy
    for stop in (3, 8):
        torch.manual_seed(stop)
        again = patch_dataloader(MAKES[name](0), seed=7)
        again.load_state_dict(states[stop - 1])
        assert [batch.tolist() for epoch in range(stop // 6, 3) for batch in again] == whole[stop:]
