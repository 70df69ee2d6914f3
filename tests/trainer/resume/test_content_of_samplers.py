"""A batch that a sampler of the user's has chosen is read again on a resume, by its indices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import ended, train_alone
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lightning_stateful.errors import StatefulWarning


class Hidden(Dataset[dict[str, torch.Tensor]]):
    """May give other values for the same indices, which nothing shows; or others each time."""

    size = 0.0

    def __init__(self, plus: float = 0.0, *, draws: bool = False) -> None:
        self._value = lambda index: index / 10 + plus + (np.random.default_rng().random() if draws else 0.0)

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        value = self._value(index) + self.size
        return {"id": torch.tensor(index), "x": torch.rand(4) + value}


class Chosen(Sampler[int]):
    """A sampler of the user's, which may set what samples follow from."""

    def __init__(self, dataset: Any, *, sets: bool = False) -> None:
        self.generator, self.dataset, self.sets = random.Random(1), dataset, sets

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        if self.sets:
            self.dataset.size = 1.0
        return iter(self.generator.sample(range(22), 22))


def loader(plus: float = 0.0, *, batches: bool = False, sets: bool = False, draws: bool = False, **how: Any) -> Any:
    dataset = Hidden(plus, draws=draws)
    chosen = Chosen(dataset, sets=sets)
    if batches:
        return DataLoader(dataset, batch_sampler=BatchSampler(chosen, 2, drop_last=False), **how)
    return DataLoader(dataset, batch_size=2, sampler=chosen, **how)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("step", [4, 11])
def test_other_content_is_warned_of(tmp_path: Path, batches: bool, step: int) -> None:
    path, make = tmp_path / "x.ckpt", partial(loader, batches=batches)
    ended(path, make, run=train_alone, max_steps=step)
    train_alone(make, ckpt_path=path)
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 0 has another content .* by the same indices"):
        train_alone(partial(make, 1.0), ckpt_path=path)
    train_alone(partial(make, 1.0), ckpt_path=path, settings={"accept": ("dataset.content",)})


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_so_is_content_that_differs_each_time(tmp_path: Path, num_workers: int) -> None:
    path, make = tmp_path / "x.ckpt", partial(loader, draws=True, num_workers=num_workers)
    ended(path, make, run=train_alone, max_steps=4)
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 0 has another content whenever it is read"):
        train_alone(make, ckpt_path=path)


@pytest.mark.parametrize("step", [4, 11])
def test_what_a_sampler_sets_is_not_taken_for_other_content(tmp_path: Path, step: int) -> None:
    path, make = tmp_path / "x.ckpt", partial(loader, sets=True)
    ended(path, make, run=train_alone, max_steps=step)
    train_alone(make, ckpt_path=path)


class Looked(Dataset[dict[str, torch.Tensor]]):
    """Looks samples up by whatever a sampler yields."""

    def __init__(self, plus: float) -> None:
        self._value = lambda number: number + plus

    def __len__(self) -> int:
        return 22

    def __getitem__(self, item: Any) -> dict[str, torch.Tensor]:
        number = int(item[0] if isinstance(item, tuple) else item)
        return {"id": torch.tensor(number), "x": torch.full((4,), self._value(number) / 100)}


ITEMS = {
    "NumPy's integers": np.arange(22),
    "tensors": torch.arange(22),
    "strings": list(map(str, range(22))),
    "tuples": [(number, 0.5, "wide") for number in range(22)],
}


@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("batches", [False, True])
def test_other_content_is_warned_of_whatever_the_items_are(tmp_path: Path, items: str, batches: bool) -> None:
    class Yields(Sampler[Any]):
        def __len__(self) -> int:
            return 11 if batches else 22

        def __iter__(self) -> Iterator[Any]:
            found = ITEMS[items]
            return (found[2 * first : 2 * first + 2] for first in range(11)) if batches else iter(found)

    def make(plus: float = 0.0) -> Any:
        how: dict[str, Any] = {"batch_sampler": Yields()} if batches else {"sampler": Yields(), "batch_size": 2}
        return DataLoader(Looked(plus), **how)

    path = tmp_path / "x.ckpt"
    ended(path, make, run=train_alone, max_steps=4)
    train_alone(make, ckpt_path=path)
    with pytest.warns(StatefulWarning, match="Batch 0 of epoch 0 has another content .* by the same indices"):
        train_alone(partial(make, 1.0), ckpt_path=path)
