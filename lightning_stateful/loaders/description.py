"""Reads the order that a DataLoader stands for from its sampler, batch sampler and batch size."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from lightning_stateful.contents.dataset_content import PATH
from lightning_stateful.core.order import BatchOrder
from lightning_stateful.core.samples import SampleBatchOrder, SampleOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.errors import ConfigurationError, RankMismatchError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.generators.attributes import LIGHTNINGS, package_of
from lightning_stateful.loaders.source_datasets import changed_content, describe_sources, described_with_content
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.distributed import StatefulDistributedSampler
from lightning_stateful.samplers.rank_exchange import exchanged
from lightning_stateful.state import holds, value_at
from lightning_stateful.user_loaders import is_torchdatas
from lightning_stateful.user_samplers.ddp_wrapper import DDPSamplerWrapper
from lightning_stateful.user_samplers.user_sampler import Tail
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings by which a loader serves its order: arguments of :class:`StatefulLoader` of the same names."""

    seed: int
    path: str = ""
    num_replicas: int | None = None
    rank: int | None = None
    seed_samples: bool = True
    accept: tuple[str, ...] = ()
    exact: bool = False


class LoaderDescription(NamedTuple):
    """The order of a loader, to build the loader again for any ranks and path.

    Attributes:
        order: The order, as for a loader that is served alone.
        has_whole_batches: Whether the order takes the place of a batch sampler; otherwise the loader cuts samples.
        num_replicas: Number of ranks that the user's sampler or loader was given; None for those of the process group.
        rank: The rank that it was given.
        accept: Names of differences that the sampler lets pass.
        batch_size: Samples in a batch that the loader cuts; None for whole batches, or where nothing is collated.
        drop_last: Whether the loader leaves out an incomplete last step.
    """

    order: BatchOrder
    has_whole_batches: bool = False
    num_replicas: int | None = None
    rank: int | None = None
    accept: tuple[str, ...] = ()
    batch_size: int | None = None
    drop_last: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all samples of the dataset are cut into batches, in its order or shuffled."""
        return not self.has_whole_batches and not isinstance(self.order, WrappedSampler)

    @property
    def is_planned(self) -> bool:
        """Whether batches are whole and planned for all ranks, as those of mixtures and buckets are."""
        return self.has_whole_batches and not isinstance(self.order, WrappedSampler)

    def adapted(
        self, dataset: Dataset[Any], *, exact: bool = False, shuffle: bool = True, is_dealt_out: bool = True
    ) -> LoaderDescription:
        """A copy for another use of the loader; see :meth:`BatchOrder.adapted`.

        Without ``shuffle`` the batches are the same in every epoch, and samples that are cut come in the dataset's
        order. A wrapped sampler that is not dealt out is iterated as each rank has it.
        """
        order = self.order
        if not shuffle and self.batch_size is not None:
            in_order = SampleBatchOrder(
                samples=SequentialOrder(len(dataset)),  # type: ignore[arg-type]  # one with a length, as checked before
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                exact=exact or getattr(order, "exact", False),
            )
            return self._replace(order=in_order)
        if isinstance(order, WrappedSampler) and not is_dealt_out:
            order = order.replaced(is_dealt_out=False)
        return self._replace(order=order.adapted(exact=exact, shuffle=shuffle))

    def config(self, order: BatchOrder, dataset: Any) -> dict[str, Any]:
        """The configuration that a state is compared with: the order's, and a description of the data.

        Some of an order's keys are read here: ``sources`` (lengths by name) stands for a ``ConcatDataset``, which is
        described source by source, and ``lengths["samples"]`` has to be the dataset's length.

        Raises:
            ConfigurationError: The dataset has another number of samples than the order.
        """
        config = order.config()
        if "seed" in config:
            # As the user gave it, and not as it is derived for a loader's path.
            config["seed"] = self.order.config()["seed"]
        if isinstance(config.get("sources"), dict):
            return describe_sources(dataset, config)
        lengths = config.get("lengths")
        if isinstance(lengths, dict) and lengths.get("samples", len(dataset)) != len(dataset):
            raise ConfigurationError(
                f"There are {lengths['samples']} lengths, and the dataset has {len(dataset)} samples. Pass "
                "the lengths of this dataset, one a sample."
            )
        return {**config, "dataset": described_with_content(dataset)}


def describe_loader(
    loader: DataLoader[Any],
    *,
    seed: int,
    exact: bool = False,
    shuffle: bool = True,
    is_dealt_out: bool = True,
    accept: tuple[str, ...] = (),
    drop_last: bool = False,
    tail: Tail | None = None,
    keeps_last: bool = False,
) -> LoaderDescription:
    """Read the order of a loader over a map-style dataset.

    A sampler whose samples are cut is not asked without ``shuffle``. An incomplete last batch is served whatever its
    ``drop_last`` says if it ``keeps_last``, as Lightning does in prediction; the argument ``drop_last`` is of samples
    that are not collated, for which torch has no option. ``tail`` says what becomes of the last items of a sampler that
    is no computed order; None for ``drop_last``.
    """
    dataset: Any = loader.dataset
    batches: Any = without_lightnings(loader.batch_sampler)
    how: dict[str, Any] = {"seed": seed, "accept": accept, "exact": exact, "is_dealt_out": is_dealt_out}
    how |= {} if tail is None or exact else {"tail": tail}
    if isinstance(batches, StatefulBatchSampler):
        tracker = batches.tracker
        found = LoaderDescription(tracker.order, True, tracker.num_replicas, tracker.rank, tracker.accept)
    elif isinstance(batches, BatchOrder):
        found = LoaderDescription(batches, has_whole_batches=True)
    elif batches is not None and not only_cuts(batches):
        if keeps_last and getattr(batches, "drop_last", False):
            raise UnsupportedLoaderError("its batch sampler has drop_last=True, which Lightning changes in prediction.")
        found = _wrapped(dataset, batches, **how, is_collated=True)._replace(has_whole_batches=True)
    else:
        sampler, batch_size = loader.sampler, None
        if batches is not None:
            batch_size, drop_last = batches.batch_size, batches.drop_last and not keeps_last
            sampler = batches.sampler if shuffle else SequentialSampler(dataset)
        sampler = without_lightnings(sampler)
        # What is not collated cannot be served two at a time.
        how["exact"] = exact = exact and batch_size is not None
        samples = _plain_samples(dataset, sampler, seed, loader.generator)
        if samples is None:
            how |= {"tail": "drop"} if drop_last and "tail" not in how else {}
            found = _wrapped(dataset, sampler, **how, batch_size=batch_size)
        else:
            order = SampleBatchOrder(samples=samples, batch_size=batch_size, drop_last=drop_last, exact=exact)
            accepted = sampler.tracker.accept if isinstance(sampler, StatefulDistributedSampler) else ()
            found = LoaderDescription(order, accept=accepted)
        found = found._replace(batch_size=batch_size, drop_last=drop_last)
    return found if shuffle else found.adapted(dataset, shuffle=False, is_dealt_out=is_dealt_out)


def users_own(sampler: Any) -> Any:
    """The user's own object behind a sampler or batch sampler; None behind one of this package's, and of none."""
    sampler = without_lightnings(sampler)
    if isinstance(sampler, DDPSamplerWrapper):
        return sampler.sampler
    return None if package_of(type(sampler)) == "lightning_stateful" else sampler


def only_cuts(batch_sampler: object) -> bool:
    """Whether a batch sampler only cuts the samples of its sampler into batches, as torch's own does."""
    return _is(batch_sampler, BatchSampler)


def without_lightnings(sampler: Any) -> Any:
    """The sampler or batch sampler that Lightning has wrapped in one of its own, or the sampler itself."""
    while is_lightnings(sampler):
        held = getattr(getattr(sampler, "dataset", None), "_sampler", None) or getattr(sampler, "_batch_sampler", None)
        if held is None:
            return sampler
        sampler = held
    return sampler


def _plain_samples(dataset: Any, sampler: Any, seed: int, generator: torch.Generator | None) -> SampleOrder | None:
    """The computed order that stands for a sampler of all samples, in order or shuffled; None for any other sampler."""
    if isinstance(sampler, SampleOrder):
        return sampler
    if type(sampler) is StatefulDistributedSampler:
        # Its own seed, unless that is the default.
        return ShuffledOrder(len(dataset), sampler.seed or seed) if sampler.shuffle else SequentialOrder(len(dataset))
    if _is(sampler, SequentialSampler):
        return SequentialOrder(len(sampler))
    if not _is(sampler, RandomSampler) or sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return None
    # What shuffle=True makes names a distribution; one with a generator of its own names a sequence.
    names_sequence = not (is_torchdatas(sampler) or sampler.generator is None or sampler.generator is generator)
    return None if names_sequence else ShuffledOrder(len(sampler), seed)


def _wrapped(
    dataset: Any, sampler: Any, *, seed: int, accept: tuple[str, ...], batch_size: int | None = None, **how: Any
) -> LoaderDescription:
    """Describe a user's sampler, which may be in a wrapper that says how it is dealt out."""
    how |= {"dataset": dataset, "batch_size": batch_size, "is_cut_by_torch": batch_size is not None}
    num_replicas = rank = None
    if isinstance(sampler, DDPSamplerWrapper):
        wrapper, sampler = sampler, sampler.sampler
        seed = seed if wrapper.seed_given is None else wrapper.seed_given
        dealt = {"tail": wrapper.tail, "shuffles": wrapper.shuffle_samples_between_gpus, "is_wrapped": True}
        how = {**dealt, "length": wrapper.length, **how}
        num_replicas, rank = wrapper.tracker.num_replicas, wrapper.tracker.rank
        accept = (*accept, *wrapper.accept)
    order = WrappedSampler(sampler, seed=seed, accept=accept, **how)
    return LoaderDescription(order, num_replicas=num_replicas, rank=rank, accept=tuple(order.accept))


def _is(sampler: object, kind: type) -> bool:
    # A subclass may yield anything; torchdata's samplers of the same names only add a state to the same sequence.
    return type(sampler) is kind or (is_torchdatas(sampler) and type(sampler).__name__ == kind.__name__)


def is_lightnings(value: object) -> bool:
    """Whether the class of ``value`` is one of Lightning's, which this layer does not import."""
    return package_of(type(value)) in LIGHTNINGS


def changed_since(order: BatchOrder, dataset: Any, lists: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to a dataset and a user's sampler since a configuration was taken."""
    of_sampler = order.changed_settings(config) if isinstance(order, WrappedSampler) else {}
    changed = {**changed_content(dataset, config, lists), **of_sampler}
    # As it was built: the configuration follows it.
    built = lists.get("length") if isinstance(order, SampleBatchOrder) else None
    return changed if built is None or len(dataset) == built else {**changed, _LENGTH: len(dataset)}


_LENGTH = "dataset.length"
_OF_DATASET = (PATH, _LENGTH)


def order_of_length(order: BatchOrder, known: int | None, dataset: Any) -> SampleBatchOrder | None:
    """The same order of all samples, in order or shuffled, where the dataset has another length by now; else None."""
    if known is None or not isinstance(order, SampleBatchOrder) or len(dataset) == known:
        return None
    samples = order.samples
    if not isinstance(samples, (SequentialOrder, ShuffledOrder)) or len(samples) != known:
        return None
    return replace(order, samples=replace(samples, length=len(dataset)))


def compare_lengths(dataset: Any, path: str) -> None:
    """Make sure that a dataset that has another length by now has the same one on all ranks."""
    name = f"the length of {type(dataset).__qualname__} {path}".rstrip()
    found = exchanged(name, len(dataset)) or []
    if len({*found}) > 1:
        raise RankMismatchError(
            f"By now {name} is another on each rank ({', '.join(map(str, found))} samples), so that ranks would take "
            "other numbers of steps. Change the data alike on all ranks."
        )


def refuse_other_length(order: BatchOrder, length: int | None, dataset: Any) -> None:
    """Refuse a dataset that has shrunk since its batches were planned; warn of one that has grown.

    Nothing is said where the next epoch is planned for the length that it has by then.
    """
    if length is None or len(dataset) == length or order_of_length(order, length, dataset) is not None:
        return
    changed = (
        f"The {type(dataset).__qualname__} had {length} samples when its loader was built, and has {len(dataset)} now"
    )
    remedy = "Build the loader anew when the data change: Trainer(reload_dataloaders_every_n_epochs=1)."
    if len(dataset) < length:
        raise ConfigurationError(f"{changed}: some that are still to be served are not there any more. {remedy}")
    warnings.warn(f"{changed}. New ones are not served. {remedy}", StatefulWarning, stacklevel=4)


def changed_in_state(order: BatchOrder, *described: Any) -> dict[str, Any]:
    """Changes as :func:`changed_since` has them, for a state that is taken."""
    if isinstance(order, WrappedSampler):
        order.memory.note_state()
    return changed_since(order, *described)


def warn_unless_restored(
    order: BatchOrder,
    dataset: Any,
    config: Mapping[str, Any],
    saved: Mapping[str, Any],
    restored: Collection[str],
) -> set[str]:
    """Warn of data or a sampler that had changed when a state was taken, and are as they were built.

    ``saved`` are the changes in a state, and ``restored`` names what has changed since the loader was built, and before
    the resumed epoch ended. Returns the attributes of data among those that are warned of.
    """
    # Of the indices of subsets others speak, but not of those of samplers.
    saved = {
        name: value
        for name, value in saved.items()
        if name.startswith("sampler.") or name.rpartition(".")[2] != "indices"
    }
    others = [name for name in saved if not (value_at(config, name) is None or holds(config, name, saved[name]))]
    left = [name for name in others if name not in restored]
    if any(name.startswith(PATH) for name in left):
        # Which has another length for that.
        left = [name for name in left if name != _LENGTH]
    owners = [dataset if name.startswith(_OF_DATASET) else getattr(order, "sampler", order) for name in left]
    ways = [name.removeprefix(PATH).removeprefix("sampler").removeprefix("sequence") for name in left]
    if left:
        pairs = zip(owners, ways, strict=True)
        kinds = [(type(owner).__qualname__, way) for owner, way in pairs]
        names = [f"the length of {kind}" if way == _LENGTH else f"{kind}{way}" for kind, way in kinds]
        warnings.warn(
            f"{', '.join(dict.fromkeys(names))} had been changed in training when the checkpoint was written, and "
            "nothing had changed it again when training began here, so the resume may not be exact. If your code "
            "changes it, restore it before the first batch: in load_state_dict, on_load_checkpoint or on_train_start.",
            StatefulWarning,
            stacklevel=3,
        )
    return {name.removeprefix(f"{PATH}.") for name in left if name.startswith(PATH)}
