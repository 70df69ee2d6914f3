"""A StatefulLoader that does what a user's DataLoader does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_stateful.errors import UnsupportedLoaderError
from lightning_stateful.loaders.stateful_loader import OPTIONS, StatefulLoader
from lightning_stateful.loaders.torch_samplers import order_of, reason_against_batch_sampler
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
        order: Any = loader.order
        exact = exact or loader.cut.exact
        if (loader.cut.num_replicas, loader.cut.rank) != (None, None):
            num_replicas, rank = loader.cut.num_replicas, loader.cut.rank
    else:
        reason = _reason_against(loader)
        if reason:
            raise UnsupportedLoaderError(f"Cannot take over {where}: {reason}")
        try:
            order = order_of(loader.dataset, sampler=loader.batch_sampler.sampler, seed=seed)
        except UnsupportedLoaderError as error:
            raise UnsupportedLoaderError(f"Cannot take over {where}: {error}") from None
    if shuffle is False:
        order = order_of(loader.dataset, sampler=SequentialSampler(loader.dataset))
    return StatefulLoader(
        loader.dataset,
        batch_size=loader.batch_sampler.batch_size,
        sampler=order,
        drop_last=loader.batch_sampler.drop_last,
        seed=seed,
        num_replicas=num_replicas,
        rank=rank,
        seed_samples=seed_samples,
        exact=exact,
        accept=accept,
        **{name: getattr(loader, name) for name in OPTIONS if getattr(loader, name, None)},
    )


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
