"""Texts of plain values, and of containers and arrays of such, to be compared and shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from lightning_stateful.contents.build_values import text_of_function
from lightning_stateful.contents.held_state import SHARED, shared_numbers
from lightning_stateful.generators.attributes import can_be_read, text_of_plain
from lightning_stateful.samplers.fingerprint import as_array, hex_digest, spread

# Characters of a text.
_MOST_CHARACTERS = 40
# Values of a list or dict that are looked at, and bytes of an array or tensor.
_MOST_VALUES, _MOST_BYTES = 1024, 2**22
# Bytes of a digest.
_SIZE = 6
_DEFAULTS = (bool, int, float, str)


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Plain values, and containers and arrays of such, as texts or digests; paths and all else are left out."""
    found: dict[str, str] = {}
    for name, value in values.items():
        is_plain = isinstance(value, (*_DEFAULTS, np.generic)) and not (isinstance(value, str) and "/" in value)
        if text := text_of_plain(value) if is_plain else container_as_text(value) or text_of_function(value):
            found[name] = shortened(text)
    return found


def container_as_text(value: Any) -> str:
    """A container of plain values, an array or a tensor as text; empty for anything else, and for large arrays."""
    # What cannot be read is left alone: a container whose methods raise, an integer that is too long to be written.
    with suppress(Exception):
        return _text_of(value)
    return ""


def _text_of(value: Any) -> str:
    for held in shared_numbers(value):
        held = held[:_MOST_BYTES] if isinstance(held, list) else held
        return f"{held!r}{SHARED}" if _is_plain([held]) else ""
    if isinstance(value, torch.Tensor) and can_be_read(value) and value.device.type == "cpu":
        value = as_array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or not 0 < value.nbytes <= _MOST_BYTES:
            return ""
        return f"an array {hex_digest(np.ascontiguousarray(value).tobytes(), size=_SIZE)} of {value.nbytes} bytes"
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
    """A text, or the digest of a long one."""
    short, is_shared = text.removesuffix(SHARED), text.endswith(SHARED)
    if len(short) > _MOST_CHARACTERS:
        short = hex_digest(short.encode("utf-8", "replace"), size=_SIZE)
    return short + SHARED * is_shared
