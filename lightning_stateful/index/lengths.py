"""Lengths of samples: what is legal, how often each comes, and a digest to know them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.checks import check_length
from lightning_stateful.core.ranges import Indices
from lightning_stateful.errors import ConfigurationError

# Up to this length a table counts; beyond it lengths are sorted.
_LONGEST_TABLE = 2**24
_CHUNK = 2**20

MAX_SAMPLE_LENGTH = 2**42


class Histogram(NamedTuple):
    """How often each length comes.

    Attributes:
        values: The lengths that occur, rising; int64 of shape ``(distinct,)``.
        counts: Samples of each; int64 of the same shape.
    """

    values: Indices
    counts: Indices

    @property
    def total(self) -> int:
        """Sum of all lengths."""
        if int(self.values[-1]) * int(self.counts.sum()) < 2**63:
            return int(self.values @ self.counts)
        return sum(value * count for value, count in zip(self.values.tolist(), self.counts.tolist(), strict=True))


def check_lengths(lengths: Any, *, what: str = "lengths") -> NDArray[Any]:
    """An array of whole numbers, not copied if it is one.

    Args:
        lengths: Integers, one a sample: an array (memory-mapped ones stay so), tensor or sequence.
        what: How an error calls them.

    Raises:
        ConfigurationError: They are not a row of integers, too many, empty, or one is negative; with its place.
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
            place = start + int(chunk.argmin())
            raise ConfigurationError(f"{what} must not be negative, and that of sample {place} is {array[place]}.")
        if int(chunk.max()) >= MAX_SAMPLE_LENGTH:
            raise ConfigurationError(f"{what} must be below 2**42, got {chunk.max()}.")
    return array


def chunks(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Consecutive parts, each with the place of its first element, so that a memory-mapped file is not read whole."""
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK]


def histogram(lengths: NDArray[Any]) -> Histogram:
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


def digest(array: NDArray[Any]) -> str:
    """16 hexadecimal digits that are equal for equal integers, whatever their type and wherever they lie."""
    hashed = hashlib.blake2b(digest_size=8)
    for _, chunk in chunks(array):
        hashed.update(chunk.astype("<i8").tobytes())
    return hashed.hexdigest()


def describe_lengths(lengths: NDArray[Any]) -> dict[str, Any]:
    """What a state says of lengths."""
    return {"samples": len(lengths), "digest": digest(lengths)}
