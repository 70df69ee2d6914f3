"""Iterable datasets of the user's: with a state of their own, with one on their iterator, and with none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import Crew, drawn, round_trip
from test_running import assert_obeys
from torch.utils.data import IterableDataset

from lightning_stateful.errors import PositionError, ShardError, StateError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams import reading
from lightning_stateful.streams.lane import ALONE, StreamConfig
from lightning_stateful.streams.own_stream import OwnStream, beginning_of
from lightning_stateful.streams.reading import Reading
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Item, Open
from lightning_stateful.streams.standing import Standing

LENGTH = 11


@pytest.fixture(autouse=True)
def _states_at_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for a state every 64 samples holds for these few."""
    monkeypatch.setattr(reading, "_LEAST_GAP", 1)


class Bare(IterableDataset[Any]):
    """Numbers, and nothing but them."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.made = length, 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            self.made += 1
            yield number


class Told(Bare):
    """Numbers of an epoch that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((self.epoch, number) for number in super().__iter__())


class OnDataset(IterableDataset[Any]):
    """The state is the dataset's, which goes on from it where it is iterated, as torchdata has it."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.position, self.epoch, self.made = length, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        # The state has to come later, or it would be forgotten.
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.length:
            self.position += 1
            self.made += 1
            yield self.epoch, self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["progress"]


class ByReference(OnDataset):
    """Its state is its own dict, which it goes on to change."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"progress": 0, "seen": [0]}

    def __iter__(self) -> Iterator[Any]:
        self.state = {"progress": self.state["progress"], "seen": list(self.state["seen"])}
        while self.state["progress"] < self.length:
            self.state["progress"] += 1
            self.state["seen"].append(self.state["progress"])
            yield self.epoch, self.state["progress"] - 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Own(OnDataset):
    """The dataset is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position >= self.length:
            raise StopIteration
        self.position += 1
        return self.epoch, self.position - 1


class Rich(OnDataset):
    """Its state has what JSON does not."""

    def state_dict(self) -> dict[str, Any]:
        return {"progress": np.int64(self.position), 3: (1, b"\0"), "t": torch.tensor([self.position]), "s": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["progress"], np.int64)
        assert (state[3], state["s"]) == ((1, b"\0"), {1, 2})
        self.position = int(state["t"])


class _Counting:
    def __init__(self, dataset: Any) -> None:
        self.dataset, self.position = dataset, 0

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> Any:
        if self.position >= self.dataset.length:
            raise StopIteration
        self.position += 1
        self.dataset.made += 1
        return self.dataset.epoch, self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["progress"]


class OnIterator(IterableDataset[Any]):
    """The state is the iterator's."""

    def __init__(self) -> None:
        self.length, self.epoch, self.made = LENGTH, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return _Counting(self)


class OnBoth(OnIterator):
    """The dataset has a state too, in which the position is not."""

    def state_dict(self) -> dict[str, Any]:
        return {"files": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"files": 3}


class Nested(OnDataset):
    """Counts in an object of its own, as a dataset around another does."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"progress": 0}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.held["progress"] < self.length:
            self.held["progress"] += 1
            yield self.epoch, self.held["progress"] - 1
        self.held["progress"] = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held.update(state)


KINDS = {kind.__name__: kind for kind in (Bare, Told, OnDataset, ByReference, Own, Rich, OnIterator)}


def opens(dataset: Any, epoch: int = 0, shard: int = 0, lanes: tuple[int, int] = (1, 1), seed: int | None = 1) -> Open:
    shards = OwnStream(dataset, *lanes)
    return lambda place: Reading(shards, (shard,), epoch, place, seed=seed)


def values(items: list[Item]) -> list[Any]:
    return [item.value for item in items]


@pytest.mark.parametrize("name", KINDS)
def test_any_dataset_goes_on_where_it_stands(name: str) -> None:
    with keep_randomness():
        items = assert_obeys(opens(KINDS[name](), epoch=3), random.Random(0))
    assert [item.number for item in items] == list(range(LENGTH))
    expected = list(range(LENGTH)) if name == "Bare" else [(3, number) for number in range(LENGTH)]
    assert values(items) == expected


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("Bare", "Told")])
def test_what_has_a_state_makes_no_sample_again(name: str) -> None:
    stage = opens(KINDS[name](), seed=None)(None)
    stage.skip(7)
    place = stage.place()
    assert place["since"] == 0
    dataset = KINDS[name]()
    stage = opens(dataset, seed=None)(place)
    assert len(values(list(stage))) == 4
    assert dataset.made in (0, 4)


class BeginsAnew(OnDataset):
    """Its own iterator, which forgets at ``iter()`` where it stands."""

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
        return self

    def __next__(self) -> Any:
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return self.position - 1


@pytest.mark.parametrize("seed", [None, 1])
def test_a_state_is_loaded_again_into_what_begins_anew_at_iter(seed: int | None) -> None:
    stage = opens(BeginsAnew(), seed=seed)(None)
    stage.skip(7)
    assert values(list(opens(BeginsAnew(), seed=seed)(stage.place()))) == [7, 8, 9, 10]


def test_samples_that_are_seeded_are_made_again_from_the_beginning_of_their_run() -> None:
    stage = opens(OnDataset(1000))(None)
    stage.skip(900)
    place = stage.place()
    # A state is taken once in 256 samples, where a run of 32 begins.
    assert place["since"] < 256 + 64
    assert (place["item"] - place["since"]) % 32 == 0
    dataset = OnDataset(1000)
    assert values(opens(dataset)(place).take(3)) == [(0, 900), (0, 901), (0, 902)]
    assert dataset.made <= place["since"] + 32


def test_what_has_none_makes_all_of_them_again_and_says_why() -> None:
    stage = opens(Bare())(None)
    stage.skip(7)
    dataset = Bare()
    assert values(list(opens(dataset)(stage.place()))) == [7, 8, 9, 10]
    assert dataset.made == 11
    assert "no state_dict" in OwnStream(Bare(), 1, 1).reread
    assert OwnStream(OnDataset(), 1, 1).reread == ""


@pytest.mark.parametrize("name", KINDS)
def test_passes_begin_at_the_beginning_whether_or_not_the_one_before_was_read_to_its_end(name: str) -> None:
    dataset = KINDS[name]()
    shards = OwnStream(dataset, 1, 1)
    with keep_randomness():
        for epoch, number in enumerate((3, LENGTH, 0, LENGTH + 1, 5, LENGTH)):
            items = Reading(shards, (0,), epoch, seed=0).take(number)
            told = [number if name == "Bare" else (epoch, number) for number in range(min(number, LENGTH))]
            assert values(items) == told
            assert Reading(shards, (0,), epoch, seed=0).place()["item"] == 0


def test_what_a_dataset_counts_in_an_object_of_its_own_does_not_leak_into_the_next_pass() -> None:
    dataset = Nested()
    shards = OwnStream(dataset, 1, 1, beginning=beginning_of(dataset))
    for epoch in range(3):
        assert values(Reading(shards, (0,), epoch).take(4)) == [(epoch, number) for number in range(4)]


@pytest.mark.parametrize("name", [*KINDS, "OnBoth", "Nested"])
def test_with_a_beginning_datasets_go_on_where_they_stand_and_begin_at_their_beginning(name: str) -> None:
    dataset = {**KINDS, "OnBoth": OnBoth, "Nested": Nested}[name]()
    shards = OwnStream(dataset, 1, 1, beginning=json.loads(json.dumps(beginning_of(dataset))))

    def told(epoch: int, first: int) -> list[Any]:
        return [number if name == "Bare" else (epoch, number) for number in range(first, LENGTH)]

    with keep_randomness():
        for epoch, number in enumerate((3, LENGTH, 7, 0)):
            stage = Reading(shards, (0,), epoch, seed=0)
            stage.skip(number)
            place = json.loads(json.dumps(stage.place()))
            assert values(list(Reading(shards, (0,), epoch, place, seed=0))) == told(epoch, number)
            assert values(list(Reading(shards, (0,), epoch, seed=0))) == told(epoch, 0)


def test_a_dataset_that_has_no_state_yet_has_no_beginning() -> None:
    class Late(OnDataset):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("nobody has iterated it")

    assert [beginning_of(dataset) for dataset in (Late(), Bare(), OnIterator())] == [None] * 3
    assert beginning_of(OnDataset()) == {"progress": 0}


def test_a_state_is_the_datasets_and_the_iterators() -> None:
    def state_after_two(dataset: Any) -> Any:
        stage = opens(dataset, seed=None)(None)
        stage.skip(2)
        return stage.place()["state"]

    assert state_after_two(OnDataset()) == {"dataset": {"progress": 2}, "iterator": None}
    assert state_after_two(Own()) == {"dataset": {"progress": 2}, "iterator": None}
    assert state_after_two(OnIterator()) == {"dataset": None, "iterator": {"progress": 2}}
    assert state_after_two(OnBoth()) == {"dataset": {"files": 3}, "iterator": {"progress": 2}}
    assert state_after_two(Bare()) is None


def test_a_state_on_both_is_kept_whole_as_torchdata_does() -> None:
    assert_obeys(opens(OnBoth()), random.Random(0))


def test_states_are_copies_and_stay_as_they_were() -> None:
    for kind in (ByReference, Rich):
        stage = opens(kind())(None)
        places = []
        for number in range(LENGTH):
            places.append((place := stage.place(), json.dumps(place), number))
            next(stage)
        for place, said, number in places:
            assert json.dumps(place) == said
            assert [position for _, position in values(list(opens(kind())(place)))] == list(range(number, LENGTH))
            assert json.dumps(place) == said


def test_the_users_dataset_stays_where_it_is() -> None:
    dataset = OnDataset()
    list(opens(dataset, epoch=4)(None))
    assert (dataset.position, dataset.epoch) == (0, 0)


def test_the_epoch_is_told_before_the_state_is_loaded_and_the_pass_begins() -> None:
    told: list[Any] = []

    class Order(OnDataset):
        def set_epoch(self, epoch: int) -> None:
            told.append(("epoch", epoch))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            told.append(("state", state["progress"]))
            super().load_state_dict(state)

        def __iter__(self) -> Iterator[Any]:
            told.append("iter")
            return super().__iter__()

    stage = opens(Order(), epoch=2, seed=None)(None)
    stage.skip(3)
    next(opens(Order(), epoch=2, seed=None)(stage.place()))
    assert told == [("epoch", 2), "iter", ("epoch", 2), ("state", 3), "iter"]


def test_a_dataset_that_has_become_shorter_is_refused() -> None:
    stage = opens(Bare())(None)
    stage.skip(9)
    with pytest.raises(PositionError, match=r"9 samples of Bare \(rank 0, worker 0\) were used, .* after 4"):
        next(opens(Bare(4))(stage.place()))


def test_an_error_names_class_rank_and_worker() -> None:
    class Failing(Bare):
        def __iter__(self) -> Iterator[Any]:
            yield 0
            raise KeyError("lost")

    stage = opens(Failing(), shard=5, lanes=(2, 3))(None)
    next(stage)
    with pytest.raises(ShardError, match=r"Failing \(rank 1, worker 2\) .* sample 1: KeyError: 'lost'"):
        next(stage)


def test_lanes_are_shards_of_their_own_and_stay_with_their_lanes() -> None:
    shards = OwnStream(Bare(), 2, 3)
    assert (shards.num_shards, shards.pinned, shards.draws) == (6, True, True)
    assert [shards.name(lane) for lane in (0, 1, 2, 5)] == [
        "Bare (rank 0, worker 0)", "Bare (rank 1, worker 0)", "Bare (rank 0, worker 1)", "Bare (rank 1, worker 2)",
    ]  # fmt: skip
    of = StreamConfig(sources={ALONE: Source(shards=OwnStream(Bare(), 2, 1))}, batch_size=4)
    crew = Crew(Standing.beginning(of, 0, 2, 1))
    crew.serve(0, 3)
    crew.serve(1, 1)
    standing = round_trip(crew.standing()).following()
    crew = Crew(round_trip(standing))
    # Lane 1 goes on with its own, and then every lane begins its own once more.
    assert crew.serve_all() == [*range(11), *range(4, 11), *range(11)]


def test_closing_reaches_generators() -> None:
    closed: list[str] = []

    class Closing(Bare):
        def __iter__(self) -> Iterator[Any]:
            try:
                yield from super().__iter__()
            finally:
                closed.append("closed")

    stage = opens(Closing())(None)
    next(stage)
    stage.close()
    assert closed == ["closed"]


class TestDraws:
    class Drawing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(LENGTH).tolist()
            random.shuffle(order)
            total = 0
            for number in order:
                total += drawn()[1]
                yield number, total, *drawn()

    def test_samples_of_a_dataset_that_draws_come_alike_from_every_place(self) -> None:
        with keep_randomness():
            items = assert_obeys(opens(self.Drawing(), seed=3), random.Random(5))
            assert sorted(value[0] for value in values(items)) == list(range(LENGTH))
            others = [
                values(list(opens(self.Drawing(), **how)(None)))
                for how in ({"seed": 4}, {"seed": 3, "epoch": 1}, {"seed": 3, "shard": 1, "lanes": (1, 2)})
            ]
        assert all(other != values(items) for other in others)
        assert len({str(other) for other in others}) == 3

    def test_without_a_seed_they_come_as_the_process_has_it(self) -> None:
        with keep_randomness():
            runs = []
            for _ in range(2):
                torch.manual_seed(1)
                random.seed(1)
                np.random.seed(1)
                runs.append(values(list(opens(self.Drawing(), seed=None)(None))))
        assert runs[0] == runs[1]


@pytest.mark.parametrize("owner", ["dataset", "iterator"])
def test_a_state_that_cannot_be_kept_is_said_to_be_whose_it_is(owner: str) -> None:
    class Odd(OnDataset if owner == "dataset" else OnIterator):  # type: ignore[misc]  # one of two
        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            if owner == "iterator":
                iterator.state_dict = self.odd  # type: ignore[attr-defined]  # it has one
            return iterator

        def odd(self) -> dict[str, Any]:
            return {"o": object()}

        if owner == "dataset":
            state_dict = odd

    reading = Reading(OwnStream(Odd(), 1, 1), [0], 0)
    reading.take(2)
    with pytest.raises(StateError, match=rf"The {owner}'s state_dict\(\)\['o'\] is a object, which cannot be kept"):
        reading.place()
