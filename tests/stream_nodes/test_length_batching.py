"""Windows are read ahead, sorted and cut into batches of like lengths, and gone on with where they stood."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bucket_cases import is_within, random_budget, random_lengths, read_ahead
from support.node_cases import ListNode, assert_resumes, started

from lightning_stateful.bucketing.budget import Budget, QuadraticCost
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StreamError
from lightning_stateful.stream_nodes.read_ahead import LengthBatcher, cut_window
from lightning_stateful.stream_nodes.transforms import FilterNode, MapNode

Sample = dict[str, int]


def length_of(sample: Sample) -> int:
    return sample["length"]


def key_of(sample: Sample) -> int:
    return sample["key"]


def samples_of(rng: random.Random, most: int = 300) -> list[Sample]:
    lengths = random_lengths(rng, most)
    return [{"id": number, "length": length, "key": rng.randint(5, 8)} for number, length in enumerate(lengths)]


def random_options(rng: random.Random, samples: list[Sample], **fixed: Any) -> dict[str, Any]:
    budget = random_budget(rng, [sample["length"] for sample in samples])
    options = {
        "window": rng.choice([1, 7, 40, 100, 1000]),
        "length": rng.choice([length_of, "length"]),
        "boundary_key": rng.choice([None, key_of, "key"]),
        "shuffle_batches": rng.random() < 0.7,
    }
    return {**options, "budget": Budget(**budget), **fixed}


DROPPING = Budget(max_tokens=12, too_long="drop")


def batcher(samples: Any, asked: Counter[str] | None = None, **options: Any) -> LengthBatcher:
    """Batches of a few tokens, or whatever the options say."""
    budget = options.pop("budget", None) or Budget(max_tokens=options.pop("max_tokens", 12))
    source = samples if isinstance(samples, (ListNode, FilterNode, MapNode)) else ListNode(list(samples), asked)
    return LengthBatcher(source, budget=budget, **{"window": 8, "length": abs, **options})


def expected(samples: list[Sample], options: dict[str, Any]) -> list[list[list[Sample]]]:
    """The batches of each window, in the order in which they are cut."""
    keys = None if options["boundary_key"] is None else [sample["key"] for sample in samples]
    lengths, num_samples = [sample["length"] for sample in samples], options["budget"].num_samples
    windows = []
    for begin in range(0, len(samples), options["window"]):
        window = list(range(begin, min(begin + options["window"], len(samples))))
        if options["budget"].too_long == "drop":
            window = [number for number in window if num_samples(lengths[number])]
        cut = read_ahead(window, lengths, keys, options["window"], num_samples)
        windows.append([[samples[number] for number in batch] for batches in cut for batch in batches])
    return windows


# Around where two bytes no longer hold a length, and the longest that there are.
EDGES = st.one_of(st.integers(0, 20), st.integers(2**15 - 2, 2**15 + 1), st.integers(2**42 - 3, 2**42 - 1))


@given(st.lists(st.tuples(EDGES, st.integers(-2, 2)), max_size=60), st.integers(1, 9), st.booleans())
def test_a_window_of_any_lengths_and_keys_is_sorted_and_cut(
    samples: list[tuple[int, int]], most: int, keyed: bool
) -> None:
    lengths, keys = [length for length, _ in samples], [key for _, key in samples] if keyed else None
    cut = cut_window(
        np.array(lengths, dtype=np.int64),
        lambda longest: 1 + longest % most,
        None if keys is None else np.array(keys, dtype=np.int64),
    )
    plain = read_ahead(range(len(samples)), lengths, keys, max(len(samples), 1), lambda longest: 1 + longest % most)
    assert cut == [batch for each in plain for batch in each]


@pytest.mark.parametrize("seed", range(4))
def test_it_resumes_at_every_batch_of_what_a_plain_loop_cuts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        samples = samples_of(rng, most=120)
        options = random_options(rng, samples, window=rng.choice([1, 7, 40, 100]), order_seed=rng.randint(0, 9))
        batches = assert_resumes(lambda s=samples, o=options: batcher(s, **o))
        assert all(is_within(options["budget"], [sample["length"] for sample in batch]) for batch in batches)
        for window in expected(samples, options):
            served, batches = batches[: len(window)], batches[len(window) :]
            assert served == window or (
                options["shuffle_batches"] and sorted(served, key=str) == sorted(window, key=str)
            )
        assert batches == []


class TestOrder:
    def test_the_order_is_always_this_one(self) -> None:
        # Of other batches, a state that was taken within a window would be worth nothing.
        assert list(batcher(range(1, 14), window=6, max_tokens=24, order_seed=5)) == [
            [2, 1],
            [6, 5, 4, 3],
            [12, 11],
            [10, 9],
            [8, 7],
            [13],
        ]


class TestReadingAgain:
    def test_one_window_is_read_again_and_of_a_used_up_one_nothing(self) -> None:
        asked: Counter[str] = Counter()
        node, states = started(batcher([6] * 40, asked)), []
        for _ in node:
            states.append(node.state_dict())
        # The source is asked for its state once a window, and where one is used up.
        assert asked["states"] <= 12
        for number, state in enumerate(states, 1):
            asked.clear()
            started(batcher([6] * 40, asked), state)
            assert asked["read"] == (0 if number % 4 == 0 else 8)

    @pytest.mark.parametrize(("now", "found"), [([3] * 8, 2), ([], 0)])
    def test_a_window_with_another_number_of_batches_than_before_is_refused(self, now: list[int], found: int) -> None:
        node = started(batcher([12] * 8))
        node.skip(6)
        with pytest.raises(PositionError, match=f"6 of 8 items of a block were used, and now it has {found}"):
            started(batcher(now), node.state_dict())


class TestTooLong:
    @pytest.mark.parametrize("seed", range(3))
    def test_dropped_samples_are_counted_once_however_often_it_is_resumed(self, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [rng.choice([1, 3, 12, 13, 99]) for _ in range(rng.choice([5, 60]))]
        source = ListNode(lengths)
        options: dict[str, Any] = {"window": rng.choice([1, 4, 7]), "budget": DROPPING}
        node, served = started(batcher(source, **options)), 0
        for batch in node:
            served += len(batch)
            dropped = node.state_dict()["dropped"]
            assert dropped == sum(length > 12 for length in lengths[: source.at])
            assert started(batcher(lengths, **options), node.state_dict()).state_dict()["dropped"] == dropped
        assert served == sum(length <= 12 for length in lengths)

    def test_the_first_is_an_error_that_shows_it(self) -> None:
        said = "The length of the sample 13 is 13 tokens, and max_tokens=12 has room for 12"
        with pytest.raises(StreamError, match=said):
            next(batcher([1, 2, 3, 12, 4, 5, 13, 99]))


class TestLengths:
    @pytest.mark.parametrize(
        "column",
        [7, np.int16(7), torch.tensor(7), "seven .", np.zeros((7, 3)), torch.zeros(7, 2)],
        ids=lambda value: type(value).__name__,
    )
    def test_a_column_counts_as_a_number_or_by_its_len(self, column: Any) -> None:
        assert len(list(batcher([{"text": column}], length="text", max_tokens=7))) == 1
        with pytest.raises(StreamError, match="is 7 tokens, and max_tokens=6"):
            next(batcher([{"text": column}], length="text", max_tokens=6))

    def test_by_default_the_len_of_a_sample_counts_but_not_the_number_of_columns(self) -> None:
        texts = ["abc", "a", "abcdef", "ab"]
        assert list(batcher(texts, length=len, shuffle_batches=False)) == [["abcdef", "abc"], ["ab", "a"]]
        with pytest.raises(StreamError, match=r"len of the sample \{'text'.* number of columns.*: 'text', 'label'"):
            next(batcher([{"text": "a", "label": 1}], length=len))

    @pytest.mark.parametrize("what", ["length", "boundary_key"])
    @pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no"), KeyError("no")], ids=repr)
    def test_a_failing_function_is_named_with_the_sample(self, what: str, error: Exception) -> None:
        def function(value: int) -> int:
            if value == 6:
                raise error
            return 3

        said = f"The {what.replace('_', ' ')} of the sample 6 could not be had: {type(error).__name__}"
        with pytest.raises(ShardError, match=said) as caught:
            next(batcher(range(20), **{"length": lambda value: 3, what: function}))
        assert type(caught.value.__cause__) is type(error)

    @pytest.mark.parametrize("length", [2.5, None, "12", -1, 2**42, 2**70, math.nan])
    def test_what_is_no_length_is_named_with_the_sample(self, length: Any) -> None:
        lengths = [3, 3, 3, length, 3]
        with pytest.raises(ShardError, match=r"the sample 3 \(the stream has been read up to the end\)"):
            next(batcher(range(5), length=lengths.__getitem__, budget=DROPPING, where=lambda: "the end"))

    @pytest.mark.parametrize("key", [0.5, None, 2**63])
    def test_what_is_no_key_is_named_with_the_sample(self, key: Any) -> None:
        with pytest.raises(ShardError, match=r"boundary key of the sample 3|Of the sample 3: boundary key"):
            next(batcher(range(4), boundary_key=[1, 2, 3, key].__getitem__))


def test_after_an_error_the_last_state_leads_to_all_samples() -> None:
    broken = [True]

    def length(value: int) -> int:
        return 3 // (value != 13 or not broken)

    whole = list(batcher(range(30), length=lambda value: 3))
    node = started(batcher(range(30), length=length))
    served, state = node.next_many(2), node.state_dict()
    with pytest.raises(ShardError, match="the sample 13"):
        next(node)
    broken.clear()
    assert served + list(started(node, state)) == whole


class TestArguments:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"window": 0}, "window must be at least 1"),
            ({"budget": 5}, "budget must be a Budget"),
            ({"length": 5}, "length must be a function of a sample or the name of a column, got 5"),
            ({"boundary_key": 5}, "boundary_key must be"),
            ({"order_seed": "x"}, "order_seed must be an integer"),
            ({"budget": Budget(max_tokens=1, cost=QuadraticCost(4))}, "Not even a sample of one token"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_what_cannot_be_is_refused(self, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            batcher([], **wrong)

    def test_it_describes_all_that_decides_about_batches_as_plain_data(self) -> None:
        budget = Budget(max_tokens=12, max_samples=4, multiple=2, cost=QuadraticCost(7), too_long="drop")
        options: dict[str, Any] = {"length": "text", "boundary_key": key_of}
        node = batcher([], budget=budget, window=np.int64(8), shuffle_batches=False, **options)
        described = {
            "max_tokens": 12, "max_samples": 4, "multiple": 2, "quadratic_length": 7, "window": 8, "too_long": "drop",
            "boundary_key": "key_of", "lengths": "text", "shuffle_batches": False,
        }  # fmt: skip
        assert json.loads(json.dumps(node.describe())) == ["read_ahead", described]
        assert batcher([], length=functools.partial(len)).describe()[1]["lengths"] == "len"
        assert batcher([], length=functools.partial(pow, exp=2)).describe()[1]["lengths"] == "pow(exp=2)"
