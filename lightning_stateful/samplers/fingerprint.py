"""Describes datasets and items for a state, so that a resume on changed ones is refused."""

from __future__ import annotations

import hashlib
import inspect
import marshal
import math
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, partial
from itertools import count
from numbers import Number
from os import PathLike, fspath
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeGuard
from uuid import UUID

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import attributes_of, can_be_read, text_of_plain
from lightning_stateful.generators.rng import GENERATORS

_DIGESTED_INDICES = 2**16
_READ_FILES = 64
_READ_ROWS = 16
# Columns of larger rows are told by their name and type alone.
_READ_BYTES = 2**20
_LISTED_ITEMS = 64
# Of a value that is shown: characters, numbers, numbers of a tensor that tell it, and containers within each other.
_MOST_CHARACTERS, _MOST_NUMBERS, _NUM_READ, _MOST_SHOWN = 40, 2**16, 16, 2
# Of large arrays: bytes that are read, and sums that are taken.
_MOST_BYTES, _NUM_SUMS = 2**28, 61
# Containers and objects within each other of which the values count, and objects that one leads to.
_DEPTH, _MOST_OBJECTS = 8, 1024
# Types whose text is their whole value; a datetime is a date too.
_SHOWN_WHOLE: tuple[Any, ...] = (
    *(datetime, date, time, timedelta, tzinfo, Decimal, Fraction, complex, UUID, PurePath),
    *(torch.dtype, torch.device),
)
_NOT_ITEMS = (Dataset, torch.nn.Module)


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
    if are_paths(files):
        described["files"] = _digest_of_files(files)
    if isinstance(dataset, Subset):
        described["indices"] = _digest_of_indices(dataset)
        described["of"] = describe_dataset(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        described["parts"] = hex_digest(np.asarray(dataset.cumulative_sizes, dtype=np.int64).tobytes())
    described.update(_own_description(dataset))
    return described


def _digest_of_indices(subset: Subset[Any]) -> str:
    stride = -(-len(subset.indices) // _DIGESTED_INDICES) or 1
    return hex_digest(np.asarray(subset.indices[::stride], dtype=np.int64).tobytes())


def indices_in(dataset: Any, path: str = "dataset") -> dict[str, str]:
    """Digests of the indices of a subset, and of subsets that it is of, by their names in a configuration."""
    if not isinstance(dataset, Subset):
        return {}
    return {f"{path}.indices": _digest_of_indices(dataset), **indices_in(dataset.dataset, f"{path}.of")}


def without_fingerprint(described: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Split a description into one without fingerprints, and its fingerprint, if it has any."""
    stable = {key: value for key, value in described.items() if key not in ("fingerprint", "of")}
    found = described.get("fingerprint")
    if isinstance(described.get("of"), Mapping):
        stable["of"], below = without_fingerprint(described["of"])
        found = found or below
    return stable, found if isinstance(found, str) else None


def hex_digest(*parts: bytes, size: int = 8) -> str:
    """Hex digest, of ``size`` bytes, of parts that follow one another."""
    hashed = hashlib.blake2b(digest_size=size)
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The numbers of a dense tensor; the bits, as integers, where NumPy does not know the type, as of bfloat16."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        return np.asarray(tensor.view(_INTEGERS[tensor.element_size()]).numpy())


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def is_mapped(array: object) -> bool:
    """Whether the memory of an array is that of a file."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def _describe_rows(dataset: Any, library: Any) -> dict[str, str]:
    """Describe columns and some rows of a Hugging Face dataset, without the transform that may be set on it."""
    types = sorted((field.name, str(field.type)) for field in dataset.features.arrow_schema)
    described = {"columns": f"{len(types)}, {hex_digest(repr(types).encode())}"}
    if len(dataset):
        table = library.formatting.query_table(dataset.data, spread(len(dataset), _READ_ROWS), dataset._indices)
        # What is decoded, such as images, may hold paths, which differ from machine to machine.
        plain = [name for name, _ in types if "decode=" not in repr(dataset.features[name])]
        rows = [(name, table[name].to_pylist()) for name in plain if table[name].nbytes <= _READ_BYTES]
        described["rows"] = hex_digest(repr(rows).encode())
    return described


def are_paths(files: Any) -> TypeGuard[Sequence[str | Path]]:
    """Whether it is a list of paths, of which names and sizes are described."""
    return isinstance(files, (list, tuple)) and bool(files) and all(isinstance(file, (str, Path)) for file in files)


def _digest_of_files(files: Sequence[str | Path]) -> str:
    # Names without their folder: the same files on another mount are the same data.
    names = "\0".join(fspath(file).replace("\\", "/").rsplit("/", 1)[-1] for file in files)
    sizes = [_size(files[number]) for number in spread(len(files), _READ_FILES)]
    return f"{len(files)} files, {hex_digest(repr((names, sizes)).encode())}"


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
    if issubclass(type(value), Mapping):
        return _plain_dict(value, path)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        if array.dtype.kind in "biufc" and array.size > _LISTED_ITEMS:
            return f"{array.dtype} {array.shape}, {hex_digest(np.ascontiguousarray(array).tobytes())}"
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

    Items are told apart by the numbers, strings, dates, paths, arrays and containers in them. Of another object its
    ``id`` attribute counts, or else its fields, attributes and slots, or what it contains. Of an object without any of
    these it is only the type; see :func:`types_not_compared`.
    """
    hashed = hashlib.blake2b(before.encode(), digest_size=8)
    _feed(hashed, item, 0, None)
    return hashed.hexdigest()


def types_not_compared(item: object) -> list[str]:
    """The types of objects in an item of which :func:`digest` tells no more than the type."""
    reading = _Reading()
    _feed(hashlib.blake2b(), item, 0, reading)
    return list(dict.fromkeys(reading.unseen))


@dataclass
class _Reading:
    """The reading of an item.

    Attributes:
        unseen: The types of objects of which no more than the type was read.
        around: Ids of the objects around the present one.
        left: Objects that may still be read within the outermost one.
    """

    unseen: list[str] = field(default_factory=list)
    around: list[int] = field(default_factory=list)
    left: int = 0


def _feed(hashed: hashlib.blake2b, item: object, depth: int, reading: _Reading | None) -> None:
    if isinstance(item, (int, np.integer)):
        hashed.update(f"i{text_of_plain(int(item))};".encode())
    elif isinstance(item, (str, bytes, float, type(None))):
        hashed.update(f"{type(item).__name__}{item!r};".encode())
    elif isinstance(item, (np.ndarray, torch.Tensor)):
        _feed(hashed, item.tolist(), depth, reading)
    elif isinstance(item, (list, tuple, range)) and all(
        issubclass(kind, (int, np.integer)) for kind in set(map(type, item))
    ):
        # The common case, in one go: an index is the same index in whatever type.
        hashed.update(text_of_plain(list(map(int, item))).encode())
    elif isinstance(item, Mapping) and item and depth < _DEPTH:
        hashed.update(b"[%d" % len(item))
        for pair in item.items():
            _feed(hashed, pair, depth, reading)
    elif isinstance(item, Mapping):
        _feed(hashed, list(item.items()), depth + 1, reading)
    elif isinstance(identity := getattr(item, "id", None), (str, int)):
        _feed(hashed, identity, depth, reading)
    elif (text := value_as_text(item)) is not None:
        hashed.update(f"{type(item).__qualname__} {text};".encode())
    elif isinstance(item, (set, frozenset)) and depth < _DEPTH:
        if reading is not None:
            reading.unseen += (name for part in item for name in types_not_compared(part))
        # The order of strings in a set is another one in every process.
        hashed.update(f"{{{sorted(map(digest, item))}".encode())
    elif isinstance(item, Iterable) and isinstance(item, Sized) and depth < _DEPTH:
        hashed.update(b"[%d" % len(item))
        for part in item:
            _feed(hashed, part, depth + 1, reading)
    else:
        _feed_object(hashed, item, depth, reading)


def _feed_object(hashed: hashlib.blake2b, item: object, depth: int, reading: _Reading | None) -> None:
    hashed.update(type(item).__qualname__.encode())
    if isinstance(item, slice):
        held: Mapping[str, Any] = {"start": item.start, "stop": item.stop, "step": item.step}
    elif isinstance(item, np.void):
        # Without the padding between its fields.
        held = {"value": item.tobytes() if item.dtype.names is None and not item.dtype.hasobject else item.item()}
    elif isinstance(item, partial):
        held = {"func": item.func, "args": item.args, "keywords": item.keywords}
    elif isinstance(item, (type, FunctionType, BuiltinFunctionType)):
        held = {"module": item.__module__, "name": item.__qualname__}
    else:
        held = _fields_of(item)
    # Datasets and models that an item leads to are no part of its value.
    reading = reading or _Reading()
    if id(item) in reading.around:
        return
    reading.left = reading.left - 1 if reading.around else _MOST_OBJECTS
    is_seen = bool(held) and depth < _DEPTH and reading.left > 0 and not isinstance(item, (*_NOT_ITEMS, *GENERATORS))
    reading.around.append(id(item))
    for name, value in held.items() if is_seen else ():
        hashed.update(f".{name}=".encode())
        _feed(hashed, value, depth + 1, reading)
    reading.around.pop()
    if not is_seen or (isinstance(item, FunctionType) and item.__closure__):
        reading.unseen.append(type(item).__qualname__)


def value_as_text(item: object) -> str | None:
    """A value of Python's, NumPy's or torch's own types as text; None for any other object."""
    if isinstance(item, Enum):
        return str(item._name_ or item._value_)
    if isinstance(item, np.generic) and not isinstance(item, np.void):
        return f"{item.dtype} {item}"
    base = next((kind for kind in _SHOWN_WHOLE if isinstance(item, kind)), None)
    # Not by a method of a subclass, which may show something else in every process.
    return None if base is None else str(base.__str__(item))


def short_text(value: Any, depth: int = 0) -> str:
    """A number or short string itself; ``#`` and a digest of an array, a tensor or a container of such.

    Of a long list or dict some values are read, evenly apart, and of containers in containers of containers the size
    alone. Empty for any other object, and for large arrays.
    """
    if type(value) in (bool, int, float, complex, str, bytes, type(None)):
        text = text_of_plain(value)
        return text if len(text) <= _MOST_CHARACTERS else f"#{digest(text)}"
    shown = repr(value) if isinstance(value, (Number, count)) else value_as_text(value)
    if shown is not None:
        return shown if len(shown) <= _MOST_CHARACTERS else f"#{digest(shown)}"
    if isinstance(value, (bytearray, array)):
        return f"#{len(value)} {hex_digest(bytes(value))}"
    if isinstance(value, np.ndarray):
        is_read = value.size <= _MOST_NUMBERS
        return "" if not is_read else short_text(value.tolist()) if value.dtype.hasobject else f"#{digest(value)}"
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided and value.numel() <= _MOST_NUMBERS and not value.is_meta:
            value = value.to_dense()
        is_read = is_plain_tensor(value) and value.numel() <= _MOST_NUMBERS
        return f"#{digest_of_tensor(value)}" if is_read else ""
    if isinstance(value, (set, frozenset)):
        # In no order of their own.
        value = sorted(map(repr, value)) if len(value) <= _LISTED_ITEMS else [len(value)]
    size = len(value) if isinstance(value, (list, tuple, deque, dict)) else 0
    if isinstance(value, dict):
        items = list(value.items())
        value = [part for place in spread(len(items), _LISTED_ITEMS) for part in items[place]]
    # Another thread may change a queue.
    value = list(value) if isinstance(value, deque) else value
    if not isinstance(value, (list, tuple)):
        return ""
    if depth == _MOST_SHOWN:
        return f"#{size}"
    parts = [short_text(value[place], depth + 1) for place in spread(len(value), 2 * _LISTED_ITEMS)]
    return f"#{size} {digest(parts)}" if all(parts) else ""


def as_written(values: Any) -> bytes | None:
    """Integers of 32 bits in lists, as bytes that are equal for equal ones; None if there is anything else.

    This takes a fraction of the time of looking at the type of each.
    """
    try:
        written = marshal.dumps(values, 0)
    except ValueError:
        return None
    # Such an integer, and the length of a list or tuple, take four bytes behind a letter; so each fifth byte is a
    # letter, unless something else comes before it, of which the letter is another one.
    return None if written[::5].translate(None, b"[(i") else written


def digest_of_some(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of some numbers of each tensor, evenly apart; of large ones it reads few."""
    found: list[torch.Tensor] = []
    for one in filter(is_plain_tensor, tensors):
        flat = one.detach().reshape(-1)
        found.append(flat[:: max(flat.numel() // _NUM_READ, 1)][:_NUM_READ].contiguous().view(torch.uint8))
    # One copy for each device, not one for each tensor.
    parts = [torch.cat([one for one in found if one.device == at]) for at in {one.device: 0 for one in found}]
    return hex_digest(*(as_array(part).tobytes() for part in parts))


def text_of_large(value: Any) -> str:
    """``#`` and a digest of sums over a large array or tensor, which another number anywhere in it changes.

    Empty for any other object, for what lies in a file, and for more than 256 MB.
    """
    if isinstance(value, torch.Tensor) and is_plain_tensor(value) and value.nbytes <= _MOST_BYTES:
        value = as_array(value)
    is_array = isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES
    if not is_array or value.dtype.hasobject or is_mapped(value):
        return ""
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    flat = flat.view(np.int64) if flat.size % 8 == 0 else flat
    # Of every so many numbers, so that it also matters where they stand.
    whole = flat[: flat.size // _NUM_SUMS * _NUM_SUMS].reshape(-1, _NUM_SUMS).sum(0, dtype=np.int64)
    return f"#{value.shape} {hex_digest(whole.tobytes(), flat[-_NUM_SUMS:].tobytes())}"


def digest_of_tensor(value: torch.Tensor) -> str:
    """A digest of the type, shape and numbers of a tensor that :func:`is_plain_tensor`."""
    return hex_digest(f"{value.dtype} {tuple(value.shape)}".encode(), as_array(value).tobytes())


def is_plain_tensor(value: torch.Tensor) -> bool:
    """Whether the numbers of a tensor can be read as they are."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and can_be_read(value)


def _fields_of(item: object) -> Mapping[str, Any]:
    """The values that make up an object: its fields if it is a dataclass, or its attributes and slots.

    What ``cached_property`` keeps is left out: it is there only once somebody has asked for it.
    """
    held = attributes_of(item)
    if is_dataclass(item):
        return {one.name: held[one.name] for one in fields(item) if one.compare and one.name in held}
    kept = {name for kind in type(item).__mro__ for name, of in vars(kind).items() if isinstance(of, cached_property)}
    return {name: value for name, value in held.items() if not (name.startswith("__") or name in kept)}
