"""The samplers that Lightning and hooks find of a loader, which draw by (seed, epoch) where they are told the epoch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_stateful.loaders.patching import AnyLoader
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Lightning's function that calls set_epoch of a loader's sampler, and of the sampler of its batch sampler.
_TELLS = "_set_sampler_epoch"
# Lightning keeps the arguments of a user's DataLoader(...) in attributes that begin so, and reads there whether it
# shuffles.
RECORDS = "__pl_saved_"


def shown_in_place(loader: AnyLoader, original: Any, *, overfits: bool, is_dealt_out: bool) -> Any:
    """The object whose ``sampler`` and ``batch_sampler`` a proxy shows.

    It is the user's loader, or, where Lightning by itself would have replaced the sampler, an object with the one that
    Lightning would have put there.
    """
    if not isinstance(original, DataLoader):
        return original
    topology, dataset = loader.topology, cast("Any", original.dataset)
    plain = type(original.sampler) in (RandomSampler, SequentialSampler) and original.batch_size is not None
    if overfits:
        sampler: Any = SequentialSampler(dataset)
    elif plain and (is_dealt_out or topology.num_replicas > 1):
        sampler = DistributedSampler(
            dataset, topology.num_replicas, topology.rank, shuffle=type(original.sampler) is RandomSampler
        )
    else:
        return original
    batches = None
    if original.batch_sampler is not None:
        batches = BatchSampler(sampler, original.batch_size or 1, original.drop_last)
    shuffles = not overfits and type(original.sampler) is RandomSampler
    return SimpleNamespace(sampler=sampler, batch_sampler=batches, **{f"{RECORDS}kwargs": {"shuffle": shuffles}})


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
        """Tell the sampler, under the randomness of that epoch, if it may be told once more as its pass begins."""
        if not self._order.facts.adds_up:
            self._order.iterated().tell(epoch, by=self._sampler.set_epoch)
