"""The order behind one of torch's own samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.index.draws import ReplacementOrder, SubsetOrder, WeightedOrder
from lightning_stateful.index.orders import Order, SequentialOrder, ShuffledOrder
from lightning_stateful.loaders.origins import is_lightnings, is_torchdatas
from lightning_stateful.samplers.distributed import StatefulDistributedSampler

_DISTRIBUTED = (DistributedSampler, StatefulDistributedSampler)


def order_of(dataset: Any, *, sampler: Any = None, shuffle: bool = False, seed: int = 0) -> Order:
    """The order of the same kind and parameters as a sampler.

    The order draws on ``seed`` and not on the sampler's generator, so its sequence is another one of the same
    distribution.

    Args:
        dataset: What the sampler draws from.
        sampler: One of torch's own samplers, an order, or None for the whole dataset.
        shuffle: Without a sampler: whether to shuffle.
        seed: Chooses the sequence.

    Raises:
        UnsupportedLoaderError: The sampler is none of torch's own.
    """
    if sampler is None:
        return ShuffledOrder(len(dataset), seed) if shuffle else SequentialOrder(len(dataset))
    if isinstance(sampler, Order):
        return sampler
    if _is(sampler, SequentialSampler):
        return SequentialOrder(len(sampler))
    if _is(sampler, RandomSampler):
        length = len(sampler.data_source)
        if sampler.replacement:
            return ReplacementOrder(length, sampler.num_samples, seed)
        return ShuffledOrder(length, seed, None if sampler.num_samples == length else sampler.num_samples)
    if _is(sampler, *_DISTRIBUTED):
        return order_of(dataset, shuffle=sampler.shuffle, seed=sampler.seed or seed)
    if _is(sampler, SubsetRandomSampler):
        return SubsetOrder(np.asarray(sampler.indices, dtype=np.int64), seed)
    if _is(sampler, WeightedRandomSampler):
        weights = np.asarray(sampler.weights, dtype=np.float64)
        return WeightedOrder(weights, sampler.num_samples, sampler.replacement, seed)
    raise UnsupportedLoaderError(
        f"The sampler {type(sampler).__qualname__} is none of torch's own, so what it yields cannot be computed from "
        "a position. Use shuffle=True or False, one of torch's samplers (sequential, random, subset, weighted, "
        "distributed), or an order of lightning_stateful.index."
    )


def has_order(sampler: Any, *, replace: bool, generator: Any = None) -> bool:
    """Whether a sampler stands for an order rather than for itself.

    Args:
        sampler: A sampler, an order, or None.
        replace: Whether torch's own samplers are to be replaced by orders of the same distribution.
        generator: The loader's generator, if it has one.
    """
    ours = type(sampler) is StatefulDistributedSampler
    if sampler is None or ours or isinstance(sampler, Order) or _is(sampler, SequentialSampler):
        return True
    if _is(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        # What shuffle=True makes: it names a distribution, and no sampler of one's own.
        return replace or is_torchdatas(sampler) or sampler.generator is None or sampler.generator is generator
    return replace and _is(sampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, *_DISTRIBUTED)


def cuts_samples(batch_sampler: Any) -> bool:
    """Whether a batch sampler does no more than cut what a sampler yields into batches."""
    return _is(batch_sampler, BatchSampler)


def without_lightnings(sampler: Any) -> Any:
    """The sampler or batch sampler that Lightning has wrapped in one of its own, or the sampler itself."""
    while is_lightnings(sampler):
        held = getattr(getattr(sampler, "dataset", None), "_sampler", None) or getattr(sampler, "_batch_sampler", None)
        if held is None:
            return sampler
        sampler = held
    return sampler


def _is(sampler: Any, *kinds: type) -> bool:
    # A subclass may yield anything; torchdata's samplers of the same names only add a state to the same sequence.
    return type(sampler) in kinds or (
        is_torchdatas(sampler) and type(sampler).__name__ in {kind.__name__ for kind in kinds}
    )
