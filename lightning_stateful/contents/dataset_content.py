"""Digests the lists and arrays that a dataset shows in its attributes, without reading a sample."""

from __future__ import annotations

import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike, fspath
from os.path import commonprefix
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from lightning_stateful.generators.attributes import BUILT_IN, attributes_of, can_be_read, package_of
from lightning_stateful.samplers.fingerprint import are_paths, as_array, hex_digest, is_mapped, spread

# The name of the content in a configuration.
PATH = "dataset.content"
# More items or bytes than these are told by some thousand rows, evenly apart; of files that are mapped, by a few.
_MOST_ITEMS, _MOST_BYTES = 2**20, 2**26
_SPREAD, _SPREAD_ON_DISK = 4096, 64
_MOST_COLUMNS, _MOST_PARTS, _DEPTH = 64, 2**14, 8
_OF_ARRAY, _MOST_MEANS = 1024, 64
# Bytes of a digest.
_SIZE = 6
# By the id of an object, beside a reference to it: the first digest by attribute; "" of one that has changed since.
_FIRST_SEEN: dict[int, tuple[Callable[[], Any], dict[str, str]]] = {}


def content_of(dataset: Any) -> dict[str, str]:
    """Digest what a dataset shows of its samples, by attribute, so that other samples or another order are seen.

    These are lists, arrays and tensors as long as the dataset (``samples``, ``targets``, ``paths``), by themselves or
    in a short tuple, list or dict, of the dataset and of datasets that it holds. Up to a million items or 64 MB are
    digested whole, some thousand rows of longer ones. Of paths the folder that all have in common does not count.

    Left out are attributes that may be caches: lists with a None, arrays of one value, memory that is mapped for
    writing, and whatever has changed since this process first looked. No method or property of the dataset is called
    but its length.

    Returns:
        Digests by the name of the attribute; empty if nothing is shown.
    """
    found = _content(dataset, set(), 0, is_described=True)
    return {name: digest for name, digest in sorted(found.items()) if digest}


def named_files(datasets: Iterable[Any]) -> dict[str, str]:
    """Digest the lists of strings and paths that iterable datasets hold, such as those of their files.

    Left out is whatever has changed since this process first looked, as by a pass that shuffles its list in place.

    Args:
        datasets: A dataset, and those that it holds.

    Returns:
        Digests by the name of the attribute, over all of them.
    """
    files = _joined([_unchanged(dataset, _files_of(dataset)) for dataset in datasets])
    return {name: digest for name, digest in files.items() if digest}


def _files_of(dataset: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in attributes_of(dataset).items():
        is_list = type(value) in (list, tuple) and len(value) > 0
        if is_list and all(isinstance(item, (str, PathLike)) for item in value[:_MOST_ITEMS]):
            # What cannot be digested is not compared.
            with suppress(Exception):
                found[name] = _digest_of(value)
    return found


def content_now(dataset: Any) -> dict[str, str]:
    """As :func:`content_of`, with what has changed as it is now."""
    return _content(dataset, set(), 0, is_described=True, of_now=True)


def glance(dataset: Any, depth: int = 0) -> list[Any]:
    """Some items of each list, array and tensor that a dataset holds: other ones once it was shuffled or replaced."""
    found: list[Any] = []
    for name, value in attributes_of(dataset).items():
        parts = [value] if isinstance(value, Dataset) else _parts(value)
        if parts:
            found += [glance(part, depth + 1) for part in parts if depth < _DEPTH]
        elif isinstance(value, (list, tuple)) or (isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim > 0):
            found.append((name, id(value), len(value), repr([value[number] for number in spread(len(value), 64)])))
    return found


def _content(
    dataset: Any, seen: set[int], depth: int, *, is_described: bool = False, of_now: bool = False
) -> dict[str, str]:
    """As :func:`content_of`, with "" for what has changed.

    Args:
        dataset: The dataset.
        seen: Ids of datasets that need no further look.
        depth: Of holding.
        is_described: The indices of a subset, and a list of files, are described elsewhere.
        of_now: What has changed counts too.
    """
    if id(dataset) in seen or depth > _DEPTH or package_of(type(dataset)) == "datasets":
        # Hugging Face's datasets are described by rows.
        return {}
    seen.add(id(dataset))
    try:
        length = len(dataset)
    except Exception:
        return {}
    is_data = isinstance(dataset, (list, tuple, array, np.ndarray, torch.Tensor))
    held = {"items": dataset} if is_data else attributes_of(dataset)
    of_subset = isinstance(dataset, Subset) and is_described
    described = ["files"] if is_described and are_paths(held.get("files")) else []
    described += ["indices"] if of_subset else []
    found: dict[str, str] = {}
    for name, value in held.items():
        for column, items in _columns(name, value, length):
            # What cannot be digested is not compared.
            with suppress(Exception):
                found[column] = _digest_of(items)
    found = {name: digest for name, digest in found.items() if digest}
    found = found if of_now else _unchanged(dataset, found)
    found = {name: digest for name, digest in found.items() if name not in described}
    for name, value in held.items():
        if name == "dataset" or isinstance(value, Dataset):
            below = _content(value, seen, depth + 1, is_described=of_subset, of_now=of_now)
        elif parts := _parts(value):
            below = _joined([_content(part, seen, depth + 1, of_now=of_now) for part in parts])
        else:
            continue
        found |= {key if key not in found else f"{name}.{key}": digest for key, digest in below.items()}
    return found


def _parts(value: Any) -> list[Any]:
    """Datasets in a list, tuple or dict, as those of a ``ConcatDataset``."""
    if type(value) not in (list, tuple, dict) or not 0 < len(value) <= _MOST_PARTS:
        return []
    parts = list(value.values() if type(value) is dict else value)
    return parts if isinstance(parts[0], Dataset) else []


def _joined(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    """One digest a name for all parts; "" if that of a part has changed."""
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        digests = [part.get(name, "-") for part in parts]
        joined[name] = hex_digest("".join(digests).encode(), size=_SIZE) if all(digests) else ""
    return joined


def _unchanged(owner: Any, found: dict[str, str]) -> dict[str, str]:
    """The digests, with "" for attributes that had another one when this process first saw the object."""
    known = _FIRST_SEEN.get(id(owner))
    first = known[1] if known is not None and known[0]() is owner else None
    if first is None:
        # A plain list has no weak reference, and is not remembered.
        with suppress(TypeError):
            _FIRST_SEEN[id(owner)] = weakref.ref(owner, partial(_forget, id(owner))), dict(found)
        return found
    for name in first.keys() | found.keys():
        if first.get(name) != found.get(name):
            first[name] = ""
    return dict(first)


def _forget(key: int, reference: Any) -> None:
    if (known := _FIRST_SEEN.get(key)) is not None and known[0] is reference:
        del _FIRST_SEEN[key]


def _columns(name: str, value: Any, length: int) -> Iterator[tuple[str, Any]]:
    """The lists and arrays of a length in an attribute: itself, or what a short tuple, list, dict or table holds."""
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index)):
        if len(value) != length:
            return
        if length > _MOST_ITEMS:
            value = value.take(spread(length, _SPREAD))
        is_table = isinstance(value, pandas.DataFrame)
        columns = {f"{name}.{key}": value[key] for key in value.columns} if is_table else {name: value}
        # Where two columns have one name, pandas gives a table.
        yield from ((key, column.to_numpy()) for key, column in columns.items() if column.ndim == 1)
    elif _is_column(value, length):
        yield name, value
    elif type(value) in (list, tuple, dict) and len(value) <= _MOST_COLUMNS:
        for key, item in value.items() if type(value) is dict else enumerate(value):
            if isinstance(key, (str, int)) and _is_column(item, length):
                yield f"{name}.{key}", item


def _is_column(value: Any, length: int) -> bool:
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and can_be_read(value)):
        return value.ndim > 0 and len(value) == length
    return type(value) in (list, tuple, array, range) and len(value) == length


def _digest_of(items: Any) -> str:
    """Digest of a list, array or tensor; "" for one that may be a cache, or that has nothing in it."""
    if not len(items):
        return ""
    if isinstance(items, torch.Tensor):
        items = _array_of(items)
    if isinstance(items, np.ndarray) and items.dtype.kind not in "OUS":
        return _digest_of_array(items)
    length = len(items)
    if length > _MOST_ITEMS and not isinstance(items, range):
        items = [items[number] for number in spread(length, _SPREAD)]
    items = items.tolist() if isinstance(items, (np.ndarray, array)) else items
    kinds = set(map(type, items))
    if type(None) in kinds:
        return ""
    if kinds <= BUILT_IN and length > 1 and items[0] == items[-1] and not isinstance(items, range):
        # A counter that has not begun.
        first = items[0]
        if all(item == first for item in items):
            return ""
    return hex_digest(f"{length}".encode(), *_bytes_of(items, kinds), size=_SIZE)


def _array_of(tensor: torch.Tensor) -> Any:
    """A tensor as an array; of one that is large, or on another device, some rows; a zero if it cannot be read."""
    if not can_be_read(tensor):
        return np.zeros(1)
    is_here = tensor.device.type == "cpu" or tensor.ndim == 0
    return as_array(tensor if is_here else tensor[spread(len(tensor), _SPREAD)])


def _digest_of_array(values: Any) -> str:
    mapped = is_mapped(values)
    if mapped and values.flags.writeable:
        # A cache on the disk.
        return ""
    shape, kind = values.shape, values.dtype.str
    if mapped or values.nbytes > _MOST_BYTES:
        rows = values[spread(len(values), _SPREAD_ON_DISK if mapped else _SPREAD)]
        # Of each row some numbers, if it is long.
        flat = rows.reshape(len(rows), -1)
        values = flat[:, :: max(flat.shape[1] // 1024, 1)]
    if len(values) > 1 and bool((values == values[:1]).all()):
        return ""
    return hex_digest(f"{kind}{shape}".encode(), np.ascontiguousarray(values).tobytes(), size=_SIZE)


def _bytes_of(items: Sequence[Any], kinds: set[type], depth: int = 0) -> Iterator[bytes]:
    """Bytes that are equal for equal items, in every process."""
    if isinstance(items, range):
        yield repr(items).encode()
    elif kinds == {str} or all(issubclass(kind, PathLike) for kind in kinds):
        yield _text_of(items).encode(errors="surrogatepass")
    elif kinds in ({int}, {float}):
        try:
            yield np.asarray(items, dtype=np.int64 if kinds == {int} else np.float64).tobytes()
        except OverflowError:
            yield repr(items).encode()
    elif kinds <= BUILT_IN:
        yield repr(list(items)).encode()
    elif kinds <= {tuple, list} and depth < _DEPTH and len(widths := set(map(len, items))) == 1:
        # Rows, as ImageFolder's of a path and a class: column by column.
        yield repr((len(items), widths)).encode()
        for number in range(*widths):
            column = [row[number] for row in items]
            yield from _bytes_of(column, set(map(type, column)), depth + 1)
    else:
        for number in spread(len(items), _SPREAD):
            yield from bytes_of(items[number])


def bytes_of(item: Any, depth: int = 0, numbers: list[float] | None = None) -> Iterator[bytes]:
    """Bytes that tell an item by the numbers, strings, arrays, tensors and attributes in it.

    Of tensors and arrays some thousand numbers are taken, evenly apart.

    Args:
        item: The item.
        depth: Of containers around it.
        numbers: Takes means of floating numbers in arrays, in place of their bytes.
    """
    if isinstance(item, (torch.Tensor, np.ndarray)):
        values = _array_of(item) if isinstance(item, torch.Tensor) else item
        yield f"{values.dtype.str}{values.shape}".encode()
        flat = values.reshape(-1)
        some = np.concatenate([flat[:: max(flat.size // _OF_ARRAY, 1)], flat[-1:]])
        if values.dtype.hasobject:
            yield from bytes_of(some.tolist(), depth + 1, numbers)
        elif numbers is None or values.dtype.kind != "f":
            yield some.tobytes()
        elif len(some) and len(numbers) < _MOST_MEANS:
            bounds = np.linspace(0, len(some), min(len(some), 16), endpoint=False).astype(np.int64)
            sums = np.add.reduceat(np.nan_to_num(np.abs(some.astype(np.float64))), bounds)
            numbers += [float(f"{mean:.6g}") for mean in (sums / np.diff([*bounds, len(some)])).tolist()]
    elif type(item) in BUILT_IN or isinstance(item, np.generic):
        yield f"{type(item).__name__}{item!r};".encode()
    elif isinstance(item, PathLike):
        yield _text_of([item]).encode(errors="surrogatepass")
    elif isinstance(item, (list, tuple, dict)) and depth < _DEPTH:
        values = [*item.keys(), *item.values()] if isinstance(item, dict) else item
        # A loader may unpack a batch, and yield another container with the same in it.
        kind = type(item) if depth else dict if isinstance(item, dict) else list
        yield f"[{kind.__name__}{len(item)}".encode()
        if set(map(type, values)) <= {int, float, bool}:
            yield repr(list(values)).encode()
            return
        for number in spread(len(values), _SPREAD):
            yield from bytes_of(values[number], depth + 1, numbers)
    else:
        yield f"{type(item).__qualname__};".encode()
        held = getattr(item, "__dict__", None)
        if isinstance(held, dict) and depth < _DEPTH and not isinstance(item, (type, FunctionType, ModuleType)):
            # Of an object that holds others without end, not too much.
            yield from bytes_of(held, depth + 3, numbers)


def _text_of(texts: Sequence[Any]) -> str:
    """Strings or paths without the folder that all have in common: the same on another machine."""
    if not isinstance(texts[0], str):
        texts = [str(fspath(text)) for text in texts]
    common = commonprefix([min(texts), max(texts)])  # noqa: RUF071  # cut at a folder below
    folder = max(common.rfind("/"), common.rfind("\\")) + 1
    # Every text has the folder, so what stands behind a mark and the folder loses it.
    return ("\0" + "\0".join(texts)).replace("\0" + texts[0][:folder], "\0").replace("\\", "/")


def digest_of_batch(batch: Any) -> dict[str, Any]:
    """Describe the content of a batch: a digest, and means of its floating numbers, which another CPU may round."""
    numbers: list[float] = []
    return {"digest": hex_digest(*bytes_of(batch, 0, numbers), size=_SIZE), "means": numbers}


def is_same_batch(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions of batches are of the same content, up to rounding."""
    means = one["means"], other["means"]
    return one["digest"] == other["digest"] and len(means[0]) == len(means[1]) and np.allclose(*means, 1e-3, 1e-6)


def show_batch(content: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The digest of a batch, and those of its means that differ from another's, for people."""
    pairs = zip(content["means"], other["means"], strict=False)
    differing = [one for one, of_other in pairs if not np.isclose(one, of_other, 1e-3, 1e-6)]
    return " ".join(map(str, (content["digest"], *differing[:2])))
