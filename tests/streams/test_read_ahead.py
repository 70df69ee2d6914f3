"""Windows that are read ahead, sorted and cut, and gone on with where they stand."""

from __future__ import annotations

import functools
import json
import math
import pickle
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from infinibatch.iterators import BucketedReadaheadBatchIterator, NativeCheckpointableIterator
from support.bucket_cases import is_within, random_budget, random_lengths, read_ahead
from test_running import Listed, assert_obeys, listed, mixed, noisy, opened, random_stack

from lightning_stateful.bucketing.budget import Budget, QuadraticCost
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StreamError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams.read_ahead import ReadAhead, ReadAheadConfig, cut_window
from lightning_stateful.streams.running import FilterStage, MapStage
from lightning_stateful.streams.stage import Item, Open, Place


def length_of(sample: dict[str, int]) -> int:
    return sample["length"]


def key_of(sample: dict[str, int]) -> int:
    return sample["key"]


def samples_of(rng: random.Random, most: int = 300) -> list[dict[str, int]]:
    lengths = random_lengths(rng, most)
    return [{"id": number, "length": length, "key": rng.randint(5, 8)} for number, length in enumerate(lengths)]


def random_config(rng: random.Random, samples: list[dict[str, int]], **fixed: Any) -> ReadAheadConfig:
    budget = random_budget(rng, [sample["length"] for sample in samples])
    options: dict[str, Any] = {
        "too_long": budget.pop("too_long", "error"),
        "window": rng.choice([1, 7, 40, 100, 1000]),
        "length": rng.choice([length_of, "length"]),
        "boundary_key": rng.choice([None, key_of, "key"]),
        "shuffle_batches": rng.random() < 0.7,
        **fixed,
    }
    return ReadAheadConfig(budget=Budget(**budget), **options)


def ahead(inner: Open, seed: int = 0, **config: Any) -> Open:
    """Opens batches of a few tokens, or whatever the configuration says."""
    if "budget" not in config:
        config["budget"] = Budget(max_tokens=config.pop("max_tokens", 12))
    return opened(ReadAhead, inner, config=ReadAheadConfig(**{"window": 8, "length": abs, **config}), seed=seed)


def values(batches: Any) -> list[list[Any]]:
    return [[item.value for item in batch] for batch in batches]


def expected(samples: list[dict[str, int]], config: ReadAheadConfig) -> list[list[list[dict[str, int]]]]:
    """The batches of each window, in the order in which they are cut."""
    keys = None if config.boundary_key is None else [sample["key"] for sample in samples]
    lengths = [sample["length"] for sample in samples]
    windows = []
    for begin in range(0, len(samples), config.window):
        window = range(begin, min(begin + config.window, len(samples)))
        if config.too_long == "drop":
            window = [number for number in window if config.budget.num_samples(lengths[number])]
        cut = read_ahead(window, lengths, keys, config.window, config.budget.num_samples)
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
    order = cut.order.tolist()
    expected = read_ahead(range(len(samples)), lengths, keys, max(len(samples), 1), lambda longest: 1 + longest % most)
    assert [order[start:stop] for start, stop in pairwise(cut.bounds)] == [batch for each in expected for batch in each]
    assert cut.lengths == [lengths[number] for number in order]


@pytest.mark.parametrize("seed", range(10))
def test_windows_are_sorted_and_cut_as_a_plain_loop_does(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        samples = samples_of(rng)
        config = random_config(rng, samples, shuffle_batches=False)
        batches = values(ReadAhead(listed(samples), None, config=config, seed=0))
        assert batches == [batch for window in expected(samples, config) for batch in window]


@pytest.mark.parametrize("seed", range(10))
def test_batches_are_those_of_infinibatch(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        samples = samples_of(rng)
        config = random_config(rng, samples, shuffle_batches=False)
        if config.too_long == "drop":
            continue
        keyed = config.boundary_key is not None
        theirs = BucketedReadaheadBatchIterator(
            NativeCheckpointableIterator(samples),
            read_ahead=config.window,
            # It sorts from large to small.
            key=lambda sample, keyed=keyed: (-sample["key"] if keyed else 0, sample["length"]),
            batch_size=lambda sample, config=config: config.budget.num_samples(sample["length"]),
            boundary_key=key_of if keyed else None,
            shuffle=False,
        )
        assert values(ReadAhead(listed(samples), None, config=config, seed=0)) == list(theirs)


@pytest.mark.parametrize("seed", range(10))
def test_it_goes_on_where_it_stands(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        samples = samples_of(rng, most=120)
        config = random_config(rng, samples, window=rng.choice([1, 7, 40, 100]))
        open_stage = opened(ReadAhead, listed(samples), config=config, seed=rng.randint(0, 9))
        batches = values(assert_obeys(open_stage, rng))
        for batch in batches:
            assert is_within(config.budget, [sample["length"] for sample in batch])
            assert config.boundary_key is None or len({sample["key"] for sample in batch}) == 1
        # Window by window, what a plain loop cuts.
        for window in expected(samples, config):
            served, batches = batches[: len(window)], batches[len(window) :]
            assert sorted(served, key=str) == sorted(window, key=str)
        assert batches == []


@pytest.mark.parametrize("seed", range(10))
def test_around_stages_in_any_nesting_it_goes_on_where_it_stands(seed: int) -> None:
    rng = random.Random(seed)
    with keep_randomness():
        for _ in range(3):
            config = ReadAheadConfig(
                window=rng.choice([1, 5, 13]),
                budget=Budget(max_tokens=50),
                length=lambda value: mixed(value) % 20,
                boundary_key=rng.choice([None, lambda value: mixed(value) % 2 == 0]),
            )
            inner = random_stack(rng, listed(range(rng.choice([0, 6, 40]))), rng.choice([1, 2, 4]))
            assert_obeys(opened(ReadAhead, inner, config=config, seed=3), rng)


def test_it_may_be_read_ahead_of_batches_that_were_read_ahead() -> None:
    inner = ahead(listed([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 4))
    flat = opened(MapStage, lambda place: Flat(inner, place), function=noisy, seed=1)
    with keep_randomness():
        assert_obeys(ahead(flat, length=len, window=10), random.Random(1))


class Flat(Listed):
    """The first item of every batch."""

    def __init__(self, inner: Open, place: Place | None) -> None:
        self.inner = inner(place)
        self.place = self.inner.place
        self.skip = self.inner.skip

    def __next__(self) -> Item:
        item: Item = next(self.inner)[0]
        return item


class TestOrder:
    def test_batches_of_each_window_are_shuffled_in_an_order_of_its_own(self) -> None:
        lengths = list(range(1, 41)) * 8
        cut = values(ahead(listed(lengths), window=40, max_tokens=40, shuffle_batches=False)(None))
        shuffled = [values(ahead(listed(lengths), seed, window=40, max_tokens=40)(None)) for seed in range(3)]
        size = len(cut) // 8
        orders = set()
        for batches in shuffled:
            for first in range(0, len(cut), size):
                part = batches[first : first + size]
                assert sorted(part) == sorted(cut[:size])
                orders.add(tuple(map(cut.index, part)))
        assert len(orders) == 24

    def test_the_order_is_always_this_one(self) -> None:
        # Of other batches, a state that was taken within a window would be worth nothing.
        batches = values(ahead(listed(range(1, 25)), 5, window=12, max_tokens=24)(None))
        first = [[10, 9], [1], [5, 4, 3, 2], [8, 7, 6], [12, 11]]
        assert batches == [*first, *([number] for number in (18, 23, 20, 16, 13, 22, 21, 17, 15, 19, 24, 14))]

    def test_equally_long_items_stay_in_the_order_in_which_they_were_read(self) -> None:
        inner = listed([(number, 5) for number in range(100)])
        stage = ahead(inner, length=lambda value: value[1], window=50, shuffle_batches=False)(None)
        assert [number for batch in values(stage) for number, _ in batch] == list(range(100))


class TestReadingAgain:
    def test_one_window_is_read_again_and_no_more(self) -> None:
        asked: Counter[str] = Counter()
        open_stage = ahead(listed([1 + number % 6 for number in range(200)], asked), window=30)
        stage = open_stage(None)
        places = []
        for _ in stage:
            places.append(stage.place())
        assert asked["read"] == 200
        for place in places[:-1]:
            asked.clear()
            fresh = open_stage(place)
            next(fresh)
            assert asked["read"] <= 30
            assert asked["skipped"] == 0

    def test_a_place_is_asked_for_below_once_a_window(self) -> None:
        asked: Counter[str] = Counter()
        stage = ahead(listed([3] * 1000, asked), window=100)(None)
        assert len(list(stage)) == 250
        assert asked["places"] <= 12

    def test_a_used_up_window_is_not_read_again(self) -> None:
        asked: Counter[str] = Counter()
        open_stage = ahead(listed([6] * 40, asked), window=8)
        stage = open_stage(None)
        assert stage.skip(8) == 8
        assert stage.place() == {"at": {"next": 16}, "since": 0, "of": 0, "dropped": 0}
        asked.clear()
        fresh = open_stage(stage.place())
        assert asked["read"] == 0
        next(fresh)
        assert asked["read"] == 8

    def test_a_function_of_the_users_sees_each_sample_once_in_each_reading(self) -> None:
        seen: list[int] = []

        def length(value: int) -> int:
            seen.append(value)
            return 3

        open_stage = ahead(listed(range(16)), length=length, window=8)
        stage = open_stage(None)
        next(stage)
        assert seen == list(range(8))
        seen.clear()
        assert len(list(open_stage(stage.place()))) == 3
        assert seen == list(range(16))

    def test_a_window_with_fewer_batches_than_were_used_is_refused(self) -> None:
        stage = ahead(listed([12] * 8))(None)
        stage.skip(6)
        with pytest.raises(PositionError, match="6 of 8 batches of a window were used, and now it has 2"):
            ahead(listed([3] * 8))(stage.place())
        with pytest.raises(PositionError, match="6 of 8 batches of a window were used, and now it has 0"):
            ahead(listed([]))(stage.place())


class TestTooLong:
    @pytest.mark.parametrize("seed", range(10))
    def test_dropped_samples_are_counted_once_however_often_it_is_opened(self, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [rng.choice([1, 3, 12, 13, 99]) for _ in range(rng.choice([5, 60]))]
        inner: list[Any] = []

        def open_inner(place: Place | None) -> Any:
            inner.append(listed(lengths)(place))
            return inner[-1]

        open_stage = ahead(open_inner, window=rng.choice([1, 4, 7]), too_long="drop")
        stage, served = open_stage(None), 0
        for batch in stage:
            served += len(batch)
            assert stage.place()["dropped"] == stage.num_dropped
            fresh = open_stage(json.loads(json.dumps(stage.place())))
            assert fresh.num_dropped == stage.num_dropped
            assert stage.num_dropped == sum(length > 12 for length in lengths[: inner[0].at])
            list(fresh)
            assert fresh.num_dropped == sum(length > 12 for length in lengths)
        assert served == sum(length <= 12 for length in lengths)

    def test_windows_of_nothing_but_long_samples_are_passed(self) -> None:
        rng = random.Random(0)
        batches = assert_obeys(ahead(listed([99] * 9 + [5] * 2 + [99] * 20), window=4, too_long="drop"), rng)
        assert values(batches) == [[5, 5]]
        stage = ahead(listed([99] * 9), window=4, too_long="drop")(None)
        assert list(stage) == []
        assert stage.place() == {"at": {"next": 9}, "since": 0, "of": 0, "dropped": 9}

    def test_the_first_is_an_error_that_names_it(self) -> None:
        stage = ahead(listed([1, 2, 3, 12, 4, 5, 13, 99]))(None)
        with pytest.raises(
            StreamError, match="The length of sample 1 of shard 8 is 13 tokens, and max_tokens=12 has room for 12"
        ):
            next(stage)

    def test_room_is_what_is_left_by_a_cost(self) -> None:
        budget = Budget(max_tokens=1000, cost=QuadraticCost(10))
        longest = ReadAheadConfig(window=1, budget=budget).longest
        assert longest + longest**2 / 10 <= 1000 < longest + 1 + (longest + 1) ** 2 / 10
        assert ReadAheadConfig(window=1, budget=Budget(batch_size=3)).longest == 2**42 - 1


class TestLengths:
    @pytest.mark.parametrize(
        "column",
        [7, np.int16(7), np.array(7), torch.tensor(7), "seven . ", [0] * 7, np.zeros((7, 3)), torch.zeros(7, 2)],
        ids=lambda value: type(value).__name__,
    )
    def test_a_column_counts_as_a_number_or_by_its_len(self, column: Any) -> None:
        samples = [{"text": column, "other": [1, 2, 3]}, {"text": [0] * 20, "other": 5}]
        expected = len(column) if isinstance(column, str) else 7
        assert len(list(ahead(listed(samples), length="text", budget=Budget(batch_size=1))(None))) == 2
        with pytest.raises(StreamError, match=f"is {expected} tokens, and max_tokens={expected - 1}"):
            next(ahead(listed(samples[:1]), length="text", budget=Budget(max_tokens=expected - 1))(None))

    @pytest.mark.parametrize("column", [[5], np.array([5]), torch.tensor([5])], ids=["list", "array", "tensor"])
    def test_one_token_is_not_a_length(self, column: Any) -> None:
        stage = ahead(listed([{"text": column}] * 3), length="text", max_tokens=3)(None)
        assert len(next(stage)) == 3

    def test_by_default_the_len_of_a_sample_counts(self) -> None:
        stage = ahead(listed(["abc", "a", "abcdef", "ab"]), length=len, shuffle_batches=False)(None)
        assert values(stage) == [["abcdef", "abc"], ["ab", "a"]]

    def test_the_number_of_columns_is_no_length(self) -> None:
        with pytest.raises(StreamError, match=r"len of sample 0 of shard 7, a dict, .*: 'text', 'label'"):
            next(ahead(listed([{"text": "a", "label": 1}]), length=len)(None))

    @pytest.mark.parametrize("what", ["length", "boundary_key"])
    @pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no"), KeyError("no")], ids=repr)
    def test_a_failing_function_is_named_with_the_sample(self, what: str, error: Exception) -> None:
        def function(value: int) -> int:
            if value == 6:
                raise error
            return 3

        said = f"{what.replace('_', ' ')} of sample 1 of shard 8 could not be had: {type(error).__name__}"
        with pytest.raises(ShardError, match=said) as caught:
            next(ahead(listed(range(20)), **{"length": lambda value: 3, what: function})(None))
        assert type(caught.value.__cause__) is type(error)

    @pytest.mark.parametrize("length", [2.5, 3.0, None, "12", [1, 2], -1, 2**42, 2**70, math.nan, np.float32(2)])
    @pytest.mark.parametrize("others", [3, np.int64(3)])
    def test_what_is_no_length_is_named_with_the_sample(self, length: Any, others: Any) -> None:
        lengths = [others, others, others, others, others, others, length, others]
        with pytest.raises(ShardError, match="sample 1 of shard 8"):
            next(ahead(listed(range(8)), length=lengths.__getitem__, too_long="drop")(None))

    @pytest.mark.parametrize("key", [0.5, None, "de", [1], 2**63, -(2**63) - 1])
    def test_what_is_no_key_is_named_with_the_sample(self, key: Any) -> None:
        keys = [1, 2, 3, 4, 5, 6, key]
        with pytest.raises(ShardError, match=r"boundary key.* of shard 8|sample 1 of shard 8.*boundary key"):
            next(ahead(listed(range(7)), boundary_key=keys.__getitem__)(None))

    @pytest.mark.parametrize("keys", [[True, False, True], [2**63 - 1, -(2**63), 2**63 - 1], [np.uint8(9), 2, 9]])
    def test_any_integers_are_keys(self, keys: list[Any]) -> None:
        stage = ahead(listed(range(3)), boundary_key=keys.__getitem__, shuffle_batches=False)(None)
        assert values(stage) == [[1], [2, 0]]

    def test_any_integers_are_lengths(self) -> None:
        lengths = [np.uint8(200), np.int64(3), True, torch.tensor(7), np.array(2), 0]
        stage = ahead(listed(range(6)), length=lengths.__getitem__, budget=Budget(batch_size=9))(None)
        assert values(stage) == [[0, 3, 1, 4, 2, 5]]


class TestBreakingOff:
    def test_after_an_error_nothing_is_passed_over_and_the_place_stays(self) -> None:
        broken = [True]

        def length(value: int) -> int:
            return 3 // (value != 13 or not broken)

        open_stage = ahead(listed(range(30)), length=length, too_long="drop")
        stage = open_stage(None)
        served = values(stage.take(2))
        with pytest.raises(ShardError, match="sample 3 of shard 9"):
            next(stage)
        place = stage.place()
        assert place == {"at": {"next": 8}, "since": 0, "of": 0, "dropped": 0}
        for ask in (stage.__next__, lambda: stage.skip(1)):
            with pytest.raises(StreamError, match="broken off"):
                ask()
        assert stage.place() == place
        broken.clear()
        served += values(open_stage(place))
        assert served == values(open_stage(None))

    def test_an_error_below_breaks_it_off_where_it_stood(self) -> None:
        def function(value: int) -> bool:
            if value == 9:
                raise OSError("gone")
            return value % 2 > 0

        stage = ahead(opened(FilterStage, listed(range(30)), function=function), window=4)(None)
        read = stage.take(3)
        assert sum(map(len, read)) == 4
        place = stage.place()
        with pytest.raises(ShardError, match="sample 4 of shard 8: OSError: gone"):
            next(stage)
        assert stage.place() == place == {"at": {"next": 8}, "since": 0, "of": 0, "dropped": 0}

    def test_a_key_that_fails_does_not_count_what_was_dropped_before_it(self) -> None:
        stage = ahead(listed([99, 3]), too_long="drop", boundary_key=lambda value: 1 // (value - 3))(None)
        with pytest.raises(ShardError, match="boundary key of sample 1"):
            next(stage)
        assert stage.place()["dropped"] == 0

    def test_closing_reaches_what_lies_below(self) -> None:
        asked: Counter[str] = Counter()
        stage = ahead(listed([1], asked))(None)
        stage.close()
        assert asked["closed"] == 1


class TestConfig:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"window": 0}, "window must be at least 1"),
            ({"window": 2.0}, "window must be an integer"),
            ({"budget": 5}, "budget must be a Budget"),
            ({"length": 5}, "length must be a function of a sample or the name of a column, got 5"),
            ({"length": None}, "length must be"),
            ({"boundary_key": 5}, "boundary_key must be"),
            ({"too_long": "skip"}, "too_long must be one of"),
            ({"budget": Budget(max_tokens=1, cost=QuadraticCost(4))}, "Not even a sample of one token"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_what_cannot_be_is_refused(self, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            ReadAheadConfig(**{"window": 8, "budget": Budget(max_tokens=12), **wrong})

    def test_it_travels_to_workers(self) -> None:
        config = ReadAheadConfig(window=np.int64(8), budget=Budget(max_tokens=12), length="text", boundary_key=key_of)
        assert pickle.loads(pickle.dumps(config)) == config

    def test_it_describes_all_that_decides_about_batches_as_plain_data(self) -> None:
        config = ReadAheadConfig(
            window=np.int64(8),
            budget=Budget(max_tokens=12, max_samples=4, multiple=2, cost=QuadraticCost(7)),
            length="text",
            boundary_key=key_of,
            shuffle_batches=False,
            too_long="drop",
        )
        described = {
            "max_tokens": 12, "max_samples": 4, "multiple": 2, "quadratic_length": 7, "window": 8, "too_long": "drop",
            "boundary_key": "key_of", "lengths": "text", "shuffle_batches": False,
        }  # fmt: skip
        assert json.loads(json.dumps(config.describe())) == described
        plain = ReadAheadConfig(window=8, budget=Budget(batch_size=4))
        assert plain.describe() == {
            "batch_size": 4, "window": 8, "too_long": "error", "lengths": "len", "shuffle_batches": True
        }  # fmt: skip
        callable_object = functools.partial(len)
        assert ReadAheadConfig(window=8, budget=Budget(batch_size=1), length=callable_object).describe()["lengths"]


def test_errors_call_a_shard_by_its_name() -> None:
    def stage(**config: Any) -> ReadAhead:
        options: Any = {"window": 8, "budget": Budget(max_tokens=12), **config}
        return ReadAhead(listed(["abc"] * 8), None, config=ReadAheadConfig(**options), seed=0, name_shard="s-{}".format)

    for config in ({"length": lambda value: 13}, {"length": lambda value: 1 // 0}, {"length": lambda value: "x"}):
        with pytest.raises(StreamError, match=r"sample 0 of s-7"):
            next(stage(**config))
    for key in (lambda value: 1 // 0, lambda value: "x", lambda value: 2**70):
        with pytest.raises(ShardError, match=r"sample 0 of s-7"):
            next(stage(boundary_key=key))
