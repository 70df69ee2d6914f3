"""A stream by itself: in a plain loop, in torch's loader and in torchdata's, and what is done to its samples."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from support.shards import NumberedShards, Value, add_up, drawn, is_no_third, read_numbers, with_draws, write_chunks
from torch.utils.data import DataLoader
from torch.utils.data import get_worker_info as get_worker_info_of_torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful import patch_dataloader
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    ShardError,
    StateError,
    StateMismatchError,
    StateVersionError,
)
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.state import sealed
from lightning_stateful.streams import ChunkedDataset, MixedStream, Stream, as_stream, reading
from lightning_stateful.streams import stream as module
from lightning_stateful.testing import ResumeContract

SIZES = (5, 0, 3, 8, 1)
TOTAL = sum(SIZES)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """States of shards of a few samples, and randomness as it was."""
    monkeypatch.setattr(reading, "_LEAST_GAP", 1)
    with keep_randomness():
        yield


def numbered(*sizes: int, seed: int = 0, **options: Any) -> Stream:
    """A stream of numbered samples."""
    stream = as_stream(NumberedShards(sizes or SIZES, **options), seed)
    assert stream is not None
    return stream


def chunked(*sizes: int, **options: Any) -> ChunkedDataset:
    """Consecutive numbers in chunks."""
    firsts = [sum((sizes or SIZES)[:chunk]) for chunk in range(len(sizes or SIZES))]
    refs = [(first, first + size) for first, size in zip(firsts, sizes or SIZES, strict=True)]
    return ChunkedDataset(refs, _numbers_between, **{"buffer_size": 4, "seed": 1, **options})


def _numbers_between(ref: tuple[int, int]) -> range:
    return range(*ref)


def share_of(
    monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, worker: int | None = None, workers: int = 1
) -> None:
    """Let this process be one of several."""
    info = None if worker is None else type("Info", (), {"id": worker, "num_workers": workers})
    monkeypatch.setattr(module, "get_worker_info", lambda: info)
    monkeypatch.setattr(module, "detect_topology", lambda: Topology(num_replicas=ranks, rank=rank))


class _Laws(ResumeContract):
    """All laws but that on ranks: a stream by itself is one process's share, and says so."""

    num_epochs = 2

    def test_steady(self) -> None:
        """A state has the same keys at every step, down to the place: that is of the portion that is open."""
        stream = self.make()
        states = [stream.state_dict(), *(stream.state_dict() for _ in stream), stream.state_dict()]
        assert len({(tuple(state), tuple(state["config"]), tuple(state["progress"])) for state in states}) == 1

    def test_rank_free(self, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[override]  # another law
        """Refuses a state of another share."""
        share_of(monkeypatch, 0, 2)
        state = self.make().state_dict()
        its_own = r"share \{'rank': 0, 'ranks': 2, 'worker': 0, 'workers': 1\}, and this process reads the share \{"
        # As many lanes may be ranks or workers.
        for rank, *other in ((1, 2), (0, 1), (0, 3), (0, 2, 0, 2), (0, 2, 1, 2), (0, 1, 0, 2)):
            share_of(monkeypatch, rank, *other)
            with pytest.raises(DamagedStateError, match=its_own + f"'rank': {rank}, "):
                self.make().load_state_dict(state)


class TestLawsOfChunks(_Laws):
    def make(self, num_replicas: int = 1, rank: int = 0) -> Any:
        return chunked(transform=with_draws)

    def make_other(self) -> Any:
        return chunked(transform=with_draws, seed=2)


class TestLawsOfShardsWithStates(_Laws):
    def make(self, num_replicas: int = 1, rank: int = 0) -> Any:
        return numbered(state_size=20).shuffle(buffer_size=6)

    def make_other(self) -> Any:
        return numbered(state_size=20).shuffle(buffer_size=7)


class TestLawsOfAPipeline(_Laws):
    def make(self, num_replicas: int = 1, rank: int = 0) -> Any:
        return chunked().filter(is_no_third).recurrent(add_up, 100).windowed(3, 2).map(with_draws)

    def make_other(self) -> Any:
        return chunked().filter(is_no_third).recurrent(add_up, 100).windowed(2, 3).map(with_draws)


class TestLawsOfAMixture(_Laws):
    def make(self, num_replicas: int = 1, rank: int = 0) -> Any:
        return MixedStream([chunked(5, 0, 1), chunked(4, seed=5)], weights=[1, 2], stop="cycle")

    def make_other(self) -> Any:
        return MixedStream([chunked(5, 0, 1), chunked(4, seed=5)], weights=[2, 1], stop="cycle")


class TestALoop:
    def test_an_epoch_follows_the_other_and_each_sample_comes_once(self) -> None:
        stream = chunked()
        epochs = [list(stream) for _ in range(4)]
        assert all(sorted(epoch) == list(range(TOTAL)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 4

    def test_a_pass_that_was_left_is_begun_again_where_it_was_begun(self) -> None:
        stream = chunked()
        first = list(stream)
        second = list(stream)
        stream = chunked()
        for number, _ in enumerate(stream):
            if number == 6:
                break
        assert [list(stream), list(stream)] == [first, second]
        resumed = chunked()
        stopped = chunked()
        iterator = iter(stopped)
        for _ in range(5):
            next(iterator)
        resumed.load_state_dict(stopped.state_dict())
        for _ in resumed:
            break
        assert [list(resumed), list(resumed)] == [first[5:], second]

    def test_the_latest_pass_is_the_one_that_counts(self) -> None:
        stream = chunked()
        first = list(chunked())
        one, other = iter(stream), iter(stream)
        assert [next(one) for _ in range(5)] == first[:5]
        assert [next(other) for _ in range(3)] == first[:3]
        resumed = chunked()
        resumed.load_state_dict(stream.state_dict())
        assert list(resumed) == first[3:]
        assert list(one) == first[5:]
        # The end of a pass that was left for another is no end of an epoch.
        assert stream.state_dict() == resumed_after(stream, 3).state_dict()

    def test_an_epoch_can_be_told_and_a_place_within_it_stays(self) -> None:
        stream = chunked()
        epochs = [list(stream) for _ in range(3)]
        stream.set_epoch(1)
        assert list(stream) == epochs[1]
        stopped = resumed_after(chunked(), 4)
        resumed = chunked()
        resumed.load_state_dict(stopped.state_dict())
        resumed.set_epoch(0)
        assert list(resumed) == epochs[0][4:]
        resumed.load_state_dict(stopped.state_dict())
        resumed.set_epoch(2)
        assert list(resumed) == epochs[2]
        with pytest.raises(ConfigurationError, match="epoch"):
            resumed.set_epoch(1.5)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(ConfigurationError, match="epoch must be at least 0, got -1"):
            resumed.set_epoch(-1)
        assert resumed.state_dict()["progress"]["epoch"] == 3

    def test_asking_for_a_state_at_every_sample_changes_nothing(self) -> None:
        stream = chunked().recurrent(add_up, 0).windowed(2)
        samples = []
        for sample in stream:
            samples.append(sample)
            json.dumps(stream.state_dict())
        assert samples == list(chunked().recurrent(add_up, 0).windowed(2))

    def test_a_pass_can_be_resumed_by_itself_be_it_at_its_end(self) -> None:
        whole = list(chunked().recurrent(add_up, 0))
        iterator: Any = iter(chunked().recurrent(add_up, 0))
        for number in range(TOTAL + 1):
            state = json.loads(json.dumps(iterator.state_dict()))
            resumed: Any = iter(chunked().recurrent(add_up, 0))
            resumed.load_state_dict(state)
            # Unlike a stream, which then begins the next epoch, a pass stays at its end.
            assert list(resumed) == whole[number:]
            assert next(iterator, None) == (whole[number] if number < TOTAL else None)

    def test_a_state_of_the_last_sample_is_that_of_the_next_epoch(self) -> None:
        whole = chunked()
        epochs = [list(whole), list(whole)]
        stopped, resumed = resumed_after(chunked(), TOTAL), chunked()
        state = stopped.state_dict()
        assert (state["progress"]["epoch"], state["progress"]["place"]) == (1, None)
        resumed.load_state_dict(state)
        assert list(resumed) == epochs[1]

    def test_to_know_its_state_a_stream_reads_one_sample_ahead_and_never_two(self) -> None:
        asked: Counter[str] = Counter()
        stream = numbered(6, asked=asked)
        iterator = iter(stream)
        taken = []
        for number in range(6):
            taken.append(next(iterator))
            for _ in range(3):
                stream.state_dict()
            assert asked["read"] == min(number + 2, 6)
        assert taken == list(numbered(6))
        assert next(iterator, None) is None

    def test_a_stream_without_a_sample_is_an_empty_epoch(self) -> None:
        stream = numbered(0, 0)
        assert [list(stream), list(stream)] == [[], []]
        assert stream.state_dict()["progress"]["epoch"] == 2

    def test_nothing_is_read_before_the_first_sample_is_asked_for(self) -> None:
        asked: Counter[str] = Counter()
        stream = numbered(4, asked=asked)
        iterator = iter(stream)
        stream.state_dict()
        assert not asked
        next(iterator)
        assert asked["read"] == 1


class TestAPassThatWasLeft:
    @pytest.mark.parametrize("number", [1, 4, TOTAL - 1, TOTAL])
    def test_its_state_is_that_of_one_that_is_held_however_often_it_is_asked_for(self, number: int) -> None:
        asked: Counter[str] = Counter()
        held, left = numbered(asked=Counter(), state_size=3), numbered(asked=asked, state_size=3)
        iterator = iter(held)
        for _ in range(number):
            next(iterator)
        state = held.state_dict()
        for _ in islice(left, number):
            pass
        assert asked["opened"] == asked["closed"]
        for _ in range(3):
            assert left.state_dict() == state
            assert asked["opened"] == asked["closed"]
        assert copy.deepcopy(left).state_dict() == state
        # The next pass begins where this one did.
        assert list(left) == list(numbered())

    def test_one_that_looked_ahead_lost_nothing(self) -> None:
        stream = chunked()
        iterator = iter(stream)
        taken = [next(iterator) for _ in range(5)]
        state = stream.state_dict()
        del iterator
        assert stream.state_dict() == state
        resumed = chunked()
        resumed.load_state_dict(state)
        assert taken + list(resumed) == list(chunked())

    def test_an_earlier_one_or_one_from_before_another_epoch_says_nothing_any_more(self) -> None:
        stream = chunked()
        earlier, latest = iter(stream), iter(stream)
        for iterator, number in ((earlier, 7), (latest, 3)):
            for _ in range(number):
                next(iterator)
        del earlier, iterator
        assert stream.state_dict() == resumed_after(chunked(), 3).state_dict()
        stream.set_epoch(4)
        del latest
        assert (stream.state_dict()["progress"]["epoch"], stream.state_dict()["progress"]["place"]) == (4, None)


class TestErrors:
    """What broke off goes on at the very sample, once that can be read, and without a word of it in a state."""

    def streams(self) -> Iterator[tuple[str, Stream, dict[int, int]]]:
        for name in ("plain", "blocks", "by state", "windows", "running", "by sample", "cycle"):
            fails: dict[int, int] = {}
            stream = numbered(7, 3, 9, fails=fails, state_size=1 if name == "by state" else None)
            shards: Any = stream.sources[""].shards
            shards.fails = fails
            other = as_stream(NumberedShards((4, 5), label="other"), 1)
            yield name, {
                "plain": lambda stream=stream: stream,
                "blocks": lambda stream=stream: stream.shuffle(buffer_size=4).map(str),
                "by state": lambda stream=stream: stream.filter(_kept),
                "windows": lambda stream=stream: stream.windowed(3, 2),
                "running": lambda stream=stream: stream.recurrent(_chain, 1),
                "by sample": lambda s=stream, o=other: MixedStream([s, o], by="sample", weights=[2, 1]),
                "cycle": lambda s=stream, o=other: MixedStream([s, o], stop="cycle"),
            }[name](), fails  # fmt: skip

    def test_next_raises_until_the_shard_is_mended_and_then_goes_on(self) -> None:
        for name, stream, fails in self.streams():
            whole = list(stream)
            stream.set_epoch(0)
            for shard, number in ((0, 2), (0, 0), (2, 8), (2, -1), (1, 1)):
                fails[shard] = number
                iterator, taken = iter(stream), []
                for _ in range(2):
                    with pytest.raises(ShardError, match=f"-{shard}"):
                        taken.extend(iterator)
                assert len(taken) < len(whole)
                fails.clear()
                assert taken + list(iterator) == whole, (name, shard, number)
                stream.set_epoch(0)

    def test_a_state_where_the_next_sample_is_bad_is_that_before_it_and_next_says_what_is_wrong(self) -> None:
        for name, stream, fails in self.streams():
            whole = list(stream)
            stream.set_epoch(0)
            fails[2] = 5
            iterator = iter(stream)
            seen: list[tuple[Any, Any]] = []
            with pytest.raises(ShardError):
                seen.extend((sample, stream.state_dict()) for sample in iterator)
            state = json.loads(json.dumps(seen[-1][1]))
            for _ in range(2):
                assert stream.state_dict() == state == copy.deepcopy(stream).state_dict()
                with pytest.raises(ShardError, match="-2"):
                    next(iterator)
            del iterator
            assert stream.state_dict() == state
            fails.clear()
            stream.load_state_dict(state)
            assert [sample for sample, _ in seen] + list(stream) == whole, name

    def test_a_function_that_fails_once_or_is_interrupted_loses_nothing(self) -> None:
        for error in (OSError("busy"), KeyboardInterrupt()):
            for asks in (False, True):
                raised: list[int] = []

                def shaky(value: int, error: BaseException = error, raised: list[int] = raised) -> int:
                    if value % 4 == 1 and value not in raised:
                        raised.append(value)
                        raise error
                    return value

                stream = chunked().map(shaky)
                iterator, taken, failed = iter(stream), [], 0
                while True:
                    try:
                        if asks:
                            stream.state_dict()
                        taken.append(next(iterator))
                    except StopIteration:
                        break
                    except (ShardError, KeyboardInterrupt):
                        failed += 1
                assert taken == list(chunked())
                assert len(raised) == 4

    def test_an_earlier_pass_that_goes_on_after_an_error_is_not_the_latest(self) -> None:
        fails = {0: 3}
        stream = numbered(6, fails=fails)
        shards: Any = stream.sources[""].shards
        shards.fails = fails
        earlier = iter(stream)
        with pytest.raises(ShardError):
            list(earlier)
        latest = iter(stream)
        next(latest)
        fails.clear()
        assert len(list(earlier)) == 3
        assert stream.state_dict() == resumed_after(numbered(6), 1).state_dict()


def resumed_after(stream: Stream, number: int) -> Stream:
    """The stream after some samples of a pass."""
    iterator = iter(stream)
    for _ in range(number):
        next(iterator)
    return stream


class TestSteps:
    def test_steps_do_what_they_say_one_after_the_other(self) -> None:
        stream = chunked(9, shuffle=False)
        assert list(stream.map(str)) == list("012345678")
        assert list(stream.filter(is_no_third)) == [1, 2, 4, 5, 7, 8]
        assert list(stream.windowed(4, 3)) == [(0, 1, 2, 3), (3, 4, 5, 6)]
        assert list(stream.recurrent(add_up, 0)) == [(n, n * (n + 1) // 2) for n in range(9)]
        piped = stream.filter(is_no_third).map(lambda number: 10 * number).windowed(2, 2).recurrent(_count, 7)
        assert list(piped) == [(7, (10, 20)), (8, (40, 50)), (9, (70, 80))]

    def test_windows_come_of_what_is_shuffled_and_run_over_shards(self) -> None:
        stream = chunked()
        windows = list(stream.windowed(3))
        samples = list(chunked())
        assert windows == [tuple(samples[first : first + 3]) for first in range(TOTAL - 2)]

    @pytest.mark.parametrize("seed", range(10))
    def test_any_pipeline_goes_on_from_any_sample_of_any_epoch(self, seed: int) -> None:
        rng = random.Random(seed)
        sizes = [rng.randint(0, 7) for _ in range(rng.randint(1, 5))]
        chosen = [rng.choice(PIECES) for _ in range(rng.randint(0, 4))]
        block = rng.choice([0, 3, 20])

        def make() -> Stream:
            stream = numbered(*sizes, seed=seed, state_size=seed % 2 or None, draws=seed % 3 == 0)
            stream = stream.shuffle(buffer_size=block) if block else stream
            for piece in chosen:
                stream = piece(stream)
            return stream

        whole = make()
        epochs = [list(whole), list(whole)]
        stopped = make()
        for epoch in epochs:
            iterator = iter(stopped)
            for number in range(len(epoch) + 1):
                if number < len(epoch):
                    # What follows from the end is a law.
                    state = json.loads(json.dumps(stopped.state_dict()))
                    resumed = make()
                    resumed.load_state_dict(state)
                    assert list(resumed) == epoch[number:], (chosen, number)
                # One is stopped again and again.
                if number < len(epoch) and rng.random() < 0.3:
                    stopped = make()
                    stopped.load_state_dict(state)
                    iterator = iter(stopped)
                assert next(iterator, None) == (epoch[number] if number < len(epoch) else None)

    def test_a_running_state_begins_anew_in_every_epoch_and_in_every_worker(self) -> None:
        stream = chunked(3, 3, shuffle=False).recurrent(add_up, 0)
        sums = [0, 1, 3, 6, 10, 15]
        assert [[total for _, total in stream] for _ in range(2)] == [sums, sums]

    def test_widths_and_steps_out_of_range_are_refused(self) -> None:
        for width, step in ((0, 1), (1, 0), (-2, 1)):
            with pytest.raises(ConfigurationError, match="width" if width < 1 else "step"):
                list(chunked().windowed(width, step))
        with pytest.raises(ConfigurationError, match="width"):
            chunked().windowed(1.5)  # type: ignore[arg-type]  # that is the point

    @pytest.mark.parametrize("change", ["map", "filter", "windowed", "recurrent", "order"])
    def test_states_of_other_pipelines_are_refused(self, change: str) -> None:
        base = chunked().map(str)
        others: dict[str, Stream] = {
            "map": chunked().map(repr),
            "filter": chunked().map(str).filter(is_no_third),
            "windowed": chunked().map(str).windowed(2),
            "recurrent": chunked().map(str).recurrent(_count, 0),
            "order": chunked(),
        }
        with pytest.raises(StateMismatchError, match="steps"):
            others[change].load_state_dict(base.state_dict())


def _count(state: int, value: Any) -> tuple[Any, int]:
    return (state, value), state + 1


def _noisy(value: Any) -> Any:
    return str(value), drawn()


def _kept(value: Any) -> bool:
    return len(repr(value)) % 4 > 0


def _chain(state: int, value: Any) -> tuple[Any, int]:
    state = (state * 31 + len(repr(value)) + sum(map(ord, repr(value)[-9:]))) % 10_007
    return (state, value), state


PIECES: list[Any] = [
    lambda stream: stream.map(_noisy),
    lambda stream: stream.filter(_kept),
    lambda stream: stream.windowed(3),
    lambda stream: stream.windowed(2, 3),
    lambda stream: stream.recurrent(_chain, 1),
]


class TestShares:
    def test_ranks_and_workers_have_their_shares_and_together_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for ranks, workers in ((1, 1), (2, 1), (2, 2), (3, 2)):
            served: list[int] = []
            for rank in range(ranks):
                for worker in range(workers):
                    share_of(monkeypatch, rank, ranks, worker, workers)
                    served += list(chunked(3, 4, 5, 6, 7, 1))
            assert sorted(served) == list(range(26))

    def test_a_process_group_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
        stream = numbered()
        assert {value[2] for value in stream} == {3}
        position = stream.state_dict()["progress"]
        assert {name: position[name] for name in ("rank", "ranks", "worker", "workers")} == {
            "rank": 3, "ranks": 5, "worker": 0, "workers": 1,
        }  # fmt: skip

    def test_a_share_goes_on_where_it_stands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        share_of(monkeypatch, 1, 2, 1, 2)
        whole = [list(stream := chunked(6, 5, 7, 8, 2, 9, 4, 4)), list(stream)]
        for number in range(len(whole[0])):
            stopped, resumed = resumed_after(chunked(6, 5, 7, 8, 2, 9, 4, 4), number), chunked(6, 5, 7, 8, 2, 9, 4, 4)
            resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
            assert [list(resumed), list(resumed)] == [whole[0][number:], whole[1]]

    def test_a_mixture_of_as_many_lanes_in_another_arrangement_is_refused_or_goes_on_exactly(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def make() -> MixedStream:
            return MixedStream([chunked(20, 20), chunked(20, 20)], weights=[2, 1])

        share_of(monkeypatch, 1, 2)
        whole = list(make())
        stopped = resumed_after(make(), 7)
        state = stopped.state_dict()
        share_of(monkeypatch, 0, 1, 1, 2)
        resumed = make()
        try:
            resumed.load_state_dict(state)
        except StateError:
            return
        assert list(resumed) == whole[7:]

    @pytest.mark.parametrize("how", ["loaded", "looked at and pickled"])
    def test_workers_of_a_process_whose_stream_stands_somewhere_lose_and_repeat_nothing(
        self, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = list(ChunkedDataset([range(20), range(20, 40)], list, buffer_size=4))
        stream = ChunkedDataset([range(20), range(20, 40)], list, buffer_size=4)
        begun = resumed_after(stream, 7)
        if how == "loaded":
            stream = ChunkedDataset([range(20), range(20, 40)], list, buffer_size=4)
            stream.load_state_dict(begun.state_dict())
        served: list[int] = []
        for worker in range(2):
            share_of(monkeypatch, 0, 1)
            # As a worker that is spawned has it.
            copied = pickle.loads(pickle.dumps(stream))
            share_of(monkeypatch, 0, 1, worker, 2)
            try:
                served += list(copied)
            except StateError:
                return
        assert sorted(served) in (sorted(whole), sorted(whole[7:]))


class TestDamage:
    def state(self) -> dict[str, Any]:
        return copy.deepcopy(resumed_after(chunked().recurrent(add_up, 0), 6).state_dict())

    def load(self, state: Any) -> list[Any]:
        stream = chunked().recurrent(add_up, 0)
        stream.load_state_dict(state)
        return list(stream)

    def test_a_state_that_is_none_is_refused(self) -> None:
        for state in (None, {}, [], {"version": 1}):
            with pytest.raises(DamagedStateError):
                self.load(state)
        with pytest.raises(StateVersionError):
            self.load({**self.state(), "version": 99})

    def test_states_of_a_stream_and_of_a_loader_over_it_are_not_mixed_up(self) -> None:
        loader: Any = patch_dataloader(DataLoader(chunked(), batch_size=1))
        with pytest.raises(DamagedStateError, match="The stream's state is that of a loader"):
            chunked().load_state_dict(loader.state_dict())
        with pytest.raises(
            DamagedStateError, match=r"The loader's state: progress\.cycle must be an int, got None\. Res"
        ):
            loader.load_state_dict(chunked().state_dict())

    def test_a_state_that_was_refused_leaves_no_trace(self) -> None:
        stream = chunked().recurrent(add_up, 0)
        expected = list(chunked().recurrent(add_up, 0))
        iterator = iter(stream)
        taken = [next(iterator) for _ in range(4)]
        before = json.dumps(stream.state_dict())
        bad = self.state()
        bad["progress"]["ranks"] = 3
        for state in (bad, sealed(bad), chunked().state_dict(), {}):
            with pytest.raises(StateError):
                stream.load_state_dict(state)
        assert json.dumps(stream.state_dict()) == before
        assert taken + list(iterator) == expected


class TestInTorchsLoader:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_every_epoch_has_each_sample_once_in_batches(self, num_workers: int, tmp_path: Path) -> None:
        stream = ChunkedDataset(write_chunks(tmp_path, SIZES), read_numbers, buffer_size=4).map(float)
        context = "fork" if num_workers else None
        loader = DataLoader(stream, batch_size=4, num_workers=num_workers, multiprocessing_context=context)
        epochs = []
        for epoch in range(2):
            stream.set_epoch(epoch)
            batches = list(loader)
            assert all(1 <= len(batch) <= 4 for batch in batches)
            epochs.append(torch.cat(batches).int().tolist())
        assert [sorted(epoch) for epoch in epochs] == [list(range(TOTAL))] * 2
        assert epochs[0] != epochs[1]

    def test_workers_know_who_they_are(self) -> None:
        stream = chunked().map(_worker)
        loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert Counter(loader) == Counter(
            worker for worker in range(2) for value in _share(chunked(), worker) for _ in [value]
        )


def _worker(value: Any) -> int:
    info: Any = get_worker_info_of_torch()
    return int(info.id)


def _share(stream: Stream, worker: int) -> list[Any]:
    order = stream.sources[""].order(0)
    return [number for chunk in order[worker::2] for number in range(SIZES[chunk])]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
class TestInTorchdatasLoader:
    def loader(self, num_workers: int, batch_size: int | None = 3, *sizes: int) -> Any:
        stream = chunked(*(sizes or (5, 9, 3, 8, 1, 12, 7, 7))).map(with_draws)
        return StatefulDataLoader(
            stream,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=list if batch_size else None,
            multiprocessing_context="fork" if num_workers else None,
        )

    def go_on(self, stops: Any, *args: Any) -> list[int]:
        """Where a run that was stopped goes on otherwise than one that was not."""
        whole = list(self.loader(*args))
        wrong = []
        for number in range(len(whole)) if stops is None else stops:
            stopped, resumed = self.loader(*args), self.loader(*args)
            iterator = iter(stopped)
            taken = [next(iterator) for _ in range(number)]
            resumed.load_state_dict(stopped.state_dict())
            del iterator, stopped
            if taken + list(resumed) != whole:
                wrong.append(number)
        return wrong

    @pytest.mark.parametrize("batch_size", [None, 1, 3, 52])
    def test_a_run_stopped_anywhere_goes_on_exactly(self, batch_size: int | None) -> None:
        assert self.go_on(None, 0, batch_size) == []

    def test_epochs_after_a_resume_are_those_that_would_have_come(self) -> None:
        whole, stopped, resumed = self.loader(0), self.loader(0), self.loader(0)
        epochs = [list(whole) for _ in range(3)]
        list(stopped)
        iterator = iter(stopped)
        for _ in range(4):
            next(iterator)
        resumed.load_state_dict(stopped.state_dict())
        assert list(resumed) == epochs[1][4:]
        assert list(resumed) == epochs[2]

    def test_with_workers_a_run_stopped_in_the_middle_goes_on_exactly(self) -> None:
        assert self.go_on((0, 5, 11), 2) == []

    def test_with_workers_that_end_unevenly_a_run_goes_on_exactly(self) -> None:
        # Worker 0 has one batch, and worker 1 six.
        whole = list(self.loader(2, 4, *self.uneven()))
        assert len(whole) == 7
        assert self.go_on((4,), 2, 4, *self.uneven()) == []

    def uneven(self) -> tuple[int, int]:
        """Sizes of two chunks of which the first to be read is small."""
        order = chunked(1, 1).sources[""].order(0)
        return (4, 24) if order[0] == 0 else (24, 4)


class TestStreams:
    def test_shuffling_keeps_what_it_is_not_told(self) -> None:
        stream = numbered(seed=6).shuffle(buffer_size=3)
        assert stream.sources[""].seed == 6
        assert stream.shuffle(buffer_size=3, seed=7).sources[""].seed == 7
        assert list(stream) != list(numbered(seed=6))
        assert sorted(stream) == sorted(_of_epoch(numbered(), 1))

    def test_changes_leave_the_stream_they_are_made_to(self) -> None:
        stream = numbered()
        samples = list(numbered())
        stream.map(str), stream.shuffle(buffer_size=9), stream.filter(bool)
        assert list(stream) == samples

    def test_a_stream_of_shards_is_read_by_its_configuration(self) -> None:
        stream = numbered().shuffle(buffer_size=5)
        config = stream.config(batch_size=3, drop_last=True)
        assert (config.batch_size, config.drop_last, config.mixing) == (3, True, None)
        assert config.describe()["buffer_size"] == 5
        assert replace(config, batch_size=4).describe() != config.describe()


def _of_epoch(stream: Stream, epoch: int) -> list[Value]:
    shards: Any = stream.sources[""].shards
    found: list[Value] = shards.all(epoch)
    return found
