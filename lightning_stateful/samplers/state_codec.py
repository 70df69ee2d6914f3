"""Turns the ``state_dict`` of a wrapped sampler or dataset into plain JSON data, and back."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from lightning_stateful.errors import DamagedStateError, StateError

# A value that JSON has no type for stands as {_TAG: [kind, ...]}.
_TAG = "__of__"
_SCALARS = frozenset({bool, int, str, type(None)})
_CONTAINERS: dict[str, Any] = {
    kind.__name__: kind for kind in (tuple, set, frozenset, deque, dict, OrderedDict, Counter)
}


def to_plain(value: Any, path: str = "state_dict()", owner: str = "sampler") -> Any:
    """A fresh copy of a state as JSON data.

    Tuples, sets, deques, bytes, arrays, tensors, infinite numbers and dicts with other keys than strings are spelled
    out in a way that :func:`from_plain` undoes.

    Raises:
        StateError: Something in it is none of these.
    """
    kind = type(value)
    if kind in _SCALARS or (kind is float and math.isfinite(value)):
        return value
    # Most items are scalars, and paths take most of the time.
    if kind is list:
        return [
            item if type(item) in _SCALARS else to_plain(item, f"{path}[{number}]", owner)
            for number, item in enumerate(value)
        ]
    if kind is dict and _TAG not in value and set(map(type, value)) <= {str}:
        return {
            key: item if type(item) in _SCALARS else to_plain(item, f"{path}[{key!r}]", owner)
            for key, item in value.items()
        }
    if kind in _CONTAINERS.values():
        if isinstance(value, dict):
            parts = [
                [to_plain(key, path, owner), to_plain(item, f"{path}[{key!r}]", owner)] for key, item in value.items()
            ]
        else:
            # Sets have no order: sorted, equal sets give equal states.
            parts = to_plain(sorted(value, key=repr) if kind in (set, frozenset) else list(value), path, owner)
        return {_TAG: [kind.__name__, parts, *([value.maxlen] if kind is deque else [])]}
    if kind is float:
        return {_TAG: ["float", repr(value)]}
    file = io.BytesIO()
    if kind in (bytes, bytearray):
        file.write(value)
    elif isinstance(value, torch.Tensor):
        kind = torch.Tensor
        torch.save(value.detach().cpu().clone(), file)
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        kind = np.generic if isinstance(value, np.generic) else np.ndarray
        np.save(file, value, allow_pickle=False)
    else:
        raise StateError(
            f"The {owner}'s {path} is a {kind.__qualname__}, which cannot be kept in a checkpoint. Return numbers, "
            "strings, bytes, lists, tuples, sets, dicts, arrays or tensors."
        )
    return {_TAG: [kind.__name__, base64.b64encode(file.getvalue()).decode()]}


def from_plain(value: Any) -> Any:
    """The value that :func:`to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _TAG not in value:
        return {key: from_plain(item) for key, item in value.items()}
    try:
        return _from_tagged(*value[_TAG])
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, EOFError, UnpicklingError) as error:
        raise DamagedStateError(f"A state holds {value!r}, which nothing can be made of.") from error


def _from_tagged(kind: str, value: Any, *options: Any) -> Any:
    if kind in _CONTAINERS:
        made, items = _CONTAINERS[kind], from_plain(value)
        return made(dict(items) if issubclass(made, dict) else items, *options)
    if kind == "float":
        return float(value)
    raw = base64.b64decode(value, validate=True)
    if kind in ("bytes", "bytearray"):
        return raw if kind == "bytes" else bytearray(raw)
    if kind == "Tensor":
        return torch.load(io.BytesIO(raw), weights_only=True)
    if kind in ("ndarray", "generic"):
        array = np.load(io.BytesIO(raw), allow_pickle=False)
        return array if kind == "ndarray" else array[()]
    raise ValueError(kind)
