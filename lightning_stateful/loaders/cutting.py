"""What a loader's arguments say about how its dataset is cut into batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import Sampler

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.index.orders import Order
from lightning_stateful.index.slots import BatchOrder
from lightning_stateful.index.steps import StepRule
from lightning_stateful.loaders.batches import Cut, SlotCut
from lightning_stateful.loaders.sources import describe_lengths, describe_sources
from lightning_stateful.loaders.torch_samplers import order_of, reason_against_batch_sampler
from lightning_stateful.samplers.batch_sampler import StatefulBatchSampler
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.identity import describe_dataset


class Cutting(NamedTuple):
    """A dataset cut into batches.

    Attributes:
        cut: The batches.
        cursor: A position in their order.
        accept: Names of differences that the batch sampler lets pass.
    """

    cut: Cut | SlotCut
    cursor: Cursor
    accept: tuple[str, ...] = ()


def cutting_of(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool,
    sampler: Sampler[Any] | Order | None,
    batch_sampler: Any,
    drop_last: bool,
    seed: int,
    exact: bool,
    num_replicas: int | None,
    rank: int | None,
) -> Cutting:
    """Read the arguments of a :class:`StatefulLoader`, which documents them.

    Raises:
        ConfigurationError: Arguments contradict each other, or are out of range.
        UnsupportedLoaderError: The sampler's batches cannot be computed from a position.
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
            return _of_batches(dataset, batch_sampler, num_replicas, rank)
        if reason := reason_against_batch_sampler(batch_sampler):
            raise UnsupportedLoaderError(f"StatefulLoader cannot use this batch_sampler: {reason}")
        batch_size, drop_last, sampler = batch_sampler.batch_size, batch_sampler.drop_last, batch_sampler.sampler
    if sampler is not None and shuffle:
        raise ConfigurationError("sampler takes the place of shuffle; pass one or the other.")
    order = order_of(dataset, sampler=sampler, shuffle=shuffle, seed=seed)
    # Checks the batch size now: the number of ranks, and so the rule, is known only when batches are asked for.
    StepRule(batch_size=batch_size)
    cut = Cut(
        order=order, batch_size=batch_size, drop_last=drop_last, exact=exact, num_replicas=num_replicas, rank=rank
    )
    # A state is compared with what decides the sequence of samples; batch size, workers and ranks do not.
    return Cutting(cut, Cursor(order, {"drop_last": drop_last, "dataset": describe_dataset(dataset)}))


def _of_batches(
    dataset: Any, batches: StatefulBatchSampler | BatchOrder, num_replicas: int | None, rank: int | None
) -> Cutting:
    accept: tuple[str, ...] = ()
    if isinstance(batches, StatefulBatchSampler):
        accept = batches.accept
        if (num_replicas, rank) == (None, None):
            num_replicas, rank = batches.num_replicas, batches.rank
        batches = batches.order
    cut = SlotCut(order=batches, num_replicas=num_replicas, rank=rank)
    # Here batch sizes do decide: they are part of what the order says of itself.
    described = batches.describe()
    describe = describe_sources if "sources" in described else describe_lengths
    return Cutting(cut, Cursor(batches, describe(dataset, described)), accept)
