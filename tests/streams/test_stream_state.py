"""The state of all worker slots says everything: what follows on the same slots, and each sample once on any others."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.node_cases import is_kept
from support.slot_cases import (
    all_samples,
    alone,
    flat,
    mixture,
    round_trip,
    serve,
    serve_epoch,
    serve_rest,
    source,
    take,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.stream_nodes import shard_reader
from lightning_stateful.stream_nodes.transforms import FilterNode, MapNode, WindowNode
from lightning_stateful.streams.source import Source, Transform
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig

TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 2), (4, 1), (17, 1), (33, 1)]


@pytest.fixture(autouse=True, scope="module")
def _states_of_small_shards() -> Iterator[None]:
    """Take a state at every few samples instead of every 256, for shards as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reader, "_LEAST_GAP", 1)
        yield


def is_served(sample: Any) -> bool:
    """Whether the filter of these tests keeps a sample, the functions of these tests take it, and it can be read."""
    return is_kept(sample) and sample[-1] % 7 != 5


def refuses(sample: Any) -> Any:
    """A function that fails on some samples."""
    if sample[-1] % 7 == 5:
        raise ValueError(sample)
    return sample


SKIPPING = (Transform(FilterNode, {"function": is_kept}), Transform(MapNode, {"function": refuses}))


@st.composite
def sources(draw: st.DrawFn, label: str) -> Source:
    """A source of any kind."""
    return source(
        draw(st.lists(st.sampled_from([0, 1, 2, 5, 9, 20]), min_size=1, max_size=8)),
        of={
            "label": label,
            "state_size": draw(st.sampled_from([None, 0, 60])),
            "knows_sizes": draw(st.booleans()),
            "fails": draw(st.dictionaries(st.integers(0, 7), st.integers(-1, 9), max_size=2)),
        },
        shuffle=draw(st.booleans()),
        buffer_size=draw(st.sampled_from([0, 3, 7, 50])),
        steps=draw(st.sampled_from([(), SKIPPING])),
        on_error="skip",
    )


@st.composite
def configs(draw: st.DrawFn) -> StreamConfig:
    """One source, or a mixture."""
    batching: dict[str, Any] = {"batch_size": draw(st.integers(1, 5)), "drop_last": draw(st.booleans())}
    parts = {f"s{number}": draw(sources(f"s{number}")) for number in range(draw(st.integers(1, 3)))}
    if len(parts) == 1:
        return StreamConfig(sources={ALONE: parts["s0"]}, **batching)
    how: dict[str, Any] = {
        "by": draw(st.sampled_from(["batch", "sample"])),
        "stop": draw(st.sampled_from(["all_exhausted", "first_exhausted"])),
        "weights": draw(st.none() | st.lists(st.integers(1, 4), min_size=len(parts), max_size=len(parts))),
    }
    return mixture(parts, batching=batching, **how)


def expected(state: StreamState) -> tuple[list[Any], int, int]:
    """The samples to serve of all passes that were begun; bad shards in them, and samples that functions refuse."""
    served, bad, refused = [], 0, 0
    for name, part in state.config.sources.items():
        fails, counts = part.shards.fails, part.shards.counts  # type: ignore[attr-defined]  # numbered shards
        passes = state.assignments[name].epoch + 1
        bad += passes * sum(fails.get(shard, size + 1) <= size for shard, size in enumerate(counts))
        only = replace(state, config=StreamConfig(sources={name: part}), assignments={name: state.assignments[name]})
        readable = [sample for sample in all_samples(only) if sample[-1] < fails.get(sample[-2], 99) != -1]
        served += [sample for sample in readable if not part.steps or is_served(sample)]
        refused += sum(is_kept(sample) and not is_served(sample) for sample in readable if part.steps)
    return served, bad, refused


@given(config=configs(), data=st.data())
@pytest.mark.slow
def test_every_sample_comes_once_whatever_ranks_workers_and_passes_come_and_go(
    config: StreamConfig, data: st.DataObject
) -> None:
    state, served = StreamState.beginning(config, 0, *data.draw(st.sampled_from(TOPOLOGIES))), []
    counted: tuple[int, ...] = (0, 0, 0)
    for _ in range(data.draw(st.integers(1, 5), "stops")):
        if data.draw(st.booleans(), "uneven"):
            batches = data.draw(
                st.lists(st.integers(0, 6) | st.none(), min_size=state.num_slots, max_size=state.num_slots)
            )
            samples, state = take(state, *batches)
            is_over = False
        else:
            steps, state, is_over = serve_epoch(state, data.draw(st.integers(0, 6) | st.none(), "steps"))
            samples = flat(steps)
        served += samples
        if is_over or data.draw(st.booleans(), "next pass"):
            state = round_trip(state.following())
        state = round_trip(state.on(*data.draw(st.sampled_from(TOPOLOGIES))))
        assert all(now >= before for now, before in zip(state.left_out, counted, strict=True))
        counted = state.left_out
    rest, end = serve_rest(state)
    samples, bad, refused = expected(end)
    assert sorted(served + rest) == sorted(samples)
    # Of what several slots read, some may be counted once more where it was assigned anew.
    assert all(now >= least for now, least in zip(end.left_out, (bad, refused, 0), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_comes_twice_where_sources_begin_again(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: [rng.choice([3, 5, 9]) for _ in range(rng.randint(1, 8))] for name in "abc"[: rng.randint(2, 3)]}
    how = {"by": rng.choice(["batch", "sample"]), "weights": [rng.randint(1, 4) for _ in sizes]}
    batching = {"batch_size": rng.randint(1, 3), "drop_last": seed % 3 == 0}
    config = mixture(sizes, batching=batching, stop="cycle", **how)
    topologies = [(1, 1), (2, 1), (1, 2), (3, 1)]
    state, served = StreamState.beginning(config, 0, *rng.choice(topologies)), Counter[Any]()
    for _ in range(rng.randint(1, 6)):
        steps, state, is_over = serve_epoch(state, rng.choice([None, 1, 3, 6]))
        served.update(flat(steps))
        state = round_trip((state.following() if is_over else state).on(*rng.choice(topologies)))
    assert set(served.values()) <= {1}


@pytest.mark.parametrize("seed", range(4))
def test_where_passes_end_with_the_first_source_the_others_go_on_over_passes(seed: int) -> None:
    rng = random.Random(seed)
    parts = {"small": [3] * 3, "large": source([4] * 30, of={"label": "large"}, shuffle=True)}
    how = {"by": rng.choice(["batch", "sample"]), "weights": [rng.randint(1, 3) for _ in parts]}
    config = mixture(parts, batching={"batch_size": rng.randint(1, 3)}, stop="first_exhausted", **how)
    state, served = StreamState.beginning(config, 0, *rng.choice(TOPOLOGIES[:5])), []
    for _ in range(5):
        steps, state, _ = serve_epoch(state)
        served += flat(steps)
        state = round_trip(state.following())
        # No pass begins a source anew of which more than half is left.
        assert len(state.assignments["large"].whole) <= 45
        state = round_trip(state.on(*rng.choice(TOPOLOGIES[:5])))
    assert state.assignments["large"].epoch < state.epoch
    assert sorted(served + serve_rest(state)[0]) == sorted(all_samples(state))


class TestTheSameSlots:
    def test_the_same_slots_are_assigned_nothing_anew(self) -> None:
        _, state = take(StreamState.beginning(alone([9] * 5), 0, 2, 2), 1, 0, 2, 1)
        assert state.on(2, 2) is state
        # As many slots in another arrangement are others.
        assert state.on(4, 1).slots == (None,) * 4

    @pytest.mark.parametrize("seed", range(5))
    def test_a_mixture_that_is_shared_anew_goes_on_from_any_step(self, seed: int) -> None:
        rng = random.Random(seed)
        config = mixture(
            {"a": [rng.randint(0, 20) for _ in range(5)], "b": [rng.randint(0, 20) for _ in range(3)], "c": [4]},
            batching={"batch_size": rng.randint(1, 3)},
            by=rng.choice(["batch", "sample"]),
            weights=rng.choice([None, [1, 2, 1]]),
        )
        begun = StreamState.beginning(config, 0, rng.randint(1, 4), rng.randint(1, 2))
        whole, end, _ = serve_epoch(begun)
        taken: list[Any] = []
        state, is_over = begun, False
        while not is_over:
            steps, state, is_over = serve_epoch(state, rng.randint(1, 4))
            taken += steps
            assert state.shards_left().keys() == state.on(5, 1).shards_left().keys()
        assert taken == whole
        assert state.following().to_dict()["sources"] == end.following().to_dict()["sources"]


class TestFollowing:
    def test_what_is_left_comes_first_in_the_next_pass(self) -> None:
        _, state, _ = serve(StreamState.beginning(alone([4, 4, 20, 20]), 0, 2, 1), 4)
        following, _, _ = serve(state.following(), 2)
        assert state.following().epoch == 1
        assert {sample[0] for sample in flat(following)} == {0}

    def test_a_pass_read_to_its_end_leaves_nothing(self) -> None:
        begun = StreamState.beginning(alone([5, 4, 3], shuffle=True), 3, 1, 2)
        _, state, _ = serve_epoch(begun)
        following = StreamState.beginning(begun.config, 4, 1, 2).to_dict()
        assert {**state.following().to_dict(), "steps_before": 0} == following
        assert state.report()["shards_left"] == 0

    @pytest.mark.parametrize(
        "config",
        [
            alone([9, 1, 1, 9, 30], shuffle=True, batching={"batch_size": 2, "drop_last": True}),
            mixture({"small": [4] * 2, "large": [4] * 40}, stop="first_exhausted"),
        ],
    )
    def test_passes_do_not_pile_up(self, config: StreamConfig) -> None:
        state, sizes = StreamState.beginning(config, 0, 3, 1), []
        for _ in range(8):
            _, state, _ = serve_epoch(state)
            state = state.following()
            sizes.append(len(json.dumps(state.to_dict())))
        assert sizes[-1] < 2 * sizes[0]


class TestOtherSlots:
    config = alone([6] * 8, buffer_size=4, of={"state_size": 0}, batching={"batch_size": 1})
    _, state = take(StreamState.beginning(config, 0, 2, 1), 5, 7)
    other = state.on(1, 3)
    # A block of slot 1 reaches into its second shard.
    assert [piece.shards for piece in other.assignments[ALONE].begun] == [(0, 2), (1, 3)]
    assert other.assignments[ALONE].whole == ((0, 4), (0, 5), (0, 6), (0, 7))
    assert (other.steps, other.steps_before, other.slots) == (0, 1, (None,) * 3)


class TestStates:
    def test_writing_reading_and_going_on_leave_a_state_as_it_is(self) -> None:
        config = alone([6] * 4, buffer_size=3, shuffle=True, of={"state_size": 0})
        data = take(StreamState.beginning(config, 0, 2, 1), 3, 5)[1].on(3, 1).to_dict()
        kept = copy.deepcopy(data)
        state = StreamState.from_dict(data, config)
        serve_epoch(state)
        serve_epoch(state.on(2, 1))
        serve_epoch(state.following())
        assert data == kept

    def test_the_state_of_many_shards_is_small(self) -> None:
        config = alone([3] * 20_000, shuffle=True, buffer_size=1000)
        _, state = take(StreamState.beginning(config, 0, 4, 2), *[40] * 8)
        # A few hundred characters for each slot, none for each shard.
        assert len(json.dumps(state.to_dict())) < 8 * 400
        assert len(json.dumps(state.on(8, 1).to_dict())) < 8 * 4000

    def test_a_rank_may_know_nothing_of_the_others(self) -> None:
        begun = StreamState.beginning(alone([6] * 8), 0, 2, 1)
        _, state = take(begun, 2, 1)
        own = round_trip(begun.at((state.slots[0], None), 2))
        assert [slot is not None for slot in own.slots] == [True, False]
        assert not own.is_known
        assert state.is_known


FIVE = alone([6] * 5)
OF_SLOT = ("slots", 0, "of", ALONE)


@pytest.mark.parametrize(
    ("config", "path", "value", "said"),
    [
        (alone([6] * 2), (), None, r"names shard 4, and there are 2"),
        (FIVE, (*OF_SLOT, "slice"), 9, "in slice 9 of 2"),
        (FIVE, (*OF_SLOT, "opened"), 9, "has opened 9 of 2"),
        (FIVE, (*OF_SLOT, "state", "source", "shard"), 9, "lies in shard 9 of 2"),
        (FIVE, (*OF_SLOT, "state", "source", "shard"), -1, "shard must be an integer from 0 to .*, got -1"),
        (FIVE, ("slots",), [None] * 3, "has 3 worker slots of 2"),
        (alone([6] * 5, steps=(Transform(WindowNode, {"width": 2}),)), (), None, r"source lacks .*; its keys are"),
        (mixture({"a": [4], "b": [5]}), (), None, r"has the sources \[''\], and there are \['a', 'b'\]"),
    ],
)
def test_a_state_that_another_stream_has_written_is_refused(config: Any, path: Any, value: Any, said: str) -> None:
    _, state = take(StreamState.beginning(FIVE, 0, 2, 1), 2, 1)
    data = part = json.loads(json.dumps(state.to_dict()))
    for key in path[:-1]:
        part = part[key]
    if path:
        part[path[-1]] = value
    with pytest.raises((PositionError, DamagedStateError), match=said):
        StreamState.from_dict(data, config)


class TestReports:
    def test_what_has_to_be_read_again_goes_by_the_shards_name(self) -> None:
        config = alone([9] * 4, buffer_size=4, batching={"batch_size": 1})
        begun = StreamState.beginning(config, 0, 2, 1)
        _, state = take(begun, 6, 2)
        assert state.read_again() == {}
        config.sources[ALONE].shards.reread = "it has no state"
        assert state.read_again() == {"shard-0.bin": 4}
        assert state.read_again([1]) == {}
        _, state = take(begun, 5, 9)
        assert state.read_again() == {"shard-0.bin": 4, "shard-1.bin": 8}
        # As many on other ranks, each of which reads what they share.
        assert state.on(3, 1).read_again() == {"shard-0.bin": 4, "shard-1.bin": 8}
        again = state.begun_again()
        assert again.read_again() == {}
        assert serve_epoch(again)[0] == serve_epoch(begun)[0]

    def test_shards_of_several_sources_count_each(self) -> None:
        begun = StreamState.beginning(mixture({"a": [4], "b": [4, 4]}, batching={"batch_size": 1}), 0, 1, 1)
        _, state = take(begun, 2)
        assert (begun.report()["shards_left"], state.report()["shards_left"]) == (3, 3)

    def test_shards_and_samples_that_were_left_out_are_counted(self) -> None:
        config = alone(
            [4] * 6,
            on_error="skip",
            steps=(Transform(MapNode, {"function": _fails_at_two}),),
            of={"fails": {0: 1, 3: -1}},
            batching={"batch_size": 1},
        )
        _, state = take(StreamState.beginning(config, 5, 2, 1), 4, 0)
        # Shards 0, 2, 4 of slot 0: one bad, one read but for one sample; the third not begun.
        assert state.report() == {
            "pass": 5, "shards_left": 5, "shards_skipped": 1, "samples_skipped": 1, "samples_too_long": 0,
        }  # fmt: skip
        _, end = serve_rest(state)
        assert end.left_out == end.following().on(3, 1).left_out == (2, 4, 0)

    @pytest.mark.parametrize(
        ("sizes", "bad", "batches", "expected"),
        [([9], 0, (1, 5), 0), ([9], 0, (5, 1), 1), ([9], 0, (9, 9), 2), ([1, 1, 9], 2, (3, 7), 0)],
        ids=["the first before it", "the first behind it", "again", "the first before it, of several"],
    )
    def test_of_a_shared_shard_what_its_first_reader_has_left_out_counts(
        self, sizes: list[int], bad: int, batches: tuple[int, int], expected: int
    ) -> None:
        small = source(sizes, of={"label": "a", "fails": {bad: 4}}, on_error="skip")
        begun = StreamState.beginning(mixture({"a": small, "b": [50, 50]}, stop="cycle"), 0, 2, 1)
        assert take(begun, *batches)[1].left_out == (expected, 0, 0)

    def test_what_is_known(self) -> None:
        begun = StreamState.beginning(alone([3, 3], batching={"batch_size": 1}), 0, 2, 1)
        assert not begun.is_known
        assert serve(begun, 1)[1].is_known


def _fails_at_two(sample: Any) -> Any:
    if sample[-1] == 2:
        raise ValueError(sample)
    return sample


class TestWorkersInTurn:
    @pytest.mark.parametrize("batches", [[3, 9], [6, 0]])
    def test_torch_asks_its_workers_in_the_order_that_these_tests_do(self, batches: list[int]) -> None:
        loader = DataLoader(Uneven(batches), batch_size=None, num_workers=2, multiprocessing_context="fork")
        state = StreamState.beginning(alone([2 * number for number in batches]), 0, 1, 2)
        assert list(loader) == [batch[0][1] for step in serve(state)[0] for batch in step]


class Uneven(IterableDataset[int]):
    """Each worker gives its number some times."""

    def __init__(self, batches: list[int]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        worker: Any = get_worker_info()
        yield from [worker.id] * self.batches[worker.id]
