"""Shuffled indices a second, their memory, and the first index of an epoch, beside torch.randperm and its sampler."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from benchmarks.measure import Row, in_child, interleave, median_ratio, report, seconds, short, target, with_memory
from lightning_stateful.core import ShuffledOrder
from lightning_stateful.samplers import StatefulDistributedSampler

CLAIM = (
    "A shuffled order is computed block by block: faster than drawing a whole permutation, in memory that does not "
    "grow with the dataset, and an epoch begins at once."
)
BLOCK = 65_536
SAMPLE = 20_000_000
PEER = 100_000_000
ROUNDS = 5
# The slowest length: just above a power of two, half of all words fall outside and are mixed again.
WORST = 2**29 + 1


def take_blocks(length: int, sample: int) -> int:
    """Take about ``sample`` indices of an epoch in blocks spread evenly over it; how many it were."""
    order = ShuffledOrder(length)
    blocks = sample // BLOCK
    for number in range(blocks):
        start = number * (length - BLOCK) // max(blocks - 1, 1)
        order.take(np.arange(start, start + BLOCK, dtype=np.int64), epoch=0, cycle=0)
    return blocks * BLOCK


def draw(length: int, sample: int) -> int:
    """Draw whole permutations with torch, about ``sample`` indices in all; how many it were."""
    for _ in range(max(sample // length, 1)):
        torch.randperm(length)
    return max(sample // length, 1) * length


def memory_of(function: Callable[[int, int], int], length: int, sample: int) -> float:
    """Peak extra MB of ``function``; for a child process."""
    return float(with_memory(lambda: function(length, sample))["MB"])


def first_index(sampler: str, length: int) -> Row:
    """Seconds and extra MB from building a sampler to its first index; for a child process."""
    kind = {"torch": DistributedSampler, "ours": StatefulDistributedSampler}[sampler]

    def run() -> object:
        iterator = iter(kind(range(length), num_replicas=8, rank=0))
        return next(iterator), iterator

    return with_memory(run)


def rates() -> tuple[list[Row], list[Row]]:
    subjects: dict[str, tuple[Callable[[int, int], int], int, int]] = {
        "torch.randperm(1e6)": (draw, 10**6, SAMPLE),
        "torch.randperm(1e8)": (draw, PEER, PEER),
        **{f"ShuffledOrder({short(length)})": (take_blocks, length, SAMPLE) for length in (10**6, PEER, 10**9, 10**12)},
        "ShuffledOrder(2^29 + 1)": (take_blocks, WORST, SAMPLE),
    }

    def timed(function: Callable[[int, int], int], length: int, sample: int) -> float:
        served: list[int] = []
        took = seconds(lambda: served.append(function(length, sample)))
        return took / served[0] * 1e6  # microseconds an index: the reciprocal of M indices a second

    take_blocks(10**6, 10**6)
    figures = interleave({name: partial(timed, *subject) for name, subject in subjects.items()}, ROUNDS)
    peer = figures["torch.randperm(1e8)"]
    rows: list[Row] = [
        {
            "indices": name,
            "M/s, best": 1 / min(figures[name]),
            "M/s, median": 1 / statistics.median(figures[name]),
            "times randperm(1e8)": min(peer) / min(figures[name]),
            "the same, median": median_ratio(peer, figures[name]),
            "extra MB": in_child(memory_of, *subject),
        }
        for name, subject in subjects.items()
    ]
    billion: Row = next(row for row in rows if row["indices"] == "ShuffledOrder(1e9)")
    return rows, [
        target("rate at 1e9 over torch.randperm(1e8)", billion["times randperm(1e8)"], at_least=1.5),
        target("extra MB at 1e9", billion["extra MB"], at_most=50),
    ]


def first_indices() -> tuple[list[Row], list[Row]]:
    names = {"torch": "torch DistributedSampler", "ours": "StatefulDistributedSampler"}
    rows = []
    for length, rounds in ((10**7, 3), (10**8, 1), (10**12, 3)):
        kinds = ("torch", "ours") if length <= 10**8 else ("ours",)
        runs: dict[str, list[Row]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                runs[kind].append(in_child(first_index, kind, length))
        best = {kind: min(run["seconds"] for run in runs[kind]) for kind in kinds}
        rows += [
            {
                "samples": short(length),
                "sampler, rank 0 of 8": names[kind],
                "seconds, best": best[kind],
                "extra MB": min(run["MB"] for run in runs[kind]),
                "times faster": best["torch"] / best[kind] if "torch" in best else "-",
                "rounds": rounds,
            }
            for kind in kinds
        ]
    return rows, [target("seconds to the first index at 1e12", rows[-1]["seconds, best"], at_most=0.1)]


def main() -> None:
    rate_rows, rate_targets = rates()
    first_rows, first_targets = first_indices()
    tables = {
        f"Shuffled indices, in blocks of {BLOCK:,}": rate_rows,
        "First index of a shuffled epoch, in a fresh process": first_rows,
    }
    report("permutation", CLAIM, tables, [*rate_targets, *first_targets])


if __name__ == "__main__":
    main()
