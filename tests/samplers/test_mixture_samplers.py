"""Batch samplers over several datasets: exact lengths, equal ranks, every sample, and errors that name the dataset."""

from __future__ import annotations

import copy
import json
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from lightning_stateful.errors import ConfigurationError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers.batch_samplers import StatefulBatchSampler
from lightning_stateful.samplers.mixture_samplers import MixtureBatchSampler, RoundRobinBatchSampler

LENGTHS = {"a": 7, "b": 12}
DATA = Path(__file__).parents[3] / "shared" / "data"


def round_robin(lengths: Any, batch_size: Any = 2, ranks: int = 1, **options: Any) -> list[RoundRobinBatchSampler]:
    return [
        RoundRobinBatchSampler(lengths, batch_size, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)
    ]


def source_of(index: int, lengths: list[int]) -> int:
    return int(np.searchsorted(np.cumsum(lengths), index, side="right"))


def sources_of(batches: Any, lengths: list[int]) -> list[set[int]]:
    return [{source_of(index, lengths) for index in batch} for batch in batches]


def served(samplers: list[Any]) -> Counter[int]:
    return Counter(index for sampler in samplers for batch in sampler for index in batch)


def after(sampler: Any, count: int) -> dict[str, Any]:
    """The state of a sampler after ``count`` batches, as it comes out of a file."""
    assert len(list(islice(sampler, count))) == count
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


class TestWhatEarlierRoundRobinSamplersGotWrong:
    """One test for each defect of the samplers that this one replaces."""

    @pytest.mark.parametrize("stop", ["all_exhausted", "cycle"])
    @pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 40], [3, 1]])
    def test_a_dataset_hardly_larger_than_the_ranks_has_no_empty_batch(self, lengths: list[int], stop: Any) -> None:
        samplers = round_robin(lengths, ranks=4, stop=stop)
        assert all(batch for sampler in samplers for batch in sampler)
        assert set(served(samplers)) == set(range(sum(lengths)))

    def test_a_rank_sees_samples_of_all_regions_over_the_epochs(self) -> None:
        sampler = round_robin([64, 64], ranks=4)[1]
        seen = {index for _ in range(30) for batch in sampler for index in batch}
        assert len(seen) > 0.98 * 128

    def test_ranks_have_no_common_pattern_at_a_fixed_offset(self) -> None:
        first, second = ([index for batch in sampler for index in batch] for sampler in round_robin([40, 40], ranks=2))
        assert len({a - b for a, b in zip(first, second, strict=True)}) > 10

    def test_every_dataset_may_have_a_weight_and_a_batch_size_and_is_counted(self) -> None:
        sampler = MixtureBatchSampler({"a": 40, "b": 90}, {"a": 1, "b": 3}, weights={"a": 3, "b": 1}, num_steps=8)
        sizes = [Counter(map(len, list(sampler)[first : first + 4])) for first in (0, 4)]
        assert sizes == [Counter({1: 3, 3: 1})] * 2
        assert sampler.position_report()["sources"]["a"]["samples"] == 12


class TestRoundRobin:
    def test_a_dataset_that_is_finished_leaves_the_turn(self) -> None:
        (sampler,) = round_robin([2, 8, 6])
        assert isinstance(sampler, StatefulBatchSampler)
        assert sources_of(sampler, [2, 8, 6]) == [{0}, {1}, {2}, {1}, {2}, {1}, {2}, {1}]

    def test_first_exhausted_ends_before_a_dataset_without_a_batch_has_its_turn(self) -> None:
        (sampler,) = round_robin([4, 20], stop="first_exhausted")
        assert sources_of(sampler, [4, 20]) == [{0}, {1}, {0}, {1}]

    def test_cycle_ends_with_the_longest_and_shuffles_the_shorter_anew(self) -> None:
        (sampler,) = round_robin([4, 12], stop="cycle", seed=3)
        samples = [index for batch in sampler for index in batch]
        short = [index for index in samples if index < 4]
        assert Counter(samples) == {**dict.fromkeys(range(4), 3), **dict.fromkeys(range(4, 16), 1)}
        assert len({tuple(short[first : first + 4]) for first in (0, 4, 8)}) > 1

    def test_two_hundred_sources_are_served_whole(self) -> None:
        lengths = [7 + number % 13 for number in range(200)]
        for kind, options in ((RoundRobinBatchSampler, {}), (MixtureBatchSampler, {"weights": [1, 2, 3, 4, 5] * 40})):
            counts = served([kind(lengths, 4, num_replicas=3, rank=rank, **options) for rank in range(3)])
            assert sorted(counts) == list(range(sum(lengths)))
            assert counts.total() - sum(lengths) < 3


class TestArguments:
    @pytest.mark.parametrize(
        "lengths",
        [
            {"0": 7, "1": 12},
            {0: 7, 1: 12},
            [7, 12],
            (np.int64(7), 12),
            np.array([7, 12]),
            [range(7), [0] * 12],
            {"0": TensorDataset(torch.zeros(7)), "1": 12},
            ConcatDataset([range(7), range(12)]),
        ],
        ids=["a dict", "names", "a list", "of NumPy", "an array", "datasets", "a dict of both", "a ConcatDataset"],
    )
    def test_lengths_datasets_and_concatenations_say_the_same(self, lengths: Any) -> None:
        sampler, reference = RoundRobinBatchSampler(lengths, 2), RoundRobinBatchSampler({"0": 7, "1": 12}, 2)
        assert list(sampler) == list(reference)
        assert json.loads(json.dumps(sampler.state_dict())) == reference.state_dict()

    @pytest.mark.parametrize("batch_size", [{"b": 3, "a": 2}, [2, 3], (2, np.int64(3))])
    def test_batch_sizes_may_be_given_by_name_or_in_order(self, batch_size: Any) -> None:
        assert Counter(map(len, RoundRobinBatchSampler(LENGTHS, batch_size))) == {2: 3, 1: 1, 3: 4}

    @pytest.mark.parametrize("weights", [{"b": 1, "a": 3}, [3.0, 1.0], np.array([3, 1])])
    def test_weights_may_be_given_by_name_or_in_order(self, weights: Any) -> None:
        expected = list(MixtureBatchSampler(LENGTHS, 2, weights={"a": 3, "b": 1}))
        assert list(MixtureBatchSampler(LENGTHS, 2, weights=weights)) == expected

    def test_the_arguments_are_neither_changed_nor_held(self) -> None:
        given = {"lengths": {"a": 7, "b": 12}, "batch_size": {"a": 2, "b": 3}, "weights": {"a": 1, "b": 2}}
        before = copy.deepcopy(given)
        sampler = MixtureBatchSampler(**given)
        expected, unchanged = list(sampler), given == before
        for each in given.values():
            each["a"] = 5
        sampler.set_epoch(0)
        assert unchanged
        assert list(sampler) == expected


class TestShares:
    @pytest.mark.parametrize("ranks", [1, 3])
    def test_by_batch_every_period_is_exact(self, ranks: int) -> None:
        sampler = MixtureBatchSampler(
            [300, 500, 200], 2, weights=[2, 5, 3], num_steps=100, num_replicas=ranks, rank=ranks - 1
        )
        sources = [source_of(batch[0], [300, 500, 200]) for batch in sampler]
        assert {tuple(sorted(sources[first : first + 10])) for first in range(0, 100, 10)} == {
            (0, 0, 1, 1, 1, 1, 1, 2, 2, 2)
        }

    def test_by_default_every_dataset_has_the_share_of_its_size(self) -> None:
        sampler = MixtureBatchSampler([20, 60], 2, num_steps=8)
        assert Counter(map(frozenset, sources_of(sampler, [20, 60]))) == {frozenset({0}): 2, frozenset({1}): 6}

    def test_shares_that_are_whole_in_no_short_period_are_right_over_many_draws(self) -> None:
        weights = [0.123457, 0.51, 0.366543]
        sampler = MixtureBatchSampler([300, 500, 200], 2, weights=weights, num_steps=20_000)
        plan = sampler.tracker.current_plan()
        shares = [of["share"] for of in plan.report_after(20_000)["sources"].values()]
        assert shares == pytest.approx(weights, rel=6e-3)

    def test_a_weight_that_is_rounded_far_is_a_warning_with_the_dataset(self) -> None:
        with pytest.warns(
            StatefulWarning, match=r"Source 'b' has 1 of 65536 draws, a share of 1.53e-05 where its weight"
        ):
            MixtureBatchSampler(LENGTHS, 2, weights=[1, 1e-7])
        with pytest.warns(StatefulWarning, match="Source '0' has 3 of 8 draws, a share of 0.375 where"):
            MixtureBatchSampler([5, 5], 1, weights=[1, 2], block=8)

    def test_sizes_that_are_no_weights_are_rounded_without_a_word(self) -> None:
        assert len(MixtureBatchSampler([10**6, 1], 100)) == 10**4 + 1

    @pytest.mark.parametrize("ranks", [1, 4])
    @pytest.mark.parametrize(("weights", "batch"), [([2, 3], 5), ([1, 3], 4), ([1, 511], 512)])
    def test_by_sample_every_batch_has_its_share_of_each(self, weights: Any, batch: int, ranks: int) -> None:
        for rank in range(ranks):
            sampler = MixtureBatchSampler(
                [30, 900], batch, by="sample", weights=weights, num_steps=40, num_replicas=ranks, rank=rank
            )
            expected = batch * weights[0] // sum(weights)
            assert {sum(index < 30 for index in batch) for batch in sampler} == {expected}

    def test_by_sample_shares_that_no_batch_holds_whole_are_near_in_each(self) -> None:
        sampler = MixtureBatchSampler([300, 500, 200], 16, by="sample", weights=[0.537, 0.253, 0.21], num_steps=500)
        counts = [Counter(source_of(index, [300, 500, 200]) for index in batch) for batch in sampler]
        assert all(
            abs(count[source] - 16 * share) < 2 for count in counts for source, share in enumerate([0.537, 0.253])
        )

    def test_a_temperature_above_one_serves_small_datasets_more_often(self) -> None:
        shares = []
        for temperature in (1, 2, 100):
            plan = MixtureBatchSampler([10, 90], 2, temperature=temperature, num_steps=200).tracker.current_plan()
            shares.append(plan.report_after(200)["sources"]["0"]["share"])
        assert shares == pytest.approx([0.1, 0.25, 0.5], abs=0.02)


class TestSchedules:
    def test_shares_change_where_the_schedule_says(self) -> None:
        sampler = MixtureBatchSampler([50, 50], 2, schedule={0: [1, 0], 6: [0, 1]}, num_steps=4)
        sources = [next(iter(found)) for _ in range(3) for found in sources_of(sampler, [50, 50])]
        assert sources == [0] * 6 + [1] * 6

    def test_evaluation_serves_sources_that_a_schedule_begins_without(self) -> None:
        sampler = MixtureBatchSampler([9, 5], 2, schedule={0: [1, 0], 6: [0, 1]}, num_steps=4)
        plan = sampler.order.adapted(shuffle=False).plan(0, 1)
        assert {index for _, batch in plan.batches(0) for index in batch} == set(range(14))


@cache
def word_counts() -> dict[str, Any]:
    """Words of every line that has any, in sources as unlike as headings, the short half and the long half."""
    lines = [line for path in sorted(DATA.glob("*.txt")) for line in path.read_text(encoding="utf-8").splitlines()]
    counts = {line: len(line.split()) for line in lines if line.strip()}
    headings = [count for line, count in counts.items() if line.strip().startswith("=")]
    text = sorted(count for line, count in counts.items() if not line.strip().startswith("="))
    parts = {"headings": headings, "short": text[: len(text) // 2], "long": text[len(text) // 2 :]}
    return {name: np.random.default_rng(0).permutation(part) for name, part in parts.items()}


def tokens_served(sampler: MixtureBatchSampler, lengths: dict[str, Any]) -> dict[str, int]:
    """Counted sample by sample."""
    flat = np.concatenate(list(lengths.values()))
    ends = np.cumsum([len(part) for part in lengths.values()])
    indices = np.array([index for batch in sampler for index in batch])
    sources = np.searchsorted(ends, indices, side="right")
    return {name: int(flat[indices[sources == number]].sum()) for number, name in enumerate(lengths)}


@pytest.mark.skipif(not list(DATA.glob("*.txt")), reason="the text is not part of the project")
class TestTokens:
    @pytest.mark.parametrize("batch_size", [4, {"headings": 16, "short": 4, "long": 2}], ids=["one size", "three"])
    @pytest.mark.parametrize("weights", [[1, 1, 1], [1, 4, 5], [0.1, 0.6, 0.3]], ids=str)
    def test_shares_are_right_within_a_percent_of_an_epoch(self, weights: Any, batch_size: Any) -> None:
        lengths = word_counts()
        sampler = MixtureBatchSampler(
            lengths, batch_size, weights=weights, by="token", token_lengths=lengths, stop="cycle", seed=3
        )
        counts = tokens_served(sampler, lengths)
        expected = np.array(weights) / sum(weights)
        assert [count / sum(counts.values()) for count in counts.values()] == pytest.approx(expected.tolist(), abs=0.01)

    def test_by_default_every_token_is_served_once_in_an_epoch(self) -> None:
        lengths = word_counts()
        sampler = MixtureBatchSampler(lengths, 4, by="token", token_lengths=lengths)
        assert tokens_served(sampler, lengths) == {name: int(part.sum()) for name, part in lengths.items()}

    def test_reports_count_tokens_closely(self) -> None:
        lengths = word_counts()
        sampler = MixtureBatchSampler(lengths, 4, by="token", token_lengths=lengths, weights=[1, 2, 2], num_steps=3000)
        counts = tokens_served(sampler, lengths)
        reported = {name: of["tokens"] for name, of in sampler.position_report()["sources"].items()}
        assert reported == pytest.approx(counts, rel=0.03)


class TestAcceptedChanges:
    @pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
    def test_a_state_made_after_an_accepted_change_loads_where_an_epoch_serves_less_now(self, stop: Any) -> None:
        lengths, options = {"a": 1000, "b": 20}, {"weights": [50, 1], "stop": stop}
        first = after(MixtureBatchSampler(lengths, 4, weights=[1, 1], stop="cycle"), 100)
        changed = MixtureBatchSampler(lengths, 4, accept=("weights", "stop"), **options)
        changed.load_state_dict(first)
        rest = list(changed)
        changed.load_state_dict(first)
        again = MixtureBatchSampler(lengths, 4, **options)
        again.load_state_dict(after(changed, 1))
        assert len(rest) > 1
        assert list(again) == rest[1:]

    def test_a_source_more_with_the_same_batch_size_is_no_other_batch_size(self) -> None:
        state = after(RoundRobinBatchSampler({"a": 40, "b": 40}, 8), 3)
        more = RoundRobinBatchSampler({"a": 40, "b": 40, "c": 9}, {"a": 8, "b": 8, "c": 4}, accept="sources")
        more.load_state_dict(state)
        assert sum(len(batch) for batch in more) == 40 + 40 + 9 - 24

    def test_changes_are_refused_with_every_difference(self) -> None:
        state = after(MixtureBatchSampler(LENGTHS, 2, weights=[3, 1]), 3)
        with pytest.raises(StateMismatchError) as caught:
            MixtureBatchSampler({"a": 7, "c": 3}, 2, weights=[1, 1], seed=1).load_state_dict(state)
        assert {of.path for of in caught.value.differences} == {"seed", "sources.b", "sources.c", "weights.a"}

    def test_other_steps_under_a_schedule_are_refused_even_if_accepted(self) -> None:
        schedule: Any = {0: [1, 0], 50: [0, 1]}
        state = after(MixtureBatchSampler([500, 500], 5, schedule=schedule, num_steps=10), 5)
        with pytest.raises(StateMismatchError, match="counts steps by num_steps"):
            MixtureBatchSampler([500, 500], 5, schedule=schedule, num_steps=40, accept="stop").load_state_dict(state)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown by": ({"by": "word"}, r"by must be one of \('batch', 'sample', 'token'\), got 'word'"),
    "tokens without lengths": ({"by": "token"}, 'by="token" needs the length of every sample in tokens'),
    "lengths of one": ({"token_lengths": {"a": [1] * 7}}, "Source 'b' has no array of token lengths"),
    "too few lengths": ({"token_lengths": [[1] * 7, [1] * 11]}, r"token lengths of source 'b' must be 12 .*\(11,\)"),
    "lengths that are not whole": ({"token_lengths": [[1.5] * 7, [1] * 12]}, "source 'a' must be 7 integers"),
    "negative lengths": ({"token_lengths": [[1] * 7, [-1] * 12]}, "source 'b' must be 12 integers"),
    "no tokens": ({"token_lengths": [[1] * 7, [0] * 12]}, "source 'b' must be 12 integers, one a sample, from 0"),
    "a schedule without steps": ({"schedule": {0: [1, 1]}}, r"With a schedule.* pass num_steps"),
    "a schedule and weights": (
        {"schedule": {0: [1, 1]}, "weights": [1, 1], "num_steps": 3},
        "schedule takes the place",
    ),
    "a schedule and a temperature": (
        {"schedule": {0: [1, 1]}, "temperature": 2, "num_steps": 3},
        "schedule takes the place of weights and temperature",
    ),
    "weights of other datasets": ({"weights": {"a": 1}}, "Source 'b' has no weight"),
    "a temperature of zero": ({"temperature": 0}, "temperature must be a positive number, got 0"),
    "a block of nothing": ({"block": 0}, "block must be at least 1, got 0"),
    "a block by sample": ({"by": "sample", "block": 4}, "those of every batch; leave block out"),
    "sizes by sample": ({"by": "sample", "batch_size": [2, 3]}, r"has one size; got \{'a': 2, 'b': 3\}"),
    "a number of lengths": ({"lengths": 7}, "lengths must be a dict or list of datasets"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED)
    def test_a_mixture_says_what_is_wrong_and_with_which_dataset(self, case: str) -> None:
        options, message = REFUSED[case]
        with pytest.raises(ConfigurationError, match=message):
            MixtureBatchSampler(**{"lengths": LENGTHS, "batch_size": 2, **options})

    @pytest.mark.parametrize("kind", [RoundRobinBatchSampler, MixtureBatchSampler])
    @pytest.mark.parametrize(
        ("lengths", "batch_size", "options", "message"),
        [
            ({"a": [], "b": [1]}, 2, {}, "Source 'a' is empty"),
            ({"a": 7, "b": -1}, 2, {}, "'b'"),
            ({1: 7, "1": 7}, 2, {}, r"Sources need different names, got \['1', '1'\]"),
            (LENGTHS, 0, {}, "batch size of source 'a' must be at least 1, got 0"),
            (LENGTHS, {"a": 2}, {}, "Source 'b' has no batch_size"),
            (LENGTHS, 2, {"stop": "cycle", "num_steps": 4}, "num_steps=4 and stop='cycle'"),
            (LENGTHS, 2, {"seed": "x"}, "seed must be an integer, got 'x'"),
            (LENGTHS, 2, {"num_replicas": 2, "rank": 2}, r"rank must be in range\(2\), got 2"),
            ({"train": [1] * 5, "test": [1] * 5}, 2, {}, "with the splits train, test was passed"),
        ],
    )
    def test_lengths_batch_sizes_and_ends_are_checked(
        self, kind: Any, lengths: Any, batch_size: Any, options: Any, message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            kind(lengths, batch_size, **options)

    def test_a_source_too_small_for_full_steps_of_all_ranks_is_refused_by_name(self) -> None:
        sampler = RoundRobinBatchSampler({"a": 100, "b": 8}, 8, drop_last=True, num_replicas=2, rank=0)
        with pytest.raises(
            ConfigurationError, match="Source 'b' has 8 samples for an epoch, too few for a full step of 2"
        ):
            len(sampler)
