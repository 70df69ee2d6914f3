"""Hugging Face datasets as shards: what each holds, how it resumes, and what is refused or warned of."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import fsspec.asyn
import numpy as np
import pytest
from datasets import concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from support import hf_streams as hf
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import ConfigurationError, DamagedStateError, StatefulWarning
from lightning_stateful.stream_nodes import hugging_face_pipelines as pipelines
from lightning_stateful.stream_nodes import shard_reader
from lightning_stateful.stream_nodes.hugging_face import HuggingFaceShards, is_hugging_face
from lightning_stateful.stream_nodes.shard_reader import ShardReader

# A shard with nothing in it, with one sample, within a table, and over several tables.
SIZES, OTHER_SIZES = (0, 1, 2, 8), (3, 4)
NEEDS_REPEAT = pytest.mark.skipif(not hasattr(datasets.IterableDataset, "repeat"), reason="datasets has no repeat()")


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face sleeps whenever an interleaved parquet file has been read."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


Build = Callable[[Any, Any], Any]
# What older versions cannot do, or do in another way.
recent = pytest.mark.skipif(pipelines.version() < (5, 2), reason="of datasets 5.2")
# From 3.3 to 4.8, shards behind maps and filters have no exact state, and are read again.
has_states = pytest.mark.skipif((3, 3) <= pipelines.version() < (5, 0), reason="datasets 3.3 to 4.8 read shards again")
# Hugging Face leaves files of a reading that was broken off, and event loops, to the garbage collector.
leaves_files_open = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def _interleaved(**options: Any) -> Build:
    return lambda ds, other: interleave_datasets([ds, other], **options)


_BATCHES = {"batched": True, "batch_size": 3}
_WITHOUT = "all_exhausted_without_replacement"
# Shards of these hold what the dataset holds.
PARTED: dict[str, Build] = {
    "plain": lambda ds, _: ds,
    "map": lambda ds, _: ds.map(hf.plus),
    "batched map": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3),
    "batches of batches": lambda ds, _: ds.map(hf.twice, **_BATCHES).map(hf.plus_batch, batched=True, batch_size=4),
    "filter": lambda ds, _: ds.filter(hf.of_three),
    "batched filter": lambda ds, _: ds.filter(hf.of_three_batch, batched=True, batch_size=4),
    "repeat": lambda ds, _: ds.repeat(2),
    "rename column": lambda ds, _: ds.rename_column("n", "number"),
    "torch": lambda ds, _: ds.select_columns("n").with_format("torch"),
    "numpy map": lambda ds, _: ds.with_format("numpy").map(hf.plus),
    "arrow map, filter": lambda ds, _: (
        ds.with_format("arrow").map(hf.plus_table, **_BATCHES).filter(hf.of_three_table, **_BATCHES)
    ),
    "arrow map to rows": lambda ds, _: ds.with_format("arrow").map(hf.plus_table, **_BATCHES).with_format(None),
    "concatenate": lambda ds, other: concatenate_datasets([ds, other]).map(hf.plus_batch, **_BATCHES),
    "concatenate columns": lambda ds, other: concatenate_datasets(
        [ds, ds.rename_columns({"n": "number", "text": "words"})], axis=1
    ),
    "interleave all by chance": _interleaved(stopping_strategy=_WITHOUT, probabilities=[0.7, 0.3], seed=2),
}
# Of these each shard is something by itself.
APART: dict[str, Build] = {
    "indices": lambda ds, _: ds.map(lambda row, number: {"number": number}, with_indices=True),
    "drop last batch": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=3, drop_last_batch=True),
    "batch": lambda ds, _: ds.batch(3),
    "take": lambda ds, _: ds.take(7),
    "skip and take": lambda ds, _: ds.skip(3).take(5),
    "interleave": _interleaved(),
    "interleave again by chance": _interleaved(probabilities=[0.7, 0.3], seed=2, stopping_strategy="all_exhausted"),
    "interleave maps": lambda ds, other: interleave_datasets(
        [ds.map(hf.same, batched=True, batch_size=3), other.filter(hf.of_three)]
    ),
}
# After these, a shard is read again.
REREAD: dict[str, tuple[str, Build]] = {
    "shuffle": (
        r"shuffle\(\) holds back",
        lambda ds, _: ds.shuffle(seed=1, buffer_size=4).map(hf.plus_batch, **_BATCHES),
    ),
    "interleave shuffled": (
        r"shuffle\(\) holds back",
        lambda ds, other: interleave_datasets([ds.shuffle(seed=1, buffer_size=3), other]),
    ),
    "batch by column": (
        r"batch\(by_column=...\) holds back",
        lambda ds, _: ds.map(_group).batch(by_column="group", batch_size=2),
    ),
    "async map": ("async functions run ahead", lambda ds, _: ds.map(hf.plus_later)),
    # Only one of the sources reads tables, which Hugging Face then forgets to cut into batches in its shards.
    "concatenate unlike ones": (
        "datasets that are read as tables and others",
        lambda ds, other: concatenate_datasets([ds.map(hf.same), other]).map(hf.plus),
    ),
    "generator": ("a generator has to make", lambda ds, _: hf.stream("generator", Path(), SIZES).map(hf.plus)),
}
ALL = {**PARTED, **APART, **{name: found for name, (_, found) in REREAD.items()}}
# What can follow on one another in any order, as it leaves the columns as they are.
CHAINED: list[Build] = [
    lambda ds, _: ds.map(hf.same),
    lambda ds, _: ds.map(hf.twice, batched=True, batch_size=3),
    lambda ds, _: ds.map(hf.same, batched=True, batch_size=4, drop_last_batch=True),
    lambda ds, _: ds.filter(hf.of_three_batch, batched=True, batch_size=4),
    lambda ds, _: ds.with_format("arrow").map(hf.same_table, batched=True, batch_size=3).with_format(None),
    lambda ds, _: ds.repeat(2),
    lambda ds, _: ds.take(9),
    lambda ds, _: ds.skip(2),
    lambda ds, other: concatenate_datasets([ds, other]),
    _interleaved(stopping_strategy="all_exhausted"),
    _interleaved(probabilities=[0.6, 0.4], seed=1, stopping_strategy=_WITHOUT),
]
DRAWING: dict[str, Build] = {
    "map": lambda ds, _: ds.map(hf.draw),
    "filter": lambda ds, _: ds.filter(hf.by_chance),
    "batched map": lambda ds, _: ds.map(hf.draw_batch, batched=True, batch_size=300),
    "map, batched map": lambda ds, _: ds.map(hf.draw).map(hf.plus_batch, batched=True, batch_size=300),
    "batched map, map": lambda ds, _: ds.map(hf.plus_batch, batched=True, batch_size=300).map(hf.draw),
    "arrow map": lambda ds, _: ds.with_format("arrow").map(hf.draw_table, batched=True, batch_size=300),
    "generator": lambda ds, _: datasets.IterableDataset.from_generator(
        hf.generate_draws, gen_kwargs={"parts": [(0, 700)]}
    ),
    "late": lambda ds, _: ds.map(_draw_late, batched=True, batch_size=50),
}
# A resume runs these functions at the samples that they are run at anyway.
WITH_STATE = ("map", "filter")


def _group(row: dict[str, Any]) -> dict[str, Any]:
    return {"group": row["n"] // 2}


def _draw_late(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {"drawn": [hf.drawn() if batch["n"][0] >= 500 else [0.0] for _ in batch["n"]]}


def _dataset(build: Build, kind: str, folder: Path) -> Any:
    """A pipeline, as far as the version of ``datasets`` in use can do that."""
    # A table in memory is cut evenly.
    ds = hf.stream(kind, folder, SIZES if kind != "table" else (3, 3, 3))
    return _built(build, ds, hf.stream(kind, folder, OTHER_SIZES, first=100, name="other"))


def _built(build: Build, dataset: Any, other: Any) -> Any:
    try:
        built = build(dataset, other)
        pipelines.num_shards_of(built)
        return built
    except (AttributeError, ConfigurationError, NotImplementedError, TypeError, ValueError) as error:
        if pipelines.version() >= (5, 2):
            raise
        pytest.skip(f"datasets {datasets.__version__}: {error}")


def _samples(iterable: Any) -> list[Any]:
    return [hf.plain(sample) for sample in iterable]


def _read(shards: HuggingFaceShards, shard: int, epoch: int, state: Any = None) -> list[Any]:
    node = shards.node(shard, epoch)
    node.reset(state)
    return _samples(node)


def _with_states(shards: HuggingFaceShards, shard: int, epoch: int) -> tuple[list[Any], list[Any]]:
    node = shards.node(shard, epoch)
    node.reset()
    values, states = [], [node.get_state()]
    while samples := node.next_many(1):
        values += _samples(samples)
        states.append(node.get_state())
    return values, states


def _check_resumes(shards: HuggingFaceShards, epochs: tuple[int, ...] = (0, 2)) -> None:
    if pipelines.version() < (5, 0) and "reads whole tables ahead" in shards.reread:
        pytest.skip(f"such a shard is read again: {shards.reread}")
    assert shards.reread == ""
    for shard in range(shards.num_shards):
        for epoch in epochs:
            values, states = _with_states(shards, shard, epoch)
            assert None not in states[1:]
            for number, state in enumerate(states):
                node = shards.node(shard, epoch)
                node.reset(json.loads(json.dumps(state)))
                assert node.get_state() == state
                assert _samples(node) == values[number:], (shard, epoch, number)


def _multiset(values: list[Any]) -> list[str]:
    return sorted(json.dumps(value, sort_keys=True) for value in values)


class TestWhatShardsHold:
    @pytest.mark.parametrize("name", PARTED)
    def test_together_they_hold_what_the_dataset_holds(self, name: str, tmp_path: Path) -> None:
        dataset = _dataset(PARTED[name], "table" if "arrow" in name else "arrow", tmp_path)
        shards = HuggingFaceShards(dataset)

        parts = [value for shard in range(shards.num_shards) for value in _read(shards, shard, 0)]

        assert _multiset(parts) == _multiset(_samples(dataset))
        assert shards.warning == ""

    @recent
    @leaves_files_open
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            *((name, "arrow") for name in ALL),
            ("take", "generator"),
            ("interleave", "table"),
            ("concatenate", "parquet"),
        ],
    )
    def test_a_shard_is_what_hugging_face_makes_it_in_every_epoch(self, name: str, kind: str, tmp_path: Path) -> None:
        dataset = _dataset(ALL[name], kind, tmp_path)
        # The user's own iteration leaves its state behind.
        next(iter(dataset))
        shards = HuggingFaceShards(dataset)

        for shard in range(shards.num_shards):
            part = dataset.shard(dataset.num_shards, shard)
            part.set_epoch(3)
            assert _read(shards, shard, 3) == _samples(part)
        gc.collect()

    def test_a_split_by_node_is_left_out_and_stays_as_it_was(self, tmp_path: Path) -> None:
        dataset = split_dataset_by_node(hf.stream("arrow", tmp_path, (2, 3)), 1, 2)
        before = _samples(dataset)

        shards = HuggingFaceShards(dataset)

        assert [len(_read(shards, shard, 0)) for shard in range(shards.num_shards)] == [2, 3]
        assert _samples(dataset) == before

    @pytest.mark.parametrize("name", ["plain", "batched map"])
    def test_the_users_own_iteration_goes_on_undisturbed(self, name: str, tmp_path: Path) -> None:
        dataset = _dataset(ALL[name], "arrow", tmp_path)
        expected = _samples(dataset)
        running = iter(dataset)
        first = [hf.plain(next(running)) for _ in range(2)]
        state = dataset.state_dict()

        shards = HuggingFaceShards(dataset)
        for shard in range(shards.num_shards):
            _read(shards, shard, 5)

        assert dataset.state_dict() == state
        assert first + _samples(running) == expected

    @recent
    def test_a_shard_of_many_costs_no_more_than_one_of_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        many = datasets.IterableDataset.from_generator(hf.generate, gen_kwargs={"parts": [(n, 1) for n in range(5000)]})
        shards = HuggingFaceShards(many.map(hf.plus).take(9000))
        divide = datasets.iterable_dataset._split_gen_kwargs
        monkeypatch.setattr(
            datasets.iterable_dataset,
            "_split_gen_kwargs",
            lambda given, **options: divide(given, **options) if len(given["parts"]) < 2 else pytest.fail("all files"),
        )

        assert [sample["n"] for sample in _read(shards, 4321, 1)] == [4321]


class TestResuming:
    @pytest.mark.parametrize("name", [*PARTED, *APART])
    def test_a_shard_resumes_at_every_sample(self, name: str, tmp_path: Path) -> None:
        _check_resumes(HuggingFaceShards(_dataset(ALL[name], "arrow", tmp_path)))

    @leaves_files_open
    @pytest.mark.parametrize("kind", ["parquet", "json", "csv", "text", "table"])
    @pytest.mark.parametrize("name", ["plain", "interleave"])
    def test_a_shard_of_any_file_resumes_at_every_sample(self, kind: str, name: str, tmp_path: Path) -> None:
        # Hugging Face finds out the columns of text from its first file.
        if kind != "text" or name == "plain":
            _check_resumes(HuggingFaceShards(_dataset(ALL[name], kind, tmp_path)), epochs=(1,))
        gc.collect()

    @has_states
    def test_a_shard_of_more_than_a_table_resumes_at_its_seams(self, tmp_path: Path) -> None:
        dataset = hf.stream("parquet", tmp_path, (2005,), chunk=1000).map(hf.plus_batch, batched=True)
        shards = HuggingFaceShards(dataset)
        values, states = _with_states(shards, 0, 0)

        for number in (1, 999, 1000, 1001, 1999, 2000, 2001, 2004, 2005):
            assert _read(shards, 0, 0, states[number]) == values[number:]

    @given(chosen=st.data())
    def test_a_shard_of_any_chain_of_stages_resumes(self, chosen: st.DataObject) -> None:
        dataset = hf.stream("table", Path(), (6, 6))
        other = hf.stream("table", Path(), (2, 1), first=100)
        for add in chosen.draw(st.lists(st.sampled_from(CHAINED), min_size=2, max_size=4)):
            with suppress(pytest.skip.Exception):
                dataset = _built(add, dataset, other)
        shards = HuggingFaceShards(dataset)
        shard = chosen.draw(st.integers(0, shards.num_shards - 1))
        epoch = chosen.draw(st.sampled_from([0, 2]))

        values, states = _with_states(shards, shard, epoch)

        number = chosen.draw(st.integers(0, len(values)))
        assert (states[number] is None) == (bool(shards.reread) or number == 0)
        assert _read(shards, shard, epoch, states[number]) == values[number if states[number] else 0 :]

    @leaves_files_open
    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=recent if name == "async map" else ()) for name in REREAD]
    )
    def test_where_a_state_would_lose_samples_there_is_none_and_reading_again_is_exact(
        self, name: str, tmp_path: Path
    ) -> None:
        why, build = REREAD[name]
        shards = HuggingFaceShards(_dataset(build, "arrow", tmp_path))

        for shard in range(shards.num_shards):
            values, states = _with_states(shards, shard, 2)
            assert set(states) == {None}
            assert _read(pickle.loads(pickle.dumps(shards)), shard, 2) == values
        assert re.search(why, shards.reread)
        gc.collect()

    def test_a_class_that_is_not_in_the_table_is_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(pipelines.PIPELINE_CLASSES, "SelectColumnsIterable")
        shards = HuggingFaceShards(hf.stream("arrow", tmp_path, (3,)).select_columns("n"))

        assert "SelectColumnsIterable" in shards.reread
        assert set(_with_states(shards, 0, 0)[1]) == {None}
        assert shards.draws

    @has_states
    @pytest.mark.parametrize(("version", "is_exact"), [("3.2.0", True), ("3.3.2", False), ("3.6.0", True)])
    def test_versions_whose_states_leave_samples_out_are_read_again(
        self, version: str, is_exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = hf.stream("arrow", tmp_path, (3,)).map(hf.plus)
        monkeypatch.setattr(datasets, "__version__", version)

        shards = HuggingFaceShards(dataset)

        assert (shards.reread == "") == is_exact
        assert [state is not None for state in _with_states(shards, 0, 0)[1][1:]] == [is_exact] * 3

    def test_each_epoch_is_shuffled_anew_and_each_time_alike(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("arrow", tmp_path, (30,)).shuffle(seed=1, buffer_size=10))

        orders = [[sample["n"] for sample in _read(shards, 0, epoch)] for epoch in (0, 1, 2, 1)]

        assert orders[1] == orders[3]
        assert len({tuple(order) for order in orders}) == 3


class TestDrawing:
    @has_states
    @pytest.mark.parametrize("name", DRAWING)
    def test_a_reader_resumes_with_the_same_draws(self, name: str, tmp_path: Path) -> None:
        shards = HuggingFaceShards(_built(DRAWING[name], hf.stream("table", tmp_path, (700,)), None))
        reader = ShardReader(shards, [0], 1, seed=3)
        reader.reset()
        values, states = [], []
        while samples := reader.next_many(50):
            values += _samples(samples)
            states.append(json.loads(json.dumps(reader.get_state())))

        assert shards.draws
        assert any(state["state"] is not None for state in states[:-1]) == (name in (*WITH_STATE, "late"))
        for number in range(0, len(states), 4):
            resumed = ShardReader(HuggingFaceShards(shards._dataset), [0], 1, seed=3)
            resumed.reset(states[number])
            assert _samples(resumed) == values[50 * (number + 1) :]

    @has_states
    def test_that_a_shard_is_read_again_because_of_draws_is_told(self, tmp_path: Path) -> None:
        def make() -> Any:
            stream = hf.stream("table", tmp_path, (2000,)).map(hf.draw_batch, batched=True, batch_size=100)
            return patch_dataloader(DataLoader(stream, batch_size=50, collate_fn=list))

        stopped, resumed = make(), make()
        for _ in islice(stopped, 30):
            pass
        resumed.load_state_dict(stopped.state_dict())
        with pytest.warns(StatefulWarning, match=r"1500 samples of .* were read again.* have drawn random numbers"):
            next(iter(resumed))

    def test_functions_of_hugging_face_are_not_taken_for_the_users(self, tmp_path: Path) -> None:
        dataset = hf.stream("arrow", tmp_path, (3,)).rename_column("n", "number").remove_columns("text").batch(2)

        assert not HuggingFaceShards(dataset).draws
        assert not HuggingFaceShards(dataset.map(hf.same)).draws
        assert HuggingFaceShards(dataset.map(hf.draw)).draws

    def test_samples_are_not_seeded_where_no_function_can_draw(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seeds: list[int] = []
        dataset = hf.stream("table", tmp_path, (100,))
        monkeypatch.setattr(shard_reader, "seed_randomness", seeds.append)

        def num_seeded(dataset: Any) -> int:
            seeds.clear()
            assert sum(1 for _ in patch_dataloader(DataLoader(dataset, batch_size=10))) in (7, 10)
            return len(seeds)

        assert num_seeded(dataset.map(hf.same).filter(hf.of_three)) == 0
        # As the shard is opened, before each run of 32, and at its end.
        assert num_seeded(dataset.map(hf.draw)) == 6
        assert num_seeded(dataset.map(hf.same).map(hf.draw_batch, batched=True)) == 6


class TestStates:
    def test_a_generator_that_holds_arrays_becomes_plain_data(self, tmp_path: Path) -> None:
        dataset = _dataset(_interleaved(probabilities=[0.5, 0.5], seed=1), "arrow", tmp_path)
        dataset._ex_iterable.generator = np.random.Generator(np.random.MT19937(3))
        shards = HuggingFaceShards(dataset)
        values, states = _with_states(shards, 1, 0)

        assert _read(shards, 1, 0, json.loads(json.dumps(states[1]))) == values[1:]

    @pytest.mark.parametrize("name", ["concatenate", "filter"])
    def test_a_state_of_other_stages_is_refused(self, name: str, tmp_path: Path) -> None:
        state = _with_states(HuggingFaceShards(hf.stream("arrow", tmp_path, (3,)).take(2)), 0, 0)[1][1]

        with pytest.raises(DamagedStateError, match="other stages"):
            HuggingFaceShards(_dataset(ALL[name], "arrow", tmp_path)).node(0, 0).reset(state)

    @recent
    def test_a_state_of_another_epoch_is_refused(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("arrow", tmp_path, (3,)))

        with pytest.raises(DamagedStateError, match="not of epoch 2"):
            shards.node(0, 2).reset(_with_states(shards, 0, 1)[1][1])


class _ShardOfWorker(IterableDataset[Any]):
    """Each worker reads the shard of its own number, which Hugging Face would divide among all of them."""

    def __init__(self, shards: HuggingFaceShards, states: list[Any]) -> None:
        self.shards, self.states = shards, states

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        node = self.shards.node(info.id, 1)
        node.reset(self.states[info.id])
        for sample in node:
            yield sample["n"], sample["worker"], node.get_state(), fsspec.asyn.get_lock().locked()


class TestProcesses:
    @has_states
    def test_every_worker_reads_its_shard_whole_and_resumes_in_it(self, tmp_path: Path) -> None:
        shards = HuggingFaceShards(hf.stream("parquet", tmp_path, (4, 5)).filter(hf.of_three).map(hf.in_worker))
        states = [_with_states(shards, shard, 1)[1] for shard in range(2)]

        # A lock that some thread holds while workers are forked.
        with fsspec.asyn.get_lock():
            source = _ShardOfWorker(shards, [None, states[1][1]])
            read = list(DataLoader(source, batch_size=None, num_workers=2))

        assert sorted(sample[:2] for sample in read) == [[0, 0], [2, 0], [3, 0], [6, 1], [8, 1]]
        assert [sample[2] for sample in read if sample[1] == 0] == states[0][1:]
        assert not any(sample[3] for sample in read)

    @recent
    def test_behind_an_interleaved_shard_nobody_sleeps(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = [hf.stream("parquet", tmp_path / name, (3, 4)) for name in ("one", "other")]
        dataset = interleave_datasets(parts, stopping_strategy=_WITHOUT)
        slept: list[float] = []
        monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 5)
        monkeypatch.setattr("time.sleep", slept.append)
        shards = HuggingFaceShards(dataset.map(hf.plus))

        assert [len(_read(shards, shard, 0)) for shard in range(2)] == [6, 8]
        assert slept == []
        # The user's own iteration is as it was.
        assert len(_samples(dataset)) == 14
        assert slept

    @pytest.mark.slow
    def test_a_process_may_end_in_the_midst_of_files_and_streams(self, tmp_path: Path) -> None:
        hf.stream("parquet", tmp_path, (4000,), chunk=100)
        script = f"""
import datasets
from torch.utils.data import DataLoader
from lightning_stateful import patch_dataloader
from lightning_stateful.streams import ChunkedDataset
from lightning_stateful.stream_nodes.hugging_face import HuggingFaceShards
dataset = datasets.load_dataset("parquet", data_files={str(tmp_path / "part0.parquet")!r}, split="train",
                                streaming=True, cache_dir={str(tmp_path / "cache")!r})
closed = HuggingFaceShards(dataset).node(0, 0)
print(next(closed)["n"])
closed.close()
chunks = ChunkedDataset([range(9)], iter, buffer_size=4)
held = [iter(chunks), iter(patch_dataloader(DataLoader(chunks)))]
print(*[int(next(iterator)) for iterator in held])
datasets.held_as_python_exits = held
"""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "0", "")

    def test_datasets_are_known_without_importing_their_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert is_hugging_face(hf.stream("table", Path(), (3,)))
        assert not is_hugging_face(datasets.Dataset.from_dict({"n": [1]}))
        monkeypatch.delitem(sys.modules, "datasets")
        assert not is_hugging_face([1])
        assert "datasets" not in sys.modules


class TestWhatIsRefused:
    def test_other_datasets(self) -> None:
        with pytest.raises(ConfigurationError, match=r"got Dataset.*to_iterable_dataset"):
            HuggingFaceShards(datasets.Dataset.from_dict({"n": [1]}))

    @recent
    def test_shuffling_and_mixing_without_a_seed(self, tmp_path: Path) -> None:
        ds, other = hf.stream("arrow", tmp_path, SIZES), hf.stream("arrow", tmp_path, OTHER_SIZES, name="other")

        with pytest.raises(ConfigurationError, match=r"shuffle has no seed.*seed="):
            HuggingFaceShards(ds.shuffle(buffer_size=4).map(hf.plus))
        with pytest.raises(ConfigurationError, match=r"interleave_datasets has no seed.*seed="):
            HuggingFaceShards(interleave_datasets([ds, other], probabilities=[0.5, 0.5]))
        HuggingFaceShards(ds.shuffle(generator=np.random.default_rng(2**63), buffer_size=4))

    @pytest.mark.parametrize("stage", ["take", "skip"])
    def test_stages_that_a_version_reads_once_only(
        self, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = getattr(hf.stream("arrow", tmp_path, (3, 4)), stage)(2)
        monkeypatch.setattr(datasets, "__version__", "5.0.1")

        with pytest.raises(ConfigurationError, match=rf"5\.0\.1 reads {stage}\(2\) in the first epoch only.*5\.1"):
            HuggingFaceShards(dataset)

    def test_what_a_version_cannot_divide(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def num_shards(_: Any) -> int:
            raise NotImplementedError("RepeatExamplesIterable doesn't implement it")

        dataset = hf.stream("arrow", tmp_path, (3, 4))
        monkeypatch.setattr(datasets.IterableDataset, "num_shards", property(num_shards), raising=False)

        with pytest.raises(ConfigurationError, match=r"cannot divide.*RepeatExamplesIterable.*newer version"):
            HuggingFaceShards(dataset)

    def test_columns_that_are_counted_from_the_beginning_of_the_dataset(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="add_column counts rows from 0 in each of the 2 shards"):
            HuggingFaceShards(hf.stream("arrow", tmp_path, (2, 2)).add_column("label", [0, 1, 2, 3]))

        whole = HuggingFaceShards(hf.stream("arrow", tmp_path, (4,)).add_column("label", [3, 2, 1, 0]))
        assert [sample["label"] for sample in _read(whole, 0, 0)] == [3, 2, 1, 0]

    @NEEDS_REPEAT
    def test_one_of_several_shards_that_is_repeated_without_end(self, tmp_path: Path) -> None:
        ds, other = hf.stream("arrow", tmp_path, (2, 2)), hf.stream("arrow", tmp_path, (2, 3), name="other")
        mixed = interleave_datasets([ds.repeat(None), other.repeat(None)], probabilities=[0.5, 0.5], seed=0)
        for dataset in (ds.repeat(None), ds.repeat(None).map(hf.plus), mixed):
            with pytest.raises(ConfigurationError, match=r"repeat\(None\) would read one of the 2 shards for ever"):
                HuggingFaceShards(dataset)

        HuggingFaceShards(hf.stream("arrow", tmp_path, (4,)).repeat(None))

    @pytest.mark.parametrize("name", ["take", "skip"])
    def test_counts_that_were_meant_for_one_node(self, name: str, tmp_path: Path) -> None:
        dataset = getattr(split_dataset_by_node(hf.stream("arrow", tmp_path, (2, 2)), 0, 2), name)(2)

        with pytest.raises(ConfigurationError, match=rf"{name}\(2\) was called after split_dataset_by_node"):
            HuggingFaceShards(dataset)


class TestWhatIsSaid:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("take", r"take works on each of the 4 shards.*take\(7\) is divided"),
            ("skip and take", r"take\(5\) is divided.*skip works on each of the 4 shards.*skip\(3\) is divided"),
            ("batch", r"map works on each of the 4 shards.*batch\(3\) ends each with a smaller batch"),
            ("batch by column", r"on each of the 4 shards.*batch\(by_column=...\) joins what follows each other"),
            ("indices", r"map works on each of the 4 shards.*with_indices=True counts from 0 in each"),
            ("drop last batch", "map works on each of the 4 shards.*drops the last batch of each"),
            ("interleave", r"each of the 2 shards by itself.*\(first_exhausted"),
            ("interleave maps", "in threads.* follows no seed"),
            ("shuffle", r"shuffle\(buffer_size=4\).*read the shard again.*loses what is in the buffer.*buffer_size="),
        ],
    )
    def test_what_means_something_else_in_shards(self, name: str, said: str, tmp_path: Path) -> None:
        warning = HuggingFaceShards(_dataset(ALL[name], "arrow", tmp_path)).warning

        assert re.search(said, warning), warning

    @NEEDS_REPEAT
    def test_batches_of_a_function_end_with_a_shard_which_the_log_says(self, tmp_path: Path) -> None:
        stream = hf.stream("arrow", tmp_path, SIZES)
        batched, by_row = stream.map(hf.plus_batch, batched=True), stream.map(hf.plus)

        assert "the rows of each of the" in HuggingFaceShards(batched).note
        assert "a function that joins rows" in patch_dataloader(DataLoader(batched, batch_size=2)).order.describe()
        assert not HuggingFaceShards(by_row).note
        assert "repeat(2) reads each of the 4 shards as often in a row" in HuggingFaceShards(stream.repeat(2)).note

    @pytest.mark.parametrize(
        ("file", "named"),
        [
            ("file:///data/a/part.parquet", "part.parquet"),
            ("zip://part.json::/data/a/all.zip", "zip://part.json::all.zip"),
            ("hf://datasets/org/set@5e1f/part.parquet", "hf://datasets/org/set@5e1f/part.parquet"),
        ],
    )
    def test_a_file_is_described_by_what_is_the_same_on_every_machine(self, file: str, named: str) -> None:
        streams = [
            datasets.IterableDataset.from_generator(hf.generate, gen_kwargs={"files": [name]})
            for name in (file, named, f"{named}.other")
        ]
        described = [HuggingFaceShards(stream).describe()["files"] for stream in streams]

        assert described[0] == described[1] != described[2]

    def test_a_description_tells_other_data_apart_and_is_short(self, tmp_path: Path) -> None:
        ds = hf.stream("arrow", tmp_path, SIZES)
        other = hf.stream("arrow", tmp_path, OTHER_SIZES, first=100, name="other")
        many = concatenate_datasets([hf.stream("table", tmp_path, (1,) * 50)] * 2)
        pipelines_of = [ds, other, ds.take(3), ds.take(4), ds.map(hf.plus), ds.map(hf.plus_batch, batched=True)]
        pipelines_of += [ds.shuffle(seed=1), ds.shuffle(seed=2), ds.shuffle(seed=2, buffer_size=3), many]
        pipelines_of += [ds.select_columns("n"), ds.with_format("torch"), many.shuffle(seed=1)]
        pipelines_of += [concatenate_datasets([ds, other]), concatenate_datasets([other, ds])]
        pipelines_of += [ds.map(hf.same), ds.filter(hf.of_three), ds.map(partial(hf.same, 3))]
        pipelines_of += [ds.map(hf.plus, fn_kwargs={"length": length}) for length in (16, 24, list(range(99)))]

        told = [json.dumps(HuggingFaceShards(dataset).describe()) for dataset in pipelines_of]

        assert len(set(told)) == len(told)
        assert max(map(len, told)) < 400
