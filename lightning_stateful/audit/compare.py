"""Where two items differ, in words."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 8
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


def difference(expected: Any, got: Any, path: str = "item") -> str:
    """The first place where two items differ.

    Items are compared by structure: mappings, lists, tuples, tensors and arrays (type, shape, dtype and every
    element), dataclasses and objects without an ``__eq__`` of their own by their attributes, everything else by
    ``==``. NaN equals NaN, and 1 differs from 1.0 and True.

    Args:
        expected: What should be there.
        got: What is there.
        path: How the answer calls the item.

    Returns:
        For example ``"item['x'][3]: expected 4, got 5"``, or ``""`` for equal items.
    """
    return _difference(expected, got, path, frozenset())


def shorten(value: Any) -> str:
    """One line that says what ``value`` is, cut to a readable length."""
    return " ".join(_SHORT.repr(value).split())


def _difference(expected: Any, got: Any, path: str, above: frozenset[tuple[int, int]]) -> str:
    if expected is got:
        return ""
    if type(expected) is not type(got):
        return _unequal(path, expected, got)
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        if expected.dtype != got.dtype or expected.shape != got.shape:
            return _unlike(path, expected, got)
        return _of_arrays(_as_array(expected), _as_array(got), path, above)
    pair = (id(expected), id(got))
    if pair in above:
        return ""
    return _of_containers(expected, got, path, above | {pair})


def _of_containers(expected: Any, got: Any, path: str, above: frozenset[tuple[int, int]]) -> str:
    if isinstance(expected, Mapping):
        if expected.keys() != got.keys():
            return f"{path} has the keys {shorten(list(got))}, expected {shorten(list(expected))}"
        pairs: Any = ((f"{path}[{key!r}]", expected[key], got[key]) for key in expected)
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(got):
            return f"{path} has {len(got)} elements, expected {len(expected)}: {shorten(got)}, not {shorten(expected)}"
        pairs = ((f"{path}[{i}]", one, other) for i, (one, other) in enumerate(zip(expected, got, strict=True)))
    elif (ours := _attributes(expected)) is not None:
        theirs = _attributes(got) or {}
        if ours.keys() != theirs.keys():
            return f"{path} has the attributes {shorten(list(theirs))}, expected {shorten(list(ours))}"
        pairs = ((f"{path}.{name}", value, theirs[name]) for name, value in ours.items())
    else:
        return _of_scalars(expected, got, path, above)
    return next((found for name, one, other in pairs if (found := _difference(one, other, name, above))), "")


def _attributes(value: Any) -> dict[str, Any] | None:
    """What an object consists of, unless it says itself what it equals."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    decides = any("__eq__" in vars(kind) for kind in type(value).__mro__ if kind is not object)
    return None if decides or not hasattr(value, "__dict__") else vars(value)


def _of_scalars(expected: Any, got: Any, path: str, above: frozenset[tuple[int, int]]) -> str:
    verdict = expected == got
    if not isinstance(verdict, (bool, np.bool_)):
        # Tables and arrays of other libraries answer element by element.
        return _difference(np.asarray(expected), np.asarray(got), path, above)
    return "" if verdict or (expected != expected and got != got) else _unequal(path, expected, got)


def _of_arrays(expected: Any, got: Any, path: str, above: frozenset[tuple[int, int]]) -> str:
    if expected.dtype == object:
        pairs = zip(np.ndindex(expected.shape), expected.flat, got.flat, strict=True)
        where = ((f"{path}{list(index)}", one, other) for index, one, other in pairs)
        return next((found for name, one, other in where if (found := _difference(one, other, name, above))), "")
    unequal = (expected != got) & ~((expected != expected) & (got != got))
    if not unequal.any():
        return ""
    index = tuple(int(place) for place in np.argwhere(unequal)[0])
    return _unequal(f"{path}{list(index)}" if index else path, expected[index].item(), got[index].item())


def _as_array(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    dense = array.detach().cpu()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    # NumPy knows no bfloat16; every one of its values is a float32.
    return (dense.float() if dense.dtype is torch.bfloat16 else dense).numpy()


def _unlike(path: str, expected: Any, got: Any) -> str:
    return (
        f"{path} is {tuple(got.shape)} of {got.dtype}, expected {tuple(expected.shape)} of {expected.dtype}: "
        f"{shorten(got)}, not {shorten(expected)}"
    )


def _unequal(path: str, expected: Any, got: Any) -> str:
    return f"{path}: expected {shorten(expected)}, got {shorten(got)}"
