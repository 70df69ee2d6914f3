"""Seeds and restores random generators: those that all code in a process shares, and those that an object holds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection
from contextlib import ContextDecorator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.generators.generator_memory import (
    Memory,
    exchange_memory,
    read_memory,
    seed_memory,
    write_memory,
)

T = TypeVar("T")
_MOST_OF_INT64 = 2**63 - 1
# The process's own generators, in the order of :class:`Randomness`.
KINDS = ("torch", "random", "numpy")
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Randomness(NamedTuple):
    """States of the CPU generators of torch, ``random`` and NumPy."""

    of_torch: torch.Tensor
    of_python: tuple[Any, ...]
    of_numpy: Any

    @classmethod
    def now(cls) -> Randomness:
        """The present states."""
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state())

    def as_texts(self) -> list[str]:
        """The states as texts that are equal for equal ones."""
        of_numpy = (*self.of_numpy[:1], self.of_numpy[1].tolist(), *self.of_numpy[2:])
        return [str(self.of_torch.tolist()), repr(self.of_python), repr(of_numpy)]

    def restore(self) -> None:
        """Put the generators back to these states."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        # NumPy takes a list here many times faster than the array it gave.
        np.random.set_state((self.of_numpy[0], self.of_numpy[1].tolist(), *self.of_numpy[2:]))


def seed_randomness(seed: int) -> None:
    """Seed the CPU generators of torch, NumPy and ``random``; other devices are left alone.

    Of the seed 63 bits are used, so that ``torch.initial_seed()`` fits into a tensor.
    """
    seed &= _MOST_OF_INT64
    torch.default_generator.manual_seed(seed)
    if not seed_memory(seed >> 31):
        np.random.seed(seed & 0xFFFFFFFF)
        of_python: Any = np.random.RandomState(seed >> 31).get_state()
        random.setstate((3, (*of_python[1].tolist(), of_python[2]), None))


def seed_kinds(kinds: Collection[str], seed: int) -> None:
    """Seed some of :data:`KINDS`."""
    if "torch" in kinds:
        torch.default_generator.manual_seed(seed & _MOST_OF_INT64)
    if "random" in kinds:
        random.seed(seed)
    if "numpy" in kinds:
        np.random.seed(seed & 0xFFFFFFFF)


def seed_devices(seed: int) -> None:
    """Seed the CPU generators, and torch's on every device that this machine has.

    As ``torch.manual_seed``, which remembers the call, with the stack, for each kind of device that there is not, and
    so takes longer than a small training step.
    """
    seed_randomness(seed)
    for seed_device in _seed_functions():
        seed_device(seed & _MOST_OF_INT64)


@lru_cache(maxsize=1)
def _seed_functions() -> list[Callable[[int], None]]:
    # device_count() asks the driver's library: is_available() may make processes that are forked later unfit for CUDA.
    found: list[Callable[[int], None]] = [torch.cuda.manual_seed_all] if torch.cuda.device_count() else []
    for name in ("xpu", "mtia", torch._C._get_privateuse1_backend_name()):
        device: Any = getattr(torch, name, None)
        if hasattr(device, "manual_seed_all") and device.is_available():
            found.append(device.manual_seed_all)
    if torch.backends.mps.is_available():
        found.append(torch.mps.manual_seed)
    return found


def seed_or_default(seed: int | None) -> int:
    """The seed itself, or for None the one of Lightning's ``seed_everything`` (``PL_GLOBAL_SEED``), or else 0.

    Raises:
        ConfigurationError: A seed is no integer, or negative.
    """
    if seed is not None:
        return as_int("seed", seed, least=0)
    found = os.environ.get("PL_GLOBAL_SEED", "0")
    try:
        return int(found)
    except ValueError:
        raise ConfigurationError(
            f"The environment variable PL_GLOBAL_SEED, which stands for seed=None, is {found!r} and no integer. Call "
            "seed_everything, or pass seed."
        ) from None


class keep_randomness(ContextDecorator):  # noqa: N801  # a context manager, in a third of the time a generator takes
    """Restore the CPU generators of torch, NumPy and ``random`` at the end of the block."""

    def __enter__(self) -> None:
        self._before = _snapshot()

    def __exit__(self, *error: object) -> None:
        _put_back(self._before)


def seed_generator(generator: object, seed: int) -> None:
    """Seed one of :data:`GENERATORS` in place."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(derive_seed("generator", seed)).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(seed)


def get_generator_state(generator: Any) -> Any:
    """The present state of one of :data:`GENERATORS`, for :func:`set_generator_state`; None where it has none."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Put one of :data:`GENERATORS` back to a state."""
    if isinstance(generator, random.SystemRandom):
        return
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def state_of_generator(generator: Any) -> str:
    """The present state of one of :data:`GENERATORS`, as text that is equal for equal states."""
    state = get_generator_state(generator)
    if isinstance(state, torch.Tensor):
        return bytes(state.numpy()).hex()
    if isinstance(generator, np.random.RandomState):
        # NumPy abbreviates the words of a Mersenne Twister in its texts.
        words = state["state"].pop("key", np.empty(0, np.uint32))
        return f"{words.tobytes().hex()} {state}"
    return repr(state)


class IsolatedReads:
    """Runs functions that read a batch under a seed, and leaves the process's CPU generators as they were.

    To seed the generators of NumPy and ``random`` takes longer than to read a small batch. If the first reads have
    drawn from neither, which shows in the generators' memory, later reads are run without. A read that does draw from
    one of them is then run once more, under its seed.
    """

    _NUM_TRIED = 8

    def __init__(self) -> None:
        # Reads so far that have drawn neither from NumPy nor from ``random``; None once one has.
        self._num_idle: int | None = 0

    def __call__(self, seed: int, read: Callable[[], T]) -> T:
        """Run ``read()`` under ``seed`` and return its result."""
        before = read_memory()
        if before is None:
            with keep_randomness():
                seed_randomness(seed)
                return read()
        try:
            if self._num_idle is not None and self._num_idle >= self._NUM_TRIED:
                torch.default_generator.manual_seed(seed & _MOST_OF_INT64)
                result = read()
                if _are_alike(read_memory(), before):
                    return result
                self._num_idle = None
            seed_randomness(seed)
            seeded = read_memory()
            result = read()
            if self._num_idle is not None:
                self._num_idle = self._num_idle + 1 if _are_alike(read_memory(), seeded) else None
            return result
        finally:
            write_memory(before)


def _are_alike(one: Memory | None, other: Memory | None) -> bool:
    """Whether NumPy and ``random`` are in the same states in both."""
    return one is not None and other is not None and one[1:] == other[1:]


class OwnRandomness:
    """CPU generators of torch, NumPy and ``random`` that one piece of code runs on in place of the process's.

    Within a ``with`` block the code draws from its own, which go on where it left them; outside nothing of that can be
    seen. It takes a few microseconds.

    Args:
        seed: Seeds them.
    """

    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int, *, other: int = 0, kinds: Collection[str] = ()) -> None:
        """Seed them; not within a block.

        Args:
            seed: The seed.
            other: The seed of some kinds of them.
            kinds: Which: some of :data:`KINDS`.
        """
        with keep_randomness():
            seed_randomness(seed)
            if kinds:
                of_seed = Randomness.now()
                seed_randomness(other)
                pairs = zip(KINDS, of_seed, Randomness.now(), strict=True)
                Randomness(*(after if kind in kinds else before for kind, before, after in pairs)).restore()
            self._held = _snapshot()

    def _exchange(self, *_: object) -> None:
        """Exchange the states of the process's generators for those held: its own outside a block, others within."""
        held = self._held
        before: Memory | Randomness | None = None if isinstance(held, Randomness) else exchange_memory(held)
        if before is None:
            before = _snapshot()
            _put_back(held)
        self._held = before

    __enter__ = __exit__ = _exchange


def _snapshot() -> Memory | Randomness:
    """The present states of torch, ``random`` and NumPy for :func:`_put_back`."""
    return read_memory() or Randomness.now()


def _put_back(snapshot: Memory | Randomness) -> None:
    """Restore a :func:`_snapshot`."""
    if isinstance(snapshot, Randomness):
        snapshot.restore()
    else:
        write_memory(snapshot)
