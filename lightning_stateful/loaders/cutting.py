"""What a loader's arguments say about how its dataset is cut into batches."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_stateful.core.steps import StepRule
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.index.orders import Order, order_at
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.loaders.batches import Cut, SlotCut
from lightning_stateful.loaders.sources import describe_lengths, describe_sources
from lightning_stateful.loaders.torch_samplers import cuts_samples, has_order, order_of
from lightning_stateful.samplers.batch_sampler import StatefulBatchSampler
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.ddp_wrapper import DDPSamplerWrapper
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.samplers.sampler_plan import SamplerCut
from lightning_stateful.samplers.user_sampler import UserSampler


class Cutting(NamedTuple):
    """A dataset cut into batches.

    Attributes:
        cut: The batches.
        order: The order as it is for a loader that stands alone.
        cursor: A position in their order.
        accept: Names of differences that the batch sampler lets pass.
    """

    cut: Cut | SlotCut | SamplerCut
    order: Order | BatchOrder | UserSampler
    cursor: Cursor
    accept: tuple[str, ...] = ()


def cutting_of(
    dataset: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    seed: int,
    path: str,
    exact: bool,
    replace_samplers: bool,
    generator: Any,
    accept: tuple[str, ...],
    num_replicas: int | None,
    rank: int | None,
) -> Cutting:
    """Read the arguments of a :class:`StatefulLoader`, which documents them.

    Raises:
        ConfigurationError: Arguments contradict each other, or are out of range.
        UnsupportedLoaderError: The sampler cannot be repeated.
    """
    if batch_sampler is not None:
        if batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ConfigurationError(
                "batch_sampler takes the place of batch_size, shuffle, sampler and drop_last; pass either."
            )
        if isinstance(batch_sampler, (StatefulBatchSampler, BatchOrder)):
            if exact:
                raise ConfigurationError(
                    "exact=True never repeats a sample, which whole batches cannot promise; leave it out, or evaluate "
                    "with batch_size in place of batch_sampler."
                )
            return _of_batches(dataset, batch_sampler, path, num_replicas, rank)
        if not cuts_samples(batch_sampler):
            cut = _user_cut(batch_sampler, seed, path, accept, exact=exact, whole_batches=True, is_collated=True)
            return _of_sampler(dataset, cut, num_replicas, rank)
        batch_size, drop_last, sampler = batch_sampler.batch_size, batch_sampler.drop_last, batch_sampler.sampler
    if sampler is not None and shuffle:
        raise ConfigurationError("sampler takes the place of shuffle; pass one or the other.")
    # Checks the batch size now: the number of ranks, and so the rule, is known only when batches are asked for.
    StepRule(batch_size=1 if batch_size is None else batch_size)
    if isinstance(sampler, SamplerCut) or not has_order(sampler, replace=replace_samplers, generator=generator):
        exact = exact and batch_size is not None
        cut = _user_cut(sampler, seed, path, accept, exact=exact, whole_batches=batch_size is None)
        cut = replace(cut, batch_size=1 if cut.order.whole_batches else batch_size or 1)
        return _of_sampler(dataset, replace(cut, tail="drop") if drop_last else cut, num_replicas, rank)
    order = order_of(dataset, sampler=sampler, shuffle=shuffle, seed=seed)
    cut_of_order = Cut(
        order=order_at(order, path),
        batch_size=batch_size or 1,
        drop_last=drop_last,
        # What is not collated cannot be served two at a time.
        exact=exact and batch_size is not None,
        num_replicas=num_replicas,
        rank=rank,
    )
    # A state is compared with what decides the sequence of samples; batch size, workers and ranks do not.
    described = {**order.describe(), "drop_last": drop_last, "dataset": describe_dataset(dataset)}
    return Cutting(cut_of_order, order, Cursor(cut_of_order.order, described))


def length_of(dataset: Any, cut: Cut | SlotCut | SamplerCut) -> int | None:
    """Samples of a dataset whose length the batches were planned for; None where a sampler looks at it itself."""
    return None if isinstance(cut, SamplerCut) or not hasattr(dataset, "__len__") else len(dataset)


def refuse_other_length(dataset: Any, length: int | None) -> None:
    """Refuse a dataset that has shrunk since its batches were planned; warn of one that has grown.

    Raises:
        ConfigurationError: It has shrunk.
    """
    if length is None or len(dataset) == length:
        return
    changed = (
        f"The {type(dataset).__qualname__} had {length} samples when its loader was built, and has {len(dataset)} now"
    )
    remedy = "Build the loader anew when the data change: Trainer(reload_dataloaders_every_n_epochs=1)."
    if len(dataset) < length:
        raise ConfigurationError(f"{changed}: some that are still to be served are not there any more. {remedy}")
    warnings.warn(f"{changed}. New ones are not served. {remedy}", StatefulWarning, stacklevel=2)


def _user_cut(
    sampler: Any,
    seed: int,
    path: str,
    accept: tuple[str, ...],
    *,
    exact: bool,
    whole_batches: bool,
    is_collated: bool = False,
) -> SamplerCut:
    """A user's sampler, wrapped or not."""
    if isinstance(sampler, SamplerCut):
        return replace(sampler, order=sampler.order.at(path), exact=exact or sampler.exact)
    if not isinstance(sampler, DDPSamplerWrapper):
        source = UserSampler(
            sampler, seed=seed, path=path, whole_batches=whole_batches, is_collated=is_collated, accept=accept
        )
        return SamplerCut(order=source, exact=exact)
    source = UserSampler(
        sampler.sampler,
        seed=seed if sampler.seed_given is None else sampler.seed_given,
        path=path,
        whole_batches=whole_batches,
        is_collated=is_collated,
        length=sampler.length,
        accept=(*accept, *sampler.accept),
    )
    return SamplerCut(
        order=source,
        exact=exact,
        tail=sampler.tail,
        shuffles=sampler.shuffle_samples_between_gpus,
        num_replicas=sampler.num_replicas,
        rank=sampler.rank,
    )


def _of_sampler(dataset: Any, cut: SamplerCut, num_replicas: int | None, rank: int | None) -> Cutting:
    cut.order.examine()
    if (num_replicas, rank) != (None, None):
        cut = replace(cut, num_replicas=num_replicas, rank=rank)
    described = {**cut.describe(), "dataset": describe_dataset(dataset)}
    return Cutting(cut, cut.order, Cursor(cut.order, described), cut.order.accept)


def _of_batches(
    dataset: Any, batches: StatefulBatchSampler | BatchOrder, path: str, num_replicas: int | None, rank: int | None
) -> Cutting:
    accept: tuple[str, ...] = ()
    if isinstance(batches, StatefulBatchSampler):
        accept = batches.accept
        if (num_replicas, rank) == (None, None):
            num_replicas, rank = batches.num_replicas, batches.rank
        batches = batches.order
    cut = SlotCut(order=order_at(batches, path), num_replicas=num_replicas, rank=rank)
    # Here batch sizes do decide: they are part of what the order says of itself.
    described = batches.describe()
    describe = describe_sources if "sources" in described else describe_lengths
    return Cutting(cut, batches, Cursor(cut.order, describe(dataset, described)), accept)
