"""Ranks are threads that take turns at the store in random order, so that a seed is an interleaving."""

from __future__ import annotations

import base64
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rank_threads import (
    CountedStore,
    Gone,
    Say,
    TurnsStore,
    check_run,
    end,
    in_threads,
    open_sync,
    small,
    walk,
    with_large,
)
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import ConfigurationError, PositionError, RankMismatchError, StreamError
from lightning_stateful.stream_loader import rank_sync
from lightning_stateful.stream_loader.rank_sync import RankSync

PATIENCE = timedelta(seconds=30)


class TestEveryInterleaving:
    @given(st.data())
    def test_all_ranks_stop_before_the_same_step_and_rank_0_has_every_record(self, data: st.DataObject) -> None:
        ranks = data.draw(st.sampled_from([1, 2, 3]))
        store = None
        changes = st.sampled_from([1, 2, 5, 100])
        for _ in range(2):
            store = check_run(
                data.draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks)),
                group_size=data.draw(st.sampled_from([None, 2, 3])),
                keep=data.draw(st.sampled_from([1, 2, 5])),
                weights=data.draw(st.lists(st.sampled_from([1, 5, 20]), min_size=ranks, max_size=ranks)),
                seed=data.draw(st.integers(0, 2**32)),
                say=data.draw(st.sampled_from([small, with_large(data.draw(changes), data.draw(changes))])),
                store=store,
            )

    def test_neither_more_steps_nor_more_runs_leave_more_keys(self) -> None:
        keys = []
        for length in (20, 60):
            store = TurnsStore(2, seed=5, weights=[1, 9])
            for _ in range(2):
                check_run([length, length], store=store, keep=4, say=with_large(1))
                keys.append(store.inner.num_keys())
        assert keys[1] == keys[3] < 80


class TestProcessesThatShareRanks:
    @given(st.integers(0, 2**32), st.permutations([0, 0, 1, 1]))
    def test_are_in_step_column_by_column_and_read_their_own(self, seed: int, ranks: list[int]) -> None:
        draw = random.Random(seed)
        store = TurnsStore(4, seed, [draw.choice([1, 5, 20]) for _ in range(4)])

        def body(process: int) -> tuple[int, list[Any], list[Any]]:
            rank = ranks[process]
            sync = open_sync(store, 2, rank, world=Topology(num_replicas=4, rank=process), keep=5)
            seen: list[Any] = []
            stop = walk(sync, 9 + 2 * rank, each=lambda step: seen.append(sync.records_at(step + 1)))
            return stop, seen, sync.final_records(stop)

        expected = [[small(rank, step) for rank in range(2)] for step in range(1, 10)]
        for _ in range(2):
            assert store.run(*[body] * 4) == [(9, expected, [end(0, 9), small(1, 9)])] * 4

    def test_begin_at_the_same_place_or_not_at_all(self) -> None:
        store = HashStore()

        def body(process: int) -> None:
            world, terms = Topology(num_replicas=4, rank=process), {"progress": f"step {process % 2}"}
            walk(open_sync(store, 2, process // 2, world=world, terms=terms), 9)

        for error in in_threads(*[body] * 4):
            assert isinstance(error, RankMismatchError)
            assert "progress is 'step" in str(error)


class TestAsking:
    def test_before_publishing_is_refused_rather_than_waited_for(self) -> None:
        sync = open_sync(HashStore(), 1, 0)
        with pytest.raises(ConfigurationError, match=r"has to publish its records below step 1.*those below step 0"):
            sync.happens(0)
        sync.publish([])
        assert sync.happens(0)
        with pytest.raises(ConfigurationError, match=r"has to publish its records below step 3.*those below step 1"):
            sync.happens(1)
        for step in (-1, 2):
            with pytest.raises(ConfigurationError, match=f"each step in turn, before it asks about step {step};"):
                sync.happens(step)


class TestManyRanks:
    @pytest.mark.parametrize(("ranks", "group_size"), [(2, 1), (127, 1), (128, 2), (1024, 16)])
    def test_groups_grow_with_the_number_of_ranks(self, ranks: int, group_size: int) -> None:
        sync = open_sync(HashStore(), ranks, 0)
        horizons = [sync.horizon(step) for step in range(40)]
        assert all(horizon % group_size == 0 for horizon in horizons)
        # The first batch is read alone.
        assert horizons[0] == group_size
        assert all(2 <= horizon - step <= group_size + 1 for step, horizon in enumerate(horizons) if step)

    @pytest.mark.parametrize("group_size", [1, 4])
    @pytest.mark.parametrize("say", [small, with_large(10**9)])
    def test_a_group_costs_each_rank_one_message_one_addition_and_at_most_one_look(
        self, group_size: int, say: Say
    ) -> None:
        requests = []
        for length in (80, 160):
            stores = [CountedStore(inner) for inner in [HashStore()] * 3]
            # They meet.
            assert in_threads(*[lambda rank, of=stores: walk(open_sync(of[rank], 3, rank), 3)] * 3) == [3] * 3
            for store in stores:
                store.requests = 0
            syncs = [open_sync(store, 3, rank, group_size=group_size) for rank, store in enumerate(stores)]
            published = 0
            for step in range(length):
                while published < syncs[0].horizon(step):
                    published += 1
                    for sync in syncs:
                        sync.publish(say(sync.topology.rank, published))
                assert all(sync.happens(step) for sync in syncs)
            requests.append([store.requests for store in stores])
        groups = 80 // group_size
        # Who is counted last knows already.
        assert [more - less for less, more in zip(*requests, strict=True)] == [3 * groups, 3 * groups, 2 * groups]


class TestCheckpointsOfManyRanks:
    """Every rank asks for the records of all, as Lightning does when it builds a checkpoint."""

    RANKS = 40

    def walked(self, length: int = 6, say: Say = small) -> tuple[list[CountedStore], list[RankSync]]:
        """Ranks that have met, and walked over as many steps."""
        stores = [CountedStore(inner) for inner in [HashStore()] * self.RANKS]
        bodies = [lambda rank: (sync := open_sync(stores[rank], self.RANKS, rank), walk(sync, length, say=say))[0]]
        syncs = in_threads(*bodies * self.RANKS)
        for store in stores:
            store.requests = store.keys = 0
        return stores, syncs

    def expected(self, step: int, say: Say = small) -> list[Any]:
        return [say(rank, step) for rank in range(self.RANKS)]

    @pytest.mark.parametrize("asks_first", [0, 7])
    def test_one_rank_reads_what_all_have_sent_and_the_others_a_copy_of_it(self, asks_first: int) -> None:
        stores, syncs = self.walked()
        order = [asks_first, *(rank for rank in range(self.RANKS) if rank != asks_first)]
        for step in (3, 4, 5, 6, 6):
            assert [syncs[rank].records_at(step) for rank in order] == [self.expected(step)] * self.RANKS
        assert stores[asks_first].keys > 4 * self.RANKS
        # The place of the copy, and the copy.
        assert {stores[rank].keys for rank in order[1:]} == {5 * 2}

    def test_at_once_they_read_a_copy_as_well(self) -> None:
        stores, syncs = self.walked()
        assert in_threads(*[lambda rank: syncs[rank].records_at(6)] * self.RANKS) == [self.expected(6)] * self.RANKS
        read_all = [store for store in stores if store.keys >= self.RANKS]
        assert len(read_all) == 1

    def test_records_with_large_parts_come_back(self) -> None:
        say = with_large(2)
        _, syncs = self.walked(say=say)
        assert [sync.records_at(5) for sync in syncs[:3]] == [self.expected(5, say)] * 3

    def test_nobody_waits_for_long_for_a_rank_that_has_died_while_it_gathered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rank_sync, "_PATIENCE", 0.2)
        stores, syncs = self.walked()
        monkeypatch.setattr(stores[3], "inner", died := DiesAtReading(stores[3].inner))
        (found,) = in_threads(lambda rank: syncs[3].records_at(6))
        assert isinstance(found, Gone)
        died.is_dead = True
        began = time.monotonic()
        assert syncs[5].records_at(6) == self.expected(6)
        assert 0.2 <= time.monotonic() - began < 2
        # Later steps are gathered by somebody else.
        assert [sync.records_at(5) for sync in syncs[5:8]] == [self.expected(5)] * 3
        assert stores[6].keys < self.RANKS

    def test_what_one_rank_cannot_have_any_more_the_others_are_not_kept_waiting_for(self) -> None:
        stores, syncs = self.walked(length=30)
        for key in [key for key in stores[0].inner.list_keys() if "/records/9/" in key]:
            stores[0].inner.delete_key(key)
        began = time.monotonic()
        for sync in syncs[:4]:
            with pytest.raises(PositionError, match="rank 9 stood at step 29 is not kept"):
                sync.records_at(29)
        assert time.monotonic() - began < 1

    def test_a_copy_that_gave_way_to_that_of_a_later_step_is_gathered_anew(self) -> None:
        stores, syncs = self.walked(length=12)
        assert syncs[0].records_at(4) == syncs[1].records_at(4) == self.expected(4)
        assert syncs[2].records_at(12) == self.expected(12)
        assert syncs[3].records_at(4) == self.expected(4)
        assert syncs[4].records_at(8) == self.expected(8)
        # And one that does not hold what it should.
        for key in [key for key in stores[0].inner.list_keys() if "/copies/0/" in key]:
            stores[0].inner.set(key, b"nonsense")
        assert syncs[5].records_at(12) == self.expected(12)

    @given(st.integers(0, 2**32), st.sampled_from([small, with_large(2)]))
    def test_ranks_that_ask_for_different_steps_in_any_order_get_theirs(self, seed: int, say: Say) -> None:
        draw = random.Random(seed)
        store = TurnsStore(3, seed, [draw.choice([1, 5, 20]) for _ in range(3)])
        steps = [[draw.randint(1, 9) for _ in range(4)] for _ in range(3)]

        def body(rank: int) -> list[Any]:
            walk(sync := open_sync(store, 3, rank), 9, say=say)
            return [sync.records_at(step) for step in steps[rank]]

        with mock.patch.multiple(rank_sync, _ALONE=0):
            found = store.run(body, body, body)
        assert found == [[[say(rank, step) for rank in range(3)] for step in of_rank] for of_rank in steps]


class DiesAtReading:
    """A store whose process dies as it reads what the others have sent, and asks nothing any more."""

    is_dead = False

    def __init__(self, inner: HashStore) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "multi_get":
            self.is_dead = True
        if self.is_dead:
            raise Gone
        return getattr(self.inner, name)


class TestRecords:
    def pair(self, body: Callable[[RankSync], Any], length: int = 20, say: Say = small, **options: Any) -> Any:
        """Call ``body`` on rank 0 after both ranks walked over all their batches; returns what it returned."""
        store = TurnsStore(2)

        def first(rank: int) -> Any:
            sync = open_sync(store, 2, rank, **options)
            walk(sync, length, say=say)
            return body(sync)

        second = lambda rank: walk(open_sync(store, 2, rank, **options), length, say=say)  # noqa: E731
        return store.run(first, second)[0]

    @pytest.mark.parametrize(
        ("step", "options", "message"),
        [
            (1, {"keep": 2}, "rank 0 stood at step 1 is not kept any more"),
            (-1, {}, "step -1"),
            (0, {}, "step 0"),
            (22, {}, "step 22"),
        ],
    )
    def test_that_are_not_there_are_refused(self, step: int, options: dict[str, Any], message: str) -> None:
        error = self.pair(lambda sync: sync.records_at(step), **options)
        assert isinstance(error, PositionError)
        assert message in str(error)

    @pytest.mark.parametrize(("size", "key"), [(10, "state"), (12_000_000, "state"), (12_000_000, "other")])
    def test_may_be_of_any_size(self, size: int, key: str) -> None:
        # Hardly to be compressed, and above what a TCPStore takes at once.
        large = base64.b64encode(random.Random(size).randbytes(size * 3 // 4)).decode()
        store = TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
        sync = open_sync(store, 1, 0)
        say = lambda rank, step: [{key: large if step == 2 else "small"}]  # noqa: E731
        assert walk(sync, 3, say=say) == 3
        assert [sync.records_at(step) for step in (1, 2, 3)] == [[say(0, step)] for step in (1, 2, 3)]
        assert sync.final_records(3) == [end(0, 3)]

    @pytest.mark.parametrize(
        ("key", "stale"),
        [
            *(("/records/1/3", stale) for stale in (b"z\x00", b'["other-run", 3, false]\n[]', b"[]", b"7", b"")),
            *(("/large/1/", stale) for stale in (b"nonsense", b'"the state of another"', None)),
        ],
    )
    def test_foreign_entries_in_their_place_are_refused(self, key: str, stale: bytes | None) -> None:
        store, say = TurnsStore(2), with_large(10**9) if "large" in key else small

        def tampered_with(rank: int) -> list[Any]:
            sync = open_sync(store, 2, rank)
            walk(sync, 5, say=say)
            for found in [found for found in store.inner.list_keys() if key in found]:
                store.inner.delete_key(found)
                if stale is not None:
                    store.inner.set(found, stale)
            return sync.records_at(4)

        error = store.run(tampered_with, lambda rank: walk(open_sync(store, 2, rank), 5, say=say))[0]
        assert isinstance(error, StreamError)
        assert "Stale or foreign entries" in str(error)

    def test_large_states_stay_in_the_store_for_as_long_as_a_record_has_them(self) -> None:
        found = {}
        for changes in (1, 50, 10**9):
            store = TurnsStore(2)
            check_run([300, 300], keep=4, store=store, say=with_large(changes))
            found[changes] = [sum(f"/large/{rank}/" in key for key in store.inner.list_keys()) for rank in range(2)]
        # One for each group that is kept, or as many as there were in these, and the state that stays.
        assert found == {1: [12, 12], 50: [3, 3], 10**9: [2, 2]}


class TestArguments:
    @pytest.mark.parametrize("wrong", [{"keep": 0}, {"group_size": 0}])
    def test_wrong_ones_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            open_sync(HashStore(), 1, 0, **wrong)

    @pytest.mark.parametrize("seed", range(2))
    def test_terms_that_differ_between_ranks_are_refused_on_all(self, seed: int) -> None:
        store, steps = TurnsStore(3, seed), []

        def body(rank: int) -> None:
            sync = open_sync(store, 3, rank, keep=4 + rank // 2, terms={"seed": rank // 2, "workers": 2})
            walk(sync, 20, each=steps.append)

        for error in store.run(body, body, body):
            assert isinstance(error, RankMismatchError)
            assert re.search("keep is (4 and 5|5 and 4), seed is (0 and 1|1 and 0)", str(error))
        assert steps == []


class TestStoresOfTorch:
    def check(self, stores: list[Any]) -> None:
        ranks = range(len(stores))

        def body(rank: int) -> tuple[int, list[Any]]:
            sync = open_sync(stores[rank], len(stores), rank, group_size=2)
            each = lambda step: None if rank else seen.append(sync.records_at(step + 1))  # noqa: E731
            stop = walk(sync, 30 + rank, each=each, say=with_large(7))
            return stop, sync.final_records(stop)

        final = [with_large(7)(rank, 30) if rank else end(rank, 30) for rank in ranks]
        for _ in range(2):
            seen: list[Any] = []
            assert in_threads(*[body] * len(stores)) == [(30, final)] * len(stores)
            assert seen == [[with_large(7)(rank, step) for rank in ranks] for step in range(1, 31)]

    def test_file_store(self, tmp_path: Path) -> None:
        self.check([FileStore(str(tmp_path / "store"), 3) for _ in range(3)])

    def test_prefix_store_over_tcp_in_silence(self, capfd: pytest.CaptureFixture[str]) -> None:
        server = TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
        client = TCPStore("127.0.0.1", server.port, None, False, PATIENCE)
        self.check([PrefixStore("worker", server), PrefixStore("worker", client)])
        with pytest.raises(StreamError):
            walk(open_sync(server, 2, 0, timeout=0.5, label="alone"), 3)
        assert capfd.readouterr().err == ""
