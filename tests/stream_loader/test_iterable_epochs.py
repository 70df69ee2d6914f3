"""Iterable datasets remember from epoch to epoch what they remember in torch, with and without a resume."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
from support.iterable_cases import (
    ENDLESS,
    KINDS,
    Counts,
    CountsAtEnd,
    CountsWithState,
    Ends,
    GoesOnWithState,
    Itself,
    ItselfWithState,
    Numbers,
    OnIterator,
    Tokens,
    Told,
    ToldWithState,
)
from support.stream_cases import InThisProcess, chunks, plain, read_numbers, stream_loader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import ShardError, StatefulWarning, StateMismatchError

pytestmark = [pytest.mark.filterwarnings("ignore:.*were read again"), pytest.mark.filterwarnings("ignore:.*no batch")]

WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "fresh workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent workers": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
}
# In workers, others keep as much from pass to pass; without any, all kinds are quick.
IN_WORKERS = {
    "fresh workers": (CountsAtEnd, ItselfWithState, Tokens),
    "persistent workers": (Counts, GoesOnWithState),
}
CASES = [
    pytest.param(
        kind,
        workers,
        limit,
        drop_last,
        id=f"{kind.__name__}-{workers}-{limit}{'-drop_last' if drop_last else ''}",
        marks=pytest.mark.slow
        if kind not in IN_WORKERS.get(workers, KINDS) or (drop_last and workers != "no workers")
        else (),
    )
    for kind in KINDS
    for workers in WORKERS
    for limit in (None, 3)
    for drop_last in (False, True)
    # Processes take long: there, epochs are cut of what has no end only.
    if (limit and workers == "no workers") or bool(limit) == (kind in ENDLESS)
    if not drop_last or not limit
]


def user_loader(kind: Any, workers: str, **options: Any) -> DataLoader[Any]:
    return DataLoader(kind(), batch_size=2, **WORKERS[workers], **options)


def patched(kind: Any, workers: str, **options: Any) -> Any:
    """The loader of this package; workers that end with an epoch run in this process, which takes less time."""
    if workers == "fresh workers":
        return stream_loader(kind(), kind=InThisProcess, **WORKERS[workers], **options)
    return patch_dataloader(user_loader(kind, workers, **options))


def epochs_of(loader: Any, dataset: Any, limit: int | None, epochs: range) -> list[list[Any]]:
    """The batches of epochs, as a loop has them that tells the epoch."""
    found = []
    for epoch in epochs:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        found.append([plain(batch) for batch in islice(loader, limit)])
    return found


def in_torch(kind: Any, workers: str, limit: int | None, **options: Any) -> list[list[Any]]:
    if workers == "persistent workers" and kind is Told:
        # In torch nobody can tell them; here they are told.
        workers = "fresh workers"
    loader = user_loader(kind, workers, **options)
    return epochs_of(loader, loader.dataset, limit, range(3))


@pytest.mark.parametrize(("kind", "workers", "limit", "drop_last"), CASES)
def test_epochs_are_those_of_torch_and_so_are_they_after_a_resume(
    kind: Any, workers: str, limit: int | None, drop_last: bool
) -> None:
    expected = in_torch(kind, workers, limit, drop_last=drop_last)
    loader = patched(kind, workers, drop_last=drop_last)
    states: dict[tuple[int, int], Any] = {}
    found: list[list[Any]] = []
    for epoch in range(3):
        found.append([])
        for step, batch in enumerate(islice(loader, limit), 1):
            found[-1].append(plain(batch))
            states[epoch, step] = loader.state_dict()
        if limit:
            loader.set_epoch(epoch + 1)
        states[epoch + 1, 0] = loader.state_dict()

    if (kind, workers) == (ToldWithState, "persistent workers"):
        # In torch nobody can tell them the epoch.
        expected = found
    assert found == expected
    for (epoch, step), state in states.items():
        last = len(expected[epoch]) - 1 if epoch < 2 else 0
        # Processes take long.
        steps = (0, 1, last) if not WORKERS[workers] else (0, 1) if epoch else (last,)
        if epoch > 1 or step not in steps or (limit and not expected[epoch][step:]):
            continue
        resumed = patched(kind, workers, drop_last=drop_last)
        resumed.load_state_dict(state)
        again = [[plain(batch) for batch in islice(resumed, *([None] if limit is None else [limit - step]))]]
        if limit:
            resumed.set_epoch(epoch + 1)
        again.append([plain(batch) for batch in islice(resumed, limit)])
        # Where nothing is left of an epoch, the first loop is that of the next.
        left = [batches for batches in (expected[epoch][step:], *expected[epoch + 1 :]) if batches]
        assert again[: len(left)] == left[:2], (epoch, step)


class BySeedOfWorker(IterableDataset[int]):
    """Shuffles by the seed of its worker, which persistent workers keep."""

    def __iter__(self) -> Iterator[int]:
        worker: Any = get_worker_info()
        yield from random.Random(worker.seed).sample(range(worker.id, 12, 2), 6)


@pytest.mark.parametrize("workers", ["fresh workers", "persistent workers"])
def test_workers_have_the_seed_again_that_they_were_started_with(workers: str) -> None:
    def run(state: Any = None, stop: int = 18) -> tuple[list[Any], Any]:
        loader, found = patch_dataloader(user_loader(BySeedOfWorker, workers)), list[Any]()
        if state is not None:
            loader.load_state_dict(state)
        while len(found) < stop:
            for batch in loader:
                found.append(plain(batch))
                if len(found) == stop:
                    break
        return found, loader.state_dict()

    whole, _ = run()
    assert (whole[:6] == whole[6:12] == whole[12:]) is (workers == "persistent workers")
    for stop in (6, 9):
        before, state = run(stop=stop)
        assert before + run(state, 18 - stop)[0] == whole


def test_a_state_from_behind_the_last_batch_says_that_the_first_loop_is_the_next_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def resumed_at(state: Any) -> tuple[Any, str]:
        caplog.clear()
        loader = patch_dataloader(user_loader(Counts, "no workers"))
        loader.load_state_dict(state)
        return [plain(batch) for batch in loader], caplog.text

    whole = patch_dataloader(user_loader(Counts, "no workers"))
    states = [whole.state_dict() for _ in whole]
    second = [plain(batch) for batch in whole]
    assert "epoch 0, which a dataset without length shows only now. This pass is epoch 1" in resumed_at(states[-1])[1]
    assert resumed_at(states[-1])[0] == second
    assert resumed_at(states[-2])[1] == ""


@pytest.mark.parametrize("kind", [Counts, CountsAtEnd, CountsWithState, Ends, ItselfWithState, OnIterator])
def test_an_epoch_of_known_steps_goes_on_with_passes_that_some_workers_have_not_begun(kind: Any) -> None:
    def loader() -> Any:
        return stream_loader(kind(), kind=InThisProcess, steps_per_epoch=13, **WORKERS["persistent workers"])

    whole = loader()
    expected: list[Any] = []
    states = [whole.state_dict()]
    for _ in range(2):
        for batch in whole:
            expected.append(plain(batch))
            states.append(whole.state_dict())
    for step, state in enumerate(states[:-1]):
        resumed = loader()
        resumed.load_state_dict(state)
        again = [plain(batch) for _ in range(2) for batch in resumed]
        assert again[: len(expected) - step] == expected[step:], step


@pytest.mark.parametrize("workers", ["no workers", "fresh workers"])
def test_an_epoch_that_a_loop_tells_the_dataset_stays(workers: str) -> None:
    expected = user_loader(Told, workers)
    loader = patch_dataloader(user_loader(Told, workers))
    epochs = range(3, 5)
    with pytest.warns(StatefulWarning, match="Something else has called set_epoch of Told"):
        found = epochs_of(loader, loader.dataset, None, epochs)
    assert found == epochs_of(expected, expected.dataset, None, epochs)


class StaysLoaded(Numbers):
    """Begins every pass at the position that was loaded last, as first attempts at a state do."""

    first = at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at = self.first
        for number in self.share()[self.first :]:
            self.at += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("many", [3, 9], ids=["within an epoch", "at its end"])
def test_a_position_that_stays_in_force_is_warned_of(many: int, drop_last: bool) -> None:
    loader = patched(StaysLoaded, "no workers", drop_last=drop_last)
    for _ in islice(loader, many):
        state = loader.state_dict()
    state = state if many == 3 else loader.state_dict()

    resumed = patched(StaysLoaded, "no workers", drop_last=drop_last)
    resumed.load_state_dict(state)
    with pytest.warns(StatefulWarning, match="a state that was loaded stays in force for later passes"):
        assert [*resumed, *resumed]


class Files(Numbers):
    """Reads files in the order of its list, which it shuffles in place if it is told to."""

    def __init__(self, files: list[str], *, shuffle: bool = False) -> None:
        self.files, self.shuffle = files, shuffle

    def __iter__(self) -> Iterator[Any]:
        if self.shuffle:
            random.shuffle(self.files)
        return iter([f"{file} {number}" for file in self.files for number in range(3)])


@pytest.mark.parametrize("step", [2, 99], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize("files", ["abcde", "abdc", "abx"])
def test_other_files_are_refused_and_warned_of_where_they_are_accepted(files: str, step: int) -> None:
    loader = patch_dataloader(DataLoader(Files(list("abcd")), batch_size=2))
    assert list(islice(loader, step))
    state = loader.state_dict()

    resumed = patch_dataloader(DataLoader(Files(list(files)), batch_size=2))
    with pytest.raises(StateMismatchError, match=r"dataset\.content\.files: saved"):
        resumed.load_state_dict(state)
    if step == 99:
        # There is nothing left of the epoch.
        return
    resumed = patch_dataloader(DataLoader(Files(list(files)), batch_size=2), accept=("dataset.content",))
    with pytest.warns(StatefulWarning, match=r"dataset\.content\.files"):
        resumed.load_state_dict(state)


def test_a_list_of_files_that_passes_shuffle_in_place_is_not_compared_in_their_process() -> None:
    dataset = Files(list("abcd"), shuffle=True)
    loader = patch_dataloader(DataLoader(dataset, batch_size=2))
    assert len(list(loader)) == 6
    state = patch_dataloader(DataLoader(dataset, batch_size=2)).state_dict()

    patch_dataloader(DataLoader(Files(list("abcd"), shuffle=True), batch_size=2)).load_state_dict(state)
    patch_dataloader(DataLoader(dataset, batch_size=2)).load_state_dict(loader.state_dict())


class Joined(IterableDataset[Any]):
    """One dataset after another."""

    def __init__(self, *parts: Files) -> None:
        self.parts = list(parts)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.parts)


@pytest.mark.parametrize("files", [("ax", "cd"), ("ab", "dc"), ("ab", "cx")])
def test_files_of_each_of_several_datasets_in_one_are_compared(files: tuple[str, str]) -> None:
    def loader(*files: str) -> Any:
        return patch_dataloader(DataLoader(Joined(*(Files(list(of)) for of in files)), batch_size=2))

    saved = loader("ab", "cd")
    assert list(islice(saved, 2))
    loader("ab", "cd").load_state_dict(saved.state_dict())
    with pytest.raises(StateMismatchError, match=r"dataset\.content\.files: saved"):
        loader(*files).load_state_dict(saved.state_dict())


def nested(loader: Any) -> Any:
    return [(plain(one), plain(other)) for one in loader for other in loader]


def zipped(loader: Any) -> Any:
    return [(plain(one), plain(other)) for one, other in zip(loader, loader, strict=False)]


@pytest.mark.parametrize("kind", [Counts, CountsAtEnd, CountsWithState])
@pytest.mark.parametrize(
    ("workers", "both"),
    [
        ("no workers", nested),
        ("no workers", zipped),
        pytest.param("fresh workers", zipped, marks=pytest.mark.slow),
        ("persistent workers", nested),
    ],
)
def test_two_iterations_at_once_go_on_as_in_torch_with_a_warning(kind: Any, workers: str, both: Any) -> None:
    expected, loader = both(user_loader(kind, workers)), patch_dataloader(user_loader(kind, workers))
    with pytest.warns(StatefulWarning, match=f"{kind.__name__} is read by two iterations of its loader at once"):
        assert both(loader) == expected


class Fails(Itself):
    """Cannot give its fourth number."""

    def __next__(self) -> Any:
        if (number := super().__next__()) % 100 == 3:
            raise OSError("broken")
        return number


class FailsForGood(Numbers):
    """A generator, of which nothing is left behind an error."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.share():
            if number % 100 == 3:
                raise OSError("broken")
            yield number


def taken(loader: Any) -> list[Any]:
    """Batches of two passes of a loop that catches errors."""
    found: list[Any] = []
    for _ in range(2):
        batches = iter(loader)
        while len(found) < 40:
            try:
                found.append(plain(next(batches)))
            except StopIteration:
                found.append("end")
                break
            except (OSError, ShardError):
                found.append(True)
    return found


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((Fails, workers) for workers in WORKERS),
        (FailsForGood, "no workers"),
        *(
            pytest.param(FailsForGood, workers, marks=pytest.mark.slow)
            for workers in WORKERS
            if workers != "no workers"
        ),
    ],
)
def test_a_loop_that_catches_an_error_goes_on_behind_it_as_in_torch(kind: Any, workers: str) -> None:
    expected = taken(user_loader(kind, workers))
    assert True in expected
    assert taken(patch_dataloader(user_loader(kind, workers))) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_shards_that_fails_is_over_for_that_worker_as_in_torch(num_workers: int) -> None:
    def read(ref: Any) -> Iterator[int]:
        if ref[0] == 3:
            raise OSError("broken")
        return read_numbers(ref)

    found = taken(stream_loader(chunks(read=read, shuffle=False), num_workers=num_workers))
    assert found.count(True) == found.count("end") == 2
    # With two, the other worker has read its shards.
    assert len([batch for batch in found if isinstance(batch, list)]) >= 1 + 3 * num_workers


def test_a_pass_that_a_resume_begins_twice_is_warned_of() -> None:
    loader = patched(Counts, "no workers")
    assert [*loader, *loader]
    resumed = patched(Counts, "no workers")
    resumed.load_state_dict(loader.state_dict())
    next(resumed.order.read(2, 0))
    with pytest.warns(StatefulWarning, match="the first pass of the resume was begun twice"):
        next(resumed.order.read(2, 0))


class ReadOnce(IterableDataset[int]):
    """Its own iterator, which has nothing left once it was read; its state leads back."""

    at = 0

    def __iter__(self) -> ReadOnce:
        return self

    def __next__(self) -> int:
        if self.at == 9:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_dataset_that_another_loader_has_read_to_its_end_is_put_back_as_in_torchdata(number: int) -> None:
    dataset = ReadOnce()
    loader = patch_dataloader(DataLoader(dataset, batch_size=None))
    batches = iter(loader)
    read = [*islice(batches, number)]
    state = loader.state_dict()
    left = [*batches]

    resumed = patch_dataloader(DataLoader(dataset, batch_size=None))
    resumed.load_state_dict(state)

    assert (read + left, [*resumed]) == ([*range(1, 10)], left)


class Given(Numbers):
    """Holds plain values, which its passes read."""

    def __init__(self) -> None:
        self.most, self.names = 24, ["a", "b"]

    def __iter__(self) -> Iterator[Any]:
        return iter([number for number in super().__iter__() if number < self.most + len(self.names)])


class Held(Numbers):
    """Holds something that is no plain value, and may move on unseen."""

    def __init__(self) -> None:
        self.held = memoryview(b"1")


@pytest.mark.parametrize(
    ("kind", "is_told"), [(Numbers, False), (Given, False), (Counts, True), (CountsAtEnd, True), (Held, True)]
)
def test_other_workers_behind_an_epoch_are_warned_of_where_a_pass_may_follow_from_the_one_before(
    kind: Any, is_told: bool
) -> None:
    whole = stream_loader(kind())
    list(whole)
    whole.set_epoch(1)
    state = whole.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = patched(kind, "fresh workers")
        resumed.load_state_dict(state)
    assert ["they begin pass 1 as the first" in str(one.message) for one in caught] == [True] * is_told
