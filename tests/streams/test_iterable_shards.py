"""Iterable datasets with a state of their own, with one on their iterator, and with none; iterables of batches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_stateful.errors import PositionError, ShardError
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.streams import shard_reader
from lightning_stateful.streams.iterables import IterableShards, LoaderShards, beginning_of
from lightning_stateful.streams.shard_reader import ShardReader

LENGTH = 11


@pytest.fixture(autouse=True)
def _states_at_every_sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What holds for a state every 256 samples holds for these few."""
    monkeypatch.setattr(shard_reader, "_LEAST_GAP", 1)
    with keep_randomness():
        yield


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

    epoch: int | None = None

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


class BeginsAnew(OnDataset):
    """Its own iterator, which forgets at ``iter()`` where it stands."""

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
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


class OnIterator(Told):
    """The state is the iterator's."""

    def __iter__(self) -> Iterator[Any]:
        return _Counting(self)


class OnBoth(OnIterator):
    """The dataset has a state too, in which the position is not."""

    def state_dict(self) -> dict[str, Any]:
        return {"files": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"files": 3}


KINDS = {kind.__name__: kind for kind in (Bare, Told, OnDataset, BeginsAnew, Rich, OnIterator, OnBoth)}
WITH_STATE = [name for name in KINDS if name not in ("Bare", "Told")]


def of(dataset: Any) -> IterableShards:
    return IterableShards(dataset, 1, 1, json.loads(json.dumps(beginning_of(dataset))))


def reads(dataset: Any, epoch: int = 0, state: Any = None, *, seed: int | None = 1, begun: Any = None) -> ShardReader:
    reader = ShardReader(begun or of(dataset), (0,), epoch, seed=seed)
    reader.reset(json.loads(json.dumps(state)))
    return reader


def numbers(name: str, epoch: int, first: int = 0) -> list[Any]:
    return [number if name == "Bare" else (epoch, number) for number in range(first, LENGTH)]


@pytest.mark.parametrize("name", KINDS)
def test_any_dataset_goes_on_at_every_sample(name: str) -> None:
    reader = reads(KINDS[name](), epoch=3)
    for number in range(LENGTH + 1):
        state = reader.get_state()
        saved = json.dumps(state)
        shards = of(KINDS[name]())
        for _ in range(2):
            assert list(reads(None, 3, state, begun=shards)) == numbers(name, 3, number)
            # Once more after another pass was begun and left.
            reads(None, 0, seed=None, begun=shards).next_many(4)
        assert json.dumps(state) == saved
        assert list(islice(reader, 1)) == numbers(name, 3, number)[:1]


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_dataset_with_a_state_makes_no_sample_again(name: str) -> None:
    reader = reads(KINDS[name](), seed=None)
    assert reader.skip(7) == 7
    state = reader.get_state()
    assert state["since"] == 0
    dataset = KINDS[name]()
    assert list(reads(dataset, state=state, seed=None)) == numbers(name, 0, 7)
    assert dataset.made in (0, 4)


@pytest.mark.parametrize("kind", [OnDataset, OnIterator])
def test_a_state_that_nothing_takes_any_more_is_refused(kind: Any) -> None:
    reader = reads(kind())
    reader.skip(3)
    with pytest.raises(ShardError, match=r"Told \(rank 0, worker 0\) .*load_state_dict"):
        next(reads(Told(), state=reader.get_state()))


@pytest.mark.parametrize("name", KINDS)
def test_passes_begin_at_the_beginning_whether_or_not_the_one_before_was_read_to_its_end(name: str) -> None:
    dataset = KINDS[name]()
    shards = of(dataset)
    for epoch, number in enumerate((3, LENGTH, 0, LENGTH + 1, 5)):
        assert list(islice(reads(dataset, epoch, seed=None, begun=shards), number)) == numbers(name, epoch)[:number]


def test_a_dataset_that_has_no_state_yet_has_no_beginning() -> None:
    class Late(OnDataset):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("nobody has iterated it")

    assert [beginning_of(dataset) for dataset in (Late(), Bare(), OnIterator())] == [None] * 3
    assert beginning_of(OnDataset()) == {"progress": 0}


class CountsPasses(Bare):
    """Its order, and floats that are drawn, follow from how often it was begun."""

    def __init__(self) -> None:
        super().__init__()
        self.num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        for number in random.Random(self.num_passes).sample(range(LENGTH), LENGTH):
            yield {"x": torch.rand(2), "label": number}


def labels(reader: ShardReader) -> list[int]:
    return [sample["label"] for sample in reader]


class TestCountedPasses:
    def test_earlier_ones_are_begun_in_another_process(self) -> None:
        whole = CountsPasses()
        orders = [labels(reads(whole, epoch)) for epoch in range(3)]
        assert len({str(order) for order in orders}) == 3
        for epoch in range(3):
            assert labels(reads(CountsPasses(), epoch)) == orders[epoch]
            reader = reads(CountsPasses(), epoch)
            reader.skip(4)
            assert labels(reads(CountsPasses(), epoch, reader.get_state())) == orders[epoch][4:]

    def test_not_where_two_begin_alike_or_a_worker_ends_with_its_pass(self) -> None:
        dataset = Bare()
        IterableShards(dataset, 1, 1).begin_passes(100)
        assert dataset.made == 16
        counted = CountsPasses()
        IterableShards(counted, 1, 1, stays=False).begin_passes(3)
        assert counted.num_passes == 0

    def test_other_first_samples_are_refused_unless_accepted(self) -> None:
        class AtRandom(Bare):
            def __iter__(self) -> Iterator[Any]:
                return iter([random.SystemRandom().randrange(10**9) for _ in range(LENGTH)])

        reader = reads(AtRandom())
        reader.skip(4)
        state = reader.get_state()
        with pytest.raises(PositionError, match=r"AtRandom \(rank 0, worker 0\) begins pass 0 with other samples"):
            next(reads(AtRandom(), state=state))
        accepting = IterableShards(AtRandom(), 1, 1, is_checked=False)
        assert len(list(reads(None, state={**state, "first": None}, begun=accepting))) == LENGTH - 4


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ([(torch.rand(3), torch.tensor(3))], [(torch.rand(3), torch.tensor(3))], True),
        ([torch.ones(1, dtype=torch.bfloat16)], [torch.zeros(1, dtype=torch.bfloat16)], False),
        ([np.zeros((2, 3), "u1")], [np.zeros((3, 2), "u1")], False),
        ([[1, 23]], [[12, 3]], False),
        (range(20), [*range(19), 99], True),
    ],
)
def test_first_samples_are_told_apart_by_labels_or_else_by_all_that_they_hold(
    one: Any, other: Any, is_same: bool
) -> None:
    digests = []
    for samples in (one, other):
        node: Any = IterableShards(list(samples), 1, 1).node(0, 0)
        node.reset()
        list(node)
        digests.append(node.first())
    assert None not in digests
    assert (digests[0] == digests[1]) is is_same


class TestLoaders:
    """Iterables of batches, begun anew in each epoch by ``iter()``."""

    class Going(OnDataset):
        """Goes on with other batches in each pass, from a state that it has at the end of the one before."""

        passes = 0

        def set_epoch(self, epoch: int) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            if self.position == self.length:
                self.passes, self.position = self.passes + 1, 0
            while self.position < self.length:
                self.position += 1
                yield self.passes, self.position - 1

        def state_dict(self) -> dict[str, Any]:
            return {"passes": self.passes, "progress": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.passes, self.position = state["passes"], state["progress"]

    def test_in_one_process_the_next_pass_reads_nothing_of_the_one_before(self) -> None:
        loader = OnIterator(3)
        shards = LoaderShards(loader, 1)
        first = reads(None, 0, begun=shards)
        list(first)
        next(reads(None, 1, {**first.get_state(), "shard": 0}, begun=shards))
        assert loader.made == 4

    @pytest.mark.parametrize("is_same_process", [True, False])
    def test_the_next_pass_goes_on_from_the_end_of_the_one_before(self, is_same_process: bool) -> None:
        shards = LoaderShards(self.Going(3), 1)
        state = None
        for epoch in range(3):
            reader = reads(None, epoch, state, begun=shards)
            assert list(reader) == [(epoch, number) for number in range(3)]
            state = {**reader.get_state(), "shard": 0}
            shards = shards if is_same_process else LoaderShards(self.Going(3), 1)

    @pytest.mark.parametrize("is_same_process", [True, False])
    def test_a_pass_that_was_cut_is_followed_by_one_that_is_begun_anew(self, is_same_process: bool) -> None:
        shards = LoaderShards(OnIterator(4), 1)
        reader = reads(None, begun=shards)
        reader.next_many(2)
        left = reader.get_state()
        cut = {"after": left["state"], "since": left["since"], "pass": 0, "is_ended": False}
        state = {**left, "item": 0, "since": 0, "state": cut}
        shards = shards if is_same_process else LoaderShards(OnIterator(4), 1)
        assert list(reads(None, 1, state, begun=shards)) == [(1, number) for number in range(4)]

    def test_one_without_state_is_read_again_and_its_samplers_are_told_the_epoch(self) -> None:
        class Sampler:
            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

        class Loader:
            def __init__(self) -> None:
                self.sampler = Sampler()

            def __iter__(self) -> Iterator[Any]:
                return iter([(self.sampler.epoch, number) for number in range(3)])

        reader = reads(None, 2, begun=LoaderShards(Loader(), 1))
        assert next(reader) == (2, 0)
        assert list(reads(None, 2, reader.get_state(), begun=LoaderShards(Loader(), 1))) == [(2, 1), (2, 2)]
        assert reader.get_state()["state"] is None
