"""Iterables that draw the order of a pass from the process's generators, which nothing seeds as they are read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ledger import LedgerModel, batches
from support.runs import assert_goes_on_from_every_moment, seeded, train_alone
from torch.utils.data import DataLoader, IterableDataset

MOMENTS = [
    ("on_train_batch_end", 0, 1),
    ("on_train_epoch_end", 0, 0),
    ("on_train_batch_start", 1, 1),
    ("on_train_batch_end", 1, 2),
    ("on_train_epoch_end", 1, 0),
    ("on_train_batch_end", 2, 0),
]
READ_AGAIN = pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning")


class Shuffled:
    """Five batches in an order that ``random`` draws as a pass begins."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        numbers = random.sample(range(10), 10)
        for first in range(0, 10, 2):
            chosen = numbers[first : first + 2]
            yield {"id": torch.tensor(chosen), "x": torch.tensor([[number / 100] * 4 for number in chosen])}


class Sized(Shuffled):
    """Says how many they are."""

    def __len__(self) -> int:
        return 5


class ShuffledAtOnce(Shuffled):
    """Draws in ``iter()`` itself, from torch."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        numbers = torch.randperm(10).tolist()
        batches = [numbers[first : first + 2] for first in range(0, 10, 2)]
        return iter([{"id": torch.tensor(two), "x": torch.tensor([[one / 100] * 4 for one in two])} for two in batches])


class Remembers(Shuffled):
    """Has a state, with its order."""

    numbers: list[int]
    at = 0
    loaded: Any = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        loaded, self.loaded = self.loaded, None
        self.numbers, self.at = loaded or (random.sample(range(10), 10), 0)
        while self.at < 10:
            self.at += 2
            chosen = self.numbers[self.at - 2 : self.at]
            yield {"id": torch.tensor(chosen), "x": torch.tensor([[number / 100] * 4 for number in chosen])}

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["numbers"], state["at"]


class Samples(IterableDataset[Any]):
    """Samples in an order that torch's generator draws as a pass begins, which workers are seeded by."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in torch.randperm(10).tolist():
            yield {"id": torch.tensor(number), "x": torch.full((4,), number / 100)}


def assert_is_drawn_again(folder: Path, make: Any, run: Any = train_alone, **options: Any) -> Any:
    whole = assert_goes_on_from_every_moment(folder, make, MOMENTS, run, max_epochs=3, **options)
    orders = {tuple(map(str, batches(whole.ledger, epoch))) for epoch in range(3)}
    assert len(orders) == 3
    return whole


def run_without_seeding(make: Any, *, seed: int = 1, **options: Any) -> Any:
    """What the model draws would be others after a resume, so it draws nothing."""
    model = seeded(LedgerModel, seed)
    model.net[1] = torch.nn.Identity()
    torch.manual_seed(5)
    found = train_alone(make, model=model, settings={"seed_model": False}, **options)
    # What is seeded for the order is put back.
    assert torch.initial_seed() == 5
    return found


@READ_AGAIN
@pytest.mark.parametrize("seeds_model", [True, False])
@pytest.mark.parametrize("kind", [Shuffled, Sized, ShuffledAtOnce, Remembers])
def test_an_order_that_an_iterable_draws_is_drawn_again(tmp_path: Path, kind: Any, seeds_model: bool) -> None:
    assert_is_drawn_again(tmp_path, kind, train_alone if seeds_model else run_without_seeding)


@READ_AGAIN
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_so_is_one_of_a_loader_that_is_not_seeded(tmp_path: Path, num_workers: int) -> None:
    settings = {"seed_samples": False}
    assert_is_drawn_again(tmp_path, lambda: DataLoader(Samples(), 2, num_workers=num_workers), settings=settings)


@READ_AGAIN
def test_so_are_those_of_three_side_by_side(tmp_path: Path) -> None:
    whole = assert_is_drawn_again(tmp_path, lambda: {name: Sized() for name in ("one", "two", "three")})
    orders = [
        tuple(part for _, part in batch) for batch in zip(*(one for one in batches(whole.ledger, 1)), strict=True)
    ]
    assert len(set(orders)) == 3
