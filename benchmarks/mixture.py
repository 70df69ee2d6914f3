"""Batches of several sources a second beside torchdata.nodes and lhotse; what a resume far on costs, and its state."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from lhotse import CutSet
from lhotse.dataset.sampling import RoundRobinSampler, SimpleCutSampler
from lhotse.testing.dummies import dummy_cut
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torchdata.nodes import Batcher, MultiNodeWeightedSampler, SamplerWrapper, StopCriteria

from benchmarks.measure import Row, interleave, median_ratio, report, seconds, short, target
from lightning_stateful.mixture import WeightSchedule
from lightning_stateful.samplers import MixtureBatchSampler, RoundRobinBatchSampler, StatefulBatchSampler

CLAIM = (
    "Batches of several sources are computed many at a time, a resume costs the same wherever the run was stopped, and "
    "a state stays under 1 KB. A slot is a batch of one source. torchdata and the samplers here are timed over a whole "
    f"epoch, its shuffle included; lhotse {version('lhotse')} over its first slots, unshuffled and over one cut "
    "without audio, which is the cheapest that it can be."
)
BATCH = 16
SLOTS = 40_000
LHOTSE_SLOTS = 300
ROUNDS = 7
BATCHER = "torchdata weighted, Batcher"
BATCHED = "torchdata weighted, BatchSampler"
LHOTSE = "lhotse RoundRobinSampler"
IN_TURN = "RoundRobinBatchSampler"
MIXED = "MixtureBatchSampler"

EARLY, LATE = 10, 10_000_000
RESUMES = 100
MANY = 16
BILLIONS = {f"corpus_{number:02d}": 10**9 + number for number in range(MANY)}
# Shares that no small block holds whole, as weights found by an experiment are.
FOUND = [round((number + 1) ** -0.73, 4) for number in range(MANY)]

# Both slots lie between points.
FADING: dict[int, list[float]] = {0: FOUND, 1000: [1.0] * MANY, 2 * LATE: FOUND[::-1]}


@dataclass(frozen=True)
class Case:
    """Sources that every subject of a table serves.

    Attributes:
        title: Of the table.
        lengths: Samples of each; whole batches on every rank, so that subjects have the same slots.
        weights: Of each.
        num_replicas: Number of ranks; rank 0 is timed.
    """

    title: str
    lengths: Sequence[int]
    weights: Sequence[float]
    num_replicas: int = 1


def split(parts: Sequence[float], num_replicas: int = 1) -> list[int]:
    """Lengths in about these proportions, of about ``SLOTS`` batches a rank."""
    return [round(SLOTS * part / sum(parts)) * BATCH * num_replicas for part in parts]


def cases() -> list[Case]:
    four, ranks, many = split([4, 3, 2, 1]), split([4, 3, 2, 1], 8), split(FOUND)
    return [
        Case(f"4 sources by size, 1 rank, batches of {BATCH}, CPU time", four, four),
        Case(f"{MANY} sources by size to the power 0.7, 1 rank", many, [length**0.7 for length in many]),
        Case("4 sources by size, rank 0 of 8", ranks, ranks, num_replicas=8),
    ]


# Subjects: each a fresh epoch of a case


def weighted(case: Case, seed: int, *, batcher: bool) -> Iterator[Any]:
    """Torchdata's mixture. Its Batcher takes one index after the other; a BatchSampler below it takes a list."""
    torch.manual_seed(seed)
    nodes: dict[str, Any] = {}
    for name, length in enumerate(case.lengths):
        samples: Any = RandomSampler(range(length))
        if case.num_replicas > 1:
            samples = DistributedSampler(range(length), num_replicas=case.num_replicas, rank=0, seed=seed)
        whole = SamplerWrapper(samples) if batcher else SamplerWrapper(BatchSampler(samples, BATCH, drop_last=False))
        nodes[str(name)] = Batcher(whole, BATCH, drop_last=False) if batcher else whole
    return MultiNodeWeightedSampler(
        nodes,
        {str(name): float(weight) for name, weight in enumerate(case.weights)},
        stop_criteria=StopCriteria.ALL_DATASETS_EXHAUSTED,
        rank=0,
        world_size=case.num_replicas,
        seed=seed,
    )


def lhotse(case: Case, seed: int, *, by_weight: bool) -> Iterator[Any]:
    """Lhotse's round robin; with weights it draws the next sampler."""
    cut = dummy_cut(0)
    samplers = [
        SimpleCutSampler(CutSet([cut] * length), max_cuts=BATCH, world_size=case.num_replicas, rank=0)
        for length in case.lengths
    ]
    weights = [weight / sum(case.weights) for weight in case.weights]
    return iter(RoundRobinSampler(*samplers, randomize=weights if by_weight else False, seed=seed))


def in_turn(case: Case, seed: int) -> Iterator[Any]:
    return iter(RoundRobinBatchSampler(case.lengths, BATCH, seed=seed, num_replicas=case.num_replicas, rank=0))


def mixed(case: Case, seed: int) -> Iterator[Any]:
    options: dict[str, Any] = {"weights": case.weights, "num_replicas": case.num_replicas, "rank": 0}
    return iter(MixtureBatchSampler(case.lengths, BATCH, seed=seed, **options))


SUBJECTS: dict[str, Callable[[Case, int], Iterator[Any]]] = {
    BATCHER: partial(weighted, batcher=True),
    BATCHED: partial(weighted, batcher=False),
    LHOTSE: partial(lhotse, by_weight=False),
    "lhotse RoundRobinSampler, weights": partial(lhotse, by_weight=True),
    IN_TURN: in_turn,
    MIXED: mixed,
}


def rates(case: Case) -> list[Row]:
    seeds = itertools.count()  # nothing of an earlier round is of use

    def timed(name: str) -> float:
        limit = LHOTSE_SLOTS if name.startswith("lhotse") else None
        slots = sum(case.lengths) // BATCH // case.num_replicas if limit is None else limit
        epoch = itertools.islice(SUBJECTS[name](case, next(seeds)), limit)
        served: list[int] = []
        took = seconds(lambda: served.append(sum(1 for _ in epoch)), time.process_time)
        assert served == [slots], f"{name} served {served} of {slots} slots"
        return took / slots

    figures = interleave({name: partial(timed, name) for name in SUBJECTS}, ROUNDS)
    return [
        {
            "slots": name,
            "slots/s, best": 1 / min(took),
            "slots/s, median": 1 / statistics.median(took),
            "times Batcher": min(figures[BATCHER]) / min(took),
            "times BatchSampler": min(figures[BATCHED]) / min(took),
            "the same, median": median_ratio(figures[BATCHED], took),
            "times lhotse": min(figures[LHOTSE]) / min(took),
        }
        for name, took in figures.items()
    ]


def rate_targets(rows: Sequence[Row]) -> list[Row]:
    of = {row["slots"]: row for row in rows}
    peers = {BATCHER: "times Batcher", LHOTSE: "times lhotse"}
    return [
        target(f"{name} over {peer}", of[name][column], at_least=3)
        for name in (IN_TURN, MIXED)
        for peer, column in peers.items()
    ]


# A resume


def fresh(kind: str, seed: int) -> StatefulBatchSampler:
    """A sampler over ``MANY`` sources of a billion samples."""
    if kind == "round robin":
        return RoundRobinBatchSampler(BILLIONS, BATCH, seed=seed)
    options: dict[str, Mapping[str, Any]] = {
        "by batch": {"weights": FOUND},
        "by sample": {"weights": FOUND, "by": "sample"},
        "num_steps, schedule": {"schedule": WeightSchedule(FADING, between="linear"), "num_steps": 10**9},
        "num_steps, 1,000 an epoch": {"weights": FOUND, "num_steps": 1000},
    }
    return MixtureBatchSampler(BILLIONS, BATCH, seed=seed, **options[kind])


KINDS = ("round robin", "by batch", "by sample", "num_steps, schedule", "num_steps, 1,000 an epoch")


def state_at(sampler: StatefulBatchSampler, slot: int) -> dict[str, Any]:
    """The state after ``slot`` batches of training, which are not iterated."""
    tracker = sampler.tracker
    epoch, step = divmod(slot, len(sampler))
    return tracker.state_dict(tracker.plan_epoch(epoch).progress_after(step))


def forget() -> None:
    """Empty the library's caches, as they are in a fresh process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_stateful."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def check(kind: str) -> None:
    """Check :func:`state_at` against a state really iterated to, and the batch that follows."""
    sampler = fresh(kind, 0)
    passes = itertools.chain.from_iterable(iter(sampler) for _ in itertools.count())
    served = [next(passes) for _ in range(1100)]
    state = sampler.state_dict()
    assert state == state_at(fresh(kind, 0), len(served))
    again = fresh(kind, 0)
    again.load_state_dict(state)
    assert next(iter(again)) == next(passes)


def resume(kind: str, slot: int) -> float:
    """Seconds from ``load_state_dict`` to the first batch, of a fresh sampler with nothing cached."""
    state = state_at(fresh(kind, 1), slot)
    sampler = fresh(kind, 1)
    forget()

    def run() -> object:
        sampler.load_state_dict(state)
        iterator = iter(sampler)
        return next(iterator), iterator

    return seconds(run)


def resumes() -> tuple[list[Row], list[Row]]:
    for kind in KINDS:
        check(kind)
    tasks = {f"{kind} {slot}": partial(resume, kind, slot) for kind in KINDS for slot in (EARLY, LATE)}
    figures = interleave(tasks, RESUMES)
    rows: list[Row] = []
    for kind in KINDS:
        early, late = figures[f"{kind} {EARLY}"], figures[f"{kind} {LATE}"]
        rows.append(
            {
                "mixture": kind,
                f"ms at slot {EARLY}, median": statistics.median(early) * 1e3,
                f"ms at slot {short(LATE)}, median": statistics.median(late) * 1e3,
                "ratio, best": min(late) / min(early),
                "ratio of medians": statistics.median(late) / statistics.median(early),
                "bytes as JSON": len(json.dumps(state_at(fresh(kind, 1), LATE), separators=(",", ":"))),
            }
        )
    targets = [
        target(f"slot {short(LATE)} over slot {EARLY}: {row['mixture']}", row["ratio of medians"], at_most=1.2)
        for row in rows
    ]
    largest = max(row["bytes as JSON"] for row in rows)
    return rows, [*targets, target(f"largest state of {MANY} sources as JSON, bytes", largest, at_most=1023)]


def main() -> None:
    warnings.simplefilter("ignore")  # torchdata calls what torch deprecates
    torch.set_num_threads(1)
    gc.freeze()  # what imports leave behind is no garbage, and takes 0.1 s to look through
    tables = {case.title: rates(case) for case in cases()}
    targets = rate_targets(next(iter(tables.values())))
    title = f"load_state_dict to the first batch, {MANY} sources of 1e9 samples, {RESUMES} fresh samplers each"
    tables[title], resume_targets = resumes()
    report("mixture", CLAIM, tables, [*targets, *resume_targets])


if __name__ == "__main__":
    main()
