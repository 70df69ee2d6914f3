"""A stream by itself: in a plain loop, in torch's loader and in torchdata's."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch.distributed
import torch.utils.data._utils.worker as torch_worker
from support.node_cases import NumberedShards, is_kept, noisy, scan
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    ShardError,
    StateError,
    StateMismatchError,
)
from lightning_stateful.state import sealed
from lightning_stateful.streams import ChunkedDataset, MixedStream, Stream, as_stream
from lightning_stateful.testing import ResumeContract

SIZES = (5, 0, 3, 8, 1)
TOTAL = sum(SIZES)


def numbered(*sizes: int, seed: int = 0, **options: Any) -> Stream:
    """A stream of numbered samples."""
    stream = as_stream(NumberedShards(sizes or SIZES, **options), seed)
    assert stream is not None
    return stream


def chunked(*sizes: int, **options: Any) -> ChunkedDataset:
    """Consecutive numbers in chunks."""
    sizes = sizes or SIZES
    refs = [(sum(sizes[:chunk]), sum(sizes[: chunk + 1])) for chunk in range(len(sizes))]
    return ChunkedDataset(refs, _numbers_between, **{"buffer_size": 4, "seed": 1, **options})


def _numbers_between(ref: tuple[int, int]) -> range:
    return range(*ref)


def after(stream: Stream, number: int) -> Stream:
    """The stream after some samples of a pass."""
    for _ in islice(iter(stream), number):
        pass
    return stream


def loaded(stream: Stream, state: Any) -> Stream:
    """The stream at a state as a checkpoint has it."""
    stream.load_state_dict(json.loads(json.dumps(state)))
    return stream


def share_of(patch: pytest.MonkeyPatch, rank: int, ranks: int, worker: int | None = None, workers: int = 1) -> None:
    """Let this process be one of several."""
    info = None if worker is None else torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=0, dataset=None)
    patch.setattr(torch_worker, "_worker_info", info)
    patch.setattr(torch.distributed, "is_initialized", lambda: True)
    patch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    patch.setattr(torch.distributed, "get_rank", lambda: rank)


class _Laws(ResumeContract):
    """All laws but that on ranks: a stream by itself is one process's share, and says so."""

    num_epochs = 2

    def test_steady(self) -> None:
        """A state has the same keys at every step, down to those of its worker slot."""
        stream = self.make()
        states = [stream.state_dict(), *(stream.state_dict() for _ in stream), stream.state_dict()]
        assert len({(tuple(state), tuple(state["config"]), tuple(state["progress"])) for state in states}) == 1

    def test_rank_free(self, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[override]  # another law
        """Refuses a state of another share."""
        share_of(monkeypatch, 0, 2)
        state = self.make().state_dict()
        its_own = r"share \{'rank': 0, 'ranks': 2, 'worker': 0, 'workers': 1\}, and this process reads the share \{"
        # As many slots may be ranks or workers.
        for rank, *other in ((1, 2), (0, 1), (0, 3), (0, 2, 0, 2), (0, 2, 1, 2), (0, 1, 0, 2)):
            share_of(monkeypatch, rank, *other)
            with pytest.raises(DamagedStateError, match=its_own + f"'rank': {rank}, "):
                self.make().load_state_dict(state)


class TestLawsOfAPipeline(_Laws):
    def make(self, num_replicas: int = 1, rank: int = 0) -> Any:
        return chunked().filter(is_kept).recurrent(scan, 100).windowed(3, 2).map(noisy)

    def make_other(self) -> Any:
        return chunked().filter(is_kept).recurrent(scan, 100).windowed(2, 3).map(noisy)


class TestLawsOfAMixture(_Laws):
    def make(self, num_replicas: int = 1, rank: int = 0) -> Any:
        return MixedStream([chunked(5, 0, 1), chunked(4, seed=5)], weights=[1, 2], stop="cycle")

    def make_other(self) -> Any:
        return MixedStream([chunked(5, 0, 1), chunked(4, seed=5)], weights=[2, 1], stop="cycle")


class TestALoop:
    def test_a_pass_that_was_left_is_begun_again_where_it_was_begun(self) -> None:
        whole = chunked()
        first, second = list(whole), list(whole)
        stream = after(chunked(), 7)
        assert [list(stream), list(stream)] == [first, second]
        resumed = after(loaded(chunked(), after(chunked(), 5).state_dict()), 1)
        assert [list(resumed), list(resumed)] == [first[5:], second]

    def test_the_latest_pass_is_the_one_that_counts(self) -> None:
        stream = chunked()
        first = list(chunked())
        one, other = iter(stream), iter(stream)
        assert [next(one) for _ in range(5)] == first[:5]
        assert [next(other) for _ in range(3)] == first[:3]
        assert list(loaded(chunked(), stream.state_dict())) == first[3:]
        assert list(one) == first[5:]
        # The end of a pass that was left for another is no end of an epoch.
        assert stream.state_dict() == after(chunked(), 3).state_dict()

    def test_an_epoch_can_be_told_and_progress_within_it_stays(self) -> None:
        stream = chunked()
        epochs = [list(stream) for _ in range(3)]
        stream.set_epoch(1)
        assert list(stream) == epochs[1]
        state = after(chunked(), 4).state_dict()
        for epoch, expected in ((0, epochs[0][4:]), (2, epochs[2])):
            resumed = loaded(chunked(), state)
            resumed.set_epoch(epoch)
            assert list(resumed) == expected

    @pytest.mark.parametrize("epoch", [1.5, -1])
    def test_what_is_no_epoch_is_refused(self, epoch: Any) -> None:
        stream = chunked()
        with pytest.raises(ConfigurationError, match=rf"epoch must be .*got {epoch}"):
            stream.set_epoch(epoch)
        assert stream.state_dict()["progress"]["epoch"] == 0

    def test_behind_a_state_of_the_last_sample_comes_the_next_epoch_unless_the_same_is_told(self) -> None:
        stream = chunked()
        epochs = [list(stream) for _ in range(3)]
        state = after(chunked(), TOTAL).state_dict()
        resumed, told = loaded(chunked(), state), loaded(chunked(), state)
        assert [list(resumed), list(resumed)] == epochs[1:]
        told.set_epoch(0)
        assert [list(told), list(told)] == [[], epochs[1]]

    def test_to_know_its_state_a_stream_reads_nothing(self) -> None:
        asked: Counter[str] = Counter()
        stream = numbered(6, asked=asked)
        iterator = iter(stream)
        for number in range(6):
            assert next(iterator) == (0, 0, number)
            for _ in range(3):
                stream.state_dict()
            assert asked["read"] == number + 1
        assert next(iterator, None) is None


def test_reading_in_the_process_leaves_its_generators_alone() -> None:
    stream = chunked(transform=noisy)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for _ in islice(stream, 4):
        assert stream.state_dict()
    assert torch.equal(torch.rand(3), expected)


class TestAPassThatWasLeft:
    @pytest.mark.parametrize("number", [1, 4, TOTAL - 1, TOTAL])
    def test_its_state_is_that_of_one_that_is_held_however_often_it_is_asked_for(self, number: int) -> None:
        asked: Counter[str] = Counter()
        held, left = numbered(), numbered(asked=asked)
        iterator = iter(held)
        for _ in range(number):
            next(iterator)
        state = held.state_dict()
        after(left, number)
        assert [left.state_dict() for _ in range(3)] == [state] * 3
        assert copy.deepcopy(left).state_dict() == state
        # The next pass begins where this one did.
        assert list(left) == list(numbered())

    def test_it_closes_what_it_reads(self) -> None:
        closed: list[int] = []

        def read(ref: int) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                closed.append(ref)

        stream = ChunkedDataset([0], read, buffer_size=2)
        after(stream, 3)
        assert closed == [0]
        stream.state_dict()
        assert closed == [0]

    def test_an_earlier_one_or_one_from_before_another_epoch_says_nothing_any_more(self) -> None:
        stream = chunked()
        earlier, latest = iter(stream), iter(stream)
        list(islice(earlier, 7)), list(islice(latest, 3))
        del earlier
        assert stream.state_dict() == after(chunked(), 3).state_dict()
        stream.set_epoch(4)
        del latest
        progress = stream.state_dict()["progress"]
        assert (progress["epoch"], progress["slot"]) == (4, None)


PIPELINES: dict[str, Any] = {
    "blocks": lambda stream: stream.shuffle(buffer_size=4).map(str),
    "windows": lambda stream: stream.windowed(3, 2),
    "running": lambda stream: stream.recurrent(scan, 1),
    "by sample": lambda stream: MixedStream([stream, chunked(4, 5)], by="sample", weights=[2, 1]),
    "cycle": lambda stream: MixedStream([stream, chunked(4, 5)], stop="cycle"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_what_broke_off_goes_on_at_the_very_sample_once_that_can_be_read(name: str) -> None:
    fails: dict[int, int] = {}
    stream = PIPELINES[name](numbered(7, 3, 9, fails=fails, state_size=len(name) % 2 or None))
    whole = list(stream)
    stream.set_epoch(0)
    fails[2] = 5
    iterator = iter(stream)
    seen: list[tuple[Any, Any]] = []
    with pytest.raises(ShardError):
        seen.extend((sample, stream.state_dict()) for sample in iterator)
    state = seen[-1][1]
    for _ in range(2):
        assert stream.state_dict() == state == copy.deepcopy(stream).state_dict()
        with pytest.raises(ShardError, match="-2"):
            next(iterator)
    fails.clear()
    samples = [sample for sample, _ in seen]
    assert samples + list(loaded(copy.deepcopy(stream), state)) == whole
    assert samples + list(iterator) == whole


@pytest.mark.parametrize("error", [OSError("busy"), KeyboardInterrupt()])
@pytest.mark.parametrize("asks", [False, True])
def test_a_function_that_fails_once_or_is_interrupted_loses_nothing(error: BaseException, asks: bool) -> None:
    raised: list[int] = []

    def shaky(value: int) -> int:
        if value % 4 == 1 and value not in raised:
            raised.append(value)
            raise error
        return value

    stream = chunked().map(shaky)
    iterator, taken, is_over = iter(stream), [], False
    while not is_over:
        try:
            if asks:
                stream.state_dict()
            taken.append(next(iterator))
        except StopIteration:
            is_over = True
        except (ShardError, KeyboardInterrupt):
            pass
    assert taken == list(chunked())
    assert len(raised) == 4


PIECES: list[Any] = [
    lambda stream: stream.map(noisy),
    lambda stream: stream.filter(is_kept),
    lambda stream: stream.windowed(3),
    lambda stream: stream.windowed(2, 3),
    lambda stream: stream.recurrent(scan, 1),
]


class TestSteps:
    def test_steps_do_what_they_say_one_after_the_other(self) -> None:
        stream = chunked(9, shuffle=False)
        piped = stream.filter(lambda n: n % 3).map(lambda n: 10 * n).windowed(2, 2)
        assert list(piped) == [(10, 20), (40, 50), (70, 80)]
        summed = piped.recurrent(lambda total, pair: ((total, pair[0]), total + pair[0]), 7)
        assert list(summed) == [(7, 10), (17, 40), (57, 70)]

    def test_a_running_state_begins_anew_in_every_epoch(self) -> None:
        stream = chunked(3, 3, shuffle=False).recurrent(lambda total, n: (total, total + n), 0)
        assert [list(stream) for _ in range(2)] == [[0, 0, 1, 3, 6, 10]] * 2

    @pytest.mark.parametrize("seed", range(4))
    def test_any_pipeline_goes_on_from_any_sample(self, seed: int) -> None:
        rng = random.Random(seed)
        sizes = [rng.randint(0, 7) for _ in range(rng.randint(1, 5))]
        chosen = [rng.choice(PIECES) for _ in range(rng.randint(0, 4))]

        def make() -> Stream:
            stream = numbered(*sizes, seed=seed, state_size=seed % 2 or None, draws=seed % 3 == 0)
            stream = stream.shuffle(buffer_size=(0, 3, 20)[seed % 3])
            for piece in chosen:
                stream = piece(stream)
            return stream

        epoch, stream = list(make()), make()
        for number in range(len(epoch)):
            state = stream.state_dict()
            assert list(loaded(make(), state)) == epoch[number:]
            stream = after(loaded(make(), state), 1)

    @pytest.mark.parametrize(
        "change",
        [lambda s: s.map(repr), lambda s: s.map(str).filter(is_kept), lambda s: s.map(str).windowed(2), lambda s: s],
        ids=["map", "filter", "windowed", "none"],
    )
    def test_states_of_other_pipelines_are_refused(self, change: Any) -> None:
        with pytest.raises(StateMismatchError, match="steps"):
            change(chunked()).load_state_dict(chunked().map(str).state_dict())


class TestShares:
    @pytest.mark.parametrize(("ranks", "workers"), [(2, 2), (5, 1)])
    def test_ranks_and_workers_have_their_shares_and_together_all(
        self, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served: list[int] = []
        for rank in range(ranks):
            for worker in range(workers):
                share_of(monkeypatch, rank, ranks, worker, workers)
                served += list(chunked(3, 4, 5, 6, 7, 1))
        assert sorted(served) == list(range(26))

    def test_a_stream_that_was_loaded_elsewhere_is_refused_in_a_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = loaded(chunked(), after(chunked(), 7).state_dict())
        # As a worker that is spawned has it.
        copied = pickle.loads(pickle.dumps(stream))
        share_of(monkeypatch, 0, 1, 1, 2)
        with pytest.raises(DamagedStateError, match=r"loaded for the share .*'workers': 1\}, and is read here as"):
            list(copied)

    def test_one_that_was_only_looked_at_begins_anew_in_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copied = pickle.dumps(after(chunked(), 7))
        served: list[int] = []
        for worker in range(2):
            share_of(monkeypatch, 0, 1, worker, 2)
            served += list(pickle.loads(copied))
        assert sorted(served) == list(range(TOTAL))


class TestDamage:
    def test_states_of_a_stream_and_of_a_loader_over_it_are_not_mixed_up(self) -> None:
        loader: Any = patch_dataloader(DataLoader(chunked(), batch_size=1))
        with pytest.raises(DamagedStateError, match="The stream's state is that of a loader"):
            chunked().load_state_dict(loader.state_dict())
        with pytest.raises(StateError, match="The loader's state"):
            loader.load_state_dict(chunked().state_dict())

    def test_a_state_beyond_what_the_slot_was_assigned_is_refused(self) -> None:
        state = copy.deepcopy(after(chunked(), 6).state_dict())
        state["progress"]["slot"]["of"][""]["slice"] = 9
        with pytest.raises(StateError, match=r"The stream's state: Worker slot 0 stands in slice 9 of 1.*checkpoint"):
            chunked().load_state_dict(sealed(state))

    def test_a_state_that_was_refused_leaves_no_trace(self) -> None:
        stream = chunked()
        iterator = iter(stream)
        taken = [next(iterator) for _ in range(4)]
        before = stream.state_dict()
        bad = copy.deepcopy(before)
        bad["progress"]["ranks"] = 3
        for state in (bad, sealed(bad), chunked().map(str).state_dict(), {}):
            with pytest.raises(StateError):
                stream.load_state_dict(state)
        assert stream.state_dict() == before
        assert taken + list(iterator) == list(chunked())


class TestInTorchsLoader:
    def test_every_epoch_has_each_sample_once(self) -> None:
        stream = chunked()
        loader = DataLoader(stream, batch_size=4, num_workers=2, multiprocessing_context="fork")
        epochs = []
        for epoch in range(2):
            stream.set_epoch(epoch)
            epochs.append(torch.cat(list(loader)).tolist())
        assert [sorted(epoch) for epoch in epochs] == [list(range(TOTAL))] * 2
        assert epochs[0] != epochs[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
class TestInTorchdatasLoader:
    def loader(self, num_workers: int) -> Any:
        return StatefulDataLoader(
            chunked(5, 9, 3, 8, 1, 12, 7, 7).map(noisy),
            batch_size=3,
            num_workers=num_workers,
            collate_fn=list,
            multiprocessing_context="fork" if num_workers else None,
        )

    @pytest.mark.parametrize(("num_workers", "stops"), [(0, 1), (2, 6)])
    def test_a_run_stopped_anywhere_goes_on_exactly(self, num_workers: int, stops: int) -> None:
        whole = list(self.loader(num_workers))
        for number in (*range(0, len(whole), stops), len(whole)):
            stopped, resumed = self.loader(num_workers), self.loader(num_workers)
            iterator = iter(stopped)
            taken = [next(iterator) for _ in range(number)]
            resumed.load_state_dict(stopped.state_dict())
            del iterator, stopped
            assert taken + list(resumed) == whole

    def test_epochs_after_a_resume_are_those_that_would_have_come(self) -> None:
        whole, stopped, resumed = self.loader(0), self.loader(0), self.loader(0)
        epochs = [list(whole) for _ in range(3)]
        list(stopped)
        iterator = iter(stopped)
        for _ in range(4):
            next(iterator)
        resumed.load_state_dict(stopped.state_dict())
        assert [list(resumed), list(resumed)] == [epochs[1][4:], epochs[2]]
