"""Whether a sampler yields the same again is found out before anything is trained, by counting slots."""

from __future__ import annotations

import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import samplers as theirs
from support.orders import serve
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from lightning_stateful.core import Progress
from lightning_stateful.errors import ConfigurationError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.samplers.wrapped_sampler import WrappedSampler

LONG = 100
VERY_LONG = 10**4


class ByteCounter:
    """Is its own iterator, and never begins anew."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> ByteCounter:
        return self

    def __next__(self) -> int:
        if self.next == 9:
            raise StopIteration
        self.next += 1
        return self.next


class BeginsAnew(ByteCounter):
    """Is its own iterator, and begins anew at iter()."""

    def __iter__(self) -> BeginsAnew:
        self.next = 0
        return self


class CountsAtTheEnd(Sampler[int]):
    """Has another order by a count of its own, which it raises when an epoch is over."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(self.length).tolist()
        self.epoch += 1


class CountsAtTheBeginning(CountsAtTheEnd):
    """The same, which it raises when an epoch begins."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from np.random.default_rng(self.epoch).permutation(self.length).tolist()


class InAThread(Sampler[int]):
    """Draws in a thread of its own."""

    def __iter__(self) -> Iterator[int]:
        drawn: queue.Queue[int] = queue.Queue(4)

        def draw() -> None:
            for _ in range(40):
                drawn.put(random.randrange(40))

        threading.Thread(target=draw, daemon=True).start()
        for _ in range(40):
            yield drawn.get()


class Counted(Sampler[int]):
    """Notes in a list that is not its own what it yields."""

    def __init__(self, length: int, log: list[int]) -> None:
        self.length, self.note = length, log.append

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.note(index)
            yield index


class EndsByChanging(Sampler[int]):
    """Changes something at the end of a pass of more slots than the check follows."""

    def __init__(self, shared: list[Any]) -> None:
        self.epoch, self.shared = 0, shared

    def __iter__(self) -> Iterator[int]:
        drawn = random.Random(self.epoch).sample(range(5000), 5000)
        yield from (held.number for held in self.shared for _ in range(4)) if self.shared else drawn
        self.epoch += 1
        random.Random(self.epoch).shuffle(self.shared)
        for number, held in enumerate(self.shared):
            held.number = number

    def __len__(self) -> int:
        return 4 * len(self.shared) if self.shared else 5000


@pytest.mark.parametrize(
    "make",
    [theirs.ByTheClock, lambda: (n for n in range(3)), lambda: iter(range(500))],
    ids=["by the clock", "a generator", "an iterator"],
)
def test_a_sampler_that_cannot_be_repeated_is_refused_by_name_with_the_remedies(make: Callable[[], Any]) -> None:
    sampler = make()
    with pytest.raises(UnsupportedLoaderError) as caught:
        WrappedSampler(sampler).check()
    message = str(caught.value)

    assert message.startswith(f"{type(sampler).__name__} yields something else when the same epoch is begun a second")
    assert "set_epoch(epoch)" in message
    assert "accept=('nondeterministic',)" in message


@pytest.mark.parametrize(
    "make",
    [
        theirs.CountsEpochs,
        lambda: CountsAtTheEnd(30),
        lambda: CountsAtTheEnd(LONG),
        lambda: CountsAtTheBeginning(VERY_LONG),
        ByteCounter,
    ],
    ids=["at iter()", "at the end", "at the end of a long epoch", "at the beginning of a very long one", "iterator"],
)
def test_a_sampler_that_counts_its_epochs_by_itself_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedLoaderError, match=r"counts its epochs by itself.* Give it set_epoch\(epoch\)"):
        WrappedSampler(make()).check()


def test_to_overfit_on_its_first_epoch_a_sampler_may_count_epochs() -> None:
    order = WrappedSampler(theirs.CountsEpochs()).adapted(shuffle=False)

    assert serve(order, 2, 1).samples == serve(order, 0, 1).samples


@pytest.mark.parametrize("length", [9, VERY_LONG])
def test_a_sampler_that_goes_on_where_it_was_left_does_not_count_epochs(length: int) -> None:
    order = WrappedSampler(theirs.KeepsItsPlace(length))

    assert order.resume_mode == "own_state"
    assert serve(order, 1, 1).samples == list(range(length))


@pytest.mark.parametrize("make", [BeginsAnew, lambda: theirs.Proxy(BeginsAnew())], ids=["itself", "held by another"])
def test_a_sampler_that_is_its_own_iterator_and_begins_anew_is_served(make: Callable[[], Any]) -> None:
    order = WrappedSampler(make())

    assert serve(order, 0, 1).samples == serve(order, 1, 1).samples == list(range(1, 10))


def test_a_sampler_that_draws_in_a_thread_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedLoaderError, match="InAThread draws in a thread of its own"):
        WrappedSampler(InAThread()).check()


def test_what_cannot_be_repeated_runs_if_accepted_and_warns_where_a_run_is_resumed() -> None:
    order = WrappedSampler(theirs.ByTheClock(), accept="nondeterministic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [sorted(serve(order, epoch, 1).samples) for epoch in (0, 1)] == [list(range(theirs.LENGTH))] * 2
    with pytest.warns(StatefulWarning, match="ByTheClock differs from run to run"):
        assert len(serve(order, 0, 1, Progress(consumed=5)).samples) == theirs.LENGTH - 5


def test_a_fixed_number_of_slots_of_a_long_sampler_is_looked_at_once() -> None:
    seen = []
    for length in (10**5, 10**6):
        log: list[int] = []
        order = WrappedSampler(Counted(length, log))
        order.check()
        order.check()
        seen.append(len(log))

    assert seen[0] == seen[1] < 5000


def test_torchs_own_samplers_are_not_looked_at_but_a_users_within_them_is() -> None:
    checked = WrappedSampler(BatchSampler(RandomSampler(range(9)), 2, False)).check()

    assert (checked.begins, checked.first, checked.is_repeatable) == ("", None, True)
    with pytest.raises(UnsupportedLoaderError, match="BatchSampler yields something else"):
        WrappedSampler(BatchSampler(theirs.ByTheClock(), 2, False)).check()


@pytest.mark.parametrize(
    ("make", "yields", "says"), [(theirs.SaysTooMuch, 8, 9), (theirs.SaysTooLittle, 8, 7)], ids=["more", "fewer"]
)
def test_a_sampler_with_a_wrong_length_is_found_at_once(make: Any, yields: int, says: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"{make.__name__} yields {yields} items .* its len\(\) is {says}"):
        WrappedSampler(make()).check()
    with pytest.raises(ConfigurationError, match=r"range yields 6 items in epoch 0, but length=150 was given"):
        WrappedSampler(range(6), length=150).check()


def test_a_sampler_that_counts_epochs_at_the_end_of_a_long_pass_is_warned_of() -> None:
    order = WrappedSampler(EndsByChanging([]))
    with pytest.warns(StatefulWarning, match="all epochs are alike, in the order of the first"):
        first = serve(order, 0, 1).samples

    assert serve(order, 1, 1).samples == first


def test_a_sampler_that_changes_what_its_copies_share_is_refused_when_its_pass_ends() -> None:
    order = WrappedSampler(EndsByChanging([SimpleNamespace(number=(7 * n) % 1250) for n in range(1250)]))
    with pytest.raises(UnsupportedLoaderError, match="EndsByChanging changed data in the course of a pass"):
        serve(order, 0, 1)
