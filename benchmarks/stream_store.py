"""What ranks that tell each other where they stand in their streams cost: time in a step, and load on the store."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import psutil
import torch.distributed as dist

from benchmarks.measure import Row, report, target
from lightning_stateful.core.steps import Topology
from lightning_stateful.stream_loader import rank_sync
from lightning_stateful.stream_loader.rank_store import RankStore, StateEncoder
from lightning_stateful.stream_loader.rank_sync import RankSync
from lightning_stateful.verify.launcher import free_port

CLAIM = (
    "Ranks tell each other where they stand in their streams, and whether all have a batch for the next step, through "
    "the run's TCPStore, in a small part of a step. (all_gather_object over gloo does the first of the two, is a "
    "collective, and makes all wait for the slowest; that wait is left out.) 1,024 ranks, in groups of 16 "
    "steps, ask little of the one process that serves the store: four processes send it what so many ranks would. "
    "When Lightning builds a checkpoint, every rank asks for the records of all: one gathers them, and the others take "
    "its copy; beside it, what it costs if each gathers them for itself. The four processes share two processors, so "
    "'all' is the work of all ranks on two; a rank of a real run has a processor of its own: the server's time and "
    "one rank's."
)
STEP = 0.05
STEPS = 200
SAVES = 10
SIMULATED = [64, 256, 1024]
SIMULATED_STEPS = 128
PROCESSES = 4
PATIENCE = timedelta(seconds=120)


def record(rank: int, step: int) -> list[dict[str, Any]]:
    """About 300 bytes: a shard, what of it was read, and where a shuffled block was begun."""
    draw = random.Random(rank * 2**20 + step)
    whole = {"shard": draw.randrange(10**5), "row": step * 37, "byte": draw.randrange(10**9), "block": step // 50}
    return [{**whole, "source": {"items": [draw.randrange(10**6) for _ in range(30)]}}]


def walk(rank: int, port: int, answers: Any) -> None:
    """One of two ranks: a run with steps of 50 ms, and beside each what a gathering over gloo costs."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sync = RankSync(store, Topology(num_replicas=2, rank=rank), label="bench")
    figures: dict[str, list[float]] = {"publish, happens": [], "records_at": [], "all_gather_object": []}
    records, published = [record(rank, step) for step in range(STEPS + 2)], 0

    def timed(name: str, task: Callable[[], object]) -> None:
        began = time.perf_counter()
        task()
        figures[name].append(time.perf_counter() - began)

    def ask(step: int) -> None:
        nonlocal published
        while published < sync.horizon(step):
            sync.publish(records[published])
            published += 1
        assert sync.happens(step)

    for step in range(STEPS):
        time.sleep(STEP)
        timed("publish, happens", lambda step=step: ask(step))
        if not rank and step % SAVES == 0:
            timed("records_at", lambda step=step: sync.records_at(step + 1))
        gathered: list[Any] = [None, None]
        dist.barrier()  # So that the wait for a slower rank is not counted.
        timed("all_gather_object", lambda step=step, into=gathered: dist.all_gather_object(into, records[step]))
    answers.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def in_steps() -> list[Row]:
    spawn = multiprocessing.get_context("spawn")
    answers, port = spawn.Queue(), free_port()
    ranks = [spawn.Process(target=walk, args=(rank, port, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = [answers.get() for _ in ranks]
    for process in ranks:
        process.join()
    rows: list[Row] = []
    for name in found[0]:
        # The first steps open connections.
        times = sorted(figure for figures in found for figure in figures[name][2:])
        rows.append(
            {
                "call": name,
                "median us": statistics.median(times) * 1e6,
                "mean us": statistics.mean(times) * 1e6,
                "99 % us": times[int(len(times) * 0.99)] * 1e6,
                "median, % of a step": statistics.median(times) / STEP * 100,
            }
        )
    return rows


class CountingStore:
    """A store that counts what is asked of it: requests, and bytes of keys and values in both directions."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)  # The connection is this process's own.
        function = getattr(self._store, name)

        def ask(*arguments: Any) -> Any:
            found = function(*arguments)
            # multi_get waits for the keys before it asks for them.
            requests = {"has_extended_api": 0, "multi_get": 2}.get(name, 1)
            keys = len(arguments[0]) if arguments and isinstance(arguments[0], list) else 1
            asked = size((arguments, found)) if requests else 0
            self.counts.update(requests=requests, keys=requests * keys, bytes=asked)
            return found

        return ask


def size(values: Any) -> int:
    """Bytes of texts, bytes and numbers, however nested."""
    if isinstance(values, (list, tuple)):
        return sum(map(size, values))
    return len(values) if isinstance(values, (str, bytes)) else 8


def serve(port: int, done: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, True, PATIENCE, wait_for_workers=False)
    done.wait()
    del store


def play(number: int, num_ranks: int, port: int, server: int, barrier: Any, answers: Any) -> None:
    """A process that sends what its part of the ranks would, and a look at the server's clock between the parts."""
    store = CountingStore(dist.TCPStore("127.0.0.1", port, None, False, PATIENCE))
    answer: dict[str, Any] = {}

    def part(name: str, task: Callable[[], object]) -> None:
        barrier.wait()
        store.counts.clear()
        before, began = sum(psutil.Process(server).cpu_times()[:2]), time.perf_counter()
        barrier.wait()
        task()
        took = time.perf_counter() - began
        barrier.wait()
        cpu = sum(psutil.Process(server).cpu_times()[:2]) - before
        answer[name] = {**store.counts, "seconds": took, "server": cpu}
        barrier.wait()

    ranks = range(number, num_ranks, PROCESSES)
    syncs = [
        RankSync(store, Topology(num_replicas=num_ranks, rank=rank), label="bench")  # type: ignore[arg-type]
        for rank in ranks
    ]
    steps = SIMULATED_STEPS
    # Two processors would encode what so many ranks have.
    encode, num_records = StateEncoder().encode, syncs[0].horizon(steps)
    records = {rank: [[encode(record(rank, step)[0])] for step in range(num_records)] for rank in ranks}
    published = 0

    def walk_over() -> None:
        nonlocal published
        for step in range(steps):
            while published < syncs[0].horizon(step):
                for sync in syncs:
                    sync.publish(records[sync.topology.rank][published])
                published += 1
            # In training the step before lies between; here nobody should be seen to wait.
            barrier.wait()
            assert all(sync.happens(step) for sync in syncs)

    def gather() -> None:
        if not number:
            syncs[0].final_records(steps)
        barrier.wait()
        for sync in syncs[not number :]:
            sync.final_records(steps)

    longest_of_a_rank = 0.0

    def checkpoint() -> None:
        nonlocal longest_of_a_rank
        longest_of_a_rank = 0.0
        for sync in syncs:
            began = time.perf_counter()
            assert len(sync.records_at(steps)) == num_ranks
            longest_of_a_rank = max(longest_of_a_rank, time.perf_counter() - began)

    def begin() -> None:
        nonlocal published
        for sync in syncs:
            sync.publish(records[sync.topology.rank][0])
        published = 1

    # They would wait for each other when they meet, once for all runs.
    with mock.patch.multiple(RankStore, has_met=True, _meet=lambda self, timeout: "group"):
        part("begin", begin)
        part("steps", walk_over)
        with mock.patch.object(rank_sync, "_ALONE", num_ranks):
            part("each for itself", checkpoint)
            answer["each for itself"]["one"] = longest_of_a_rank
        with mock.patch.object(rank_sync, "_ALONE", 0):
            part("one for all", checkpoint)
            answer["one for all"]["one"] = longest_of_a_rank
        part("final_records", gather)
    answers.put(answer)


def simulated(num_ranks: int) -> tuple[Row, list[Row]]:
    spawn = multiprocessing.get_context("spawn")
    answers, barrier, done, port = spawn.Queue(), spawn.Barrier(PROCESSES), spawn.Event(), free_port()
    server = spawn.Process(target=serve, args=(port, done))
    server.start()
    players = [
        spawn.Process(target=play, args=(number, num_ranks, port, server.pid, barrier, answers))
        for number in range(PROCESSES)
    ]
    for process in players:
        process.start()
    found = [answers.get() for _ in players]
    done.set()
    for process in (*players, server):
        process.join()

    def total(part: str, figure: str) -> float:
        return float(sum(answer[part].get(figure, 0) for answer in found))

    def longest(part: str, figure: str) -> float:
        return float(max(answer[part][figure] for answer in found))

    checkpoints: list[Row] = [
        {
            "ranks": num_ranks,
            "gathered": how,
            "requests": total(how, "requests"),
            "keys": total(how, "keys"),
            "MB": total(how, "bytes") / 1e6,
            "server's s": longest(how, "server"),
            "slowest rank, s": longest(how, "one"),
            "all, s": longest(how, "seconds"),
        }
        for how in ("each for itself", "one for all")
    ]
    return {
        "ranks": num_ranks,
        "steps a group": max(num_ranks // 64, 1),
        "requests a step": total("steps", "requests") / SIMULATED_STEPS,
        "KB a step": total("steps", "bytes") / SIMULATED_STEPS / 1e3,
        "server's ms a step": longest("steps", "server") / SIMULATED_STEPS * 1e3,
        "all ms a step": longest("steps", "seconds") / SIMULATED_STEPS * 1e3,
        "MB for final_records": total("final_records", "bytes") / 1e6,
        "s for final_records": longest("final_records", "seconds"),
    }, checkpoints


def main() -> None:
    steps = in_steps()
    loads, pairs = zip(*(simulated(num_ranks) for num_ranks in SIMULATED), strict=True)
    after = pairs[-1][1]
    (own,) = (row for row in steps if row["call"] == "publish, happens")
    targets = [
        target("publish and happens, median % of a step of 50 ms", own["median, % of a step"], at_most=1),
        target(
            "server's share of a step of 50 ms with 1,024 ranks, %", loads[-1]["server's ms a step"] / 0.5, at_most=50
        ),
        target("requests of all for a checkpoint, 1,024 ranks", after["requests"], at_most=8000),
        target(
            "server's time and the slowest rank's for a checkpoint, 1,024 ranks, s",
            after["server's s"] + after["slowest rank, s"],
            at_most=1,
        ),
    ]
    tables = {
        f"Two processes, {STEPS} steps of {STEP * 1e3:.0f} ms, records of 300 bytes": steps,
        f"What {PROCESSES} processes ask of one TCPStore that play many ranks, {SIMULATED_STEPS} steps": list(loads),
        "A checkpoint, for which every rank asks for the records of all": [row for pair in pairs for row in pair],
    }
    report("stream_store", CLAIM, tables, targets)


if __name__ == "__main__":
    main()
