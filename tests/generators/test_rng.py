"""Process-wide generators and those that an object holds: seeded in place, kept and put back."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch

from lightning_stateful.generators import generator_memory
from lightning_stateful.generators.rng import (
    IsolatedReads,
    OwnRandomness,
    Randomness,
    keep_randomness,
    seed_randomness,
)


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
    with keep_randomness():
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


def normals() -> tuple[float, ...]:
    """Three normal numbers of each kind: of every pair the second is kept for later."""
    of_torch = [torch.randn((), dtype=kind).item() for kind in (torch.float32, torch.float64) for _ in range(3)]
    return (*np.random.standard_normal(3), *(random.gauss(0, 1) for _ in range(3)), *of_torch)


def test_own_generators_go_on_where_they_were_left_and_share_no_kept_normal_number() -> None:
    seed_randomness(7)
    of_own = [normals() for _ in range(4)]
    seed_randomness(5)
    of_process = [normals() for _ in range(4)]
    own, found = OwnRandomness(7), []
    seed_randomness(5)
    for expected in of_process:
        assert normals() == expected
        with own:
            found.append(normals())

    assert found == of_own


def test_a_read_that_takes_a_kept_normal_number_is_read_again_under_its_seed() -> None:
    reads = IsolatedReads()
    for seed in range(20):
        reads(seed, lambda: None)
    seed_randomness(5)
    _, following = np.random.standard_normal(), np.random.get_state()
    found = reads(9, np.random.standard_normal)
    state = np.random.get_state()
    seed_randomness(9)

    assert found == np.random.standard_normal()
    assert state[2:] == following[2:]
    assert (state[1] == following[1]).all()


@pytest.fixture(params=[True, False])
def is_read_in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(generator_memory, "_IS_KNOWN", False)
    return bool(request.param)


@pytest.mark.parametrize("seed", [0, 5, 2**31 + 7, 2**62 + 2**40 + 11])
def test_a_seed_gives_what_the_generators_own_functions_give(seed: int, is_read_in_memory: bool) -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    normals()  # kept ones are forgotten
    seed_randomness(seed)
    found = [
        *draw(),
        *normals(),
        *torch.rand(700).tolist(),
        *np.random.rand(700),
        *(random.random() for _ in range(700)),
    ]
    torch.manual_seed(seed), np.random.seed(seed % 2**32)
    words = np.random.RandomState(seed >> 31).get_state()[1]
    random.setstate((3, (*words.tolist(), 624), None))

    assert found == [
        *(*draw(), *normals(), *torch.rand(700).tolist()),
        *(*np.random.rand(700), *(random.random() for _ in range(700))),
    ]


def test_reads_and_own_generators_without_their_memory(is_read_in_memory: bool) -> None:
    seed_randomness(5)
    expected = [draw() for _ in range(3)]
    seed_randomness(7)
    of_own = [draw() for _ in range(20)]
    seed_randomness(9)
    of_read = draw()
    reads, own = IsolatedReads(), OwnRandomness(7)
    seed_randomness(5)
    found = [draw()]
    for before in of_own:
        with own:
            assert draw() == before
        assert reads(9, draw) == of_read
    found += [draw(), draw()]

    assert found == expected


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem is Linux's")
def test_memory_is_found_on_this_system() -> None:
    assert generator_memory.read_memory() is not None
