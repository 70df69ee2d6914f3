"""Steps of an epoch of a stream on any ranks and workers: how even shares are, what is left, what is read twice."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
from torchdata.nodes import BaseNode

from benchmarks.measure import Row, report, target
from lightning_stateful import ChunkedDataset
from lightning_stateful.stream_nodes.nodes import NodeState, Shards, StreamNode, close
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stream import as_stream
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig, WorkerSlot

SAMPLES, BATCH, EPOCHS = 1_000, 8, 10
RANKS, WORKERS, SHARDS = (1, 2, 3, 8), (0, 2), (1, 7, 8, 100)
CLAIM = (
    f"An epoch of {SAMPLES:,} samples in batches of {BATCH} has ceil({SAMPLES:,} / ({BATCH} x ranks)) steps on any "
    "number of ranks, workers and shards, one or two more or fewer where the sizes of shards differ and are not known. "
    "All worker slots are read in one process, step by step as ranks do; least and most of ten epochs and of 0 and 2 "
    "workers."
)


class Counted(Shards):
    """Shards that count the samples that are read of them."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self.num_read = shards, 0
        self.draws, self.reread = shards.draws, shards.reread

    @property
    def num_shards(self) -> int:
        """As of the shards."""
        return self._shards.num_shards

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        """The node of a shard, counted."""
        return _CountingNode(self._shards.node(shard, epoch), self)

    def name(self, shard: int) -> str:
        """As of the shards."""
        return self._shards.name(shard)

    def describe(self) -> dict[str, Any]:
        """As of the shards."""
        return self._shards.describe()

    def sizes(self) -> list[int] | None:
        """As of the shards."""
        return self._shards.sizes()


class _CountingNode(StreamNode[Any]):
    def __init__(self, node: BaseNode[Any], shards: Counted) -> None:
        super().__init__()
        self._node, self._shards = node, shards

    def reset(self, initial_state: NodeState | None = None) -> None:
        super().reset(initial_state)
        self._node.reset(initial_state)

    def next(self) -> Any:
        sample = next(self._node)
        self._shards.num_read += 1
        return sample

    def get_state(self) -> Any:
        return self._node.state_dict()

    def close(self) -> None:
        close(self._node)


def sizes_of(number: int, *, skewed: bool) -> list[int]:
    """Sizes of so many shards, all alike or each about twice that of the next but one."""
    if not skewed:
        return [SAMPLES * (shard + 1) // number - SAMPLES * shard // number for shard in range(number)]
    weights = [2 ** (-shard * 6 / number) for shard in range(number)]
    ends = [round(SAMPLES * sum(weights[: shard + 1]) / sum(weights)) for shard in range(number)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def chunks(sizes: Sequence[int], folder: Path) -> Any:
    """Chunks of numbers."""
    firsts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    return ChunkedDataset(
        [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)], list, buffer_size=100, seed=1
    )


def in_memory(sizes: Sequence[int], folder: Path) -> Any:
    """A Hugging Face dataset in memory, whose shards are of one size."""
    return datasets.Dataset.from_dict({"number": list(range(SAMPLES))}).to_iterable_dataset(num_shards=len(sizes))


def parquet(sizes: Sequence[int], folder: Path) -> Any:
    """Parquet files."""
    files = []
    for shard, size in enumerate(sizes):
        files.append(str(folder / f"{len(sizes)}-{shard}-{size}.parquet"))
        datasets.Dataset.from_dict({"number": list(range(size))}).to_parquet(files[-1])
    return datasets.load_dataset("parquet", data_files=files, streaming=True, split="train")


def json_lines(sizes: Sequence[int], folder: Path) -> Any:
    """Files of JSON lines."""
    files = []
    for shard, size in enumerate(sizes):
        files.append(str(folder / f"{len(sizes)}-{shard}-{size}.jsonl"))
        Path(files[-1]).write_text("".join(json.dumps({"number": number}) + "\n" for number in range(size)))
    return datasets.load_dataset("json", data_files=files, streaming=True, split="train")


KINDS: dict[str, Callable[[Sequence[int], Path], Any]] = {
    "chunks": chunks,
    "Hugging Face in memory": in_memory,
    "parquet": parquet,
    "json": json_lines,
}


def steps(state: StreamState) -> tuple[int, int, StreamState]:
    """Take all steps from a state on: how many, of how many samples, and where the slots stand then."""
    slots = [WorkerSlot(state.config, state.task(slot)) for slot in range(state.num_slots)]
    states = [slot.state() for slot in slots]
    turns = [state.workers_in_turn(rank) for rank in range(state.num_replicas)]
    taken = served = 0
    while True:
        step = [_next_batch(rank, turns[rank], slots, states, state.num_replicas) for rank in range(state.num_replicas)]
        if None in step:
            break
        for slot, size in filter(None, step):
            states[slot] = slots[slot].state()
            served += size
        taken += 1
    for slot in slots:
        slot.close()
    return taken, served, state.at(tuple(states), state.steps + taken)


def _next_batch(
    rank: int, turns: list[int], slots: Sequence[WorkerSlot], states: list[NodeState], num_ranks: int
) -> tuple[int, int] | None:
    while turns:
        worker = turns.pop(0)
        slot = worker * num_ranks + rank
        if (batch := next(slots[slot], None)) is not None:
            turns.append(worker)
            return slot, len(batch)
        states[slot] = slots[slot].state()
    return None


def epochs(dataset: Any, ranks: int, workers: int) -> Iterator[tuple[int, int, float, float]]:
    """Of every epoch: steps, samples left for the next, these in batches of a slot, samples read over those served."""
    stream = as_stream(dataset, seed=1)
    assert stream is not None
    counted = Counted(stream.sources[ALONE].shards)
    source = stream.sources[ALONE]
    source = Source(shards=counted, shuffle=True, buffer_size=source.buffer_size, seed=1)
    state = StreamState.beginning(StreamConfig(sources={ALONE: source}, batch_size=BATCH), 0, ranks, max(workers, 1))
    left = 0
    for _ in range(EPOCHS):
        counted.num_read = 0
        taken, served, state = steps(state)
        while ranks > 1 and (shared := state.shared_anew()) is not None:
            more, of_them, state = steps(shared)
            taken, served = taken + more, served + of_them
            if not more:
                break
        left += SAMPLES - served
        yield taken, left, left / (BATCH * state.num_slots), counted.num_read / served
        state = state.following()


def main() -> None:
    tables: dict[str, list[Row]] = {}
    worst, most_left = 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        for kind, make in KINDS.items():
            rows: list[Row] = []
            for number in SHARDS:
                for skewed in (False, True) if number > 1 and kind != "Hugging Face in memory" else (False,):
                    row: Row = {"shards": f"{number}, {'skewed' if skewed else 'equal'}"}
                    for ranks in RANKS:
                        dataset = make(sizes_of(number, skewed=skewed), Path(name))
                        found = [each for workers in WORKERS for each in epochs(dataset, ranks, workers)]
                        due = math.ceil(SAMPLES / (BATCH * ranks))
                        counts = [each[0] for each in found]
                        left, in_batches, read = (max(each[which] for each in found) for which in (1, 2, 3))
                        worst = max(worst, *(abs(count - due) for count in counts))
                        most_left = max(most_left, in_batches)
                        row[f"{ranks} ranks, {due} due"] = f"{min(counts)} to {max(counts)}, {left} left, {read:.1f}x"
                    rows.append(row)
            tables[f"{kind}: steps, most samples left for the next epoch, samples read over samples served"] = rows
    report(
        "shares",
        CLAIM,
        tables,
        [
            target("steps more or fewer than due", worst, at_most=2),
            target("batches of a worker slot left for the next epoch", most_left, at_most=1),
        ],
    )


if __name__ == "__main__":
    main()
