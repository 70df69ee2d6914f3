"""Batch samplers over several datasets: exact lengths, equal ranks, every sample, and errors that name the dataset."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index import WeightSchedule
from lightning_stateful.samplers import MixtureBatchSampler, RoundRobinBatchSampler, StatefulBatchSampler

LENGTHS = {"a": 7, "b": 12}


def round_robin(lengths: Any, batch_size: Any = 2, ranks: int = 1, **options: Any) -> list[RoundRobinBatchSampler]:
    return [
        RoundRobinBatchSampler(lengths, batch_size, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)
    ]


def source_of(index: int, lengths: list[int]) -> int:
    return int(np.searchsorted(np.cumsum(lengths), index, side="right"))


def sources_of(batches: list[list[int]], lengths: list[int]) -> list[set[int]]:
    return [{source_of(index, lengths) for index in batch} for batch in batches]


def served(samplers: list[Any]) -> Counter[int]:
    return Counter(index for sampler in samplers for batch in sampler for index in batch)


class TestWhatEarlierRoundRobinSamplersGotWrong:
    """One test for each defect of the samplers that this one replaces."""

    @pytest.mark.parametrize(
        "options",
        [{}, {"stop": "first_exhausted"}, {"stop": "cycle"}, {"num_steps": 5}, {"num_steps": 99}, {"drop_last": True}],
    )
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize("lengths", [[50, 50], [15, 29, 60], [7, 12]])
    def test_len_counts_exactly_the_batches_of_all_datasets_on_a_rank(
        self, lengths: list[int], ranks: int, options: Any
    ) -> None:
        for sampler in round_robin(lengths, ranks=ranks, **options):
            assert len(list(sampler)) == len(sampler)

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
    @pytest.mark.parametrize(("lengths", "ranks"), [([9, 100], 4), ([101, 50], 4), ([101, 50], 3), ([31, 8, 5], 2)])
    def test_uneven_datasets_give_every_rank_the_same_number_of_batches(
        self, lengths: list[int], ranks: int, stop: Any, drop_last: bool
    ) -> None:
        samplers = round_robin(lengths, ranks=ranks, stop=stop, drop_last=drop_last)
        counts = {len(list(sampler)) for sampler in samplers}

        assert counts == {len(samplers[0])}
        assert counts != {0}

    @pytest.mark.parametrize("stop", ["all_exhausted", "cycle"])
    @pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 40], [3, 1]])
    def test_a_dataset_hardly_larger_than_the_ranks_has_no_empty_share(self, lengths: list[int], stop: Any) -> None:
        samplers = round_robin(lengths, ranks=4, stop=stop)

        assert all(batch for sampler in samplers for batch in sampler)
        assert set(served(samplers)) == set(range(sum(lengths)))

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    @pytest.mark.parametrize("lengths", [[9, 100], [110, 80], [10, 1, 300]])
    def test_nothing_of_the_longer_datasets_is_left_out(self, lengths: list[int], ranks: int) -> None:
        assert set(served(round_robin(lengths, ranks=ranks))) == set(range(sum(lengths)))

    def test_a_rank_sees_samples_of_all_regions_over_the_epochs(self) -> None:
        sampler = round_robin([64, 64], ranks=4)[1]
        seen = {index for _ in range(30) for batch in sampler for index in batch}

        assert len(seen) > 0.98 * 128

    def test_ranks_have_no_common_pattern_at_a_fixed_offset(self) -> None:
        first, second = ([index for batch in sampler for index in batch] for sampler in round_robin([40, 40], ranks=2))

        assert len({a - b for a, b in zip(first, second, strict=True)}) > 10

    def test_every_epoch_has_an_order_of_its_own_which_set_epoch_chooses(self) -> None:
        (sampler,) = round_robin(LENGTHS)
        epochs = [list(sampler) for _ in range(3)]
        sampler.set_epoch(1)

        assert list(sampler) == epochs[1]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]

    def test_a_state_holds_the_place_of_every_dataset_and_resumes_there(self) -> None:
        (sampler,) = round_robin(LENGTHS, {"a": 2, "b": 3})
        batches = iter(sampler)
        for _ in range(3):
            next(batches)
        state = json.loads(json.dumps(sampler.state_dict()))
        (fresh,) = round_robin(LENGTHS, {"a": 2, "b": 3})
        fresh.load_state_dict(state)

        assert state["progress"]["places"] == [4, 3]
        assert list(fresh) == list(batches)

    def test_every_dataset_may_have_a_weight_and_a_batch_size_and_is_counted(self) -> None:
        sampler = MixtureBatchSampler({"a": 40, "b": 90}, {"a": 1, "b": 3}, weights={"a": 3, "b": 1}, num_steps=8)
        sizes = [Counter(map(len, list(sampler)[first : first + 4])) for first in (0, 4)]

        assert sizes == [Counter({1: 3, 3: 1})] * 2
        assert sampler.position_report()["sources"]["a"]["samples"] == 12


class TestRoundRobin:
    def test_batches_come_in_turn_and_each_from_one_dataset(self) -> None:
        (sampler,) = round_robin([6, 6, 6])

        assert sources_of(list(sampler), [6, 6, 6]) == [{0}, {1}, {2}] * 3

    def test_a_dataset_that_is_finished_leaves_the_turn(self) -> None:
        (sampler,) = round_robin([2, 8, 6])

        assert sources_of(list(sampler), [2, 8, 6]) == [{0}, {1}, {2}, {1}, {2}, {1}, {2}, {1}]

    @pytest.mark.parametrize("lengths", [[50, 30, 70], [100, 41]])
    def test_all_ranks_of_a_step_serve_the_same_dataset(self, lengths: list[int]) -> None:
        ranks = [sources_of(list(sampler), lengths) for sampler in round_robin(lengths, ranks=3)]

        assert ranks[0] == ranks[1] == ranks[2]
        assert all(len(sources) == 1 for sources in ranks[0])

    def test_first_exhausted_ends_before_a_dataset_without_a_batch_has_its_turn(self) -> None:
        (sampler,) = round_robin([4, 20], stop="first_exhausted")

        assert sources_of(list(sampler), [4, 20]) == [{0}, {1}, {0}, {1}]

    def test_cycle_ends_with_the_longest_and_shuffles_the_shorter_anew(self) -> None:
        (sampler,) = round_robin([4, 12], stop="cycle", seed=3)
        batches = list(sampler)
        counts = Counter(index for batch in batches for index in batch)
        short = [index for batch in batches for index in batch if index < 4]

        assert all(counts[index] == 1 for index in range(4, 16))
        assert all(counts[index] == 3 for index in range(4))
        assert len({tuple(short[first : first + 4]) for first in (0, 4, 8)}) > 1

    def test_steps_go_on_in_the_next_epoch_where_each_dataset_stands(self) -> None:
        (sampler,) = round_robin([6, 10], num_steps=4)
        batches = [batch for _ in range(5) for batch in sampler]
        own = [[index for batch in batches for index in batch if source_of(index, [6, 10]) == n] for n in range(2)]

        assert [set(own[0][first : first + 6]) for first in (0, 6, 12)] == [set(range(6))] * 3
        assert [set(own[1][first : first + 10]) for first in (0, 10)] == [set(range(6, 16))] * 2

    def test_batch_sizes_may_be_given_by_name_or_in_order(self) -> None:
        by_name = list(RoundRobinBatchSampler(LENGTHS, {"b": 3, "a": 2}))

        assert by_name == list(RoundRobinBatchSampler(LENGTHS, [2, 3])) == list(RoundRobinBatchSampler(LENGTHS, (2, 3)))

    def test_it_is_a_stateful_batch_sampler_by_type(self) -> None:
        assert isinstance(RoundRobinBatchSampler(LENGTHS, 2), StatefulBatchSampler)


class TestLengths:
    @pytest.mark.parametrize(
        "lengths",
        [
            {"0": 7, "1": 12},
            [7, 12],
            (np.int64(7), 12),
            np.array([7, 12]),
            [range(7), [0] * 12],
            {"0": TensorDataset(torch.zeros(7)), "1": 12},
            ConcatDataset([range(7), range(12)]),
        ],
        ids=["a dict", "a list", "numbers of NumPy", "an array", "datasets", "a dict of both", "a ConcatDataset"],
    )
    def test_lengths_datasets_and_concatenations_say_the_same(self, lengths: Any) -> None:
        sampler, reference = RoundRobinBatchSampler(lengths, 2), RoundRobinBatchSampler({"0": 7, "1": 12}, 2)

        assert list(sampler) == list(reference)
        assert json.loads(json.dumps(sampler.state_dict())) == reference.state_dict()

    def test_names_that_are_no_strings_go_by_what_they_look_like(self) -> None:
        assert list(RoundRobinBatchSampler({1: 7, 2: 12}, 2).state_dict()["config"]["sources"]) == ["1", "2"]

    def test_batch_sizes_go_by_names_that_are_no_strings_too(self) -> None:
        assert len(RoundRobinBatchSampler({1: 7, 2: 12}, {1: 7, 2: 12})) == 2

    def test_the_arguments_are_neither_changed_nor_held(self) -> None:
        given = {"lengths": {"a": 7, "b": 12}, "batch_size": {"a": 2, "b": 3}, "weights": {"a": 1, "b": 2}}
        before = copy.deepcopy(given)
        sampler = MixtureBatchSampler(**given)
        expected = list(sampler)
        unchanged = given == before
        for each in given.values():
            each["a"] = 5
        sampler.set_epoch(0)

        assert unchanged
        assert list(sampler) == expected


class TestMixtures:
    def test_by_default_every_dataset_has_the_share_of_its_size(self) -> None:
        sampler = MixtureBatchSampler([20, 60], 2, num_steps=8)

        assert Counter(map(frozenset, sources_of(list(sampler), [20, 60]))) == {frozenset({0}): 2, frozenset({1}): 6}

    def test_weights_by_name_may_come_in_any_order(self) -> None:
        first = MixtureBatchSampler(LENGTHS, 2, weights={"a": 3, "b": 1})

        assert list(first) == list(MixtureBatchSampler(LENGTHS, 2, weights={"b": 1, "a": 3}))

    def test_weights_of_numpy_are_weights(self) -> None:
        sampler = MixtureBatchSampler(LENGTHS, 2, weights=np.array([3, 1]))

        assert list(sampler) == list(MixtureBatchSampler(LENGTHS, 2, weights=[3.0, 1.0]))

    def test_by_sample_every_full_batch_has_exactly_its_share_of_each(self) -> None:
        sampler = MixtureBatchSampler([30, 90], 4, by="sample", weights=[1, 3], num_steps=20)

        for batch in sampler:
            assert sorted(source_of(index, [30, 90]) for index in batch) == [0, 1, 1, 1]

    def test_a_temperature_above_one_serves_small_datasets_more_often(self) -> None:
        shares = []
        for temperature in (1, 2, 100):
            sampler = MixtureBatchSampler([10, 90], 2, temperature=temperature, num_steps=200)
            list(sampler)
            shares.append(sampler.position_report()["sources"]["0"]["share"])

        assert shares == pytest.approx([0.1, 0.25, 0.5], abs=0.02)

    def test_a_schedule_by_step_changes_the_shares_where_it_says(self) -> None:
        sampler = MixtureBatchSampler([50, 50], 2, schedule={0: [1, 0], 6: [0, 1]}, num_steps=4)
        sources = [next(iter(found)) for _ in range(3) for found in sources_of(list(sampler), [50, 50])]

        assert sources == [0] * 6 + [1] * 6

    @pytest.mark.parametrize("num_steps", [5, 11])
    @pytest.mark.parametrize(
        "schedule",
        [
            {0: [3, 1], 13: [1, 3]},
            WeightSchedule({0: [1, 0], 40: [1, 1], 90: [0, 1]}, unit="samples", between="linear"),
            WeightSchedule({0: [1, 0], 100: [0, 1]}, unit="tokens"),
        ],
        ids=["steps", "samples", "tokens"],
    )
    @pytest.mark.parametrize("by", ["batch", "sample"])
    def test_an_epoch_that_is_chosen_is_the_one_that_is_reached(self, by: Any, schedule: Any, num_steps: int) -> None:
        options: dict[str, Any] = {
            "by": by,
            "schedule": schedule,
            "num_steps": num_steps,
            "token_lengths": [[3] * 9, [1] * 14],
        }
        reached, chosen = (MixtureBatchSampler([9, 14], 3, **options) for _ in range(2))
        epochs = [list(reached) for _ in range(5)]
        for epoch in (3, 1, 4, 0):
            chosen.set_epoch(epoch)
            assert list(chosen) == epochs[epoch]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no weight": ({"weights": {"a": 1}}, "Source 'b' has no weight"),
    "too few weights": ({"weights": [1]}, r"1 values were given as weight for the 2 sources \['a', 'b'\]"),
    "an unknown name": ({"weights": {"a": 1, "b": 1, "c": 2}}, "a weight for 'c', which is none of the sources"),
    "a weight of zero": ({"weights": [1, 0]}, "weight of source 'b' must be a positive number, got 0"),
    "a negative weight": ({"weights": {"a": -0.5, "b": 1}}, "weight of source 'a' must be a positive number, got -0.5"),
    "a weight of nan": ({"weights": [float("nan"), 1]}, "weight of source 'a' must be a positive number, got nan"),
    "an infinite weight": ({"weights": [1, float("inf")]}, "weight of source 'b' must be a positive number, got inf"),
    "a weight in words": ({"weights": [1, "2"]}, "weight of source 'b' must be a positive number, got '2'"),
    "an unknown by": ({"by": "word"}, r"by must be one of \('batch', 'sample', 'token'\), got 'word'"),
    "tokens without lengths": ({"by": "token"}, 'by="token" needs the lengths of the samples in tokens'),
    "lengths of one": ({"token_lengths": {"a": [1] * 7}}, "Source 'b' has no array of token lengths"),
    "too few lengths": (
        {"token_lengths": [[1] * 7, [1] * 11]},
        r"token lengths of source 'b' must be 12 .*\(11,\)",
    ),
    "lengths that are not whole": ({"token_lengths": [[1.5] * 7, [1] * 12]}, "source 'a' must be 7 integers"),
    "negative lengths": ({"token_lengths": [[1] * 7, [-1] * 12]}, "source 'b' must be 12 integers"),
    "no tokens": ({"token_lengths": [[1] * 7, [0] * 12]}, "source 'b' must be 12 integers, one a sample, from 0"),
    "a schedule without steps": ({"schedule": {0: [1, 1]}}, "With a schedule.* pass num_steps"),
    "a schedule and weights": (
        {"schedule": {0: [1, 1]}, "weights": [1, 1], "num_steps": 3},
        "schedule takes the place of weights",
    ),
    "a schedule and a temperature": (
        {"schedule": {0: [1, 1]}, "temperature": 2, "num_steps": 3},
        "schedule takes the place of weights and temperature",
    ),
    "a schedule that begins late": ({"schedule": {5: [1, 1]}, "num_steps": 3}, "A schedule begins at 0"),
    "a schedule that leaves one out": (
        {"schedule": {0: [1, 0]}, "num_steps": 3},
        "The schedule gives source 'b' no weight at any point",
    ),
    "a negative weight in a schedule": (
        {"schedule": {0: [1, 1], 5: {"a": 1, "b": -1}}, "num_steps": 3},
        "weight of source 'b' must be zero or a positive number, got -1",
    ),
    "a schedule over unknown tokens": (
        {"schedule": WeightSchedule({0: [1, 1]}, unit="tokens"), "num_steps": 3},
        "A schedule over tokens needs the lengths",
    ),
    "a temperature of zero": ({"temperature": 0}, "temperature must be a positive number, got 0"),
    "a block of nothing": ({"block": 0}, "block must be from 1 to 65536, got 0"),
    "a block by sample": ({"by": "sample", "block": 4}, "exact in every batch; leave block out"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED)
    def test_a_mixture_says_what_is_wrong_and_with_which_dataset(self, case: str) -> None:
        options, message = REFUSED[case]
        with pytest.raises(ConfigurationError, match=message):
            MixtureBatchSampler(LENGTHS, 2, **options)

    @pytest.mark.parametrize("kind", [RoundRobinBatchSampler, MixtureBatchSampler])
    @pytest.mark.parametrize(
        ("lengths", "batch_size", "options", "message"),
        [
            ({}, 2, {}, "There are no sources"),
            ({"a": 7, "b": 0}, 2, {}, "Source 'b' is empty"),
            ({"a": [], "b": [1]}, 2, {}, "Source 'a' is empty"),
            ({"a": 7, "b": 2.5}, 2, {}, "length of source 'b' must be an integer, got 2.5"),
            ({"a": iter([1])}, 2, {}, "length of source 'a' must be an integer"),
            (LENGTHS, 0, {}, "batch size of source 'a' must be at least 1, got 0"),
            (LENGTHS, {"a": 2, "b": -1}, {}, "batch size of source 'b' must be at least 1, got -1"),
            (LENGTHS, {"a": 2, "b": 1.5}, {}, "batch size of source 'b' must be an integer, got 1.5"),
            (LENGTHS, {"a": 2}, {}, "Source 'b' has no batch_size"),
            (LENGTHS, [2], {}, "1 values were given as batch_size for the 2 sources"),
            (LENGTHS, {"a": 2, "b": 2, "c": 2}, {}, "a batch_size for 'c', which is none of the sources"),
            (LENGTHS, {"a": 8, "b": 2}, {"drop_last": True}, "Source 'a' has 7 samples, fewer than a batch of 8"),
            (LENGTHS, 2, {"stop": "cycle", "num_steps": 4}, "num_steps=4 and stop='cycle'"),
            (LENGTHS, 2, {"stop": "never"}, "stop must be one of .* got 'never'"),
            (LENGTHS, 2, {"num_steps": 0}, "num_steps must be at least 1, got 0"),
            (LENGTHS, 2, {"num_steps": 2.5}, "num_steps must be an integer, got 2.5"),
            (LENGTHS, 2, {"seed": "x"}, "seed must be an integer, got 'x'"),
            (LENGTHS, 2, {"num_replicas": 2, "rank": 2}, r"rank must be in range\(2\), got 2"),
        ],
    )
    def test_lengths_batch_sizes_and_ends_are_checked(
        self, kind: Any, lengths: Any, batch_size: Any, options: Any, message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            kind(lengths, batch_size, **options)

    def test_a_negative_length_is_refused_with_its_name(self) -> None:
        with pytest.raises(ConfigurationError, match="'b'"):
            RoundRobinBatchSampler({"a": 7, "b": -1}, 2)

    def test_a_batch_size_of_true_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="batch size of source 'a'"):
            RoundRobinBatchSampler(LENGTHS, True)

    @pytest.mark.parametrize("arguments", [{"lengths": 7}, {"schedule": 5, "num_steps": 3}])
    def test_a_number_where_several_belong_is_refused_in_words(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            MixtureBatchSampler(**{"lengths": LENGTHS, "batch_size": 2, **arguments})

    def test_by_sample_all_batch_sizes_are_one(self) -> None:
        with pytest.raises(ConfigurationError, match=r"has one size; got \{'a': 2, 'b': 3\}"):
            MixtureBatchSampler(LENGTHS, [2, 3], by="sample")

    def test_an_epoch_without_a_step_is_refused_with_its_sources_and_ranks(self) -> None:
        sampler = RoundRobinBatchSampler(LENGTHS, 2, num_replicas=16, rank=0, drop_last=True)

        with pytest.raises(ConfigurationError, match=r"16 ranks, an epoch of the sources \{'a': 7, 'b': 12\}"):
            len(sampler)
