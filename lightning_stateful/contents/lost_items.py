"""Notices a dataset that loses items of a list, set or dict as samples are read: a resume begins with all of them."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import can_be_read

T = TypeVar("T")
_CONTAINERS = (list, dict, set, deque)
# Of larger masks, counting what is set takes too long, and of more containers.
_MOST_OF_MASK, _MOST_CONTAINERS = 2**16, 32


class LostItems:
    """Counts the items of containers that a dataset holds, before and after a process reads a batch.

    A dataset that meets a sample which it cannot read often takes another one, and forgets the bad one: it drops it
    from a set of candidates, or clears it in a mask. What samples follow from is then in no checkpoint. Counted are
    items of lists, dicts, sets and deques, and what is set in masks of NumPy and torch. Those that hold fewer than when
    the process began to read, and have lost items by reading, have lost them; a cache is empty by then.

    Args:
        dataset: The dataset.
        users: Gives the objects of the user's that it reaches, and the name of each.
        is_used: Whether code that reads samples uses what an attribute of an object of that name holds.
        said: A flag that is set by the process that warns, for all that share it.

    Attributes:
        named: The name of the object and the attribute that were warned of here; empty before.
    """

    def __init__(
        self,
        dataset: Any,
        users: Callable[[Any], Iterable[tuple[Any, Any]]],
        is_used: Callable[[Any, str], bool],
        said: torch.Tensor,
    ) -> None:
        self._dataset, self._users, self._is_used = dataset, users, is_used
        self.said = said
        self.named: tuple[Any, str] | None = None
        # Names, the attributes that hold them, and how many items they held at first; None before the first batch.
        self._held: list[tuple[Any, dict[str, Any], str, int]] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is counted any more: the dataset holds no containers, or has been warned of."""
        return self._held == []

    def __call__(self, read: Callable[[], T]) -> T:
        """Read samples, and look at what that has lost.

        Args:
            read: Reads the samples of a batch.

        Warns:
            StatefulWarning: The dataset has lost items; once.
        """
        if self._held is None and self.said:
            self._held = []
        if self._held is None:
            self._held = self._found()
        before = [_number(held.get(name)) for _, held, name, _ in self._held]
        samples = read()
        for (owner, held, name, first), number in zip(self._held, before, strict=True):
            if _number(held.get(name)) < min(first, number) and self._is_used(owner, name):
                self._held, self.named = [], (owner, name)
                if not self.said:
                    self.said[0] = True
                    warnings.warn(
                        f"{owner.holder} has lost items of {name!r} as samples were read. No checkpoint has that. If "
                        "samples depend on it, a resume from here on is not exact: derive it from the index and the "
                        "epoch, or find samples that cannot be read before training.",
                        StatefulWarning,
                        stacklevel=2,
                    )
                break
        return samples

    def _found(self) -> list[tuple[Any, dict[str, Any], str, int]]:
        found: list[tuple[Any, dict[str, Any], str, int]] = []
        # A thread of the user's may change what is gone through meanwhile.
        with suppress(Exception):
            for value, owner in self._users(self._dataset):
                held = getattr(value, "__dict__", None)
                if type(held) is not dict:
                    continue
                for name, item in [*held.items()]:
                    if len(found) < _MOST_CONTAINERS and 0 < (first := _number(item)) < _MANY:
                        found.append((owner, held, name, first))
        return found


def _number(value: Any) -> int:
    """Items of a container, or what is set in a mask; many of anything else, which can lose none."""
    if type(value) in _CONTAINERS:
        return len(value)
    if type(value) is np.ndarray and value.dtype == np.bool_ and value.size <= _MOST_OF_MASK:
        return int(np.count_nonzero(value))
    if type(value) is torch.Tensor and value.dtype == torch.bool and value.numel() <= _MOST_OF_MASK:
        return int(torch.count_nonzero(value)) if value.device.type == "cpu" and can_be_read(value) else _MANY
    return _MANY


_MANY = 2**62
