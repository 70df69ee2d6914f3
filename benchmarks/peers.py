"""The same work by this package and by others: start, resume, memory, throughput, padding and packing.

With ``--fast`` up to 1e6 samples, within five minutes, and into ``build/bench-fast``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import pickle
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import packing_streams
from benchmarks.buckets import draw
from benchmarks.measure import RESULTS, Row, in_child, report, short, with_memory
from benchmarks.peer_loaders import BATCH, BUCKETED, BUDGET, SHARD, SHUFFLED, Peer

LIMIT_S, PREPARING_S, LIMIT_BYTES = 20, 5, 2 * 10**9
SECONDS, BYTES = f"> {LIMIT_S} s", f"> {LIMIT_BYTES / 1e9:g} GB"
TEXT_SAMPLES, SEQUENCE = 1_164_464, 2_048
KINDS = {"shuffled": SHUFFLED, "like lengths": BUCKETED}
FAST = Path(__file__).parents[1] / "build" / "bench-fast"
Size = tuple[int, int]  # samples, ranks
CLAIM = (
    "What rank 0 pays from nothing to the first batch of an epoch, or from a state in the middle of an epoch to the "
    "next batch: CPU seconds, the best of up to three, and MB by which the memory of the process rises at most. Each "
    "figure is of a process of its own, in which other batches were made before. Every rank does the same work; of "
    f"Streaming, one process of a node of 8 ranks does it for all. Above {LIMIT_S} s or {LIMIT_BYTES / 1e9:g} GB of "
    f"address space a row ends. Shuffled: batches of {BATCH} numbers, without workers. litdata and Streaming shuffle "
    f"chunks or shards of {SHARD:,} samples, and samples within blocks; the others any sample of an epoch. Of litdata "
    f"and Streaming the computation of indices is measured alone. Like lengths: {BUDGET:,} tokens a batch, padding "
    "included, of samples with lengths of real text, which are in memory before. lhotse reads cuts one by one through "
    "a buffer of its default size into 30 buckets; infinibatch holds a list of all samples and reads 10,000 ahead."
)


# One case, in a forked process


def data_of(kind: str, samples: int) -> Any:
    """Numbers, or lengths of text, from the beginning again where there are not so many."""
    if kind == "shuffled":
        return range(samples)
    return np.resize(draw(min(samples, TEXT_SAMPLES)), samples)


def guarded(task: Callable[[], Callable[[], Any]], answer: Connection) -> None:
    """Send what the function that ``task`` prepares returns, or that it takes too much memory."""
    run = task()
    most = psutil.Process().memory_info().vms + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        found = run()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        found = BYTES
    # As bytes: multiprocessing would share a tensor with a process that is about to end.
    answer.send_bytes(pickle.dumps(found))


def in_fork(task: Callable[[], Callable[[], Any]]) -> Any:
    """What the function that ``task`` prepares returns in a forked process, or the limit that it exceeds."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=guarded, args=(task, send))
    process.start()
    send.close()
    # A limit set by the system, RLIMIT_CPU, makes the clock of CPU time coarse.
    while not receive.poll(0.2):
        if sum(psutil.Process(process.pid).cpu_times()[:2]) > LIMIT_S + PREPARING_S:
            process.kill()
            process.join()
            return SECONDS
    try:
        return pickle.loads(receive.recv_bytes())
    except EOFError:
        raise RuntimeError("A measured process ended without an answer; see above.") from None
    finally:
        process.join()


def prepare(kind: str, peer: Peer, samples: int, ranks: int, state: Any) -> Callable[[], Row]:
    """What is measured; its data are made and its code is loaded."""
    data, small = data_of(kind, samples), data_of(kind, 4 * BATCH * ranks)
    next(peer.batches(small, ranks, None))

    def first() -> object:
        batches = peer.batches(data, ranks, state)
        return next(batches), batches

    return lambda: with_memory(first, time.process_time)


def case(kind: str, peer: Peer, samples: int, ranks: int, middle: bool, rounds: int) -> Row | str:
    """Seconds and MB, or the limit that is exceeded."""
    state = None
    if middle:
        # Planning for the state must not be found done.
        state = in_fork(lambda: partial(peer.middle, data_of(kind, samples), ranks))
        if state in (SECONDS, BYTES):
            return str(state)
    best: Row = {}
    for _ in range(rounds):
        found = in_fork(partial(prepare, kind, peer, samples, ranks, state))
        if isinstance(found, str) or found["seconds"] > LIMIT_S:
            return found if isinstance(found, str) else SECONDS
        best = {key: min(found[key], best.get(key, found[key])) for key in found}
        if found["seconds"] > 2:
            break
    return best


def sweep(kind: str, peer: Peer, sizes: Sequence[Size], rounds: int) -> dict[bool, list[Row | str]]:
    """A way to make batches at each size, from the start and from the middle, up to a limit."""
    found: dict[bool, list[Row | str]] = {}
    for middle in (False, True):
        rows: list[Row | str] = []
        for samples, ranks in sizes:
            ended = bool(rows) and isinstance(rows[-1], str)
            rows.append("-" if ended else case(kind, peer, samples, ranks, middle, rounds))
        found[middle] = rows
    return found


def padding(batches: Iterable[Any]) -> float:
    """Percent of padding in batches of lengths."""
    sizes = [(sum(map(int, batch)), len(batch) * int(max(batch))) for batch in batches]
    return 100 * (1 - sum(size for size, _ in sizes) / sum(padded for _, padded in sizes))


def epoch(kind: str, name: str, samples: int, rounds: int) -> Row:
    """Samples a second over most of an epoch, and the share of padding in a whole one, if its data are lengths."""
    peer, data = KINDS[kind][name], data_of(kind, samples)
    took, count = [], 0
    for _ in range(rounds):
        began, count = time.process_time(), 0
        for batch in peer.batches(data, 1, None):
            count += len(batch)
            # With its last sample infinibatch shuffles the next epoch too.
            if count >= 0.9 * samples:
                break
        took.append(time.process_time() - began)
    row: Row = {"batches": name, "samples": count, "M samples/s, best": count / min(took) / 1e6}
    if kind == "like lengths":
        batches = peer.batches(data, 1, None)
        row["padding, %"] = padding(batches if peer.by_length else (data[batch] for batch in batches))
    return row


def measured(kind: str, name: str, plan: Mapping[str, Sequence[Size]], samples: int, rounds: int) -> Row:
    """All figures of a way to make batches; for a child process."""
    warnings.simplefilter("ignore")
    peer = KINDS[kind][name]
    next(peer.batches(data_of(kind, 4 * BATCH), 1, None))  # what it imports
    found: Row = {along: sweep(kind, peer, sizes, rounds) for along, sizes in plan.items()}
    return {**found, "epoch": epoch(kind, name, samples, rounds) if peer.loads else None}


def packings() -> list[Row]:
    """Whole documents in sequences: time and padding, beside grain; for a child process."""
    lists = packing_streams.texts("WikiText")
    arrays = [np.array(document[:SEQUENCE], dtype=np.int64) for document in lists]
    ways: dict[str, Any] = {"grain": packing_streams.grains, "DocumentPacker": packing_streams.packed}
    rows = []
    padded = {row["packed by"]: row for row in packing_streams.padding("WikiText", lists) if row["length"] == SEQUENCE}
    for name, make in ways.items():
        if (found := padded.get("node" if name == "DocumentPacker" else name)) is not None:
            us = min(packing_streams.microseconds(partial(make, arrays, SEQUENCE, "whole")) for _ in range(3))
            rows.append({"packed by": name, "us a sequence, best": us, "padding, %": found["padding, %"]})
    return rows


# Tables


def installed(kind: str) -> dict[str, Peer]:
    """Those that can be measured here; a line says which cannot."""
    found = {}
    for name, peer in KINDS[kind].items():
        if peer.missing:
            print(f"{peer.package} is not installed: {name} is left out.", flush=True)
        else:
            found[name] = peer
    return found


def tables_of(kind: str, plan: Mapping[str, Sequence[Size]], samples: int, rounds: int) -> dict[str, list[Row]]:
    """All tables of one kind of batches."""
    found: dict[str, Row] = {}
    for name in installed(kind):
        print(f"{kind}: {name}", flush=True)
        found[name] = in_child(measured, kind, name, plan, samples, rounds)
    tables: dict[str, list[Row]] = {}
    for along, sizes in plan.items():
        heads = [short(size) if along == "samples" else f"{ranks:,}" for size, ranks in sizes]
        beside = f"{sizes[0][1]} rank" if along == "samples" else f"{short(sizes[0][0])} samples"
        for middle, (unit, key) in itertools.product((False, True), (("CPU seconds", "seconds"), ("MB", "MB"))):
            title = f"{kind}, {'resume in the middle' if middle else 'start'}: {unit}, by {along}, {beside}"
            tables[title] = [
                {"batches": name}
                | {
                    head: cell if isinstance(cell, str) else cell[key]
                    for head, cell in zip(heads, of[along][middle], strict=True)
                }
                for name, of in found.items()
            ]
    title = f"{kind}, an epoch of {short(samples)} samples, 1 rank"
    return {**tables, title: [of["epoch"] for of in found.values() if of["epoch"]]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="up to 1e6 samples, into build/bench-fast")
    fast = parser.parse_args(arguments).fast
    largest, rounds, ranks = (6, 1, (1, 32, 1_024)) if fast else (9, 3, (1, 4, 16, 64, 256, 1_024))
    tables: dict[str, list[Row]] = {}
    for kind in KINDS:
        fixed = 10 ** min(7 if kind == "shuffled" else 6, largest)
        plan = {
            "samples": [(10**power, 1) for power in range(4, largest + 1)],
            "ranks": [(fixed, num_ranks) for num_ranks in ranks],
        }
        tables |= tables_of(kind, plan, 10**5 if fast else 10**6, rounds)
    tables[f"whole documents in sequences of {SEQUENCE:,}"] = in_child(packings)
    found = {peer for kind in KINDS for peer in installed(kind).values()}
    versions = ", ".join(sorted({f"{peer.package} {peer.version}" for peer in found}))
    report("peers", f"{CLAIM} Versions: {versions}.", tables, folder=FAST if fast else RESULTS)


if __name__ == "__main__":
    main()
