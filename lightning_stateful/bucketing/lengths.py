"""Lengths of samples: reading and checking them, their histogram, and a digest to recognise them by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.checks import check_length
from lightning_stateful.core.permutation import Indices
from lightning_stateful.errors import ConfigurationError

LengthArray = NDArray[np.integer[Any]]

# The first bytes of a .npy file.
_MAGIC = b"\x93NUMPY"
# Up to this length a table counts; beyond it lengths are sorted.
_LONGEST_TABLE = 2**24
_CHUNK = 2**20

MAX_SAMPLE_LENGTH = 2**42


class Histogram(NamedTuple):
    """The number of samples of each length.

    Attributes:
        values: The lengths that occur, rising; int64 of shape ``(distinct,)``.
        counts: The samples of each; int64 of the same shape.
    """

    values: Indices
    counts: Indices

    @property
    def total(self) -> int:
        """Sum of all lengths."""
        if int(self.values[-1]) * int(self.counts.sum()) < 2**63:
            return int(self.values @ self.counts)
        return sum(value * count for value, count in zip(self.values.tolist(), self.counts.tolist(), strict=True))


def open_lengths(lengths: Any, *, what: str = "lengths") -> LengthArray:
    """Open and check lengths as users give them; a ``.npy`` file is memory-mapped and shared between processes.

    Args:
        lengths: Integers, one a sample, as an array, tensor or sequence; or the path of a ``.npy`` file.
        what: A name for them in errors.

    Raises:
        ConfigurationError: The file cannot be read, or does not hold one integer a sample.
    """
    if not isinstance(lengths, (str, Path)):
        return check_lengths(lengths, what=what)
    try:
        found = read_array(Path(lengths))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{what} cannot be read from {str(lengths)!r}: {error}. Write them with numpy.save, one integer a sample."
        ) from None
    return check_lengths(found, what=what)


def read_array(path: Path) -> NDArray[Any]:
    """Open the array in a ``.npy`` file, memory-mapped.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no ``.npy`` file.
    """
    with path.open("rb") as file:
        # Told by its first bytes: NumPy opens archives and pickles, too.
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is no .npy file")
    found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def check_lengths(lengths: Any, *, what: str = "lengths") -> LengthArray:
    """Turn lengths into an array of integers and check them; an array is not copied.

    Args:
        lengths: Integers, one a sample: an array (memory-mapped ones stay so), tensor or sequence.
        what: A name for them in errors.

    Raises:
        ConfigurationError: They are not a row of integers, too many, empty, or one is negative; with its index.
    """
    try:
        array = np.asarray(lengths)
    except (ValueError, TypeError, RuntimeError) as error:
        # TypeError and RuntimeError are torch's, of tensors that are elsewhere or no plain numbers.
        raise ConfigurationError(f"{what} must be one integer a sample, in the CPU's memory: {error}.") from None
    if array.ndim != 1:
        raise ConfigurationError(f"{what} must be one integer a sample, got an array of shape {array.shape}.")
    if not array.size:
        raise ConfigurationError(f"{what} are empty; give one integer a sample.")
    check_length(array.size)
    if array.dtype.kind not in "iu":
        remedy = "Give whole units, for example milliseconds in place of seconds"
        if array.dtype.kind not in "f":
            remedy = "Number them, for example with numpy.unique(..., return_inverse=True)"
        raise ConfigurationError(f"{what} must be integers, got {array.dtype}: {array[:3].tolist()}. {remedy}.")
    for start, chunk in chunks(array):
        if chunk.dtype.kind == "i" and int(chunk.min()) < 0:
            sample = start + int(chunk.argmin())
            raise ConfigurationError(f"{what} must not be negative, and that of sample {sample} is {array[sample]}.")
        if int(chunk.max()) >= MAX_SAMPLE_LENGTH:
            raise ConfigurationError(f"{what} must be below 2**42, got {chunk.max()}.")
    return array


def chunks(array: LengthArray) -> Iterator[tuple[int, LengthArray]]:
    """Iterate over consecutive parts, each with the index of its first element; no memory-mapped file is read whole."""
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK]


def histogram(lengths: LengthArray) -> Histogram:
    """Count checked lengths."""
    longest = max(int(chunk.max()) for _, chunk in chunks(lengths))
    if longest > _LONGEST_TABLE:
        values, counts = np.unique(lengths, return_counts=True)
        return Histogram(values.astype(np.int64), counts.astype(np.int64))
    table = np.zeros(longest + 1, dtype=np.int64)
    for _, chunk in chunks(lengths):
        part = np.bincount(chunk.astype(np.int64))
        table[: part.size] += part
    values = np.flatnonzero(table)
    return Histogram(values, table[values])


def digest(array: LengthArray) -> str:
    """Hash integers to 16 hexadecimal digits, equal for equal values of any integer type and byte order."""
    hashed = hashlib.blake2b(digest_size=8)
    for _, chunk in chunks(array):
        hashed.update(chunk.astype("<i8").tobytes())
    return hashed.hexdigest()
