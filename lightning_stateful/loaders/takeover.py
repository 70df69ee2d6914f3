"""A StatefulLoader that does what a user's DataLoader does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.loaders.batches import Cut
from lightning_stateful.loaders.stateful_loader import OPTIONS, StatefulLoader
from lightning_stateful.loaders.torch_samplers import order_of, reason_against_batch_sampler
from lightning_stateful.samplers.batch_sampler import StatefulBatchSampler
from lightning_stateful.state import accepted_names


def take_over(
    loader: Any,
    *,
    seed: int = 0,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed_samples: bool = True,
    shuffle: bool | None = None,
    exact: bool = False,
    accept: Collection[str] = (),
    where: str = "the loader",
) -> StatefulLoader:
    """Build a StatefulLoader with a DataLoader's dataset, sampler, batch size and options.

    Args:
        loader: A ``DataLoader`` over a map-style dataset, or a StatefulLoader, of which the settings stay.
        seed: Seed for a loader that is not yet stateful.
        num_replicas: Data-parallel ranks.
        rank: This rank.
        seed_samples: As in :class:`StatefulLoader`.
        shuffle: False to serve the samples in order, whatever the sampler.
        exact: As in :class:`StatefulLoader`.
        accept: Names of differences to let pass on load.
        where: How an error calls the loader.

    Raises:
        UnsupportedLoaderError: With the reason, for a loader whose batches cannot be computed from a position.
    """
    if isinstance(loader, StatefulLoader):
        seed, seed_samples, accept = loader.seed, loader.seed_samples, (*loader.accept, *accepted_names(accept))
        if (loader.cut.num_replicas, loader.cut.rank) != (None, None):
            num_replicas, rank = loader.cut.num_replicas, loader.cut.rank
    elif reason := _reason_against(loader):
        raise UnsupportedLoaderError(f"Cannot take over {where}: {reason}")
    try:
        cutting = _batches_of(loader, shuffle) or _samples_of(loader, seed, shuffle, exact)
    except UnsupportedLoaderError as error:
        raise UnsupportedLoaderError(f"Cannot take over {where}: {error}") from None
    return StatefulLoader(
        loader.dataset,
        **cutting,
        seed=seed,
        num_replicas=num_replicas,
        rank=rank,
        seed_samples=seed_samples,
        accept=accept,
        **{name: getattr(loader, name) for name in OPTIONS if getattr(loader, name, None)},
    )


def _batches_of(loader: Any, shuffle: bool | None) -> dict[str, Any]:
    """The arguments that say how whole batches are chosen; empty where samples are."""
    batches = loader.order if isinstance(loader, StatefulLoader) else loader.batch_sampler
    if not isinstance(batches, (StatefulBatchSampler, BatchOrder)):
        return {}
    return {"batch_sampler": batches.unshuffled() if shuffle is False else batches}


def _samples_of(loader: Any, seed: int, shuffle: bool | None, exact: bool) -> dict[str, Any]:
    """The arguments that say how samples are chosen and cut into batches."""
    sampler: Any = loader.order if isinstance(loader, StatefulLoader) else loader.batch_sampler.sampler
    if shuffle is False:
        sampler = SequentialSampler(loader.dataset)
    exact = exact or (isinstance(loader, StatefulLoader) and isinstance(loader.cut, Cut) and loader.cut.exact)
    return {
        "sampler": order_of(loader.dataset, sampler=sampler, seed=seed),
        "batch_size": loader.batch_sampler.batch_size,
        "drop_last": loader.batch_sampler.drop_last,
        "exact": exact,
    }


def _reason_against(loader: Any) -> str:
    name = type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        return f"it is a {name} and not a torch.utils.data.DataLoader, so its batches cannot be reached by position."
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__qualname__} is an IterableDataset, which has no random access."
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if own_iteration and not type(loader).__module__.startswith("torchdata."):
        return f"{name} has its own __iter__; return a plain DataLoader, or do its work in the dataset or collate_fn."
    if loader.batch_sampler is None:
        return "batch_size=None leaves batching to the dataset; pass a batch_size."
    if reason := reason_against_batch_sampler(loader.batch_sampler):
        return reason
    if not getattr(loader, "in_order", True):
        return "in_order=False hands batches over in no fixed order."
    return ""
