"""Samplers draw from generators of their own: the same items whatever the run draws, and nothing taken from the run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import patch_dataloader
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.generators.rng import keep_randomness, seed_randomness
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

DRAWS = {
    "python": lambda: int(1000 * random.random()),
    "python_normal": lambda: int(1000 * random.gauss(0, 1)),
    "numpy": lambda: int(np.random.randint(1000)),
    "numpy_normal": lambda: int(1000 * np.random.standard_normal()),
    "torch": lambda: int(torch.randint(1000, ())),
    "torch_normal": lambda: int(1000 * torch.randn(())),
    "torch_double_normal": lambda: int(1000 * torch.randn((), dtype=torch.float64)),
    "torch_seed": lambda: torch.initial_seed() % 1000,
    "reseeded": lambda: int(torch.manual_seed(5).initial_seed()) + (random.seed(6) or np.random.seed(7) or 0),
    "many": lambda: (
        int(torch.randperm(700)[0]) + int(np.random.permutation(700)[0]) + random.sample(range(999), 700)[0]
    ),
    "nothing": lambda: 7,
}


class Mixed(Sampler[Any]):
    """Draws each item by a few of :data:`DRAWS`, others in every epoch, in nested generator functions."""

    def __init__(self, script: int, *, is_batched: bool, length: int = 40) -> None:
        self.script, self.is_batched, self.length, self.epoch = script, is_batched, length, 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from self.items(random.Random(1000 * self.script + self.epoch))

    def items(self, chooses: random.Random) -> Iterator[Any]:
        names = chooses.sample(list(DRAWS), chooses.randrange(1, 4))
        for number in range(self.length):
            # Of some epochs it draws from another generator towards the end alone.
            chosen = chooses.choices([*DRAWS] if number > 30 and self.script % 2 else names, k=2)
            batch = [abs(DRAWS[name]()) for name in chosen]
            yield batch if self.is_batched else batch[0]


def of_run() -> list[int]:
    """Draws of training itself between two steps."""
    return [draw() for name, draw in DRAWS.items() if name != "reseeded"]


def alone(sampler: Mixed, seed: int, epoch: int) -> list[Any]:
    """The items of an epoch of a sampler that has the generators of the process for itself."""
    with keep_randomness():
        sampler.set_epoch(epoch)
        seed_randomness(derive_seed("sampler", seed, epoch, 0))
        return list(sampler)


@pytest.mark.parametrize("script", range(6))
def test_items_and_the_generators_of_the_run_are_as_if_neither_saw_the_other(script: int) -> None:
    is_batched = script % 3 > 0
    order = WrappedSampler(Mixed(script, is_batched=is_batched), batch_size=None if is_batched else 1, seed=script)
    undisturbed = Mixed(script, is_batched=is_batched)
    seed_randomness(script)
    expected_of_run = [of_run() for _ in range(3 * 40)]
    seed_randomness(script)
    steps = iter(expected_of_run)
    for epoch in range(3):
        found = []
        for _, item in order.plan(epoch, 1).batches(0):
            found.append(item if is_batched else item[0])
            assert of_run() == next(steps)
        assert found == alone(undisturbed, script, epoch)


def test_a_sampler_that_fails_leaves_the_generators_of_the_run_as_they_were() -> None:
    class Fails(Mixed):
        def __iter__(self) -> Iterator[Any]:
            for number, item in enumerate(super().__iter__()):
                if number == 20 and self.epoch:
                    raise ZeroDivisionError(random.random())
                yield item

    loader: Any = patch_dataloader(DataLoader(range(4000), sampler=Fails(4, is_batched=False), batch_size=None))
    loader.set_epoch(1)
    seed_randomness(3)
    expected = [of_run() for _ in range(2)]
    seed_randomness(3)
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            pass

    assert [of_run() for _ in range(2)] == expected
