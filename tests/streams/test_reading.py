"""Shards are read one after the other, from any place, whatever a shard's iterator can say of its own."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import NumberedShards, drawn
from test_running import assert_obeys

from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError, ShardError, StateError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams import reading as module
from lightning_stateful.streams.own_stream import OwnStream
from lightning_stateful.streams.reading import Reading
from lightning_stateful.streams.shards import ShardIterator, Shards
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Item, Open, Place

SIZES = [3, 0, 5, 1, 0, 4]
ORDER = (4, 2, 5, 0, 1, 3)
# Items between states, beside what their size asks for.
LEAST_GAP = 64


@pytest.fixture(autouse=True)
def _states_of_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for a state every 64 items holds for shards of a few, as these tests have."""
    monkeypatch.setattr(module, "_LEAST_GAP", 1)


def reading(sizes: Any = SIZES, numbers: Any = ORDER, epoch: int = 0, place: Any = None, **options: Any) -> Reading:
    own = {name: options.pop(name) for name in ("seed", "on_error") if name in options}
    return Reading(NumberedShards(sizes, **options), numbers, epoch, place, **own)


def opens(sizes: Any = SIZES, numbers: Any = ORDER, epoch: int = 0, **options: Any) -> Open:
    return lambda place: reading(sizes, numbers, epoch, place, **options)


def numbered(items: list[Item]) -> list[tuple[int, int]]:
    assert all(item.value[2:4] == (item.shard, item.number) for item in items)
    return [(item.shard, item.number) for item in items]


def test_shards_come_in_the_given_order_and_are_told_the_epoch() -> None:
    items = list(reading(epoch=6))
    assert numbered(items) == [(shard, number) for shard in ORDER for number in range(SIZES[shard])]
    assert {item.value[1] for item in items} == {6}


@pytest.mark.parametrize("state_size", [None, 0, 40, 1000])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_reading_goes_on_where_it_stands(state_size: int | None, seed: int | None) -> None:
    with keep_randomness():
        for sizes, numbers in ((SIZES, ORDER), ([30, 2, 25], (2, 0)), ([0, 0], (1, 0)), ([1], ()), ([1], (0,))):
            open_stage = opens(sizes, numbers, state_size=state_size, seed=seed, draws=seed is not None)
            items = assert_obeys(open_stage, random.Random(0))
            assert len(items) == sum(sizes[shard] for shard in numbers)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("state_size", [None, 0, 200])
def test_runs_are_the_items_that_come_one_by_one(on_error: str, state_size: int | None) -> None:
    fails = {2: 3, 4: -1, 0: 0} if on_error == "skip" else {}
    whole = list(reading(fails=fails, on_error=on_error))
    for seed in range(40):
        rng = random.Random(seed)
        stage, asked = reading(fails=fails, on_error=on_error, state_size=state_size), 0
        found: list[Item] = []
        while asked <= len(whole):
            number = rng.choice([0, 1, 2, 3, 20])
            asked += number or 1
            if rng.random() < 0.3:
                found += stage.take(1)
            runs = stage.take_runs(number)
            taken = [Item(run.shard, run.first + n, value) for run in runs for n, value in enumerate(run.values)]
            assert len(taken) == number or stage.take_runs(1) == []
            assert all(run.values for run in runs)
            found += taken
            if rng.random() < 0.3:
                stage = reading(
                    place=json.loads(json.dumps(stage.place())), fails=fails, on_error=on_error, state_size=state_size
                )
        assert found + list(stage) == whole


class TestStates:
    def test_a_state_is_taken_where_somebody_asks_and_only_when_it_is_worth_its_size(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_LEAST_GAP", LEAST_GAP)
        for padding in (0, 50, 500, 5000):
            asked: Counter[str] = Counter()
            stage = reading([2000], (0,), state_size=padding, asked=asked)
            characters, before, most = 0, None, 0
            for _ in range(2000):
                next(stage)
                place = stage.place()
                if place["state"] != before:
                    before = place["state"]
                    characters += len(json.dumps(before))
                most = max(most, place["since"])
            # What is written is bounded, and what has to be read again.
            gap = LEAST_GAP + (padding + 30) // 16
            assert characters <= 16 * 2000 + padding + 30
            assert most <= gap
            assert asked["states"] >= 2000 // (gap + 1)

    def test_nobody_asking_takes_none(self) -> None:
        asked: Counter[str] = Counter()
        stage = reading([500], (0,), state_size=0, asked=asked)
        stage.skip(400)
        assert asked["states"] == 0
        assert stage.place()["since"] == 0

    def test_with_a_state_nothing_is_read_again_and_without_one_all_of_the_shard(self) -> None:
        for state_size, again in ((0, 0), (None, 7)):
            asked: Counter[str] = Counter()
            stage = reading([9, 9, 9], (2, 0, 1), state_size=state_size)
            stage.skip(16)
            rest = reading([9, 9, 9], (2, 0, 1), place=stage.place(), state_size=state_size, asked=asked)
            assert asked["opened"] == 0
            assert numbered(list(rest)) == [(0, 7), (0, 8), *((1, number) for number in range(9))]
            assert asked["read"] == 11 + again
            assert asked["opened 2"] == 0

    def test_a_state_belongs_to_its_shard_alone(self) -> None:
        stage = reading([4, 4], (0, 1), state_size=0)
        stage.skip(4)
        assert stage.place()["state"]["next"] == 4
        next(stage)
        assert stage.place() == {
            "shard": 1,
            "item": 1,
            "since": 0,
            "state": {"next": 1, "padding": ""},
            "skipped_shards": 0,
        }
        stage = reading([4, 4], (0, 1), state_size=10_000)
        stage.skip(4)
        stage.place()
        next(stage)
        next(stage)
        # A large state of the first shard says nothing of when to take one of the second.
        assert stage.place()["state"]["next"] == 2

    def test_a_place_stays_the_same_after_the_files_are_closed(self) -> None:
        stage = reading([9], (0,), state_size=300)
        stage.skip(1)
        stage.place()
        stage.skip(4)
        before = json.dumps(stage.place())
        stage.close()
        assert json.dumps(stage.place()) == before
        assert [item.number for item in stage] == [5, 6, 7, 8]


class TestShorterShards:
    def test_a_shard_that_became_shorter_is_named(self) -> None:
        for on_error in ("raise", "skip"):
            stage = reading([9, 9], (1, 0), on_error=on_error)
            stage.skip(7)
            shorter = reading([9, 5], (1, 0), place=stage.place(), on_error=on_error)
            for ask in (shorter.__next__, lambda shorter=shorter: shorter.take_runs(3)):
                with pytest.raises(PositionError, match=r"7 samples of shard-1\.bin were used, .* ends after 5"):
                    ask()

    def test_behind_a_state_too(self) -> None:
        stage = reading([90], (0,), state_size=900)
        next(stage)
        stage.place()
        stage.skip(40)
        place = stage.place()
        assert (place["item"], place["since"]) == (41, 40)
        with pytest.raises(PositionError, match=r"41 samples of .* were used, but now it ends after 20"):
            next(reading([20], (0,), place=place, state_size=900))

    def test_one_that_ends_where_it_stood_goes_on_with_the_next(self) -> None:
        stage = reading([9, 2], (0, 1))
        stage.skip(7)
        assert numbered(list(reading([7, 2], (0, 1), place=stage.place()))) == [(1, 0), (1, 1)]


class TestSeeds:
    def test_what_a_sample_draws_follows_from_seed_epoch_shard_and_sample(self) -> None:
        with keep_randomness():
            whole = {item[:2]: item.value[4:] for item in reading(seed=3, draws=True)}
            random.seed(77)
            other_order = {item[:2]: item.value[4:] for item in reading(numbers=(0, 3, 5, 2), seed=3, draws=True)}
            others = [reading(seed=4, draws=True), reading(seed=3, draws=True, epoch=1)]
            others_drawn = [item.value[4:] for stage in others for item in stage]
        assert other_order == whole
        for place in range(3):
            assert len({drawn[place] for drawn in [*whole.values(), *others_drawn]}) == 3 * len(whole)

    def test_without_a_seed_randomness_is_left_alone(self) -> None:
        def randomness() -> Any:
            return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

        before = randomness()
        list(reading(state_size=0))
        reading().take_runs(100)
        assert randomness() == before

    @pytest.mark.parametrize("kind", ["shuffles as it begins", "shuffles as it is opened", "adds up draws", "buffers"])
    def test_a_shard_that_draws_is_read_again_with_the_same_draws(self, kind: str) -> None:
        class Drawing:
            def __iter__(self) -> Iterator[int]:
                return DRAWING[kind]()

        def opened(place: Place | None) -> Reading:
            return Reading(OwnStream(Drawing(), 1, 1), (0,), 0, place, seed=3)

        with keep_randomness():
            random.seed(1)
            whole = list(opened(None))
            stage = opened(None)
            stage.skip(7)
            place = stage.place()
            random.seed(2)
            assert list(opened(place)) == whole[7:]


def _shuffled() -> list[int]:
    numbers = list(range(20))
    random.shuffle(numbers)
    return numbers


def _walked() -> Iterator[int]:
    at = 0
    for _ in range(20):
        at += drawn()[0]
        yield at


def _buffered() -> Iterator[int]:
    buffer = list(range(5))
    for number in range(5, 20):
        buffer.append(number)
        yield buffer.pop(random.randrange(len(buffer)))
    yield from buffer


def _shuffled_as_it_begins() -> Iterator[int]:
    yield from _shuffled()


DRAWING: dict[str, Callable[[], Iterator[int]]] = {
    "shuffles as it begins": _shuffled_as_it_begins,
    "shuffles as it is opened": lambda: iter(_shuffled()),
    "adds up draws": _walked,
    "buffers": _buffered,
}


class TestErrors:
    @pytest.mark.parametrize("state_size", [None, 0])
    @pytest.mark.parametrize("as_runs", [False, True])
    def test_an_error_names_the_shard_and_the_sample_and_can_be_resumed(
        self, state_size: int | None, as_runs: bool
    ) -> None:
        stage = reading([3, 6], (0, 1), fails={1: 4}, state_size=state_size)
        taken = stage.take(3) + stage.take(4)
        assert len(taken) == 7
        place = json.loads(json.dumps(stage.place()))
        for _ in range(2):
            with pytest.raises(
                ShardError, match=r"shard-1\.bin could not be read at its sample 4: OSError: bad"
            ) as said:
                stage.take_runs(2) if as_runs else next(stage)
            assert isinstance(said.value.__cause__, OSError)
            assert 'on_error="skip"' in str(said.value)
        for at in (place, stage.place()):
            mended = reading([3, 6], (0, 1), place=at, state_size=state_size)
            assert numbered(list(mended)) == [(1, 4), (1, 5)]

    def test_a_shard_that_cannot_be_opened_is_named(self) -> None:
        asked: Counter[str] = Counter()
        stage = reading([3, 6], (0, 1), fails={1: -1}, asked=asked)
        stage.skip(3)
        with pytest.raises(ShardError, match=r"shard-1\.bin .* sample 0: FileNotFoundError: no shard 1"):
            next(stage)
        assert asked["closed"] == 1

    @pytest.mark.parametrize("state_size", [None, 0, 100])
    @pytest.mark.parametrize("draws", [False, True])
    def test_skipping_keeps_what_came_before_and_counts_the_shard(self, state_size: int | None, draws: bool) -> None:
        options: dict[str, Any] = {"fails": {2: 3, 5: -1, 0: 0}, "on_error": "skip", "state_size": state_size}
        if draws:
            options.update(draws=True, seed=1)
        with keep_randomness():
            items = assert_obeys(opens(**options), random.Random(1))
            assert numbered(items) == [(2, 0), (2, 1), (2, 2), (3, 0)]
            stage, counted = reading(**options), []
            for item in items:
                assert next(stage) == item
                # Wherever it is opened anew, the count goes on.
                stage = reading(place=stage.place(), **options)
                counted.append(stage.place()["skipped_shards"])
            assert next(stage, None) is None
        assert counted == [0, 0, 0, 3]
        assert stage.place()["skipped_shards"] == 3

    def test_skipping_skips_no_interruption(self) -> None:
        class Interrupted(NumberedShards):
            def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            next(Reading(Interrupted([3]), (0,), 0, on_error="skip"))

    @pytest.mark.parametrize("on_error", ["ignore", "", None, True])
    def test_other_ways_to_go_on_are_refused(self, on_error: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"on_error must be one of \('raise', 'skip'\)"):
            Source(shards=NumberedShards([1]), on_error=on_error)

    def test_a_reader_that_lets_a_stop_iteration_out_breaks_off_and_is_no_empty_shard(self) -> None:
        class Headers(NumberedShards):
            def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
                next(iter([]))  # The header of an empty file.
                raise AssertionError

        for ask in (lambda stage: stage.take_runs(1), next):
            with pytest.raises(ShardError, match="StopIteration"):
                ask(Reading(Headers([3]), (0,), 0))

    def test_a_state_that_does_not_fit_is_no_bad_shard_to_be_left_out(self) -> None:
        class Strict(NumberedShards):
            def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
                if state is not None and state["epoch"] != epoch:
                    raise DamagedStateError("the state is of another epoch")
                return super().read(shard, epoch)

        place = {"shard": 0, "item": 1, "since": 0, "state": {"epoch": 5}, "skipped_shards": 0}
        with pytest.raises(DamagedStateError, match="of another epoch"):
            list(Reading(Strict([3]), (0,), 0, place, on_error="skip"))


class TestFiles:
    def test_each_shard_is_closed_before_the_next_is_opened(self) -> None:
        class Exclusive(NumberedShards):
            def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
                assert self.asked["opened"] == self.asked["closed"]
                return super().read(shard, epoch, state)

        shards = Exclusive(SIZES, fails={2: 3})
        for take in (1, 2, 100):
            stage = Reading(shards, ORDER, 0, on_error="skip")
            while stage.take_runs(take):
                pass
            assert shards.asked["opened"] == shards.asked["closed"]

    def test_closing_closes_what_is_open_once(self) -> None:
        asked: Counter[str] = Counter()
        stage = reading(asked=asked)
        stage.close()
        assert not asked["closed"]
        next(stage)
        stage.close()
        stage.close()
        assert asked["opened 2"] == 1
        assert asked["opened"] == asked["closed"]

    def test_a_shard_that_became_shorter_is_closed(self) -> None:
        asked: Counter[str] = Counter()
        place = {"shard": 0, "item": 5, "since": 5, "state": None, "skipped_shards": 0}
        stage = reading([3], (0,), place=place, asked=asked)
        with pytest.raises(PositionError):
            next(stage)
        stage.close()
        assert asked["closed"] == 1

    def test_how_many_shards_are_opened_counts_all_whose_samples_were_read(self) -> None:
        stage = reading(SIZES, ORDER)
        opened: list[int] = []
        for item in stage:
            assert stage.num_opened == ORDER.index(item.shard) + 1
            opened.append(stage.num_opened)
        assert opened == sorted(opened)
        assert stage.num_opened == len(ORDER)
        assert Reading(NumberedShards([]), (), 0).num_opened == 0


def test_a_shard_iterator_need_not_do_more_than_yield() -> None:
    class Bare(ShardIterator):
        def __init__(self) -> None:
            self.left = [None, 0, ""]

        def __next__(self) -> Any:
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    class Bares(Shards):
        num_shards = 2

        def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
            assert state is None
            return Bare()

        def name(self, shard: int) -> str:
            return str(shard)

        def describe(self) -> dict[str, Any]:
            return {}

    items = assert_obeys(lambda place: Reading(Bares(), (1, 0), 0, place), random.Random(0))
    assert [item.value for item in items] == [None, 0, "", None, 0, ""]
    assert (Bares().warning, Bares().sizes(), Bares().reread) == ("", None, "")


class Counting(ShardIterator):
    """Numbers up to ten, whose state is what a test makes of the next."""

    def __init__(self, said: Callable[[Counting], Any]) -> None:
        self.said, self.counts, self.closed = said, {"next": 0}, 0

    def __next__(self) -> int:
        if self.counts["next"] == 10:
            raise StopIteration
        self.counts["next"] += 1
        return self.counts["next"] - 1

    def state(self) -> Any:
        return self.said(self)

    def close(self) -> None:
        self.closed += 1


class Counted(NumberedShards):
    """One shard of :class:`Counting`."""

    def __init__(self, said: Callable[[Counting], Any]) -> None:
        super().__init__([10])
        self.said = said

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        iterator = Counting(self.said)
        # Counted in by the iterator.
        iterator.counts = {"next": 0} if state is None else state
        return iterator


class TestStatesOfAuthors:
    def test_a_state_that_is_counted_in_is_taken_as_it_was(self) -> None:
        shards = Counted(lambda iterator: iterator.counts)
        whole, stage, places = list(Reading(shards, (0,), 0)), Reading(shards, (0,), 0), []
        for item in stage:
            places.append((item.value, stage.place()))
        for value, place in places:
            saved = json.dumps(place)
            assert [item.value for item in Reading(shards, (0,), 0, place)] == list(range(value + 1, 10))
            assert json.dumps(place) == saved
        assert len(places) == len(whole) == 10

    @pytest.mark.parametrize("state", [{"at": np.int64(3)}, {3: 4}, [np.arange(2)], float("nan"), {1, 2}, object()])
    def test_what_is_no_plain_data_is_told_with_the_shard(self, state: Any) -> None:
        for on_error in ("raise", "skip"):
            stage = Reading(Counted(lambda iterator: state), (0,), 0, on_error=on_error)  # type: ignore[arg-type]  # a str
            next(stage)
            for _ in range(2):
                with pytest.raises(StateError, match=r"state\(\) of Counting gave, for shard-0\.bin at its sample 1, "):
                    stage.place()

    def test_a_state_that_cannot_be_had_is_told_with_the_shard(self) -> None:
        def fail(iterator: Counting) -> Any:
            raise KeyError("offset")

        stage = Reading(Counted(fail), (0,), 0)
        assert stage.place()["item"] == 0
        next(stage)
        with pytest.raises(ShardError, match=r"state\(\) of Counting failed for shard-0\.bin .* KeyError") as caught:
            stage.place()
        assert isinstance(caught.value.__cause__, KeyError)

    @pytest.mark.parametrize(
        "given",
        [[1, 2], range(2), iter([1]), (one for one in "ab"), None],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_no_shard_iterator_is_told_and_never_skipped(self, given: Any) -> None:
        class Lists(NumberedShards):
            def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
                return given  # type: ignore[no-any-return]  # that is the point

        said = rf"read\(\) of .*Lists gave a {type(given).__name__} for shard-0\.bin\. .*ShardIterator"
        for ask in (lambda stage: stage.take_runs(1), next):
            with pytest.raises(ConfigurationError, match=said):
                ask(Reading(Lists([3]), (0,), 0, on_error="skip"))

    def test_an_iterator_that_counts_as_false_is_opened_once(self) -> None:
        class Sized(Counting):
            def __len__(self) -> int:
                return 0

        class Falses(Counted):
            def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
                self.asked["opened"] += 1
                return Sized(self.said)

        shards = Falses(lambda iterator: None)
        stage = Reading(shards, (0,), 0)
        assert [item.value for item in stage.take(3)] + [item.value for item in stage] == list(range(10))
        assert shards.asked["opened"] == 1
