"""Ranks that fail, are late, die, and are started anew."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.rank_threads import Say, TurnsStore, check_run, in_threads, open_sync, small, walk, with_large
from support.ranks import kill, start
from torch.distributed import HashStore, PrefixStore, TCPStore

from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import ConfigurationError, StreamError
from lightning_stateful.stream_loader.rank_store import RankStore

PATIENCE = timedelta(seconds=30)


class TestFailures:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("group_size", [1, 3])
    def test_all_ranks_break_off_at_the_same_step(self, group_size: int, seed: int) -> None:
        store = TurnsStore(3, seed, [1 + 30 * (seed % 3 == rank) for rank in range(3)])
        broken = 7 + seed % 4
        # Records of a group that is not full are given up.
        last = broken - broken % group_size

        def body(rank: int) -> tuple[list[int], str]:
            sync, steps = open_sync(store, 3, rank, group_size=group_size), []
            published = 0
            while True:
                while published < sync.horizon(len(steps)) and (rank != 2 or published < broken):
                    published += 1
                    sync.publish(small(rank, published))
                if rank == 2 and published == broken:
                    sync.publish_failure("no such file")
                try:
                    sync.happens(len(steps))
                except StreamError as error:
                    return steps, str(error)
                steps.append(len(steps))

        text = f"The stream of rank 2 broke off before step {last}: no such file"
        assert store.run(body, body, body) == [(list(range(last)), text)] * 3

    @pytest.mark.parametrize("seed", range(2))
    def test_before_the_first_batch_wake_all(self, seed: int) -> None:
        store = TurnsStore(2, seed)

        def broken(rank: int) -> None:
            sync = open_sync(store, 2, rank)
            sync.publish_failure("no shard")
            sync.publish_failure("again")

        # The second time, they have met before.
        for _ in range(2):
            error = store.run(lambda rank: walk(open_sync(store, 2, rank), 5), broken)[0]
            assert isinstance(error, StreamError)
            assert "rank 1 broke off before step 0: no shard" in str(error)

    @pytest.mark.parametrize("seed", range(3))
    def test_of_several_the_first_step_counts(self, seed: int) -> None:
        store = TurnsStore(3, seed)

        def breaks(rank: int, after: int) -> None:
            sync = open_sync(store, 3, rank)
            walk(sync, 40, last=after - 1)
            sync.publish_failure("no such file")
            for step in range(after - 1, 40):
                sync.happens(step)

        bodies = [lambda rank, after=after: breaks(rank, after) for after in (10, 9)]
        for error in store.run(lambda rank: walk(open_sync(store, 3, rank), 40), *bodies):
            assert isinstance(error, StreamError)
            assert "rank 2 broke off before step 9: no such file" in str(error)

    @pytest.mark.parametrize(("group_size", "broken", "last"), [(1, 3, 3), (4, 6, 4)])
    def test_of_one_process_break_off_all_that_share_its_ranks(self, group_size: int, broken: int, last: int) -> None:
        """Four processes are two ranks, and meet in every step of the model."""
        store, model = HashStore(), threading.Barrier(4, timeout=5)

        def body(process: int) -> tuple[int, list[int], str]:
            world, rank = Topology(num_replicas=4, rank=process), process // 2
            sync, steps, published = open_sync(store, 2, rank, world=world, group_size=group_size), [], 0
            while True:
                while published < sync.horizon(len(steps)) and (process != 2 or published < broken):
                    published += 1
                    sync.publish(small(rank, published))
                if published < sync.horizon(len(steps)):
                    # The others have published by then.
                    time.sleep(0.1)
                    sync.publish_failure("no such file")
                try:
                    sync.happens(len(steps))
                except StreamError as error:
                    return int(sync.run.rpartition("/")[2]), steps, str(error)
                steps.append(len(steps))
                model.wait()

        found = in_threads(body, body, body, body)
        text = f"The stream of rank 1 broke off before step {last}: no such file"
        assert found == [(column, list(range(last)), text) for column in (0, 1, 0, 1)]

    def test_processes_that_are_not_the_same_number_for_each_rank_are_refused(self) -> None:
        store, ranks = HashStore(), (0, 0, 0, 1)

        def body(process: int) -> None:
            walk(open_sync(store, 2, ranks[process], world=Topology(num_replicas=4, rank=process)), 3)

        for error in in_threads(body, body, body, body):
            assert isinstance(error, ConfigurationError)
            assert "4 processes were to be 2 data-parallel ranks with the same number" in str(error)

    def test_a_store_that_is_gone_is_said_to_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sync = open_sync(store := TurnsStore(1), 1, 0)
        sync.publish([], is_end=True)
        monkeypatch.setattr(type(store), "_ask", lambda *arguments: (_ for _ in ()).throw(RuntimeError("Broken pipe")))
        with pytest.raises(StreamError, match=r"does not answer(.|\n)*os\._exit(.|\n)*Broken pipe"):
            sync.happens(0)
        sync.publish_failure("the disk")

    def test_a_worker_that_dies_while_a_rank_asks_the_store_is_no_store_that_is_gone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        died = "DataLoader worker (pid 1) is killed by signal: Killed. "
        ranks = RankStore(store := TurnsStore(1), Topology(num_replicas=1, rank=0))
        run = ranks.begin_run("data", 1.0)
        ranks.put(f"{run}/first", "text")
        monkeypatch.setattr(type(store), "_ask", lambda *arguments: (_ for _ in ()).throw(RuntimeError(died)))
        with pytest.raises(RuntimeError, match=r"^DataLoader worker"):
            ranks.delete_runs("data", but=0)

    def test_of_a_store_that_is_gone_nothing_is_deleted_and_nothing_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = RankStore(store := TurnsStore(1), Topology(num_replicas=1, rank=0))
        run = ranks.begin_run("data", 1.0)
        ranks.put(f"{run}/first", "text")
        monkeypatch.setattr(type(store), "_ask", lambda *arguments: (_ for _ in ()).throw(RuntimeError("Broken pipe")))
        ranks.delete_runs("data", but=0)


class TestTimeouts:
    @pytest.mark.parametrize("say", [small, with_large(3)])
    def test_who_is_late_is_named_with_its_last_record_on_all_ranks(self, say: Say) -> None:
        store = TurnsStore(3)

        def body(rank: int) -> None:
            sync = open_sync(store, 3, rank, timeout=0.3, describe=lambda rank, record: json.dumps(record))
            walk(sync, 20, last=5 if rank == 2 else None, say=say)

        errors = store.run(body, body, body)
        assert errors[2] is None
        for error in errors[:2]:
            assert isinstance(error, StreamError)
            assert "Step 6 was waited for in vain for 0.3 s: 1 of 3 ranks have not published" in str(error)
            assert f"- rank 2: {json.dumps(say(2, 6))}\n"[:3000] in str(error)

    def test_the_late_rank_itself_breaks_off_at_the_step_it_was_waited_for(self) -> None:
        store, gave_up = HashStore(), threading.Event()
        steps: list[int] = []

        def body(rank: int) -> None:
            try:
                sync = open_sync(store, 2, rank, timeout=0.3)
                each = lambda step: (steps.append(step), step == 4 and gave_up.wait(30)) if rank else None  # noqa: E731
                walk(sync, 20, each=each)
            finally:
                gave_up.set()

        for error in in_threads(body, body):
            assert isinstance(error, StreamError)
            assert "Step 6 was waited for in vain" in str(error)
        assert steps == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("late", range(3))
    def test_a_rank_that_stands_still_in_its_first_read_is_named_on_all_ranks(self, late: int) -> None:
        store, given_up = HashStore(), threading.Semaphore(0)

        def body(rank: int) -> None:
            sync = open_sync(store, 3, rank, timeout=0.2)
            for _ in range(2 * (rank == late)):
                given_up.acquire()
            try:
                walk(sync, 5)
            finally:
                given_up.release()

        errors = [str(error) for error in in_threads(body, body, body)]
        others = [rank for rank in range(3) if rank != late]
        assert all(f"ranks [{late}] of 3 have not come" in errors[rank] for rank in others)
        assert f"Rank {late} has come too late: ranks {others} had waited for it" in errors[late]

    @pytest.mark.parametrize("num_requests", range(1, 25))
    def test_nobody_waits_for_ever_for_a_rank_that_dies_at_any_request(self, num_requests: int) -> None:
        """Between its records and the counter, too."""
        store = TurnsStore(2)
        store.dies = {1: num_requests}
        error = store.run(*[lambda rank: walk(open_sync(store, 2, rank, timeout=0.05), 30)] * 2)[0]
        assert isinstance(error, StreamError)
        assert "ranks [1] of 2 have not come" in str(error) or "- rank 1: " in str(error)

    def test_ctrl_c_ends_a_wait(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sync = open_sync(HashStore(), 2, 0, timeout=20)
        sync.publish([], is_end=True)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            sync.happens(0)


class TestRestarts:
    @pytest.mark.parametrize("seed", range(10))
    def test_processes_started_anew_on_the_same_store_never_meet_their_predecessors(self, seed: int) -> None:
        """Each rank dies at a request of its own, as they meet or later; then all are started anew."""
        inner, chance = HashStore(), random.Random(seed)
        for life in range(3):
            store = TurnsStore(3, seed + life, inner=inner)
            store.dies = {rank: chance.randrange(1, 40) for rank in range(3)}
            store.run(*[lambda rank, store=store: walk(open_sync(store, 3, rank, timeout=0.05), 30)] * 3)
        store = TurnsStore(3, seed, inner=inner)
        for _ in range(2):
            check_run([9, 8, 10], store=store)

    def test_a_rank_that_is_started_anew_alone_is_refused_and_the_others_time_out(self) -> None:
        store = TurnsStore(2)
        successor = PrefixStore("", store.inner)

        def is_restarted(rank: int) -> None:
            walk(open_sync(store, 2, rank), 30, last=7)
            store.leave(rank)
            walk(open_sync(successor, 2, rank, timeout=0.4), 30)

        first, second = store.run(lambda rank: walk(open_sync(store, 2, rank, timeout=0.4), 30), is_restarted)
        assert isinstance(first, StreamError)
        assert "1 of 2 ranks have not published" in str(first)
        assert isinstance(second, StreamError)
        assert "ranks [0] of 2 have not come" in str(second)
        assert "started anew" in str(second)

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_another_number_of_ranks_on_the_same_store(self, ranks: int) -> None:
        inner = check_run([5, 5, 5]).inner
        check_run([6, 7, 8, 9][:ranks], store=TurnsStore(ranks, inner=inner))

    def test_labels_keep_runs_apart(self) -> None:
        store = HashStore()

        def body(rank: int) -> list[list[Any]]:
            syncs = {label: open_sync(store, 2, rank, label=label) for label in ("train", "val")}
            # In another order on each rank.
            for label in sorted(syncs, reverse=rank == 1):
                for step in range(2):
                    syncs[label].publish([label, step, rank])
            assert all(sync.happens(0) for sync in syncs.values())
            return [sync.records_at(1) for sync in syncs.values()]

        expected = [[[label, 0, rank] for rank in range(2)] for label in ("train", "val")]
        assert in_threads(body, body) == [expected] * 2


@contextmanager
def started(log: Path, role: str, port: int) -> Iterator[Any]:
    """A rank in a process of its own, which does not outlive the test."""
    process = start(read_to_step_3, role, port, log=log)
    try:
        yield process
    finally:
        kill([process])


def said(log: Path, number: int) -> str:
    """A line that the other rank has printed, once it has."""
    deadline = time.monotonic() + 60
    while log.read_text().count("\n") <= number if log.exists() else True:
        assert time.monotonic() < deadline, "the other rank says nothing"
        time.sleep(0.01)
    return log.read_text().splitlines()[number]


class TestProcesses:
    """The other rank is a process that is killed at step 3."""

    def test_a_rank_that_is_killed_is_named(self, tmp_path: Path) -> None:
        server = TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
        with started(tmp_path / "log", "client", server.port) as other:

            def each(step: int) -> None:
                if step == 3:
                    assert said(tmp_path / "log", 0) == "step 3"
                    kill([other])
                    sync.timeout = 0.5

            sync = open_sync(server, 2, 0, timeout=60.0)
            with pytest.raises(StreamError, match=r"1 of 2 ranks have not published(.|\n)*rank 1: stood at"):
                walk(sync, 10**6, each=each)

    def test_a_server_that_is_killed_is_missed_at_once(self, tmp_path: Path) -> None:
        with started(tmp_path / "log", "server", 0) as other:
            store = TCPStore("127.0.0.1", int(said(tmp_path / "log", 0)), None, False, PATIENCE)

            def each(step: int) -> None:
                if step == 3:
                    assert said(tmp_path / "log", 1) == "step 3"
                    kill([other])

            with pytest.raises(StreamError, match="does not answer"):
                walk(open_sync(store, 2, 1, timeout=1000.0), 10**6, each=each)


def read_to_step_3(role: str, port: int) -> None:
    """Rank 0 with the server, or rank 1: goes to step 3, says so, and is killed."""
    store = TCPStore("127.0.0.1", port, None, role == "server", PATIENCE, wait_for_workers=False)
    if role == "server":
        print(store.port, flush=True)

    def each(step: int) -> None:
        if step == 3:
            print("step 3", flush=True)
            time.sleep(100)

    walk(open_sync(store, 2, int(role == "client"), timeout=60.0), 10**6, each=each)
