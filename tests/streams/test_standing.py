"""Where all lanes stand says everything: exactly what follows on the same lanes, each sample once on any others."""

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
from support.shards import (
    Crew,
    NumberedShards,
    Value,
    config,
    is_no_third,
    mixed_config,
    round_trip,
    source,
    torch_turns,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.streams import reading
from lightning_stateful.streams.lane import ALONE, StreamConfig
from lightning_stateful.streams.skipped import Skipped
from lightning_stateful.streams.standing import Standing
from lightning_stateful.streams.steps import Filtered, Mapped, Windowed


@pytest.fixture(autouse=True)
def _states_of_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for a state every 64 items holds for shards of a few, as these tests have."""
    monkeypatch.setattr(reading, "_LEAST_GAP", 1)


LANES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 2), (4, 1)]


def random_config(rng: random.Random, **fixed: Any) -> StreamConfig:
    """One source or several, of every kind."""
    sources = {}
    for number in range(rng.choice([1, 1, 2, 3])):
        kind = {"state_size": rng.choice([None, 0, 60]), "known": rng.random() < 0.3}
        sources[f"s{number}"] = source(
            [rng.choice([0, 1, 2, 5, 9, 20]) for _ in range(rng.randint(1, 9))],
            label=f"s{number}",
            shuffle=rng.random() < 0.7,
            buffer_size=rng.choice([0, 0, 3, 7, 50]),
            seed=rng.randint(0, 9),
            of={**kind, **fixed.get("of", {})},
            **fixed.get("reading", {}),
        )
    batching = {"batch_size": rng.choice([1, 2, 3, 5]), "drop_last": rng.random() < 0.4}
    if len(sources) == 1:
        return StreamConfig(sources={ALONE: sources["s0"]}, **batching)
    return mixed_config(
        sources,
        batching=batching,
        by=rng.choice(["batch", "sample"]),
        stop=fixed.get("stop") or rng.choice(["all_exhausted", "first_exhausted"]),
        weights=rng.choice([None, [rng.randint(1, 4) for _ in sources]]),
        seed=rng.randint(0, 9),
    )


def all_samples(standing: Standing) -> list[Value]:
    """What is to be served until the end of a pass, since the beginning."""
    found: list[Value] = []
    for name, deal in standing.deals.items():
        shards: Any = standing.config.sources[name].shards
        found += [value for epoch in range(deal.epoch + 1) for value in shards.all(epoch)]
    return found


def drain(standing: Standing) -> list[Value]:
    """All that is left of a pass, short batches included."""
    mixing = standing.config.mixing
    every = replace(
        standing.config, drop_last=False, mixing=mixing and replace(mixing, stop="all_exhausted"), batch_size=3
    )
    return Crew(replace(standing, config=every).on(standing.num_replicas + 1, standing.num_workers)).serve_all()


def after(standing: Standing, *batches: int | None) -> Standing:
    """Where lanes stand after so many batches each, or all."""
    crew = Crew(standing)
    for lane, number in enumerate(batches):
        crew.serve(lane, number)
    return crew.standing()


class TestBeginning:
    def test_lanes_are_numbered_worker_by_worker_and_dealt_the_order_of_the_epoch(self) -> None:
        of = config([3] * 7, shuffle=True, seed=4)
        standing = Standing.beginning(of, 2, 2, 2)
        order = of.sources[ALONE].order(2)
        assert standing.num_lanes == 4
        assert [lane[ALONE][0].shards for lane in standing.portions] == [tuple(order[n::4]) for n in range(4)]
        assert {lane[ALONE][0].epoch for lane in standing.portions} == {2}
        assert not standing.has_begun
        assert not standing.is_known
        assert standing.report()["shards_left"] == 7

    def test_passes_have_orders_of_their_own(self) -> None:
        of = config([1] * 20, shuffle=True)
        orders = [tuple(Crew(Standing.beginning(of, epoch, 1, 1)).serve(0)) for epoch in range(5)]
        assert len({tuple(value[2] for value in order) for order in orders}) == 5


class TestHistories:
    @pytest.mark.parametrize("first", range(0, 240, 40))
    def test_every_sample_comes_once_whatever_the_progress_the_lanes_and_the_passes(self, first: int) -> None:
        for seed in range(first, first + 40):
            rng = random.Random(seed)
            of = random_config(rng)
            standing = Standing.beginning(of, 0, *rng.choice(LANES))
            served: list[Value] = []
            for _ in range(rng.randint(1, 6)):
                crew = Crew(standing)
                is_full = rng.random() < 0.35
                for lane in range(standing.num_lanes):
                    served += crew.serve(lane, None if is_full else rng.randint(0, 6))
                standing = round_trip(crew.standing())
                if is_full or rng.random() < 0.2:
                    standing = standing.following()
                if rng.random() < 0.7:
                    standing = standing.on(*rng.choice(LANES))
                standing = round_trip(standing)
            served += drain(standing)
            assert sorted(served) == sorted(all_samples(standing)), seed

    @given(st.data())
    def test_every_sample_comes_once_in_histories_that_somebody_else_thinks_of(self, data: st.DataObject) -> None:
        sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6), "sizes")
        of = config(
            sizes,
            shuffle=data.draw(st.booleans(), "shuffle"),
            buffer_size=data.draw(st.sampled_from([0, 2, 6]), "block"),
            batching={"batch_size": data.draw(st.integers(1, 4)), "drop_last": data.draw(st.booleans(), "drop last")},
        )
        standing = Standing.beginning(of, 0, 1, 1)
        served: list[Value] = []
        for _ in range(data.draw(st.integers(1, 5), "stops")):
            crew = Crew(standing)
            for lane in range(standing.num_lanes):
                served += crew.serve(lane, data.draw(st.integers(0, 5), "batches"))
            standing = round_trip(crew.standing())
            deed = data.draw(st.sampled_from(["on", "following", "both"]), "deed")
            standing = standing.following() if deed != "on" else standing
            standing = standing.on(*data.draw(st.sampled_from(LANES), "lanes")) if deed != "following" else standing
        served += drain(standing)
        assert sorted(served) == sorted(all_samples(standing))

    def test_nothing_comes_twice_where_sources_begin_again(self) -> None:
        for seed in range(30):
            rng = random.Random(seed)
            sources = {
                name: source([rng.choice([3, 5, 9]) for _ in range(rng.randint(4, 8))], label=name, shuffle=True)
                for name in "abc"[: rng.choice([2, 3])]
            }
            how = {"by": rng.choice(["batch", "sample"]), "weights": [rng.randint(1, 4) for _ in sources]}
            batching = {"batch_size": rng.randint(1, 3), "drop_last": seed % 3 == 0}
            of = mixed_config(sources, batching=batching, stop="cycle", **how)
            lanes = [(1, 1), (2, 1), (1, 2), (3, 1)]
            standing, served = Standing.beginning(of, 0, *rng.choice(lanes)), Counter[Value]()
            for _ in range(rng.randint(1, 6)):
                crew = Crew(standing)
                is_full = rng.random() < 0.5
                for lane in range(standing.num_lanes):
                    served.update(crew.serve(lane, None if is_full else rng.randint(0, 6)))
                standing = round_trip(crew.standing())
                standing = standing.following() if is_full else standing
                standing = round_trip(standing.on(*rng.choice(lanes)))
                _assert_keys_tell_lanes_apart(standing)
            assert set(served.values()) <= {1}, seed

    def test_where_passes_end_with_the_first_source_the_others_come_in_turn_over_passes(self) -> None:
        behind = 0
        for seed in range(25):
            rng = random.Random(seed)
            sources = {"small": source([3] * 3, label="small"), "large": source([4] * 30, label="large", shuffle=True)}
            how = {"by": rng.choice(["batch", "sample"]), "weights": [rng.randint(1, 3) for _ in sources]}
            of = mixed_config(sources, batching={"batch_size": rng.randint(1, 3)}, stop="first_exhausted", **how)
            standing, served = Standing.beginning(of, 0, *rng.choice(LANES[:5])), []
            for _ in range(8):
                crew = Crew(standing)
                served += crew.serve_all()
                standing = round_trip(crew.standing()).following()
                standing = round_trip(standing.on(*rng.choice(LANES[:5])) if rng.random() < 0.5 else standing)
                # No pass begins a source anew of which more than half is left.
                assert all(value[1] <= standing.deals[value[0]].epoch for value in served)
            behind += standing.deals["large"].epoch < standing.epoch
            assert sorted(served + drain(standing)) == sorted(all_samples(standing)), seed
        assert behind > 10

    def test_a_source_that_begins_again_is_dealt_out_whole_to_all_lanes(self) -> None:
        sources = {name: source([4] * 7, label=name, shuffle=True) for name in "ab"}
        of = mixed_config(sources, stop="cycle")
        standing = after(Standing.beginning(of, 0, 2, 1), 9, 3).on(3, 1)
        for name, own in sources.items():
            for number in (1, 2):
                dealt = [one for share in standing.shares for one in share[name].in_round(number, own)]
                assert {portion.epoch for portion in dealt} == {standing.deals[name].epoch + number}
                assert sorted(shard for portion in dealt for shard in portion.shards) == list(range(7))

    def test_maps_and_filters_change_nothing_of_that(self) -> None:
        for seed in range(40):
            rng = random.Random(seed)
            steps = (Filtered(_has_no_third), Mapped(_labelled))
            of = config(
                [rng.randint(0, 15) for _ in range(rng.randint(1, 7))],
                steps=steps,
                shuffle=True,
                buffer_size=rng.choice([0, 4, 20]),
                on_error=rng.choice(["raise", "skip"]),
                batching={"batch_size": rng.randint(1, 4), "drop_last": rng.random() < 0.5},
            )
            standing = Standing.beginning(of, 0, *rng.choice(LANES))
            served: list[Value] = []
            for _ in range(rng.randint(1, 5)):
                crew = Crew(standing)
                for lane in range(standing.num_lanes):
                    served += crew.serve(lane, rng.choice([0, 1, 2, 5, None]))
                standing = round_trip(crew.standing()).following().on(*rng.choice(LANES))
            served += drain(standing)
            expected = [_labelled(v) for v in all_samples(standing) if _has_no_third(v)]
            assert sorted(served) == sorted(expected), seed

    def test_bad_shards_are_counted_once_each_and_what_comes_before_is_served(self) -> None:
        fails = {0: 2, 1: -1, 3: 0, 4: 5}
        for seed in range(60):
            rng = random.Random(seed)
            of = config(
                [6, 6, rng.randint(0, 5), 6, 6, 3],
                shuffle=True,
                buffer_size=rng.choice([0, 4, 20]),
                on_error="skip",
                of={"fails": fails, "state_size": rng.choice([None, 0])},
                batching={"batch_size": rng.randint(1, 4), "drop_last": rng.random() < 0.5},
            )
            standing = Standing.beginning(of, 0, *rng.choice(LANES))
            served: list[Value] = []
            counted = 0
            for _ in range(rng.randint(1, 5)):
                crew = Crew(standing)
                is_full = rng.random() < 0.5
                for lane in range(standing.num_lanes):
                    served += crew.serve(lane, None if is_full else rng.randint(0, 4))
                standing = round_trip(crew.standing())
                standing = standing.following() if is_full else standing
                standing = standing.on(*rng.choice(LANES))
                assert standing.report()["shards_skipped"] >= counted
                counted = standing.report()["shards_skipped"]
            crew = Crew(replace(standing, config=replace(of, drop_last=False)).on(5, 1))
            served += crew.serve_all()
            expected = [v for v in all_samples(standing) if v[3] < max(fails.get(v[2], 99), 0)]
            assert sorted(served) == sorted(expected), seed
            assert crew.standing().left_out == Skipped(shards=len(fails) * (standing.epoch + 1)), seed


class TestTheSameLanes:
    def test_a_run_stopped_anywhere_again_and_again_goes_on_exactly_pass_after_pass(self) -> None:
        for seed in range(40):
            rng = random.Random(seed)
            of = random_config(rng)
            begun = Standing.beginning(of, 0, *rng.choice(LANES))
            whole, stopped = Crew(begun), Crew(begun)
            for _ in range(2):
                # Lanes end unevenly, and what they leave comes first in the next pass.
                left = {lane: rng.choice([0, 1, 4, 9, 999]) for lane in range(begun.num_lanes)}
                while left:
                    lane = rng.choice(list(left))
                    batch = whole.next(lane)
                    assert stopped.next(lane) == batch, seed
                    left[lane] -= 1
                    if batch is None or not left[lane]:
                        del left[lane]
                    if rng.random() < 0.3:
                        stopped = Crew(round_trip(stopped.standing()))
                whole = Crew(whole.standing().following())
                stopped = Crew(round_trip(round_trip(stopped.standing()).following()))

    def test_the_same_lanes_are_dealt_nothing_anew(self) -> None:
        standing = after(Standing.beginning(config([9] * 5), 0, 2, 2), 1, 0, 2, 1)
        assert standing.on(2, 2) is standing
        # As many lanes in another arrangement are others.
        assert standing.on(4, 1) is not standing
        assert standing.on(4, 1).places == (None,) * 4

    def test_moving_lanes_leaves_what_was_dealt(self) -> None:
        begun = Standing.beginning(config([9] * 5), 0, 2, 1)
        standing = after(begun, 2, 1)
        assert standing.portions is begun.portions
        assert (standing.steps, begun.steps) == (1, 0)
        assert begun.places == (None, None)


class TestFollowing:
    def test_what_uneven_lanes_have_left_comes_first_in_the_next_pass(self) -> None:
        of = config([4, 4, 20, 20], batching={"batch_size": 4})
        standing = after(Standing.beginning(of, 0, 2, 1), 4, 3)
        following = standing.following()
        assert following.epoch == 1
        assert following.steps == 0
        assert [len(deal.unopened) for deal in following.deals.values()] == [4]
        first = [value[:3] for lane in (0, 1) for value in Crew(following).serve(lane, 1)]
        # Both were in their second shards.
        assert first == [("", 0, 2)] * 4 + [("", 0, 3)] * 4

    def test_batches_that_were_not_full_come_first_in_the_next_pass(self) -> None:
        of = config([7, 6], shuffle=True, batching={"batch_size": 4, "drop_last": True})
        crew = Crew(Standing.beginning(of, 0, 1, 1))
        served = crew.serve(0)
        assert len(served) == 12
        following = round_trip(crew.standing().following())
        left = Crew(following).serve(0, 1)
        assert [value[1] for value in left] == [0] * 1 + [1] * 3
        assert left[0] not in served

    def test_a_pass_read_to_its_end_leaves_nothing(self) -> None:
        standing = Standing.beginning(config([5, 4, 3], shuffle=True), 3, 1, 2)
        crew = Crew(standing)
        crew.serve_all()
        assert crew.standing().following().to_dict() == Standing.beginning(standing.config, 4, 1, 2).to_dict()
        assert crew.standing().report()["shards_left"] == 0

    def test_passes_over_uneven_lanes_do_not_pile_up(self) -> None:
        of = config([9, 1, 1, 9, 30], shuffle=True, batching={"batch_size": 2, "drop_last": True})
        standing = Standing.beginning(of, 0, 3, 1)
        sizes = []
        for _ in range(12):
            # All ranks stop where the first has no batch left.
            crew, steps = Crew(standing), 0
            while steps < 99 and not any(crew.next(lane) is None for lane in range(3)):
                steps += 1
            standing = after(standing, *[steps] * 3).following()
            sizes.append(sum(len(portion.shards) for deal in standing.deals.values() for portion in deal.opened))
        assert max(sizes) <= 2 * len(of.sources[ALONE].order(0))

    def test_passes_that_end_with_the_first_source_do_not_pile_up(self) -> None:
        of = mixed_config({"small": source([4] * 2), "large": source([4] * 40)}, stop="first_exhausted")
        standing, sizes = Standing.beginning(of, 0, 2, 1), []
        for _ in range(6):
            standing = after(standing, None, None).following()
            sizes.append(len(json.dumps(standing.to_dict())))
        assert sizes[-1] < 2 * sizes[0]


class TestOtherLanes:
    def test_what_nobody_has_begun_is_dealt_out_and_open_shards_go_on_where_they_stand(self) -> None:
        of = config([6] * 8, buffer_size=4, of={"state_size": 0})
        standing = after(Standing.beginning(of, 0, 2, 1), 5, 7)
        other = standing.on(1, 3)
        assert other.deals[ALONE].unopened == (4, 5, 6, 7)
        # A block of lane 1 reaches into its second shard.
        assert [portion.shards for portion in other.deals[ALONE].opened] == [(0, 2), (1, 3)]
        assert (other.steps, other.places, other.num_lanes) == (0, (None,) * 3, 3)
        assert other.has_begun

    def test_a_pass_that_nobody_has_begun_is_another_beginning(self) -> None:
        of = config([6] * 8, shuffle=True)
        assert Standing.beginning(of, 2, 3, 1).on(2, 2).to_dict() == Standing.beginning(of, 2, 2, 2).to_dict()

    def test_there_and_back_loses_nothing_and_repeats_nothing(self) -> None:
        of = config([6] * 8, shuffle=True, buffer_size=5)
        standing = after(Standing.beginning(of, 0, 2, 1), 5, 7)
        there = standing.on(3, 1).on(2, 1).on(1, 1).on(2, 1)
        assert there.deals == standing.on(3, 1).deals
        assert sorted(drain(there)) == sorted(drain(standing))

    def test_more_lanes_than_what_is_left_leaves_some_with_nothing_and_their_state_is_whole(self) -> None:
        standing = after(Standing.beginning(config([6, 6]), 0, 2, 1), 5, 5).on(5, 1)
        crew = Crew(standing)
        assert [len(crew.serve(lane)) for lane in range(5)] == [1, 1, 0, 0, 0]
        assert crew.standing().is_known
        assert round_trip(crew.standing()).report()["shards_left"] == 0

    def test_where_sources_begin_again_other_lanes_still_serve_all_of_them(self) -> None:
        sources = {"small": source([4] * 4, label="small"), "large": source([40] * 4, label="large")}
        standing = Standing.beginning(mixed_config(sources, stop="cycle"), 0, 2, 1)
        # Each lane is in the second of its two small shards.
        other = after(standing, 11, 11).on(4, 1)
        crew = Crew(other)
        labels = [{value[0] for value in crew.serve(lane, 6)} for lane in range(4)]
        assert labels == [{"small", "large"}] * 4


class TestStates:
    def test_lanes_go_by_the_first_shard_they_were_dealt(self) -> None:
        of = config([3] * 5, shuffle=True, seed=2)
        standing = after(Standing.beginning(of, 7, 2, 1), 1, 2)
        order = of.sources[ALONE].order(7)
        assert list(standing.to_dict()["shards"]) == [f"7:{order[0]}", f"7:{order[1]}"]
        mixed = after(Standing.beginning(mixed_config({"a": source([2] * 3), "b": source([2] * 3)}), 0, 2, 1), 2, 1)
        assert list(mixed.to_dict()["shards"]) == ["a/0:0", "a/0:1"]

    def test_no_two_lanes_ever_go_by_the_same_shard(self) -> None:
        for seed in range(80):
            rng = random.Random(seed)
            standing = Standing.beginning(random_config(rng), 0, *rng.choice(LANES))
            for _ in range(6):
                batches = [rng.choice([0, 1, 3, None]) for _ in range(standing.num_lanes)]
                standing = after(standing, *batches)
                _assert_keys_tell_lanes_apart(standing)
                standing = rng.choice([standing.following(), standing]).on(*rng.choice(LANES))
                _assert_keys_tell_lanes_apart(standing)

    def test_no_two_lanes_go_by_the_same_shard_where_sources_begin_again(self) -> None:
        sources = {"a": source([1, 2], label="a"), "b": source([6, 6], label="b")}
        standing = Standing.beginning(mixed_config(sources, stop="cycle"), 0, 2, 1)
        for _ in range(4):
            standing = after(standing, None, None).following()
            _assert_keys_tell_lanes_apart(standing)

    def test_a_round_trip_changes_nothing(self) -> None:
        for seed in range(60):
            rng = random.Random(seed)
            standing = Standing.beginning(random_config(rng), rng.randint(0, 3), *rng.choice(LANES))
            standing = after(standing, *[rng.choice([0, 1, 4, None]) for _ in range(standing.num_lanes)])
            for one in (standing, standing.on(*rng.choice(LANES)), standing.following()):
                data = json.loads(json.dumps(one.to_dict(), allow_nan=False))
                again = round_trip(one)
                assert again.to_dict() == data
                assert (again.portions, again.report(), again.is_known) == (one.portions, one.report(), one.is_known)

    def test_writing_reading_and_going_on_leave_a_state_as_it_is(self) -> None:
        of = config([6] * 4, buffer_size=3, shuffle=True, of={"state_size": 0})
        data = after(Standing.beginning(of, 0, 2, 1), 3, 5).to_dict()
        kept = copy.deepcopy(data)
        standing = Standing.from_dict(data, of)
        Crew(standing).serve_all()
        Crew(standing.on(3, 1)).serve_all()
        Crew(standing.following()).serve_all()
        standing.report()
        assert data == kept

    def test_the_state_of_many_shards_is_small(self) -> None:
        of = config([3] * 20_000, shuffle=True, buffer_size=1000)
        standing = after(Standing.beginning(of, 0, 4, 2), *[40] * 8)
        # A few hundred characters for each lane, none for each shard.
        assert len(json.dumps(standing.to_dict())) < 8 * 400
        assert len(json.dumps(standing.on(8, 1).to_dict())) < 8 * 4000


class TestWorkersInTurn:
    def test_torch_asks_first_the_worker_whose_batch_comes_next(self) -> None:
        for seed in range(150):
            rng = random.Random(seed)
            replicas, workers = rng.choice([(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (1, 5)])
            of = config([rng.choice([0, 1, 2, 3, 8]) for _ in range(rng.randint(1, 8))], shuffle=True)
            standing = Standing.beginning(of, 0, replicas, workers)
            for rank in range(replicas):
                _assert_turns_go_on(standing, rank, rng)

    def test_a_rank_without_anything_has_its_workers_in_their_order(self) -> None:
        assert Standing.beginning(config([2]), 0, 2, 3).workers_in_turn(1) == [0, 1, 2]

    def test_torch_itself_asks_workers_in_the_order_that_is_computed(self) -> None:
        for batches in ([3, 9], [6, 0]):
            loader = DataLoader(Uneven(batches), batch_size=None, num_workers=2, multiprocessing_context="fork")
            assert list(loader) == torch_turns([0, 1], dict(enumerate(batches)))


def _assert_turns_go_on(begun: Standing, rank: int, rng: random.Random) -> None:
    """Stops a rank again and again; its lanes' batches come in one order all the same."""
    lanes = list(range(rank, begun.num_lanes, begun.num_replicas))
    counts = {worker: len(list(Crew(begun).lanes[lane])) for worker, lane in enumerate(lanes)}
    whole = torch_turns(range(len(lanes)), counts)
    assert Counter(whole) == Counter(counts)
    standing, done = begun, 0
    while done < len(whole):
        crew, order = Crew(standing), standing.workers_in_turn(rank)
        assert sorted(order) == list(range(len(lanes)))
        left = {worker: counts[worker] - whole[:done].count(worker) for worker in counts}
        assert torch_turns(order, left) == whole[done:]
        served = rng.randint(1, len(whole) - done)
        gone: set[int] = set()
        for number, worker in enumerate(whole[done : done + served]):
            # A lane's end is known where its turn comes and another's batch in its place.
            turns = [order[(order.index(worker) - back) % len(order)] for back in range(1, len(order))]
            previous = whole[done + number - 1] if number else None
            for other in turns:
                if other == previous:
                    break
                gone.add(other)
            crew.serve(lanes[worker], 1)
        for worker in gone:
            if left[worker] == whole[done : done + served].count(worker):
                crew.serve(lanes[worker], 1)
        done += served
        standing = round_trip(crew.standing())


class Uneven(IterableDataset[int]):
    """Each worker gives its number some times."""

    def __init__(self, batches: list[int]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        worker: Any = get_worker_info()
        yield from [worker.id] * self.batches[worker.id]


class TestReports:
    def test_what_has_to_be_read_again_goes_by_the_shards_name_and_only_if_it_is_worth_a_word(self) -> None:
        of = config([9] * 4, buffer_size=4)
        standing = after(Standing.beginning(of, 0, 2, 1), 6, 2)
        assert standing.read_again() == {}
        shards: Any = of.sources[ALONE].shards
        shards.reread = "it says nothing"
        assert standing.read_again() == {"shard-0.bin": 4}
        assert standing.read_again([1]) == {}
        assert after(Standing.beginning(of, 0, 2, 1), 5, 9).read_again() == {"shard-0.bin": 4, "shard-1.bin": 8}

    def test_shards_that_say_where_they_stand_are_not_read_again(self) -> None:
        of = config([9] * 4, of={"state_size": 0})
        shards: Any = of.sources[ALONE].shards
        shards.reread = "it says nothing"
        assert after(Standing.beginning(of, 0, 2, 1), 6, 2).read_again() == {}

    def test_what_is_left_and_left_out_is_counted(self) -> None:
        def fails_at_two(value: Value) -> Value:
            if value[3] == 2:
                raise ValueError
            return value

        of = config([4] * 6, on_error="skip", steps=(Mapped(fails_at_two),), of={"fails": {0: 1, 3: -1}})
        standing = Standing.beginning(of, 5, 2, 1)
        crew = Crew(standing)
        crew.serve(0, 4)
        report = crew.standing().report()
        # Shards 0, 2, 4 of lane 0: one bad, one read but for one sample; the third not begun.
        assert report == {
            "pass": 5,
            "shards_left": 5,
            "shards_skipped": 1,
            "samples_skipped": 1,
            "samples_too_long": 0,
        }
        crew.serve_all()
        again = round_trip(crew.standing()).following().on(3, 1)
        assert again.left_out == Skipped(shards=2, samples=4)
        assert again.report()["samples_skipped"] == 4

    def test_what_is_known_and_begun(self) -> None:
        begun = Standing.beginning(config([3, 3]), 0, 2, 1)
        half = begun.at((Crew(begun).lanes[0].place(), None))
        assert not half.is_known
        assert after(begun, 0, 0).is_known
        assert after(begun, 1, 0).has_begun
        assert not after(begun, None, None).following().has_begun
        assert after(begun, 1, 1).following().has_begun


class TestAStandingOfAnotherStream:
    """One that was written by a stream built otherwise, after the difference has been accepted."""

    @pytest.fixture
    def data(self) -> Any:
        return json.loads(json.dumps(after(Standing.beginning(self.of(5), 0, 2, 1), 2, 3).to_dict()))

    def of(self, shards: int, **how: Any) -> StreamConfig:
        return config([6] * shards, batching={"batch_size": 2}, **how)

    def test_shards_that_nobody_had_begun_and_that_are_gone_are_refused(self, data: Any) -> None:
        with pytest.raises(PositionError, match=r"comes to shard 4, and there are 2"):
            Standing.from_dict(data, self.of(2))

    def test_shards_that_were_begun_and_are_gone_are_refused(self, data: Any) -> None:
        data = Standing.from_dict(data, self.of(5)).on(3, 1).to_dict()
        data["sources"][""].update(unopened=[])
        with pytest.raises(PositionError, match=r"has shards of range\(1\), got \(1,"):
            Standing.from_dict(data, self.of(1))

    def test_lanes_that_were_not_dealt_out_are_named(self, data: Any) -> None:
        data["shards"]["0:77"] = next(iter(data["shards"].values()))
        with pytest.raises(PositionError, match=r"shards that were not dealt out: \['0:77'\]"):
            Standing.from_dict(data, self.of(5))

    def test_places_of_other_steps_are_refused(self, data: Any) -> None:
        with pytest.raises(DamagedStateError, match=r"A place in a stream holds .*, got "):
            Standing.from_dict(data, self.of(5, steps=(Windowed(2, 1),)))

    @pytest.mark.parametrize(("key", "what"), [("portion", "in portion 9 of"), ("opened", "has opened 9 of")])
    def test_a_place_beyond_what_its_lane_was_dealt_is_refused(self, data: Any, key: str, what: str) -> None:
        next(iter(data["shards"].values()))["of"][""][key] = 9
        with pytest.raises(PositionError, match=what):
            Standing.from_dict(data, self.of(5))

    def test_a_rank_may_know_nothing_of_the_others_but_all_of_its_own(self) -> None:
        of = config([6] * 8, shuffle=True)
        begun = Standing.beginning(of, 0, 2, 2)
        places = after(begun, 2, 1, 2, 1).places
        for rank in range(2):
            own = tuple(place if lane % 2 == rank else None for lane, place in enumerate(places))
            again = round_trip(begun.at(own, 3))
            assert [place is not None for place in again.places] == [lane % 2 == rank for lane in range(4)]
        assert round_trip(begun).places == (None,) * 4

    def test_other_sources_are_refused(self) -> None:
        sources = {"a": source([4] * 3), "b": source([5] * 3)}
        data = Standing.beginning(mixed_config(sources), 0, 1, 1).to_dict()
        with pytest.raises(DamagedStateError, match=r"has the sources \['a', 'b'\], and there are \['a', 'c'\]"):
            Standing.from_dict(data, mixed_config({"a": sources["a"], "c": sources["b"]}))

    def test_keys_may_come_back_in_another_order(self) -> None:
        sources = {"b": source([4] * 3, label="b"), "a": source([5] * 3, label="a")}
        standing = after(Standing.beginning(mixed_config(sources), 0, 2, 1), 3, 2)
        data = json.loads(json.dumps(standing.to_dict(), sort_keys=True))
        again = Standing.from_dict(data, standing.config)
        assert Crew(again).serve_all() == Crew(standing).serve_all()


def _assert_keys_tell_lanes_apart(standing: Standing) -> None:
    with_portions = [lane for lane, dealt in enumerate(standing.portions) if any(dealt.values())]
    lanes = standing.at(tuple(lane.place() for lane in Crew(standing).lanes)).to_dict()["shards"]
    assert len(lanes) == len(with_portions)


def _has_no_third(value: Value) -> bool:
    return is_no_third(value[3])


def _labelled(value: Value) -> Value:
    return ("seen", *value)


def test_the_numbered_shards_of_these_tests_are_honest() -> None:
    shards = NumberedShards([2, 0, 1], label="x")
    assert [list(shards.read(shard, 3)) for shard in range(3)] == [
        [("x", 3, 0, 0), ("x", 3, 0, 1)],
        [],
        [("x", 3, 2, 0)],
    ]
    assert shards.all(3) == [("x", 3, 0, 0), ("x", 3, 0, 1), ("x", 3, 2, 0)]
