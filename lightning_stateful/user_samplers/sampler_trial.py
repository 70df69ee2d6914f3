"""Copies of a user's sampler that are tried, and told of ranks as the sampler is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning_stateful.user_samplers.iterated_sampler import IteratedSampler, UserSampler
from lightning_stateful.user_samplers.sampler_copy import SamplerCopy
from lightning_stateful.user_samplers.sampler_ranks import AskedRanks, told
from lightning_stateful.user_samplers.shared_objects import SharedObjects


def fresh_copy(order: UserSampler, choose: Any, asked: AskedRanks | None, sampler: Any = None) -> IteratedSampler:
    """A copy of a sampler as it is now, told of ranks by what ``choose`` gives, and of those that it asks for.

    Args:
        order: The sampler.
        choose: What to set on the copy; None for nothing.
        asked: Answers for torch.distributed.
        sampler: An earlier copy, to make a copy of that.
    """
    copied = SamplerCopy(order.sampler if sampler is None else sampler, order.dataset).sampler
    return order.iterating(copied, [] if choose is None else choose(copied), asked)


def copy_as_now(order: UserSampler, sampler: Any) -> IteratedSampler:
    """A copy of a sampler, or of an earlier copy, told of ranks as the sampler is."""
    with told(order.dealing.settings):
        copied = SamplerCopy(sampler, order.dataset)
    return order.iterating(copied.sampler, asked=AskedRanks(1) if order.dealing.answers else None)


def length_when_told(order: UserSampler, epoch: int) -> int | None:
    """Items of an epoch as a copy that is told it says; the sampler stays as it is, and what it shares with copies."""
    tried = copy_as_now(order, order.sampler)
    with SharedObjects(order.sampler, order.dataset):
        tried.tell(epoch)
        with tried.entered():
            return order.length_of(tried.sampler)


def begins_anew_when_asked(sampler: Any, contents: Callable[[], str]) -> bool:
    """Whether a sampler is its own iterator, and ``iter()`` of that begins anew, as torch calls it for every batch."""
    if not hasattr(type(sampler), "__next__"):
        return False
    before = contents()
    with suppress(Exception):
        return iter(sampler) is sampler and hasattr(type(sampler).__iter__, "__code__") and contents() != before
    return False
