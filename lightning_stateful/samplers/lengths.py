"""Lengths of samples as users give them to a sampler: an array, or a file with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.lengths import check_lengths


def open_lengths(lengths: Any, *, what: str = "lengths") -> NDArray[Any]:
    """A checked array; a ``.npy`` file is memory-mapped, so that the processes of a machine share it.

    Args:
        lengths: Integers, one a sample, as an array, tensor or sequence; or the path of a ``.npy`` file.
        what: How an error calls them.

    Raises:
        ConfigurationError: The file cannot be read, or holds no row of integers.
    """
    if isinstance(lengths, (str, Path)):
        try:
            lengths = np.load(lengths, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{what} could not be read from {str(lengths)!r}: {error}. Write them with numpy.save, one integer a "
                "sample."
            ) from None
    return check_lengths(lengths, what=what)
