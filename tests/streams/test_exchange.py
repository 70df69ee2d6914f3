"""Ranks are threads that take turns at the store in random order, so that a seed is an interleaving."""

from __future__ import annotations

import base64
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import ConfigurationError, PositionError, RankMismatchError, StreamError
from lightning_stateful.streams import exchange as exchange_module
from lightning_stateful.streams import group_store
from lightning_stateful.streams.exchange import Exchange
from lightning_stateful.streams.group_store import GroupStore, unpack
from lightning_stateful.streams.place_text import Text

OPERATIONS = ("set", "add", "check", "compare_set", "delete_key", "multi_get")


TAKING_TURNS: set[int] = set()


class Gone(BaseException):
    """The death of a rank's process."""


class TurnsStore:
    """A HashStore at which ranks take turns, one request at a time, in an order that a seed decides.

    Once every rank that lives is about to ask something, one of them goes on; those of larger weight more often.
    """

    def __init__(self, num_ranks: int, seed: int = 0, weights: list[int] | None = None) -> None:
        self.inner = HashStore()
        self.random = random.Random(seed)
        self.weights = weights or [1] * num_ranks
        self.lock = threading.Lock()
        self.ranks: dict[int, int] = {}
        self.alive: set[int] = set()
        self.waiting: set[int] = set()
        self.turns: list[threading.Semaphore] = []
        self.asked: Counter[str] = Counter()
        self.dies: dict[int, int] = {}
        self.requests: Counter[int] = Counter()
        self.most_requests = 10**9

    def begin(self, num_ranks: int) -> None:
        self.turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self.alive, self.waiting = set(range(num_ranks)), set()
        self.ranks.clear()
        self.requests.clear()

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> TurnsStore:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(name)
        return lambda *arguments: self._ask(name, arguments)

    def leave(self, rank: int) -> None:
        with self.lock:
            self.alive.discard(rank)
            self._pass_on()

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
            if self.requests.total() > self.most_requests:
                raise RuntimeError("the ranks hang")
            if self.dies.get(rank) == self.requests[rank]:
                raise Gone
        self.asked[name] += 1
        return getattr(self.inner, name)(*arguments)


class CountedStore:
    """A store of torch's that counts what it is asked."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.requests = inner, 0

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        self.requests += 1
        return getattr(self.inner, name)


def in_turns(store: TurnsStore, *bodies: Callable[[int], Any]) -> list[Any]:
    """What each rank's body returns or raises."""
    answers: list[Any] = [None] * len(bodies)
    store.begin(len(bodies))

    def run(rank: int) -> None:
        store.ranks[threading.get_ident()] = rank
        TAKING_TURNS.add(threading.get_ident())
        try:
            answers[rank] = bodies[rank](rank)
        except BaseException as error:
            answers[rank] = error
        finally:
            TAKING_TURNS.discard(threading.get_ident())
            store.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return answers


def raised(answers: list[Any]) -> list[Any]:
    """The answers, with errors of the tests themselves raised."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where turns are taken, they are the time.
    pause = time.sleep

    def sleep(seconds: float) -> None:
        if threading.get_ident() not in TAKING_TURNS:
            pause(seconds)

    monkeypatch.setattr(group_store.time, "sleep", sleep)


def place(rank: int, step: int) -> str:
    return f'{{"rank":{rank},"step":{step}}}'


def walk(
    exchange: Exchange,
    length: int,
    *,
    ahead: int = 0,
    each: Callable[[int], None] = lambda step: None,
    last: int | None = None,
    say: Callable[[int, int], str | Text] = place,
) -> int:
    """Read a stream of ``length`` batches as a loader would; returns the step before which the pass stopped."""
    rank, step = exchange.topology.rank, exchange.first_step
    announced, end, ended = step, step + length, False
    while last is None or step < last:
        while announced < exchange.horizon(step) + ahead:
            if announced >= end and not ended:
                exchange.announce_end(say(rank, announced) if say is not place else None)
                ended = True
            if ended:
                break
            announced += 1
            exchange.announce(say(rank, announced))
        if not exchange.happens(step):
            break
        each(step)
        step += 1
    return step


def open_exchange(store: Any, num_replicas: int, rank: int, **options: Any) -> Exchange:
    options = {"label": "train", "first_step": 0, "timeout": 20.0, **options}
    return Exchange(store, Topology(num_replicas=num_replicas, rank=rank), **options)


def check_pass(
    lengths: list[int],
    *,
    first_step: int = 0,
    group_size: int | None = None,
    keep: int = 5,
    ahead: list[int] | None = None,
    weights: list[int] | None = None,
    seed: int = 0,
    store: TurnsStore | None = None,
    say: Callable[[int, int], str | Text] = place,
) -> TurnsStore:
    """One pass: all stop where they should, and rank 0 can write all places of every step it is handed."""

    def whole(rank: int, step: int) -> str:
        return "".join(say(rank, step))

    ranks = len(lengths)
    store = store or TurnsStore(ranks, seed, weights)
    store.most_requests = 100_000

    def body(rank: int) -> tuple[int, int | None, list[str | None]]:
        exchange = open_exchange(store, ranks, rank, first_step=first_step, group_size=group_size, keep=keep)

        def each(step: int) -> None:
            if rank:
                return
            for kept in range(max(step + 2 - keep, first_step + 1), step + 2):
                assert exchange.places_at(kept) == [whole(other, kept) for other in range(ranks)]

        stop = walk(exchange, lengths[rank], ahead=ahead[rank] if ahead else 0, each=each, say=say)
        gathered = exchange.gather_places(stop)
        return stop, exchange.stop, gathered

    stop = first_step + min(lengths)
    places: list[str | None] = [whole(rank, stop) if stop > first_step else None for rank in range(ranks)]
    if say is not place and stop == first_step:
        places = [whole(rank, stop) if length == 0 else None for rank, length in enumerate(lengths)]
    assert raised(in_turns(store, *[body] * ranks)) == [(stop, stop, places)] * ranks
    return store


class TestEveryInterleaving:
    @given(st.data())
    def test_all_ranks_stop_before_the_same_step_and_rank_0_knows_every_place(self, data: st.DataObject) -> None:
        ranks = data.draw(st.sampled_from([1, 2, 3]))
        check_pass(
            data.draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks)),
            first_step=data.draw(st.sampled_from([0, 3])),
            group_size=data.draw(st.sampled_from([None, 2, 3])),
            keep=data.draw(st.sampled_from([1, 2, 5])),
            ahead=data.draw(st.lists(st.sampled_from([0, 1, 7, 100]), min_size=ranks, max_size=ranks)),
            weights=data.draw(st.lists(st.sampled_from([1, 5, 20]), min_size=ranks, max_size=ranks)),
            seed=data.draw(st.integers(0, 2**32)),
        )

    @pytest.mark.parametrize("slowest", [0, 3, 7])
    @pytest.mark.parametrize("group_size", [1, 4])
    def test_eight_ranks_of_which_one_is_slow(self, group_size: int, slowest: int) -> None:
        weights = [1 if rank == slowest else 6 for rank in range(8)]
        lengths = [9 + (rank * 5) % 8 for rank in range(8)]
        check_pass(lengths, group_size=group_size, weights=weights, seed=slowest)

    def test_ranks_of_one_length_stop_at_its_end(self) -> None:
        check_pass([6, 6, 6])

    def test_a_rank_that_reads_far_ahead_of_a_slow_rank_0_does_not_overwrite_what_it_needs(self) -> None:
        for group_size in (1, 3):
            check_pass([60, 60], ahead=[0, 50], weights=[1, 20], keep=3, group_size=group_size)
            check_pass([60, 60], ahead=[50, 50], weights=[1, 20], keep=3, group_size=group_size)
            check_pass([60, 60], ahead=[50, 0], weights=[20, 1], keep=3, group_size=group_size)

    def test_passes_in_sequence_do_not_mix_and_leave_no_more_keys(self) -> None:
        store = TurnsStore(3, seed=5, weights=[1, 3, 9])
        keys = []
        for number in range(5):
            check_pass([40 + number, 43, 41], store=store, group_size=1 + number % 2, keep=4)
            keys.append(store.inner.num_keys())
        assert keys[2] == keys[4]
        assert keys[3] <= keys[1]

    def test_the_number_of_keys_does_not_grow_with_the_steps(self) -> None:
        short, long = (check_pass([length, length], keep=4).inner.num_keys() for length in (40, 400))
        assert short == long < 60


class TestAsking:
    def test_again_costs_nothing(self) -> None:
        store = HashStore()
        exchange = open_exchange(asked := CountedStore(store), 1, 0)
        for step in range(3):
            exchange.announce(place(0, step))
        exchange.announce_end()
        assert [exchange.happens(step) for step in range(4)] == [True, True, True, False]
        before = asked.requests
        assert [exchange.happens(step) for step in (0, 2, 3, 3, 90)] == [True, True, False, False, False]
        assert asked.requests == before

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("group_size", [1, 4])
    def test_about_a_step_far_ahead_answers_for_all_before_it(self, group_size: int, seed: int) -> None:
        store = TurnsStore(3, seed)
        lengths = [40, 13 + seed % 4, 18 - seed % 4]

        def body(rank: int) -> tuple[list[bool], int | None, list[str]]:
            exchange = open_exchange(store, 3, rank, group_size=group_size)
            for step in range(lengths[rank]):
                exchange.announce(place(rank, step + 1))
            exchange.announce_end()
            happen = [exchange.happens(10), exchange.happens(19), exchange.happens(min(lengths))]
            return happen, exchange.stop, exchange.places_at(min(lengths))

        places = [place(rank, min(lengths)) for rank in range(3)]
        assert raised(in_turns(store, *[body] * 3)) == [([True, False, False], min(lengths), places)] * 3


class TestMoreRanks:
    """Ranks in one thread: nobody waits as long as all announce before any asks."""

    @pytest.fixture
    def in_one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exchange_module, "meet", lambda *arguments: "run")

    @pytest.mark.parametrize(("ranks", "group_size"), [(2, 1), (64, 1), (127, 1), (128, 2), (1024, 16)])
    def test_groups_grow_with_the_number_of_ranks(self, in_one_thread: None, ranks: int, group_size: int) -> None:
        exchange = open_exchange(HashStore(), ranks, 0, first_step=7)
        horizons = [exchange.horizon(7 + step) - 7 for step in range(40)]
        assert all(horizon % group_size == 0 for horizon in horizons)
        assert all(2 <= horizon - step <= group_size + 1 for step, horizon in enumerate(horizons))

    def test_130_ranks_in_groups_of_two(self, in_one_thread: None) -> None:
        store, ranks = HashStore(), 130
        exchanges = [open_exchange(store, ranks, rank) for rank in range(ranks)]
        lengths = [21 + rank % 3 for rank in range(ranks)]
        announced, step = [0] * ranks, 0
        while True:
            for rank, exchange in enumerate(exchanges):
                while announced[rank] < exchange.horizon(step):
                    if announced[rank] == lengths[rank]:
                        exchange.announce_end()
                        break
                    announced[rank] += 1
                    exchange.announce(place(rank, announced[rank]))
            answers = {exchange.happens(step) for exchange in exchanges}
            assert len(answers) == 1
            if answers == {False}:
                break
            step += 1
            assert exchanges[0].places_at(step) == [place(rank, step) for rank in range(ranks)]
        assert step == 21

    @pytest.mark.parametrize("group_size", [1, 4])
    def test_a_group_costs_each_rank_one_message_one_addition_and_at_most_one_look(
        self, in_one_thread: None, group_size: int
    ) -> None:
        stores = [CountedStore(inner) for inner in [HashStore()] * 3]
        exchanges = [open_exchange(store, 3, rank, group_size=group_size) for rank, store in enumerate(stores)]
        announced = 0
        for step in range(40):
            while announced < exchanges[0].horizon(step):
                announced += 1
                for exchange in exchanges:
                    exchange.announce(place(exchange.topology.rank, announced))
            for exchange in exchanges:
                assert exchange.happens(step)
        groups = announced // group_size
        # Who is counted last knows already.
        assert [store.requests for store in stores[:2]] == [2 * groups + 40 // group_size] * 2
        assert stores[2].requests == 2 * groups


class TestPlaces:
    def pair(self, body: Callable[[Exchange], Any], length: int = 20, **options: Any) -> Any:
        """What ``body`` returns on rank 0, after both ranks walked over all their batches."""
        store = TurnsStore(2)

        def rank_0(rank: int) -> Any:
            exchange = open_exchange(store, 2, rank, **options)
            walk(exchange, length)
            return body(exchange)

        def rank_1(rank: int) -> int:
            return walk(open_exchange(store, 2, rank, **options), length)

        return in_turns(store, rank_0, rank_1)[0]

    def test_old_places_are_refused_by_name(self) -> None:
        error = self.pair(lambda exchange: exchange.places_at(1), keep=2)
        assert isinstance(error, PositionError)
        assert "rank 0 stood in group 0" in str(error)
        assert "keep" in str(error)

    @pytest.mark.parametrize("step", [-1, 0, 22, 100])
    def test_places_outside_the_pass_are_refused(self, step: int) -> None:
        error = self.pair(lambda exchange: exchange.places_at(step))
        assert isinstance(error, PositionError)
        assert f"step {step}" in str(error)

    def test_places_of_a_step_that_is_not_known_to_happen_are_refused(self) -> None:
        exchange = open_exchange(HashStore(), 1, 0, group_size=4)
        exchange.announce("a")
        with pytest.raises(PositionError, match="Where ranks stand is known between 0 and 0, not at step 1"):
            exchange.places_at(1)

    def test_places_after_the_end_are_refused_within_its_group_too(self) -> None:
        error = self.pair(lambda exchange: exchange.places_at(22), length=20, group_size=8)
        assert isinstance(error, PositionError)
        assert "Ranks [0, 1] end before step 22" in str(error)

    @pytest.mark.parametrize("size", [10, 6_000_000, 12_000_000])
    def test_a_place_may_be_of_any_size(self, size: int) -> None:
        # Hardly to be compressed, and above what a TCPStore takes at once.
        large = base64.b64encode(random.Random(size).randbytes(size * 3 // 4)).decode()
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        exchange = open_exchange(store, 1, 0)
        for text in ("first", large, "last"):
            exchange.announce(text)
        exchange.announce_end()
        assert [exchange.happens(step) for step in range(4)] == [True, True, True, False]
        assert [exchange.places_at(step) for step in (1, 2, 3)] == [["first"], [large], ["last"]]
        assert exchange.gather_places(2) == [large]

    def test_parts_of_two_large_messages_are_not_put_together(self) -> None:
        store = GroupStore(inner := HashStore(), "train", 1)
        texts = [random.Random(seed).randbytes(5_000_000).hex() for seed in range(2)]
        store.say("key", texts[0])
        head = inner.get("lightning_stateful/train/key")
        store.say("key", texts[1])
        assert store.hear("key") == texts[1]
        inner.set("lightning_stateful/train/key", head)
        assert store.hear("key") is None

    @pytest.mark.parametrize("stale", [b"nonsense", b"x\x00", b'["other-run",1,3,["p"]]', b"[]", b"7", None])
    def test_foreign_entries_are_refused(self, stale: bytes | None) -> None:
        store = TurnsStore(2)

        def tampered_with(rank: int) -> list[str]:
            exchange = open_exchange(store, 2, rank)
            walk(exchange, 5)
            (key,) = (key for key in store.inner.list_keys() if key.endswith("places/1/3"))
            store.inner.delete_key(key)
            if stale is not None:
                store.inner.set(key, stale)
            return exchange.places_at(4)

        error = in_turns(store, tampered_with, lambda rank: walk(open_exchange(store, 2, rank), 5))[0]
        assert isinstance(error, StreamError)
        assert "Stale or foreign entries" in str(error)


def with_large(changes: int, others: int = 10**9) -> Callable[[int, int], Text]:
    """Places with two large states, of which one changes after so many steps, and the other after others."""

    def say(rank: int, step: int) -> Text:
        first, second = f"<{rank} {step // changes}>", f"({rank} {step // others})"
        return f"[{step}, ", first, ", ", second, f", {rank}]"

    return say


class TestLargeParts:
    @given(st.data())
    def test_every_place_that_is_kept_is_whole(self, data: st.DataObject) -> None:
        ranks = data.draw(st.sampled_from([1, 2, 3]))
        changes = st.sampled_from([1, 2, 5, 100])
        store = None
        for _ in range(2):
            store = check_pass(
                data.draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks)),
                group_size=data.draw(st.sampled_from([None, 3])),
                keep=data.draw(st.sampled_from([1, 5])),
                ahead=data.draw(st.lists(st.sampled_from([0, 7, 100]), min_size=ranks, max_size=ranks)),
                weights=data.draw(st.lists(st.sampled_from([1, 20]), min_size=ranks, max_size=ranks)),
                seed=data.draw(st.integers(0, 2**32)),
                say=with_large(data.draw(changes), data.draw(changes)),
                store=store,
            )

    def aside(self, store: TurnsStore, rank: int) -> int:
        """How many large parts of a rank's the store holds."""
        return sum(f"/places/{rank}/aside/" in key for key in store.inner.list_keys())

    def test_those_that_stay_are_said_once_and_others_make_room_for_their_successors(self) -> None:
        found = {}
        for changes in (1, 50, 10**9):
            store = TurnsStore(2)
            for _ in range(2):
                check_pass([300, 300], keep=4, store=store, say=with_large(changes))
            found[changes] = self.aside(store, 0), self.aside(store, 1)
        # keep, the groups that may lie ahead, and as many as are being replaced.
        assert found == {1: (14, 14), 50: (3, 3), 10**9: (2, 2)}

    def test_those_that_stay_cost_no_request(self) -> None:
        more = []
        for length in (20, 60):
            requests = []
            for say in (place, with_large(10**9)):
                exchange = open_exchange(asked := CountedStore(HashStore()), 1, 0)
                assert walk(exchange, length, say=say) == length
                requests.append(asked.requests)
            more.append(requests[1] - requests[0])
        assert more[0] == more[1]

    @pytest.mark.parametrize("stale", [b"nonsense", b'["other-run",1,0,"<1 0>"]', b'["run",1,1,"<1 9>"]', b"[]", None])
    def test_foreign_entries_are_refused(self, stale: bytes | None) -> None:
        store = TurnsStore(2)

        def tampered_with(rank: int) -> list[str]:
            exchange = open_exchange(store, 2, rank)
            walk(exchange, 5, say=with_large(10**9))
            (key,) = (key for key in store.inner.list_keys() if key.endswith("places/1/aside/0"))
            assert unpack(store.inner.get(key)) == [exchange.run, 1, 0, "<1 0>"]
            store.inner.delete_key(key)
            if stale is not None:
                store.inner.set(key, stale.replace(b'"run"', f'"{exchange.run}"'.encode()))
            return exchange.places_at(4)

        other = lambda rank: walk(open_exchange(store, 2, rank), 5, say=with_large(10**9))  # noqa: E731
        error = in_turns(store, tampered_with, other)[0]
        assert isinstance(error, StreamError)
        assert "Stale or foreign entries" in str(error)

    def test_who_is_late_is_named_with_its_whole_place(self) -> None:
        store, say = TurnsStore(2), with_large(3)
        bodies = [
            lambda rank: walk(open_exchange(store, 2, rank, timeout=0.2), 20, say=say),
            lambda rank: walk(open_exchange(store, 2, rank, timeout=0.2), 20, last=5, say=say),
        ]
        assert f"- rank 1: stood at {''.join(say(1, 6))}\n" in str(in_turns(store, *bodies)[0])

    def test_large_parts_may_be_of_any_size(self) -> None:
        large = [base64.b64encode(random.Random(seed).randbytes(6_000_000)).decode() for seed in range(3)]
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        exchange = open_exchange(store, 1, 0)
        for number in (0, 0, 1, 2):
            exchange.announce(("[", large[number], "]"))
        exchange.announce_end(("[", large[2], "]"))
        assert [exchange.happens(step) for step in range(5)] == [True, True, True, True, False]
        assert [exchange.places_at(step) for step in (1, 2, 3)] == [[f"[{large[number]}]"] for number in (0, 0, 1)]
        assert exchange.gather_places(4) == [f"[{large[2]}]"]


class TestFailures:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("group_size", [1, 3])
    def test_all_ranks_break_off_at_the_step_that_one_could_not_read(self, group_size: int, seed: int) -> None:
        store = TurnsStore(3, seed, [1 + 30 * (seed % 3 == rank) for rank in range(3)])
        broken = 7 + seed % 4

        def healthy(rank: int) -> list[int]:
            steps: list[int] = []
            exchange = open_exchange(store, 3, rank, group_size=group_size)
            with pytest.raises(StreamError, match=f"rank 2 broke off before step {broken}: no such file"):
                walk(exchange, 40, each=steps.append)
            return steps

        def broken_one(rank: int) -> list[int]:
            exchange = open_exchange(store, 3, rank, group_size=group_size)
            steps: list[int] = []
            announced = 0
            for step in range(40):
                while announced < min(exchange.horizon(step), broken):
                    announced += 1
                    exchange.announce(place(rank, announced))
                if announced == broken:
                    exchange.fail("no such file")
                try:
                    exchange.happens(step)
                except StreamError:
                    break
                steps.append(step)
            return steps

        assert raised(in_turns(store, healthy, healthy, broken_one)) == [list(range(broken))] * 3

    def test_a_failure_before_the_first_batch_wakes_all(self) -> None:
        store = TurnsStore(2)

        def healthy(rank: int) -> None:
            walk(open_exchange(store, 2, rank), 5)

        def broken(rank: int) -> None:
            exchange = open_exchange(store, 2, rank)
            exchange.fail("no shard")
            exchange.fail("again")

        error = in_turns(store, healthy, broken)[0]
        assert isinstance(error, StreamError)
        assert "rank 1 broke off before step 0: no shard" in str(error)

    def test_a_failure_that_the_pass_does_not_reach_is_none(self) -> None:
        store = TurnsStore(2)

        def broken(rank: int) -> int:
            exchange = open_exchange(store, 2, rank)
            for step in range(6):
                exchange.announce(place(rank, step))
            exchange.fail("later")
            return sum(exchange.happens(step) for step in range(3))

        assert in_turns(store, lambda rank: walk(open_exchange(store, 2, rank), 2), broken) == [2, 2]

    def test_a_failure_far_ahead_breaks_off_at_what_the_others_know_of(self) -> None:
        store = TurnsStore(2)

        def broken(rank: int) -> None:
            exchange = open_exchange(store, 2, rank)
            for step in range(100):
                exchange.announce(place(rank, step))
            exchange.fail("later")

        error = in_turns(store, lambda rank: walk(open_exchange(store, 2, rank), 200), broken)[0]
        assert isinstance(error, StreamError)
        assert "before step 3: later" in str(error)

    def test_ranks_that_wait_for_the_gathered_places_learn_that_there_are_none(self) -> None:
        store = TurnsStore(2)

        def gather(rank: int) -> Any:
            exchange = open_exchange(store, 2, rank, keep=1)
            walk(exchange, 30)
            return exchange.gather_places(3)

        errors = in_turns(store, gather, gather)
        assert [type(error) for error in errors] == [PositionError, StreamError]
        assert "Rank 0 could not gather the places at step 3" in str(errors[1])

    def test_a_store_that_is_gone_is_said_to_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = TurnsStore(1)
        exchange = open_exchange(store, 1, 0)
        monkeypatch.setattr(TurnsStore, "_ask", lambda *arguments: (_ for _ in ()).throw(RuntimeError("Broken pipe")))
        with pytest.raises(StreamError, match=r"does not answer(.|\n)*Broken pipe"):
            exchange.announce("a")
        exchange.fail("the disk")

    @pytest.mark.parametrize("seed", range(10))
    def test_of_several_failures_the_first_step_counts(self, seed: int) -> None:
        store = TurnsStore(3, seed)

        def breaks(rank: int, after: int) -> None:
            exchange = open_exchange(store, 3, rank)
            walk(exchange, 40, last=after - 1)
            exchange.fail("no such file")
            for step in range(after - 1, 40):
                exchange.happens(step)

        bodies = [lambda rank, after=after: breaks(rank, after) for after in (10, 9)]
        for error in in_turns(store, lambda rank: walk(open_exchange(store, 3, rank), 40), *bodies):
            assert isinstance(error, StreamError)
            assert "rank 2 broke off before step 9: no such file" in str(error)


class TestTimeouts:
    def test_who_is_late_is_named_with_its_last_place_on_all_ranks(self) -> None:
        store = TurnsStore(3)

        def waits(rank: int) -> None:
            walk(open_exchange(store, 3, rank, timeout=0.3), 20)

        def stalls(rank: int) -> None:
            walk(open_exchange(store, 3, rank, timeout=0.3), 20, last=5)

        errors = in_turns(store, waits, waits, stalls)
        assert errors[2] is None
        for error in errors[:2]:
            assert isinstance(error, StreamError)
            assert "Step 6 was waited for in vain for 0.3 s: 1 of 3 ranks have not announced" in str(error)
            assert f"- rank 2: stood at {place(2, 6)}\n" in str(error)
            assert "raise the timeout" in str(error)

    def test_a_rank_that_never_announced_is_named(self) -> None:
        store = TurnsStore(2)
        bodies = [
            lambda rank: walk(open_exchange(store, 2, rank, timeout=0.2), 20),
            lambda rank: open_exchange(store, 2, rank, timeout=0.2),
        ]
        assert "- rank 1: nothing yet" in str(in_turns(store, *bodies)[0])

    def test_the_late_rank_itself_breaks_off_at_the_step_it_was_waited_for(self) -> None:
        store = TurnsStore(2)
        gave_up = threading.Event()

        def waits(rank: int) -> None:
            try:
                walk(open_exchange(store, 2, rank, timeout=0.2), 20)
            finally:
                gave_up.set()

        def is_late(rank: int) -> None:
            def each(step: int) -> None:
                if step == 4:
                    store.leave(rank)
                    gave_up.wait(30)
                    store.alive.add(rank)
                steps.append(step)

            walk(open_exchange(store, 2, rank, timeout=0.2), 20, each=each)

        steps: list[int] = []
        errors = in_turns(store, waits, is_late)
        assert all(isinstance(error, StreamError) and "Step 6 was waited for in vain" in str(error) for error in errors)
        assert steps == [0, 1, 2, 3, 4, 5]

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        with pytest.raises(StreamError, match=r"ranks \[1, 2\] of 3 have not come"):
            open_exchange(HashStore(), 3, 0, timeout=0.1)
        with pytest.raises(StreamError, match="rank 0 has not come"):
            open_exchange(HashStore(), 3, 1, timeout=0.1)

    def test_ctrl_c_ends_a_wait(self) -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            open_exchange(HashStore(), 2, 0, timeout=100)


class TestArguments:
    @pytest.mark.parametrize(
        "wrong",
        [{"first_step": -1}, {"keep": 0}, {"group_size": 0}, {"first_step": 1.5}],
    )
    def test_wrong_ones_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            open_exchange(HashStore(), 1, 0, **wrong)

    def test_those_that_differ_between_ranks_are_refused_on_all(self) -> None:
        store = TurnsStore(3)
        errors = in_turns(
            store, *[lambda rank: open_exchange(store, 3, rank, first_step=rank // 2, keep=4 + rank // 2)] * 3
        )
        assert all(isinstance(error, RankMismatchError) for error in errors)
        assert "on ranks 0 and 2, first_step is 0 and 1, keep is 4 and 5" in str(errors[1])

    def test_asking_before_announcing_is_refused_rather_than_waited_for(self) -> None:
        exchange = open_exchange(HashStore(), 1, 0, first_step=5)
        exchange.announce("a")
        with pytest.raises(ConfigurationError, match="has to announce its batches below step 7"):
            exchange.happens(5)
        with pytest.raises(ConfigurationError, match="begins at step 5"):
            exchange.happens(4)

    def test_announcing_after_the_end_is_refused(self) -> None:
        exchange = open_exchange(HashStore(), 1, 0)
        exchange.announce_end()
        exchange.announce_end()
        with pytest.raises(ConfigurationError, match="has ended at step 0"):
            exchange.announce("a")
        assert not exchange.happens(0)


class TestRestarts:
    @pytest.mark.parametrize("seed", range(10))
    def test_processes_started_anew_on_the_same_store_never_meet_their_predecessors(self, seed: int) -> None:
        """Each rank dies at a request of its own, in the meeting or later; then all are started anew."""
        store = TurnsStore(3, seed)
        chance = random.Random(seed)

        def first_life(rank: int) -> None:
            walk(open_exchange(store, 3, rank, timeout=0.05), 30)

        for _ in range(3):
            store.dies = {rank: chance.randrange(1, 40) for rank in range(3)}
            in_turns(store, *[first_life] * 3)
        store.dies = {}
        check_pass([9, 8, 10], store=store)
        check_pass([9, 8, 10], store=store)

    @pytest.mark.parametrize("seed", range(5))
    def test_who_died_while_it_waited_for_the_others_is_not_taken_for_its_successor(self, seed: int) -> None:
        # Rank 0 finds what the first process of rank 2 has left before the second one has begun.
        store = TurnsStore(3, seed, weights=[60, 20, 1])
        store.dies = {2: 4}
        in_turns(store, lambda rank: None, lambda rank: None, lambda rank: open_exchange(store, 3, rank))
        store.dies = {}
        check_pass([5, 6, 7], store=store)

    def test_every_pass_is_named_once(self) -> None:
        store = TurnsStore(3, weights=[20, 5, 1])
        for number in range(1, 4):
            check_pass([4, 4, 4], store=store)
            assert store.inner.get("lightning_stateful/train/num_runs") == str(number).encode()
            assert len(unpack(store.inner.get("lightning_stateful/train/runs"))) == 1

    def test_a_rank_that_is_started_anew_alone_is_refused_and_the_others_time_out(self) -> None:
        store = TurnsStore(2)

        def survives(rank: int) -> int:
            return walk(open_exchange(store, 2, rank, timeout=0.4), 30)

        def is_restarted(rank: int) -> None:
            walk(open_exchange(store, 2, rank), 30, last=7)
            walk(open_exchange(store, 2, rank, timeout=0.4), 30)

        first, second = in_turns(store, survives, is_restarted)
        assert isinstance(first, StreamError)
        assert "1 of 2 ranks have not announced" in str(first)
        assert isinstance(second, StreamError)
        assert "started anew" in str(second)

    def test_fewer_ranks_on_the_same_store(self) -> None:
        store = TurnsStore(3)
        check_pass([5, 5, 5], store=store)
        check_pass([6, 7], store=store)
        check_pass([6, 7, 8], store=store)

    def test_an_exchange_that_a_newer_one_has_replaced_says_so(self) -> None:
        store = HashStore()
        old = open_exchange(store, 1, 0)
        for _ in range(2):
            old.announce("a")
        assert old.happens(0)
        new = open_exchange(store, 1, 0)
        assert new.run != old.run
        old._complete = 0  # As if it were a rank that waits.
        old._next = 0
        with pytest.raises(StreamError, match="have begun a newer pass"):
            old.happens(0)

    def test_labels_keep_passes_apart(self) -> None:
        store = HashStore()
        exchanges = [open_exchange(store, 1, 0, label=label) for label in ("train", "val")]
        for exchange in exchanges:
            exchange.announce(exchange.run)
            exchange.announce_end()
        assert [exchange.happens(0) for exchange in exchanges] == [True, True]
        assert [exchange.places_at(1) for exchange in exchanges] == [[exchange.run] for exchange in exchanges]


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Ranks that do not take turns, as stores of torch's own do not."""
    answers: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            answers[rank] = bodies[rank]()
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return raised(answers)


class TestGathering:
    def test_of_two_gatherings_each_has_its_own_step(self) -> None:
        store, read = HashStore(), threading.Event()

        def first() -> list[list[str]]:
            walk(exchange := open_exchange(store, 2, 0), 9)
            found = [exchange.gather_places(4)]
            read.wait(30)
            return [*found, exchange.gather_places(9)]

        def second() -> list[list[str]]:
            walk(exchange := open_exchange(store, 2, 1), 9)
            found = [exchange.gather_places(4)]
            threading.Timer(0.05, read.set).start()
            return [*found, exchange.gather_places(9)]

        assert in_threads(first, second) == [[[place(rank, step) for rank in range(2)] for step in (4, 9)]] * 2


class TestStoresOfTorch:
    def check(self, stores: list[Any]) -> None:
        def body(rank: int) -> tuple[int, list[str]]:
            exchange = open_exchange(stores[rank], len(stores), rank, group_size=2)
            stop = walk(
                exchange, 30 + rank, each=lambda step: None if rank else seen.append(exchange.places_at(step + 1))
            )
            return stop, exchange.gather_places(stop)

        for _ in range(2):
            seen: list[list[str]] = []
            answers = in_threads(*[lambda rank=rank: body(rank) for rank in range(len(stores))])
            assert answers == [(30, [place(rank, 30) for rank in range(len(stores))])] * len(stores)
            assert seen == [[place(rank, step) for rank in range(len(stores))] for step in range(1, 31)]

    def test_hash_store(self) -> None:
        self.check([HashStore()] * 3)

    def test_file_store(self, tmp_path: Path) -> None:
        self.check([FileStore(str(tmp_path / "store"), 3) for _ in range(3)])

    def test_prefix_store_over_tcp_in_silence(self, capfd: pytest.CaptureFixture[str]) -> None:
        server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        client = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=10))
        self.check([PrefixStore("worker", server), PrefixStore("worker", client)])
        with pytest.raises(StreamError):
            open_exchange(server, 2, 0, timeout=0.5, label="alone")
        assert capfd.readouterr().err == ""

    def test_one_connection_serves_all_passes(self) -> None:
        server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        for store in (server, PrefixStore("worker", server)):
            first, second = (GroupStore(store, label, 1) for label in ("train", "val"))
            assert first._store is second._store
            assert first._store is not store

    def test_a_store_is_let_go_of(self) -> None:
        for make in (HashStore, lambda: PrefixStore("worker", HashStore())):
            store = make()
            exchange = open_exchange(store, 1, 0)
            gone = weakref.ref(store)
            del store, exchange
            assert gone() is None

    def test_a_store_that_others_wait_at_does_not_hold_the_ranks_up(self) -> None:
        server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        waiting = threading.Thread(target=server.wait, args=(["later"],), daemon=True)
        waiting.start()
        exchange = open_exchange(server, 1, 0)
        exchange.announce("a")
        exchange.announce_end()
        assert exchange.happens(0)
        assert waiting.is_alive()
        GroupStore(server, "", 1)._store.set("later", "1")
        waiting.join(10)
        assert not waiting.is_alive()


def start_rank(role: str, port: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, role, str(port)], stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class TestProcesses:
    def test_a_rank_that_is_killed_is_named(self) -> None:
        server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        with start_rank("client", server.port) as other:

            def each(step: int) -> None:
                if step == 3:
                    assert line_of(other) == "step 3"
                    other.send_signal(signal.SIGKILL)
                    other.wait()
                    exchange.timeout = 0.5

            exchange = open_exchange(server, 2, 0, timeout=60.0)
            with pytest.raises(StreamError, match=r"1 of 2 ranks have not announced(.|\n)*rank 1: stood at"):
                walk(exchange, 10**6, each=each)

    def test_a_server_that_is_killed_is_missed_at_once(self) -> None:
        with start_rank("server") as other:
            port = int(line_of(other))
            store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))

            def each(step: int) -> None:
                if step == 3:
                    assert line_of(other) == "step 3"
                    other.send_signal(signal.SIGKILL)
                    other.wait()

            with pytest.raises(StreamError, match="does not answer"):
                walk(open_exchange(store, 2, 1, timeout=1000.0), 10**6, each=each)


def main(role: str, port: int) -> None:
    """Rank 0 with the server, or rank 1: goes to step 3, says so, and is killed."""
    store = TCPStore("127.0.0.1", port, None, role == "server", timedelta(seconds=30), wait_for_workers=False)
    if role == "server":
        print(store.port, flush=True)

    def each(step: int) -> None:
        if step == 3:
            print("step 3", flush=True)
            time.sleep(100)

    walk(open_exchange(store, 2, int(role == "client"), timeout=60.0), 10**6, each=each)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
