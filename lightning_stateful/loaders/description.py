"""Turns a DataLoader's arguments (sampler, batch sampler, shuffle, batch size) into the order that they stand for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lightning_stateful.core.order import BatchOrder
from lightning_stateful.core.samples import SampleBatchOrder, SampleOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.source_datasets import describe_sources
from lightning_stateful.loaders.user_class import is_lightnings, is_torchdatas
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.ddp_wrapper import DDPSamplerWrapper
from lightning_stateful.samplers.distributed import StatefulDistributedSampler
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.samplers.wrapped_sampler import RESUME_MODES, WrappedSampler


class LoaderDescription(NamedTuple):
    """The order of a loader and the arguments that it was read from, to build the loader for any ranks and path.

    Attributes:
        order: The order, as for a loader that is served alone.
        has_whole_batches: Whether the order takes the place of a batch sampler; otherwise the loader cuts samples.
        num_replicas: Number of ranks that the user's sampler was given; None for those of the process group.
        rank: The rank that it was given.
        accept: Names of differences that the sampler lets pass.
        batch_size: Samples in a batch that the loader cuts; None for whole batches, or where nothing is collated.
        drop_last: Whether the loader leaves out an incomplete last step.
        resume_note: A sentence on how a wrapped sampler is resumed; empty for others.
        counts_samples: Whether the order was made for the dataset's length; a wrapped sampler looks at that itself.
    """

    order: BatchOrder
    has_whole_batches: bool = False
    num_replicas: int | None = None
    rank: int | None = None
    accept: tuple[str, ...] = ()
    batch_size: int | None = None
    drop_last: bool = False
    resume_note: str = ""
    counts_samples: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether all samples of the dataset are cut into batches, in its order or shuffled."""
        return self.counts_samples and not self.has_whole_batches

    @property
    def is_planned(self) -> bool:
        """Whether batches are whole and planned for all ranks, as those of mixtures and buckets are."""
        return self.counts_samples and self.has_whole_batches

    def adapted(
        self, dataset: Any, *, exact: bool = False, shuffle: bool = True, as_one_rank: bool = True
    ) -> LoaderDescription:
        """A copy for another use of the loader; see :meth:`BatchOrder.adapted`.

        Args:
            dataset: The loader's dataset.
            exact: For evaluation.
            shuffle: False for the same batches in every epoch: samples that are cut come in the dataset's order.
            as_one_rank: Tell a wrapped sampler that there is one rank, so that it yields the samples of all; False to
                run it as each rank has it.
        """
        order = self.order
        if not shuffle and self.batch_size is not None and not self.has_whole_batches:
            in_order = SampleBatchOrder(
                samples=SequentialOrder(len(dataset)),
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                exact=exact or getattr(order, "exact", False),
            )
            return self._replace(order=in_order, resume_note="", counts_samples=True)
        if isinstance(order, WrappedSampler) and not as_one_rank:
            order = order.replaced(as_one_rank=False)
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
            described: dict[str, Any] = describe_sources(dataset, config)
            return described
        if isinstance(config.get("lengths"), dict) and len(dataset) != config["lengths"]["samples"]:
            raise ConfigurationError(
                f"There are {config['lengths']['samples']} lengths, and the dataset has {len(dataset)} samples. Pass "
                "the lengths of this dataset, one a sample."
            )
        return {**config, "dataset": describe_dataset(dataset)}


def read_arguments(
    dataset: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    seed: int,
    exact: bool,
    generator: torch.Generator | None,
    accept: tuple[str, ...],
    as_one_rank: bool = True,
) -> LoaderDescription:
    """Read the arguments of a ``StatefulLoader``, which documents them.

    Raises:
        ConfigurationError: Arguments contradict each other, or are out of range.
        UnsupportedLoaderError: A sampler cannot be repeated.
    """
    if batch_sampler is not None:
        if batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ConfigurationError(
                "batch_sampler takes the place of batch_size, shuffle, sampler and drop_last; pass either."
            )
        if isinstance(batch_sampler, (StatefulBatchSampler, BatchOrder)):
            return _of_batches(batch_sampler, exact)
        if not only_cuts(batch_sampler):
            found = _wrapped(
                dataset, batch_sampler, seed, accept, exact=exact, as_one_rank=as_one_rank, is_collated=True
            )
            return found._replace(has_whole_batches=True)
        batch_size, drop_last, sampler = batch_sampler.batch_size, batch_sampler.drop_last, batch_sampler.sampler
    if sampler is not None and shuffle:
        raise ConfigurationError("sampler takes the place of shuffle; pass one or the other.")
    # Checks the batch size now: the number of ranks, and so the rule, is known only when batches are asked for.
    StepRule(batch_size=1 if batch_size is None else batch_size)
    # What is not collated cannot be served two at a time.
    exact = exact and batch_size is not None
    if is_plain(sampler, generator):
        samples = _samples_of(dataset, sampler, shuffle=shuffle, seed=seed)
        order = SampleBatchOrder(samples=samples, batch_size=batch_size, drop_last=drop_last, exact=exact)
        accepted = sampler.tracker.accept if isinstance(sampler, StatefulDistributedSampler) else ()
        return LoaderDescription(order, batch_size=batch_size, drop_last=drop_last, accept=accepted)
    found = _wrapped(
        dataset,
        sampler,
        seed,
        accept,
        exact=exact,
        as_one_rank=as_one_rank,
        batch_size=batch_size,
        **({"tail": "drop"} if drop_last else {}),
    )
    return found._replace(batch_size=batch_size, drop_last=drop_last)


def is_plain(sampler: Any, generator: torch.Generator | None = None) -> bool:
    """Whether a sampler stands for all samples, in order or shuffled, so that a computed order can take its place.

    Args:
        sampler: A sampler, an order of samples, or None.
        generator: The loader's generator, if it has one.
    """
    ours = type(sampler) is StatefulDistributedSampler or isinstance(sampler, SampleOrder)
    if sampler is None or ours or _is(sampler, SequentialSampler):
        return True
    if _is(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        # What shuffle=True makes: it names a distribution, and no sequence of one's own.
        return is_torchdatas(sampler) or sampler.generator is None or sampler.generator is generator
    return False


def only_cuts(batch_sampler: Any) -> bool:
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


def _of_batches(batches: StatefulBatchSampler | BatchOrder, exact: bool) -> LoaderDescription:
    if exact:
        raise ConfigurationError(
            "exact=True never repeats a sample, which whole batches cannot promise; leave it out, or evaluate with "
            "batch_size in place of batch_sampler."
        )
    if isinstance(batches, BatchOrder):
        counts = not isinstance(batches, WrappedSampler)
        return LoaderDescription(batches, has_whole_batches=True, counts_samples=counts)
    tracker = batches.tracker
    return LoaderDescription(
        tracker.order,
        has_whole_batches=True,
        num_replicas=tracker.num_replicas,
        rank=tracker.rank,
        accept=tracker.accept,
    )


def _wrapped(
    dataset: Any, sampler: Any, seed: int, accept: tuple[str, ...], *, batch_size: int | None = None, **how: Any
) -> LoaderDescription:
    """Describe a user's sampler, which may be in a wrapper that says how it is dealt out."""
    how |= {"dataset": dataset, "whole_batches": batch_size is None, "batch_size": batch_size or 1}
    num_replicas = rank = None
    if isinstance(sampler, DDPSamplerWrapper):
        wrapper, sampler = sampler, sampler.sampler
        seed = seed if wrapper.seed_given is None else wrapper.seed_given
        how = {"tail": wrapper.tail, "length": wrapper.length, "shuffles": wrapper.shuffle_samples_between_gpus, **how}
        num_replicas, rank = wrapper.tracker.num_replicas, wrapper.tracker.rank
        accept = (*accept, *wrapper.accept)
    order = WrappedSampler(sampler, seed=seed, accept=accept, **how)
    order.check()
    note = f"{order.name} {RESUME_MODES[order.resume_mode]}"
    return LoaderDescription(
        order, False, num_replicas, rank, tuple(order.accept), resume_note=note, counts_samples=False
    )


def _samples_of(dataset: Any, sampler: Any, *, shuffle: bool, seed: int) -> SampleOrder:
    if isinstance(sampler, SampleOrder):
        return sampler
    if isinstance(sampler, StatefulDistributedSampler):
        # Its own seed, unless that is the default.
        shuffle, seed = sampler.shuffle, sampler.seed or seed
    elif sampler is not None:
        return ShuffledOrder(len(sampler), seed) if _is(sampler, RandomSampler) else SequentialOrder(len(sampler))
    return ShuffledOrder(len(dataset), seed) if shuffle else SequentialOrder(len(dataset))


def _is(sampler: Any, kind: type) -> bool:
    # A subclass may yield anything; torchdata's samplers of the same names only add a state to the same sequence.
    return type(sampler) is kind or (is_torchdatas(sampler) and type(sampler).__name__ == kind.__name__)
