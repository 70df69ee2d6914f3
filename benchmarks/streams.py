"""Streams beside torchdata's loader, infinibatch and Hugging Face: speed, resumes, snapshots, shuffling, states."""

from __future__ import annotations

import copy
import gc
import gzip
import itertools
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from infinibatch.iterators import (
    BlockwiseShuffleIterator,
    FixedBatchIterator,
    InfinitePermutationSourceIterator,
    SelectManyIterator,
)
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.checkpoint import json_bytes, torch_bytes
from benchmarks.measure import Row, interleave, median_ratio, report, seconds, target
from benchmarks.samplers import cpu_seconds, epoch
from lightning_stateful import ChunkedDataset, patch_dataloader
from lightning_stateful.core import Progress
from lightning_stateful.streams.stream import as_stream
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import WorkerSlot

BATCH = 32
CLAIM = (
    f"Streams that resume are read as fast as torchdata's loader reads them, which keeps a state at every batch too. "
    f"Batches of {BATCH}, torch's collation, default settings unless it says otherwise. Without workers figures are "
    "CPU time, as on an idle machine; with workers wall time, and beside it the CPU time of all processes."
)
SDL = "StatefulDataLoader"
OURS = "StreamLoader"
BARE = "StreamLoader, seed_samples=False"


# Data

ROWS, SHARDS = 25_600, 8
LINES, CHUNK = 204_800, 10_240


def table(rows: int) -> datasets.Dataset:
    """Four columns that torch can collate."""
    numbers = list(range(rows))
    return datasets.Dataset.from_dict(
        {
            "id": numbers,
            "score": [number / 2 for number in numbers],
            "label": [number % 7 for number in numbers],
            "text": [line(number) for number in numbers],
        }
    )


def line(number: int) -> str:
    return f"{number:07} a line of text, of {number * 7919 % 104_729} that are about as long as a sentence is"


def streamed(files: Sequence[Path], kind: str = "parquet") -> datasets.IterableDataset:
    named = [str(file) for file in files]
    return datasets.load_dataset(kind, data_files=named, streaming=True, split="train")


def chunk_files(folder: Path, lines: int, chunk: int) -> list[Path]:
    """Compressed chunks of text lines."""
    folder.mkdir()
    files = []
    for first in range(0, lines, chunk):
        text = "".join(f"{line(number)}\n" for number in range(first, first + chunk))
        files.append(folder / f"{first:07}.gz")
        files[-1].write_bytes(gzip.compress(text.encode(), 6))
    return files


def read_chunk(file: Path) -> list[str]:
    with gzip.open(file, "rt") as opened:
        return opened.read().splitlines()


def add_one(row: dict[str, Any]) -> dict[str, Any]:
    return {"next": row["id"] + 1}


class Walk(IterableDataset[int]):
    """Integers, and a state as torchdata has it: a count, and so many integers that change at every sample."""

    def __init__(self, length: int, size: int = 0) -> None:
        self.length, self.size = length, size
        self.count, self.seen = 0, [0] * size
        self.is_resumed = False

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if not self.is_resumed:
            self.count, self.seen = 0, [0] * self.size
        self.is_resumed = False
        for _ in range(self.count, self.length // (1 if info is None else info.num_workers)):
            self.count += 1
            if self.size:
                self.seen[self.count % self.size] = self.count
            yield self.count

    def state_dict(self) -> dict[str, Any]:
        """A copy: torchdata hands it out later."""
        return {"count": self.count, "seen": self.seen.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.count, self.seen, self.is_resumed = state["count"], state["seen"], True


class Lines(IterableDataset[str]):
    """The lines of chunks, as people read them: worker by worker, in order, with a state as torchdata has it."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        info = get_worker_info()
        files = self.files if info is None else self.files[info.id :: info.num_workers]
        self.count = 0
        for file in files:
            for text in read_chunk(file):
                self.count += 1
                yield text

    def state_dict(self) -> dict[str, Any]:
        """How many were given."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not needed here."""


# Throughput


@dataclass(frozen=True)
class Case:
    """Data that loaders are compared on.

    Attributes:
        title: Of the data.
        make: The data; anew for each loader, because some leave their marks in it.
        samples: How many there are.
        passes: How often all are read.
        draws: Whether user code runs at every sample, so that each is seeded.
        beside: Other data that the peer reads as well.
    """

    title: str
    make: Callable[[], Any]
    samples: int
    passes: int = 7
    draws: bool = False
    beside: Callable[[], Any] | None = None


def cases(folder: Path) -> list[Case]:
    whole = table(ROWS)
    whole.save_to_disk(folder / "arrow")
    for shard in range(SHARDS):
        part = whole.shard(SHARDS, shard, contiguous=True)
        part.to_parquet(folder / f"{shard}.parquet")
        part.to_json(folder / f"{shard}.json")
    mapped = datasets.load_from_disk(folder / "arrow")
    files = {kind: sorted(folder.glob(f"*.{kind}")) for kind in ("parquet", "json")}
    some = chunk_files(folder / "gz", LINES, CHUNK)[:8]
    return [
        Case("Hugging Face, parquet", lambda: streamed(files["parquet"]), ROWS),
        Case("Hugging Face, arrow", lambda: mapped.to_iterable_dataset(num_shards=SHARDS), ROWS),
        Case("Hugging Face, json", lambda: streamed(files["json"], "json"), ROWS),
        Case("Hugging Face, parquet, map(f)", lambda: streamed(files["parquet"]).map(add_one), ROWS, draws=True),
        Case("iterable dataset with a state", lambda: Walk(32_000), 32_000, passes=21, draws=True),
        Case("ChunkedDataset", lambda: ChunkedDataset(some, read_chunk), 8 * CHUNK, beside=lambda: Lines(some)),
    ]


class Parts:
    """A loader that is read pass after pass, a shard's batches at a time, so that parts of all loaders can take turns.

    Args:
        loader: The loader.
        batches: How many make a part.
    """

    def __init__(self, loader: Any, batches: int) -> None:
        self.loader, self.batches = loader, batches
        self.iterator: Iterator[Any] = iter(())
        self.spent: list[float] = []

    def __call__(self) -> float:
        """Seconds of a part: without workers CPU time, with them wall time, and :attr:`spent` has the CPU time."""
        before = cpu_seconds()
        took = seconds(self.read, time.perf_counter if self.loader.num_workers else time.process_time)
        self.spent.append(cpu_seconds() - before if self.loader.num_workers else took)
        return took

    def read(self) -> None:
        """Read on, and begin another pass where one ends."""
        for _ in range(self.batches):
            if next(self.iterator, None) is None:
                self.iterator = iter(self.loader)
                next(self.iterator)


def rates(case: Case, num_workers: int) -> list[Row]:
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
    }
    subjects: dict[str, Any] = {
        SDL: StatefulDataLoader(case.make(), **options),
        OURS: patch_dataloader(DataLoader(case.make(), **options)),
    }
    if case.draws:
        subjects[BARE] = patch_dataloader(DataLoader(case.make(), **options), seed_samples=False)
    if case.beside is not None:
        subjects[f"{SDL} over a plain generator, unshuffled"] = StatefulDataLoader(case.beside(), **options)
    for subject in subjects.values():
        assert sum(1 for _ in subject) == case.samples // BATCH  # workers start
    parts = {name: Parts(subject, case.samples // BATCH // SHARDS) for name, subject in subjects.items()}
    figures = interleave(parts, case.passes * SHARDS)
    return [
        {
            "data": case.title,
            "loader": name,
            "samples/s, median": case.samples / SHARDS / statistics.median(took),
            "ratio, median": median_ratio(figures[SDL], took),
            "ratio, best": min(figures[SDL]) / min(took),
            "ratio of CPU": sum(parts[SDL].spent) / sum(parts[name].spent),
        }
        for name, took in figures.items()
    ]


def throughput(folder: Path) -> tuple[dict[str, list[Row]], list[Row]]:
    tables: dict[str, list[Row]] = {}
    targets: list[Row] = []
    known = cases(folder)
    for num_workers, clock in ((0, "CPU time"), (2, "wall time")):
        rows = []
        for case in known:
            found = rates(case, num_workers)
            rows += found
            for which in (OURS, BARE) if case.draws else (OURS,):
                ratio = next(row["ratio, median"] for row in found if row["loader"] == which)
                targets.append(target(f"{which} over {SDL}: {case.title}, {num_workers} workers", ratio, at_least=0.97))
        tables[f"Samples a second, {num_workers} workers, {clock}"] = rows
    return tables, targets


# Chunks, shuffled, beside infinibatch

INFINIBATCH = "infinibatch"


def infinibatch(files: Sequence[Path], block: int, num_instances: int = 1, instance: int = 0) -> FixedBatchIterator:
    chunks = InfinitePermutationSourceIterator(list(files), seed=0, num_instances=num_instances, instance_rank=instance)
    lines = SelectManyIterator(chunks, read_chunk)
    return FixedBatchIterator(BlockwiseShuffleIterator(lines, block, seed=1), BATCH)


class Endless(IterableDataset[list[str]]):
    """infinibatch's batches for torch's loader: an epoch of them."""

    def __init__(self, files: Sequence[Path], block: int, batches: int) -> None:
        self.files, self.block, self.batches = files, block, batches

    def __iter__(self) -> Iterator[list[str]]:
        info = get_worker_info()
        share = (1, 0) if info is None else (info.num_workers, info.id)
        return itertools.islice(infinibatch(self.files, self.block, *share), self.batches // share[0])


def as_it_is(batch: Any) -> Any:
    return batch


def slot_of(files: Sequence[Path], block: int) -> WorkerSlot:
    """Reading, shuffling and batching, and no loader."""
    config = ChunkedDataset(files, read_chunk, buffer_size=block).config(batch_size=BATCH)
    return WorkerSlot(config, StreamState.beginning(config, 0, 1, 1).task(0))


def exhausted(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def shuffling(folder: Path) -> tuple[dict[str, list[Row]], list[Row]]:
    files = sorted((folder / "gz").glob("*.gz"))
    batches = LINES // BATCH
    tables: dict[str, list[Row]] = {}
    targets: list[Row] = []
    bare: list[Row] = []
    rounds = 7
    for block in (10_000, 100_000):
        made: dict[str, Callable[[], Iterator[Any]]] = {
            INFINIBATCH: lambda block=block: itertools.islice(infinibatch(files, block), batches),
            "a worker slot": lambda block=block: slot_of(files, block),
            "chunks read, nothing more": lambda: map(read_chunk, files),
        }
        tasks = {
            name: partial(seconds, lambda make=make: exhausted(make()), time.process_time)
            for name, make in made.items()
        }
        assert sum(map(len, slot_of(files, block))) == LINES
        figures = interleave(tasks, rounds)
        bare += [
            {
                "block": block,
                "read by": name,
                "lines/s, median": LINES / statistics.median(took),
                "ratio, median": median_ratio(figures[INFINIBATCH], took),
                "ratio, best": min(figures[INFINIBATCH]) / min(took),
            }
            for name, took in figures.items()
        ]
        ratio = median_ratio(figures[INFINIBATCH], figures["a worker slot"])
        targets.append(target(f"a worker slot over infinibatch: blocks of {block:,}", ratio, at_least=1.0))
    tables["Lines of gz chunks, shuffled in blocks and batched, without a loader, CPU time"] = bare
    for num_workers, clock in ((0, "CPU time"), (2, "wall time")):
        rows = []
        for block in (10_000, 100_000):
            options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
            stream = ChunkedDataset(files, read_chunk, buffer_size=block)
            subjects = {
                # Without a collate_fn torch would go through infinibatch's batches word by word.
                INFINIBATCH: DataLoader(
                    Endless(files, block, batches), batch_size=None, collate_fn=as_it_is, **options
                ),
                OURS: patch_dataloader(DataLoader(stream, batch_size=BATCH, **options)),
            }
            spent: dict[str, list[float]] = {name: [] for name in subjects}
            for subject in subjects.values():
                assert sum(map(len, subject)) == LINES
            figures = interleave({name: partial(epoch, one, spent[name]) for name, one in subjects.items()}, rounds)
            rows += [
                {
                    "block": block,
                    "loader": f"DataLoader over {name}" if name == INFINIBATCH else name,
                    "lines/s, median": LINES / statistics.median(took),
                    "ratio, median": median_ratio(figures[INFINIBATCH], took),
                    "ratio, best": min(figures[INFINIBATCH]) / min(took),
                    "ratio of CPU, median": median_ratio(spent[INFINIBATCH], spent[name]),
                }
                for name, took in figures.items()
            ]
            title = f"{OURS} over infinibatch in a DataLoader: blocks of {block:,}, {num_workers} workers"
            targets.append(target(title, rows[-1]["ratio, median"], at_least=1.0))
        tables[f"The same through loaders, {num_workers} workers, {clock}"] = rows
    return tables, targets


# Resumes

TALL, GROUP = 800_000, 100_000
# 437,504 samples: in the middle of a chunk, of a block, and of a row group.
STOP = 13_672
RESUMES = 11


@dataclass(frozen=True)
class Resumed:
    """Something that is begun, or goes on from a state.

    Attributes:
        data: What it reads.
        name: What reads it.
        open: Opens the data.
        wrap: What reads it, of the data.
        load: Gives that a state.
        state: Its state.
    """

    data: str
    name: str
    open: Callable[[], Any]
    wrap: Callable[[Any], Any]
    load: Callable[[Any, Any], object] = lambda held, state: held.load_state_dict(state)
    state: Callable[[Any], Any] = lambda held: held.state_dict()


class Rows:
    """Hugging Face's dataset by itself, in batches."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[list[Any]]:
        rows = iter(self.dataset)
        while batch := list(itertools.islice(rows, BATCH)):
            yield batch


def resumed(folder: Path) -> list[Resumed]:
    whole = table(TALL).select_columns(["id", "text"])
    whole.save_to_disk(folder / "tall", num_shards=1)
    whole.to_parquet(folder / "one group.parquet", batch_size=TALL)
    whole.to_parquet(folder / "groups.parquet", batch_size=GROUP)
    sources: dict[str, Callable[[], Any]] = {
        "arrow, 1 shard": lambda: datasets.load_from_disk(folder / "tall").to_iterable_dataset(),
        "parquet, 1 shard": lambda: streamed([folder / "one group.parquet"]),
        f"parquet, reshard() to groups of {GROUP:,}": lambda: streamed([folder / "groups.parquet"]).reshard(),
    }
    options: dict[str, Any] = {"batch_size": BATCH, "collate_fn": as_it_is}

    def ours(dataset: Any) -> Any:
        return patch_dataloader(DataLoader(dataset, **options))

    subjects = []
    for data, opening in sources.items():
        subjects += [
            Resumed(data, OURS, opening, ours),
            Resumed(data, "Hugging Face's dataset", opening, Rows),
            Resumed(data, SDL, opening, partial(StatefulDataLoader, **options)),
        ]
    for chunk in (100_000, 10_000):
        chunk_files(folder / f"gz of {chunk}", TALL, chunk)

        def files(chunk: int = chunk) -> list[Path]:
            return sorted((folder / f"gz of {chunk}").glob("*.gz"))

        data = f"chunks of {chunk:,}, blocks of 10,000"
        subjects += [
            Resumed(data, OURS, files, lambda files: ours(ChunkedDataset(files, read_chunk, buffer_size=10_000))),
            Resumed(
                data,
                INFINIBATCH,
                files,
                lambda files: infinibatch(files, 10_000),
                lambda held, state: held.setstate(state),
                lambda held: held.getstate(),
            ),
        ]
    return subjects


def resumes(folder: Path) -> tuple[list[Row], list[Row]]:
    rows: list[Row] = []
    targets: list[Row] = []
    subjects = resumed(folder)
    for data in dict.fromkeys(subject.data for subject in subjects):
        tasks: dict[str, Callable[[], float]] = {}
        opened: dict[str, list[float]] = {}
        for subject in (subject for subject in subjects if subject.data == data):
            held = subject.wrap(subject.open())
            batches = iter(held)
            for _ in itertools.islice(batches, STOP):
                pass
            state = copy.deepcopy(subject.state(held))
            following = next(batches)
            for name, at in ((f"{subject.name}, fresh", None), (subject.name, state)):
                opened[name] = []
                tasks[name] = partial(first_batch, subject, at, following, opened[name])
            del held, batches
        figures = interleave(tasks, RESUMES)
        for name in (name for name in figures if f"{name}, fresh" in figures):
            took, fresh = figures[name], figures[f"{name}, fresh"]
            alone, fresh_alone = (
                [whole - opening for whole, opening in zip(figures[one], opened[one], strict=True)]
                for one in (name, f"{name}, fresh")
            )
            rows.append(
                {
                    "data": data,
                    "resumed by": name,
                    "ms to begin, median": 1e3 * statistics.median(fresh),
                    "of it to open the data": 1e3 * statistics.median(opened[f"{name}, fresh"]),
                    "ms to resume, median": 1e3 * statistics.median(took),
                    "resume over beginning, median": median_ratio(took, fresh),
                    "the same without opening": median_ratio(alone, fresh_alone),
                    "resume over ours, median": median_ratio(took, figures[OURS]),
                }
            )
            if name == OURS:
                ratio = rows[-1]["resume over beginning, median"]
                targets.append(target(f"a resume over a fresh start: {data}", ratio, at_most=1.5))
    return rows, targets


def first_batch(subject: Resumed, state: Any, following: Any, opened: list[float]) -> float:
    """CPU seconds from nothing to the first batch; those that it takes to open the data are added to ``opened``."""
    state = copy.deepcopy(state)
    got: list[Any] = []

    def run() -> object:
        began = time.process_time()
        data = subject.open()
        opened.append(time.process_time() - began)
        held = subject.wrap(data)
        if state is not None:
            subject.load(held, state)
        batches = iter(held)
        got.append(next(batches))
        return held, batches

    took = seconds(run, time.process_time)
    assert state is None or got == [following]
    return took


# Snapshots

# Integers in the state, batches of an epoch without workers and with two, rounds.
SNAPSHOTS = ((0, 2000, 1000, 9), (10_000, 2000, 1000, 5), (100_000, 2000, 1000, 3))
RARELY = f"{SDL}, snapshot_every_n_steps=100"
STATELESS = "DataLoader, no state"


def snapshots() -> tuple[list[Row], list[Row]]:
    rows: list[Row] = []
    targets: list[Row] = []
    for num_workers, (size, *lengths, rounds) in itertools.product((0, 2), SNAPSHOTS):
        batches = lengths[num_workers > 0]
        options: dict[str, Any] = {
            "batch_size": BATCH,
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
        }
        walk = partial(Walk, batches * BATCH, size)
        subjects: dict[str, Any] = {
            STATELESS: DataLoader(walk(), **options),
            SDL: StatefulDataLoader(walk(), **options),
            RARELY: StatefulDataLoader(walk(), snapshot_every_n_steps=100, **options),
            BARE: patch_dataloader(DataLoader(walk(), **options), seed_samples=False),
        }
        spent: dict[str, list[float]] = {name: [] for name in subjects}
        for subject in subjects.values():
            assert sum(1 for _ in subject) == batches
        figures = interleave({name: partial(epoch, one, spent[name]) for name, one in subjects.items()}, rounds)
        for name, took in spent.items():
            more = statistics.median(a - b for a, b in zip(took, spent[STATELESS], strict=True))
            rows.append(
                {
                    "workers": num_workers,
                    "integers in the state": size,
                    "loader": name,
                    "CPU us a batch, median": 1e6 * statistics.median(took) / batches,
                    "more than without a state": 1e6 * more / batches,
                    "ratio of CPU, median": median_ratio(spent[SDL], took),
                    "ratio of wall time, median": median_ratio(figures[SDL], figures[name]),
                }
            )
        ratio = median_ratio(spent[SDL], spent[BARE])
        what = f"{size:,} integers in the state, {num_workers} workers"
        targets.append(target(f"{BARE} over {SDL}, CPU: {what}", ratio, at_least=0.97))
    return rows, targets


# How far a sample travels

TRAVEL = 200_000
TRAVELS = (
    # chunks, buffer_size, worker slots
    (8, 1, 1),
    (8, 1_000, 1),
    (8, 10_000, 1),
    (8, 100_000, 1),
    (80, 1_000, 1),
    (80, 10_000, 1),
    (80, 100_000, 1),
    (800, 10_000, 1),
    (80, 10_000, 8),
)


def read_range(chunk: range) -> range:
    return chunk


def served(chunks: int, buffer_size: int, slots: int, epoch_number: int) -> NDArray[np.int64]:
    """The samples of an epoch in the order in which they are served, worker slots in turn."""
    width = TRAVEL // chunks
    refs = [range(first, first + width) for first in range(0, TRAVEL, width)]
    config = ChunkedDataset(refs, read_range, buffer_size=buffer_size).config(batch_size=BATCH)
    state = StreamState.beginning(config, epoch_number, 1, slots)
    each = [WorkerSlot(config, state.task(slot)) for slot in range(slots)]
    turns = itertools.zip_longest(*each, fillvalue=())
    return np.fromiter(itertools.chain.from_iterable(itertools.chain.from_iterable(turns)), dtype=np.int64)


def travel() -> list[Row]:
    orders: dict[str, Callable[[int], NDArray[np.int64]]] = {
        "torch.randperm": lambda number: torch.randperm(TRAVEL, generator=torch.Generator().manual_seed(number)).numpy()
    }
    for chunks, buffer_size, slots in TRAVELS:
        on = "1 worker slot" if slots == 1 else f"{slots} worker slots"
        orders[f"{chunks} chunks, buffer_size={buffer_size:,}, {on}"] = partial(served, chunks, buffer_size, slots)
    rows: list[Row] = []
    for name, order in orders.items():
        figures = []
        for number in range(5):
            found = order(number)
            place = np.empty(TRAVEL, dtype=np.int64)
            place[found] = np.arange(TRAVEL)
            away = np.abs(place - np.arange(TRAVEL)) / TRAVEL
            apart = np.abs(np.diff(place)) / TRAVEL
            figures.append((away.mean(), away.max(), apart.mean(), np.median(apart)))
        mean, furthest, apart_mean, apart_median = np.array(figures).mean(axis=0).tolist()
        rows.append(
            {
                "order": name,
                "mean way": mean,
                "furthest": furthest,
                "neighbours apart, mean": apart_mean,
                "neighbours apart, median": apart_median,
                "neighbours apart, of a true shuffle": apart_mean / rows[0]["neighbours apart, mean"] if rows else 1.0,
            }
        )
    return rows


# States


def state_of(dataset: Any, num_replicas: int, num_workers: int) -> StreamState:
    """Where all worker slots stand after some batches of each."""
    stream = as_stream(dataset)
    assert stream is not None
    config = stream.config(batch_size=BATCH)
    begin = StreamState.beginning(config, 0, num_replicas, num_workers)
    states = []
    for number in range(begin.num_slots):
        slot = WorkerSlot(config, begin.task(number))
        for _ in itertools.islice(slot, 5):
            pass
        states.append(slot.state())
        slot.close()
    return begin.at(tuple(states), steps=5 * num_workers)


def torchdata_state(dataset: Any, num_workers: int) -> dict[str, Any]:
    loader = StatefulDataLoader(dataset, batch_size=BATCH, num_workers=num_workers)
    batches = iter(loader)
    for _ in range(5 * max(num_workers, 1)):
        next(batches)
    state: dict[str, Any] = loader.state_dict()
    return state


def states(folder: Path) -> tuple[list[Row], list[Row]]:
    shards = 128
    whole = datasets.load_from_disk(folder / "arrow")
    refs = [range(first, first + 1000) for first in range(0, 1000 * shards, 1000)]
    subjects: dict[str, Any] = {
        "Hugging Face, arrow": whole.to_iterable_dataset(num_shards=shards),
        "ChunkedDataset": ChunkedDataset(refs, read_range),
    }
    rows: list[Row] = []
    targets: list[Row] = []
    peers: dict[tuple[str, int], int] = {}
    for name, dataset in subjects.items():
        for num_replicas, num_workers in ((1, 1), (1, 8), (8, 8)):
            loader: Any = patch_dataloader(DataLoader(dataset, batch_size=BATCH))
            details = state_of(dataset, num_replicas, num_workers).to_dict()
            state = loader.tracker.state_dict(Progress(consumed=5 * num_workers, details=details))
            if (name, num_workers) not in peers:
                peers[name, num_workers] = torch_bytes(torchdata_state(dataset, 0 if num_workers == 1 else num_workers))
            slots = num_replicas * num_workers
            # Of torchdata's each rank has one of its own.
            theirs = num_replicas * peers[name, num_workers]
            row = {
                "data": f"{name}, {shards} shards",
                "worker slots": slots,
                "bytes as JSON": json_bytes(state),
                "of a slot": json_bytes(state) / slots,
                "by torch.save": torch_bytes(state),
                f"{SDL}'s, by torch.save": theirs,
                "ratio": torch_bytes(state) / theirs,
            }
            rows.append(row)
    lines = infinibatch(sorted((folder / "gz").glob("*.gz")), 10_000)
    for _ in itertools.islice(lines, 400):  # into the second block: before, its state has no random state
        pass
    rows.append(dict.fromkeys(rows[0], "-") | {"data": "infinibatch, by pickle", "worker slots": 1})
    rows[-1]["by torch.save"] = len(pickle.dumps(lines.getstate()))
    return rows, targets


def main() -> None:
    warnings.simplefilter("ignore")  # torchdata calls what torch deprecates
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    gc.freeze()
    tables: dict[str, list[Row]] = {}
    targets: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in (throughput, shuffling):
            found, wanted = part(folder)
            tables |= found
            targets += wanted
        title = (
            f"From a fresh loader and a state after {STOP * BATCH:,} samples of {TALL:,} to the first batch, CPU time"
        )
        tables[title], wanted = resumes(folder)
        targets += wanted
        tables["What keeping a state costs, iterable dataset with torchdata's protocol"], wanted = snapshots()
        targets += wanted
        tables[f"How far a sample travels, in shares of an epoch of {TRAVEL:,}"] = travel()
        tables["A state"], wanted = states(folder)
        targets += wanted
    report("streams", CLAIM, tables, targets)


if __name__ == "__main__":
    main()
