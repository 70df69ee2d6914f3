"""What one lane makes of its portions: batches of one source, or of several that have their turns."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
from support.shards import Crew, Value, config, mixed_config, open_lane, source, torch_turns
from test_running import assert_obeys

from lightning_stateful.errors import ConfigurationError, ShardError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams import reading
from lightning_stateful.streams.lane import ALONE, LaneBatch, StreamConfig
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Open
from lightning_stateful.streams.standing import Standing
from lightning_stateful.streams.steps import Filtered, Mapped


@pytest.fixture(autouse=True)
def _states_of_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for a state every 64 items holds for shards of a few, as these tests have."""
    monkeypatch.setattr(reading, "_LEAST_GAP", 1)


def lane_of(of: StreamConfig, lanes: tuple[int, int] = (1, 1), lane: int = 0, epoch: int = 0) -> Open:
    """Opens a lane of a pass."""
    standing = Standing.beginning(of, epoch, *lanes)
    return lambda place: open_lane(standing, lane, place)


def values(batches: Sequence[LaneBatch]) -> list[list[Value]]:
    return [batch.values for batch in batches]


def labels(batches: Sequence[LaneBatch]) -> str:
    """One letter for each batch: the source of its samples."""
    return "".join(batch.values[0][0] for batch in batches)


def two(first: Sequence[int], second: Sequence[int], **options: Any) -> StreamConfig:
    """Sources ``a`` and ``b``."""
    return mixed_config({"a": source(first, label="a"), "b": source(second, label="b")}, **options)


CONFIGS: dict[str, StreamConfig] = {
    "alone": config([5, 0, 7, 3], batching={"batch_size": 4}),
    "alone, in blocks": config([5, 0, 7, 3], shuffle=True, buffer_size=6, batching={"batch_size": 4}),
    "alone, last dropped": config([5, 0, 7, 2], buffer_size=3, batching={"batch_size": 4, "drop_last": True}),
    "not batched": config([2, 3], batching={"batch_size": None, "is_batched": False}),
    "by state": config([9, 8], of={"state_size": 20}, batching={"batch_size": 3}),
    "by batch, in turn": two([7, 2], [3, 12], batching={"batch_size": 2}),
    "by batch, weighted": two([7, 2], [3, 12], batching={"batch_size": 2}, weights=[1, 3]),
    "by sample": two([7, 2], [3, 12], batching={"batch_size": 4}, by="sample", weights=[2, 1]),
    "by sample, last dropped": two([7, 2], [3, 12], batching={"batch_size": 5, "drop_last": True}, by="sample"),
    "first exhausted": two([7, 2], [3, 12], batching={"batch_size": 2}, stop="first_exhausted"),
    "cycle": two([3, 2], [3, 12], batching={"batch_size": 2}, stop="cycle"),
    "cycle by sample": two([3, 2], [3, 12], batching={"batch_size": 4}, by="sample", stop="cycle", weights=[2, 1]),
    "filtered": config(
        [9, 4, 8], steps=(Filtered(lambda value: value[3] % 3 > 0), Mapped(repr)), batching={"batch_size": 3}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_lane_goes_on_where_it_stands(name: str) -> None:
    for lanes, lane in (((1, 1), 0), ((2, 1), 1), ((2, 3), 2)):
        with keep_randomness():
            assert_obeys(lane_of(CONFIGS[name], lanes, lane, epoch=2), random.Random(0))


class TestBatches:
    def test_batches_run_over_shards_and_go_by_their_first_sample(self) -> None:
        batches = list(lane_of(config([3, 0, 4, 2], batching={"batch_size": 4}))(None))
        assert [len(batch.values) for batch in batches] == [4, 4, 1]
        assert [(batch.shard, batch.number) for batch in batches] == [(0, 0), (2, 1), (3, 1)]
        assert {batch.source for batch in batches} == {ALONE}
        assert all(batch.values[0][2:4] == (batch.shard, batch.number) for batch in batches)

    @pytest.mark.parametrize("size", [1, 2, 5, 100])
    def test_no_batch_has_more_and_all_but_the_last_have_as_many(self, size: int) -> None:
        of = config([7, 1, 12], buffer_size=4, shuffle=True, batching={"batch_size": size})
        found = [len(batch.values) for batch in lane_of(of)(None)]
        assert sum(found) == 20
        assert set(found[:-1]) <= {size}
        assert 1 <= found[-1] <= size

    def test_without_batches_samples_come_one_by_one(self) -> None:
        of = config([2, 3], batching={"batch_size": None, "is_batched": False, "drop_last": True})
        assert [len(batch.values) for batch in lane_of(of)(None)] == [1] * 5

    def test_what_does_not_fill_a_batch_stays_where_it_is(self) -> None:
        of = config([5, 5], batching={"batch_size": 4, "drop_last": True})
        lane = lane_of(of)(None)
        list(lane)
        at = lane.place()["of"][ALONE]["place"]
        assert (at["shard"], at["item"]) == (1, 3)
        assert lane.place()["over"]
        assert list(lane_of(of)(lane.place())) == []

    def test_a_lane_asked_again_after_its_end_stays_where_it_is(self) -> None:
        lane = lane_of(config([5, 5], batching={"batch_size": 4, "drop_last": True}))(None)
        list(lane)
        place = json.dumps(lane.place())
        assert next(lane, None) is None
        assert json.dumps(lane.place()) == place

    def test_a_shard_that_divides_itself_leaves_nothing_for_the_next_epoch(self) -> None:
        of = config([5], of={"pinned": True}, batching={"batch_size": 4, "drop_last": True})
        lane = lane_of(of)(None)
        assert [len(batch.values) for batch in lane] == [4]
        assert lane.place()["of"][ALONE]["portion"] == 1

    def test_an_error_leaves_the_place_after_the_latest_batch(self) -> None:
        fails = {1: 3}
        of = config([3, 6], of={"fails": fails}, batching={"batch_size": 2})
        mended = config([3, 6], batching={"batch_size": 2})
        lane = lane_of(of)(None)
        batches = lane.take(3)
        for _ in range(2):
            place = json.loads(json.dumps(lane.place()))
            with pytest.raises(ShardError, match=r"shard-1\.bin could not be read at its sample 3"):
                next(lane)
            assert batches + list(lane_of(mended)(place)) == list(lane_of(mended)(None))

    def test_an_error_in_one_source_leaves_the_place_of_the_other(self) -> None:
        for by in ("batch", "sample"):
            mended = two([8], [8], batching={"batch_size": 2}, by=by)
            of = mixed_config(
                {"a": source([8], label="a"), "b": source([8], label="b", of={"fails": {0: 5}})},
                batching={"batch_size": 2},
                by=by,
            )
            lane = lane_of(of)(None)
            batches = lane.take(5)
            with pytest.raises(ShardError, match="b-0"):
                next(lane)
            assert batches + list(lane_of(mended)(lane.place())) == list(lane_of(mended)(None))

    @pytest.mark.parametrize("how", [{"by": "sample"}, {"by": "sample", "stop": "cycle"}, {"stop": "cycle"}])
    def test_an_error_after_a_source_has_ended_leaves_it_as_it_was_after_the_latest_batch(self, how: Any) -> None:
        for sizes, bad in (([3], 3), ([4], 4), ([2], 9), ([4, 0], 5)):
            for batching in ({"batch_size": 4}, {"batch_size": 2}, {"batch_size": 3, "drop_last": True}):
                mended = two(sizes, [12], batching=batching, **how)
                fails: dict[int, int] = {0: bad}
                of = mixed_config(
                    {"a": source(sizes, label="a"), "b": source([12], label="b", of={"fails": fails})},
                    batching=batching,
                    **how,
                )
                lane = lane_of(of)(None)
                batches: list[LaneBatch] = []
                with pytest.raises(ShardError, match="b-0"):
                    batches.extend(lane)
                assert batches + list(lane_of(mended)(lane.place())) == list(lane_of(mended)(None))

    def test_an_error_as_a_source_begins_again_leaves_it_where_its_round_ended(self) -> None:
        of = two([4], [12], batching={"batch_size": 2}, stop="cycle")
        fails: dict[int, int] = of.sources["a"].shards.fails  # type: ignore[attr-defined]  # numbered shards
        whole = list(lane_of(of)(None))
        lane = lane_of(of)(None)
        batches = lane.take(4)
        fails[0] = -1
        with pytest.raises(ShardError, match="a-0"):
            next(lane)
        fails.clear()
        assert batches + list(lane_of(of)(lane.place())) == whole

    def test_places_do_not_change_as_the_lane_goes_on(self) -> None:
        for of in CONFIGS.values():
            lane = lane_of(of)(None)
            taken = [(place := lane.place(), json.dumps(place)) for _ in lane]
            assert all(json.dumps(place) == said for place, said in taken)

    def test_closing_closes_every_source(self) -> None:
        asked = [Counter[str](), Counter[str]()]
        sources = {name: source([5], label=name, of={"asked": own}) for name, own in zip("ab", asked, strict=True)}
        lane = lane_of(mixed_config(sources))(None)
        lane.skip(2)
        lane.close()
        assert [own["closed"] for own in asked] == [1, 1]

    @pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
    def test_sizes_that_are_none_are_refused(self, size: Any) -> None:
        with pytest.raises(ConfigurationError, match="batch_size"):
            config([1], batching={"batch_size": size})

    def test_sources_that_cut_their_batches_are_not_mixed_by_sample(self) -> None:
        with pytest.raises(ConfigurationError, match='by="batch"'):
            two([1], [1], by="sample", batching={"batch_size": None})

    @pytest.mark.parametrize(("options", "what"), [({"buffer_size": -1}, "buffer_size"), ({"buffer_size": 1.5}, "buf")])
    def test_sources_out_of_range_are_refused(self, options: dict[str, Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            source([1], **options)
        with pytest.raises(ConfigurationError, match="no shards"):
            source([])


class TestByBatch:
    def test_in_turn_without_weights(self) -> None:
        of = mixed_config({name: source([8], label=name) for name in "abc"}, batching={"batch_size": 2})
        assert labels(list(lane_of(of)(None))) == "abcabcabcabc"
        assert [batch.source for batch in lane_of(of)(None).take(3)] == ["a", "b", "c"]

    def test_a_batch_is_of_one_source(self) -> None:
        for batch in lane_of(two([9], [9], batching={"batch_size": 4}, weights=[3, 2]))(None):
            assert {value[0] for value in batch.values} == {batch.source}

    @pytest.mark.parametrize(
        ("weights", "block"), [([3, 1], 4), ([0.5, 0.3, 0.2], 10), ({"a": 2, "b": 2, "c": 1}, 5), ([0.9, 0.1], 10)]
    )
    def test_shares_are_exact_in_every_block(self, weights: Any, block: int) -> None:
        names = "abc"[: len(weights)]
        of = mixed_config({name: source([2000], label=name) for name in names}, weights=weights, seed=3)
        turns = labels(lane_of(of)(None).take(30 * block))
        given = list(weights.values() if isinstance(weights, dict) else weights)
        exact = {name: round(block * weight / sum(given)) for name, weight in zip(names, given, strict=True)}
        blocks = [turns[first : first + block] for first in range(0, len(turns), block)]
        assert all(Counter(of_block) == exact for of_block in blocks)
        # In orders of their own.
        assert len(set(blocks)) > 2

    def test_the_order_of_turns_follows_from_seed_and_pass(self) -> None:
        def turns(seed: int, epoch: int) -> str:
            of = two([200], [200], weights=[1, 1], seed=seed)
            return labels(lane_of(of, epoch=epoch)(None).take(60))

        assert turns(0, 0) == turns(0, 0)
        assert len({turns(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9

    @pytest.mark.parametrize("workers", [1, 2, 3])
    @pytest.mark.parametrize("weights", [None, [2, 1], [5, 3]])
    def test_all_ranks_take_a_step_from_the_same_source_as_long_as_none_is_exhausted(
        self, workers: int, weights: Any
    ) -> None:
        replicas, block = 3, 2 if weights is None else sum(weights)
        of = two([200] * 12, [200] * 12, batching={"batch_size": 4}, weights=weights, seed=5)
        crew = Crew(Standing.beginning(of, 1, replicas, workers))
        turns = [""] * workers
        for _ in range(4 * block):
            for worker in range(workers):
                batches = [crew.next(worker * replicas + rank) for rank in range(replicas)]
                taken = {None if batch is None else batch.source for batch in batches}
                assert len(taken) == 1
                turns[worker] += str(taken.pop())
        exact = Counter(a=1, b=1) if weights is None else Counter(a=weights[0], b=weights[1])
        for worker, of_worker in enumerate(turns):
            # Each goes through the whole sequence, as many turns ahead as its number says.
            assert of_worker[: -worker or None] == turns[0][worker:]
            firsts = range(-worker % block, len(of_worker) - block + 1, block)
            assert len(firsts) >= 3
            assert all(Counter(of_worker[first : first + block]) == exact for first in firsts)

    @pytest.mark.parametrize("workers", [2, 4])
    def test_every_worker_takes_turns_at_every_source(self, workers: int) -> None:
        of = two([40] * 8, [40] * 8, batching={"batch_size": 4})
        crew = Crew(Standing.beginning(of, 0, 1, workers))
        for lane in range(workers):
            assert {value[0] for value in crew.serve(lane, 6)} == {"a", "b"}

    def test_the_rest_come_in_their_proportions_once_one_is_exhausted(self) -> None:
        of = mixed_config(
            {"a": source([4], label="a"), "b": source([60], label="b"), "c": source([60], label="c")},
            weights=[2, 1, 1],
        )
        turns = labels(list(lane_of(of)(None)))
        after = turns[turns.rindex("a") + 1 :]
        assert Counter(turns) == {"a": 4, "b": 60, "c": 60}
        assert all(len(set(after[first : first + 2])) == 2 for first in range(2, 100, 2)) or "bcbc" in after

    def test_a_lane_without_a_portion_of_a_source_serves_the_others(self) -> None:
        of = two([4], [6, 6])
        crew = Crew(Standing.beginning(of, 0, 2, 1))
        served = [crew.serve(lane) for lane in range(2)]
        assert [Counter(value[0] for value in of_lane) for of_lane in served] == [{"a": 4, "b": 6}, {"b": 6}]


class TestBySample:
    def test_shares_are_exact_in_every_block_of_samples(self) -> None:
        of = two([900], [900], batching={"batch_size": 7}, by="sample", weights=[3, 2], seed=1)
        samples = [value[0] for batch in lane_of(of)(None).take(100) for value in batch.values]
        blocks = ["".join(samples[first : first + 5]) for first in range(0, 700, 5)]
        assert all(Counter(block) == {"a": 3, "b": 2} for block in blocks)
        assert len(set(blocks)) > 5

    def test_batches_are_full_until_all_are_exhausted(self) -> None:
        of = two([9], [4], batching={"batch_size": 4}, by="sample")
        batches = values(list(lane_of(of)(None)))
        assert [len(batch) for batch in batches] == [4, 4, 4, 1]
        assert sorted(value for batch in batches for value in batch) == sorted(
            [("a", 0, 0, n) for n in range(9)] + [("b", 0, 0, n) for n in range(4)]
        )
        assert [value[0] for value in batches[0]] == ["a", "b", "a", "b"]

    def test_what_does_not_fill_a_batch_stays_in_each_source(self) -> None:
        of = two([5], [5], batching={"batch_size": 4, "drop_last": True}, by="sample")
        crew = Crew(Standing.beginning(of, 0, 1, 1))
        assert len(crew.serve(0)) == 8
        first = Crew(crew.standing().following()).serve(0, 1)
        assert sorted(value for value in first if value[1] == 0) == [("a", 0, 0, 4), ("b", 0, 0, 4)]


class TestStop:
    def test_all_exhausted_serves_everything(self) -> None:
        turns = labels(list(lane_of(two([3], [9]))(None)))
        assert turns == "ababab" + "b" * 6

    @pytest.mark.parametrize("by", ["batch", "sample"])
    def test_first_exhausted_ends_there_and_leaves_the_rest_to_the_next_pass(self, by: str) -> None:
        of = two([6], [20], batching={"batch_size": 2}, by=by, stop="first_exhausted")
        crew = Crew(Standing.beginning(of, 0, 1, 1))
        served = crew.serve(0)
        assert Counter(value[0] for value in served)["a"] == 6
        assert 5 <= Counter(value[0] for value in served)["b"] <= 7
        assert crew.next(0) is None
        following = Crew(crew.standing().following()).serve(0)
        of_b = [value for value in served + following if value[0] == "b"]
        assert of_b == [("b", 0, 0, number) for number in range(len(of_b))]

    @pytest.mark.parametrize("by", ["batch", "sample"])
    def test_cycle_begins_again_until_all_have_been_exhausted_with_another_epoch_each_time(self, by: str) -> None:
        of = two([3], [20], batching={"batch_size": 1}, by=by, stop="cycle")
        served = Crew(Standing.beginning(of, 4, 1, 1)).serve(0)
        of_a = [value for value in served if value[0] == "a"]
        assert [value for value in served if value[0] == "b"] == [("b", 4, 0, number) for number in range(20)]
        assert of_a == [("a", 4 + number // 3, 0, number % 3) for number in range(len(of_a))]
        assert 20 <= len(of_a) <= 21

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_full_batches_of_a_cycle_leave_nothing_out_between_its_rounds(self, size: int) -> None:
        of = two([5], [40], batching={"batch_size": size, "drop_last": True}, stop="cycle")
        crew = Crew(Standing.beginning(of, 0, 1, 1))
        served = crew.serve(0)
        of_a = [value for value in served if value[0] == "a"]
        assert of_a == [("a", number // 5, 0, number % 5) for number in range(len(of_a))]
        assert len(of_a) >= 40 - size
        assert len(of_a) % size == 0

    def test_rounds_of_a_cycle_have_orders_of_their_own(self) -> None:
        small = source([10], label="a", buffer_size=10)
        of = mixed_config({"a": small, "b": source([60], label="b")}, stop="cycle")
        numbers = [value[3] for value in Crew(Standing.beginning(of, 0, 1, 1)).serve(0) if value[0] == "a"]
        rounds = [tuple(numbers[first : first + 10]) for first in range(0, 60, 10)]
        assert all(sorted(one) == list(range(10)) for one in rounds)
        assert len(set(rounds)) == 6

    def test_after_a_cycle_the_next_pass_has_epochs_that_were_not_served(self) -> None:
        of = two([3], [20], stop="cycle")
        crew = Crew(Standing.beginning(of, 0, 1, 1))
        served = crew.serve(0)
        following = crew.standing().following()
        assert following.deals["a"].epoch > max(value[1] for value in served if value[0] == "a")
        again = Crew(following).serve(0)
        assert not set(served) & set(again)

    @pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
    def test_sources_without_a_sample_end_like_others(self, stop: str) -> None:
        turns = labels(list(lane_of(two([0, 0], [3], stop=stop))(None)))
        assert turns == ("bbb" if stop == "all_exhausted" else "")

    @pytest.mark.parametrize("by", ["batch", "sample"])
    @pytest.mark.parametrize(
        ("first", "how"),
        [
            ([0], {"of": {"limit": 50}}),
            ([5], {"of": {"limit": 50}, "steps": (Filtered(lambda value: False),)}),
            ([5], {"on_error": "skip", "of": {"limit": 50, "fails": {0: 0}}}),
        ],
        ids=["empty", "filtered away", "unreadable"],
    )
    def test_a_source_that_gives_nothing_does_not_begin_again_for_ever(
        self, first: list[int], how: dict[str, Any], by: str
    ) -> None:
        self._assert_ends(by, source(first, label="a", **how), {"batch_size": 2})

    def test_a_source_smaller_than_a_batch_does_not_begin_again_for_ever(self) -> None:
        self._assert_ends("batch", source([3], label="a", of={"limit": 50}), {"batch_size": 4, "drop_last": True})

    def test_a_cycle_ends_with_as_many_workers_as_sources(self) -> None:
        self._assert_ends("batch", source([4, 4], label="a", of={"limit": 50}), {"batch_size": 2}, workers=2)

    def _assert_ends(self, by: str, first: Source, batching: dict[str, Any], workers: int = 1) -> None:
        of = mixed_config({"a": first, "b": source([8, 8], label="b")}, batching=batching, by=by, stop="cycle")
        served = Crew(Standing.beginning(of, 0, 1, workers)).serve_all()
        assert Counter(value[0] for value in served)["b"] == 16


def test_each_of_a_ranks_workers_serves_in_exact_proportion_in_the_order_that_torch_asks_them_in() -> None:
    of = two([30] * 4, [30] * 4, batching={"batch_size": 5}, weights=[2, 1], seed=9)
    begun = Standing.beginning(of, 0, 2, 2)
    steps = []
    for rank in range(2):
        crew = Crew(begun)
        lanes = [rank, 2 + rank]
        counts = {worker: len(list(Crew(begun).lanes[lane])) for worker, lane in enumerate(lanes)}
        turns = "".join(crew.serve(lanes[worker], 1)[0][0] for worker in torch_turns([0, 1], counts))
        # A lane has six batches of each, so that none is exhausted in nine turns.
        first, second = turns[:18:2], turns[1:18:2]
        assert all(first[turn : turn + 3].count("a") == 2 for turn in (0, 3, 6))
        assert all(second[turn : turn + 3].count("a") == 2 for turn in (2, 5))
        assert second[:8] == first[1:]
        assert Counter(turns) == {"a": 12, "b": 12}
        steps.append(turns)
    assert steps[0][:16] == steps[1][:16]


def test_ranks_of_equal_shares_end_at_the_same_step_and_others_do_not() -> None:
    crew = Crew(Standing.beginning(config([8, 8, 8, 4], batching={"batch_size": 4}), 0, 2, 1))
    lengths = [len([batch for batch in batches if batch]) for batches in zip(*zip_longest(*crew.lanes), strict=True)]
    assert lengths == [4, 3]
