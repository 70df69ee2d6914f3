"""Packing documents with an index: padding, plans and first sequences of many documents, and speed."""

from __future__ import annotations

import json
import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Row, in_child, interleave, median_ratio, report, short, target, with_memory
from lightning_stateful.loaders.packed_dataset import PackedDataset
from lightning_stateful.packing import Packing
from lightning_stateful.packing.split import SplitPlan
from lightning_stateful.packing.whole import WholePlan

DOCUMENTS, FEWER, MANY, VERY_MANY, PART = 1_164_464, 1_000_000, 10_000_000, 100_000_000, 2**18
LENGTHS = (512, 2_048)
ROUNDS, BATCHES, BATCH = 5, 200, 8
CLAIM = (
    f"Lengths of real text, drawn with replacement to {DOCUMENTS:,} documents of 4 to 512 tokens, or as many as a row "
    "says. One by one: best-fit decreasing in plain Python, a document after another, with a sorted list of rooms. A "
    "stored order: a shuffled array of all documents and their cumulated lengths, as an index of samples needs. MB are "
    "those beside the lengths, at their peak, in a process of their own. Sequences are read from lists of tokens in "
    "memory, eight at a time."
)


def draw(documents: int) -> NDArray[np.uint16]:
    """So many lengths, with replacement."""
    found = json.loads((Path(__file__).parent / "wikitext_lengths.json").read_text())
    counts = np.array(found["counts"])
    values = np.array(found["lengths"], dtype=np.uint16)
    rng = np.random.default_rng(0)
    drawn = np.empty(documents, dtype=np.uint16)
    # In parts: the peak of this process is measured later.
    for at in range(0, documents, PART):
        part = drawn[at : at + PART]
        part[:] = rng.choice(values, len(part), p=counts / counts.sum())
    return drawn


def one_by_one(lengths: Sequence[int], length: int) -> int:
    """Best-fit decreasing, a document after another: how many sequences it takes."""
    count = 0
    rooms: list[int] = []
    for size in sorted(lengths, reverse=True):
        place = bisect_left(rooms, size)
        if place == len(rooms):
            count += 1
            insort(rooms, length - size)
        else:
            insort(rooms, rooms.pop(place) - size)
    return count


def whole(lengths: NDArray[np.uint16], length: int) -> WholePlan:
    """The plan of whole documents."""
    return WholePlan(lengths, Packing(length, how="whole"), 0)


def padding(lengths: NDArray[np.uint16]) -> list[Row]:
    """Share of padding in an epoch of whole documents."""
    rows = []
    total = int(lengths.sum(dtype=np.int64))
    for length in LENGTHS:
        plan = whole(lengths, length)
        counts = {"plan": plan.num_sequences, "one by one": one_by_one(lengths.tolist(), length)}
        counts["no packing can be below"] = -(-total // length)
        for way, count in counts.items():
            rows.append({"length": length, "packed by": way, "sequences": count})
            rows[-1]["padding, %"] = 100 * (1 - total / (count * length))
    return rows


def planned(documents: int, length: int, epoch: int = 0) -> Row:
    """The plan of so many whole documents, with its first sequence."""
    lengths = draw(documents)
    return with_memory(lambda: whole(lengths, length).parts(0, epoch))


def listed(documents: int, length: int) -> Row:
    """The same one by one."""
    lengths = draw(documents).tolist()
    return with_memory(lambda: one_by_one(lengths, length))


def first_split(documents: int, separators: int) -> Row:
    """The first sequence of documents that are joined and cut, the plan included."""
    lengths = draw(documents)
    return with_memory(lambda: SplitPlan(lengths, 2_048, separators, 0).parts(0, 0))


def stored(documents: int) -> Row:
    """The same by an order of all documents that is stored."""
    lengths = draw(documents)

    def first() -> Any:
        order = np.arange(documents, dtype=np.int32)
        np.random.default_rng(0).shuffle(order)
        bounds = np.cumsum(lengths[order], dtype=np.int64)
        return order, bounds, np.searchsorted(bounds, 2_048)

    return with_memory(first)


def plans() -> list[Row]:
    """Seconds and memory of plans of many documents."""
    tasks: dict[str, Any] = {
        f"whole, {short(FEWER)}": partial(in_child, planned, FEWER, 2_048),
        f"whole, one by one, {short(FEWER)}": partial(in_child, listed, FEWER, 2_048),
        f"whole, {short(MANY)}": partial(in_child, planned, MANY, 2_048),
        f"split, {short(MANY)}": partial(in_child, first_split, MANY, 0),
        f"split, stored order, {short(MANY)}": partial(in_child, stored, MANY),
        f"split, {short(VERY_MANY)}": partial(in_child, first_split, VERY_MANY, 0),
        f"split, separator, {short(VERY_MANY)}": partial(in_child, first_split, VERY_MANY, 1),
    }
    return [{"first sequence of": name, **task()} for name, task in tasks.items()]


def milliseconds(data: PackedDataset, epoch: int) -> float:
    """CPU time of a sequence, read in batches from the beginning of an epoch."""
    first = epoch * len(data)
    data[first]
    began = time.process_time()
    for batch in range(BATCHES):
        data.__getitems__(list(range(first + batch * BATCH, first + (batch + 1) * BATCH)))
    return (time.process_time() - began) / BATCHES / BATCH * 1e3


def plain_loop(documents: list[list[int]], length: int) -> float:
    """CPU time of a sequence that a plain loop over documents cuts, with positions."""
    held: list[int] = []
    positions: list[int] = []
    count, began = 0, time.process_time()
    for document in documents:
        held.extend(document)
        positions.extend(range(len(document)))
        while len(held) >= length:
            _ = np.array(held[:length]), np.array(positions[:length])
            held, positions, count = held[length:], positions[length:], count + 1
        if count >= BATCHES * BATCH:
            break
    return (time.process_time() - began) / count * 1e3


def speed() -> list[Row]:
    """Milliseconds of a sequence."""
    rng, lengths = np.random.default_rng(1), draw(200_000)
    documents = [rng.integers(0, 50_000, size).tolist() for size in lengths.tolist()]
    rows = []
    for length in LENGTHS:
        tasks = {
            how: partial(milliseconds, PackedDataset(documents, lengths=lengths, packing=Packing(length, how=how)), 1)
            for how in ("split", "whole")
        }
        figures = interleave({**tasks, "plain loop": partial(plain_loop, documents, length)}, ROUNDS)
        for way, found in figures.items():
            times = median_ratio(figures["plain loop"], found)
            rows.append({"length": length, "packed by": way, "ms a sequence": min(found)})
            rows[-1]["faster than the loop, times"] = times
    return rows


def main() -> None:
    """Measure, print and write the result."""
    padded, large, fast = padding(draw(DOCUMENTS)), plans(), speed()
    seconds = {row["first sequence of"]: row for row in large}
    by_plan = seconds[f"whole, {short(MANY)}"]
    by_split = [row for name, row in seconds.items() if name.startswith("split") and short(VERY_MANY) in name]
    targets = [
        target(
            "padding of a plan, most, %", max(r["padding, %"] for r in padded if r["packed by"] == "plan"), at_most=0.1
        ),
        target("plan of 1e7 whole documents, s", by_plan["seconds"], at_most=10),
        target(
            "plan of 1e6 against one by one, times",
            seconds[f"whole, one by one, {short(FEWER)}"]["seconds"] / seconds[f"whole, {short(FEWER)}"]["seconds"],
            at_least=10,
        ),
        target("first sequence of 1e8, split, s", max(row["seconds"] for row in by_split), at_most=3),
        target("first sequence of 1e8, split, MB", max(row["MB"] for row in by_split), at_most=200),
    ]
    report("packing", CLAIM, {"Padding, whole": padded, "Plans": large, "Speed": fast}, targets)


if __name__ == "__main__":
    main()
