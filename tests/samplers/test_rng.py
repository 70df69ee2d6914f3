"""Process-wide generators and those that an object holds: seeded in place, kept and put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_stateful.samplers.rng import IsolatedReads, Randomness, keep_if_drawn, keep_randomness, seed_randomness


def draw() -> tuple[float, float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random(), random.gauss(0, 1)


def test_a_half_used_pair_of_normal_numbers_is_put_back() -> None:
    np.random.seed(1)
    random.seed(1)
    np.random.standard_normal(), random.gauss(0, 1)
    before = Randomness.now()
    expected = (np.random.standard_normal(), random.gauss(0, 1))
    before.restore()
    with keep_randomness():
        seed_randomness(7)

    assert (np.random.standard_normal(), random.gauss(0, 1)) == expected


@pytest.mark.parametrize("number", [1, 700])
def test_generators_that_were_seeded_and_drawn_from_are_put_back(number: int) -> None:
    seed_randomness(5)
    for _ in range(number):
        draw()
    before = Randomness.now()
    expected = draw()
    before.restore()
    with keep_if_drawn():
        seed_randomness(7)
        draw()

    assert draw() == expected


def test_generators_are_put_back_after_an_exception() -> None:
    before = Randomness.now()
    expected = draw()
    before.restore()
    with pytest.raises(ZeroDivisionError), keep_randomness():
        random.seed(random.random() // 0)

    assert draw() == expected


@pytest.mark.parametrize("seed", [3, 2**63 + 3, 2**64 - 1])
def test_the_seed_that_torch_tells_fits_into_a_tensor(seed: int) -> None:
    with keep_randomness():
        seed_randomness(seed)
        assert torch.tensor(torch.initial_seed()).item() == torch.initial_seed()
    reads = IsolatedReads()
    told = {reads(seed, torch.initial_seed) for _ in range(20)}
    assert told == {seed % 2**63}
