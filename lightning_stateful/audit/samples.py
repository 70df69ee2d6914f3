"""Which samples an item holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from lightning_stateful.errors import ConfigurationError

Key = Callable[[Any], list[Hashable]]


def identities(item: Any) -> list[Hashable]:
    """The samples of an item that consists of their indices or names.

    Integers and strings stand for themselves; tensors and arrays of integers, lists and tuples are flattened.

    Raises:
        ConfigurationError: The item holds something else, so that a ``key`` must say which samples it has.
    """
    if isinstance(item, (torch.Tensor, np.ndarray)) and _holds_integers(item):
        return [int(index) for index in item.reshape(-1).tolist()]
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return [int(item)]
    if isinstance(item, str):
        return [item]
    if isinstance(item, (list, tuple)):
        return [identity for part in item for identity in identities(part)]
    raise ConfigurationError(
        f"Cannot tell which samples a {type(item).__name__} holds. Pass key=, a function from an item to the list of "
        "its samples' identities, for example key=lambda batch: batch['index'].tolist()."
    )


def _holds_integers(array: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(array, np.ndarray):
        return bool(np.issubdtype(array.dtype, np.integer))
    return array.dtype is not torch.bool and not array.is_floating_point() and not array.is_complex()
