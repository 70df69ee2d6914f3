"""Whether a sampler gives the same again is found out before anything is trained."""

from __future__ import annotations

import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import samplers as theirs
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from lightning_stateful.errors import ConfigurationError, StatefulWarning, UnsupportedLoaderError
from lightning_stateful.samplers import DDPSamplerWrapper
from lightning_stateful.samplers.user_sampler import UserSampler

LONG = 100


class Unseeded(Sampler[int]):
    """Makes a NumPy generator from what the system gives."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(30).tolist())


class OfTheSystem(Sampler[int]):
    """Holds a generator that cannot be seeded."""

    def __init__(self) -> None:
        self.rng = random.SystemRandom()

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(30), 30))


class CountsAtTheEnd(Sampler[int]):
    """Has another order by a count of its own, which it raises when an epoch is over."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(self.length).tolist()
        self.epoch += 1


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


class CountsIterations(Sampler[int]):
    """Counts how often it is iterated, and what it yields."""

    def __init__(self, length: int) -> None:
        self.length, self.log = length, [0, 0]
        self.count = self.log.append

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.count(index)
            yield index


class OneIteration:
    """Can be iterated once only, by way of an iterator that it holds."""

    def __init__(self) -> None:
        self.indices = iter(range(9))

    def __iter__(self) -> Iterator[int]:
        return self.indices


@pytest.mark.parametrize("make", [theirs.ByTheClock, Unseeded, OfTheSystem], ids=lambda make: make.__name__)
def test_a_sampler_that_cannot_be_repeated_is_refused_by_name_with_the_remedies(make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedLoaderError) as caught:
        DDPSamplerWrapper(make())
    message = str(caught.value)

    assert message.startswith(f"{make.__name__} yields something else when the same epoch is begun a second time")
    for remedy in ("set_epoch(epoch)", "depends_on_training = True", "accept=('nondeterministic',)"):
        assert remedy in message


@pytest.mark.parametrize(
    "make",
    [theirs.CountsEpochs, lambda: CountsAtTheEnd(30), lambda: CountsAtTheEnd(LONG)],
    ids=["at iter()", "at the end", "at the end of a long epoch"],
)
def test_a_sampler_that_counts_its_epochs_by_itself_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedLoaderError, match=r"counts its epochs by itself.* Give it set_epoch\(epoch\)"):
        DDPSamplerWrapper(make())


@pytest.mark.parametrize("length", [9, LONG])
def test_a_sampler_that_goes_on_where_it_was_left_is_no_sampler_that_counts_epochs(length: int) -> None:
    sampler = DDPSamplerWrapper(GoesOn(length))

    assert [list(sampler) for _ in range(2)] == [list(range(length))] * 2


def test_a_sampler_that_holds_an_iterator_is_refused() -> None:
    with pytest.raises(UnsupportedLoaderError, match="OneIteration"):
        DDPSamplerWrapper(OneIteration())


def test_what_cannot_be_repeated_runs_if_accepted() -> None:
    sampler = DDPSamplerWrapper(theirs.ByTheClock(), accept=("nondeterministic",))

    assert sorted(sampler) == sorted(sampler) == list(range(theirs.LENGTH))


def test_what_cannot_be_repeated_warns_at_each_resume_and_not_before() -> None:
    sampler = DDPSamplerWrapper(theirs.ByTheClock(), accept="nondeterministic")
    items = iter(sampler)
    for _ in range(3):
        for _ in range(5):
            next(items)
        fresh = DDPSamplerWrapper(theirs.ByTheClock(), accept="nondeterministic")
        fresh.load_state_dict(sampler.state_dict())
        sampler, items = fresh, iter(fresh)
        with pytest.warns(StatefulWarning) as caught:
            next(items)

        assert any("ByTheClock differs from run to run" in str(warning.message) for warning in caught)


def test_what_cannot_be_repeated_does_not_warn_at_the_beginning_of_an_epoch() -> None:
    sampler = DDPSamplerWrapper(theirs.ByTheClock(), accept="nondeterministic")
    list(sampler)
    state = sampler.state_dict()
    fresh = DDPSamplerWrapper(theirs.ByTheClock(), accept="nondeterministic")
    fresh.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert len(list(fresh)) == theirs.LENGTH


def test_little_of_a_long_sampler_is_looked_at() -> None:
    sampler = CountsIterations(10**6)
    source = UserSampler(sampler)
    source.examine()
    source.examine()

    assert len(sampler.log) < 2000


def test_torchs_own_samplers_are_not_looked_at() -> None:
    source = UserSampler(BatchSampler(RandomSampler(range(9)), 2, False))

    assert source.examine().begins == ""


def test_a_users_sampler_within_torchs_is_looked_at() -> None:
    with pytest.raises(UnsupportedLoaderError, match="BatchSampler yields something else"):
        DDPSamplerWrapper(BatchSampler(theirs.ByTheClock(), 2, False))


def test_an_iterator_within_torchs_batch_sampler_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        DDPSamplerWrapper(BatchSampler(iter(range(9)), 2, False))


def test_a_seed_that_differs_gives_another_beginning_and_the_same_seed_the_same() -> None:
    begins = [UserSampler(theirs.GlobalRandom(), seed=seed).examine().begins for seed in (1, 2, 1)]

    assert begins[0] == begins[2] != begins[1]


@pytest.mark.parametrize(
    ("make", "yields", "says"), [(theirs.SaysTooMuch, 8, 9), (theirs.SaysTooLittle, 8, 7)], ids=["more", "fewer"]
)
def test_a_short_sampler_with_a_wrong_length_is_found_at_once(make: Any, yields: int, says: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"{make.__name__} yields {yields} items .* its len\(\) is {says}"):
        DDPSamplerWrapper(make())


def test_feedback_is_looked_at_without_a_trace() -> None:
    sampler = theirs.HardNegatives()
    UserSampler(sampler, whole_batches=True).examine()

    assert (sampler.epoch, sampler.served) == (0, 0)


def test_exceptions_of_the_sampler_come_out_and_leave_the_process_alone() -> None:
    class Raises(Sampler[int]):
        num_replicas, rank = 3, 2

        def __init__(self) -> None:
            self.num_replicas, self.rank = 3, 2

        def __iter__(self) -> Iterator[int]:
            random.random()
            yield 1
            raise KeyError("theirs")

    before, sampler = random.getstate(), Raises()
    with pytest.raises(KeyError, match="theirs"):
        DDPSamplerWrapper(sampler)

    assert random.getstate() == before
    assert (sampler.num_replicas, sampler.rank) == (3, 2)


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


def test_a_sampler_that_draws_in_a_thread_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedLoaderError, match="InAThread draws in a thread of its own"):
        DDPSamplerWrapper(InAThread())


class ShufflesBesideScores(Sampler[int]):
    """Shuffles a list in place; its scores are somebody else's to set."""

    def __init__(self, scores: Any) -> None:
        self.indices, self.scores = list(range(40)), scores

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)


def test_what_iterating_leaves_alone_stays_as_somebody_else_has_changed_it(tmp_path: Path) -> None:
    mapped = np.lib.format.open_memmap(tmp_path / "scores.npy", "w+", "float64", (40,))
    for scores in (np.ones(40), torch.ones(40), [1] * 40, mapped):
        wrapper = DDPSamplerWrapper(ShufflesBesideScores(scores))
        list(wrapper)
        scores[3] = 7  # type: ignore[call-overload]
        list(wrapper)

        assert scores[3] == 7


class StatesItsEpochOnly(theirs.ShuffledBatches):
    """Has a state that does not say where it stands."""

    def __init__(self) -> None:
        super().__init__([[number] for number in range(40)])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_state_that_leads_nowhere_is_done_without() -> None:
    source = UserSampler(StatesItsEpochOnly(), whole_batches=True)
    source.examine()

    assert source.way == "wound"
