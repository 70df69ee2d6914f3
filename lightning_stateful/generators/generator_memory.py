"""Reads, writes and seeds the process's CPU generators in their memory, in a fraction of the time of their functions.

torch, NumPy and ``random`` all use the Mersenne Twister: 624 words of 32 bits, and how many of them are used up. On
import, objects that nobody else holds show where these lie. If they are not where they are expected, as on other
systems than Linux, nothing is read or written here, and callers use the generators' own functions.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

NUM_WORDS = 624
# States of torch, ``random`` and NumPy, and the second of two normal numbers that the last two keep for later.
Memory: TypeAlias = tuple[bytes, bytes, bytes, float | None, bytes]


def python_memory(generator: Any) -> Any:
    """The memory of a ``random.Random``: the number of words used up, and the words.

    None if objects are laid out in another way than in CPython.
    """
    if sys.implementation.name != "cpython":
        return None
    begin, end = object.__basicsize__, random.Random.__mro__[1].__basicsize__
    found = (ctypes.c_char * (end - begin)).from_address(id(generator) + begin)
    return found if _python_words(found.raw) == generator.getstate()[1] else None


def _python_words(memory: bytes) -> tuple[int, ...]:
    used, *words = np.frombuffer(memory, dtype=np.uint32)[: NUM_WORDS + 1].tolist()
    return (*words, used)


# In torch's object: its seed and numbers of words before the words, and normal numbers kept for later behind them.
_BEFORE_WORDS, _BEHIND_WORDS = 20, 28


def torch_memory(generator: torch.Generator) -> Any:
    """The memory of a ``torch.Generator`` on the CPU: its seed, words, their number, and normal numbers kept for later.

    None if torch lays out its objects in another way.
    """
    begin = _torch_begin()
    return None if begin is None else _torch_memory_from(generator, begin)


def _torch_memory_from(generator: torch.Generator, begin: int) -> Any:
    size = _BEFORE_WORDS + 4 * NUM_WORDS + _BEHIND_WORDS
    return (ctypes.c_char * size).from_address(_torch_address(generator) + begin)


def _torch_address(generator: torch.Generator) -> int:
    """The address of torch's own object, which the Python object begins with."""
    return ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value or 0


@lru_cache(maxsize=1)
def _torch_begin() -> int | None:
    """Where in torch's object the memory of its generator begins; None if a copy of it does not make two alike."""
    if sys.implementation.name != "cpython" or torch.Generator.__basicsize__ < object.__basicsize__ + 8:
        return None
    one, other = torch.Generator().manual_seed(2**40 + 5), torch.Generator().manual_seed(7)
    words = np.random.RandomState(5).get_state()[1][:16].tobytes()  # type: ignore[index]
    try:
        # Read by the system first: an address that is none would end the process.
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            begin = os.pread(memory.fileno(), 256, _torch_address(one)).find(words) - _BEFORE_WORDS
    except (OSError, OverflowError):
        return None
    if begin < 0:
        return None
    of_one, of_other = (_torch_memory_from(generator, begin) for generator in (one, other))
    # Of an odd count, normal numbers are kept, in double precision and in single.
    for draw in (
        int,
        lambda: torch.randn(1, dtype=torch.float64, generator=one),
        lambda: torch.randn(3, generator=one),
    ):
        draw()
        of_other.raw = of_one.raw
        if other.get_state().tolist() != one.get_state().tolist():
            return None
    return begin


_PYTHON: Any = vars(random)["_inst"]  # what the functions of the module are methods of
_PYTHON_MEMORY = python_memory(_PYTHON)
_TORCH_MEMORY = torch_memory(torch.default_generator)
# Of torch's own, to seed others by: it takes half the time of NumPy's.
_SEEDED = torch.Generator()
ALL_USED, NO_NORMAL = struct.pack("=i", NUM_WORDS), bytes(16)
_bit_generator: Callable[[], Any] = np.random.mtrand.get_bit_generator


def _words_of(memory: Any) -> Any:
    """The words in a :func:`torch_memory`."""
    return memory and (ctypes.c_char * (4 * NUM_WORDS)).from_buffer(memory, _BEFORE_WORDS)


_TORCH_WORDS, _SEEDED_WORDS = _words_of(_TORCH_MEMORY), _words_of(torch_memory(_SEEDED))


@lru_cache(maxsize=1)
def _numpy_memory(bits: Any) -> Any:
    """The memory of the generator behind NumPy's legacy functions: its words, and the number of them used up.

    None if the generator is of another kind than MT19937.
    """
    if type(bits) is not np.random.MT19937:
        return None
    return (ctypes.c_char * (4 * (NUM_WORDS + 1))).from_address(bits.ctypes.state_address)


def normal_memory(generator: np.random.RandomState) -> Any:
    """The memory of the second of two normal numbers, which a ``RandomState`` keeps for later, behind a flag.

    None if objects are laid out in another way than in CPython.
    """
    begin = _normal_begin()
    return None if begin is None else (ctypes.c_char * len(NO_NORMAL)).from_address(id(generator) + begin)


@lru_cache(maxsize=1)
def _normal_begin() -> int | None:
    """Where in a ``RandomState`` that lies."""
    if sys.implementation.name != "cpython":
        return None
    # Where it is shows in another object of that kind, which is given a flag and a number to be found by.
    tried, number = np.random.RandomState(0), 0.123456789
    held = (ctypes.c_char * type(tried).__basicsize__).from_address(id(tried))
    state: Any = tried.get_state()
    tried.set_state((*state[:3], 1, number))
    begin = held.raw.find(struct.pack("=qd", 1, number))
    tried.set_state((*state[:3], 0, 0.0))
    if begin < 0 or any(held.raw[begin : begin + 16]):
        return None
    return begin


# That of NumPy's legacy functions.
_NORMAL_MEMORY = normal_memory(np.random.mtrand._rand)
_IS_KNOWN = None not in (_TORCH_MEMORY, _PYTHON_MEMORY, _NORMAL_MEMORY)


def _memory_of_numpy() -> Any:
    """That of NumPy; None if any of the three cannot be read."""
    return _numpy_memory(_bit_generator()) if _IS_KNOWN else None


def read_memory() -> Memory | None:
    """The states of the process's CPU generators; None if their memory cannot be read."""
    of_numpy = _memory_of_numpy()
    if of_numpy is None:
        return None
    return _TORCH_MEMORY.raw, _PYTHON_MEMORY.raw, of_numpy.raw, _PYTHON.gauss_next, _NORMAL_MEMORY.raw


def write_memory(memory: Memory) -> None:
    """Restore what :func:`read_memory` gave."""
    of_numpy = _memory_of_numpy()
    _TORCH_MEMORY.raw, _PYTHON_MEMORY.raw, of_numpy.raw, _PYTHON.gauss_next, _NORMAL_MEMORY.raw = memory


def exchange_memory(memory: Memory) -> Memory | None:
    """Put the generators into other states; their present ones, or None if they cannot be read, and nothing is done."""
    of_numpy = _memory_of_numpy()
    if of_numpy is None:
        return None
    # Here once more, as this is done twice for each batch of a user's sampler.
    before = _TORCH_MEMORY.raw, _PYTHON_MEMORY.raw, of_numpy.raw, _PYTHON.gauss_next, _NORMAL_MEMORY.raw
    _TORCH_MEMORY.raw, _PYTHON_MEMORY.raw, of_numpy.raw, _PYTHON.gauss_next, _NORMAL_MEMORY.raw = memory
    return before


def seed_memory(for_python: int) -> bool:
    """Seed NumPy as torch was seeded just now, and ``random`` with another 32 bits; False if nothing can be done.

    They are then as ``np.random.seed`` with the lower 32 bits of torch's seed leaves NumPy.
    """
    of_numpy = _memory_of_numpy()
    if of_numpy is None:
        return False
    of_numpy.raw, _NORMAL_MEMORY.raw = _TORCH_WORDS.raw + ALL_USED, NO_NORMAL
    _SEEDED.manual_seed(for_python)
    _PYTHON_MEMORY.raw, _PYTHON.gauss_next = ALL_USED + _SEEDED_WORDS.raw, None
    return True
