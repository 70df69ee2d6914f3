"""Batch samplers over several datasets: arguments by name or in order, shares, tokens, and errors with the dataset."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from lightning_stateful.errors import ConfigurationError, StatefulWarning
from lightning_stateful.samplers.mixture_samplers import MixtureBatchSampler, RoundRobinBatchSampler

LENGTHS = {"a": 7, "b": 12}


def sources_of(batches: Any, lengths: list[int]) -> list[set[int]]:
    """The sources of every batch."""
    return [set(np.searchsorted(np.cumsum(lengths), batch, side="right").tolist()) for batch in batches]


class TestArguments:
    @pytest.mark.parametrize(
        "lengths",
        [
            {0: 7, 1: 12},
            (np.int64(7), 12),
            np.array([7, 12]),
            [range(7), [0] * 12],
            {"0": TensorDataset(torch.zeros(7)), "1": 12},
            ConcatDataset([range(7), range(12)]),
        ],
        ids=["names", "a tuple", "an array", "datasets", "a dict of both", "a ConcatDataset"],
    )
    def test_lengths_datasets_and_concatenations_say_the_same(self, lengths: Any) -> None:
        sampler, reference = RoundRobinBatchSampler(lengths, 2), RoundRobinBatchSampler({"0": 7, "1": 12}, 2)

        assert list(sampler) == list(reference)
        assert json.loads(json.dumps(sampler.state_dict())) == reference.state_dict()

    @pytest.mark.parametrize("batch_size", [{"b": 3, "a": 2}, (2, np.int64(3))])
    @pytest.mark.parametrize("weights", [{"b": 1, "a": 3}, [3.0, 1.0], np.array([3, 1])])
    def test_batch_sizes_and_weights_may_be_given_by_name_or_in_order(self, batch_size: Any, weights: Any) -> None:
        expected = list(MixtureBatchSampler(LENGTHS, {"a": 2, "b": 3}, weights={"a": 3, "b": 1}))

        assert list(MixtureBatchSampler(LENGTHS, batch_size, weights=weights)) == expected
        assert Counter(map(len, expected)) == {2: 3, 1: 1, 3: 4}


class TestShares:
    @pytest.mark.parametrize(
        ("options", "shares"),
        [
            ({}, [0.1, 0.9]),
            ({"temperature": 2}, [0.25, 0.75]),
            ({"weights": [0.123457, 0.876543]}, [0.123457, 0.876543]),
        ],
        ids=["by size", "warmer", "in no short period"],
    )
    def test_shares_are_those_of_sizes_or_weights_over_many_draws(self, options: Any, shares: list[float]) -> None:
        plan = MixtureBatchSampler([10, 90], 2, num_steps=20_000, **options).tracker.current_plan()
        found = [of["share"] for of in plan.report_after(20_000)["sources"].values()]

        assert found == pytest.approx(shares, rel=0.02)

    def test_a_weight_that_is_rounded_far_is_a_warning_with_the_dataset(self) -> None:
        with pytest.warns(
            StatefulWarning, match=r"Source 'b' has 1 of 65536 draws, a share of 1.53e-05 where its weight"
        ):
            MixtureBatchSampler(LENGTHS, 2, weights=[1, 1e-7])
        with pytest.warns(StatefulWarning, match="Source '0' has 3 of 8 draws, a share of 0.375 where"):
            MixtureBatchSampler([5, 5], 1, weights=[1, 2], block=8)

    @pytest.mark.parametrize(("weights", "batch"), [([2, 3], 5), ([1, 511], 512)])
    def test_by_sample_every_batch_has_its_share_of_each(self, weights: Any, batch: int) -> None:
        sampler = MixtureBatchSampler(
            [30, 900], batch, by="sample", weights=weights, num_steps=40, num_replicas=4, rank=3
        )
        expected = batch * weights[0] // sum(weights)

        assert {sum(index < 30 for index in batch) for batch in sampler} == {expected}

    def test_shares_change_where_a_schedule_says_and_evaluation_serves_all_sources(self) -> None:
        sampler = MixtureBatchSampler([9, 5], 2, schedule={0: [1, 0], 6: [0, 1]}, num_steps=4)
        plan = sampler.order.adapted(shuffle=False).plan(0, 1)

        assert [found for _ in range(3) for found in sources_of(sampler, [9, 5])] == [{0}] * 6 + [{1}] * 6
        assert {index for _, batch in plan.batches(0) for index in batch} == set(range(14))


# Tokens of three sources as unlike as headings, short lines and long ones.
TOKENS = {
    "headings": np.random.default_rng(0).integers(1, 6, 300),
    "short": np.random.default_rng(1).integers(0, 40, 900),
    "long": np.random.default_rng(2).integers(40, 400, 900),
}


def tokens_served(sampler: MixtureBatchSampler) -> dict[str, int]:
    """Counted sample by sample."""
    flat = np.concatenate(list(TOKENS.values()))
    ends = np.cumsum([len(part) for part in TOKENS.values()])
    indices = np.array([index for batch in sampler for index in batch])
    sources = np.searchsorted(ends, indices, side="right")
    return {name: int(flat[indices[sources == number]].sum()) for number, name in enumerate(TOKENS)}


class TestTokens:
    @pytest.mark.parametrize("batch_size", [4, {"headings": 16, "short": 4, "long": 2}], ids=["one size", "three"])
    @pytest.mark.parametrize("weights", [[1, 4, 5], [0.1, 0.6, 0.3]], ids=str)
    def test_shares_are_right_within_a_percent_of_an_epoch(self, weights: Any, batch_size: Any) -> None:
        sampler = MixtureBatchSampler(
            TOKENS, batch_size, weights=weights, by="token", token_lengths=TOKENS, stop="cycle", seed=3
        )
        counts = tokens_served(sampler)
        expected = np.array(weights) / sum(weights)

        assert [count / sum(counts.values()) for count in counts.values()] == pytest.approx(expected.tolist(), abs=0.01)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown by": ({"by": "word"}, r"by must be one of \('batch', 'sample', 'token'\), got 'word'"),
    "tokens without lengths": ({"by": "token"}, 'by="token" needs the length of every sample in tokens'),
    "lengths of one": ({"token_lengths": {"a": [1] * 7}}, "Source 'b' has no array of token lengths"),
    "too few lengths": ({"token_lengths": [[1] * 7, [1] * 11]}, r"token lengths of source 'b' must be 12 .*\(11,\)"),
    "negative lengths": ({"token_lengths": [[1] * 7, [-1] * 12]}, "source 'b' must be 12 integers"),
    "no tokens": ({"token_lengths": [[1] * 7, [0] * 12]}, "source 'b' must be 12 integers, one a sample, from 0"),
    "a schedule without steps": ({"schedule": {0: [1, 1]}}, r"With a schedule.* pass num_steps"),
    "a schedule and weights": (
        {"schedule": {0: [1, 1]}, "weights": [1, 1], "num_steps": 3},
        "schedule takes the place of weights and temperature",
    ),
    "a block by sample": ({"by": "sample", "block": 4}, "those of every batch; leave block out"),
    "sizes by sample": ({"by": "sample", "batch_size": [2, 3]}, r"has one size; got \{'a': 2, 'b': 3\}"),
    "a number of lengths": ({"lengths": 7}, "lengths must be a dict or list of datasets"),
    "one dataset": ({"lengths": TensorDataset(torch.zeros(9))}, "lengths must be a dict or list of datasets"),
    "one name twice": ({"lengths": {1: 7, "1": 7}}, r"Sources need different names, got \['1', '1'\]"),
    "splits": ({"lengths": {"train": [1] * 5, "test": [1] * 5}}, "with the splits train, test was passed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mixture_says_what_is_wrong_and_with_which_dataset(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message):
        MixtureBatchSampler(**{"lengths": LENGTHS, "batch_size": 2, **options})


def test_a_source_too_small_for_full_steps_of_all_ranks_is_refused_by_name() -> None:
    sampler = RoundRobinBatchSampler({"a": 100, "b": 8}, 8, drop_last=True, num_replicas=2, rank=0)
    with pytest.raises(ConfigurationError, match="Source 'b' has 8 samples for an epoch, too few for a full step of 2"):
        len(sampler)
