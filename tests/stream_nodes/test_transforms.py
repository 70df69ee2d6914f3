"""Maps, filters, windows and running states, alone and nested, go on where they stood."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.node_cases import (
    ListNode,
    NumberedShards,
    assert_resumes,
    drawn,
    is_kept,
    mixed,
    noisy,
    scan,
    started,
)
from torchdata.nodes import BaseNode

from lightning_stateful import ChunkedDataset
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StateError, StateMismatchError
from lightning_stateful.stream_nodes.nodes import StreamNode
from lightning_stateful.stream_nodes.read_ahead import BlockShuffle
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.stream_nodes.transforms import FilterNode, MapNode, RunningStateNode, WindowNode


def scan_in_place(state: dict[str, Any], value: Any) -> tuple[int, dict[str, Any]]:
    state["seen"].append(mixed(value))
    del state["seen"][:-6]
    state["sum"] += mixed(value) % 7
    return mixed(state), state


# A state of about 2,000 characters, which is taken at every eighth item at most.
LARGE = {"seen": [0], "sum": 0, "constant": "." * 2000}
KINDS: dict[str, Callable[[BaseNode[Any]], BaseNode[Any]]] = {
    "window": partial(WindowNode, width=3, step=2),
    "window with gaps": partial(WindowNode, width=2, step=5),
    "long window": partial(WindowNode, width=9),
    "running state": partial(RunningStateNode, function=scan, initial=3),
    "large running state": partial(RunningStateNode, function=scan_in_place, initial=LARGE),
    "map": partial(MapNode, function=mixed),
    "seeded map": partial(MapNode, function=noisy, seed=1),
    "filter": partial(FilterNode, function=is_kept),
    "seeded filter": partial(FilterNode, function=lambda value: is_kept((value, drawn())), seed=2),
    "shuffle": partial(BlockShuffle, size=7, seed=3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 80])
def test_a_node_resumes_at_every_item(kind: str, length: int) -> None:
    assert_resumes(lambda: KINDS[kind](ListNode(range(length))), histories=0 if kind == "seeded map" else 3)


@pytest.mark.parametrize("seed", range(6))
def test_nodes_in_any_nesting_resume_at_every_item(seed: int) -> None:
    rng = random.Random(seed)
    names = [rng.choice(list(KINDS)) for _ in range(rng.randint(2, 5))]

    def make() -> BaseNode[Any]:
        node: BaseNode[Any] = ListNode(range(90))
        for name in names:
            node = KINDS[name](node)
        return node

    # What a map draws depends on which items are asked for together.
    assert_resumes(make, histories=0 if names[-1] == "seeded map" or names[-2:-1] == ["seeded map"] else 3)


@pytest.mark.parametrize("kind", ["window", "long window", "large running state"])
def test_a_source_that_ends_before_what_was_used_of_it_is_refused(kind: str) -> None:
    node = started(KINDS[kind](ListNode(range(50))))
    node.skip(6)
    with pytest.raises(PositionError, match=r"\d+ items were used from a state on, but now the items end after 4"):
        started(KINDS[kind](ListNode(range(4))), node.state_dict())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(MapNode, function=3), "function must be a function, got 3"),
        (partial(MapNode, function=mixed, on_error="ignore"), "on_error must be one of"),
        (partial(MapNode, function=mixed, seed=0.5), "seed must be an integer"),
        (partial(WindowNode, width=0), "width must be at least 1, got 0"),
        (partial(WindowNode, width=1, step=-1), "step must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make(ListNode([]))


class TestWindows:
    @pytest.mark.parametrize(("width", "step"), [(1, 1), (2, 7), (5, 2), (100, 100), (100, 1)])
    def test_windows_slide(self, width: int, step: int) -> None:
        for length in (4, 6, 100, 210):
            windows = list(WindowNode(ListNode(range(length)), width, step))
            assert windows == [tuple(range(first, first + width)) for first in range(0, length - width + 1, step)]

    @pytest.mark.parametrize(("width", "step"), [(1, 1), (200, 150), (3, 200)])
    def test_a_few_items_are_read_again(self, width: int, step: int) -> None:
        asked: Counter[str] = Counter()
        node, states = started(WindowNode(ListNode(range(2000), asked), width, step)), []
        for _ in node:
            states.append(node.state_dict())
        # A state of the source is asked for once in 64 items.
        assert asked["states"] <= 2 + 2000 / 64
        assert asked["read"] + asked["skipped"] == 2000
        for state in states[:-1:7]:
            asked.clear()
            next(started(WindowNode(ListNode(range(2000), asked), width, step), state))
            assert asked["read"] == width
            assert asked["skipped"] <= 64 + width + step


class TestRunningStates:
    def test_a_state_of_any_plain_kind_is_kept(self) -> None:
        def keep(state: Any, value: int) -> tuple[str, Any]:
            state["array"][value % 3] += value
            state["tensor"] = state["tensor"] * 0.5 + value
            state["last"].append((value, math.inf))
            state["counts"][value % 4] += 1
            return repr(state), state

        array = np.zeros(3, dtype=np.float32)
        initial = {
            "array": array, "tensor": torch.zeros(2), "last": deque(maxlen=3), "counts": Counter({3: 1}),
            "bytes": b"\0\xff", 5: (None, True, math.nan),
        }  # fmt: skip
        assert_resumes(lambda: RunningStateNode(ListNode(range(30)), keep, initial))
        assert not array.any()

    def test_a_small_state_is_taken_when_asked_for_and_a_large_one_now_and_then(self) -> None:
        for size, most in ((10, 0), (25_600, 101)):
            asked: Counter[str] = Counter()
            node = started(
                RunningStateNode(ListNode(range(1000), asked), lambda state, value: (value, state), "." * size)
            )
            for _ in node:
                assert node.state_dict()["since"] <= most
            assert asked["states"] == 1 + 1000 // (most + 1)

    def test_a_state_that_is_not_plain_is_refused_at_the_start_or_when_it_is_asked_for(self) -> None:
        with pytest.raises(StateError, match=r"The stream's running state\['x'\] is a object"):
            RunningStateNode(ListNode([1]), scan, {"x": object()})
        node = started(RunningStateNode(ListNode([1, 2]), lambda state, value: (value, object()), 0))
        next(node)
        with pytest.raises(StateError, match="The stream's running state is a object"):
            node.state_dict()

    def test_a_function_that_returns_no_pair_is_named(self) -> None:
        with pytest.raises(ShardError, match="lambda> failed on the sample 7: TypeError"):
            next(RunningStateNode(ListNode([7]), lambda state, value: value, 0))


class TestMapsAndFilters:
    def test_what_is_drawn_follows_from_the_seed_and_the_samples_before(self) -> None:
        whole = list(MapNode(ListNode([0] * 40), noisy, seed=1))
        random.seed(5)
        alone = [next(started(MapNode(ListNode([0]), noisy, seed=1), {"source": None, "item": n})) for n in range(40)]
        other = list(MapNode(ListNode([0] * 40), noisy, seed=2))
        assert alone == whole
        assert all(len({item[which] for item in whole + other}) == 80 for which in (1, 2, 3))

    def test_items_that_are_left_out_are_not_mapped(self) -> None:
        mapped: list[int] = []
        node = started(WindowNode(MapNode(ListNode(range(300)), mapped.append), 2, 2))
        node.skip(140)
        state = node.state_dict()
        mapped.clear()
        next(started(WindowNode(MapNode(ListNode(range(300)), mapped.append), 2, 2), state))
        assert mapped == [280, 281]

    def test_a_filter_keeps_items_as_they_are_and_none_is_an_item(self) -> None:
        assert list(FilterNode(ListNode([None, 1, None, 0]), lambda value: value is None)) == [None, None]
        assert list(FilterNode(ListNode(range(9)), lambda value: np.bool_(value > 7))) == [8]

    @pytest.mark.parametrize("kind", [MapNode, FilterNode])
    @pytest.mark.parametrize("seed", [None, 1])
    def test_samples_that_fail_can_be_left_out_and_counted(self, kind: Any, seed: int | None) -> None:
        def function(value: int) -> int:
            return 1 // (value % 5) + value * drawn()[0]

        make = partial(kind, function=function, seed=seed, on_error="skip")
        if seed is not None:
            assert_resumes(lambda: make(ListNode(range(1, 43))))
        node = started(make(ListNode(range(1, 43))))
        assert len(node.next_many(100)) == 34
        state = {"source": {"next": 42}, "item": 42, "skipped_samples": 8}
        assert node.state_dict() == started(make(ListNode(range(1, 43))), state).state_dict() == state


class DoubtfulError(Exception):
    """An error of the user's, with arguments of its own."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class TestFailures:
    @pytest.mark.parametrize("kind", [partial(MapNode, seed=1), MapNode, FilterNode])
    @pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no"), DoubtfulError(1, 2)], ids=repr)
    def test_a_failing_function_names_the_sample(self, kind: Any, error: Exception) -> None:
        def function(value: int) -> int:
            if value == 6:
                raise error
            return value + 1

        said = rf"function failed on the sample 6: {type(error).__name__}: {error}\. A resume from any"
        node = started(kind(ListNode(range(10)), function))
        assert len(node.next_many(4)) == 4
        with pytest.raises(ShardError, match=said) as caught:
            node.next_many(4)
        assert caught.value.__cause__ is error

    @pytest.mark.parametrize("kind", [MapNode, FilterNode, partial(RunningStateNode, initial=0)])
    def test_errors_say_where_reading_stands_and_show_the_beginning_of_the_sample(self, kind: Any) -> None:
        def fail(*_: Any) -> None:
            raise OSError("gone")

        reader = ShardReader(NumberedShards([0, 3]), (1,), 0)
        blown_up = MapNode(reader, lambda sample: sample * 40)
        said = r"fail failed on the sample \(0, 1, 0, .{70}\.\.\. \(.* read up to shard-1\.bin, at its sample 1\)"
        with pytest.raises(ShardError, match=said):
            next(kind(blown_up, fail, where=reader.where))


class Doubled(StreamNode[Any]):
    """A node as the guide describes it, with nothing but what that names."""

    def __init__(self, source: Any, times: int = 2, described: Any = ("doubled",)) -> None:
        super().__init__()
        self.source, self.times, self.described = source, times, described

    def reset(self, initial_state: Any = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> Any:
        return next(self.source) * self.times

    def get_state(self) -> Any:
        return {"source": self.source.state_dict()}

    def describe(self) -> Any:
        return self.described


@pytest.mark.parametrize("described", [["doubled", 3], {"times": 3}, "packed", ["packed"], [], 3, None], ids=repr)
def test_a_node_of_the_users_comes_behind_the_samples_of_a_stream(described: Any) -> None:
    stream = ChunkedDataset(range(3), range, shuffle=False).then(Doubled, times=3, described=described)
    iterator = iter(stream)
    assert next(iterator) == 0
    state = stream.state_dict()
    assert list(iterator) == [0, 3]
    stream.load_state_dict(state)
    assert list(stream) == [0, 3]
    other = ChunkedDataset(range(3), range, shuffle=False).then(Doubled, times=3, described="other")
    with pytest.raises(StateMismatchError, match="steps"):
        other.load_state_dict(state)
