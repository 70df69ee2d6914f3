"""Turns the ``state_dict`` of a wrapped sampler or dataset into plain JSON data, and back."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from lightning_stateful.errors import DamagedStateError, StateError

# A value that JSON has no type for stands as {_TAG: [kind, ...]}.
_TAG = "__of__"
_SEQUENCES: dict[Any, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_TYPES: dict[str, Any] = {kind: made for made, kind in (_SEQUENCES | _MAPPINGS).items()}


def to_plain(value: Any, path: str = "state_dict()", owner: str = "sampler") -> Any:
    """A fresh copy of a state as JSON data.

    Tuples, sets, deques, bytes, arrays, tensors, infinite numbers and dicts with other keys than strings are spelled
    out in a way that :func:`from_plain` undoes.

    Args:
        value: The state.
        path: What errors call it.
        owner: What it is the state of.

    Raises:
        StateError: Something in it is none of these.
    """
    return _to_plain(value, f"The {owner}'s {path}")


def from_plain(value: Any) -> Any:
    """The value that :func:`to_plain` was given.

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
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, EOFError, UnpicklingError) as error:
        raise DamagedStateError(f"A state holds {value!r}, which nothing can be made of.") from error


def _to_plain(value: Any, path: str) -> Any:
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is float:
        return {_TAG: ["float", repr(value)]}
    if type(value) is list:
        return [_to_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _mapping_to_plain(value, path)
    if kind := _SEQUENCES.get(type(value)):
        # Sets have no order: sorted, equal sets give equal states.
        parts = _to_plain(sorted(value, key=repr) if kind.endswith("set") else list(value), path)
        return {_TAG: [kind, parts, *([value.maxlen] if kind == "deque" else [])]}
    if type(value) in (bytes, bytearray):
        return {_TAG: [type(value).__name__, base64.b64encode(value).decode()]}
    if isinstance(value, torch.Tensor):
        return {_TAG: ["tensor", _saved(partial(torch.save, value.detach().cpu().clone()))]}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {_TAG: ["scalar", base64.b64encode(value.tobytes()).decode(), value.dtype.str]}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {_TAG: ["array", _saved(lambda file: np.save(file, value, allow_pickle=False))]}
    raise StateError(
        f"{path} is a {type(value).__qualname__}, which cannot be kept in a checkpoint. Return numbers, "
        "strings, containers, arrays or tensors."
    )


def _saved(save: Callable[[Any], Any]) -> str:
    file = io.BytesIO()
    save(file)
    return base64.b64encode(file.getvalue()).decode()


def _mapping_to_plain(value: Mapping[Any, Any], path: str) -> Any:
    if type(value) not in _MAPPINGS:
        raise StateError(
            f"{path} is a {type(value).__qualname__}, which cannot be kept in a checkpoint. Return a dict."
        )
    if _TAG not in value and all(type(key) is str for key in value) and type(value) is dict:
        return {key: _to_plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    pairs = [[_to_plain(key, path), _to_plain(item, f"{path}[{key!r}]")] for key, item in value.items()]
    return {_TAG: [_MAPPINGS[type(value)], pairs]}


def _from_tagged(kind: str, parts: list[Any]) -> Any:
    if kind in _TYPES:
        items = [from_plain(item) for item in parts[0]]
        return _TYPES[kind](dict(items) if kind in _MAPPINGS.values() else items, *parts[1:])
    if kind == "float":
        return float(parts[0])
    raw = base64.b64decode(parts[0], validate=True)
    if kind in ("bytes", "bytearray"):
        return raw if kind == "bytes" else bytearray(raw)
    if kind == "tensor":
        return torch.load(io.BytesIO(raw), weights_only=True)
    if kind == "scalar":
        return np.frombuffer(raw, dtype=parts[1])[0]
    if kind == "array":
        return np.load(io.BytesIO(raw), allow_pickle=False)
    raise ValueError(kind)
