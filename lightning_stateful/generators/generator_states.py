"""Sets, reads and puts back the states of random generators that objects hold, in about a microsecond."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_stateful.core.seeding import mixed_seed
from lightning_stateful.generators.generator_memory import ALL_USED, NO_NORMAL, NUM_WORDS, normal_memory, python_memory
from lightning_stateful.generators.rng import (
    get_generator_state,
    seed_generator,
    set_generator_state,
    state_of_generator,
)

_63_BITS = 2**63 - 1
_KINDS = frozenset({torch.Generator, np.random.Generator, np.random.RandomState, random.Random})


def identity_of(value: Any) -> int | None:
    """Tells generators apart: two that draw from the same state are one. 0 for those not to be seeded; None for others.

    Not to be seeded here are those of the process itself, and of devices; random generators of subclasses are others.
    """
    if type(value) not in _KINDS:
        return None
    if type(value) is torch.Generator:
        return 0 if value is torch.default_generator or value.device.type != "cpu" else id(value)
    if type(value) is random.Random:
        return 0 if value is vars(random)["_inst"] else id(value)
    bits = value.bit_generator if type(value) is np.random.Generator else value._bit_generator
    if bits is np.random.mtrand.get_bit_generator():
        return 0
    return id(bits) if type(value) is np.random.Generator or type(bits) is np.random.MT19937 else 0


class GeneratorState:
    """The state of a generator, by its own functions.

    Args:
        generator: The generator.
        place: A 64-bit number that tells generators of the same batch apart.
    """

    __slots__ = ("_high", "_increment", "_words", "generator", "place")

    def __init__(self, generator: Any, place: int) -> None:
        self.generator, self.place = generator, place
        self._high, self._increment = mixed_seed(place, 1), mixed_seed(place, 2) << 64 | mixed_seed(place, 3) | 1
        # Gives the 624 words of a Mersenne Twister many times faster than its own functions seed it.
        is_twister = isinstance(generator, (np.random.RandomState, random.Random))
        self._words = state_for(np.random.default_rng(0), place) if is_twister else None

    def seed(self, seed: int) -> None:
        """Seed it from (seed, place), to the same state on every platform.

        Of NumPy's default generator the lower half of the state is the seed; its step, a multiplication, carries that
        to all bits that are given out.
        """
        held = self.generator
        if isinstance(held, np.random.Generator) and isinstance(held.bit_generator, np.random.PCG64):
            state: Any = {"state": self._high << 64 | seed ^ self.place, "inc": self._increment}
            held.bit_generator.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
        elif isinstance(held, np.random.RandomState):
            held.set_state(("MT19937", np.frombuffer(self._drawn_words(seed), np.uint32), NUM_WORDS, 0, 0.0))
        elif isinstance(held, random.Random):
            held.setstate((3, (*np.frombuffer(self._drawn_words(seed), np.uint32).tolist(), NUM_WORDS), None))
        else:
            seed_generator(held, mixed_seed(self.place, seed) & _63_BITS)

    def _drawn_words(self, seed: int) -> bytes:
        """All words of a Mersenne Twister, of 32 bits each in this machine's order of bytes."""
        source: Any = self._words
        source.seed(seed)
        drawn = source.generator.bit_generator.random_raw(NUM_WORDS // 2)
        if sys.byteorder == "big":
            drawn = drawn.astype("<u8").view("<u4").astype(np.uint32)
        held: bytes = drawn.tobytes()
        return held

    def get(self) -> Any:
        """The state."""
        return get_generator_state(self.generator)

    def exchange(self, seed: int) -> Any:
        """Seed it, and return the state that it had."""
        held = self.get()
        self.seed(seed)
        return held

    def put(self, state: Any) -> None:
        """Put it back to a state."""
        set_generator_state(self.generator, state)


class _Pcg64State(GeneratorState):
    """The state of NumPy's default generator, in its memory: half a word left over, state, and increment."""

    __slots__ = ("_after", "_before", "_memory")

    def __init__(self, generator: Any, place: int) -> None:
        super().__init__(generator, place)
        address = generator.bit_generator.ctypes.state_address
        size = ctypes.c_uint64.from_address(address).value + 32 - address
        self._memory = (ctypes.c_char * (size - 8)).from_address(address + 8)
        self._before = bytes(size - 40)
        self._after = self._high.to_bytes(8, "little") + self._increment.to_bytes(16, "little")

    def seed(self, seed: int) -> None:
        self._memory.raw = self._before + (seed ^ self.place).to_bytes(8, "little") + self._after

    def exchange(self, seed: int) -> Any:
        memory = self._memory
        held = memory.raw
        memory.raw = self._before + (seed ^ self.place).to_bytes(8, "little") + self._after
        return held

    def get(self) -> Any:
        return self._memory.raw

    def put(self, state: Any) -> None:
        self._memory.raw = state


class _TwisterState(GeneratorState):
    """The state of a ``RandomState``, in its memory: 624 words and their number, and a second normal number."""

    __slots__ = ("_gauss", "_memory")

    def __init__(self, generator: Any, place: int) -> None:
        super().__init__(generator, place)
        self._memory = (ctypes.c_char * 2500).from_address(generator._bit_generator.ctypes.state_address)
        self._gauss = normal_memory(generator)

    def seed(self, seed: int) -> None:
        self._memory.raw, self._gauss.raw = self._drawn_words(seed) + ALL_USED, NO_NORMAL

    def get(self) -> Any:
        return self._memory.raw, self._gauss.raw

    def put(self, state: Any) -> None:
        self._memory.raw, self._gauss.raw = state


class _PythonState(GeneratorState):
    """The state of a ``random.Random``, in its memory: 624 words and their number; and a second normal number."""

    __slots__ = ("_memory",)

    def __init__(self, generator: Any, place: int) -> None:
        super().__init__(generator, place)
        self._memory = python_memory(generator)

    def seed(self, seed: int) -> None:
        self._memory.raw = ALL_USED + self._drawn_words(seed)
        self.generator.gauss_next = None

    def get(self) -> Any:
        return self._memory.raw, self.generator.gauss_next

    def put(self, state: Any) -> None:
        self._memory.raw, self.generator.gauss_next = state


def state_for(generator: Any, place: int) -> GeneratorState:
    """The state of a generator, in its memory where this version of NumPy has it where it is expected."""
    if type(generator) is np.random.Generator and type(generator.bit_generator) is np.random.PCG64 and _knows_pcg64():
        return _Pcg64State(generator, place)
    if type(generator) is np.random.RandomState and normal_memory(generator) is not None:
        return _TwisterState(generator, place)
    if type(generator) is random.Random and python_memory(generator) is not None:
        return _PythonState(generator, place)
    return GeneratorState(generator, place)


def process_states() -> tuple[Any, ...]:
    """The present states of the CPU generators of torch, NumPy and ``random``, equal as long as nothing is drawn."""
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return of_torch, *map(comparable_state, _process_generators(np.random.mtrand.get_bit_generator()))


def comparable_state(state: GeneratorState) -> Any:
    """The present state of a generator, equal as long as nothing is drawn."""
    return state_of_generator(state.generator) if type(state) is GeneratorState else state.get()


@lru_cache(maxsize=1)
def _process_generators(bits: Any) -> list[GeneratorState]:
    # The generator behind NumPy's functions can be exchanged, which leaves their RandomState as it is.
    of_numpy, of_python = vars(np.random.mtrand)["_rand"], vars(random)["_inst"]
    return [state_for(of_numpy, 0), state_for(of_python, 0)]


@lru_cache(maxsize=1)
def _knows_pcg64() -> bool:
    tried = np.random.default_rng(5)
    tried.integers(9, dtype=np.uint32)
    address = tried.bit_generator.ctypes.state_address
    # What lies between the two parts is there to align them.
    if not 16 <= ctypes.c_uint64.from_address(address).value - address <= 32:
        return False
    memory, state = _Pcg64State(tried, 0).get(), tried.bit_generator.state
    words = [int.from_bytes(memory[-32:-16], "little"), int.from_bytes(memory[-16:], "little")]
    told = [state["state"]["state"], state["state"]["inc"]]
    return words == told and struct.unpack("=iI", memory[:8]) == (1, state["uinteger"])
