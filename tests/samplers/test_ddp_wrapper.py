"""Any sampler is dealt out to ranks by a DistributedSampler of its own: agreement, epochs, states, nothing outside."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from support import samplers as theirs
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_stateful.errors import StateMismatchError
from lightning_stateful.user_samplers import DDPSamplerWrapper

# One of each way, sized or not, in batches or not; the contract holds for all of them.
SOME: dict[str, Callable[[], Any]] = {
    name: {**theirs.PERMUTATIONS, **theirs.DRAWS, **theirs.BATCHED}[name]
    for name in ("without len", "own state", "weighted", "class balanced")
}
every_sampler = pytest.mark.parametrize("make", SOME.values(), ids=SOME)


class Pairs(Sampler[tuple[int, int]]):
    """Yields pairs that name a sample each."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(0, 10), (1, 11), (2, 12)])


def dealt(make: Callable[[], Any], ranks: int, **options: Any) -> list[list[Any]]:
    return [list(DDPSamplerWrapper(make(), ranks, rank, **options)) for rank in range(ranks)]


def process_state() -> tuple[Any, ...]:
    numbers: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), *numbers[2:]


def fresh_with(make: Callable[[], Any], state: dict[str, Any], *ranks: int, **options: Any) -> DDPSamplerWrapper:
    sampler = DDPSamplerWrapper(make(), *ranks, **options)
    sampler.load_state_dict(state)
    return sampler


class TestDealing:
    @every_sampler
    def test_ranks_with_other_global_seeds_deal_out_one_sequence(self, make: Callable[[], Any]) -> None:
        found = []
        for rank in range(2):
            torch.manual_seed(rank)
            np.random.seed(rank)
            random.seed(rank)
            found.append(list(DDPSamplerWrapper(make(), 2, rank, tail="drop")))
        alone = list(DDPSamplerWrapper(make()))

        assert [item for step in zip(*found, strict=True) for item in step] == alone[: len(alone) // 2 * 2]

    @pytest.mark.parametrize(("tail", "last"), [("split", [[[0, 1, 2]], [[0, 1, 2]]]), ("drop", [[], []])])
    def test_the_tail_of_batches_is_served_twice_or_left_out(self, tail: Any, last: Any) -> None:
        assert dealt(lambda: [[0, 1, 2]], 2, tail=tail) == last

    @pytest.mark.parametrize(
        ("make", "whole_batches"),
        [
            (lambda: [[0, 1]], True),
            (lambda: [np.array([0, 1])], True),
            (lambda: BatchSampler(range(9), 2, False), True),
            (Pairs, False),
            (lambda: ["a", "b"], False),
            (lambda: [torch.tensor(3)], False),
            (list, False),
        ],
    )
    def test_it_sees_whether_a_sampler_yields_batches(self, make: Callable[[], Any], whole_batches: bool) -> None:
        assert DDPSamplerWrapper(make()).order.whole_batches == whole_batches

    def test_wrapping_twice_is_wrapping_once_and_keeps_what_the_first_wrapper_was_told(self) -> None:
        inner = theirs.Endless()
        first = DDPSamplerWrapper(inner, 4, 3, length=7, seed=4, tail="drop", shuffle_samples_between_gpus=True)
        again = DDPSamplerWrapper(first, 2, 1)
        expected = DDPSamplerWrapper(inner, 2, 1, length=7, seed=4, tail="drop", shuffle_samples_between_gpus=True)

        assert again.sampler is inner
        assert list(islice(again, 9)) == list(expected)

    def test_a_data_loader_takes_it_as_a_sampler_and_as_a_batch_sampler(self) -> None:
        data = theirs.Numbers(theirs.LENGTH)
        as_sampler = DataLoader(data, sampler=DDPSamplerWrapper(theirs.GlobalRandom(), 2, 0), batch_size=3)
        as_batches = DataLoader(data, batch_sampler=DDPSamplerWrapper(theirs.ShuffledBatches(), 2, 0))

        assert (len(as_sampler), len(list(as_sampler))) == (4, 4)
        assert (len(as_batches), len(list(as_batches))) == (4, 4)

    def test_an_endless_sampler_is_cut_at_a_length(self) -> None:
        sampler = DDPSamplerWrapper(theirs.Endless(), 2, 0, length=np.int64(5))

        assert [len(list(sampler)), len(list(sampler)), len(sampler), sampler.epoch] == [3, 3, 3, 2]
        with pytest.raises(TypeError, match="BatchesWithoutLen has no len"):
            len(DDPSamplerWrapper(theirs.BatchesWithoutLen()))


class TestOutside:
    @every_sampler
    def test_the_generators_of_the_process_are_untouched_even_in_the_middle_of_a_pass(self, make: Any) -> None:
        sampler = make()
        before = process_state()
        items = iter(DDPSamplerWrapper(sampler, 2, 1))
        for _ in range(3):
            next(items)
            assert process_state() == before
        list(items)

        assert process_state() == before

    def test_after_an_exception_which_comes_out_the_next_epoch_begins(self) -> None:
        sampler, before = DDPSamplerWrapper(theirs.Fails()), process_state()
        for epoch in (0, 2):
            with pytest.raises(KeyError, match="theirs"):
                list(sampler)

            assert (sampler.epoch, next(iter(sampler)), sampler.epoch) == (epoch, 0, epoch + 1)
        assert process_state() == before


class TestStates:
    def test_a_sequence_that_begins_otherwise_is_refused_unless_accepted(self) -> None:
        first, other = list(range(50)), [49, *range(1, 49), 0]
        sampler = DDPSamplerWrapper(first)
        list(islice(sampler, 3))
        with pytest.raises(StateMismatchError, match=r"sequence: saved .* does not yield its first epoch as it did"):
            fresh_with(lambda: other, sampler.state_dict())
        with pytest.warns(UserWarning, match="Accepted: sequence at item 2"):
            assert list(fresh_with(lambda: other, sampler.state_dict(), accept="sequence")) == other[3:]
