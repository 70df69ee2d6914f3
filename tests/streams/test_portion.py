"""Shards are dealt out to lanes, and what is left of them is dealt out anew: each sample once, in any history."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shards import Value, source

from lightning_stateful.errors import PositionError
from lightning_stateful.streams import reading
from lightning_stateful.streams.portion import Deal, Portion, leaf_of, left_of, order_of_shards, redealt, runs_of
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Place

Left = list[Portion]


@pytest.fixture(autouse=True)
def _states_of_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for a state every 64 items holds for shards of a few, as these tests have."""
    monkeypatch.setattr(reading, "_LEAST_GAP", 1)


def serve_portion(source_: Source, portion: Portion, number: int | None) -> tuple[list[Value], Place, int]:
    """Some samples of a portion; where it stands then, and how many of its shards it has opened."""
    stage, shards = source_.open(portion, portion.place)
    items = list(stage) if number is None else stage.take(number)
    return [item.value for item in items], json.loads(json.dumps(stage.place())), shards.num_opened


def serve(source_: Source, portions: Sequence[Portion], number: int) -> tuple[list[Value], Left]:
    """Some samples of a lane, and what is left of its portions."""
    served: list[Value] = []
    for which, portion in enumerate(portions):
        wanted = number - len(served)
        if not wanted:
            return served, left_of(portions, which, None, 0)
        values, place, opened = serve_portion(source_, portion, wanted)
        served += values
        if len(values) == wanted:
            return served, left_of(portions, which, place, opened)
    return served, left_of(portions, len(portions), None, 0)


def serve_rest(source_: Source, portions: Sequence[Portion]) -> list[Value]:
    return [value for portion in portions for value in serve_portion(source_, portion, None)[0]]


def names_in(deal: Deal) -> Counter[tuple[int, int]]:
    """How often each shard of each epoch is in a deal."""
    opened = Counter((portion.epoch, shard) for portion in deal.opened for shard in portion.shards)
    return opened + Counter((deal.epoch, shard) for shard in deal.unopened)


def through_json(deal: Deal, source_: Source) -> Deal:
    data = json.loads(json.dumps(deal.to_dict(source_.order(deal.epoch))))
    return Deal.from_dict(data, source_.order)


@st.composite
def sources(draw: st.DrawFn) -> Source:
    return source(
        draw(st.lists(st.integers(0, 12), min_size=1, max_size=12)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        buffer_size=draw(st.sampled_from([0, 2, 5, 40])),
        of={"state_size": draw(st.sampled_from([None, 0, 30])), "known": draw(st.booleans())},
    )


class TestLanes:
    @given(
        number=st.integers(1, 12),
        shards=st.integers(0, 30),
        opened=st.integers(0, 9),
        seed=st.integers(0, 5),
    )
    def test_lanes_have_all_portions_once_opened_ones_first_and_as_many_shards_as_can_be(
        self, number: int, shards: int, opened: int, seed: int
    ) -> None:
        order = order_of_shards(shards, seed, 3, shuffle=True)
        portions = tuple(Portion(2, (100 + n,), {"shard": 0}) for n in range(opened))
        lanes = Deal(3, portions, tuple(order)).lanes(number)
        assert len(lanes) == number
        dealt = Counter(shard for lane in lanes for portion in lane for shard in portion.shards)
        assert dealt == Counter([*order, *range(100, 100 + opened)])
        for lane in lanes:
            assert [portion.place is None for portion in lane] == sorted(portion.place is None for portion in lane)
            own = [shard for portion in lane if portion.place is None for shard in portion.shards]
            # In the order of the epoch.
            assert own == sorted(own, key=order.index)
            assert len([portion for portion in lane if portion.place is None]) <= 1
        counts = sorted(sum(len(portion.shards) for portion in lane) for lane in lanes)
        assert counts[-1] - counts[0] <= 1

    @given(
        sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), number=st.integers(1, 8), opened=st.integers(0, 4)
    )
    def test_shards_of_known_sizes_go_to_the_lane_with_least_to_read(
        self, sizes: list[int], number: int, opened: int
    ) -> None:
        order = order_of_shards(len(sizes), 0, 3, shuffle=True)
        read = [min(sizes[shard], 7) for shard in order[:opened]]
        portions = tuple(
            Portion(2, (shard,), {"at": {"shard": 0, "item": item}, "since": 0})
            for shard, item in zip(order[:opened], read, strict=True)
        )
        lanes = Deal(3, portions, tuple(order)).lanes(number, sizes=sizes)
        dealt = Counter((portion.epoch, shard) for lane in lanes for portion in lane for shard in portion.shards)
        assert dealt == Counter([*((3, shard) for shard in order), *((2, shard) for shard in order[:opened])])
        loads = []
        for lane in lanes:
            assert [portion.epoch for portion in lane] == sorted(portion.epoch for portion in lane)
            left = sum(sizes[shard] for portion in lane for shard in portion.shards)
            loads.append(left - sum(portion.place["at"]["item"] for portion in lane if portion.place is not None))
        assert max(loads) - min(loads) <= max(sizes)

    def test_lanes_without_an_opened_portion_come_first_in_the_order_of_the_epoch(self) -> None:
        opened = (Portion(0, (7,), {"shard": 0}), Portion(0, (8,), {"shard": 0}))
        lanes = Deal(1, opened, (4, 2, 0, 1)).lanes(3)
        assert lanes == [
            [opened[0], Portion(1, (2,))],
            [opened[1], Portion(1, (0,))],
            [Portion(1, (4, 1))],
        ]

    def test_pinned_shards_go_to_the_lane_of_their_number(self) -> None:
        opened = (Portion(0, (2,), {"shard": 0}), Portion(1, (0,), {"shard": 0}), Portion(0, (0,), {"shard": 0}))
        lanes = Deal(1, opened, (0, 1, 3)).lanes(4, pinned=True)
        assert lanes == [[opened[1], opened[2], Portion(1, (0,))], [Portion(1, (1,))], [opened[0]], [Portion(1, (3,))]]

    def test_more_lanes_than_shards_leaves_some_with_nothing(self) -> None:
        assert Deal(0, (), (1, 0)).lanes(4) == [[Portion(0, (1,))], [Portion(0, (0,))], [], []]
        assert Deal(0, (), ()).lanes(2) == [[], []]


class TestHistories:
    @given(source_=sources(), history=st.data())
    def test_every_sample_comes_once_whatever_the_progress_and_the_lanes(
        self, source_: Source, history: st.DataObject
    ) -> None:
        number = history.draw(st.integers(1, 6), "lanes")
        deal = Deal(4, (), tuple(source_.order(4)))
        served: list[Value] = []
        for _ in range(history.draw(st.integers(0, 5), "changes of lanes")):
            left: Left = []
            for portions in deal.lanes(number, sizes=source_.shards.sizes()):
                values, rest = serve(source_, portions, history.draw(st.integers(0, 14), "samples"))
                served += values
                left += rest
            deal = redealt(left, 4, source_.order(4))
            assert set(names_in(deal).values()) <= {1}
            assert through_json(deal, source_) == deal
            deal = through_json(deal, source_)
            number = history.draw(st.integers(1, 6), "lanes")
        for portions in deal.lanes(number, sizes=source_.shards.sizes()):
            served += serve_rest(source_, portions)
        assert sorted(served) == sorted(source_.shards.all(4))  # type: ignore[attr-defined]  # numbered

    @given(source_=sources(), history=st.data())
    def test_what_is_left_of_epochs_comes_once_among_the_samples_of_later_ones(
        self, source_: Source, history: st.DataObject
    ) -> None:
        served: list[Value] = []
        left: Left = []
        for epoch in range(4):
            deal = redealt(left, epoch, source_.order(epoch))
            deal = through_json(replace(deal, unopened=tuple(source_.order(epoch))), source_)
            assert set(names_in(deal).values()) <= {1}
            left = []
            number = history.draw(st.integers(1, 4), "lanes")
            for portions in deal.lanes(number, sizes=source_.shards.sizes()):
                values, rest = serve(source_, portions, history.draw(st.integers(0, 40), "samples"))
                served += values
                left += rest
        for portion in left:
            served += serve_portion(source_, portion, None)[0]
        every = [value for epoch in range(4) for value in source_.shards.all(epoch)]  # type: ignore[attr-defined]
        assert sorted(served) == sorted(every)

    def test_a_lane_that_goes_on_by_itself_goes_on_exactly(self) -> None:
        for seed in range(60):
            rng = random.Random(seed)
            sizes = [rng.randint(0, 9) for _ in range(rng.randint(1, 8))]
            kind = {"state_size": rng.choice([None, 0])}
            of = source(sizes, shuffle=True, buffer_size=rng.choice([0, 3, 30]), of=kind)
            portion = Portion(1, tuple(of.order(1)))
            whole, _, _ = serve_portion(of, portion, None)
            number = rng.randint(0, len(whole))
            values, left = serve(of, [portion], number)
            # The open shards with their block, then those that nobody has begun, whose blocks begin anew.
            rest = serve_rest(of, left)
            assert sorted(values + rest) == sorted(whole)
            if of.buffer_size < 2:
                assert values + rest == whole
            elif left and left[0].place is not None:
                block = of.buffer_size - number % of.buffer_size
                assert rest[: min(block, len(rest))] == whole[number : number + block] or number % of.buffer_size == 0


class TestLeftOf:
    portions = (Portion(0, (5, 3, 8, 1)), Portion(1, (2, 4)))

    def test_nothing_begun_leaves_all_and_everything_served_nothing(self) -> None:
        assert left_of(self.portions, 0, None, 0) == list(self.portions)
        assert left_of(self.portions, 2, None, 0) == []
        assert left_of(self.portions, 1, None, 0) == [self.portions[1]]

    def test_opened_shards_stay_together_and_the_others_can_be_divided(self) -> None:
        leaf = {"shard": 1, "item": 2, "since": 2, "state": None, "skipped_shards": 3}
        place = {"at": {"at": leaf, "since": 4}, "since": 1, "state": 7, "skipped_samples": 2}
        kept = copy.deepcopy(place)
        first, others, later = left_of(self.portions, 0, place, 3)
        # Counts of what was left out are kept elsewhere.
        moved = {**leaf, "shard": 0, "skipped_shards": 0}
        assert first == Portion(
            0, (3, 8), {"at": {"at": moved, "since": 4}, "since": 1, "state": 7, "skipped_samples": 0}
        )
        assert others == Portion(0, (1,))
        assert later == self.portions[1]
        assert place == kept

    def test_a_portion_that_was_read_to_its_end_leaves_nothing(self) -> None:
        leaf = {"shard": 4, "item": 0, "since": 0, "state": None, "skipped_shards": 0}
        assert left_of(self.portions, 0, leaf, 4) == [self.portions[1]]

    def test_the_innermost_place_is_that_of_the_shards(self) -> None:
        assert leaf_of({"shard": 3}) == {"shard": 3}
        assert leaf_of({"at": {"at": {"shard": 3}, "since": 2}, "since": 1}) == {"shard": 3}


class TestRedealt:
    def test_opened_portions_come_first_older_epochs_before_newer_and_the_rest_in_the_order_of_the_epoch(self) -> None:
        place = {"shard": 0}
        left = [
            Portion(2, (5, 0)),
            Portion(2, (4,), place),
            Portion(1, (3, 4)),
            Portion(1, (9, 2), place),
            Portion(2, (1,)),
            Portion(0, (7,)),
        ]
        deal = redealt(iter(left), 2, [0, 1, 2, 3, 4, 5])
        assert deal == Deal(
            2,
            (Portion(1, (9, 2), place), Portion(2, (4,), place), Portion(0, (7,)), Portion(1, (3,)), Portion(1, (4,))),
            (0, 1, 5),
        )

    def test_nothing_left_is_an_empty_deal(self) -> None:
        assert redealt([], 3, [1, 0]) == Deal(3, (), ())


class TestRuns:
    @given(st.sets(st.integers(0, 60)))
    def test_runs_say_the_numbers_in_as_few_words_as_can_be(self, numbers: set[int]) -> None:
        rising = sorted(numbers)
        runs = runs_of(rising)
        assert [number for first, last in runs for number in range(first, last + 1)] == rising
        assert all(last + 1 < first for (_, last), (first, _) in pairwise(runs))

    def test_examples(self) -> None:
        assert runs_of([]) == []
        assert runs_of([4]) == [[4, 4]]
        assert runs_of([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]


class TestOrders:
    def test_orders_are_permutations_of_their_epoch_and_seed(self) -> None:
        orders = [tuple(order_of_shards(50, seed, epoch, shuffle=True)) for seed in range(4) for epoch in range(5)]
        assert all(sorted(order) == list(range(50)) for order in orders)
        assert len(set(orders)) == 20
        assert all(type(shard) is int for shard in orders[0])
        assert order_of_shards(4, 1, 9, shuffle=False) == [0, 1, 2, 3]
        assert order_of_shards(0, 0, 0, shuffle=True) == []
        assert order_of_shards(1, 0, 0, shuffle=True) == [0]

    def test_every_shard_comes_in_every_place_about_as_often(self) -> None:
        orders = np.array([order_of_shards(6, 0, epoch, shuffle=True) for epoch in range(1200)])
        counts = np.stack([np.bincount(column, minlength=6) for column in orders.T])
        assert counts.min() > 140
        assert counts.max() < 265

    @pytest.mark.parametrize("shards", [10, 1000, 100_000])
    def test_what_nobody_has_begun_is_a_few_runs(self, shards: int) -> None:
        order = order_of_shards(shards, 3, 1, shuffle=True)
        lanes = Deal(1, (), tuple(order)).lanes(8)
        left = [replace(portions[0], shards=portions[0].shards[1:]) for portions in lanes if portions]
        data = redealt(left, 1, order).to_dict(order)
        assert data == {"epoch": 1, "opened": [], "unopened": [[8, shards - 1]]}


class TestRoundTrip:
    deal = Deal(2, (Portion(1, (3, 0), {"shard": 0}), Portion(0, (1,))), (2, 0, 4, 1))

    def order(self, epoch: int) -> list[int]:
        return order_of_shards(5, 0, epoch, shuffle=True)

    def data(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.deal.to_dict(self.order(2))))  # type: ignore[no-any-return]

    def test_a_round_trip_gives_the_same_deal_with_its_shards_in_the_order_of_the_epoch(self) -> None:
        read_back = Deal.from_dict(self.data(), self.order)
        assert read_back == replace(self.deal, unopened=tuple(s for s in self.order(2) if s in self.deal.unopened))

    def test_a_shard_that_there_is_not_is_refused(self) -> None:
        with pytest.raises(PositionError, match="comes to shard 5, and there are 5"):
            Deal.from_dict({**self.data(), "unopened": [[0, 5]]}, self.order)
