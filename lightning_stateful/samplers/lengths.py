"""Lengths of samples as users give them to a sampler: an array, or a file with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.lengths import check_lengths

_MAGIC = b"\x93NUMPY"


def open_lengths(lengths: Any, *, what: str = "lengths") -> NDArray[Any]:
    """A checked array; a ``.npy`` file is memory-mapped, so that the processes of a machine share it.

    Args:
        lengths: Integers, one a sample, as an array, tensor or sequence; or the path of a ``.npy`` file.
        what: How an error calls them.

    Raises:
        ConfigurationError: The file cannot be read, or holds no row of integers.
    """
    if isinstance(lengths, (str, Path)):
        return check_lengths(_load(Path(lengths), what), what=what)
    return check_lengths(lengths, what=what)


def read_array(path: Path) -> NDArray[Any]:
    """The array in a ``.npy`` file, memory-mapped.

    Raises:
        OSError, ValueError: There is none.
    """
    with path.open("rb") as file:
        # Asked by its first bytes: NumPy opens archives and pickles, too.
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is no .npy file")
    found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def _load(path: Path, what: str) -> NDArray[Any]:
    try:
        return read_array(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{what} could not be read from {str(path)!r}: {error}. Write them with numpy.save, one integer a sample."
        ) from None
