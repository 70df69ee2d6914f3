"""A StatefulLoader that does what a user's DataLoader does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.loaders.batches import SlotCut
from lightning_stateful.loaders.engine import OPTIONS
from lightning_stateful.loaders.iterable_loader import IterableLoader, of_batches
from lightning_stateful.loaders.kinds import class_of_patched
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loaders.stream_loader import StreamLoader
from lightning_stateful.loaders.stream_options import StreamOptions
from lightning_stateful.loaders.torch_samplers import cuts_samples, has_order, without_lightnings
from lightning_stateful.samplers.batch_sampler import StatefulBatchSampler
from lightning_stateful.samplers.ddp_wrapper import DDPSamplerWrapper
from lightning_stateful.samplers.distributed import StatefulDistributedSampler
from lightning_stateful.samplers.repeated import Repeated
from lightning_stateful.samplers.rng import seed_or_default
from lightning_stateful.samplers.sampler_plan import SamplerCut
from lightning_stateful.samplers.user_sampler import UserSampler
from lightning_stateful.state import accepted_names
from lightning_stateful.streams.stream import as_stream

# Samplers of torch's that draw, and know nothing of ranks.
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
    replace_samplers: bool = False,
    accept: Collection[str] = (),
    where: str = "the loader",
) -> StatefulLoader | StreamLoader:
    """Build a StatefulLoader with a DataLoader's dataset, sampler, batch size and options; a StreamLoader of a stream.

    Args:
        loader: A ``DataLoader`` over a map-style dataset, of which class and attributes are kept, a StatefulLoader, of
            which the settings stay, or for training any iterable of batches.
        seed: Seed for a loader that is not yet stateful.
        path: As in :class:`StatefulLoader`.
        num_replicas: Data-parallel ranks.
        rank: This rank.
        own_rank: This rank, where each has a loader of its own, which is not dealt out: its sampler is run as it is,
            and what it shuffles and draws is not what other ranks do.
        seed_samples: As in :class:`StatefulLoader`.
        shuffle: False to serve the samples in order, whatever the sampler.
        exact: As in :class:`StatefulLoader`.
        replace_samplers: As in :class:`StatefulLoader`.
        accept: Names of differences to let pass.
        where: How an error calls the loader.

    Raises:
        UnsupportedLoaderError: With the reason, for a loader whose batches cannot be told from a position.
        ConfigurationError: Each rank has a stream of its own, whose shards only a common one can be resumed in.
    """
    if getattr(type(loader), "is_view", False) is True:
        # What a trainer was given in place of one of its loaders.
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
        if (loader.cut.num_replicas, loader.cut.rank) != (None, None):
            num_replicas, rank = loader.cut.num_replicas, loader.cut.rank
    elif reason := _reason_against(loader):
        raise UnsupportedLoaderError(f"Cannot take over {where}: {reason}")
    original = loader._original if isinstance(loader, StatefulLoader) else loader
    try:
        cutting, loader_path = _cutting(loader, shuffle, exact), path
        if own_rank is not None:
            cutting, loader_path = _of_one_rank(loader, cutting, own_rank, path=path, seed=seed, accept=accept)
        kind: Any = type(loader if original is None else original)
        made: StatefulLoader = class_of_patched(StatefulLoader, kind)(
            loader.dataset,
            **cutting,
            seed=seed,
            path=loader_path,
            num_replicas=num_replicas,
            rank=rank,
            seed_samples=seed_samples,
            replace_samplers=replace_samplers,
            generator=loader.generator,
            accept=accept,
            **{name: getattr(loader, name) for name in OPTIONS if getattr(loader, name, None)},
        )
    except UnsupportedLoaderError as error:
        raise UnsupportedLoaderError(f"Cannot take over {where}: {error}") from None
    if own_rank is not None:
        # Ranks draw apart at their samples.
        made.own_rank, made._own_seed = own_rank, loader_seed(made.seed, f"{path}@{own_rank}")
    if original is not None:
        made.adopt(original)
    return made


def patch_dataloader(
    loader: DataLoader[Any],
    *,
    seed: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed_samples: bool = True,
    replace_samplers: bool = False,
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
        num_replicas: Data-parallel ranks; by default those of the process group at the first batch, or 1.
        rank: This rank; by default that of the process group, or 0.
        seed_samples: Make what torch, NumPy and ``random`` draw inside the dataset a function of (seed, epoch,
            batch).
        replace_samplers: Replace torch's own random samplers by orders of the same distribution, of which every place
            is reached at once. A plain shuffle always is such an order.
        accept: Names of differences to let pass when a state is loaded; ``"nondeterministic"`` lets pass a sampler
            that yields something else every time.

    Returns:
        A loader with ``state_dict``, ``load_state_dict`` and ``set_epoch``.

    Raises:
        UnsupportedLoaderError: With the reason, for a loader whose batches cannot be told from a position.
    """
    if isinstance(loader, (StatefulLoader, StreamLoader)):
        return loader
    if not isinstance(loader, DataLoader):
        # A trainer's callback knows that what it gives are batches.
        raise UnsupportedLoaderError(f"Cannot take over the loader: {_reason_against(loader)}")
    return take_over(
        loader,
        seed=seed,
        num_replicas=num_replicas,
        rank=rank,
        seed_samples=seed_samples,
        replace_samplers=replace_samplers,
        accept=accept,
    )


def deals_itself(loader: Any) -> bool:
    """Whether a loader asks to be dealt out to ranks, by a sampler of this package or by its arguments."""
    if isinstance(loader, StatefulLoader):
        return loader.cut.num_replicas is not None
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = without_lightnings(loader.batch_sampler)
    if isinstance(batches, StatefulBatchSampler):
        return batches.num_replicas is not None
    sampler = batches.sampler if cuts_samples(batches) else loader.sampler if batches is None else batches
    return isinstance(sampler, (DDPSamplerWrapper, StatefulDistributedSampler))


def _of_one_rank(
    loader: Any, cutting: dict[str, Any], rank: int, *, path: str, seed: int | None, accept: Collection[str]
) -> tuple[dict[str, Any], str]:
    """The arguments for a loader that is not dealt out, and the path that it draws at.

    What can be computed, and what torch's random samplers draw, follows from (seed, path, rank). Another sampler is run
    under the same randomness on all ranks, as those that leave each rank its share of one sequence need it.
    """
    name = "batch_sampler" if "batch_sampler" in cutting else "sampler"
    sampler = cutting[name]
    asked = sampler.order.sampler if isinstance(sampler, SamplerCut) else sampler
    if getattr(asked, "depends_on_training", False):
        raise UnsupportedLoaderError(
            f"{type(asked).__qualname__} depends on training, and learns on each rank what a checkpoint, which rank 0 "
            "writes, does not hold. Leave use_distributed_sampler=True."
        )
    if isinstance(sampler, (StatefulBatchSampler, BatchOrder)):
        return cutting, path
    own_path = f"{path}@{rank}" if type(asked) in _RANDOM else path
    if isinstance(sampler, SamplerCut):
        return {**cutting, name: replace(sampler, order=sampler.order.at(own_path, as_one_rank=False))}, own_path
    if name == "sampler" and has_order(sampler, replace=False, generator=loader.generator):
        return cutting, f"{path}@{rank}"
    source = UserSampler(
        sampler,
        seed=seed_or_default(seed),
        path=own_path,
        whole_batches=name == "batch_sampler" or cutting["batch_size"] is None,
        is_collated=name == "batch_sampler",
        accept=accept,
        as_one_rank=False,
    )
    return {**cutting, name: SamplerCut(order=source)}, own_path


def _refuse_shards(loader: Any, where: str) -> None:
    """Refuse streams of each rank's own whose state says where all ranks stand in common shards."""
    if as_stream(loader.dataset) is not None:
        raise ConfigurationError(
            f"use_distributed_sampler=False leaves {where} as each rank has it, and a state says of a "
            f"{type(loader.dataset).__name__} where all ranks stand in the shards of one stream, so a resume could not "
            "be exact. Give all ranks the whole stream and leave use_distributed_sampler=True: its shards are dealt "
            "out. An iterable dataset that divides itself among the ranks is resumed with either."
        )


def _cutting(loader: Any, shuffle: bool | None, exact: bool) -> dict[str, Any]:
    """The arguments that say how samples or batches are chosen."""
    if isinstance(loader, StatefulLoader):
        return _cutting_again(loader, shuffle, exact)
    batches = without_lightnings(loader.batch_sampler)
    if isinstance(batches, DDPSamplerWrapper) and shuffle is False:
        batches = batches.sampler
    if isinstance(batches, StatefulBatchSampler):
        return {"batch_sampler": batches.unshuffled() if shuffle is False else batches}
    if batches is not None and not cuts_samples(batches):
        return {"batch_sampler": Repeated(batches) if shuffle is False else batches, "exact": exact}
    sampler = without_lightnings(loader.sampler if batches is None else batches.sampler)
    if shuffle is False and batches is None and not has_order(sampler, replace=True):
        # What it yields need not be numbers of samples.
        sampler = Repeated(sampler)
    elif shuffle is False:
        sampler = SequentialSampler(loader.dataset)
    return {
        "sampler": sampler,
        "batch_size": None if batches is None else batches.batch_size,
        "drop_last": batches is not None and batches.drop_last,
        "exact": exact,
    }


def _cutting_again(loader: StatefulLoader, shuffle: bool | None, exact: bool) -> dict[str, Any]:
    cut: Any = loader.cut
    dataset: Any = loader.dataset
    order: Any = loader.order_alone
    if isinstance(cut, SlotCut):
        return {"batch_sampler": order.unshuffled() if shuffle is False else order}
    exact, is_batched = exact or cut.exact, loader.batch_sampler is not None
    if isinstance(cut, SamplerCut) and cut.order.whole_batches and is_batched:
        return {"batch_sampler": Repeated(cut.order.sampler) if shuffle is False else cut, "exact": exact}
    sampler: Any = cut if isinstance(cut, SamplerCut) else order
    if shuffle is False:
        whole = isinstance(cut, SamplerCut) and cut.order.whole_batches
        sampler = Repeated(cut.order.sampler) if whole else SequentialSampler(dataset)
    return {
        "sampler": sampler,
        "batch_size": cut.batch_size if is_batched else None,
        "drop_last": cut.drop_last,
        "exact": exact,
    }


def is_iterable(loader: Any) -> bool:
    """Whether ``iter()`` accepts it; it is not called, because some iterables count that."""
    return hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")


def _is_stream(loader: Any, exact: bool) -> bool:
    """Whether a loader reads a stream; for evaluation, one whose shards can be dealt out."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return False
    return not exact or as_stream(loader.dataset) is not None


def _reason_against(loader: Any) -> str:
    name = type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        return f"it is a {name} and not a torch.utils.data.DataLoader, so its batches cannot be reached by position."
    if not getattr(loader, "in_order", True):
        return "in_order=False hands batches over in no fixed order."
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__qualname__} is an IterableDataset, which has no random access."
    return ""
