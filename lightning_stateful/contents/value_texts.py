"""Texts of plain values, and of containers and arrays of such, to be compared and shown."""

from __future__ import annotations

import sys
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from re import Pattern
from typing import Any

import numpy as np
import torch

from lightning_stateful.contents.build_values import text_of_function
from lightning_stateful.contents.held_state import SHARED, shared_numbers
from lightning_stateful.generators.attributes import can_be_read, is_users, package_of, text_of_plain
from lightning_stateful.samplers.fingerprint import as_array, hex_digest, spread

# Begins the text of an object of which nothing is told but its class.
OBJECT = "a "
# Characters of a text, and of one that is longer.
_MOST_CHARACTERS, _SHOWN = 40, 24
# Values of a list or dict that are looked at, and bytes of an array or tensor.
_MOST_VALUES, _MOST_BYTES = 1024, 2**22
# Bytes of a digest.
_SIZE = 6
_DEFAULTS = (bool, int, float, str)
_DATES = (date, time, timedelta)
_BY_REPR = (type(None), complex, slice, Enum, Pattern, *_DATES, torch.dtype, torch.device, np.dtype)


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Texts of values as :func:`text_of` gives them, those of long ones as digests; what has none is left out."""
    return {name: shortened(text) for name, value in values.items() if (text := text_of(value))}


def text_of(value: Any) -> str:
    """A text that tells a value from others, in another process too; empty where there is none.

    Of paths that is their last part, as folders are others on another machine. Of a user's object it is its class, of
    tables and large arrays a digest. No property or method of a user's class is called.
    """
    # What cannot be read is left alone: a container whose methods raise, an integer that is too long to be written.
    with suppress(Exception):
        if isinstance(value, PurePath) or (type(value) is str and "/" in value):
            return repr(PurePath(value).name)
        if isinstance(value, (*_DEFAULTS, np.generic)):
            return text_of_plain(value)
        if isinstance(value, _BY_REPR):
            return repr(value)
        if isinstance(value, type):
            return f"class {value.__qualname__}"
        if text := text_of_data(value):
            return text
        name, function = type(value).__qualname__, text_of_function(value)
        is_object = function == name or (not function and is_users(type(value).__module__))
        return f"{OBJECT}{name}" if is_object else function
    return ""


def text_of_data(value: Any) -> str:
    """Text of a container of plain values, an array, a tensor or a table; empty for anything else."""
    return _text_of_container(value) or _text_of_table(value)


def _text_of_table(value: Any) -> str:
    """Text of a table of pandas, or of Hugging Face datasets."""
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index)):
        hashes = pandas.util.hash_pandas_object(value.take(spread(len(value), _MOST_VALUES)))
        return f"{len(value)} rows, {hex_digest(hashes.to_numpy().tobytes(), size=_SIZE)}"
    is_library = package_of(type(value)) == "datasets" and "_fingerprint" in vars(value)
    return f"{value.num_rows} rows, {value._fingerprint}" if is_library else ""


def _text_of_container(value: Any) -> str:
    """A container of plain values, an array or a tensor as text; empty for anything else, and for large arrays."""
    for held in shared_numbers(value):
        held = held[:_MOST_BYTES] if isinstance(held, list) else held
        return f"{held!r}{SHARED}" if _is_plain([held]) else ""
    if isinstance(value, torch.Tensor) and can_be_read(value) and value.device.type == "cpu":
        value = as_array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or not 0 < value.nbytes <= _MOST_BYTES:
            return ""
        return f"an array {hex_digest(np.ascontiguousarray(value).tobytes(), size=_SIZE)} of {value.nbytes} bytes"
    if isinstance(value, (array, bytes, bytearray)):
        view = memoryview(value)
        is_short = view.nbytes <= _MOST_BYTES
        return f"an array {hex_digest(view.tobytes(), size=_SIZE)} of {view.nbytes} bytes" if is_short else ""
    value = value.data if isinstance(value, (UserDict, UserList)) else value
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr) if len(value) <= _MOST_VALUES else None
    if not isinstance(value, (list, tuple, dict, deque)):
        return ""
    # Of many values some, evenly apart.
    items: Any = list(value.items()) if isinstance(value, dict) else value
    some = [items[place] for place in spread(len(items), _MOST_VALUES)]
    if not _is_plain(some):
        return ""
    return repr(value) if len(some) == len(items) else f"{len(items)} values, {some!r}"


def _is_plain(values: list[Any]) -> bool:
    """Whether values are plain, or short lists, tuples and dicts of such; of strings no paths."""
    left, number = list(values), len(values)
    while left and number <= 2 * _MOST_VALUES:
        item = left.pop()
        if isinstance(item, (list, tuple, dict, deque)):
            number += len(item)
            left += (item.items() if isinstance(item, dict) else item) if len(item) <= _MOST_VALUES else [object()]
        elif not isinstance(item, (*_DEFAULTS, type(None))) or (isinstance(item, str) and "/" in item):
            return False
    return not left


def shortened(text: str) -> str:
    """A text, or the beginning of a long one with its digest."""
    short, is_shared = text.removesuffix(SHARED), text.endswith(SHARED)
    if len(short) > _MOST_CHARACTERS:
        short = f"{short[:_SHOWN]}... ({hex_digest(short.encode('utf-8', 'replace'), size=_SIZE)})"
    return short + SHARED * is_shared
