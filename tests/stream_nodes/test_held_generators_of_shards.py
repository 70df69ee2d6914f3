"""Generators that shards lead to are seeded alike in a process that has read many shards and in one that resumes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hf_streams as hf
from support.node_cases import NumberedShards
from torchdata.nodes import BaseNode, IterableWrapper, Mapper

from lightning_stateful.generators import held_generators
from lightning_stateful.stream_nodes.hugging_face import HuggingFaceShards
from lightning_stateful.stream_nodes.nodes import Shards
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.streams.chunks import Chunks

NUM_SHARDS = 8
SIZE = 40


def _noise() -> Callable[[dict[str, Any]], dict[str, Any]]:
    own, other = np.random.default_rng(3), random.Random(4)

    def noise(row: dict[str, Any]) -> dict[str, Any]:
        return {"drawn": [own.random(), other.random(), *hf.drawn()]}

    return noise


def _hugging_face(build: Callable[[Any], Any], folder: Path) -> Shards:
    return HuggingFaceShards(build(hf.stream("table", folder, (SIZE,) * NUM_SHARDS)))


def _augmented(numbers: range) -> BaseNode[Any]:
    generator = np.random.default_rng(numbers.start)
    return Mapper(IterableWrapper(numbers), lambda number: (number, generator.random()))


class SomeAugmented(NumberedShards):
    """Shards of which the last ones hold generators of their own."""

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        numbers = range(100 * shard, 100 * shard + SIZE)
        return _augmented(numbers) if shard > 5 else IterableWrapper(numbers)


class Augments:
    """A chunk that is its own iterator, with a generator of its own in some."""

    def __init__(self, ref: int) -> None:
        self.left, self.generators = list(range(100 * ref, 100 * ref + SIZE)), [np.random.default_rng(ref)] * (ref > 5)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop(0), [generator.random() for generator in self.generators]


class MadeLate:
    """Makes its generator when it first needs one."""

    generator: Any = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.generator is None:
            self.generator = np.random.default_rng(7)
        return {"drawn": self.generator.random(np.shape(row["n"]))}


def _map_chunk(function: Any, ref: int) -> Iterator[Any]:
    for number in np.random.permutation(SIZE):
        yield int(number), function({"n": ref})["drawn"]


_IN_BATCHES: dict[str, Any] = {"batched": True, "batch_size": 20}

CASES: dict[str, Callable[[Path], Shards]] = {
    "map": lambda folder: _hugging_face(lambda ds: ds.map(_noise()), folder),
    "map, shuffle": lambda folder: _hugging_face(lambda ds: ds.map(_noise()).shuffle(3, buffer_size=15), folder),
    "shuffle, map": lambda folder: _hugging_face(lambda ds: ds.shuffle(3, buffer_size=15).map(_noise()), folder),
    "filter, shuffle, map": lambda folder: _hugging_face(
        lambda ds: ds.filter(hf.of_three).shuffle(3, buffer_size=15).map(hf.draw), folder
    ),
    "made late": lambda folder: _hugging_face(lambda ds: ds.map(MadeLate()), folder),
    "made late, in batches": lambda folder: _hugging_face(lambda ds: ds.map(MadeLate(), **_IN_BATCHES), folder),
    "made late in chunks": lambda folder: Chunks(range(NUM_SHARDS), partial(_map_chunk, MadeLate())),
    "some nodes": lambda folder: SomeAugmented([SIZE] * NUM_SHARDS, draws=True),
    "some chunks": lambda folder: Chunks(range(NUM_SHARDS), Augments),
}


def _started(shards: Shards, epoch: int, state: Any = None) -> ShardReader:
    reader = ShardReader(shards, range(NUM_SHARDS), epoch, seed=3)
    reader.reset(state)
    return reader


@pytest.mark.parametrize("name", CASES)
def test_a_resume_draws_as_a_process_that_has_read_all_before(name: str, tmp_path: Path) -> None:
    shards = CASES[name](tmp_path)
    for epoch in range(2):
        reader, whole, states = _started(shards, epoch), [], []
        while True:
            states.append(reader.state_dict())
            if not (samples := reader.next_many(25)):
                break
            whole += [hf.plain(sample) for sample in samples]
        for number in (0, 1, 7, len(states) - 3):
            again = [hf.plain(sample) for sample in _started(CASES[name](tmp_path), epoch, states[number])]
            assert again == whole[25 * number :], (epoch, number)


@pytest.mark.parametrize("name", ["map, shuffle", "shuffle, map", "filter, shuffle, map"])
def test_what_hugging_face_shuffles_comes_in_its_own_order(name: str, tmp_path: Path) -> None:
    shards = CASES[name](tmp_path)
    for epoch in range(2):
        own = []
        for shard in range(NUM_SHARDS):
            node = shards.node(shard, epoch)
            node.reset()
            own += [sample["n"] for sample in node]
        assert [sample["n"] for sample in _started(shards, epoch)] == own


@pytest.mark.parametrize(("name", "a_shard"), [("map, shuffle", 0), ("some nodes", 40), ("some chunks", 12)])
def test_what_shards_lead_to_is_not_looked_through_for_each(
    name: str, a_shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    reached = held_generators.reached
    monkeypatch.setattr(held_generators, "reached", lambda *of: looked.extend(found := list(reached(*of))) or found)
    counts = []
    for many in (2, 6):
        reader = ShardReader(CASES[name](tmp_path), range(many), 0, seed=3)
        assert len(list(reader)) == many * SIZE
        counts.append(len(looked))
        looked.clear()
    assert 0 < counts[0] <= counts[1] <= counts[0] + 4 * a_shard
