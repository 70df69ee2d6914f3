"""Finds the lengths of a dataset's samples in a column, attribute or file, or measures and keeps them in a file."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from tqdm.auto import tqdm

from lightning_stateful.bucketing.lengths import (
    MAX_SAMPLE_LENGTH,
    LengthArray,
    check_lengths,
    digest,
    open_lengths,
    read_array,
)
from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.generators.rng import keep_randomness

# Rows of a column that are read at a time.
_ROWS = 65536
# Fewer samples than that are measured before processes would have started.
_WORTH_WORKERS = 4096
_BATCH = 256
# Seconds after which a progress bar is shown.
_SECONDS = 3
# Samples that are measured again each time a file is read, beside the shortest and the longest.
_SPOT_CHECKS = 32


def file_of(cache_file: str | Path | None, stage: str, name: str | None) -> Path | None:
    """The file that keeps the lengths of one of several datasets, beside that of the training data."""
    if cache_file is None:
        return None
    path = Path(cache_file)
    parts = [path.stem, "" if stage == "train" else stage, name or ""]
    return path.with_stem("-".join(filter(None, parts)))


def lengths_of(
    dataset: Any, lengths: Any, *, cache_file: str | Path | None = None, num_workers: int | None = None
) -> LengthArray:
    """Find the length of every sample.

    Args:
        dataset: A map-style dataset.
        lengths: One of:

            - integers, one a sample: an array, tensor or sequence;
            - the path of a ``.npy`` file of them, which is memory-mapped;
            - the name of a column of a Hugging Face dataset, which alone is read; if it holds lists, their lengths are
              taken;
            - the name of an attribute of the dataset that holds them;
            - a function of a sample, which is called once for each.
        cache_file: Path of a ``.npy`` file for lengths that a function measures. By default those of a Hugging Face
            dataset on disk are kept beside its files, under its fingerprint and the function's; those of other datasets
            are not kept.
        num_workers: Processes that measure; by default one a core, or none for few samples.

    Returns:
        Integers of shape ``(len(dataset),)``.

    Raises:
        ConfigurationError: There is no such column, attribute or file, or not one non-negative integer a sample; or
            ``cache_file`` cannot be written, or holds something else.
    """
    if callable(lengths) and not hasattr(lengths, "__array__"):
        if cache_file is not None and Path(cache_file).suffix != ".npy":
            raise ConfigurationError(f"cache_file must be the path of a .npy file, got {str(cache_file)!r}.")
        path = _file_beside(dataset, lengths) if cache_file is None else Path(cache_file)
        if path is not None:
            return _read_or_measure(path, dataset, lengths, num_workers)
        if len(dataset) >= _WORTH_WORKERS:
            warnings.warn(
                f'{len(dataset)} lengths are measured in every process and run. Keep them: cache_file="lengths.npy".',
                StatefulWarning,
                stacklevel=2,
            )
        return measure_samples(dataset, lengths, num_workers=num_workers)
    found = _find_named(dataset, lengths) if isinstance(lengths, str) else open_lengths(lengths)
    if len(found) != len(dataset):
        raise ConfigurationError(
            f"There are {len(found)} lengths for the {len(dataset)} samples of a {type(dataset).__name__}; give one a "
            "sample."
        )
    return found


def names_lengths(lengths: object) -> bool:
    """Whether lengths are given by a name or function that fits any dataset, and not as the integers of one."""
    return callable(lengths) if not isinstance(lengths, str) else Path(lengths).suffix != ".npy"


def measure_samples(dataset: Any, length: Callable[[Any], int], *, num_workers: int | None = None) -> LengthArray:
    """Call a function on every sample, in parallel; integers of the smallest type that holds them."""
    total = len(dataset)
    if num_workers is not None and num_workers < 0:
        raise ConfigurationError(f"The number of processes that measure must not be negative, got {num_workers}.")
    if num_workers is None:
        num_workers = os.cpu_count() or 1 if total >= _WORTH_WORKERS else 0
    loader: DataLoader[Any] = DataLoader(
        _Measured(dataset, length),
        batch_size=_BATCH,
        num_workers=num_workers,
        collate_fn=np.array,
        generator=torch.Generator(),
    )
    found = np.empty(total, dtype=np.int64)
    with keep_randomness(), tqdm(total=total, desc="Measuring lengths", unit=" samples", delay=_SECONDS) as bar:
        for start, batch in zip(range(0, total, _BATCH), loader, strict=True):
            found[start : start + len(batch)] = batch
            bar.update(len(batch))
    return found.astype(np.min_scalar_type(int(found.max(initial=0))))


class _Measured(Dataset[int]):
    """A dataset whose samples are the lengths of another dataset's samples."""

    def __init__(self, dataset: Any, length: Callable[[Any], int]) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        sample = self._dataset[index]
        try:
            found = self._length(sample)
        except Exception as error:
            raise ConfigurationError(
                f"The function that measures lengths fails on sample {index}, a {type(sample).__qualname__}: "
                f"{type(error).__name__}: {error}."
            ) from error
        try:
            number = as_int("a length", found)
        except ConfigurationError:
            number = -1
        if not 0 <= number < MAX_SAMPLE_LENGTH:
            raise ConfigurationError(
                f"The function that measures lengths says {found!r} of sample {index}, and not a length from 0 up to "
                "2**42."
            )
        return number


# Lengths under a name


def _find_named(dataset: Any, name: str) -> LengthArray:
    """Read the lengths from the column, attribute or file of that name."""
    if hasattr(dataset, "select_columns") and name in (getattr(dataset, "column_names", None) or ()):
        return check_lengths(_read_column(dataset, name), what=f"lengths in column {name!r}")
    attribute = getattr(dataset, name, None) if name.isidentifier() else None
    if attribute is not None and not callable(attribute):
        return open_lengths(attribute, what=f"lengths in attribute {name!r}")
    if isinstance(dataset, Subset):
        return _find_named(dataset.dataset, name)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_find_named(part, name) for part in dataset.datasets])
    if not names_lengths(name):
        return open_lengths(name)
    columns = f" with the columns {list(dataset.column_names)}" if hasattr(dataset, "column_names") else ""
    raise ConfigurationError(
        f"lengths={name!r} is neither a column nor an attribute of the {type(dataset).__name__}{columns}, nor a .npy "
        "file. Name one of these, or pass an array or a function of a sample."
    )


def _read_column(dataset: Any, name: str) -> NDArray[Any]:
    """A column of a Hugging Face dataset; of lists, their lengths. Nothing is decoded."""
    parts: list[NDArray[Any]] = []
    for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=_ROWS):
        column = table.column(name)
        if column.null_count:
            first = sum(map(len, parts)) + column.is_null().to_pylist().index(True)
            raise ConfigurationError(f"lengths in column {name!r} have no value for sample {first}.")
        for chunk in column.chunks:
            values: Callable[[], Any] | None = getattr(chunk, "value_lengths", None)
            parts.append(np.asarray(chunk if values is None else values()))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


# Files of measured lengths


def _file_beside(dataset: Any, length: Callable[[Any], int]) -> Path | None:
    """The default cache file of a Hugging Face dataset on disk; None for other datasets, or if it cannot be written."""
    files, fingerprint = getattr(dataset, "cache_files", None), getattr(dataset, "_fingerprint", None)
    folder = Path(files[0]["filename"]).parent if files else None
    if folder is None or not isinstance(fingerprint, str) or not os.access(folder, os.W_OK):
        return None
    # Slow to import, and only needed where lengths are measured.
    from datasets.fingerprint import Hasher

    try:
        return folder / f"lengths-{Hasher.hash((fingerprint, length))}.npy"
    except Exception:  # of whatever a function holds that cannot be pickled
        return None


class _MisfitError(Exception):
    """A file holds no lengths of the dataset; with the reason, unless there is no file."""


def _read_or_measure(path: Path, dataset: Any, length: Callable[[Any], int], num_workers: int | None) -> LengthArray:
    """Read lengths from a file, memory-mapped; measure and write them first if it holds none that fit.

    Of the processes that ask at the same time, one measures, and the others wait for its lock and read: no process
    group is needed.
    """
    measured = _Measured(dataset, length)
    with suppress(_MisfitError):
        return _read(path, measured)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(path.name + ".lock")).acquire()
    except (OSError, NotImplementedError) as error:  # the latter where a file system knows no locks
        raise ConfigurationError(
            f"Lengths cannot be kept in {str(path)!r}: {error}. Pass a cache_file that can be written."
        ) from None
    with lock:
        try:
            return _read(path, measured)
        except _MisfitError as reason:
            if path.exists():
                warnings.warn(
                    f"The lengths in {str(path)!r} are not used, because {reason}. All samples are measured again.",
                    StatefulWarning,
                    stacklevel=3,
                )
        _write(path, measure_samples(dataset, length, num_workers=num_workers))
        return read_array(path)


def _read(path: Path, measured: _Measured) -> LengthArray:
    """Read lengths from a file, and measure the shortest, the longest and some random samples again.

    Raises:
        _MisfitError: There is no such file, or it is damaged, or of other data or another function.
        ConfigurationError: The file was not written by :func:`_write`.
    """
    if not path.exists():
        raise _MisfitError
    if not _digest_file(path).exists():
        raise ConfigurationError(
            f"cache_file={str(path)!r} was not written by this function, which would overwrite it. Name another file, "
            "or pass this one as lengths if it holds them."
        )
    try:
        lengths = read_array(path)
        is_row = lengths.ndim == 1 and lengths.dtype.kind in "iu"
        is_whole = is_row and _digest_file(path).read_text() == digest(lengths)
    except (OSError, ValueError) as error:
        raise _MisfitError(f"the file cannot be read ({error})") from None
    if not is_whole:
        raise _MisfitError("the file is damaged")
    if len(lengths) != len(measured):
        raise _MisfitError(f"there are {len(lengths)} of them for {len(measured)} samples")
    if not len(lengths):
        return lengths
    chosen = np.random.default_rng().choice(len(lengths), min(_SPOT_CHECKS, len(lengths)), replace=False)
    with keep_randomness():
        for index in (int(lengths.argmin()), int(lengths.argmax()), *chosen.tolist()):
            now = measured[index]
            if now != lengths[index]:
                raise _MisfitError(
                    f"sample {index} has length {now}, and they say {lengths[index]}: data or function have changed, "
                    "or give another length each time"
                )
    return lengths


def _write(path: Path, lengths: LengthArray) -> None:
    # The digest first: with the lengths of before, or with none, it leads to measuring again.
    with _replacing(_digest_file(path)) as file:
        file.write(digest(lengths).encode())
    with _replacing(path) as file:
        np.save(file, lengths)


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + ".digest")


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` once it is complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
