"""Measured lengths kept in a file, under a key that changes with the dataset."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.index.lengths import digest
from lightning_stateful.loaders.measuring import measure_one
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.samplers.lengths import read_array
from lightning_stateful.samplers.rng import keep_randomness

_VERSION = 1
# Lengths that are part of the key, and lengths that are measured again at each reading.
_NAMED, _SPOT_CHECKS = 16, 32


def folder_beside(dataset: Any) -> Path:
    """Where measured lengths of a dataset are kept: beside its files, or in the user's cache.

    Its files are those of a Hugging Face dataset's cache, or those in an attribute ``files``, or it has a folder in an
    attribute ``root``.
    """
    cached = getattr(dataset, "cache_files", None) or ()
    files = [file["filename"] for file in cached if isinstance(file, dict) and "filename" in file]
    listed = getattr(dataset, "files", None)
    if isinstance(listed, (list, tuple)):
        files += [file for file in listed if isinstance(file, (str, Path))]
    folders = [Path(file).parent for file in files]
    if isinstance(root := getattr(dataset, "root", None), (str, Path)):
        folders.append(Path(root))
    for folder in folders:
        if folder.is_dir() and os.access(folder, os.W_OK):
            return folder
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lightning-stateful"


class LengthCache:
    """A file of lengths for one dataset and one function.

    Its name is a digest of what identifies both: of the dataset what a state says of it (see
    :func:`~lightning_stateful.samplers.fingerprint.describe_dataset`), its plain attributes and the lengths of some of
    its samples; of the function its code and what it holds. As that cannot see everything, a file is only believed if
    its contents are whole and other samples, the shortest, the longest and some at random, are as long as it says.

    Of the processes that ask at the same time, one measures, and the others wait and read: the file's lock sees to it,
    so that no process group is needed.

    Args:
        dataset: A map-style dataset.
        length: From a sample to its length.
        folder: Where files are kept; it is made if need be.
        what: How an error calls the lengths.
    """

    def __init__(self, dataset: Any, length: Callable[[Any], int], folder: Path, *, what: str = "lengths") -> None:
        self._dataset, self._length, self._folder, self._what = dataset, length, folder, what
        self._described = {
            "version": _VERSION,
            "dataset": {
                "type": type(dataset).__qualname__,
                "attributes": _plain_attributes(dataset),
                "some lengths": _some_lengths(dataset, length, what),
                **describe_dataset(dataset),
            },
            "function": _describe_function(length),
        }
        key = hashlib.blake2b(_spelled(self._described).encode(), digest_size=8).hexdigest()
        self.path = folder / f"lengths-{key}.npy"

    def read_or(self, measure: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The lengths in the file, memory-mapped; measured and written first if there are none to be trusted.

        Raises:
            ConfigurationError: The folder cannot be written.
        """
        found, _ = self._read()
        if found is not None:
            return found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_suffix(".lock"))
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            # The latter is filelock's, where a file system knows no locks.
            raise ConfigurationError(
                f"{self._what} cannot be kept in {str(self._folder)!r}: {error}. Pass a cache_dir that can be written."
            ) from None
        try:
            found, reason = self._read()
            if found is not None:
                return found
            if reason:
                warnings.warn(
                    f"The measured lengths in {str(self.path)!r} are not used, because {reason}. All samples are "
                    "measured again.",
                    StatefulWarning,
                    stacklevel=3,
                )
            self._write(measure())
            return read_array(self.path)
        finally:
            lock.release()

    def _read(self) -> tuple[NDArray[Any] | None, str]:
        """The lengths in the file, or else what is wrong with it, if there is one."""
        if not self.path.exists():
            return None, ""
        try:
            header = json.loads(self._header.read_text())
            lengths = read_array(self.path)
        except (OSError, ValueError) as error:
            return None, f"it cannot be read ({error})"
        reason = self._reason_against(header, lengths)
        return (None, reason) if reason else (lengths, "")

    def _reason_against(self, header: Any, lengths: NDArray[Any]) -> str:
        if not isinstance(header, dict) or _spelled(header.get("of")) != _spelled(self._described):
            return "they are those of another dataset or function"
        if lengths.shape != (len(self._dataset),) or header.get("digest") != digest(lengths):
            return "the file is damaged"
        with keep_randomness():
            for index in _places_to_check(lengths):
                now = measure_one(self._dataset, self._length, index, what=self._what)
                if now != lengths[index]:
                    return (
                        f"sample {index} has length {now}, and they say {lengths[index]}: data or function have "
                        "changed, or give another length each time"
                    )
        return ""

    def _write(self, lengths: NDArray[Any]) -> None:
        # Header last: a file without one is measured again.
        self._header.unlink(missing_ok=True)
        with _replacing(self.path) as file:
            np.save(file, lengths)
        with _replacing(self._header) as file:
            file.write(json.dumps({"of": self._described, "digest": digest(lengths)}, indent=1).encode())

    @property
    def _header(self) -> Path:
        return self.path.with_suffix(".json")


@contextmanager
def _replacing(path: Path) -> Any:
    """A file that takes the place of another once it is complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _places_to_check(lengths: NDArray[Any]) -> list[int]:
    """The shortest and the longest sample, and some others at every reading."""
    if not len(lengths):
        return []
    chosen = np.random.default_rng().choice(len(lengths), min(_SPOT_CHECKS, len(lengths)), replace=False)
    return [int(lengths.argmin()), int(lengths.argmax()), *chosen.tolist()]


def _some_lengths(dataset: Any, length: Callable[[Any], int], what: str) -> list[int]:
    """The lengths of some samples, evenly spaced."""
    with keep_randomness():
        places = np.unique(np.linspace(0, len(dataset) - 1, min(_NAMED, len(dataset))).astype(np.int64))
        return [measure_one(dataset, length, index, what=what) for index in places.tolist()]


def _spelled(described: Any) -> str:
    return json.dumps(described, sort_keys=True)


def _plain_attributes(dataset: Any) -> dict[str, str]:
    """What a dataset was built with, as far as it is kept as plain data: a split, a longest length."""
    plain = (bool, int, float, str, type(None))
    held = getattr(dataset, "__dict__", {})
    return {name: repr(value)[:200] for name, value in sorted(held.items()) if isinstance(value, plain)}


def _describe_function(function: Any) -> dict[str, Any]:
    """What a function does, as far as it can be told: its name, its code and defaults, and what it holds.

    Globals that it reads and functions that it calls by name are not seen.
    """
    # Slow to import, and needed by nobody who has lengths.
    from datasets.fingerprint import Hasher

    named = function if hasattr(function, "__qualname__") else type(function)
    described = {"name": f"{named.__module__}.{named.__qualname__}", "code": _digest_code(function)}
    try:
        described["holds"] = Hasher.hash(function)
    except Exception:
        # Whatever cannot be pickled is left to the spot checks.
        described["holds"] = ""
    return described


def _digest_code(function: Any) -> str:
    """The code of a function and of those that it wraps or holds, with their defaults."""
    hashed, left, seen = hashlib.blake2b(digest_size=8), [function], set()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, partial):
            hashed.update(repr(_plain([part.args, sorted(part.keywords.items())])).encode())
            left.append(part.func)
        elif isinstance(part, MethodType):
            left.append(part.__func__)
        elif isinstance(part, FunctionType):
            defaults = _plain([part.__defaults__, sorted((part.__kwdefaults__ or {}).items())])
            hashed.update(repr((_spell(part.__code__), defaults)).encode())
            held = [cell.cell_contents for cell in part.__closure__ or () if cell.cell_contents is not part]
            left += [part.__dict__.get("__wrapped__"), *filter(callable, held)]
        elif part is not None and isinstance(getattr(type(part), "__call__", None), FunctionType):  # noqa: B004
            left.append(type(part).__call__)
    return hashed.hexdigest()


def _plain(value: Any) -> Any:
    """A value by what is the same in every process: of what is no plain data, the type."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, bytes)) else type(value).__qualname__


def _spell(code: CodeType) -> list[Any]:
    """A code object without the places of its lines, with the code objects in it."""
    inner: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner.append(_spell(constant))
        else:
            # The order of a set differs from process to process.
            inner.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant))
    return [code.co_code.hex(), code.co_names, code.co_varnames, inner]
