"""StatefulDistributedSampler is torch's DistributedSampler with progress."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from lightning_stateful.core import ShuffledOrder
from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.samplers import StatefulDistributedSampler
from lightning_stateful.state import sealed

SIZES = [(0, 2), (1, 1), (1, 5), (7, 2), (24, 5)]


def a_sampler(length: int = 20, num_replicas: int = 1, rank: int = 0, **options: Any) -> StatefulDistributedSampler:
    return StatefulDistributedSampler(length, num_replicas, rank, **options)


def the_ranks(length: int, num_replicas: int, **options: Any) -> list[StatefulDistributedSampler]:
    return [a_sampler(length, num_replicas, rank, **options) for rank in range(num_replicas)]


def take(sampler: StatefulDistributedSampler, count: int) -> list[int]:
    iterator = iter(sampler)
    return [next(iterator) for _ in range(count)]


def moved(sampler: StatefulDistributedSampler, **progress: Any) -> dict[str, Any]:
    """A sampler's state with another progress, and a checksum that fits."""
    state = sampler.state_dict()
    return sealed({**state, "progress": {**state["progress"], **progress}})


class TestAsADropIn:
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize(("length", "num_replicas"), SIZES)
    def test_lengths_padding_and_dropping_count_as_in_torch(
        self, length: int, num_replicas: int, shuffle: bool, drop_last: bool
    ) -> None:
        options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last}
        ours = the_ranks(length, num_replicas, **options)
        theirs = [DistributedSampler(range(length), num_replicas, rank, **options) for rank in range(num_replicas)]

        assert [len(sampler) for sampler in ours] == [len(sampler) for sampler in theirs]
        assert [sampler.total_size for sampler in ours] == [sampler.total_size for sampler in theirs]
        assert [len(list(sampler)) for sampler in ours] == [len(sampler) for sampler in theirs]
        served = [Counter(index for sampler in samplers for index in sampler) for samplers in (ours, theirs)]
        assert (served[0].total(), len(served[0])) == (served[1].total(), len(served[1]))

    def test_without_shuffling_an_epoch_is_torchs_but_for_the_last_round_which_is_filled_up_from_itself(self) -> None:
        for rank, sampler in enumerate(the_ranks(12, 3, shuffle=False)):
            assert list(sampler) == list(DistributedSampler(range(12), 3, rank, shuffle=False))
        assert [list(sampler)[-1] for sampler in the_ranks(11, 3, shuffle=False)] == [9, 10, 9]

    def test_it_takes_a_dataset_or_its_length_as_torchs_by_position_or_name(self) -> None:
        sampler = StatefulDistributedSampler(TensorDataset(torch.arange(9)), 2, 1, False, 7, True)

        assert isinstance(sampler, DistributedSampler)
        assert (sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed) == (2, 1, False, 7)
        assert list(sampler) == list(StatefulDistributedSampler(9, 2, 1, shuffle=False, drop_last=True))

    def test_an_order_is_not_taken_for_a_dataset(self) -> None:
        with pytest.raises(ConfigurationError, match=r"a ShuffledOrder is an order.*sampler=order"):
            StatefulDistributedSampler(ShuffledOrder(8))  # an order has a len, as a dataset has

    def test_it_takes_its_rank_from_the_process_group(self, rank_2_of_4: None) -> None:
        ours, theirs = StatefulDistributedSampler(12, shuffle=False), DistributedSampler(range(12), shuffle=False)

        assert list(ours) == list(theirs) == [2, 6, 10]


class TestPasses:
    def test_an_epoch_of_2_to_the_40_samples_begins_and_resumes_anywhere(self) -> None:
        sampler = a_sampler(2**40, 8, 3)
        head = take(sampler, 3)
        sampler.load_state_dict(moved(sampler, consumed=2**40 - 16))

        assert len({*head, *sampler}) == 5

    def test_the_length_does_not_depend_on_where_it_stands(self) -> None:
        sampler = a_sampler(20, 3)
        lengths = {len(sampler) for _ in sampler}
        sampler.load_state_dict(moved(sampler, epoch=0, consumed=9))

        assert lengths | {len(sampler)} == {7}
        assert [len(list(sampler)) for _ in range(3)] == [4, 7, 7]


class TestRefusals:
    def test_another_dataset_can_be_accepted(self) -> None:
        sampler, longer = a_sampler(20), a_sampler(25, accept=("dataset.length",))
        take(sampler, 5)
        with pytest.warns(StatefulWarning, match="another dataset.length"):
            longer.load_state_dict(sampler.state_dict())

        assert len(list(longer)) == 20
