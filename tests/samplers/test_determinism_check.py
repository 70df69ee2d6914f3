"""Whether a sampler yields the same again is found out before anything is trained, by counting slots."""

from __future__ import annotations

import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterator
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


class OfTheSystem(Sampler[int]):
    """Holds a generator that cannot be seeded."""

    def __init__(self) -> None:
        self.rng = random.SystemRandom()

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(30), 30))


class OneIteration:
    """Can be iterated once only, by way of an iterator that it holds."""

    def __init__(self) -> None:
        self.indices = iter(range(9))

    def __iter__(self) -> Iterator[int]:
        return self.indices


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


class HandsOn:
    """Is iterated as the sampler that it holds."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


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


class GoesOn(Sampler[int]):
    """Serves its samples in order, and goes on where it was left."""

    def __init__(self, length: int) -> None:
        self.length, self.place = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


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


class StatesItsEpochOnly(theirs.ShuffledBatches):
    """Has a state that does not say where it stands."""

    def __init__(self) -> None:
        super().__init__([[number] for number in range(40)])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ShufflesRows(Sampler[list[int]]):
    """Shuffles each of many batches in place as it is yielded."""

    def __init__(self) -> None:
        self.batches = [list(range(number, number + 5)) for number in range(2000)]

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            random.shuffle(batch)
            yield batch


class KeepsRows(ShufflesRows):
    """Shuffles the list of batches, and no batch."""

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)


@pytest.mark.parametrize("make", [theirs.ByTheClock, OfTheSystem, OneIteration], ids=lambda make: make.__name__)
def test_a_sampler_that_cannot_be_repeated_is_refused_by_name_with_the_remedies(make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedLoaderError) as caught:
        WrappedSampler(make()).check()
    message = str(caught.value)

    assert message.startswith(f"{make.__name__} yields something else when the same epoch is begun a second time")
    assert "set_epoch(epoch)" in message
    assert "accept=('nondeterministic',)" in message


@pytest.mark.parametrize(
    "value",
    [iter([1]), (n for n in range(3)), map(str, range(3)), iter(range(500))],
    ids=["of a list", "generator", "map", "long"],
)
def test_an_iterator_which_is_over_after_one_epoch_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedLoaderError, match="yields something else when the same epoch is begun a second"):
        WrappedSampler(value).check()


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


@pytest.mark.parametrize("length", [9, LONG, VERY_LONG])
def test_a_sampler_that_goes_on_where_it_was_left_does_not_count_epochs(length: int) -> None:
    order = WrappedSampler(GoesOn(length))

    assert order.resume_mode == "own_state"
    assert serve(order, 1, 1).samples == list(range(length))


@pytest.mark.parametrize("make", [BeginsAnew, lambda: HandsOn(BeginsAnew())], ids=["itself", "held by another"])
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


def test_how_an_epoch_begins_follows_from_seed_and_path() -> None:
    order = WrappedSampler(theirs.GlobalRandom())
    others = (
        WrappedSampler(theirs.GlobalRandom(), seed=1),
        order.adapted(path="a"),
        WrappedSampler(theirs.GlobalRandom()),
    )
    found = [each.check() for each in (order, *others)]

    assert found[0] == found[3]
    assert len({each.begins for each in found}) == 3
    assert found[0].first == serve(WrappedSampler(theirs.GlobalRandom()), 0, 1).samples[0]


@pytest.mark.parametrize(
    ("make", "yields", "says"), [(theirs.SaysTooMuch, 8, 9), (theirs.SaysTooLittle, 8, 7)], ids=["more", "fewer"]
)
def test_a_sampler_with_a_wrong_length_is_found_at_once(make: Any, yields: int, says: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"{make.__name__} yields {yields} items .* its len\(\) is {says}"):
        WrappedSampler(make()).check()


def test_a_sampler_that_ends_before_the_length_to_cut_at_is_found_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"range yields 6 items in epoch 0, but length=150 was given"):
        WrappedSampler(range(6), length=150).check()


def test_a_state_that_leads_nowhere_is_done_without() -> None:
    assert WrappedSampler(StatesItsEpochOnly(), batch_size=None).resume_mode == "fast_forward"


@pytest.mark.parametrize("make", [ShufflesRows, KeepsRows])
def test_samplers_that_shuffle_many_batches_in_place_are_repeatable_and_stay_as_they_are(make: Any) -> None:
    sampler, expected = make(), make().batches
    order = WrappedSampler(sampler, batch_size=None)
    epochs = [serve(order, epoch, 1).batches for epoch in (0, 1, 0)]

    assert sampler.batches == expected
    assert epochs[0] == epochs[2] != epochs[1]
