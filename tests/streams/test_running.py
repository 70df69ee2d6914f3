"""Windows, running states, maps and filters, alone and nested, are opened where they stand."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import Counter, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import NumberedShards

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StateError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams.portion import Portion
from lightning_stateful.streams.read_ahead import ReadAheadConfig
from lightning_stateful.streams.running import FilterStage, MapStage, RecurrentStage, WindowedStage
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Item, Open, Place, Stage
from lightning_stateful.streams.steps import Budgeted, Filtered, Mapped, Recurrent, Windowed


class Listed(Stage):
    """Items from a list, with an honest place and a count of what is asked of it."""

    def __init__(self, items: list[Item], place: Place | None, asked: Counter[str]) -> None:
        self.items, self.asked = items, asked
        self.at: int = 0 if place is None else place["next"]

    def __next__(self) -> Item:
        if self.at >= len(self.items):
            raise StopIteration
        self.asked["read"] += 1
        self.at += 1
        return self.items[self.at - 1]

    def skip(self, count: int) -> int:
        count = min(count, len(self.items) - self.at)
        self.asked["skipped"] += count
        self.at += count
        return count

    def place(self) -> Place:
        self.asked["places"] += 1
        return {"next": self.at}

    def close(self) -> None:
        self.asked["closed"] += 1


def listed(values: Any, asked: Counter[str] | None = None) -> Open:
    """Opens a stage of values, five in each shard."""
    items = [Item(7 + number // 5, number % 5, value) for number, value in enumerate(values)]
    counted = Counter[str]() if asked is None else asked
    return lambda place: Listed(items, place, counted)


def opened(kind: Any, inner: Open, **options: Any) -> Open:
    return lambda place: kind(inner, place, **options)


def assert_obeys(open_stage: Open, rng: random.Random) -> list[Any]:
    """Whatever is asked of a stage, and wherever it is opened anew, it yields one and the same; which is returned."""
    whole = list(open_stage(None))
    _assert_every_place_leads_to_the_rest(open_stage, whole)
    _assert_any_history_yields_the_same(open_stage, whole, rng)
    return whole


def _assert_every_place_leads_to_the_rest(open_stage: Open, whole: list[Any]) -> None:
    stage, places = open_stage(None), []
    for number in range(len(whole) + 1):
        place = stage.place()
        saved = json.dumps(place)
        places.append((place, saved))
        loaded = json.loads(saved)
        fresh = open_stage(loaded)
        assert json.dumps(fresh.place()) == saved
        assert list(fresh) == whole[number:]
        assert json.dumps(loaded) == saved
        if number < len(whole):
            assert next(stage) == whole[number]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stage)
    assert list(open_stage(stage.place())) == []
    assert all(json.dumps(place) == saved for place, saved in places)


def _assert_any_history_yields_the_same(open_stage: Open, whole: list[Any], rng: random.Random) -> None:
    """Reads, skips, takes, asks for places and opens anew, in any order, to the end and beyond."""
    for _ in range(4):
        stage, number = open_stage(None), 0
        weights = [rng.random() for _ in range(4)]
        while number < len(whole):
            deed = rng.choices(["place", "anew", "skip", "take"], weights)[0]
            count = rng.choice([0, 1, 1, 1, 2, 5, 30])
            if deed == "place":
                stage.place()
            elif deed == "anew":
                stage = open_stage(json.loads(json.dumps(stage.place())))
            elif deed == "skip":
                assert stage.skip(count) == min(count, len(whole) - number)
                number = min(number + count, len(whole))
            else:
                assert stage.take(count) == whole[number : number + count]
                number = min(number + count, len(whole))
        assert stage.skip(3) == 0
        assert list(open_stage(stage.place())) == []


def mixed(value: Any) -> int:
    """A number that follows from what a value looks like."""
    return zlib.crc32(repr(value).encode())


def scan(state: int, value: Any) -> tuple[int, int]:
    return mixed((state, value)), mixed((value, state))


def scan_in_place(state: dict[str, Any], value: Any) -> tuple[int, dict[str, Any]]:
    state["seen"].append(mixed(value))
    del state["seen"][:-6]
    state["sum"] += mixed(value) % 7
    return mixed(state), state


def noisy(value: Any) -> tuple[Any, ...]:
    return mixed(value), random.random(), float(np.random.rand()), float(torch.rand(()))


def is_kept(value: Any) -> bool:
    return mixed(value) % 3 > 0


def random_stack(rng: random.Random, inner: Open, depth: int) -> Open:
    """Stages of any kind around another."""
    for _ in range(depth):
        kind = rng.choice(["windowed", "recurrent", "in place", "map", "filter"])
        if kind == "windowed":
            inner = opened(WindowedStage, inner, width=rng.choice([1, 2, 3, 9]), step=rng.choice([1, 1, 2, 3, 8]))
        elif kind == "recurrent":
            inner = opened(RecurrentStage, inner, function=scan, initial=rng.randint(0, 9))
        elif kind == "in place":
            # A state of about 2,000 characters, which is taken at every eighth item at most.
            initial = {"seen": [0], "sum": 0, "constant": "." * 2000}
            inner = opened(RecurrentStage, inner, function=scan_in_place, initial=initial)
        elif kind == "map":
            inner = opened(MapStage, inner, function=noisy, seed=rng.randint(0, 9))
        else:
            inner = opened(FilterStage, inner, function=is_kept)
    return inner


@pytest.mark.parametrize("seed", range(10))
def test_stages_in_any_nesting_go_on_where_they_stand(seed: int) -> None:
    rng = random.Random(seed)
    with keep_randomness():
        for depth in (1, 1, 2, 3, 4):
            assert_obeys(random_stack(rng, listed(range(rng.choice([0, 1, 8, 25, 40]))), depth), rng)


@pytest.mark.parametrize("width", [1, 2, 5, 100])
@pytest.mark.parametrize("step", [1, 2, 5, 7, 100])
def test_windows_slide_and_go_on_where_they_stand(width: int, step: int) -> None:
    for length in (0, 1, 4, 5, 6, 99, 100, 101, 230):
        rng = random.Random(length)
        windows = assert_obeys(opened(WindowedStage, listed(range(length)), width=width, step=step), rng)
        expected = [tuple(range(first, first + width)) for first in range(0, length - width + 1, step)]
        assert [item.value for item in windows] == expected
        assert [(item.shard, item.number) for item in windows] == [(7 + v[0] // 5, v[0] % 5) for v in expected]


@pytest.mark.parametrize(("width", "step"), [(1, 1), (3, 1), (64, 1), (200, 1), (200, 150), (3, 200)])
def test_windows_are_opened_by_reading_a_few_items_again(width: int, step: int) -> None:
    asked: Counter[str] = Counter()
    open_stage = opened(WindowedStage, listed(range(3000), asked), width=width, step=step)
    stage = open_stage(None)
    places = []
    for _ in stage:
        places.append(stage.place())
    # The next place below is looked for within a stride of 64 items, and a window beyond that.
    assert asked["places"] <= 2 + 3000 / 64
    assert asked["read"] + asked["skipped"] == 3000
    for place in places[:-1]:
        asked.clear()
        next(open_stage(place))
        assert asked["read"] == width
        assert asked["skipped"] <= 64 + width + step


def test_opening_windows_again_and_again_brings_the_place_along() -> None:
    open_stage = opened(WindowedStage, listed(range(1000)), width=3)
    stage = open_stage(None)
    for number in range(990):
        stage = open_stage(stage.place())
        assert next(stage).value[0] == number
        assert stage.place()["since"] <= 70


def test_windows_that_are_left_out_are_not_read() -> None:
    asked: Counter[str] = Counter()
    stage = opened(WindowedStage, listed(range(1000), asked), width=4, step=2)(None)
    assert stage.skip(400) == 400
    assert next(stage).value == (800, 801, 802, 803)
    assert asked["read"] <= 8


@pytest.mark.parametrize(("width", "step"), [(0, 1), (-1, 1), (1, 0), (2.5, 1)])
def test_windows_of_nothing_are_refused(width: Any, step: int) -> None:
    with pytest.raises(ConfigurationError, match=r"width|step"):
        Windowed(width, step)


def test_windows_over_fewer_items_than_were_used_are_refused() -> None:
    stage = opened(WindowedStage, listed(range(50)), width=3)(None)
    stage.skip(40)
    place = stage.place()
    assert place == {"at": {"next": 0}, "since": 40}
    with pytest.raises(PositionError, match="40 items were used from a place on, but now the items end after 30"):
        opened(WindowedStage, listed(range(30)), width=3)(place)


class TestRecurrentStage:
    def test_each_value_follows_from_the_state_before(self) -> None:
        def add(state: int, value: int) -> tuple[int, int]:
            return state + value, state + value

        stage = opened(RecurrentStage, listed([3, 1, 4, 1, 5, 9]), function=add, initial=10)(None)
        assert list(stage) == [
            Item(7, 0, 13), Item(7, 1, 14), Item(7, 2, 18), Item(7, 3, 19), Item(7, 4, 24), Item(8, 0, 33),
        ]  # fmt: skip

    def test_a_state_of_any_plain_kind_is_kept(self) -> None:
        def keep(state: Any, value: int) -> tuple[str, Any]:
            state["array"][value % 3] += value
            state["tensor"] = state["tensor"] * 0.5 + value
            state["last"].append((value, math.inf))
            state["counts"][value % 4] += 1
            return repr(state), state

        initial = {
            "array": np.zeros(3, dtype=np.float32),
            "tensor": torch.zeros(2),
            "last": deque(maxlen=3),
            "counts": Counter({3: 1}),
            "bytes": b"\0\xff",
            5: (None, True, math.nan),
        }
        assert_obeys(opened(RecurrentStage, listed(range(30)), function=keep, initial=initial), random.Random(0))
        assert not initial["array"].any()
        assert not initial["last"]

    def test_passes_begin_alike_though_the_state_is_changed_in_place(self) -> None:
        initial: dict[str, Any] = {"seen": [], "sum": 0}
        open_stage = opened(RecurrentStage, listed(range(20)), function=scan_in_place, initial=initial)
        assert list(open_stage(None)) == list(open_stage(None))
        assert initial == {"seen": [], "sum": 0}

    def test_a_small_state_is_taken_wherever_somebody_asks_and_a_large_one_now_and_then(self) -> None:
        for size, most in ((10, 0), (25_600, 101)):
            asked: Counter[str] = Counter()
            runs: list[Any] = []

            def function(state: Any, value: Any, runs: list[Any] = runs) -> tuple[Any, Any]:
                runs.append(value)
                return value, state

            inner = listed(range(1000), asked)
            open_stage = opened(RecurrentStage, inner, function=function, initial="." * size)
            stage = open_stage(None)
            places = []
            for _ in stage:
                places.append(stage.place())
            assert asked["places"] == 1 + 1000 // (most + 1)
            for place in places:
                runs.clear()
                open_stage(place)
                assert len(runs) == place["since"] <= most

    def test_nobody_asking_for_long_does_not_make_a_resume_long(self) -> None:
        stage = opened(RecurrentStage, listed(range(5000)), function=scan, initial=0)(None)
        stage.skip(4000)
        assert stage.place()["since"] == 0

    def test_a_state_that_is_not_plain_is_refused_at_the_start_or_where_it_is_asked_for(self) -> None:
        with pytest.raises(StateError, match=r"The running state of a stream must be plain: state\['x'\] is a object"):
            opened(RecurrentStage, listed([1]), function=scan, initial={"x": object()})(None)
        stage = opened(RecurrentStage, listed([1, 2]), function=lambda state, value: (value, object()), initial=0)(None)
        next(stage)
        with pytest.raises(StateError, match="The running state of a stream must be plain: state is a object"):
            stage.place()

    def test_a_function_that_fails_loses_no_item(self) -> None:
        def function(state: list[int], value: int) -> tuple[int, list[int]]:
            state.append(value)
            if value == 6 and broken:
                raise KeyError("six")
            return sum(state), state

        open_stage = opened(RecurrentStage, listed(range(10)), function=function, initial=[])
        broken: list[Any] = []
        whole = list(open_stage(None))
        broken.append(True)
        stage = open_stage(None)
        assert stage.take(6) == whole[:6]
        for _ in range(2):
            with pytest.raises(ShardError, match="failed on sample 1 of shard 8: KeyError: 'six'") as caught:
                next(stage)
            assert isinstance(caught.value.__cause__, KeyError)
        broken.clear()
        assert list(open_stage(stage.place())) == whole[6:]

    def test_a_function_that_returns_no_pair_is_named(self) -> None:
        stage = opened(RecurrentStage, listed([1]), function=lambda state, value: value, initial=0)(None)
        with pytest.raises(ShardError, match="lambda> failed on sample 0 of shard 7: TypeError"):
            next(stage)

    def test_fewer_items_than_were_used_are_refused(self) -> None:
        inner = partial(opened, RecurrentStage, function=scan_in_place)
        initial = {"seen": [], "sum": 0, "constant": "." * 9000}
        stage = inner(listed(range(50)), initial=initial)(None)
        stage.skip(20)
        with pytest.raises(PositionError, match="20 items were used from a place on, but now the items end after 12"):
            inner(listed(range(12)), initial=initial)(stage.place())


class TestMapStage:
    def test_an_item_comes_out_alike_whenever_it_is_read_again(self) -> None:
        with keep_randomness():
            whole = list(opened(MapStage, listed([0] * 40), function=noisy, seed=1)(None))
            random.seed(5)
            alone = [
                next(opened(MapStage, listed([0] * 40), function=noisy, seed=1)({"next": number}))
                for number in reversed(range(40))
            ]
            other = list(opened(MapStage, listed([0] * 40), function=noisy, seed=2)(None))
        assert alone[::-1] == whole
        for part in (1, 2, 3):
            drawn = [item.value[part] for item in whole + other]
            assert len(set(drawn)) == 80

    def test_without_a_seed_randomness_is_left_alone(self) -> None:
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        stage = opened(MapStage, listed(range(5)), function=mixed, seed=None)(None)
        assert [item.value for item in stage] == [mixed(value) for value in range(5)]
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        assert after == before

    def test_items_that_are_left_out_are_not_mapped(self) -> None:
        mapped: list[int] = []
        stage = opened(MapStage, listed(range(20)), function=mapped.append, seed=None)(None)
        assert stage.skip(15) == 15
        assert next(stage) == Item(10, 0, None)
        assert stage.skip(15) == 4
        assert mapped == [15]

    def test_asking_a_window_over_a_map_maps_what_it_yields_once(self) -> None:
        mapped: list[int] = []
        inner = opened(MapStage, listed(range(300)), function=mapped.append, seed=None)
        open_stage = opened(WindowedStage, inner, width=2, step=2)
        stage = open_stage(None)
        stage.skip(140)
        next(stage)
        place = stage.place()
        mapped.clear()
        next(open_stage(place))
        assert mapped == [282, 283]


class DoubtfulError(Exception):
    """An error of the user's, with arguments of its own."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("kind", [partial(MapStage, seed=None), partial(MapStage, seed=1), FilterStage])
@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no"), DoubtfulError(1, 2)], ids=repr)
def test_a_failing_function_breaks_the_stream_off_and_names_the_sample(kind: Any, error: Exception) -> None:
    def function(value: int) -> int:
        if value == 6:
            raise error
        return value + 1

    stage = opened(kind, listed(range(10)), function=function)(None)
    with keep_randomness():
        assert len(stage.take(6)) == 6
        assert stage.place() == {"next": 6}
        said = rf"function failed on sample 1 of shard 8: {type(error).__name__}: {error}"
        for ask in (stage.__next__, stage.__next__, stage.place):
            with pytest.raises(ShardError, match=said) as caught:
                ask()
            assert caught.value.__cause__ is error


def test_what_is_neither_true_nor_false_is_no_filter() -> None:
    stage = opened(FilterStage, listed([np.arange(2)]), function=lambda value: value > 0)(None)
    with pytest.raises(ShardError, match="sample 0 of shard 7: ValueError"):
        next(stage)


def test_a_filter_keeps_items_as_they_are_and_none_is_a_value() -> None:
    stage = opened(FilterStage, listed([None, 1, None, 0]), function=lambda value: value is None)(None)
    assert list(stage) == [Item(7, 0, None), Item(7, 2, None)]
    assert list(opened(FilterStage, listed(range(9)), function=lambda value: np.bool_(False))(None)) == []


def test_after_an_interruption_below_windows_go_on_with_all_items() -> None:
    class Interrupted(Listed):
        def __next__(self) -> Item:
            if self.at == 4 and not self.asked["interrupted"]:
                self.asked["interrupted"] += 1
                raise OSError("not now")
            return super().__next__()

    items = [Item(0, number, number) for number in range(9)]
    asked: Counter[str] = Counter()
    stage = WindowedStage(lambda place: Interrupted(items, place, asked), None, width=3)
    assert [next(stage).value, next(stage).value] == [(0, 1, 2), (1, 2, 3)]
    with pytest.raises(OSError, match="not now"):
        next(stage)
    place = stage.place()
    rest = [(2, 3, 4), (3, 4, 5), (4, 5, 6), (5, 6, 7), (6, 7, 8)]
    assert [item.value for item in stage] == rest
    assert [item.value for item in WindowedStage(listed(range(9)), place, width=3)] == rest


@pytest.mark.parametrize(
    "kind",
    [
        partial(WindowedStage, width=2),
        partial(RecurrentStage, function=scan, initial=0),
        partial(MapStage, function=mixed, seed=None),
        partial(FilterStage, function=is_kept),
    ],
    ids=["windowed", "recurrent", "map", "filter"],
)
def test_closing_reaches_what_lies_below(kind: Any) -> None:
    asked: Counter[str] = Counter()
    stage = kind(listed(range(9), asked), None)
    next(stage)
    stage.close()
    assert asked["closed"] == 1


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no"), DoubtfulError(1, 2)], ids=repr)
def test_a_failing_function_over_many_at_once_names_the_sample_too(error: Exception) -> None:
    def function(value: int) -> int:
        if value == 6:
            raise error
        return value + 1

    stage = opened(MapStage, listed(range(10)), function=function, name_shard="part-{}.gz".format)(None)
    assert [run.values for run in stage.take_runs(4)] == [[1, 2, 3, 4]]
    assert stage.place() == {"next": 4}
    said = rf"function failed on sample 1 of part-8\.gz: {type(error).__name__}: {error}"
    for ask in (partial(stage.take_runs, 4), stage.__next__, partial(stage.take_runs, 4), stage.place):
        with pytest.raises(ShardError, match=said) as caught:
            ask()
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"on_error": "skip"}])
def test_runs_are_the_items_that_come_one_by_one(options: dict[str, Any]) -> None:
    with keep_randomness():
        whole = list(opened(MapStage, listed(range(23)), function=mixed, **options)(None))
        for number in (1, 4, 23, 30):
            stage = opened(MapStage, listed(range(23)), function=mixed, **options)(None)
            runs = [run for _ in range(23) for run in stage.take_runs(number)]
            assert [value for run in runs for value in run.values] == [item.value for item in whole]
            firsts = {(item.shard, item.number): item.value for item in whole}
            assert all(firsts[run.shard, run.first] == run.values[0] for run in runs)


def test_errors_call_a_shard_by_its_name() -> None:
    def fail(*_: Any) -> None:
        raise OSError("gone")

    for kind in (partial(RecurrentStage, initial=0), MapStage, FilterStage):
        with pytest.raises(ShardError, match=r"fail failed on sample 0 of part-7\.gz: OSError: gone"):
            next(opened(kind, listed([1]), function=fail, name_shard="part-{}.gz".format)(None))


@pytest.mark.parametrize("over", ["shards", "blocks"])
def test_a_stream_gives_its_stages_the_names_of_its_shards(over: str) -> None:
    def fail(*_: Any) -> int:
        raise OSError("gone")

    config = ReadAheadConfig(window=4, budget=Budget(max_tokens=9), length=fail)
    for step in (Mapped(fail), Filtered(fail), Recurrent(fail, 0), Budgeted(config)):
        source = Source(
            shards=NumberedShards([0, 3]), steps=(step,), buffer_size=4 if over == "blocks" else 0, seed_samples=False
        )
        for ask in (next, lambda stage: stage.take_runs(2)):
            stage, _ = source.open(Portion(0, (1,)), None)
            number = r"\d" if over == "blocks" else "0"
            with pytest.raises(ShardError, match=rf"sample {number} of shard-1\.bin"):
                ask(stage)
