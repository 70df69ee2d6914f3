"""Padding of batches of like lengths beside infinibatch and lhotse; their speed, planning, memory, and a resume."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from infinibatch.iterators import (
    BucketedReadaheadBatchIterator,
    CheckpointableIterator,
    InfinitePermutationSourceIterator,
    NativeCheckpointableIterator,
)
from lhotse.cut.text import TextExample
from lhotse.dataset.sampling.base import TokenConstraint
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler
from numpy.typing import NDArray

from benchmarks.measure import Row, in_child, interleave, median_ratio, report, seconds, short, target, with_memory
from lightning_stateful.bucketing.padding import measure
from lightning_stateful.core.order import Progress
from lightning_stateful.report.padding import order_of, padding_report
from lightning_stateful.samplers import BucketBatchSampler, StatefulBatchSampler

SAMPLES, MANY = 1_164_464, 10_000_000
BUDGET, FIXED = 16_384, 32
NARROW, WIDE = 320, 10_000
RANKS = (1, 8, 64)
CLAIM = (
    f"Lengths of real text, drawn with replacement to {SAMPLES:,} samples of 4 to 512 tokens; {BUDGET:,} tokens a "
    f"batch, padding included. infinibatch {version('infinibatch')} sorts windows of a list that was shuffled before, "
    f"or of its own shuffled source; lhotse {version('lhotse')} fills buckets in a buffer of its default size, from "
    "one example for each length, under its TokenConstraint, and is timed over its first batches without the first, "
    "which fills the buffer. The samplers here are timed over an epoch, its shuffle included. Times are CPU times, but "
    "where a process is fresh."
)
ROUNDS = 5
LHOTSE_STEPS = {1: 300, 8: 40, 64: 5}
NUM_BUCKETS = (8, 16, 32, 64, 96, 128, 192, 256)
PLANS = 3

RESUMES = 7
# Ranks of an epoch that is resized ten times, and then resumed on one.
RESIZED = (8, 6, 8, 4, 7, 3, 16, 5, 2, 12)


def draw(samples: int) -> NDArray[np.uint16]:
    """So many lengths, with replacement."""
    found = json.loads((Path(__file__).parent / "wikitext_lengths.json").read_text())
    counts = np.array(found["counts"])
    drawn = np.random.default_rng(0).choice(found["lengths"], samples, p=counts / counts.sum())
    return drawn.astype(np.uint16)


# Subjects: each an epoch of batches, as lists of samples, or, of lhotse, of examples


def read_ahead(lengths: Sequence[int], source: CheckpointableIterator, window: int, size: int | None = None) -> Any:
    """Infinibatch's windows: batches of ``size``, or of the budget."""
    return BucketedReadaheadBatchIterator(
        source,
        window,
        key=lengths.__getitem__,
        batch_size=size or (lambda longest: BUDGET // lengths[longest]),
    )


def shuffled(samples: int, num_replicas: int = 1, seed: int = 0) -> CheckpointableIterator:
    """A part of a list shuffled before."""
    order = np.random.default_rng(seed).permutation(samples)
    return NativeCheckpointableIterator(order[::num_replicas].tolist())


def lhotse(examples: Iterable[TextExample], num_buckets: int, num_replicas: int = 1) -> DynamicBucketingSampler:
    constraint = TokenConstraint(max_tokens=BUDGET)
    options: dict[str, Any] = {"shuffle": True, "world_size": num_replicas, "rank": 0}
    return DynamicBucketingSampler(examples, constraint=constraint, num_buckets=num_buckets, **options)


def examples_of(lengths: Iterable[int]) -> list[TextExample]:
    """One example for each length, as often as that comes."""
    kinds = {length: TextExample("", tokens=np.zeros(length, dtype=np.int8)) for length in set(lengths)}
    return [kinds[length] for length in lengths]


# Padding


@dataclass(frozen=True)
class Figures:
    """An epoch; shares in percent."""

    steps: int
    padding: float
    use: float
    over: int
    straggling: float

    def row(self, batches: str, num_replicas: int) -> Row:
        """A row of the table."""
        return {
            "batches": batches,
            "ranks": num_replicas,
            "steps": self.steps,
            "padding, %": self.padding,
            "budget use, %": self.use,
            "batches over budget": self.over,
            "straggler share, %": self.straggling,
        }


def ours(lengths: Any, num_replicas: int = 1, **options: Any) -> Figures:
    sampler = BucketBatchSampler(lengths, num_replicas=num_replicas, rank=0, **options)
    order = order_of(sampler)
    uses = measure(order.plan(0, num_replicas)).uses(order.budget)
    found = padding_report(sampler, num_replicas=num_replicas).whole
    shares = (100 * found.padding, 100 * found.budget_use)
    return Figures(found.steps, *shares, int((uses > 1).sum()), 100 * found.straggling)


def of_peer(batches: Iterable[Sequence[int]], total: int, size: int | None = None) -> Figures:
    """The same of lists of lengths on one rank, checked to hold every sample once."""
    pairs, tokens = [], 0
    for batch in batches:
        pairs.append((max(batch), len(batch)))
        tokens += sum(batch)
    longest, counts = np.array(pairs).T
    assert tokens == total, f"batches hold {tokens} of {total} tokens"
    padded = longest * counts
    uses = padded / BUDGET if size is None else counts / size
    shares = (100 * float(1 - tokens / padded.sum()), 100 * float(uses.mean()))
    return Figures(len(counts), *shares, int((uses > 1).sum()), 0.0)


def paddings(lengths: NDArray[np.uint16]) -> tuple[list[Row], list[Row]]:
    known, total = lengths.tolist(), int(lengths.sum())
    tokens: dict[str, Any] = {"max_tokens": BUDGET}
    fixed: dict[str, Any] = {"batch_size": FIXED}

    def looked_up(batches: Iterable[Sequence[int]]) -> Iterator[list[int]]:
        return ([known[sample] for sample in batch] for batch in batches)

    order = np.random.default_rng(0).permutation(len(lengths)).tolist()
    at_random = (order[start : start + FIXED] for start in range(0, len(order), FIXED))
    narrow, wide = (read_ahead(known, shuffled(SAMPLES), *kind) for kind in ((NARROW, FIXED), (WIDE,)))
    examples = examples_of(known)
    of_ranks = {num_replicas: ours(lengths, num_replicas, **tokens) for num_replicas in RANKS}
    figures = {
        f"shuffled, {FIXED} samples": of_peer(looked_up(at_random), total, FIXED),
        f"infinibatch, read-ahead {NARROW}, {FIXED} samples": of_peer(looked_up(narrow), total, FIXED),
        f"buckets, {FIXED} samples": ours(lengths, **fixed),
        f"infinibatch, read-ahead {WIDE:,}, tokens": of_peer(looked_up(wide), total),
    }
    for num_buckets in (30, 100):
        served = lhotse(examples, num_buckets)
        by_length = ([example.num_tokens for example in batch] for batch in served)
        figures[f"lhotse, {num_buckets} buckets, tokens"] = of_peer(by_length, total)
    rows = [found.row(name, 1) for name, found in figures.items()]
    rows += [found.row("buckets, tokens", num_replicas) for num_replicas, found in of_ranks.items()]

    targets = []
    limits = ((0.6, 98.9, 0.0), (1.0, 98.5, 0.05), (2.5, 96.5, 0.1))
    for (num_replicas, found), (padding, use, straggling) in zip(of_ranks.items(), limits, strict=True):
        on = "1 rank" if num_replicas == 1 else f"{num_replicas} ranks"
        targets += [
            target(f"padding on {on}, %", found.padding, at_most=padding),
            target(f"budget use on {on}, %", found.use, at_least=use),
            target(f"straggler share on {on}, %", found.straggling, at_most=straggling),
        ]
    over = sum(found.over for found in of_ranks.values())
    return rows, [
        *targets,
        target("batches over budget on 1, 8 and 64 ranks", over, at_most=0),
        target(f"padding of buckets of {FIXED} samples, %", figures[f"buckets, {FIXED} samples"].padding, at_most=1),
    ]


def numbers_of_buckets(lengths: NDArray[np.uint16]) -> list[Row]:
    rows: list[Row] = []
    for number in NUM_BUCKETS:
        plan = partial(BucketBatchSampler, lengths, max_tokens=BUDGET, num_buckets=number)
        of_ranks = {ranks: padding_report(plan(), num_replicas=ranks).whole for ranks in RANKS}
        rows.append(
            {
                "num_buckets": number,
                **{f"padding on {ranks}, %": 100 * found.padding for ranks, found in of_ranks.items()},
                **{f"steps on {ranks}": found.steps for ranks, found in of_ranks.items()},
                "ms to plan, best": 1e3 * min(seconds(plan, time.process_time) for _ in range(PLANS)),
            }
        )
    return rows


# Batches handed out


@dataclass(frozen=True)
class Served:
    """What was handed out, and the time that it took."""

    batches: int
    samples: int
    seconds: float


def serve(batches: Iterable[Sequence[int]], samples: int) -> Served:
    """Take batches until so many samples have come."""

    def run() -> tuple[int, int]:
        count = number = 0
        for number, batch in enumerate(batches, start=1):  # noqa: B007
            count += len(batch)
            if count >= samples:
                break
        return number, count

    found: list[tuple[int, int]] = []
    took = seconds(lambda: found.append(run()), time.process_time)
    return Served(*found[0], took)


ALONE = f"infinibatch, read-ahead {WIDE:,}, list shuffled before"
SOURCE = f"infinibatch, read-ahead {WIDE:,}, InfinitePermutationSource"
OURS = "BucketBatchSampler"


def rates(lengths: NDArray[np.uint16]) -> tuple[dict[str, list[Row]], list[Row]]:
    known = lengths.tolist()
    everything = list(range(SAMPLES))
    numbers = itertools.count(1)  # of epochs and seeds: nothing of an earlier round is of use
    samplers = {
        num_replicas: BucketBatchSampler(lengths, max_tokens=BUDGET, num_replicas=num_replicas, rank=0)
        for num_replicas in (1, 8)
    }

    def epoch(name: str, num_replicas: int) -> Iterable[Sequence[int]]:
        number = next(numbers)
        if name == ALONE:
            return read_ahead(known, shuffled(SAMPLES, num_replicas, number), WIDE)
        if name == SOURCE:
            options = {"seed": number, "num_instances": num_replicas, "instance_rank": 0}
            return read_ahead(known, InfinitePermutationSourceIterator(everything, **options), WIDE)
        sampler = samplers[num_replicas]
        sampler.set_epoch(number)
        return sampler

    def timed(name: str, num_replicas: int) -> float:
        # Whole windows, so that infinibatch's source does not shuffle the next epoch as well.
        served = serve(epoch(name, num_replicas), SAMPLES // num_replicas // WIDE * WIDE)
        return served.seconds / served.samples

    tables: dict[str, list[Row]] = {}
    targets: list[Row] = []
    for num_replicas in (1, 8):
        tasks = {name: partial(timed, name, num_replicas) for name in (ALONE, SOURCE, OURS)}
        figures = interleave(tasks, ROUNDS)
        rank = f"rank 0 of {num_replicas}"
        tables[f"Samples handed out, {rank}"] = [
            {
                "batches": name,
                "M samples/s, best": 1e-6 / min(took),
                "M samples/s, median": 1e-6 / statistics.median(took),
                "times infinibatch, list": min(figures[ALONE]) / min(took),
                "the same, median": median_ratio(figures[ALONE], took),
                "times infinibatch, source": min(figures[SOURCE]) / min(took),
            }
            for name, took in figures.items()
        ]
        targets += [
            target(f"{OURS} over infinibatch, {what}, {rank}", median_ratio(figures[peer], figures[OURS]), at_least=3)
            for peer, what in ((ALONE, "list shuffled before"), (SOURCE, "its source"))
        ]
    return tables, targets


def costs(lengths: NDArray[np.uint16], many: NDArray[np.uint16]) -> tuple[list[Row], list[Row]]:
    """Milliseconds of a batch of rank 0, on more and more ranks."""
    numbers = itertools.count(1)
    examples = examples_of(lengths.tolist())
    orders = {len(known): BucketBatchSampler(known, max_tokens=BUDGET).order for known in (lengths, many)}

    def of_ours(num_replicas: int, samples: int) -> float:
        sampler = StatefulBatchSampler(orders[samples], num_replicas=num_replicas, rank=0)
        sampler.set_epoch(next(numbers))
        served = serve(sampler, samples)
        return 1e3 * served.seconds / served.batches

    def of_lhotse(num_replicas: int, num_buckets: int) -> float:
        batches = iter(lhotse(examples, num_buckets, num_replicas))
        next(batches)
        steps = LHOTSE_STEPS[num_replicas]
        return 1e3 * seconds(lambda: sum(1 for _ in itertools.islice(batches, steps)), time.process_time) / steps

    tasks: dict[str, dict[int, Callable[[], float]]] = {
        **{f"lhotse, {n} buckets": {w: partial(of_lhotse, w, n) for w in RANKS} for n in (30, 100)},
        **{f"{OURS}, {n:,} samples": {w: partial(of_ours, w, n) for w in RANKS} for n in (SAMPLES, MANY)},
    }
    flat = {f"{name} {ranks}": task for name, of_ranks in tasks.items() for ranks, task in of_ranks.items()}
    figures = interleave(flat, PLANS)
    rows: list[Row] = []
    for name in tasks:
        of_ranks = {ranks: figures[f"{name} {ranks}"] for ranks in RANKS}
        rows.append(
            {
                "batches": name,
                **{f"ms on {ranks}, median": statistics.median(took) for ranks, took in of_ranks.items()},
                **{f"{ranks} ranks over 1": median_ratio(of_ranks[ranks], of_ranks[1]) for ranks in RANKS[1:]},
            }
        )
    return rows, [
        target(f"cost of a batch, 64 ranks over 1: {row['batches']}", row["64 ranks over 1"], at_most=1.5)
        for row in rows
        if row["batches"].startswith(OURS)
    ]


# Planning


def build(lengths: Any) -> tuple[BucketBatchSampler, Iterator[list[int]]]:
    """A sampler at its first batch."""
    sampler = BucketBatchSampler(lengths, max_tokens=BUDGET, num_replicas=1, rank=0)
    batches = iter(sampler)
    assert next(batches)
    return sampler, batches


def planning(path: str) -> Row:
    """Seconds and peak extra MB from lengths in memory to the first batch; for a child process."""
    lengths = np.load(path)
    return with_memory(lambda: build(lengths))


def hold(path: str, mapped: bool, together: Barrier, answer: Connection) -> None:
    """Send how many private bytes this process gains while another one does the same."""
    process = psutil.Process()
    gc.collect()
    held = process.memory_full_info().uss
    lengths: Any = path if mapped else np.load(path)
    kept = build(lengths)
    gc.collect()
    # Pages that only one process maps would count as private.
    together.wait()
    answer.send(process.memory_full_info().uss - held)
    together.wait()
    del kept


def private_bytes(path: str, *, mapped: bool) -> list[int]:
    """What each of two processes gains."""
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(2)
    pipes = [spawn.Pipe(duplex=False) for _ in range(2)]
    processes = [spawn.Process(target=hold, args=(path, mapped, together, pipe[1])) for pipe in pipes]
    for process in processes:
        process.start()
    gained: list[int] = [pipe[0].recv() for pipe in pipes]
    for process in processes:
        process.join()
    return gained


def plans(many: NDArray[np.uint16]) -> tuple[dict[str, list[Row]], list[Row]]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "lengths.npy")
        np.save(path, many)
        runs = [in_child(planning, path) for _ in range(PLANS)]
        row: Row = {
            "seconds, best": min(run["seconds"] for run in runs),
            "seconds, median": statistics.median(run["seconds"] for run in runs),
            "peak extra MB": statistics.median(run["MB"] for run in runs),
            "bytes a sample": statistics.median(run["MB"] for run in runs) * 1e6 / MANY,
        }
        targets = [target(f"planning {short(MANY)} lengths: bytes a sample", row["bytes a sample"], at_most=12)]
        held: list[Row] = []
        gained = {mapped: private_bytes(path, mapped=mapped) for mapped in (False, True)}
        for mapped, gains in gained.items():
            held.append(
                {
                    "lengths": "memory-mapped .npy" if mapped else "array in memory",
                    "private MB of one process": gains[0] / 1e6,
                    "of the other": gains[1] / 1e6,
                    "bytes a sample, mean": statistics.mean(gains) / MANY,
                }
            )
        saved = (statistics.mean(gained[False]) - statistics.mean(gained[True])) / MANY
        targets.append(target("private bytes a sample saved by a file of 2 bytes a length", saved, at_least=1.9))
    return {
        f"From {short(MANY)} uint16 lengths to the first batch, in a fresh process; memory without the lengths": [row],
        "What each of two processes holds of its own after that, lengths included": held,
    }, targets


# A resume


def forget() -> None:
    """Empty the library's caches, as they are in a fresh process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_stateful."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


FRESH, RESIZES = "fresh start", f"after {len(RESIZED)} resizings"


def places(sampler: BucketBatchSampler, epoch: int) -> dict[str, Progress]:
    """Where an epoch may be resumed."""
    plan, steps = sampler.order.plan(epoch, 1), len(sampler)
    resized = plan.progress_after(0)
    for num_replicas in RESIZED:
        resized = sampler.order.plan(epoch, num_replicas, resized).progress_after(steps // 160)
    return {
        "step 10": plan.progress_after(10),
        "the middle": plan.progress_after(steps // 2),
        "10 before the end": plan.progress_after(steps - 10),
        RESIZES: resized,
    }


def check(sampler: BucketBatchSampler) -> None:
    """Check a state of :func:`places` against one really iterated to, and the batch that follows."""
    sampler.set_epoch(0)
    batches = iter(sampler)
    for _ in range(10):
        next(batches)
    state = sampler.state_dict()
    assert state == sampler.tracker.state_dict(places(sampler, 0)["step 10"])
    following = next(batches)
    again, _ = build(order_of(sampler).lengths)
    again.load_state_dict(state)
    assert next(iter(again)) == following


def resumes(lengths: NDArray[np.uint16]) -> tuple[dict[str, list[Row]], list[Row]]:
    # Another epoch every round: some buckets take longer than others.
    known, _ = build(lengths)
    check(known)
    after_plan: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}

    def timed(place: str, epochs: Iterator[int]) -> float:
        epoch = next(epochs)
        state = None
        if place != FRESH:
            state = known.tracker.state_dict(places(known, epoch)[place])
            sizes[place] = max(sizes.get(place, 0), len(json.dumps(state, separators=(",", ":"))))
        forget()
        gc.collect()
        began = time.process_time()
        sampler = BucketBatchSampler(lengths, max_tokens=BUDGET, num_replicas=1, rank=0)
        planned = time.process_time()
        if state is None:
            sampler.set_epoch(epoch)
        else:
            sampler.load_state_dict(state)
        assert next(iter(sampler))
        ended = time.process_time()
        after_plan.setdefault(place, []).append(ended - planned)
        return ended - began

    tasks = {place: partial(timed, place, itertools.count()) for place in (FRESH, *places(known, 0))}
    figures = interleave(tasks, RESUMES)
    rows: list[Row] = [
        {
            "resumed at": place,
            "ms from lengths, median": 1e3 * statistics.median(took),
            "of a fresh start": median_ratio(took, figures[FRESH]),
            "ms from a sampler, median": 1e3 * statistics.median(after_plan[place]),
            "of a fresh start, too": median_ratio(after_plan[place], after_plan[FRESH]),
            "bytes as JSON": sizes.get(place, "-"),
        }
        for place, took in figures.items()
    ]
    targets = [
        target(f"resume over a fresh start: {place}", median_ratio(took, figures[FRESH]), at_most=1.2)
        for place, took in figures.items()
        if place != FRESH
    ]
    targets.append(target("largest state as JSON, bytes", max(sizes.values()), at_most=1023))
    return {"load_state_dict to the first batch, fresh samplers": rows}, targets


def main() -> None:
    warnings.simplefilter("ignore")  # lhotse warns of what its own tests do
    torch.set_num_threads(1)
    gc.freeze()  # what imports leave behind is no garbage, and takes 0.1 s to look through
    lengths, many = draw(SAMPLES), draw(MANY)
    tables: dict[str, list[Row]] = {}
    tables["An epoch of batches"], targets = paddings(lengths)
    tables["Buckets, by their number, on 1, 8 and 64 ranks"] = numbers_of_buckets(lengths)
    rate_tables, rate_targets = rates(lengths)
    tables.update(rate_tables)
    tables["A batch of rank 0, CPU time"], cost_targets = costs(lengths, many)
    plan_tables, plan_targets = plans(many)
    tables.update(plan_tables)
    resume_tables, resume_targets = resumes(lengths)
    tables.update(resume_tables)
    report("buckets", CLAIM, tables, [*targets, *rate_targets, *cost_targets, *plan_targets, *resume_targets])


if __name__ == "__main__":
    main()
