"""Shards are assigned to worker slots in even shares, on any ranks and workers, again and again."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from support.slot_cases import alone, flat, mixture, serve_epoch, serve_rest

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.stream_nodes.read_ahead import LengthBatcher
from lightning_stateful.stream_nodes.transforms import RunningStateNode, WindowNode
from lightning_stateful.streams.source import Transform
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig

SKEWED = [500, 200, 100, 50, 50, 50, 25, 25]


def stream(sizes: Sequence[int], *, batch_size: int = 8, drop_last: bool = False, **options: Any) -> StreamConfig:
    """A stream of shards of these sizes."""
    batching = {"batch_size": batch_size, "drop_last": drop_last}
    return alone(sizes, batching=batching, **{"shuffle": True, "buffer_size": 7, "seed": 1, **options})


def in_order(sizes: Sequence[int], **options: Any) -> StreamConfig:
    """The same, not shuffled, in batches of one."""
    return stream(sizes, **{"shuffle": False, "buffer_size": 0, "batch_size": 1, **options})


def opened(config: StreamConfig) -> int:
    """The number of times that shards were opened so far."""
    return int(config.sources[ALONE].shards.asked["opened"])  # type: ignore[attr-defined]  # numbered shards


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [(1, 1), (8, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (3, 1), (3, 2), (8, 1)))],
)
@pytest.mark.parametrize("sizes", [[1000], [143] * 6 + [142], [10] * 100, SKEWED, [0, 87, 1, 0, 69, 0]])
def test_an_epoch_has_as_many_steps_as_are_due(ranks: int, workers: int, sizes: list[int]) -> None:
    for knows_sizes in (False, True):
        state = StreamState.beginning(stream(sizes, of={"knows_sizes": knows_sizes}), 0, ranks, workers)
        for _ in range(2):
            steps, state, _ = serve_epoch(state)
            assert abs(len(steps) - math.ceil(sum(sizes) / (8 * ranks))) <= 2
            served = flat(steps)
            assert len(set(served)) == len(served) >= sum(sizes) - 8 * ranks * workers
            state = state.following()


@pytest.mark.parametrize("sizes", [[0] * 6 + [59], [5, 78, 2, 0, 0, 37, 0, 2, 5, 0, 5, 0]])
def test_empty_shards_make_no_epoch_shorter_or_longer(sizes: list[int]) -> None:
    state = StreamState.beginning(stream(sizes, batch_size=1), 0, 4, 1)
    for _ in range(6):
        steps, state, _ = serve_epoch(state)
        assert abs(len(steps) - sum(sizes) / 4) <= 2
        state = state.following()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("ranks", "workers", "sizes"),
    [
        (3, 2, [50, 3, 3, 3, 41]),
        pytest.param(3, 2, [37], marks=pytest.mark.slow),
        pytest.param(5, 1, [50, 3, 3, 3, 41], marks=pytest.mark.slow),
        (5, 1, [37]),
    ],
)
def test_no_sample_is_lost_over_ten_epochs(ranks: int, workers: int, sizes: list[int], drop_last: bool) -> None:
    config = stream(sizes, drop_last=drop_last, batch_size=4)
    state, served = StreamState.beginning(config, 0, ranks, workers), Counter[Any]()
    for epoch in range(10):
        steps, state, _ = serve_epoch(state)
        served.update(flat(steps))
        # At most a batch of each slot is left for the next epoch.
        assert served.total() >= (epoch + 1) * sum(sizes) - 4 * ranks * workers
        state = state.following()
    served.update(serve_rest(state)[0])
    assert set(served.values()) == {1}
    assert served.total() == 11 * sum(sizes)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
@pytest.mark.parametrize("by", ["batch", "sample"])
def test_sources_of_a_mixture_are_shared_evenly(stop: Any, by: Any) -> None:
    config = mixture({"one": [40, 3, 20, 1], "two": [13, 50, 2]}, batching={"batch_size": 2}, by=by, stop=stop, seed=3)
    state = StreamState.beginning(config, 0, 3, 2)
    for _ in range(3):
        steps, state, _ = serve_epoch(state)
        assert abs(len(steps) - 128 / (2 * 3)) <= 4
        state = state.following()


@pytest.mark.parametrize("knows_sizes", [True, False])
def test_shards_of_known_sizes_go_to_the_slot_with_the_least_to_read(knows_sizes: bool) -> None:
    config = in_order([9, 1] * 4, of={"knows_sizes": knows_sizes})
    slices = StreamState.beginning(config, 0, 2, 1).slices[ALONE]
    loads = [sum((9, 1)[shard % 2] for slot_slice in slot for shard in slot_slice.of.shards) for slot in slices]
    assert loads == ([20, 20] if knows_sizes else [36, 4])


@pytest.mark.parametrize(
    ("sizes", "ranks", "num_opened"),
    [([10] * 32, 8, 32), ([40] * 3, 2, 2 + 2), ([48] * 3, 16, 3 * 16), ([20, 20], 4, 4), ([32, 34], 33, 33)],
    ids=["each alone", "the last together", "one team", "two teams", "two large unequal teams"],
)
def test_as_few_ranks_read_a_shard_as_share_it(sizes: list[int], ranks: int, num_opened: int) -> None:
    config = in_order(sizes)
    steps, _, _ = serve_epoch(StreamState.beginning(config, 0, ranks, 1))
    assert len(set(flat(steps))) == sum(sizes)
    assert opened(config) == num_opened


def test_of_many_ranks_teams_go_on_with_what_is_open() -> None:
    config = in_order([66] * 2)
    steps, state, _ = serve_epoch(StreamState.beginning(config, 0, 2, 1), 1)
    before = opened(config)
    more, _, _ = serve_epoch(state.on(33, 1), 3)
    assert opened(config) - before == 33
    assert len(set(flat(steps + more))) == 2 + 3 * 33


def test_a_shard_that_one_of_its_readers_has_finished_is_not_assigned_anew() -> None:
    config = stream([0, 1, 0, 29, 0, 0, 13], batch_size=3, buffer_size=0)
    steps, state, _ = serve_epoch(StreamState.beginning(config, 0, 4, 1), 4)
    rest, _, _ = serve_epoch(state.on(1, 1))
    served = flat(steps + rest)
    assert len(served) == len(set(served)) == 43


@pytest.mark.parametrize(
    "step",
    [
        Transform(WindowNode, {"width": 3, "step": 2}),
        Transform(RunningStateNode, {"function": lambda state, value: ((value, state), state + 1), "initial": 0}),
    ],
    ids=["windows", "running state"],
)
def test_nodes_that_look_back_give_the_same_on_other_ranks(step: Transform) -> None:
    config = in_order([30], steps=(step,), batch_size=2)
    expected = sorted(flat(serve_epoch(StreamState.beginning(config, 0, 1, 1))[0]))
    for seed in range(6):
        history = random.Random(seed)
        state, served = StreamState.beginning(config, 0, 2, 1), []
        for _ in range(3):
            taken, state, _ = serve_epoch(state, history.randint(0, 3))
            served += flat(taken)
            state = state.on(history.randint(1, 3), history.randint(1, 2))
        served += flat(serve_epoch(state.on(1, 1))[0])
        assert sorted(served) == expected


def length(sample: Any) -> int:
    """The number of tokens of a sample; some are too long."""
    return 1 + int(sample[-1]) % 17


@pytest.mark.parametrize("seed", range(4))
def test_batches_of_like_lengths_are_shared_whole_again_and_again(seed: int) -> None:
    history = random.Random(seed)
    batcher = Transform(
        LengthBatcher, {"window": 10, "budget": Budget(max_tokens=12, too_long="drop"), "length": length}
    )
    sizes = [60] if seed % 2 else [history.randint(0, 40) for _ in range(7)]
    config = alone(sizes, steps=(batcher,), batching={"batch_size": None})
    state, batches = StreamState.beginning(config, 0, history.randint(1, 3), history.randint(1, 2)), []
    for _ in range(4):
        steps, state, _ = serve_epoch(state, history.randint(0, 4))
        batches += [batch for step in steps for batch in step]
        state = state.on(history.randint(1, 4), history.randint(1, 2))
    steps, state, _ = serve_epoch(state.on(1, 1))
    batches += [batch for step in steps for batch in step]
    assert all(len(batch) * max(map(length, batch)) <= 12 for batch in batches)
    every = config.sources[ALONE].shards.all(0)  # type: ignore[attr-defined]  # numbered shards
    too_long = [sample for sample in every if length(sample) > 12]
    assert sorted([sample for batch in batches for sample in batch] + too_long) == sorted(every)
    assert state.left_out[2] >= len(too_long)
