"""StatefulDistributedSampler is torch's DistributedSampler with a position."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    PositionError,
    StateMismatchError,
    StateVersionError,
)
from lightning_stateful.samplers import StatefulDistributedSampler

SIZES = [(n, num_replicas) for n in (0, 1, 2, 3, 7, 8, 11, 24) for num_replicas in (1, 2, 3, 5)]


def a_sampler(length: int = 20, num_replicas: int = 1, rank: int = 0, **options: Any) -> StatefulDistributedSampler:
    return StatefulDistributedSampler(length, num_replicas, rank, **options)


def the_ranks(length: int, num_replicas: int, **options: Any) -> list[StatefulDistributedSampler]:
    return [a_sampler(length, num_replicas, rank, **options) for rank in range(num_replicas)]


def take(sampler: StatefulDistributedSampler, count: int) -> list[int]:
    iterator = iter(sampler)
    return [next(iterator) for _ in range(count)]


def moved(state: dict[str, Any], **position: Any) -> dict[str, Any]:
    return {**state, "progress": {**state["progress"], **position}}


class TestAsADropIn:
    def test_it_is_a_distributed_sampler_by_type(self) -> None:
        assert isinstance(a_sampler(), DistributedSampler)

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize(("length", "num_replicas"), SIZES)
    def test_lengths_padding_and_dropping_count_as_in_torch(
        self, length: int, num_replicas: int, shuffle: bool, drop_last: bool
    ) -> None:
        dataset = range(length)
        options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last}
        ours = [StatefulDistributedSampler(dataset, num_replicas, rank, **options) for rank in range(num_replicas)]
        theirs = [DistributedSampler(dataset, num_replicas, rank, **options) for rank in range(num_replicas)]

        assert [len(sampler) for sampler in ours] == [len(sampler) for sampler in theirs]
        assert [sampler.total_size for sampler in ours] == [sampler.total_size for sampler in theirs]
        assert [len(list(sampler)) for sampler in ours] == [len(sampler) for sampler in theirs]
        served = [Counter(index for sampler in samplers for index in sampler) for samplers in (ours, theirs)]
        assert (served[0].total(), len(served[0])) == (served[1].total(), len(served[1]))

    @pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
    def test_without_shuffling_an_even_epoch_is_the_same_as_torchs(self, num_replicas: int) -> None:
        for rank, sampler in enumerate(the_ranks(12, num_replicas, shuffle=False)):
            assert list(sampler) == list(DistributedSampler(range(12), num_replicas, rank, shuffle=False))

    def test_without_shuffling_only_the_filled_up_round_differs_from_torchs(self) -> None:
        for rank, sampler in enumerate(the_ranks(11, 3, shuffle=False)):
            assert list(sampler)[:3] == list(DistributedSampler(range(11), 3, rank, shuffle=False))[:3]
        assert [list(sampler)[-1] for sampler in the_ranks(11, 3, shuffle=False)] == [9, 10, 9]

    def test_it_takes_a_dataset_or_its_length(self) -> None:
        dataset = TensorDataset(torch.arange(9))

        assert list(StatefulDistributedSampler(dataset, 2, 1)) == list(StatefulDistributedSampler(9, 2, 1))

    def test_positional_arguments_are_torchs(self) -> None:
        sampler = StatefulDistributedSampler(range(10), 2, 1, False, 7, True)

        assert (sampler.num_replicas, sampler.rank, sampler.shuffle) == (2, 1, False)
        assert (sampler.seed, sampler.drop_last) == (7, True)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((10, 0, 0), "num_replicas must be at least 1, got 0"),
            ((10, 2, 2), r"rank must be in range\(2\), got 2"),
            ((10, 2, -1), r"rank must be in range\(2\), got -1"),
            ((2**40 + 1, 1, 0), r"A dataset has 0 to 2\*\*40 samples"),
            ((-1, 1, 0), r"A dataset has 0 to 2\*\*40 samples, got -1"),
        ],
    )
    def test_arguments_out_of_range_are_refused(self, arguments: tuple[int, int, int], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            StatefulDistributedSampler(*arguments)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_data_loader_works_with_it(self, num_workers: int) -> None:
        dataset = list(range(20))
        sampler = StatefulDistributedSampler(dataset, 2, 1)
        loader = DataLoader(dataset, sampler=sampler, batch_size=4, num_workers=num_workers)

        epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]

        fresh = StatefulDistributedSampler(dataset, 2, 1)
        assert epochs == [list(fresh), list(fresh)]
        assert len(loader) == 3

    def test_numbers_of_numpy_are_numbers(self) -> None:
        sampler = StatefulDistributedSampler(range(10), seed=np.int64(3))
        sampler.set_epoch(np.int64(2))

        assert json.loads(json.dumps(sampler.state_dict())) == sampler.state_dict()
        assert list(StatefulDistributedSampler(np.int64(10))) == list(StatefulDistributedSampler(10))

    def test_a_seed_that_is_no_number_is_refused_before_training(self) -> None:
        with pytest.raises((ConfigurationError, TypeError), match="seed"):
            StatefulDistributedSampler(10, seed=1.5)

    def test_a_data_loader_without_batches_works_with_it(self) -> None:
        sampler = a_sampler(6)

        assert list(DataLoader(list(range(6)), sampler=sampler, batch_size=None)) == list(a_sampler(6))


class TestOrder:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_every_sample_of_the_tail_is_served_in_every_epoch(self, shuffle: bool) -> None:
        samplers = the_ranks(11, 4, shuffle=shuffle)

        for _ in range(3):
            assert {index for sampler in samplers for index in sampler} == set(range(11))

    def test_a_rank_is_not_tied_to_one_part_of_the_dataset(self) -> None:
        sampler = a_sampler(12, 4, 2)

        assert {index for _ in range(20) for index in sampler} == set(range(12))

    def test_ranks_do_not_share_one_permutation_of_their_parts(self) -> None:
        one, other = the_ranks(1000, 2)

        assert len({(a - b) % 1000 for a, b in zip(one, other, strict=True)}) > 100

    def test_every_epoch_has_an_order_of_its_own(self) -> None:
        sampler = a_sampler(50)

        assert len({tuple(sampler) for _ in range(10)}) == 10

    def test_seed_and_epoch_do_not_collide(self) -> None:
        orders = set()
        for seed in range(5):
            sampler = a_sampler(50, seed=seed)
            orders |= {tuple(sampler) for _ in range(5)}

        assert len(orders) == 25

    def test_without_shuffling_all_epochs_are_alike(self) -> None:
        sampler = a_sampler(7, shuffle=False)

        assert [list(sampler) for _ in range(2)] == [list(range(7))] * 2

    def test_an_epoch_of_many_blocks_serves_every_sample_once(self) -> None:
        served = [index for sampler in the_ranks(10_001, 2, drop_last=True) for index in sampler]

        assert len(served) == len(set(served)) == 10_000

    def test_an_epoch_of_2_to_the_40_samples_begins_and_resumes_anywhere(self) -> None:
        sampler = a_sampler(2**40, 8, 3)
        head = take(sampler, 3)
        sampler.load_state_dict(moved(sampler.state_dict(), consumed=2**40 - 16))
        tail = list(iter(sampler))

        assert len({*head, *tail}) == 5
        assert all(0 <= index < 2**40 for index in head + tail)


class TestPasses:
    def test_the_length_does_not_depend_on_where_it_stands(self) -> None:
        sampler = a_sampler(20, 3)
        iterator = iter(sampler)
        lengths = {len(sampler)} | {len(sampler) for _ in iterator}
        state = sampler.state_dict()
        sampler.load_state_dict(moved(state, consumed=9))

        assert lengths | {len(sampler)} == {7}

    def test_a_resumed_pass_does_not_shorten_the_passes_after_it(self) -> None:
        sampler = a_sampler(12)
        take(sampler, 8)
        fresh = a_sampler(12)
        fresh.load_state_dict(sampler.state_dict())

        assert [len(list(fresh)) for _ in range(3)] == [4, 12, 12]

    def test_an_abandoned_iterator_leaves_the_beginning_of_its_pass(self) -> None:
        sampler = a_sampler(10)
        take(sampler, 3)

        assert list(sampler) == list(a_sampler(10))

    def test_an_abandoned_iterator_of_a_resumed_pass_leaves_the_place_of_resuming(self) -> None:
        whole = list(a_sampler(10))
        sampler = a_sampler(10)
        take(sampler, 4)
        fresh = a_sampler(10)
        fresh.load_state_dict(sampler.state_dict())
        take(fresh, 3)

        assert list(fresh) == whole[4:]

    def test_iterators_that_are_never_used_change_nothing(self) -> None:
        sampler = a_sampler(10)
        unused = [iter(sampler) for _ in range(3)]

        assert list(sampler) == list(a_sampler(10))
        assert len(unused) == 3

    def test_only_the_latest_iterator_counts(self) -> None:
        sampler = a_sampler(10)
        first = iter(sampler)
        next(first)
        second = iter(sampler)
        next(second)
        rest = list(first)

        assert len(rest) == 9
        assert sampler.state_dict()["progress"] == {"epoch": 0, "consumed": 1, "width": 1}

    def test_a_state_may_be_loaded_after_iter(self) -> None:
        sampler = a_sampler(10)
        take(sampler, 4)
        fresh = a_sampler(10)
        iterator = iter(fresh)
        fresh.load_state_dict(sampler.state_dict())

        assert list(iterator) == list(a_sampler(10))[4:]

    def test_an_epoch_without_samples_ends_at_once(self) -> None:
        for sampler in (a_sampler(0), a_sampler(2, 3, drop_last=True)):
            assert [list(sampler), list(sampler)] == [[], []]


class TestSetEpoch:
    def test_it_begins_the_epoch_that_it_names(self) -> None:
        sampler = a_sampler(20)
        epochs = [list(sampler) for _ in range(4)]

        for epoch in (2, 0, 3, 3):
            sampler.set_epoch(epoch)
            assert list(sampler) == epochs[epoch]

    def test_it_keeps_a_position_within_the_same_epoch(self) -> None:
        sampler = a_sampler(20)
        take(sampler, 5)
        fresh = a_sampler(20)
        fresh.load_state_dict(sampler.state_dict())
        fresh.set_epoch(0)

        assert list(fresh) == list(a_sampler(20))[5:]

    def test_another_epoch_begins_at_its_beginning(self) -> None:
        sampler = a_sampler(20)
        take(sampler, 5)
        fresh = a_sampler(20)
        fresh.load_state_dict(sampler.state_dict())
        fresh.set_epoch(1)

        assert len(list(fresh)) == 20

    def test_the_epoch_can_be_read(self) -> None:
        sampler = a_sampler(5)
        seen = [sampler.epoch]
        list(sampler)
        seen.append(sampler.epoch)
        sampler.set_epoch(7)

        assert [*seen, sampler.epoch] == [0, 1, 7]

    def test_a_loop_as_for_torchs_sampler_resumes_exactly(self) -> None:
        def train(sampler: StatefulDistributedSampler, stop: int | None = None) -> list[tuple[int, int]]:
            seen = []
            for epoch in range(sampler.epoch, 3):
                sampler.set_epoch(epoch)
                for index in sampler:
                    if len(seen) == stop:
                        return seen
                    seen.append((epoch, index))
                    states.append(sampler.state_dict())
            return seen

        states: list[dict[str, Any]] = []
        whole = train(a_sampler(7))
        for stop, state in list(enumerate(states, 1)):
            fresh = a_sampler(7)
            fresh.load_state_dict(state)
            assert train(fresh) == whole[stop:]

    def test_a_negative_epoch_is_refused(self) -> None:
        with pytest.raises(PositionError, match="epoch=-1"):
            a_sampler().set_epoch(-1)


class TestWorkersAhead:
    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("trained", [0, 1, 3, 5])
    def test_the_number_of_trained_samples_leaves_out_what_was_only_fetched(
        self, num_workers: int, trained: int
    ) -> None:
        dataset = list(range(20))

        def batches(sampler: StatefulDistributedSampler) -> DataLoader[Any]:
            return DataLoader(dataset, sampler=sampler, batch_size=2, num_workers=num_workers)

        whole = [batch.tolist() for batch in batches(a_sampler(20, 2, 1))]
        sampler = a_sampler(20, 2, 1)
        iterator = iter(batches(sampler))
        for _ in range(trained):
            next(iterator)
        state = sampler.state_dict(num_samples=2 * trained)
        fresh = a_sampler(20, 2, 1)
        fresh.load_state_dict(state)

        following = a_sampler(20, 2, 1)
        following.set_epoch(1)
        rest = whole[trained:] or [batch.tolist() for batch in batches(following)]
        assert [batch.tolist() for batch in batches(fresh)] == rest

    def test_it_counts_from_where_the_present_pass_began(self) -> None:
        sampler = a_sampler(20)
        sampler.load_state_dict(moved(sampler.state_dict(), consumed=6))
        take(sampler, 9)

        assert sampler.state_dict(num_samples=3)["progress"]["consumed"] == 9

    def test_set_epoch_of_the_running_epoch_does_not_move_what_workers_have_fetched_to_the_end(self) -> None:
        sampler = a_sampler(20)
        sampler.load_state_dict(moved(sampler.state_dict(), consumed=16))
        iterator = iter(sampler)
        list(iterator)
        sampler.set_epoch(0)

        assert sampler.state_dict(num_samples=2)["progress"]["consumed"] == 18

    @pytest.mark.parametrize("count", [-1, 11])
    def test_a_number_outside_the_pass_is_refused(self, count: int) -> None:
        with pytest.raises(ConfigurationError, match=f"num_samples must be from 0 to 10, .* got {count}"):
            a_sampler(20, 2).state_dict(num_samples=count)


class TestOtherNumbersOfRanks:
    @staticmethod
    def replay(length: int, history: list[tuple[int, int]], last: int) -> list[list[int]]:
        """Rounds of samples over a history of (ranks, rounds), and the rest on ``last`` ranks."""
        state = None
        rounds: list[list[int]] = []
        for num_replicas, count in [*history, (last, length + 1)]:
            samplers = the_ranks(length, num_replicas)
            for sampler in samplers:
                if state is not None:
                    sampler.load_state_dict(state)
            for _, indices in zip(range(count), zip(*samplers, strict=True), strict=False):
                rounds.append(list(indices))
            states = [sampler.state_dict() for sampler in samplers]
            assert states == [states[0]] * num_replicas
            state = states[0]
            if state["progress"]["epoch"]:
                break
        return rounds

    @given(
        length=st.integers(1, 60),
        history=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), max_size=6),
        last=st.integers(1, 8),
    )
    def test_every_sample_comes_once_over_any_history(
        self, length: int, history: list[tuple[int, int]], last: int
    ) -> None:
        rounds = self.replay(length, history, last)

        *whole, tail = rounds
        served = Counter(index for indices in rounds for index in indices)
        assert set(served) == set(range(length))
        assert len({index for indices in whole for index in indices}) == sum(map(len, whole))
        assert not {index for indices in whole for index in indices} & set(tail)

    @given(
        length=st.integers(1, 60),
        history=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), max_size=6),
        last=st.integers(1, 8),
    )
    def test_any_history_replays_one_sequence(self, length: int, history: list[tuple[int, int]], last: int) -> None:
        sequence = list(a_sampler(length))

        rounds = self.replay(length, history, last)

        assert list(dict.fromkeys(index for indices in rounds for index in indices)) == sequence

    def test_a_remainder_too_small_for_the_new_ranks_is_dropped_and_the_next_epoch_follows(self) -> None:
        sampler = a_sampler(7, drop_last=True)
        take(sampler, 6)
        state = sampler.state_dict()

        for rank, fresh in enumerate(the_ranks(7, 2, drop_last=True)):
            fresh.load_state_dict(state)
            following = a_sampler(7, 2, rank, drop_last=True)
            following.set_epoch(1)
            passes = [list(fresh), list(fresh)]
            assert list(following) in passes


class TestRefusals:
    def test_every_other_setting_is_named_at_once(self) -> None:
        state = a_sampler(20, seed=1).state_dict()

        with pytest.raises(StateMismatchError) as caught:
            a_sampler(21, seed=2, drop_last=True).load_state_dict(state)

        assert {difference.path for difference in caught.value.differences} == {"seed", "drop_last", "dataset.length"}
        assert "nothing was loaded" in str(caught.value)

    def test_another_shuffle_is_refused(self) -> None:
        with pytest.raises(StateMismatchError, match="shuffle: saved True, now False"):
            a_sampler(shuffle=False).load_state_dict(a_sampler().state_dict())

    def test_a_difference_can_be_accepted(self) -> None:
        sampler = a_sampler(20)
        take(sampler, 5)
        longer = a_sampler(25, accept=("dataset.length",))
        longer.load_state_dict(sampler.state_dict())

        assert len(list(longer)) == 20

    def test_a_refused_state_changes_nothing(self) -> None:
        sampler = a_sampler()
        take(sampler, 3)
        before = sampler.state_dict()

        with pytest.raises(StateMismatchError):
            sampler.load_state_dict(a_sampler(seed=5).state_dict())

        assert sampler.state_dict() == before

    @pytest.mark.parametrize("consumed", [-1, -250])
    def test_a_negative_position_is_refused(self, consumed: int) -> None:
        with pytest.raises(PositionError, match=f"consumed={consumed}"):
            a_sampler().load_state_dict(moved(a_sampler().state_dict(), consumed=consumed))

    def test_a_position_past_the_end_is_refused(self) -> None:
        with pytest.raises(PositionError, match="has consumed 21 samples of epoch 0, but an epoch has only 20"):
            a_sampler().load_state_dict(moved(a_sampler().state_dict(), consumed=21))

    def test_a_position_at_the_end_is_the_next_epochs_beginning(self) -> None:
        sampler = a_sampler()
        sampler.load_state_dict(moved(sampler.state_dict(), consumed=20))

        assert sampler.state_dict()["progress"] == {"epoch": 1, "consumed": 0, "width": 1}

    @pytest.mark.parametrize("consumed", [1.5, "3", None, True])
    def test_a_position_of_another_type_is_refused(self, consumed: Any) -> None:
        with pytest.raises(DamagedStateError, match=r"position.consumed must be an int"):
            a_sampler().load_state_dict(moved(a_sampler().state_dict(), consumed=consumed))

    def test_a_future_version_is_refused(self) -> None:
        with pytest.raises(StateVersionError, match="version 2"):
            a_sampler().load_state_dict({**a_sampler().state_dict(), "version": 2})

    def test_another_version_of_the_order_is_refused(self) -> None:
        with pytest.raises(StateMismatchError, match="order_version: saved 2, now 1"):
            a_sampler().load_state_dict({**a_sampler().state_dict(), "order_version": 2})
