"""Hugging Face streams as shards: what each holds, and how it goes on."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import fsspec.asyn
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from support import hf_streams as hf
from torch.utils.data import DataLoader

from lightning_stateful.errors import ConfigurationError, DamagedStateError
from lightning_stateful.samplers.rng import keep_randomness, seed_randomness
from lightning_stateful.streams import hugging_face_stages as stages
from lightning_stateful.streams import hugging_face_versions as versions
from lightning_stateful.streams.hugging_face import HuggingFaceShards, is_hugging_face
from lightning_stateful.streams.reading import Reading

# A shard with nothing in it, with one sample, within a table, and over several tables.
SIZES, OTHER_SIZES = (0, 1, 2, 8), (3, 4)


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face sleeps whenever an interleaved parquet file has been read."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


Build = Callable[[Any, Any], Any]
# What older versions cannot do, or do in another way.
recent = pytest.mark.skipif(versions.version() < (5, 2), reason="of datasets 5.2")


def _interleaved(**options: Any) -> Build:
    return lambda ds, other: interleave_datasets([ds, other], **options)


_ARROW_MAP = {"function": hf.plus_table, "batched": True, "batch_size": 3}
# Shards of these hold what the dataset holds.
PARTED: dict[str, Build] = {
    "plain": lambda ds, _: ds,
    "map": lambda ds, _: ds.map(hf.plus),
    "map of columns": lambda ds, _: ds.map(lambda n: {"more": n + 1}, input_columns="n"),
    "batched map": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3),
    "large batches": lambda ds, _: ds.map(hf.plus_batch, batched=True),
    "longer batches": lambda ds, _: ds.map(hf.twice, batched=True, batch_size=3),
    "batches of batches": lambda ds, _: ds.map(hf.twice, batched=True, batch_size=3).map(
        hf.plus_batch, batched=True, batch_size=4
    ),
    "filter": lambda ds, _: ds.filter(hf.of_three),
    "batched filter": lambda ds, _: ds.filter(hf.of_three_batch, batched=True, batch_size=4),
    "filter and batched map": lambda ds, _: ds.filter(hf.of_three).map(hf.plus_batch, batched=True, batch_size=3),
    "batched map and filter": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3).filter(hf.of_three),
    "repeat": lambda ds, _: ds.repeat(2),
    "batched map, repeat": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3).repeat(2),
    "repeat, batched map": lambda ds, _: ds.repeat(3).map(hf.plus_batch, batched=True, batch_size=4),
    "select columns": lambda ds, _: ds.select_columns(["text"]),
    "rename column": lambda ds, _: ds.rename_column("n", "number"),
    "remove columns": lambda ds, _: ds.remove_columns("text"),
    "torch": lambda ds, _: ds.select_columns("n").with_format("torch"),
    "numpy": lambda ds, _: ds.with_format("numpy"),
    "arrow": lambda ds, _: ds.with_format("arrow"),
    "pandas": lambda ds, _: ds.with_format("pandas"),
    "numpy map": lambda ds, _: ds.with_format("numpy").map(hf.plus),
    "map to numpy": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3).with_format("numpy"),
    "map to arrow": lambda ds, _: ds.map(hf.plus).with_format("arrow"),
    "arrow map": lambda ds, _: ds.with_format("arrow").map(**_ARROW_MAP),
    "arrow map of rows": lambda ds, _: ds.with_format("arrow").map(hf.plus_table),
    "arrow map, filter": lambda ds, _: (
        ds.with_format("arrow").map(**_ARROW_MAP).filter(hf.of_three_table, batched=True, batch_size=2)
    ),
    "arrow map to rows": lambda ds, _: ds.with_format("arrow").map(**_ARROW_MAP).with_format(None),
    "arrow map, batched map": lambda ds, _: (
        ds.with_format("arrow").map(**_ARROW_MAP).with_format(None).map(hf.twice, batched=True, batch_size=4)
    ),
    "concatenate": lambda ds, other: concatenate_datasets([ds, other]),
    "concatenate, batched map": lambda ds, other: concatenate_datasets([ds, other]).map(
        hf.plus_batch, batched=True, batch_size=3
    ),
    # Only one of the sources reads tables, which Hugging Face then forgets to cut into batches in its shards.
    "concatenate unlike ones": lambda ds, other: concatenate_datasets([ds.map(hf.same), other]).map(hf.plus),
    "concatenate unlike ones, filter": lambda ds, other: concatenate_datasets([ds.map(hf.same), other]).filter(
        hf.of_three_batch, batched=True, batch_size=2
    ),
    "concatenate columns": lambda ds, other: concatenate_datasets(
        [ds, ds.rename_columns({"n": "number", "text": "words"})], axis=1
    ),
    "interleave all": _interleaved(stopping_strategy="all_exhausted_without_replacement"),
    "interleave all by chance": _interleaved(
        stopping_strategy="all_exhausted_without_replacement", probabilities=[0.7, 0.3], seed=2
    ),
}
# Of these each shard is something by itself.
APART: dict[str, Build] = {
    "indices": lambda ds, _: ds.map(lambda row, number: {"number": number}, with_indices=True),
    "drop last batch": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3, drop_last_batch=True),
    "take": lambda ds, _: ds.take(7),
    "skip": lambda ds, _: ds.skip(5),
    "skip and take": lambda ds, _: ds.skip(3).take(5),
    "take, batched map": lambda ds, _: ds.take(7).map(hf.plus_batch, batched=True, batch_size=2),
    "interleave": _interleaved(),
    "interleave again": _interleaved(stopping_strategy="all_exhausted"),
    "interleave by chance": _interleaved(probabilities=[0.7, 0.3], seed=2),
    "interleave again by chance": _interleaved(probabilities=[0.7, 0.3], seed=2, stopping_strategy="all_exhausted"),
    "interleave maps": lambda ds, other: interleave_datasets(
        [ds.map(hf.same, batched=True, batch_size=3), other.filter(hf.of_three)]
    ),
    "interleave, batched map": lambda ds, other: interleave_datasets([ds, other]).map(
        hf.plus_batch, batched=True, batch_size=3
    ),
}
# Their batches end with their shards.
BATCHES: dict[str, Build] = {
    "batch": lambda ds, _: ds.batch(3),
    "batch of numpy": lambda ds, _: ds.with_format("numpy").batch(3),
}
# After these, a shard is read again.
LOSSY: dict[str, Build] = {
    "shuffle": lambda ds, _: ds.shuffle(seed=1, buffer_size=4),
    "shuffle shards": lambda ds, _: ds.shuffle(seed=1, buffer_size=1),
    "map, shuffle": lambda ds, _: ds.map(hf.plus).shuffle(seed=1, buffer_size=3),
    "shuffle, batched map": lambda ds, _: ds.shuffle(seed=1, buffer_size=4).map(
        hf.plus_batch, batched=True, batch_size=3
    ),
    "interleave shuffled": lambda ds, other: interleave_datasets([ds.shuffle(seed=1, buffer_size=3), other]),
    "batch by column": lambda ds, _: ds.map(_group).batch(by_column="group", batch_size=2),
}
# Hugging Face leaves its event loops open.
ASYNC: dict[str, Build] = {"async map": lambda ds, _: ds.map(hf.plus_later)}
ASYNC_DRAWING: dict[str, Build] = {"map, async map": lambda ds, _: ds.map(hf.draw).map(hf.plus_later)}


def _group(row: dict[str, Any]) -> dict[str, Any]:
    return {"group": row["n"] // 2}


# What can follow on one another in any order, as it leaves the columns as they are.
CHAINED: list[Build] = [
    lambda ds, _: ds.map(hf.same),
    lambda ds, _: ds.map(hf.same, batched=True, batch_size=2),
    lambda ds, _: ds.map(hf.twice, batched=True, batch_size=3),
    lambda ds, _: ds.map(hf.same, batched=True, batch_size=4, drop_last_batch=True),
    lambda ds, _: ds.filter(hf.of_three),
    lambda ds, _: ds.filter(hf.of_three_batch, batched=True, batch_size=4),
    lambda ds, _: ds.with_format("arrow").map(hf.same_table, batched=True, batch_size=3).with_format(None),
    lambda ds, _: ds.repeat(2),
    lambda ds, _: ds.take(9),
    lambda ds, _: ds.skip(2),
    lambda ds, other: concatenate_datasets([ds, other]),
    lambda ds, other: concatenate_datasets([ds.map(hf.same), other]),
    _interleaved(),
    _interleaved(stopping_strategy="all_exhausted"),
    _interleaved(probabilities=[0.6, 0.4], seed=1, stopping_strategy="all_exhausted_without_replacement"),
]


def streams(kind: str, folder: Path) -> tuple[Any, Any]:
    # A table in memory is cut evenly.
    sizes = SIZES if kind != "table" else (3, 3, 3)
    return hf.stream(kind, folder, sizes), hf.stream(kind, folder, OTHER_SIZES, first=100, name="other")


def build(name: str, kind: str, folder: Path) -> Any:
    found = {**PARTED, **APART, **BATCHES, **LOSSY, **ASYNC}[name]
    return built(found, *streams(kind, folder))


def built(build: Build, dataset: Any, other: Any) -> Any:
    """A pipeline, as far as the version of ``datasets`` in use can do that."""
    try:
        return build(dataset, other)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        if versions.version() >= (5, 2):
            raise
        pytest.skip(f"datasets {datasets.__version__}: {error}")


def samples(iterable: Any) -> list[Any]:
    return [hf.plain(sample) for sample in iterable]


def read_with_states(shards: HuggingFaceShards, shard: int, epoch: int) -> tuple[list[Any], list[Any]]:
    iterator = shards.read(shard, epoch)
    values, states = [], [iterator.state()]
    for sample in iterator:
        values.append(hf.plain(sample))
        states.append(iterator.state())
    return values, states


def the_shard(dataset: Any, shard: int, epoch: int) -> list[Any]:
    """A shard as Hugging Face reads it."""
    part = versions.shard_of(dataset, shard)
    part.set_epoch(epoch)
    return samples(part)


def as_multiset(values: list[Any]) -> list[str]:
    return sorted(json.dumps(value, sort_keys=True) for value in values)


class TestWhatShardsHold:
    @pytest.mark.parametrize("kind", ["table", "arrow"])
    @pytest.mark.parametrize("name", PARTED)
    def test_together_they_hold_what_the_dataset_holds(self, name: str, kind: str, tmp_path: Path) -> None:
        dataset = build(name, kind, tmp_path)
        shards = HuggingFaceShards(dataset)

        parts = [value for shard in range(shards.num_shards) for value in samples(shards.read(shard, 0))]

        assert as_multiset(parts) == as_multiset(samples(dataset))
        assert shards.warning == ""

    @pytest.mark.parametrize("name", [*PARTED, *APART, *BATCHES, *LOSSY])
    def test_a_shard_is_what_hugging_face_makes_it_in_every_epoch(self, name: str, tmp_path: Path) -> None:
        dataset = build(name, "arrow", tmp_path)
        shards = HuggingFaceShards(dataset)

        for shard in range(shards.num_shards):
            for epoch in (0, 3):
                assert samples(shards.read(shard, epoch)) == the_shard(dataset, shard, epoch)

    # Hugging Face leaves files open, before 4.0.
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("kind", hf.KINDS)
    def test_every_kind_of_file_is_read_shard_by_shard(self, kind: str, tmp_path: Path) -> None:
        sizes = SIZES if kind != "table" else (3, 3, 3, 2)
        shards = HuggingFaceShards(hf.stream(kind, tmp_path, sizes))

        read = [[sample["text"] for sample in shards.read(shard, 1)] for shard in range(shards.num_shards)]

        starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
        assert read == [hf.rows(start, size)["text"] for start, size in zip(starts, sizes, strict=True)]

    @recent
    @pytest.mark.parametrize("strategy", ["auto", "examples"])
    def test_a_split_by_node_is_undone_and_left_as_it_was(self, strategy: str, tmp_path: Path) -> None:
        dataset = split_dataset_by_node(hf.stream("arrow", tmp_path, (2, 3)), 1, 2, strategy=strategy)
        before = samples(dataset)

        shards = HuggingFaceShards(dataset)

        assert [len(samples(shards.read(shard, 0))) for shard in range(shards.num_shards)] == [2, 3]
        assert samples(dataset) == before
        assert (dataset._distributed.rank, dataset._distributed.world_size) == (1, 2)

    @pytest.mark.parametrize("name", ["plain", "batched map", "concatenate columns", "interleave all"])
    def test_the_users_own_iteration_goes_on_undisturbed(self, name: str, tmp_path: Path) -> None:
        dataset = build(name, "arrow", tmp_path)
        expected = samples(dataset)
        running = iter(dataset)
        first = [hf.plain(next(running)) for _ in range(2)]
        state = dataset.state_dict()

        shards = HuggingFaceShards(dataset)
        for shard in range(shards.num_shards):
            samples(shards.read(shard, 5))

        assert dataset.state_dict() == state
        assert first + samples(running) == expected
        assert dataset.epoch == 0

    @pytest.mark.parametrize("name", ["batched map", "concatenate columns", "interleave all by chance"])
    def test_two_readings_of_a_shard_do_not_know_of_each_other(self, name: str, tmp_path: Path) -> None:
        shards = HuggingFaceShards(build(name, "arrow", tmp_path))
        shard = shards.num_shards - 1
        values, states = read_with_states(shards, shard, 0)

        one, other = shards.read(shard, 0), shards.read(shard, 0, states[2])
        mixed: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(len(values) - 2):
            mixed[0].append(hf.plain(next(one)))
            mixed[1].append(hf.plain(next(other)))

        assert mixed == (values[:-2], values[2:])
        assert one.state() == states[-3]


def arguments(dataset: Any) -> list[Any]:
    """What the sources of a dataset read."""
    found = [stage.kwargs for stage in stages.walk(dataset._ex_iterable) if hasattr(stage, "kwargs")]
    # Some say where they were read last.
    return [{name: value for name, value in kwargs.items() if name != "files_iterables"} for kwargs in found]


@recent
class TestDividing:
    @pytest.mark.parametrize("kind", ["json", "parquet", "generator", "table"])
    @pytest.mark.parametrize("name", ["plain", "take", "shuffle", "repeat", "interleave", "concatenate"])
    def test_shards_read_what_hugging_face_divides_them_into(self, kind: str, name: str, tmp_path: Path) -> None:
        dataset = build(name, kind, tmp_path)
        shards = HuggingFaceShards(dataset)
        # The user's own iteration leaves its state behind.
        next(iter(dataset))
        for copied in (shards, pickle.loads(pickle.dumps(shards)), copy.deepcopy(shards)):
            for shard in range(dataset.num_shards):
                own, theirs = copied._shard(shard), dataset.shard(dataset.num_shards, shard)
                assert list(map(str, arguments(own))) == list(map(str, arguments(theirs)))
                assert own.num_shards == theirs.num_shards
                assert samples(own.shard(1, 0)) == samples(theirs)

    @pytest.mark.parametrize(("number", "parts"), [(7, 7), (7, 3), (7, 1), (2, 2), (1, 1)])
    @pytest.mark.parametrize("contiguous", [True, False])
    def test_any_division_is_that_of_hugging_face(self, number: int, parts: int, contiguous: bool) -> None:
        own = {
            "parts": [(first, 1) for first in range(number)],
            "of": tuple(range(9)),
            "names": list("abcdefg"[:number]),
        }
        dataset = datasets.IterableDataset.from_generator(lambda parts, of, names: hf.generate(parts), gen_kwargs=own)
        divided = HuggingFaceShards(dataset)._dataset
        for part in range(parts):
            theirs = dataset.shard(parts, part, contiguous=contiguous)
            assert arguments(divided.shard(parts, part, contiguous=contiguous)) == arguments(theirs)

    def test_a_shard_of_many_costs_no_more_than_one_of_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        many = datasets.IterableDataset.from_generator(hf.generate, gen_kwargs={"parts": [(0, 1)] * 5000})
        shards = HuggingFaceShards(many.map(hf.plus).take(9000))
        monkeypatch.setattr(datasets.iterable_dataset, "_split_gen_kwargs", lambda *_, **__: pytest.fail("all files"))
        assert arguments(shards._shard(4321)) == [{"parts": [(0, 1)]}]


class TestGoingOn:
    @pytest.mark.parametrize("name", [*PARTED, *APART, *BATCHES])
    def test_a_shard_goes_on_at_every_sample(self, name: str, tmp_path: Path) -> None:
        self.check(HuggingFaceShards(build(name, "arrow", tmp_path)))

    # Hugging Face leaves files of a reading that was broken off to the garbage collector.
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("kind", [kind for kind in hf.KINDS if kind not in ("arrow", "generator")])
    @pytest.mark.parametrize("name", ["plain", "batched map", "interleave"])
    def test_a_shard_of_any_file_goes_on_at_every_sample(self, kind: str, name: str, tmp_path: Path) -> None:
        # Hugging Face finds out the columns of text from its first file.
        if kind != "text" or name == "plain":
            self.check(HuggingFaceShards(build(name, kind, tmp_path)))
        if kind == "csv":
            gc.collect()

    @pytest.mark.parametrize("kind", ["table", "parquet"])
    def test_a_shard_of_more_than_a_table_goes_on_at_its_seams(self, kind: str, tmp_path: Path) -> None:
        dataset = hf.stream(kind, tmp_path, (2005,), chunk=1000).map(hf.plus_batch, batched=True)
        shards = HuggingFaceShards(dataset)
        values, states = read_with_states(shards, 0, 0)

        for number in (1, 999, 1000, 1001, 1999, 2000, 2001, 2004, 2005):
            assert samples(shards.read(0, 0, states[number])) == values[number:]

    def test_a_shard_that_is_one_batch_goes_on(self, tmp_path: Path) -> None:
        # Hugging Face cannot make a batch of a shard with nothing in it.
        dataset = hf.stream("arrow", tmp_path, (1, 7)).map(hf.plus_batch, batched=True, batch_size=None)

        self.check(HuggingFaceShards(dataset))

    @given(chosen=st.data())
    def test_a_shard_of_any_chain_of_stages_goes_on(self, chosen: st.DataObject) -> None:
        dataset = hf.stream("table", Path(), (6, 6))
        other = hf.stream("table", Path(), (2, 1), first=100)
        for add in chosen.draw(st.lists(st.sampled_from(CHAINED), min_size=2, max_size=4)):
            with suppress(pytest.skip.Exception):
                dataset = built(add, dataset, other)
        shards = HuggingFaceShards(dataset)
        shard = chosen.draw(st.integers(0, shards.num_shards - 1))
        epoch = chosen.draw(st.sampled_from([0, 2]))

        values, states = read_with_states(shards, shard, epoch)

        assert values == the_shard(dataset, shard, epoch)
        number = chosen.draw(st.integers(0, len(values)))
        assert samples(shards.read(shard, epoch, states[number])) == values[number:]

    @pytest.mark.parametrize("name", LOSSY)
    def test_where_samples_are_held_back_there_is_no_state_and_reading_again_is_exact(
        self, name: str, tmp_path: Path
    ) -> None:
        shards = HuggingFaceShards(build(name, "arrow", tmp_path))

        for shard in range(shards.num_shards):
            values, states = read_with_states(shards, shard, 2)
            assert set(states) == {None}
            assert samples(pickle.loads(pickle.dumps(shards)).read(shard, 2)) == values
        assert shards.reread

    def test_a_generator_is_read_again(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("generator", tmp_path, (3,)))

        assert set(read_with_states(shards, 0, 0)[1]) == {None}
        assert "generator" in shards.reread

    def test_each_epoch_is_shuffled_anew_and_each_time_alike(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("arrow", tmp_path, (30,)).shuffle(seed=1, buffer_size=10))

        orders = [[sample["n"] for sample in shards.read(0, epoch)] for epoch in (0, 1, 2, 1)]

        assert orders[1] == orders[3]
        assert len({tuple(order) for order in orders}) == 3

    @staticmethod
    def check(shards: HuggingFaceShards) -> None:
        assert shards.reread == ""
        for shard in range(shards.num_shards):
            for epoch in (0, 2):
                values, states = read_with_states(shards, shard, epoch)
                assert None not in states[1:]
                for number, state in enumerate(states):
                    rest = shards.read(shard, epoch, json.loads(json.dumps(state)))
                    assert rest.state() == state
                    assert samples(rest) == values[number:], (shard, epoch, number)


def serve(shards: HuggingFaceShards, shard: int, state: Any = None, item: int = 0, since: int = 0) -> Iterator[Any]:
    """A shard as its reader serves it: seeded for each item, those left out among them."""
    iterator = shards.read(shard, 1, state)
    number = item - since
    while True:
        with keep_randomness():
            seed_randomness(1000 * shard + number)
            try:
                sample = hf.plain(next(iterator))
            except StopIteration:
                return
        number += 1
        if number > item:
            yield sample, iterator.state()


DRAWING: dict[str, Build] = {
    "map": lambda ds, _: ds.map(hf.draw),
    "filter": lambda ds, _: ds.filter(hf.by_chance),
    "batched map": lambda ds, _: ds.map(hf.draw_batch, batched=True, batch_size=3),
    "batched filter": lambda ds, _: ds.filter(hf.by_chance_batch, batched=True, batch_size=4),
    "batches of batches": lambda ds, _: ds.map(hf.draw_batch, batched=True, batch_size=3).map(
        hf.draw_batch_again, batched=True, batch_size=4
    ),
    "map, batched map": lambda ds, _: ds.map(hf.draw).map(hf.plus_batch, batched=True, batch_size=3),
    "filter, batched map": lambda ds, _: ds.filter(hf.by_chance).map(hf.plus_batch, batched=True, batch_size=3),
    "batched map, map": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3).map(hf.draw),
    "map, batch": lambda ds, _: ds.map(hf.draw).batch(3),
    "map to arrow": lambda ds, _: ds.map(hf.draw).with_format("arrow"),
    "maps to arrow": lambda ds, _: ds.map(hf.draw).map(hf.draw_again).with_format("arrow"),
    "arrow map": lambda ds, _: ds.with_format("arrow").map(hf.draw_table, batched=True, batch_size=3),
    "arrow map of rows": lambda ds, _: ds.with_format("arrow").map(hf.draw_table).with_format(None),
    "map, shuffle": lambda ds, _: ds.map(hf.draw).shuffle(seed=1, buffer_size=4),
    "interleave, batched map": lambda ds, other: interleave_datasets([ds, other]).map(
        hf.draw_batch, batched=True, batch_size=3
    ),
    "concatenate, map": lambda ds, other: concatenate_datasets([ds, other]).map(hf.draw),
}
# A resume runs these functions at the samples that they are run at anyway.
ALWAYS_EXACT = ("map", "filter", "batched map, map", "concatenate, map")


class TestDrawing:
    @pytest.mark.parametrize("name", DRAWING)
    def test_what_functions_draw_is_the_same_after_a_resume_anywhere(self, name: str, tmp_path: Path) -> None:
        shards = HuggingFaceShards(built(DRAWING[name], *streams("arrow", tmp_path)))

        self.check(shards)
        assert shards.draws

    def test_what_a_generator_draws_is_the_same_after_a_resume_anywhere(self) -> None:
        parts = [(0, 4), (4, 3)]
        generator = datasets.IterableDataset.from_generator(hf.generate_draws, gen_kwargs={"parts": parts})

        self.check(HuggingFaceShards(generator.map(hf.plus)))

    @pytest.mark.parametrize("name", DRAWING)
    def test_there_is_a_state_unless_draws_would_be_others(self, name: str, tmp_path: Path) -> None:
        shards = HuggingFaceShards(built(DRAWING[name], *streams("arrow", tmp_path)))

        states = [state for _, state in serve(shards, shards.num_shards - 1)]

        assert states
        assert {state is None for state in states} == {name not in ALWAYS_EXACT}

    def test_a_batch_that_did_not_draw_can_be_gone_on_from_until_one_does(self, tmp_path: Path) -> None:
        def draw_late(batch: dict[str, list[Any]]) -> dict[str, Any]:
            return {"drawn": [hf.drawn() if batch["n"][0] >= 6 else [0.0] for _ in batch["n"]]}

        shards = HuggingFaceShards(
            hf.stream("arrow", tmp_path, (12,)).map(draw_late, batched=True, batch_size=3).map(hf.draw_again)
        )

        states = [state for _, state in serve(shards, 0)]

        assert [state is None for state in states] == [False] * 6 + [True] * 6
        self.check(shards)

    @recent
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("name", [*ASYNC, *ASYNC_DRAWING])
    def test_async_functions_run_ahead_and_are_read_again(self, name: str, tmp_path: Path) -> None:
        shards = HuggingFaceShards({**ASYNC, **ASYNC_DRAWING}[name](*streams("arrow", tmp_path)))

        assert {state for _, state in serve(shards, 3)} == {None}
        assert "async" in shards.reread
        self.check(shards)
        gc.collect()

    def test_a_reading_leaves_out_samples_as_it_has_served_them(self, tmp_path: Path) -> None:
        dataset = hf.stream("arrow", tmp_path, (6,)).map(hf.draw_batch, batched=True, batch_size=5)
        served = Reading(HuggingFaceShards(dataset), [0], 1, seed=3)
        values = [next(served).value for _ in range(2)]
        place = served.place()
        values += [item.value for item in served]

        rest = Reading(HuggingFaceShards(dataset), [0], 1, place, seed=3)

        assert [item.value for item in rest] == values[2:]

    def test_functions_of_hugging_face_are_not_taken_for_the_users(self, tmp_path: Path) -> None:
        dataset = hf.stream("arrow", tmp_path, (3,)).rename_column("n", "number").remove_columns("text").batch(2)

        assert not HuggingFaceShards(dataset).draws
        assert HuggingFaceShards(dataset.map(hf.same)).draws

    @staticmethod
    def check(shards: HuggingFaceShards) -> None:
        for shard in range(shards.num_shards):
            served = list(serve(shards, shard))
            state, since = None, 0
            for number, (_, taken) in enumerate(served):
                state, since = (state, since + 1) if taken is None else (taken, 0)
                rest = [value for value, _ in serve(shards, shard, state, number + 1, since)]
                assert rest == [value for value, _ in served[number + 1 :]], (shard, number)


class TestStates:
    def test_a_state_is_a_fresh_copy_that_a_checkpoint_can_hold(self, tmp_path: Path) -> None:
        dataset = build("interleave by chance", "arrow", tmp_path).map(hf.plus_batch, batched=True, batch_size=3)
        iterator = HuggingFaceShards(dataset).read(1, 0)
        next(iterator)
        state = iterator.state()
        kept = copy.deepcopy(state)
        samples(iterator)

        assert state == kept
        assert iterator.state() is not iterator.state()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == state

    def test_loading_leaves_the_state_as_it_is(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(build("batched map", "arrow", tmp_path))
        state = read_with_states(shards, 3, 0)[1][4]
        kept = copy.deepcopy(state)

        samples(shards.read(3, 0, state))

        assert state == kept

    def test_a_generator_that_holds_arrays_becomes_plain_data(self, tmp_path: Path) -> None:
        ds, other = streams("arrow", tmp_path)
        dataset = interleave_datasets([ds, other], probabilities=[0.5, 0.5], seed=1)
        dataset._ex_iterable.generator = np.random.Generator(np.random.MT19937(3))
        shards = HuggingFaceShards(dataset)
        values, states = read_with_states(shards, 1, 0)

        assert samples(shards.read(1, 0, json.loads(json.dumps(states[1])))) == values[1:]

    @pytest.mark.parametrize("state", [{}, {"epoch": 0}, {"epoch": 0, "examples_iterable": None}, [], 7, "here"])
    def test_what_is_no_state_is_refused(self, state: Any, tmp_path: Path) -> None:
        with pytest.raises(DamagedStateError, match="other stages"):
            HuggingFaceShards(hf.stream("arrow", tmp_path, (3,))).read(0, 0, state)

    @recent
    def test_a_state_of_another_epoch_is_refused(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("arrow", tmp_path, (3,)))
        state = read_with_states(shards, 0, 1)[1][1]

        with pytest.raises(DamagedStateError, match="not of epoch 2"):
            shards.read(0, 2, state)

    @pytest.mark.parametrize("name", ["map", "concatenate", "interleave", "interleave all by chance", "filter"])
    def test_a_state_of_other_stages_is_refused(self, name: str, tmp_path: Path) -> None:
        state = read_with_states(HuggingFaceShards(hf.stream("arrow", tmp_path, (3,)).take(2)), 0, 0)[1][1]

        with pytest.raises(DamagedStateError, match="other stages"):
            HuggingFaceShards(build(name, "arrow", tmp_path)).read(0, 0, state)


class TestWorkers:
    @pytest.mark.parametrize("start", ["fork", "spawn"])
    def test_every_worker_reads_its_shard_whole_and_goes_on_in_it(self, start: str, tmp_path: Path) -> None:
        dataset = hf.stream("parquet", tmp_path, (4, 5)).filter(hf.of_three).map(hf.in_worker)
        shards = HuggingFaceShards(dataset)
        states = [read_with_states(shards, shard, 1)[1] for shard in range(2)]

        # A lock that some thread holds while workers are forked.
        with fsspec.asyn.get_lock():
            loader = DataLoader(
                hf.ShardOfWorker(shards, [None, states[1][1]]),
                batch_size=None,
                num_workers=2,
                multiprocessing_context=start,
            )
            read = list(loader)

        assert sorted(sample[:2] for sample in read) == [[0, 0], [2, 0], [3, 0], [6, 1], [8, 1]]
        assert [sample[2] for sample in read if sample[1] == 0] == states[0][1:]
        assert not any(sample[3] for sample in read)

    def test_datasets_are_known_without_importing_their_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "datasets")

        assert not is_hugging_face([1])
        assert "datasets" not in sys.modules

    def test_only_iterable_datasets_are_known(self, tmp_path: Path) -> None:
        assert is_hugging_face(hf.stream("arrow", tmp_path, (3,)))
        assert not is_hugging_face(datasets.Dataset.from_dict({"n": [1]}))


class TestErrors:
    def test_a_missing_file_is_the_readers_own_error(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("json", tmp_path, (3, 3)))
        Path(shards.name(1)).unlink()

        assert len(samples(shards.read(0, 0))) == 3
        with pytest.raises(FileNotFoundError, match=r"part1\.jsonl"):
            next(shards.read(1, 0))

    @recent
    def test_a_truncated_archive_is_the_readers_own_error(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("text", tmp_path, (4000,)))
        file = Path(shards.name(0))
        file.write_bytes(file.read_bytes()[:-200])

        with pytest.raises(EOFError):
            samples(shards.read(0, 0))

    def test_a_corrupted_parquet_file_is_the_readers_own_error(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("parquet", tmp_path, (3, 3)))
        Path(shards.name(1)).write_bytes(b"PAR1 and then nothing of it PAR1")

        assert len(samples(shards.read(0, 0))) == 3
        with pytest.raises(pa.ArrowInvalid):
            next(shards.read(1, 0))

    def test_an_error_in_a_function_passes_through(self, tmp_path: Path) -> None:
        def fail(row: dict[str, Any]) -> dict[str, Any]:
            raise KeyError(row["n"])

        with pytest.raises(KeyError, match="0"):
            next(HuggingFaceShards(hf.stream("arrow", tmp_path, (3,)).map(fail)).read(0, 0))

    @recent
    @pytest.mark.parametrize("options", [{}, {"probabilities": [0.5, 0.5], "seed": 1}], ids=["in turn", "at random"])
    def test_behind_an_interleaved_shard_nobody_sleeps(
        self, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, other = (hf.stream("parquet", tmp_path / name, (3, 4)) for name in ("one", "other"))
        dataset = interleave_datasets([one, other], stopping_strategy="all_exhausted_without_replacement", **options)
        slept: list[float] = []
        monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 5)
        monkeypatch.setattr(time, "sleep", slept.append)
        shards = HuggingFaceShards(dataset.map(hf.plus))

        assert [len(samples(shards.read(shard, 0))) for shard in range(2)] == [6, 8]
        iterator = shards.read(0, 0)
        next(iterator)
        iterator.close()

        assert 5 not in slept
        # The user's own iteration is as it was.
        assert len(samples(dataset)) == 14
        assert 5 in slept

    def test_a_process_may_end_in_the_midst_of_parquet_files(self, tmp_path: Path) -> None:
        for name in ("one", "other"):
            hf.stream("parquet", tmp_path / name, (4000,), chunk=100)
        script = f"""
import datasets
from lightning_stateful.streams.hugging_face import HuggingFaceShards
parts = [
    datasets.load_dataset("parquet", data_files={str(tmp_path)!r} + f"/{{name}}/*.parquet", split="train",
                          streaming=True, cache_dir={str(tmp_path / "cache")!r})
    for name in ("one", "other")
]
for dataset in (datasets.interleave_datasets(parts), parts[0]):
    closed = HuggingFaceShards(dataset).read(0, 0)
    print(next(closed)["n"])
    closed.close()
"""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
        )
        assert (done.returncode, done.stdout.split()) == (0, ["0", "0"]), done.stderr

    def test_a_closed_reading_ends(self, tmp_path: Path) -> None:
        iterator = HuggingFaceShards(hf.stream("parquet", tmp_path, (3,))).read(0, 0)
        next(iterator)

        iterator.close()

        assert list(iterator) == []


class TestWhatIsRefused:
    def test_other_datasets(self) -> None:
        with pytest.raises(ConfigurationError, match=r"got Dataset.*to_iterable_dataset"):
            HuggingFaceShards(datasets.Dataset.from_dict({"n": [1]}))

    @recent
    def test_shuffling_without_a_seed(self, tmp_path: Path) -> None:
        ds, other = streams("arrow", tmp_path)

        with pytest.raises(ConfigurationError, match=r"shuffle has no seed.*seed="):
            HuggingFaceShards(ds.shuffle(buffer_size=4).map(hf.plus))
        with pytest.raises(ConfigurationError, match=r"interleave_datasets has no seed.*seed="):
            HuggingFaceShards(interleave_datasets([ds, other], probabilities=[0.5, 0.5]))
        HuggingFaceShards(ds.shuffle(generator=np.random.default_rng(2**63), buffer_size=4))

    def test_columns_that_are_counted_from_the_beginning_of_the_dataset(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="add_column counts rows from 0 in each of the 2 shards"):
            HuggingFaceShards(hf.stream("arrow", tmp_path, (2, 2)).add_column("label", [0, 1, 2, 3]))

        whole = hf.stream("arrow", tmp_path, (4,)).add_column("label", [3, 2, 1, 0])
        assert [sample["label"] for sample in HuggingFaceShards(whole).read(0, 0)] == [3, 2, 1, 0]

    @pytest.mark.parametrize("name", ["take", "skip"])
    def test_counts_that_were_meant_for_one_node(self, name: str, tmp_path: Path) -> None:
        dataset = getattr(split_dataset_by_node(hf.stream("arrow", tmp_path, (2, 2)), 0, 2), name)(2)

        with pytest.raises(ConfigurationError, match=rf"{name}\(2\) was called after split_dataset_by_node"):
            HuggingFaceShards(dataset)


class TestOlderVersions:
    @pytest.mark.parametrize(
        ("name", "version", "said"),
        [
            ("take", "5.0.1", r"take in the pipeline: datasets 5\.0\.1 cannot read .* datasets>=5\.1"),
            ("skip", "5.0.0", "skip in the pipeline"),
            pytest.param("repeat", "3.6.0", r"repeat in the pipeline.*datasets>=4\.0", marks=recent),
        ],
    )
    def test_stages_that_a_version_cannot_read_are_refused(
        self, name: str, version: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = build(name, "arrow", tmp_path)
        monkeypatch.setattr(datasets, "__version__", version)

        with pytest.raises(ConfigurationError, match=said):
            HuggingFaceShards(dataset)

    @pytest.mark.parametrize(("version", "is_exact"), [("3.2.0", True), ("3.3.2", False), ("3.5.1", False)])
    def test_shards_are_read_again_where_a_versions_states_leave_samples_out(
        self, version: str, is_exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = build("map", "arrow", tmp_path)
        monkeypatch.setattr(datasets, "__version__", version)

        shards = HuggingFaceShards(dataset)

        assert (shards.reread == "") == is_exact
        states = read_with_states(shards, 3, 0)[1]
        assert [state is not None for state in states[1:]] == [is_exact] * 8


class TestWhatIsWarnedOf:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("take", r"take\(7\) is divided among the 4 shards"),
            ("skip", r"skip\(5\) is divided among the 4 shards"),
            ("indices", r"with_indices=True\) counts from 0 in each of the 4 shards"),
            ("drop last batch", "last batch of each of the 4 shards"),
            ("interleave", r"each of its 2 shards by itself \(first_exhausted"),
            ("interleave again by chance", r"each of its 2 shards by itself \(all_exhausted"),
            (
                "shuffle",
                r"\.shuffle\(buffer_size=4\).*loses what is in the buffer.*reads the shard again.*buffer_size=",
            ),
        ],
    )
    def test_stages_that_mean_something_else_in_shards(self, name: str, said: str, tmp_path: Path) -> None:
        warning = HuggingFaceShards(build(name, "arrow", tmp_path)).warning

        assert re.search(said, warning), warning

    @recent
    def test_two_stages_are_both_named_and_equal_ones_once(self, tmp_path: Path) -> None:
        warning = HuggingFaceShards(hf.stream("arrow", tmp_path, (2, 2)).skip(1).take(2).repeat(2).take(2)).warning

        assert warning.count("take(2)") == 1
        assert "skip(1)" in warning

    @pytest.mark.parametrize("name", [name for name in APART if "interleave" not in name])
    def test_with_one_shard_nothing_differs(self, name: str, tmp_path: Path) -> None:
        dataset = APART[name](hf.stream("arrow", tmp_path, (5,)), None)
        shards = HuggingFaceShards(dataset)

        assert shards.warning == ""
        assert samples(shards.read(0, 0)) == samples(dataset)

    def test_take_and_skip_of_one_number_still_part_the_dataset(self, tmp_path: Path) -> None:
        dataset = hf.stream("arrow", tmp_path, SIZES)
        parts = [HuggingFaceShards(part) for part in (dataset.take(5), dataset.skip(5))]

        read = [sample["n"] for part in parts for shard in range(4) for sample in part.read(shard, 0)]

        assert sorted(read) == list(range(sum(SIZES)))


class TestWhatIsSaidOfShards:
    @recent
    def test_a_shard_goes_by_its_file_or_its_number(self, tmp_path: Path) -> None:
        arrow, table = hf.stream("arrow", tmp_path, (2, 2)), hf.stream("table", tmp_path, (2, 2))
        both = interleave_datasets([arrow, hf.stream("json", tmp_path, (1, 1, 1, 1, 1))])

        assert HuggingFaceShards(arrow.map(hf.plus)).name(1) == str(tmp_path / "part1.arrow")
        assert HuggingFaceShards(table).name(1) == "shard 1 of 2"
        assert HuggingFaceShards(both).name(0).endswith("part1.jsonl and 1 more")

    def test_a_description_is_plain_and_knows_nothing_of_folders(self, tmp_path: Path) -> None:
        said = []
        for folder in ("here", "there"):
            (tmp_path / folder).mkdir()
            dataset = build("shuffle, batched map", "arrow", tmp_path / folder)
            said.append(json.dumps(pickle.loads(pickle.dumps(HuggingFaceShards(dataset))).describe()))

        assert said[0] == said[1]
        assert json.loads(said[0])["stages"] == "arrow > shuffle(buffer_size=4) > map(batch_size=3)"

    @pytest.mark.parametrize(
        ("file", "named"),
        [
            ("/data/a/part.parquet", "part.parquet"),
            ("file:///data/a/part.parquet", "part.parquet"),
            ("zip://part.json::/data/a/all.zip", "zip://part.json::all.zip"),
            ("hf://datasets/org/set@5e1f/part.parquet", "hf://datasets/org/set@5e1f/part.parquet"),
        ],
    )
    def test_a_file_is_described_by_what_is_the_same_on_every_machine(self, file: str, named: str) -> None:
        described = [
            HuggingFaceShards(
                datasets.IterableDataset.from_generator(hf.generate, gen_kwargs={"files": [name]})
            ).describe()["files"]
            for name in (file, named, f"{named}.other")
        ]

        assert described[0] == described[1] != described[2]

    def test_a_description_tells_other_data_apart(self, tmp_path: Path) -> None:
        ds, other = streams("arrow", tmp_path)
        told = [
            HuggingFaceShards(dataset).describe()
            for dataset in (
                ds,
                other,
                ds.take(3),
                ds.take(4),
                ds.shuffle(seed=1),
                ds.shuffle(seed=2),
                ds.shuffle(seed=2, buffer_size=3),
                ds.map(hf.plus),
                ds.map(hf.plus_batch, batched=True),
                ds.select_columns("n"),
                ds.with_format("torch"),
                concatenate_datasets([ds, other]),
                concatenate_datasets([other, ds]),
            )
        ]

        assert len({json.dumps(description) for description in told}) == len(told)

    def test_a_description_of_many_shuffled_shards_is_short(self, tmp_path: Path) -> None:
        dataset = concatenate_datasets([hf.stream("table", tmp_path, (1,) * 200)] * 2).shuffle(seed=1)

        assert len(json.dumps(HuggingFaceShards(dataset).describe())) < 400

    @pytest.mark.parametrize(
        "name",
        [
            *("plain", "map", "repeat", "rename column", "torch", "take", "skip", "skip and take", "shuffle"),
            pytest.param("concatenate", marks=recent),
        ],
    )
    def test_sizes_of_tables_are_known(self, name: str, tmp_path: Path) -> None:
        shards = HuggingFaceShards(build(name, "table", tmp_path))

        assert shards.sizes() == [len(samples(shards.read(shard, 0))) for shard in range(shards.num_shards)]

    @recent
    @pytest.mark.parametrize("name", ["filter", "batched map", "drop last batch", "interleave", "concatenate columns"])
    def test_sizes_that_only_reading_tells_are_unknown(self, name: str, tmp_path: Path) -> None:
        assert HuggingFaceShards(build(name, "table", tmp_path)).sizes() is None
        assert HuggingFaceShards(hf.stream("arrow", tmp_path, (2, 2))).sizes() is None
        assert HuggingFaceShards(hf.stream("table", tmp_path, (2, 2)).repeat(None)).sizes() is None
