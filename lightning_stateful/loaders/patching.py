"""Patches a user's DataLoader: builds a stateful loader with its class, dataset, sampler and options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.loaders.batch_reader import OPTIONS
from lightning_stateful.loaders.description import LoaderDescription, only_cuts, read_arguments, without_lightnings
from lightning_stateful.loaders.iterable_loader import IterableLoader, of_batches
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loaders.stream_loader import StreamLoader
from lightning_stateful.loaders.stream_options import StreamOptions
from lightning_stateful.loaders.user_class import class_of_patched, is_lightnings
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.ddp_wrapper import DDPSamplerWrapper
from lightning_stateful.samplers.distributed import StatefulDistributedSampler
from lightning_stateful.samplers.rng import seed_or_default
from lightning_stateful.samplers.wrapped_sampler import WrappedSampler
from lightning_stateful.state import accepted_names
from lightning_stateful.streams.stream import as_stream

# A patched DataLoader, over a map-style dataset or a stream.
AnyLoader = StatefulLoader | StreamLoader

# Torch's samplers that draw at random and know nothing of ranks.
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def take_over(
    loader: Any,
    *,
    seed: int | None = None,
    path: str = "",
    num_replicas: int | None = None,
    rank: int | None = None,
    own_rank: int | None = None,
    seed_samples: bool = True,
    shuffle: bool | None = None,
    exact: bool = False,
    accept: Collection[str] = (),
    where: str = "the loader",
) -> StatefulLoader | StreamLoader:
    """Build a StatefulLoader with a DataLoader's dataset, sampler, batch size and options; a StreamLoader of a stream.

    Args:
        loader: A ``DataLoader``, whose class and attributes are kept; a StatefulLoader, whose settings are kept; or,
            for training, any iterable of batches.
        seed: Seed for a loader that is not yet stateful.
        path: As in :class:`StatefulLoader`.
        num_replicas: Data-parallel ranks.
        rank: This rank.
        own_rank: This rank, if each rank has a loader of its own which is not dealt out: its sampler is run as it is,
            and shuffles and draws in another way than on other ranks.
        seed_samples: As in :class:`StatefulLoader`.
        shuffle: False to serve the samples in order, whatever the sampler.
        exact: As in :class:`StatefulLoader`.
        accept: Names of differences to let pass.
        where: A name for the loader in errors.

    Raises:
        UnsupportedLoaderError: The loader's batches cannot be computed from a position; with the reason.
        ConfigurationError: Each rank has a stream of its own, which cannot be resumed in its shards.
    """
    if getattr(type(loader), "is_view", False) is True:
        # A view, which a trainer was given in place of one of its loaders.
        loader = loader.loader
    if not exact and not isinstance(loader, DataLoader) and is_iterable(loader):
        # What it gives are batches of its own making, on each rank, and no rank's are dealt out.
        return IterableLoader(of_batches(loader), path=path, num_replicas=num_replicas, rank=rank, accept=accept)
    if isinstance(loader, IterableLoader):
        return loader.again(path=path, num_replicas=num_replicas, rank=rank)
    if own_rank is not None and not exact and _is_stream(loader, exact):
        _refuse_shards(loader, where)
    elif own_rank is not None:
        num_replicas, rank = 1, 0
    if isinstance(loader, StreamLoader):
        # Whatever limits a trainer sets are its own.
        return loader.again(path=path, num_replicas=num_replicas, rank=rank, exact=exact)
    if _is_stream(loader, exact) and getattr(loader, "in_order", True):
        stream: Any = class_of_patched(StreamLoader, type(loader))
        taken: StreamLoader = stream(
            loader,
            options=StreamOptions(exact=exact),
            seed=seed,
            path=path,
            seed_samples=seed_samples,
            num_replicas=num_replicas,
            rank=rank,
            accept=accept,
        )
        return taken
    if isinstance(loader, StatefulLoader):
        seed, seed_samples, accept = loader.seed, loader.seed_samples, (*loader.accept, *accepted_names(accept))
        if (loader.tracker.num_replicas, loader.tracker.rank) != (None, None):
            num_replicas, rank = loader.tracker.num_replicas, loader.tracker.rank
    elif reason := _reason_against(loader):
        raise UnsupportedLoaderError(f"Cannot take over {where}: {reason}")
    original = loader._original if isinstance(loader, StatefulLoader) else loader
    try:
        description = _describe(loader, seed, exact=exact, shuffle=shuffle, accept=accept, as_one_rank=own_rank is None)
    except UnsupportedLoaderError as error:
        raise UnsupportedLoaderError(f"Cannot take over {where}: {error}") from None
    kind: Any = type(loader if original is None else original)
    kind = class_of_patched(StatefulLoader, kind)
    made: StatefulLoader = kind.__new__(kind)
    # Not the constructor of a user's class, which may ask for anything.
    StatefulLoader.__init__(
        made,
        loader.dataset,
        description=description,
        seed=seed,
        path=path if own_rank is None else _own_path(path, own_rank, description),
        num_replicas=num_replicas,
        rank=rank,
        seed_samples=seed_samples,
        generator=loader.generator,
        accept=accept,
        **{name: getattr(loader, name) for name in OPTIONS if getattr(loader, name, None)},
    )
    if own_rank is not None:
        # Ranks draw apart at their samples.
        made.own_rank, made._own_seed = own_rank, loader_seed(made.seed, f"{path}@{own_rank}")
    if original is not None:
        made.adopt(original)
    elif isinstance(loader, StatefulLoader):
        # What a subclass of StatefulLoader has beside.
        vars(made).update({name: value for name, value in vars(loader).items() if name not in vars(made)})
    return made


def patch_dataloader(
    loader: DataLoader[Any],
    *,
    seed: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed_samples: bool = True,
    accept: Collection[str] = (),
) -> StatefulLoader | StreamLoader:
    """Make a DataLoader deal its batches out to the ranks and resume exactly, whatever its sampler.

    The result is an instance of the loader's class and has its dataset, options and attributes; the loader itself is
    left as it is. Patching twice is patching once. Within Lightning, ``StatefulDataCallback`` does this.

    Args:
        loader: A DataLoader over a map-style dataset, with any sampler or batch sampler, which may be wrapped in a
            :class:`~lightning_stateful.samplers.ddp_wrapper.DDPSamplerWrapper` to say how it is dealt out; or over an
            iterable dataset, which is read again on a resume.
        seed: Chooses the orders, and the randomness of samplers and samples; by default that of Lightning's
            ``seed_everything``, or 0.
        num_replicas: Data-parallel ranks; by default taken from the process group at the first batch, or 1.
        rank: This rank; by default taken from the process group, or 0.
        seed_samples: Make what torch, NumPy and ``random`` draw inside the dataset a function of (seed, epoch,
            batch).
        accept: Names of differences to let pass when a state is loaded; ``"nondeterministic"`` lets pass a sampler
            that yields something else every time.

    Returns:
        A loader with ``state_dict``, ``load_state_dict`` and ``set_epoch``.

    Raises:
        UnsupportedLoaderError: The loader's batches cannot be computed from a position; with the reason.
    """
    if isinstance(loader, (StatefulLoader, StreamLoader)):
        return loader
    if not isinstance(loader, DataLoader):
        # Any other iterable may give anything; that it gives batches is known only within a Trainer.
        raise UnsupportedLoaderError(f"Cannot take over the loader: {_reason_against(loader)}")
    return take_over(
        loader,
        seed=seed,
        num_replicas=num_replicas,
        rank=rank,
        seed_samples=seed_samples,
        accept=accept,
    )


def deals_itself(loader: Any) -> bool:
    """Whether a loader's own arguments, or a sampler of this package in it, say that it is dealt out to ranks."""
    if isinstance(loader, StatefulLoader):
        return loader.tracker.num_replicas is not None
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = without_lightnings(loader.batch_sampler)
    if isinstance(batches, StatefulBatchSampler):
        return batches.tracker.num_replicas is not None
    sampler = batches.sampler if only_cuts(batches) else loader.sampler if batches is None else batches
    return isinstance(sampler, (DDPSamplerWrapper, StatefulDistributedSampler))


def _own_path(path: str, rank: int, description: LoaderDescription) -> str:
    """The path that chooses the order of a loader which is not dealt out to ranks.

    Computed orders and torch's random samplers draw from (seed, path, rank). Any other sampler is run under the same
    randomness on all ranks: it may take this rank's share of one common sequence.
    """
    order = description.order
    alike = type(order.sampler) not in _RANDOM if isinstance(order, WrappedSampler) else description.has_whole_batches
    return path if alike else f"{path}@{rank}"


def _refuse_shards(loader: Any, where: str) -> None:
    """Refuse a stream that each rank reads for itself, if its state counts the shards of all ranks together."""
    if as_stream(loader.dataset) is not None:
        raise ConfigurationError(
            f"use_distributed_sampler=False leaves {where} as each rank has it, and a state says of a "
            f"{type(loader.dataset).__name__} where all ranks stand in the shards of one stream, so a resume could not "
            "be exact. Give all ranks the whole stream and leave use_distributed_sampler=True: its shards are dealt "
            "out. An iterable dataset that divides itself among the ranks is resumed with either."
        )


def _describe(
    loader: Any,
    seed: int | None,
    *,
    exact: bool,
    shuffle: bool | None,
    accept: Collection[str],
    as_one_rank: bool,
) -> LoaderDescription:
    """Describe a loader, adapted to its use."""
    if isinstance(loader, StatefulLoader):
        return loader.description.adapted(
            loader.dataset, exact=exact, shuffle=shuffle is not False, as_one_rank=as_one_rank
        )
    batches, batch_size, drop_last = without_lightnings(loader.batch_sampler), None, False
    sampler = None
    if batches is None or only_cuts(batches):
        sampler = without_lightnings(loader.sampler if batches is None else batches.sampler)
        if batches is not None:
            batch_size, drop_last, batches = batches.batch_size, batches.drop_last, None
            # It will not be asked.
            sampler = None if shuffle is False else sampler
    found = read_arguments(
        loader.dataset,
        batch_size=1 if batches is not None else batch_size,
        shuffle=False,
        sampler=sampler,
        batch_sampler=batches,
        drop_last=drop_last,
        seed=seed_or_default(seed),
        # Whole batches of this package's cannot promise it; that is said elsewhere.
        exact=exact and not isinstance(batches, StatefulBatchSampler),
        generator=loader.generator,
        accept=accepted_names(accept),
        as_one_rank=as_one_rank,
    )
    return found if shuffle is not False else found.adapted(loader.dataset, shuffle=False, as_one_rank=as_one_rank)


def is_iterable(loader: Any) -> bool:
    """Whether ``iter()`` accepts it; it is not called, because some iterables count that."""
    return hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")


def _is_stream(loader: Any, exact: bool) -> bool:
    """Whether a loader reads a stream; for evaluation, one whose shards can be dealt out."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return False
    return not exact or as_stream(loader.dataset) is not None


def _reason_against(loader: Any) -> str:
    """The reason why a loader cannot be taken over; empty if it can."""
    name = type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        return f"it is a {name} and not a torch.utils.data.DataLoader, so its batches cannot be reached by position."
    if not getattr(loader, "in_order", True):
        return "in_order=False hands batches over in no fixed order."
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__qualname__} is an IterableDataset, which has no random access."
    return ""


def is_patched(loaders: Any) -> bool:
    """Whether all loaders in a structure are loaders of this package.

    Args:
        loaders: A loader, or lists, tuples, dicts and ``CombinedLoader`` of them, nested in any way; also what Fabric's
            ``setup_dataloaders`` and the callback make of a StatefulLoader.

    Returns:
        True if there is at least one loader and all are. A DataLoader that only has a sampler of this package is none:
        what its workers fetch ahead would count as trained on.
    """
    leaves = list(_leaves(loaders))
    return bool(leaves) and all(isinstance(leaf, (StatefulLoader, StreamLoader)) for leaf in leaves)


def _leaves(loaders: Any) -> Iterator[Any]:
    """The loaders in a structure, without the wrappers of Fabric and of the callback."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    elif _is_lightnings(loaders, "CombinedLoader"):
        loaders = loaders.iterables
    if isinstance(loaders, (Mapping, list, tuple)) or _is_lightnings(loaders, "CombinedLoader"):
        for part in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _leaves(part)
    elif _is_lightnings(loaders, "_FabricDataLoader"):
        yield from _leaves(loaders._dataloader)
    else:
        yield getattr(loaders, "loader", None) if getattr(type(loaders), "is_view", False) is True else loaders


def _is_lightnings(value: Any, name: str) -> bool:
    return is_lightnings(value) and type(value).__name__ == name
