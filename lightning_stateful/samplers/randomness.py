"""The generators of torch, NumPy and ``random`` that all code in a process shares, and those that an object holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_stateful.index.seeding import derive_seed

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Randomness(NamedTuple):
    """States of the CPU generators of torch, ``random`` and NumPy."""

    of_torch: torch.Tensor
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> Randomness:
        """The present states."""
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put the generators back to these states."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        # NumPy takes a list here many times faster than the array it gave.
        np.random.set_state((self.of_numpy[0], self.of_numpy[1].tolist(), *self.of_numpy[2:]))


def seed_randomness(seed: int) -> None:
    """Seed the CPU generators of torch, NumPy and ``random``; other devices are left alone."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def keep_randomness() -> Iterator[None]:
    """Put the CPU generators of torch, NumPy and ``random`` back at the end."""
    before = Randomness.now()
    try:
        yield
    finally:
        before.restore()


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one of :data:`GENERATORS` in place."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(derive_seed("generator", seed)).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.seed(seed)


def read_generator(generator: Any) -> Any:
    """Where one of :data:`GENERATORS` stands."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def write_generator(generator: Any, state: Any) -> None:
    """Put one of :data:`GENERATORS` where :func:`read_generator` found it."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
