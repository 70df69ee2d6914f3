"""Describes datasets and items for a state, so that a resume on changed ones is refused."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence, Sized
from datetime import date, time
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from lightning_stateful.errors import StatefulWarning

_DIGESTED_INDICES = 2**16
_READ_FILES = 64
_READ_ROWS = 16
# Columns of larger rows are told by their name and type alone.
_READ_BYTES = 2**20
_LISTED_ITEMS = 64


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """Describe a dataset by what can be read cheaply.

    Its length, if it has one; of a Hugging Face dataset the columns, some rows and the fingerprint; of one that lists
    the paths of its files in an attribute ``files``, their names and the sizes of some; of a ``Subset`` also the chosen
    indices (up to 65,536 of them, evenly spaced) and of a ``ConcatDataset`` the lengths of its parts. A dataset may say
    more, or something else, by a method ``describe() -> dict``.

    Returns:
        Plain data that is equal for equal data, wherever it lies; a fingerprint need not be.
    """
    described: dict[str, Any] = {"length": len(dataset) if hasattr(dataset, "__len__") else "unknown"}
    library: Any = sys.modules.get("datasets")
    if library is not None and isinstance(dataset, library.Dataset):
        described |= _describe_rows(dataset, library)
    fingerprint = getattr(dataset, "_fingerprint", None)
    if isinstance(fingerprint, str):
        described["fingerprint"] = fingerprint
    files = getattr(dataset, "files", None)
    if isinstance(files, (list, tuple)) and files and all(isinstance(file, (str, Path)) for file in files):
        described["files"] = _digest_of_files(files)
    if isinstance(dataset, Subset):
        stride = -(-len(dataset.indices) // _DIGESTED_INDICES) or 1
        described["indices"] = _digest(np.asarray(dataset.indices[::stride], dtype=np.int64).tobytes())
        described["of"] = describe_dataset(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        described["parts"] = _digest(np.asarray(dataset.cumulative_sizes, dtype=np.int64).tobytes())
    described.update(_own_description(dataset))
    return described


def without_fingerprint(described: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Split a description into one without fingerprints, and its fingerprint, if it has any."""
    stable = {key: value for key, value in described.items() if key not in ("fingerprint", "of")}
    found = described.get("fingerprint")
    if isinstance(described.get("of"), Mapping):
        stable["of"], below = without_fingerprint(described["of"])
        found = found or below
    return stable, found if isinstance(found, str) else None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _describe_rows(dataset: Any, library: Any) -> dict[str, str]:
    """Describe columns and some rows of a Hugging Face dataset, without the transform that may be set on it."""
    types = sorted((field.name, str(field.type)) for field in dataset.features.arrow_schema)
    described = {"columns": f"{len(types)}, {_digest(repr(types).encode())}"}
    if len(dataset):
        table = library.formatting.query_table(dataset.data, spread(len(dataset), _READ_ROWS), dataset._indices)
        # What is decoded, such as images, may hold paths, which differ from machine to machine.
        plain = [name for name, _ in types if "decode=" not in repr(dataset.features[name])]
        rows = [(name, table[name].to_pylist()) for name in plain if table[name].nbytes <= _READ_BYTES]
        described["rows"] = _digest(repr(rows).encode())
    return described


def _digest_of_files(files: Sequence[str | Path]) -> str:
    # Names without their folder: the same files on another mount are the same data.
    names = "\0".join(fspath(file).replace("\\", "/").rsplit("/", 1)[-1] for file in files)
    sizes = [_size(files[number]) for number in spread(len(files), _READ_FILES)]
    return f"{len(files)} files, {_digest(repr((names, sizes)).encode())}"


def _size(file: str | Path) -> int:
    try:
        return Path(file).stat().st_size
    except OSError:
        return -1


def spread(length: int, count: int) -> list[int]:
    """Up to ``count`` evenly spaced numbers below ``length``, the first and the last among them."""
    if length <= count:
        return list(range(length))
    numbers: list[int] = np.linspace(0, length - 1, count).round().astype(np.int64).tolist()
    return numbers


def _own_description(dataset: Any) -> dict[str, Any]:
    own = getattr(dataset, "describe", None)
    # Another library's method of that name may want arguments, or tell about something else in other types.
    if not callable(own) or inspect.signature(own).parameters:
        return {}
    said = own()
    return _plain_dict(said, "dataset.describe()") if isinstance(said, Mapping) else {}


def _plain_dict(said: Mapping[Any, Any], path: str) -> dict[str, Any]:
    plain = {}
    for key, value in said.items():
        name = key if isinstance(key, str) else str(key)
        if name in plain or (name != key and name in said):
            name = f"{type(key).__name__} {key}"  # 0 beside "0"
        plain[name] = _plain(value, f"{path}.{name}")
    return plain


def _plain(value: Any, path: str) -> Any:
    """A value as a state may hold it, equal for equal values."""
    if isinstance(value, (np.generic, torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return _plain_dict(value, path)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        if array.dtype.kind in "biufc" and array.size > _LISTED_ITEMS:
            return f"{array.dtype} {array.shape}, {_digest(np.ascontiguousarray(array).tobytes())}"
        value = array.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, (Enum, PathLike, date, time, bytes, np.dtype, torch.dtype, str, int)):
        return str(value)
    warnings.warn(
        f"{path} is a {type(value).__qualname__}, of which a state can hold and compare no more than its type. "
        "Describe a dataset by numbers, strings, lists and dicts.",
        StatefulWarning,
        stacklevel=2,
    )
    return f"a {type(value).__qualname__}"


def digest(item: object, before: str = "") -> str:
    """Hex digest of an item, chained to that of an earlier one; equal for equal items in every process.

    Items are told apart by the numbers, strings, arrays and containers in them; of another object its ``id`` attribute
    counts, or else what it contains, or only its type.
    """
    hashed = hashlib.blake2b(before.encode(), digest_size=8)
    _feed(hashed, item, 0)
    return hashed.hexdigest()


def _feed(hashed: hashlib.blake2b, item: object, depth: int) -> None:
    if isinstance(item, (int, np.integer)):
        hashed.update(b"i%d;" % int(item))
    elif isinstance(item, (str, bytes, float, type(None))):
        hashed.update(f"{type(item).__name__}{item!r};".encode())
    elif isinstance(item, (np.ndarray, torch.Tensor)):
        _feed(hashed, item.tolist(), depth)
    elif isinstance(item, (list, tuple, range)) and all(
        issubclass(kind, (int, np.integer)) for kind in set(map(type, item))
    ):
        # The common case, in one go: an index is the same index in whatever type.
        hashed.update(repr(list(map(int, item))).encode())
    elif isinstance(item, Mapping):
        _feed(hashed, list(item.items()), depth + 1)
    elif isinstance(identity := getattr(item, "id", None), (str, int)):
        _feed(hashed, identity, depth)
    elif isinstance(item, Iterable) and isinstance(item, Sized) and depth < 8:
        hashed.update(b"[%d" % len(item))
        for part in item:
            _feed(hashed, part, depth + 1)
    else:
        hashed.update(type(item).__qualname__.encode())
