"""A sampler's own data as they were when it was wrapped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

_SCALARS = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (list, deque, dict, set, bytearray, np.ndarray, torch.Tensor)
# Larger arrays are left as they are.
_MOST_BYTES = 2**28

PutBack = Callable[[], Any]


class Pristine:
    """Remembers the numbers and containers that samplers hold, and puts them back in place.

    Many samplers shuffle a list of theirs in place whenever they are iterated, so that an epoch depends on all those
    before. Begun from what they held at first, it is a function of the epoch alone. Lists, dicts, sets, deques, arrays
    and tensors are remembered, containers in containers too; every other object is left as it is.

    Args:
        samplers: The samplers.
    """

    def __init__(self, samplers: Iterable[Any]) -> None:
        self._held = [
            (vars(sampler), {name: _remember(value) for name, value in vars(sampler).items() if _is_data(value)})
            for sampler in samplers
            if hasattr(sampler, "__dict__")
        ]

    def restore(self) -> None:
        """Put everything back, in the very containers that held it, so that other names for them see it too."""
        for attributes, held in self._held:
            for name, put_back in held.items():
                attributes[name] = put_back()


def _is_data(value: Any) -> bool:
    return isinstance(value, (*_SCALARS, *_CONTAINERS))


def _remember(value: Any) -> PutBack:
    """What puts the contents of a container back, and returns it."""
    if isinstance(value, np.ndarray):
        return _remember_array(value) if value.flags.writeable and value.nbytes <= _MOST_BYTES else lambda: value
    if isinstance(value, torch.Tensor):
        return _remember_tensor(value) if value.nbytes <= _MOST_BYTES else lambda: value
    if isinstance(value, dict):
        return _remember_dict(value)
    if isinstance(value, (list, deque)):
        return _remember_list(value)
    if isinstance(value, (set, bytearray)):
        return _remember_plain(value)
    return lambda: value


def _remember_list(value: Any) -> PutBack:
    if not any(issubclass(kind, _CONTAINERS) for kind in set(map(type, value))):
        copied = list(value)

        def put_back() -> Any:
            value.clear()
            value.extend(copied)
            return value

        return put_back
    items = [_remember(item) for item in value]

    def put_all_back() -> Any:
        value.clear()
        value.extend(item() for item in items)
        return value

    return put_all_back


def _remember_dict(value: dict[Any, Any]) -> PutBack:
    items = {key: _remember(item) for key, item in value.items()}

    def put_back() -> Any:
        value.clear()
        value.update({key: item() for key, item in items.items()})
        return value

    return put_back


def _remember_plain(value: Any) -> PutBack:
    copied = value.copy()

    def put_back() -> Any:
        value.clear()
        value.update(copied) if isinstance(value, set) else value.extend(copied)
        return value

    return put_back


def _remember_array(value: np.ndarray[Any, Any]) -> PutBack:
    copied = value.copy()

    def put_back() -> Any:
        value[...] = copied
        return value

    return put_back


def _remember_tensor(value: torch.Tensor) -> PutBack:
    copied = value.detach().clone()

    def put_back() -> Any:
        with torch.no_grad():
            value.copy_(copied)
        return value

    return put_back
