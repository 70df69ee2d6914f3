"""A sampler's own ``state_dict`` as plain data, and back."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_stateful.errors import DamagedStateError, StateError

# A value that JSON has no word for stands as {_TAG: [kind, ...]}.
_TAG = "__of__"
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def to_plain(value: Any, path: str = "state_dict()") -> Any:
    """A fresh copy of a state as JSON data.

    Tuples, sets, deques, bytes, arrays, tensors, infinite numbers and dicts with other keys than strings are spelled
    out in a way that :func:`from_plain` undoes.

    Raises:
        StateError: Something in it is none of these.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, (float, np.generic)):
        return {_TAG: ["float", repr(value)]} if isinstance(value, float) else to_plain(np.asarray(value), path)
    if isinstance(value, Mapping):
        return _mapping_to_plain(value, path)
    if isinstance(value, list):
        return [to_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
    for kind, made in _SEQUENCES.items():
        if type(value) is made:
            # Sets have no order: sorted, equal sets give equal states.
            items = sorted(value, key=repr) if kind.endswith("set") else value
            return {_TAG: [kind, [to_plain(item, f"{path}[{number}]") for number, item in enumerate(items)]]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: ["bytes", base64.b85encode(value).decode()]}
    if isinstance(value, torch.Tensor):
        return {_TAG: ["tensor", to_plain(value.detach().cpu().numpy(), path)]}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        raw = base64.b85encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_TAG: ["array", value.dtype.str, list(value.shape), raw]}
    raise StateError(
        f"The sampler's {path} is a {type(value).__qualname__}, which cannot be kept in a checkpoint. Return numbers, "
        "strings, containers, arrays or tensors."
    )


def from_plain(value: Any) -> Any:
    """What :func:`to_plain` was given.

    Raises:
        DamagedStateError: It is nothing that :func:`to_plain` makes.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _TAG not in value:
        return {key: from_plain(item) for key, item in value.items()}
    try:
        kind, *parts = value[_TAG]
        return _from_tagged(kind, parts)
    except (TypeError, ValueError, KeyError) as error:
        raise DamagedStateError(f"A sampler's state holds {value!r}, which nothing can be made of.") from error


def _mapping_to_plain(value: Mapping[Any, Any], path: str) -> Any:
    if _TAG not in value and all(type(key) is str for key in value) and type(value) in (dict, OrderedDict):
        return {key: to_plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    kind = "counter" if isinstance(value, Counter) else "dict"
    pairs = [[to_plain(key, path), to_plain(item, f"{path}[{key!r}]")] for key, item in value.items()]
    return {_TAG: [kind, pairs]}


def _from_tagged(kind: str, parts: list[Any]) -> Any:
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_plain(item) for item in parts[0])
    if kind in ("dict", "counter"):
        pairs = {from_plain(key): from_plain(item) for key, item in parts[0]}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "float":
        return float(parts[0])
    if kind == "bytes":
        return base64.b85decode(parts[0])
    if kind == "tensor":
        return torch.from_numpy(from_plain(parts[0]))
    if kind != "array":
        raise ValueError(kind)
    dtype, shape, raw = parts
    return np.frombuffer(base64.b85decode(raw), dtype=dtype).reshape(shape).copy()
