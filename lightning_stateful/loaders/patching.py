"""Patches a user's DataLoader: builds a stateful loader with its class, dataset, sampler and options."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
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

from lightning_stateful.core.order import UNKNOWN, BatchOrder
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import ConfigurationError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.loaders.description import (
    LoaderDescription,
    LoaderSettings,
    describe_loader,
    is_lightnings,
    only_cuts,
    without_lightnings,
)
from lightning_stateful.loaders.loaders_beside import held_loader, warn_of_held_loaders
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.sampler_copies.sampler_copy import digest_of_generators, generators_in
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.distributed import StatefulDistributedSampler
from lightning_stateful.samplers.rank_exchange import kinds_drawn_apart
from lightning_stateful.samplers.tracked_loader import TrackedLoader
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.state import accepted_names, warning_of_unknown
from lightning_stateful.stream_loader.loader import IterableLoader, StreamLoader, is_dealt_out, of_batches
from lightning_stateful.stream_loader.options import StreamOptions
from lightning_stateful.streams.stream import as_stream
from lightning_stateful.user_loaders import class_of_patched, is_torchdatas, iterates_as_torch, without_repeats
from lightning_stateful.user_samplers.ddp_wrapper import DDPSamplerWrapper
from lightning_stateful.user_samplers.sampler_dealing import draws_of, generators_of
from lightning_stateful.user_samplers.user_sampler import Tail
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# A patched DataLoader, over a map-style dataset or a stream.
AnyLoader = StatefulLoader | StreamLoader

_log = logging.getLogger(__name__)
# Torch's samplers that draw at random and know nothing of ranks.
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def build_patched(
    loader: Any,
    *,
    seed: int | None = None,
    path: str = "",
    drawn_as: str | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    own_rank: int | None = None,
    seed_samples: bool = True,
    shuffle: bool = True,
    exact: bool = False,
    tail: Tail | None = None,
    accept: Collection[str] = (),
    keeps_last: bool = False,
    where: str = "the loader",
) -> StatefulLoader | StreamLoader:
    """Build a StatefulLoader with a DataLoader's dataset, sampler, batch size and options; a StreamLoader of a stream.

    Args:
        loader: A ``DataLoader``, whose class and attributes are kept; a StatefulLoader, whose settings are kept (one
            that was made for this use goes in as it is); or, for training, any iterable of batches.
        seed: Seed for a loader that is not yet stateful.
        path: As in :class:`StatefulLoader`.
        drawn_as: The path of a loader whose random order it shares; None for its own.
        num_replicas: Data-parallel ranks.
        rank: This rank.
        own_rank: This rank, if each rank has a loader of its own which is not dealt out: its sampler is run as it is,
            and shuffles and draws in another way than on other ranks.
        seed_samples: As in :class:`StatefulLoader`.
        shuffle: False to serve the samples in order, whatever the sampler.
        exact: As in :class:`StatefulLoader`.
        tail: As in :func:`patch_dataloader`.
        accept: Names of differences to let pass.
        keeps_last: Serve an incomplete last batch whatever ``drop_last`` says.
        where: A name for the loader in errors.

    Raises:
        UnsupportedLoaderError: The loader's batches cannot be computed from a position; with the reason.
        ConfigurationError: Each rank has a stream of its own, which cannot be resumed in its shards.
    """
    try:
        loader, holder = _unwrapped(loader, exact)
        if holder is not None and num_replicas != 1 and not deals_itself(loader):
            # Lightning deals nothing out of what is no DataLoader.
            own_rank = rank
        # Torch's workers draw alike at samples too, where the generators of their loaders are of one state.
        is_apart = drawn_as not in (None, path)
        draws_apart = is_apart and not (loader.num_workers and loader.generator is not None)
        samples_path = path if draws_apart or drawn_as is None else drawn_as
        if drawn_as is not None and not (draws_apart and isinstance(loader.dataset, IterableDataset)):
            path = drawn_as
        how: dict[str, Any] = {"path": path, "num_replicas": num_replicas, "rank": rank}
        options = StreamOptions(exact=exact, seed=seed, seed_samples=seed_samples, accept=accept, **how)
        if (stream := _without_index(loader, options, own_rank, where)) is not None:
            return stream
        if own_rank is not None:
            how |= {"num_replicas": 1, "rank": 0}
        accept = accepted_names(accept)
        use: dict[str, bool] = {"exact": exact, "shuffle": shuffle, "is_dealt_out": own_rank is None}
        if isinstance(loader, StatefulLoader):
            seed, seed_samples = loader.seed, loader.seed_samples
            description = loader.description.adapted(loader.dataset, **use)
            if (description.num_replicas, description.rank) != (None, None):
                how |= {"num_replicas": description.num_replicas, "rank": description.rank}
            fits = own_rank is None and description == loader.description and path == loader.path
            if loader.is_for_trainer and fits and holder is None and set(accept) <= set(loader.accept):
                loader.is_for_trainer = False
                loader.tracker.num_replicas, loader.tracker.rank = how["num_replicas"], how["rank"]
                return loader
            accept = (*loader.accept, *accept)
        else:
            seed = seed_or_default(seed)
            description = describe_loader(loader, seed=seed, accept=accept, tail=tail, keeps_last=keeps_last, **use)
        if own_rank is not None:
            is_alike = _is_drawn_alike(loader, description, is_compared=not exact)
            how["path"] = f"{path}@{own_rank}" if is_alike is False else path
            description = description if exact else _with_own_draws(description, own_rank)
        kind: type[StatefulLoader] = class_of_patched(StatefulLoader, type(loader))
        # Not the constructor of a user's class, which may ask for anything.
        made = kind.__new__(kind)
        how |= {"seed": seed, "seed_samples": seed_samples, "accept": accept, "exact": exact}
        # Where it deals samples out, Lightning builds a loader anew, and reads that.
        is_read = holder is not None or own_rank is not None or num_replicas in (None, 1)
        made.set_up(loader, description, LoaderSettings(**how), holder, is_read=is_read)
    except UnsupportedLoaderError as error:
        raise UnsupportedLoaderError(f"Cannot patch {where}: {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    if own_rank is not None:
        # Ranks draw apart at their samples.
        samples_path, made.own_rank = f"{samples_path}@{own_rank}", own_rank
        made.tracker.config.update({"drawn_alike": True} if is_alike else {})
    made.tracker.config.update({"draws_apart": True} if draws_apart else {})
    if samples_path != path:
        made._own_seed = loader_seed(seed, samples_path)
    return made


def _unwrapped(loader: Any, exact: bool) -> tuple[Any, tuple[Any, str] | None]:
    """The loader behind a proxy or in an object that holds it; that object, with the name of the attribute, or None."""
    # A trainer was given a proxy in place of one of its loaders.
    loader = without_repeats(loader.stateful_loader if is_proxy(loader) else loader)
    if exact or not (held := held_loader(loader)) or isinstance(getattr(loader, held).dataset, IterableDataset):
        return loader, None
    return without_repeats(getattr(loader, held)), (loader, held)


def _without_index(loader: Any, options: StreamOptions, own_rank: int | None, where: str) -> StreamLoader | None:
    """The loader over a stream, or over an iterable of batches; None where the data have an index."""
    how: dict[str, Any] = {"path": options.path, "num_replicas": options.num_replicas, "rank": options.rank}
    if not options.exact and not isinstance(loader, DataLoader) and is_iterable(loader):
        # What it gives are batches of its own making, on each rank, and no rank's are dealt out.
        warn_of_held_loaders(loader, where)
        return IterableLoader(of_batches(loader), replace(options, seed=None, seed_samples=True))
    if isinstance(loader, IterableLoader):
        return loader.fresh_copy(**how)
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if is_stream and options.exact:
        # In evaluation, only one whose shards can be dealt out is read as a stream.
        is_stream = is_dealt_out(loader.dataset, detect_topology(options.num_replicas, options.rank))
    if own_rank is not None and is_stream and not options.exact:
        _refuse_shards(loader)
    elif own_rank is not None:
        how |= {"num_replicas": 1, "rank": 0}
    if isinstance(loader, StreamLoader):
        # Whatever limits a trainer sets are its own.
        of_use = {"exact": True, "steps_per_epoch": None} if options.exact else {}
        return loader.fresh_copy(**how, **of_use)
    if reason := "" if isinstance(loader, StatefulLoader) else _reason_against(loader, is_stream):
        raise UnsupportedLoaderError(reason)
    stream: type[StreamLoader] = class_of_patched(StreamLoader, type(loader))
    return stream(loader, replace(options, **how)) if is_stream else None


def patch_dataloader(
    loader: DataLoader[Any],
    *,
    seed: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed_samples: bool = True,
    tail: Tail | None = None,
    accept: Collection[str] = (),
    skip: Any = None,
) -> StatefulLoader | StreamLoader:
    """Make a DataLoader deal its batches out to the ranks and resume exactly, whatever its sampler.

    The result is an instance of the loader's class and has its dataset, options and attributes; the loader itself is
    left as it is. Patching twice is patching once. Within Lightning, ``StatefulDataCallback`` does this.

    Args:
        loader: A DataLoader over a map-style dataset, with any sampler or batch sampler, which may be wrapped in a
            :class:`~lightning_stateful.user_samplers.ddp_wrapper.DDPSamplerWrapper` to say how it is dealt out; or over
            an iterable dataset, which is read again on a resume.
        seed: Chooses the orders, and the randomness of samplers and samples; by default that of Lightning's
            ``seed_everything``, or 0.
        num_replicas: Data-parallel ranks; by default taken from the process group at the first batch, or 1.
        rank: This rank; by default taken from the process group, or 0.
        seed_samples: Make what torch, NumPy and ``random`` draw inside the dataset a function of (seed, epoch,
            batch).
        tail: What becomes of the last items of a sampler of yours that are fewer than a step of all ranks takes, as in
            :class:`~lightning_stateful.user_samplers.ddp_wrapper.DDPSamplerWrapper`; None for ``drop_last``, else
            ``"split"``.
        accept: Names of differences to let pass when a state is loaded; ``"nondeterministic"`` lets pass a sampler
            that yields something else every time.
        skip: Batches and samples to leave out, as in :class:`StatefulLoader`.

    Returns:
        A loader with ``state_dict``, ``load_state_dict`` and ``set_epoch``.

    Raises:
        UnsupportedLoaderError: The loader's batches cannot be computed from a position; with the reason.
        ConfigurationError: It is patched already, with another seed or for other ranks; or ``skip`` cannot be honoured.
    """
    if isinstance(loader, (StatefulLoader, StreamLoader)):
        _refuse_other_options(loader, seed=seed, num_replicas=num_replicas, rank=rank)
        loader.leave_out(skip)
        return loader
    if not isinstance(loader, DataLoader):
        # Any other iterable may give anything; that it gives batches is known only within a Trainer.
        raise UnsupportedLoaderError(f"Cannot patch the loader: {_reason_against(loader)}")
    patched = build_patched(
        loader,
        seed=seed,
        num_replicas=num_replicas,
        rank=rank,
        seed_samples=seed_samples,
        tail=tail,
        accept=accept,
    )
    patched.leave_out(skip)
    _say_if_drawn_alike(patched, seed, num_replicas)
    if unknown := warning_of_unknown(accept, [patched.tracker.config]):
        warnings.warn(unknown, StatefulWarning, stacklevel=2)
    return patched


def _say_if_drawn_alike(loader: AnyLoader, seed: int | None, num_replicas: int | None) -> None:
    """Say of a sampler that each rank iterates for itself, without being asked about others, that ranks draw alike."""
    num_ranks, order = detect_topology().num_replicas, loader.order
    if seed is None and num_replicas == 1 < num_ranks and isinstance(order, WrappedSampler) and generators_of(order):
        _log.warning(
            "Each of %d ranks iterates a %s of its own, as num_replicas=1 says, and all draw the same numbers, by seed "
            "%d. Where the generators that it holds are seeded by rank, pass a seed that differs between ranks.",
            num_ranks,
            order.name,
            loader.seed,
        )


def _refuse_other_options(loader: AnyLoader, **options: int | None) -> None:
    """Refuse options for a loader that was patched with others."""
    present = {"seed": loader.seed, "num_replicas": loader.tracker.num_replicas, "rank": loader.tracker.rank}
    other = {name: value for name, value in options.items() if value not in (None, present[name])}
    if other:
        asked = ", ".join(f"{name}={value}" for name, value in other.items())
        has = ", ".join(f"{name}={present[name]}" for name in other)
        raise ConfigurationError(
            f"The loader is patched already, with {has}, and keeps that; {asked} would be of no effect. Patch the "
            "DataLoader that it was made of."
        )


def deals_itself(loader: object) -> bool:
    """Whether a loader's own arguments, or a sampler of this package in it, say that it is dealt out to ranks."""
    if isinstance(loader, StatefulLoader):
        return loader.description.num_replicas is not None
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches: Any = without_lightnings(loader.batch_sampler)
    if isinstance(batches, StatefulBatchSampler):
        return batches.tracker.num_replicas is not None
    sampler = batches.sampler if only_cuts(batches) else loader.sampler if batches is None else batches
    return isinstance(sampler, (DDPSamplerWrapper, StatefulDistributedSampler))


def _is_drawn_alike(loader: Any, description: LoaderDescription, *, is_compared: bool) -> bool | None:
    """Whether an order that is not dealt out to ranks is the same on all of them; None where its sampler decides.

    Of a DataLoader torch draws shuffles, and what its random samplers give, from a generator that the loader or the
    sampler holds, or from that of the process: where it stands alike on all ranks, all draw the same. A computed order
    of a loader of this package is another one on each. Any other sampler is run under the same randomness on all ranks,
    but for what ranks draw for themselves in torch too: it may take this rank's share of one common sequence.
    """
    order = description.order
    is_of_users = isinstance(order, WrappedSampler) and type(order.sampler) not in _RANDOM
    if is_of_users or (description.has_whole_batches and not isinstance(order, WrappedSampler)):
        return None
    if is_compared and isinstance(loader, DataLoader) and not isinstance(loader, TrackedLoader):
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        held = [one for one in (getattr(sampler, "generator", None) for sampler in samplers) if one is not None]
        apart, is_alone = kinds_drawn_apart("the order of a loader", held), detect_topology().num_replicas == 1
        return not is_alone and ("held" if held else "torch") not in apart
    return False


def _with_own_draws(description: LoaderDescription, rank: int) -> LoaderDescription:
    """The same, with what each rank draws for itself: from generators that it holds, or from those of the process."""
    order = description.order
    if not isinstance(order, WrappedSampler) or type(order.sampler) in _RANDOM:
        return description
    return description._replace(order=order.replaced(draws=draws_of(order, rank)))


def _refuse_shards(loader: DataLoader[Any]) -> None:
    """Refuse a stream that each rank reads for itself, if its state counts the shards of all ranks together."""
    if as_stream(loader.dataset) is not None:
        raise ConfigurationError(
            "use_distributed_sampler=False leaves the loader as each rank has it, and a state says of a "
            f"{type(loader.dataset).__name__} where all ranks stand in the shards of one stream, so a resume could not "
            "be exact. Give all ranks the whole stream and leave use_distributed_sampler=True: its shards are dealt "
            "out. An iterable dataset that divides itself among the ranks is resumed with either."
        )


def is_iterable(loader: object) -> bool:
    """Whether ``iter()`` accepts it; it is not called, because some iterables count that."""
    return hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")


def is_proxy(loader: object) -> bool:
    """Whether it is what a trainer was given in place of a loader of this package, which it holds as ``loader``."""
    return getattr(type(loader), "is_proxy", False) is True


def _reason_against(loader: object, is_stream: bool = False) -> str:
    """The reason why a loader cannot be patched; empty if it can."""
    if not isinstance(loader, DataLoader):
        name = type(loader).__qualname__
        return f"it is a {name} and not a torch.utils.data.DataLoader, so its batches cannot be reached by position."
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "in_order=False hands batches over in no fixed order, as its workers finish them. Leave it out."
    if isinstance(loader.dataset, IterableDataset) and not is_stream:
        return f"{type(loader.dataset).__qualname__} is an IterableDataset, which has no random access."
    if is_stream and not (iterates_as_torch(loader) or is_torchdatas(loader)):
        return (
            f"{type(loader).__qualname__}.__iter__ may give other batches than it reads, and of a stream nobody could "
            "say which of them the model was trained on. Do what it does in collate_fn, or in the model."
        )
    return ""


def is_patched(loaders: object) -> bool:
    """Whether all loaders in a structure are loaders of this package.

    Args:
        loaders: A loader, or lists, tuples, dicts and ``CombinedLoader`` of them, nested in any way; also what Fabric's
            ``setup_dataloaders`` and the callback make of a StatefulLoader.

    Returns:
        True if there is at least one loader and all are. A DataLoader that only has a sampler of this package is none:
        what its workers fetch ahead would count as trained on.
    """
    leaves = list(_leaves(loaders))
    return bool(leaves) and all(isinstance(leaf, TrackedLoader) for leaf in leaves)


# Attributes under which wrappers of Lightning hold loaders.
_HELD = {"CombinedLoader": "iterables", "_FabricDataLoader": "_dataloader"}


def _leaves(loaders: Any) -> Iterator[object]:
    """The loaders in a structure, without the wrappers of Fabric and of the callback."""
    if is_proxy(loaders):
        yield loaders.stateful_loader
    elif is_lightnings(loaders) and (held := _HELD.get(type(loaders).__name__)):
        yield from _leaves(getattr(loaders, held))
    elif isinstance(loaders, (Mapping, list, tuple)):
        for part in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _leaves(part)
    else:
        yield loaders


def map_style(loaders: Mapping[str, AnyLoader]) -> dict[str, StatefulLoader]:
    """Those of some loaders, by path, that read samples by index."""
    return {path: loader for path, loader in loaders.items() if isinstance(loader, StatefulLoader)}


def dealt_otherwise(given: Mapping[str, Any], loaders: Mapping[str, AnyLoader]) -> dict[str, str]:
    """By path, the difference of an order from torch's on several ranks, in words; empty where there is none."""
    notes = dict.fromkeys(loaders, "")
    # By their length: the path of the first of the loaders that DistributedSampler would shuffle alike.
    alike: dict[int, tuple[str, str]] = {}
    for path, loader in loaders.items():
        # Of other loaders an order was given.
        if isinstance(given[path], TrackedLoader) or not loader.is_plain or loader.topology.num_replicas == 1:
            continue
        notes[path] = "Of each step a rank takes consecutive samples, where DistributedSampler gives it every so many."
        if not is_shuffled(given[path]):
            notes[path] += (
                " Samples come in the dataset's order, as shuffle=False says; Lightning alone shuffles them in "
                "training on several ranks."
            )
        else:
            first, drawn_as = alike.setdefault(length_of(loader), (path, loader.path))
            if drawn_as != loader.path:
                notes[path] += (
                    f" It would shuffle these samples as it does those of {first!r}, which are as many; here each has "
                    "its own order. If their batches are to pair up, give both DataLoaders a generator of one seed."
                )
    return notes


def drawn_as(loaders: Mapping[str, Any]) -> dict[str, str | None]:
    """By path, the path of the first of some loaders that draws the same order in torch; None for a loader's own.

    These are loaders whose generators are of one state, and not one generator, from which they draw in turn.
    """
    found: dict[str, str | None] = dict.fromkeys(loaders)
    first: dict[str, str] = {}
    seen: dict[int, Any] = {}
    for path, loader in loaders.items():
        if not isinstance(loader, DataLoader) or isinstance(loader, TrackedLoader):
            continue
        generators = generators_in(loader.generator, loader.sampler, loader.batch_sampler)
        if generators and not any(id(one) in seen for one in generators):
            found[path] = first.setdefault(digest_of_generators(*generators), path)
        seen |= {id(one): one for one in generators}
    return found


def length_of(loader: AnyLoader) -> int:
    """The length of an epoch over all ranks, in samples or, of whole batches, steps."""
    plan = loader.plan(0)
    return plan.num_steps if plan.num_steps == UNKNOWN else plan.progress_after(plan.num_steps).consumed


def is_shuffled(loader: Any) -> bool:
    """Whether a loader has another order in each epoch, as far as its sampler tells."""
    batches = loader.description.order if isinstance(loader, StatefulLoader) else loader.batch_sampler or loader.sampler
    if isinstance(batches, StatefulBatchSampler):
        batches = batches.order
    if isinstance(batches, BatchOrder):
        return batches != batches.adapted(shuffle=False)
    return not isinstance(getattr(batches, "sampler", batches), SequentialSampler)
