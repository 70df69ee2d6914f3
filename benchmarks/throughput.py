"""Batches a second over whole shuffled epochs, beside torch's DataLoader and torchdata's StatefulDataLoader."""

from __future__ import annotations

import statistics
import time
import warnings
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.measure import Row, interleave, median_ratio, report, seconds, target
from lightning_stateful.loaders import StatefulLoader

CLAIM = "To be able to resume costs no throughput, and neither does seeding samples by the batch, as is the default."
PEER = "torch DataLoader"
BARE = "StatefulLoader, seed_samples=False"
DEFAULT = "StatefulLoader, as it is by default"


class Ints(Dataset[int]):
    """The cheapest samples there are, so that the loader itself is what is measured."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Images(Dataset[torch.Tensor]):
    """Float tensors of 3x32x32, held in memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.images = torch.rand(2048, 3, 32, 32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index % 2048]


CASES = (
    # what, dataset, batch size, workers, samples, rounds
    ("ints", Ints, 16, 0, 72_000, 15),
    ("ints", Ints, 16, 2, 32_000, 21),
    ("3x32x32 float tensors", Images, 64, 0, 44_800, 9),
    ("3x32x32 float tensors", Images, 64, 2, 38_400, 9),
)


def loaders(dataset: Any, batch_size: int, num_workers: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": True,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
    }
    return {
        PEER: DataLoader(dataset, **options),
        "torchdata StatefulDataLoader": StatefulDataLoader(dataset, **options),
        BARE: StatefulLoader(dataset, seed_samples=False, **options),
        DEFAULT: StatefulLoader(dataset, **options),
    }


def epoch(loader: Any) -> float:
    """Seconds of one whole epoch, its shuffle included.

    Without workers all work is done in this process, so its CPU time is what it takes on an idle machine.
    """

    def run() -> None:
        for _ in loader:
            pass

    return seconds(run, time.perf_counter if loader.num_workers else time.process_time)


def compare(dataset: Any, batch_size: int, num_workers: int, rounds: int) -> list[Row]:
    subjects = loaders(dataset, batch_size, num_workers)
    for loader in subjects.values():
        epoch(loader)  # workers start
    figures = interleave({name: partial(epoch, loader) for name, loader in subjects.items()}, rounds)
    peer, bare = figures[PEER], figures[BARE]
    per_batch = 1e6 / len(subjects[PEER])
    return [
        {
            "loader": name,
            "batches/s, best": len(subjects[name]) / min(took),
            "batches/s, median": len(subjects[name]) / statistics.median(took),
            "ratio, best": min(peer) / min(took),
            "ratio, median": median_ratio(peer, took),
            "seeding, us a batch": (min(took) - min(bare)) * per_batch if name == DEFAULT and not num_workers else "-",
        }
        for name, took in figures.items()
    ]


def main() -> None:
    warnings.simplefilter("ignore")  # torchdata calls what torch deprecates
    torch.set_num_threads(1)
    tables: dict[str, list[Row]] = {}
    targets: list[Row] = []
    for what, kind, batch_size, num_workers, length, rounds in CASES:
        rows = compare(kind(length), batch_size, num_workers, rounds)
        clock = "wall time" if num_workers else "CPU time"
        title = f"{length:,} {what} in batches of {batch_size}, {num_workers} workers, {rounds} epochs each, {clock}"
        tables[title] = rows
        for name, which, least in ((BARE, "best", 1.0), (DEFAULT, "median", 0.95 if num_workers else 0.9)):
            ratio = next(row[f"ratio, {which}"] for row in rows if row["loader"] == name)
            said = f"{name}, over {PEER}, {which}: {what}, {num_workers} workers"
            targets.append(target(said, ratio, at_least=least))
    report("throughput", CLAIM, tables, targets)


if __name__ == "__main__":
    main()
