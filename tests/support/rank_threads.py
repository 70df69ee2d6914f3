"""Ranks of a stream as threads, which may take turns at the store in an order that a seed decides."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.distributed import HashStore

from lightning_stateful.core.steps import Topology
from lightning_stateful.stream_loader.rank_sync import RankSync

OPERATIONS = ("set", "add", "check", "compare_set", "delete_key", "multi_get")


class Gone(BaseException):
    """The death of a rank's process."""


class TurnsStore:
    """A HashStore at which ranks take turns, one request at a time, in an order that a seed decides.

    Once every rank that lives is about to ask something, one of them goes on; those of larger weight more often.
    """

    def __init__(
        self, num_ranks: int, seed: int = 0, weights: list[int] | None = None, inner: HashStore | None = None
    ) -> None:
        self.inner = inner or HashStore()
        self.random = random.Random(seed)
        self.weights = weights or [1] * num_ranks
        self.lock = threading.Lock()
        self.ranks: dict[int, int] = {}
        self.alive: set[int] = set()
        self.waiting: set[int] = set()
        self.turns: list[threading.Semaphore] = []
        self.dies: dict[int, int] = {}
        self.requests: Counter[int] = Counter()

    def run(self, *bodies: Callable[[int], Any]) -> list[Any]:
        """Run a function on each rank; returns what it returned or raised."""
        self.turns = [threading.Semaphore(0) for _ in bodies]
        self.alive, self.waiting = set(range(len(bodies))), set()
        self.ranks.clear()
        self.requests.clear()

        def take_turns(rank: int) -> Any:
            self.ranks[threading.get_ident()] = rank
            try:
                return bodies[rank](rank)
            finally:
                self.ranks.pop(threading.get_ident())
                self.leave(rank)

        def sleep(seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
            # Where turns are taken, they are the time.
            if threading.get_ident() not in self.ranks:
                pause(seconds)

        with mock.patch.object(time, "sleep", sleep):
            return in_threads(*[take_turns] * len(bodies))

    def leave(self, rank: int) -> None:
        """Have the others go on without a rank."""
        with self.lock:
            self.alive.discard(rank)
            self._pass_on()

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> TurnsStore:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(name)
        return lambda *arguments: self._ask(name, arguments)

    def _pass_on(self) -> None:
        if self.alive and self.waiting == self.alive:
            ranks = sorted(self.alive)
            (rank,) = self.random.choices(ranks, [self.weights[rank] for rank in ranks])
            self.waiting.discard(rank)
            self.turns[rank].release()

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        rank = self.ranks.get(threading.get_ident())
        if rank is not None:
            with self.lock:
                self.waiting.add(rank)
                self._pass_on()
            self.turns[rank].acquire()
            self.requests[rank] += 1
            if self.requests.total() > 100_000:
                raise AssertionError("the ranks hang")
            if self.dies.get(rank) == self.requests[rank]:
                raise Gone
        return getattr(self.inner, name)(*arguments)


class CountedStore:
    """A store of torch's that counts what it is asked, and for how many keys."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.requests, self.keys = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        self.requests += name in OPERATIONS
        function = getattr(self.inner, name)

        def ask(*arguments: Any) -> Any:
            self.keys += len(arguments[0]) if name in OPERATIONS and isinstance(arguments[0], list) else 1
            return function(*arguments)

        return ask


def in_threads(*bodies: Callable[[int], Any]) -> list[Any]:
    """Run a function on each rank; returns what it returned or raised."""
    answers: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            answers[rank] = bodies[rank](rank)
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return answers


Say = Callable[[int, int], list[Any]]


def small(rank: int, step: int) -> list[Any]:
    return [{"rank": rank, "step": step}]


def with_large(changes: int, others: int = 10**9) -> Say:
    """Records of two worker slots with large states: one changes after so many steps, the other after others."""

    def say(rank: int, step: int) -> list[Any]:
        first, second = f"{rank} {step // changes}" * 500, {"of": [rank, step // others] * 400}
        return [{"at": step, "source": {"state": first}}, {"state": second}]

    return say


def open_sync(store: Any, num_replicas: int, rank: int, **options: Any) -> RankSync:
    options = {"label": "train", "timeout": 20.0, **options}
    return RankSync(store, Topology(num_replicas=num_replicas, rank=rank), **options)


def end(rank: int, step: int) -> list[Any]:
    return [{"rank": rank, "end": step}]


def walk(
    sync: RankSync,
    length: int,
    *,
    each: Callable[[int], None] = lambda step: None,
    last: int | None = None,
    say: Say = small,
) -> int:
    """Read a stream of ``length`` batches as a loader would; returns the step before which all stop."""
    rank, step, published, has_ended = sync.topology.rank, 0, 0, False
    while last is None or step < last:
        while published < sync.horizon(step) and not has_ended:
            if published >= length:
                sync.publish(end(rank, published), is_end=True)
                has_ended = True
            else:
                published += 1
                sync.publish(say(rank, published))
        if not sync.happens(step):
            break
        each(step)
        step += 1
    return step


def check_run(
    lengths: list[int],
    *,
    group_size: int | None = None,
    keep: int = 5,
    weights: list[int] | None = None,
    seed: int = 0,
    store: TurnsStore | None = None,
    say: Say = small,
) -> TurnsStore:
    """One run: all stop where they should, and rank 0 has all records of every step it is handed."""
    ranks = len(lengths)
    store = store or TurnsStore(ranks, seed, weights)

    def body(rank: int) -> tuple[int, int | None, list[Any]]:
        sync = open_sync(store, ranks, rank, group_size=group_size, keep=keep)

        def each(step: int) -> None:
            for kept in range(max(step + 2 - keep, 1), step + 2) if rank == 0 else ():
                assert sync.records_at(kept) == [say(other, kept) for other in range(ranks)]

        stop = walk(sync, lengths[rank], each=each, say=say)
        return stop, sync.stop, sync.final_records(stop)

    stop = min(lengths)
    others = (lambda rank: say(rank, stop)) if stop else (lambda rank: None)
    final = [end(rank, stop) if length == stop else others(rank) for rank, length in enumerate(lengths)]
    assert store.run(*[body] * ranks) == [(stop, stop, final)] * ranks
    return store
