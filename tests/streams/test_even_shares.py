"""Shards are assigned to worker slots in even shares, on any ranks and workers, again and again."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slot_cases import flat, serve_epoch, serve_rest
from torchdata.nodes import BaseNode, IterableWrapper

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.streams.length_batching import LengthBatcher
from lightning_stateful.streams.mixing import Mixing
from lightning_stateful.streams.shards import Shards
from lightning_stateful.streams.source import Source, Step
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.transforms import FilterNode, MapNode, RunningStateNode, WindowNode
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig


class Numbers(Shards):
    """Shards of consecutive numbers, read again on a resume; ``knows_sizes``: they say how many each has."""

    def __init__(self, sizes: Sequence[int], *, first: int = 0, knows_sizes: bool = False) -> None:
        self._sizes, self._knows_sizes = list(sizes), knows_sizes
        self._firsts = [first + sum(sizes[:number]) for number in range(len(sizes))]
        self.num_read = 0

    @property
    def num_shards(self) -> int:
        return len(self._sizes)

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        self.num_read += 1
        return _WithoutState(range(self._firsts[shard], self._firsts[shard] + self._sizes[shard]))

    def name(self, shard: int) -> str:
        return f"shard {shard}"

    def describe(self) -> dict[str, Any]:
        return {"sizes": self._sizes}

    def sizes(self) -> list[int] | None:
        return self._sizes if self._knows_sizes else None


class _WithoutState(IterableWrapper[int]):
    def get_state(self) -> Any:
        return None


def stream(sizes: Sequence[int], *, batch_size: int = 8, knows_sizes: bool = False, **options: Any) -> StreamConfig:
    """A stream of shards of these sizes."""
    drop_last = options.pop("drop_last", False)
    source = Source(
        shards=Numbers(sizes, knows_sizes=knows_sizes), **{"shuffle": True, "buffer_size": 7, "seed": 1, **options}
    )
    return StreamConfig(sources={ALONE: source}, batch_size=batch_size, drop_last=drop_last)


SKEWED = [500, 200, 100, 50, 50, 50, 25, 25]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sizes", [[125] * 8, [1000], [143] * 6 + [142], [10] * 100, SKEWED])
@pytest.mark.parametrize("knows_sizes", [False, True])
def test_an_epoch_has_as_many_steps_as_are_due(ranks: int, workers: int, sizes: list[int], knows_sizes: bool) -> None:
    state = StreamState.beginning(stream(sizes, knows_sizes=knows_sizes), 0, ranks, workers)
    due = math.ceil(sum(sizes) / (8 * ranks))
    for _ in range(3):
        steps, state, _ = serve_epoch(state)
        served = Counter(flat(steps))
        assert abs(len(steps) - due) <= 2
        assert max(served.values()) <= 2
        assert sum(served.values()) >= sum(sizes) - 8 * ranks * workers
        state = state.following()


@given(st.data())
def test_every_sample_of_a_pass_comes_once_whatever_ranks_and_workers_come_and_go(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=9))
    config = stream(sizes, batch_size=data.draw(st.integers(1, 5)), buffer_size=data.draw(st.sampled_from([0, 3, 11])))
    state = StreamState.beginning(config, 0, 1, 1)
    served: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        state = state.on(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)))
        steps, state, _ = serve_epoch(state, data.draw(st.integers(0, 6)))
        served += flat(steps)
    state = state.on(1, 1)
    served += flat(serve_epoch(state)[0])
    assert sorted(served) == list(range(sum(sizes)))


def test_a_shard_that_one_of_its_readers_has_finished_is_not_assigned_anew() -> None:
    config = stream([0, 1, 0, 29, 0, 0, 13], batch_size=3, buffer_size=0)
    steps, state, _ = serve_epoch(StreamState.beginning(config, 0, 4, 1), 4)
    rest, _, _ = serve_epoch(state.on(1, 1))
    assert sorted(flat(steps + rest)) == list(range(43))


@pytest.mark.parametrize(
    "steps",
    [
        (Step(MapNode, {"function": str}),),
        (Step(FilterNode, {"function": lambda number: number % 3}),),
        (Step(WindowNode, {"width": 3, "step": 2}),),
        (Step(RunningStateNode, {"function": lambda state, value: (value, state + 1), "initial": 0}),),
    ],
    ids=["map", "filter", "windows", "running state"],
)
def test_nodes_behind_the_samples_give_the_same_on_other_ranks(steps: tuple[Step, ...]) -> None:
    config = stream([30], steps=steps, shuffle=False, buffer_size=0, batch_size=2)
    expected = Counter(map(str, flat(serve_epoch(StreamState.beginning(config, 0, 1, 1))[0])))
    for seed in range(10):
        history = random.Random(seed)
        state, served = StreamState.beginning(config, 0, 2, 1), []
        for _ in range(3):
            taken, state, _ = serve_epoch(state, history.randint(0, 3))
            served += flat(taken)
            state = state.on(history.randint(1, 3), history.randint(1, 2))
        served += flat(serve_epoch(state.on(1, 1))[0])
        assert Counter(map(str, served)) == expected


def length(number: int) -> int:
    """How many tokens a number counts for; 0 to 5 of 50 are too long."""
    return 1 + number % 50 if number % 50 > 44 else 1 + number % 5


@pytest.mark.parametrize("seed", range(12))
def test_batches_of_like_lengths_are_shared_whole_again_and_again(seed: int) -> None:
    history = random.Random(seed)
    options = {"window": 10, "budget": Budget(max_tokens=12), "length": length, "too_long": "drop"}
    sizes = [60] if seed % 2 else [history.randint(0, 40) for _ in range(7)]
    config = StreamConfig(
        sources={ALONE: Source(shards=Numbers(sizes), steps=(Step(LengthBatcher, options),))}, batch_size=None
    )
    state, batches = StreamState.beginning(config, 0, history.randint(1, 3), history.randint(1, 2)), []
    for _ in range(4):
        steps, state, _ = serve_epoch(state, history.randint(0, 4))
        batches += [batch for step in steps for batch in step]
        state = state.on(history.randint(1, 4), history.randint(1, 2))
    steps, state, _ = serve_epoch(state.on(1, 1))
    batches += [batch for step in steps for batch in step]
    assert all(len(batch) * max(map(length, batch)) <= 12 for batch in batches)
    too_long = [number for number in range(sum(sizes)) if length(number) > 12]
    assert sorted([number for batch in batches for number in batch] + too_long) == list(range(sum(sizes)))
    assert state.left_out == (0, 0, len(too_long))


@pytest.mark.parametrize("seed", range(12))
def test_the_same_ranks_go_on_in_the_same_order(seed: int) -> None:
    history = random.Random(seed)
    config = stream([history.randint(0, 30) for _ in range(history.randint(1, 7))], batch_size=3)
    ranks, workers = history.randint(1, 4), history.randint(1, 3)
    state = StreamState.beginning(config, 0, ranks, workers)
    whole, _, _ = serve_epoch(state)
    taken: list[Any] = []
    ended = False
    while not ended:
        steps, state, ended = serve_epoch(state, history.randint(1, 4))
        taken += steps
    assert taken == whole


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
@pytest.mark.parametrize("by", ["batch", "sample"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_sources_of_a_mixture_are_shared_evenly(stop: Any, by: Any, ranks: int) -> None:
    sources = {
        "one": Source(shards=Numbers([40, 3, 20, 1]), seed=1, shuffle=True),
        "two": Source(shards=Numbers([13, 50, 2], first=1000), seed=2, shuffle=True, buffer_size=5),
    }
    mixing = Mixing(("one", "two"), (1, 1), by=by, stop=stop, seed=3)
    config = StreamConfig(sources=sources, mixing=mixing, batch_size=2)
    state = StreamState.beginning(config, 0, ranks, 2)
    for _ in range(3):
        steps, state, _ = serve_epoch(state)
        assert abs(len(steps) - 128 / (2 * ranks)) <= 4
        state = state.following()


@pytest.mark.parametrize("knows_sizes", [True, False])
def test_shards_of_known_sizes_go_to_the_slot_with_the_least_to_read(knows_sizes: bool) -> None:
    config = stream([9, 1] * 4, shuffle=False, knows_sizes=knows_sizes)
    slices = StreamState.beginning(config, 0, 2, 1).slices[ALONE]
    loads = [sum((9, 1)[shard % 2] for slot_slice in slot for shard in slot_slice.of.shards) for slot in slices]
    assert loads == ([20, 20] if knows_sizes else [36, 4])


def test_a_slot_reads_no_shard_that_it_need_not() -> None:
    config = stream([10] * 32, buffer_size=0)
    shards: Any = config.sources[ALONE].shards
    serve_epoch(StreamState.beginning(config, 0, 4, 2))
    assert shards.num_read == 32


@pytest.mark.parametrize(
    ("sizes", "ranks", "num_read"),
    [([40] * 3, 2, 2 + 2), ([48] * 3, 16, 3 * 16), ([20, 20], 4, 4), ([20, 20], 40, 40), ([32, 34], 33, 33)],
    ids=["the last alone", "one team", "two teams", "two large teams", "two unequal teams"],
)
def test_as_few_ranks_read_a_shard_as_share_it(sizes: list[int], ranks: int, num_read: int) -> None:
    config = stream(sizes, shuffle=False, buffer_size=0, batch_size=1)
    shards: Any = config.sources[ALONE].shards
    steps, _, _ = serve_epoch(StreamState.beginning(config, 0, ranks, 1))
    assert sorted(flat(steps)) == list(range(sum(sizes)))
    assert shards.num_read == num_read


def test_of_many_ranks_teams_go_on_with_what_is_open() -> None:
    config = stream([66] * 2, shuffle=False, buffer_size=0, batch_size=1)
    shards: Any = config.sources[ALONE].shards
    steps, state, _ = serve_epoch(StreamState.beginning(config, 0, 2, 1), 1)
    shards.num_read = 0
    more, _, _ = serve_epoch(state.on(33, 1), 3)
    assert shards.num_read == 33
    assert len(set(flat(steps + more))) == 2 + 3 * 33


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("sizes", [[50, 3, 3, 3, 41], [37], SKEWED])
def test_no_sample_is_lost_over_ten_epochs(sizes: list[int], ranks: int, workers: int, drop_last: bool) -> None:
    config = stream(sizes, drop_last=drop_last, batch_size=4)
    state, served = StreamState.beginning(config, 0, ranks, workers), Counter[Any]()
    for epoch in range(10):
        steps, state, _ = serve_epoch(state)
        served.update(flat(steps))
        # At most a batch of each slot is left for the next epoch.
        assert sum(served.values()) >= (epoch + 1) * sum(sizes) - 4 * ranks * workers
        state = state.following()
    served.update(serve_rest(state)[0])
    assert served == dict.fromkeys(range(sum(sizes)), 11)


@pytest.mark.parametrize(
    "sizes", [[0] * 6 + [59], [0, 87, 1, 24, 0, 0, 69, 1, 33], [5, 78, 2, 0, 0, 37, 0, 2, 5, 0, 5, 0]]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_empty_shards_make_no_epoch_shorter_or_longer(sizes: list[int], ranks: int) -> None:
    state = StreamState.beginning(stream(sizes, batch_size=1), 0, ranks, 1)
    for _ in range(6):
        steps, state, _ = serve_epoch(state)
        assert abs(len(steps) - sum(sizes) / ranks) <= 2
        state = state.following()
