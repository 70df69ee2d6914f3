"""A worker slot makes batches of its shards: of one source, or of several that are mixed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from support.node_cases import is_kept
from support.slot_cases import alone, flat, mixture, serve, serve_epoch, slot_of, source

from lightning_stateful.errors import ShardError
from lightning_stateful.stream_nodes.transforms import FilterNode
from lightning_stateful.streams.source import Source, Transform
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig


def labels(batches: Sequence[Sequence[Any]]) -> str:
    """One letter for each batch: the source of its samples."""
    return "".join(batch[0][0] for batch in batches)


def first(slot: Any, number: int) -> list[Any]:
    """The next batches of a slot."""
    return [next(slot) for _ in range(number)]


TWO = {"a": [7, 2], "b": [3, 12]}
LAST_DROPPED = {"batch_size": 4, "drop_last": True}
CONFIGS: dict[str, StreamConfig] = {
    "in blocks": alone([5, 0, 7, 2], shuffle=True, buffer_size=6, batching=LAST_DROPPED),
    "not batched": alone([2, 3], batching={"batch_size": None, "is_batched": False}),
    "by state": alone([9, 8], of={"state_size": 20}, steps=(Transform(FilterNode, {"function": is_kept}),)),
    "by batch": mixture(TWO, batching={"batch_size": 2}, weights=[1, 3]),
    "by sample": mixture(TWO, batching=LAST_DROPPED, by="sample", weights=[2, 1]),
    "first exhausted": mixture(TWO, batching={"batch_size": 2}, stop="first_exhausted"),
    "cycle": mixture({"a": [3, 2], "b": [3, 12]}, batching=LAST_DROPPED, stop="cycle"),
    "cycle by sample": mixture({"a": [3, 2], "b": [3, 12]}, by="sample", stop="cycle", weights=[2, 1]),
}


@pytest.mark.parametrize(("ranks", "workers", "slot"), [(1, 1, 0), (2, 3, 2)])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_slot_goes_on_from_any_state_which_later_batches_leave_as_it_is(
    name: str, ranks: int, workers: int, slot: int
) -> None:
    config = CONFIGS[name]
    whole = list(slot_of(config, slot, ranks, workers, epoch=2))
    going = slot_of(config, slot, ranks, workers, epoch=2)
    states = [going.state(), *(going.state() for _ in going), going.state()]
    saved = [json.dumps(state) for state in states]
    for number, text in enumerate(saved):
        resumed = slot_of(config, slot, ranks, workers, epoch=2, state=json.loads(text))
        assert json.dumps(resumed.state()) == text
        assert list(resumed) == whole[number:]
    assert [json.dumps(state) for state in states] == saved


class TestBatches:
    def test_batches_run_over_shards(self) -> None:
        batches = list(slot_of(alone([3, 0, 4, 2], batching={"batch_size": 4})))
        assert [[sample[1:] for sample in batch] for batch in batches] == [
            [(0, 0), (0, 1), (0, 2), (2, 0)],
            [(2, 1), (2, 2), (2, 3), (3, 0)],
            [(3, 1)],
        ]

    def test_without_batches_samples_come_one_by_one(self) -> None:
        config = alone([2, 3], batching={"batch_size": None, "is_batched": False, "drop_last": True})
        assert [len(batch) for batch in slot_of(config)] == [1] * 5

    def test_what_does_not_fill_a_batch_stays_where_it_is(self) -> None:
        slot = slot_of(alone([5, 5], batching={"batch_size": 4, "drop_last": True}))
        list(slot)
        at = slot.state()["of"][ALONE]["state"]["source"]
        assert (at["shard"], at["item"]) == (1, 3)


def test_sizes_that_decide_who_reads_a_shard_are_part_of_the_configuration() -> None:
    described = [alone(sizes, of={"knows_sizes": True}).describe() for sizes in ([1, 2], [2, 1], [1, 2])]
    assert described[0] == described[2] != described[1]


class TestErrors:
    @pytest.mark.parametrize("how", [{"by": "batch"}, {"by": "sample"}, {"by": "sample", "stop": "cycle"}])
    @pytest.mark.parametrize(("sizes", "bad"), [([8], 5), ([4], 4), ([2], 9)])
    @pytest.mark.parametrize("batching", [{"batch_size": 4}, {"batch_size": 3, "drop_last": True}])
    def test_an_error_in_one_source_leaves_the_others_as_after_the_latest_batch(
        self, how: Any, sizes: list[int], bad: int, batching: Any
    ) -> None:
        fails: dict[int, int] = {}
        config = mixture({"a": sizes, "b": source([12], of={"label": "b", "fails": fails})}, batching=batching, **how)
        whole = list(slot_of(config))
        fails[0] = bad
        slot = slot_of(config)
        batches: list[Any] = []
        with pytest.raises(ShardError, match="b-0"):
            batches.extend(slot)
        fails.clear()
        assert batches + list(slot_of(config, state=slot.state())) == whole

    def test_an_error_as_a_source_begins_again_leaves_it_where_its_round_ended(self) -> None:
        fails: dict[int, int] = {}
        config = mixture(
            {"a": source([4], of={"label": "a", "fails": fails}), "b": [12]}, batching={"batch_size": 2}, stop="cycle"
        )
        whole = list(slot_of(config))
        slot = slot_of(config)
        batches = first(slot, 4)
        fails[0] = -1
        with pytest.raises(ShardError, match="a-0"):
            next(slot)
        fails.clear()
        assert batches + list(slot_of(config, state=slot.state())) == whole


class TestByBatch:
    def test_the_order_of_draws_follows_from_seed_and_pass(self) -> None:
        def drawn(seed: int, epoch: int) -> str:
            return labels(first(slot_of(mixture({"a": [200], "b": [200]}, weights=[1, 1], seed=seed), epoch=epoch), 60))

        assert drawn(0, 0) == drawn(0, 0)
        assert len({drawn(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9

    @pytest.mark.parametrize("workers", [1, 3])
    @pytest.mark.parametrize("weights", [None, [5, 3]])
    def test_all_ranks_take_a_step_from_the_same_source_as_long_as_none_is_exhausted(
        self, workers: int, weights: Any
    ) -> None:
        config = mixture(dict.fromkeys("ab", [200] * 18), batching={"batch_size": 4}, weights=weights, seed=5)
        period = 2 if weights is None else sum(weights)
        steps, _, _ = serve(StreamState.beginning(config, 1, 3, workers), 4 * period * workers)
        assert all(len({sample[0] for batch in step for sample in batch}) == 1 for step in steps)
        exact = Counter(a=1, b=1) if weights is None else Counter(a=weights[0], b=weights[1])
        of_workers = [labels([step[0] for step in steps[worker::workers]]) for worker in range(workers)]
        for worker, drawn in enumerate(of_workers):
            # Each goes through the whole sequence, as many draws ahead as its number says.
            assert drawn[: -worker or None] == of_workers[0][worker:]
            periods = [drawn[begin : begin + period] for begin in range(-worker % period, 3 * period, period)]
            assert all(Counter(one) == exact for one in periods)

    def test_the_rest_come_in_their_proportions_once_one_is_exhausted(self) -> None:
        drawn = labels(list(slot_of(mixture({"a": [4], "b": [60], "c": [60]}, weights=[2, 1, 1]))))
        assert Counter(drawn) == {"a": 4, "b": 60, "c": 60}
        after = drawn[drawn.rindex("a") + 1 :]
        assert all(abs(after[:end].count("b") - after[:end].count("c")) <= 3 for end in range(len(after)))


class TestBySample:
    def test_shares_are_exact_in_every_period_of_samples(self) -> None:
        config = mixture({"a": [900], "b": [900]}, batching={"batch_size": 7}, by="sample", weights=[3, 2], seed=1)
        samples = [sample[0] for batch in first(slot_of(config), 100) for sample in batch]
        periods = ["".join(samples[begin : begin + 5]) for begin in range(0, 700, 5)]
        assert all(Counter(one) == {"a": 3, "b": 2} for one in periods)
        assert len(set(periods)) > 5

    def test_batches_are_full_until_all_are_exhausted(self) -> None:
        batches = list(slot_of(mixture({"a": [9], "b": [4]}, batching={"batch_size": 4}, by="sample")))
        assert [len(batch) for batch in batches] == [4, 4, 4, 1]
        assert len({sample for batch in batches for sample in batch}) == 13
        assert [sample[0] for sample in batches[0]] == ["a", "b", "a", "b"]

    def test_what_does_not_fill_a_batch_stays_in_each_source(self) -> None:
        config = mixture({"a": [5], "b": [5]}, batching={"batch_size": 4, "drop_last": True}, by="sample")
        steps, state, _ = serve_epoch(StreamState.beginning(config, 0, 1, 1))
        assert len(flat(steps)) == 8
        following, _, _ = serve(state.following(), 1)
        assert sorted(sample for sample in flat(following) if sample[1] == 0) == [("a", 0, 0, 4), ("b", 0, 0, 4)]


class TestStop:
    @pytest.mark.parametrize("by", ["batch", "sample"])
    @pytest.mark.parametrize(
        ("stop", "expected"),
        # That the longest is exhausted shows where its next draw comes.
        [("all_exhausted", "ababbbb"), ("first_exhausted", "abab"), ("cycle", "abababababa")],
    )
    def test_the_rules(self, by: str, stop: str, expected: str) -> None:
        assert labels(list(slot_of(mixture({"a": [2], "b": [5]}, by=by, stop=stop)))) == expected

    @pytest.mark.parametrize("by", ["batch", "sample"])
    def test_first_exhausted_leaves_the_rest_to_the_next_pass(self, by: str) -> None:
        config = mixture({"a": [6], "b": [20]}, batching={"batch_size": 2}, by=by, stop="first_exhausted")
        steps, state, _ = serve_epoch(StreamState.beginning(config, 0, 1, 1))
        following, _, _ = serve_epoch(state.following())
        of_b = [sample for sample in flat(steps + following) if sample[0] == "b"]
        assert Counter(sample[0] for sample in flat(steps))["a"] == 6
        assert 10 <= len(of_b) <= 14
        assert of_b == [("b", 0, 0, number) for number in range(len(of_b))]

    @pytest.mark.parametrize("by", ["batch", "sample"])
    def test_cycle_begins_again_with_another_pass_each_time(self, by: str) -> None:
        config = mixture({"a": [3], "b": [20]}, by=by, stop="cycle")
        steps, state, _ = serve_epoch(StreamState.beginning(config, 4, 1, 1))
        served = flat(steps)
        of_a = [sample for sample in served if sample[0] == "a"]
        assert [sample for sample in served if sample[0] == "b"] == [("b", 4, 0, number) for number in range(20)]
        assert of_a == [("a", 4 + number // 3, 0, number % 3) for number in range(len(of_a))]
        assert 20 <= len(of_a) <= 21
        # The next pass has samples that were not served.
        assert not set(served) & set(flat(serve_epoch(state.following())[0]))

    def test_full_batches_of_a_cycle_leave_nothing_out_between_its_rounds(self) -> None:
        batches = slot_of(mixture({"a": [5], "b": [40]}, batching=LAST_DROPPED, stop="cycle"))
        of_a = [sample for batch in batches for sample in batch if sample[0] == "a"]
        assert of_a == [("a", number // 5, 0, number % 5) for number in range(len(of_a))]
        assert len(of_a) >= 36

    def test_rounds_of_a_cycle_have_orders_of_their_own(self) -> None:
        small = source([10], of={"label": "a"}, buffer_size=10)
        batches = slot_of(mixture({"a": small, "b": [60]}, stop="cycle"))
        numbers = [sample[3] for batch in batches for sample in batch if sample[0] == "a"]
        rounds = [tuple(numbers[begin : begin + 10]) for begin in range(0, 60, 10)]
        assert all(sorted(one) == list(range(10)) for one in rounds)
        assert len(set(rounds)) == 6

    @pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2), (5, 1)])
    def test_a_source_that_begins_again_is_read_whole_by_all_slots_together(self, ranks: int, workers: int) -> None:
        config = mixture({"a": [4] * 3, "b": [12] * 20}, stop="cycle")
        begun = StreamState.beginning(config, 0, ranks, workers)
        served: list[Any] = []
        for slot in range(begun.num_slots):
            reader = slot_of(config, slot, ranks, workers)
            found = [sample for batch in reader for sample in batch if sample[:2] == ("a", 1)]
            assert found
            served += found
        assert sorted(served) == config.sources["a"].shards.all(1)  # type: ignore[attr-defined]  # numbered shards

    @pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
    def test_sources_without_a_sample_end_like_others(self, stop: str) -> None:
        drawn = labels(list(slot_of(mixture({"a": [0, 0], "b": [3]}, stop=stop))))
        assert drawn == ("bbb" if stop == "all_exhausted" else "")

    @pytest.mark.timeout(30)
    @pytest.mark.parametrize("by", ["batch", "sample"])
    @pytest.mark.parametrize(
        "small",
        [
            source([0], of={"label": "a"}),
            source([5], of={"label": "a"}, steps=(Transform(FilterNode, {"function": lambda _: False}),)),
            source([5], of={"label": "a", "fails": {0: 0}}, on_error="skip"),
        ],
        ids=["empty", "filtered away", "unreadable"],
    )
    def test_a_source_that_gives_nothing_does_not_begin_again_for_ever(self, small: Source, by: str) -> None:
        config = mixture({"a": small, "b": [8, 8]}, batching={"batch_size": 2}, by=by, stop="cycle")
        assert labels(list(slot_of(config))) == "b" * 8

    @pytest.mark.timeout(30)
    def test_a_source_smaller_than_a_batch_does_not_begin_again_for_ever(self) -> None:
        config = mixture({"a": [3], "b": [8, 8]}, batching={"batch_size": 4, "drop_last": True}, stop="cycle")
        assert Counter(labels(list(slot_of(config))))["b"] == 4
