"""Lets a user's samplers draw by (seed, epoch) where Lightning tells them the epoch, as when they are iterated."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Lightning's function that calls set_epoch of a loader's sampler, and of the sampler of its batch sampler.
_TELLS = "_set_sampler_epoch"


class ToldSamplers:
    """What Lightning finds in place of a loader's samplers, where it looks for some to tell.

    Everybody else finds the samplers themselves.

    Args:
        order: The loader's order.
    """

    def __init__(self, order: Any) -> None:
        self._order = order if isinstance(order, WrappedSampler) else None
        # By the samplers' ids: Lightning tells one that it finds in two places once.
        self._told: dict[int, _Told] = {}

    def found(self, name: str, value: Any) -> Any:
        """The value of a loader's attribute ``name``, for who has asked the caller for it."""
        if self._order is None or sys._getframe(2).f_code.co_name != _TELLS:
            return value
        if name != "batch_sampler":
            return self._standing_for(value)
        inner = getattr(value, "sampler", None)
        return value if inner is None else SimpleNamespace(sampler=self._standing_for(inner))

    def _standing_for(self, sampler: Any) -> Any:
        if self._order is None or not callable(getattr(sampler, "set_epoch", None)):
            return sampler
        return self._told.setdefault(id(sampler), _Told(sampler, self._order))


class _Told:
    """Stands for a sampler that is told an epoch."""

    def __init__(self, sampler: Any, order: WrappedSampler) -> None:
        self._sampler, self._order = sampler, order

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, under the randomness of that epoch."""
        self._order.iterated().tell(epoch, by=self._sampler.set_epoch)
