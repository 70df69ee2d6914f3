"""Shards of numbered samples, lanes that read them side by side, and the order in which torch asks workers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_stateful.streams.lane import ALONE, Lane, LaneBatch, StreamConfig
from lightning_stateful.streams.mixing import Mixing
from lightning_stateful.streams.shards import ShardIterator, Shards
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Place
from lightning_stateful.streams.standing import Standing

Value = tuple[Any, ...]


class NeverEndsError(BaseException):
    """What reads shards opens them again and again; not to be taken for an error of theirs."""


class NumberedShards(Shards):
    """Shards whose samples are ``(label, epoch, shard, number)``, and a count of what is asked of them.

    Args:
        sizes: Samples of each shard.
        label: What comes first in each sample.
        state_size: Characters of what a shard's iterator says of its place; None if it says nothing.
        fails: At which sample a shard breaks off; -1 if it cannot be opened.
        known: Whether their sizes are known without reading.
        draws: Whether samples come with numbers drawn from the three generators that all code shares.
        limit: After how many opens somebody who reads them is told that this has no end.
        asked: Counts opens, closes, states, and samples read.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        label: str = "",
        state_size: int | None = None,
        fails: dict[int, int] | None = None,
        known: bool = False,
        draws: bool = False,
        pinned: bool = False,
        limit: int | None = None,
        asked: Counter[str] | None = None,
    ) -> None:
        self.counts, self.label, self.state_size = list(sizes), label, state_size
        self.fails, self.known, self.draws, self.pinned = dict(fails or {}), known, draws, pinned
        self.limit, self.asked = limit, Counter[str]() if asked is None else asked

    @property
    def num_shards(self) -> int:
        return len(self.counts)

    def read(self, shard: int, epoch: int, state: Any = None) -> ShardIterator:
        self.asked["opened"] += 1
        self.asked[f"opened {shard}"] += 1
        if self.limit is not None and self.asked["opened"] > self.limit:
            raise NeverEndsError(f"opened {self.limit} times")
        if self.fails.get(shard) == -1:
            raise FileNotFoundError(f"no shard {shard}")
        return _Numbers(self, shard, epoch, 0 if state is None else state["next"])

    def name(self, shard: int) -> str:
        return f"{self.label or 'shard'}-{shard}.bin"

    def describe(self) -> dict[str, Any]:
        return {"shards": len(self.counts)}

    def sizes(self) -> list[int] | None:
        return list(self.counts) if self.known else None

    def all(self, epoch: int) -> list[Value]:
        """Every sample of an epoch."""
        return [(self.label, epoch, shard, number) for shard, size in enumerate(self.counts) for number in range(size)]


class _Numbers(ShardIterator):
    def __init__(self, shards: NumberedShards, shard: int, epoch: int, at: int) -> None:
        self.shards, self.shard, self.epoch, self.at = shards, shard, epoch, at

    def __next__(self) -> Value:
        if self.at == self.shards.fails.get(self.shard):
            raise OSError(f"bad block {self.at}")
        if self.at >= self.shards.counts[self.shard]:
            raise StopIteration
        self.shards.asked["read"] += 1
        self.at += 1
        value: Value = (self.shards.label, self.epoch, self.shard, self.at - 1)
        return (*value, *drawn()) if self.shards.draws else value

    def state(self) -> Any:
        if self.shards.state_size is None:
            return None
        self.shards.asked["states"] += 1
        return {"next": self.at, "padding": "." * self.shards.state_size}

    def close(self) -> None:
        self.shards.asked["closed"] += 1


def drawn() -> tuple[int, int, int]:
    """A number of each of the generators that all code shares."""
    return random.randrange(10**9), int(np.random.randint(10**9)), int(torch.randint(10**9, ()))


def source(sizes: Sequence[int], *, label: str = "", steps: Any = (), of: Any = None, **options: Any) -> Source:
    """A source of numbered shards."""
    return Source(shards=NumberedShards(sizes, label=label, **(of or {})), steps=steps, **options)


def config(sizes: Sequence[int], *, batching: Any = None, **options: Any) -> StreamConfig:
    """A stream of a single source of numbered shards."""
    return StreamConfig(sources={ALONE: source(sizes, **options)}, **(batching or {}))


def mixed_config(
    sources: dict[str, Source], *, batching: Any = None, weights: Any = None, seed: int = 0, **options: Any
) -> StreamConfig:
    """Several sources as one stream."""
    defaults = {"by": "batch", "stop": "all_exhausted"}
    mixing = Mixing.of(list(sources), weights=weights, temperature=1, seed=seed, **{**defaults, **options})
    return StreamConfig(sources=sources, mixing=mixing, **(batching or {}))


def open_lane(standing: Standing, lane: int, place: Place | None = None) -> Lane:
    """A lane of a pass."""
    worker = lane // standing.num_replicas
    how = {"epoch": standing.epoch, "worker": worker}
    return Lane(standing.config, standing.shares[lane], place, **how)


class Crew:
    """All lanes of a run, which are asked for batches in any order.

    Args:
        standing: Where to begin.
        through: What becomes of a place before the standing has it; JSON and back as from a worker by default.
    """

    def __init__(
        self, standing: Standing, through: Callable[[Place], Place] = lambda place: json.loads(json.dumps(place))
    ) -> None:
        self.begun, self._through = standing, through
        self.lanes = [open_lane(standing, lane, standing.places[lane]) for lane in range(standing.num_lanes)]

    def next(self, lane: int) -> LaneBatch | None:
        """The next batch of a lane; None if it is over."""
        return next(self.lanes[lane], None)

    def serve(self, lane: int, number: int | None = None) -> list[Value]:
        """The samples of some batches of a lane, or of all."""
        served: list[Value] = []
        while number is None or number > 0:
            batch = self.next(lane)
            if batch is None:
                break
            served += batch.values
            number = None if number is None else number - 1
        return served

    def serve_all(self) -> list[Value]:
        """The samples of all lanes."""
        return [value for lane in range(len(self.lanes)) for value in self.serve(lane)]

    def standing(self, steps: int = 1) -> Standing:
        """Where all lanes stand."""
        return self.begun.at(tuple(self._through(lane.place()) for lane in self.lanes), self.begun.steps + steps)


def round_trip(standing: Standing) -> Standing:
    """A standing written to JSON and read again."""
    data = json.loads(json.dumps(standing.to_dict()))
    return Standing.from_dict(data, standing.config)


def torch_turns(order: Sequence[int], batches: dict[int, int], prefetch: int = 2) -> list[int]:
    """Which worker gives each batch, by the rules of torch's loader over an iterable dataset.

    Tasks are put to active workers in turn, some ahead; answers come in the order of tasks; a worker that answers with
    its end gets no more, and what it was asked beyond is passed over.

    Args:
        order: The lanes that torch's workers 0, 1 and so on run.
        batches: How many batches each lane has left.
        prefetch: Tasks of each worker that are under way.
    """
    left, active = dict(batches), set(order)
    tasks: list[int] = []
    turn = 0

    def put() -> None:
        nonlocal turn
        for _ in order:
            lane = order[turn % len(order)]
            turn += 1
            if lane in active:
                tasks.append(lane)
                return

    for _ in range(prefetch * len(order)):
        put()
    gave: list[int] = []
    while tasks:
        lane = tasks.pop(0)
        if lane not in active:
            continue
        if left[lane]:
            left[lane] -= 1
            gave.append(lane)
        else:
            active.remove(lane)
        put()
    return gave


def write_chunks(folder: Path, sizes: Sequence[int], *, first: int = 0) -> list[Path]:
    """Files of consecutive numbers, one a line."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for which, size in enumerate(sizes):
        file = folder / f"part-{which:03}.txt"
        file.write_text("".join(f"{number}\n" for number in range(first, first + size)))
        first += size
        files.append(file)
    return files


def read_numbers(file: Path) -> Iterator[int]:
    """The numbers in a file."""
    with file.open() as lines:
        for line in lines:
            yield int(line)


def with_draws(value: Any) -> tuple[Any, ...]:
    """A sample beside numbers drawn for it."""
    return value, *drawn()


def with_worker(value: Any) -> tuple[Any, ...]:
    """A sample beside the number of the worker that made it."""
    info = get_worker_info()
    return value, -1 if info is None else info.id


def is_no_third(value: Any) -> bool:
    """Whether a number is not divisible by three."""
    return bool(value % 3)


def add_up(state: int, value: int) -> tuple[tuple[int, int], int]:
    """A running sum."""
    return (value, state + value), state + value
