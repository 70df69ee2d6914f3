"""Lengths of a dataset's samples, however the user says where to find them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.lengths import check_lengths
from lightning_stateful.loaders.length_cache import LengthCache, folder_beside
from lightning_stateful.loaders.measuring import measure_samples
from lightning_stateful.samplers.lengths import open_lengths

_ROWS = 65536


def lengths_of(
    dataset: Any,
    lengths: Any,
    *,
    num_workers: int | None = None,
    cache_dir: str | Path | None = None,
    what: str = "lengths",
) -> NDArray[Any]:
    """Find the length of every sample.

    Args:
        dataset: A map-style dataset.
        lengths: Integers, one a sample: an array, tensor or sequence, or the path of a ``.npy`` file (memory-mapped);
            the name of a column of a Hugging Face dataset, of which nothing else is read (of a column of lists, the
            lengths of these), or of an attribute of the dataset; or a function of a sample, which is called once for
            each and its results kept in a file.
        num_workers: Processes that measure; by default one a core, or none for few samples.
        cache_dir: Folder for measured lengths; by default that of the dataset's files or, if it has none, one in the
            user's cache.
        what: How an error calls the lengths.

    Returns:
        Integers of shape ``(len(dataset),)``.

    Raises:
        ConfigurationError: There is no such column, attribute or file, or not one non-negative integer a sample.
    """
    if callable(lengths) and not hasattr(lengths, "__array__"):
        folder = folder_beside(dataset) if cache_dir is None else Path(cache_dir)
        cache = LengthCache(dataset, lengths, folder, what=what)
        return cache.read_or(lambda: measure_samples(dataset, lengths, num_workers=num_workers, what=what))
    found = _named(dataset, lengths, what) if isinstance(lengths, str) else open_lengths(lengths, what=what)
    if len(found) != len(dataset):
        raise ConfigurationError(
            f"There are {len(found)} {what} for the {len(dataset)} samples of a {type(dataset).__name__}; give one a "
            "sample."
        )
    return found


def names_lengths(lengths: Any) -> bool:
    """Whether lengths say where to find those of any dataset, and are not those of one."""
    return callable(lengths) if not isinstance(lengths, str) else Path(lengths).suffix != ".npy"


def _named(dataset: Any, name: str, what: str) -> NDArray[Any]:
    """A column, an attribute or a file of that name."""
    if _has_column(dataset, name):
        return check_lengths(_column(dataset, name, what), what=f"{what} in column {name!r}")
    attribute = getattr(dataset, name, None) if name.isidentifier() else None
    if attribute is not None and not callable(attribute):
        return open_lengths(attribute, what=f"{what} in attribute {name!r}")
    if isinstance(dataset, Subset):
        return _named(dataset.dataset, name, what)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_named(part, name, what) for part in dataset.datasets])
    if not names_lengths(name):
        return open_lengths(name, what=what)
    columns = f" with the columns {list(dataset.column_names)}" if hasattr(dataset, "column_names") else ""
    raise ConfigurationError(
        f"{what}={name!r} is neither a column nor an attribute of the {type(dataset).__name__}{columns}, nor a .npy "
        "file. Name one of these, or pass an array or a function of a sample."
    )


def _has_column(dataset: Any, name: str) -> bool:
    return hasattr(dataset, "select_columns") and name in (getattr(dataset, "column_names", None) or ())


def _column(dataset: Any, name: str, what: str) -> NDArray[Any]:
    """A column of a Hugging Face dataset; of lists, their lengths. Nothing is decoded."""
    parts: list[NDArray[Any]] = []
    for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=_ROWS):
        column = table.column(name)
        if column.null_count:
            first = sum(map(len, parts)) + column.is_null().to_pylist().index(True)
            raise ConfigurationError(f"{what} in column {name!r} have no value for sample {first}.")
        for chunk in column.chunks:
            values: Callable[[], Any] | None = getattr(chunk, "value_lengths", None)
            parts.append(np.asarray(chunk if values is None else values()))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
