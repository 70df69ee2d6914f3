"""Notices a dataset that keeps samples which it has drawn random numbers for: a resumed run draws them anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.attributes import can_be_read, reached
from lightning_stateful.generators.rng import GENERATORS, Randomness, state_of_generator

T = TypeVar("T")
# What functools.lru_cache and functools.cache make of a function.
CACHED = type(lru_cache(len))
# Longer lists are data, and not looked at.
_MOST_ITEMS = 2**16


class KeptSamples:
    """Looks at random generators, and at how full containers are, before and after a process reads a batch.

    Of a cache of augmented samples, a batch that is read first fills the cache and draws random numbers, and one whose
    samples are all kept does neither. One of plain samples, which are augmented behind it, goes on drawing. Looks end
    with the first batch that shows which it is: mostly the very first one, as most datasets keep nothing.

    Args:
        dataset: The dataset.
        held: Gives all that it holds: values with their names, of which the last two are the holder's and the value's.

    Attributes:
        is_over: Whether nothing is looked at any more.
    """

    def __init__(self, dataset: Any, held: Callable[[Any], Iterable[tuple[Any, Any]]]) -> None:
        self._dataset, self._held = dataset, held
        self.is_over = False
        # Containers that were filled while random numbers were drawn, by name; None before the first batch.
        self._filled: dict[Any, Any] | None = None
        # Those that it holds.
        self._generators: list[Any] = []

    def __call__(self, read: Callable[[], T]) -> T:
        """Read samples, and look at what that changes.

        Args:
            read: Reads the samples of a batch.

        Warns:
            StatefulWarning: The dataset keeps samples that were drawn; once, in the first worker.
        """
        before = self._look()
        samples = read()
        now = self._look()
        if before is not None and now is not None:
            self._compare(*before, *now)
        return samples

    def _look(self) -> tuple[dict[Any, tuple[int, Any]], Any] | None:
        """The sizes of containers, and the states of generators."""
        try:
            if self._filled is None:
                places = reached({"dataset": self._dataset})
                self._generators = [place.value for place in places if isinstance(place.value, GENERATORS)]
            held = self._held(self._dataset) if self._filled is None else self._filled.items()
            states = _states_of_process(), list(map(state_of_generator, self._generators))
            return {name: (_size(value), value) for name, value in held}, states
        except Exception:
            # A thread of the user's may change a container meanwhile, and a generator may have no state.
            self.is_over = True
            return None

    def _compare(
        self,
        before: dict[Any, tuple[int, Any]],
        states: Any,
        now: dict[Any, tuple[int, Any]],
        states_now: Any,
    ) -> None:
        grown = {name: value for name, (size, value) in now.items() if size > before.get(name, (0, None))[0]}
        has_drawn = states != states_now
        if self._filled and not grown and not has_drawn:
            self._warn(*next(iter(self._filled))[-2:])
        self.is_over = not grown or not has_drawn
        self._filled = {} if self.is_over else grown

    def _warn(self, holder: str, attribute: str) -> None:
        worker = get_worker_info()
        if worker is None or worker.id == 0:
            warnings.warn(
                f"{holder} keeps samples in {attribute!r} that it has drawn random numbers for. No checkpoint has "
                "them: a resumed run draws them anew, and is not exact. Keep them as they are before random numbers "
                "are drawn, or fill it before training from a seed.",
                StatefulWarning,
                stacklevel=2,
            )


def _states_of_process() -> tuple[Any, ...]:
    """The states of the CPU generators that all code in the process shares, to be compared."""
    of_torch, of_python, (_, words, *of_numpy) = Randomness.now()
    return of_torch.numpy().tobytes(), of_python, np.asarray(words).tobytes(), of_numpy


def _size(value: Any) -> int:
    """The items of a dict or a set; those of a list, tensor or array that are neither None nor False; 0 for others.

    Of a function with a ``functools.lru_cache`` the results that this keeps.
    """
    if isinstance(value, CACHED):
        return int(value.cache_info().currsize)
    if isinstance(value, (dict, set)):
        return dict.__len__(value) if isinstance(value, dict) else set.__len__(value)
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and can_be_read(value)):
        # One that says which samples are kept in another one; not on a GPU, which would wait for it.
        is_mask = value.dtype in (torch.bool, np.bool_) and value.shape[:1] == value.shape and _is_on_cpu(value)
        return int(np.count_nonzero(value)) if is_mask and len(value) <= _MOST_ITEMS else 0
    is_looked_at = isinstance(value, list) and list.__len__(value) <= _MOST_ITEMS
    return sum(item is not None and item is not False for item in list.__iter__(value)) if is_looked_at else 0


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, np.ndarray) or value.device.type == "cpu"
