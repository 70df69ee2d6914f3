"""A sampler is brought to where it is to go on: marks, states of its own, feedback, and what is kept in memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import samplers as theirs
from torch.utils.data import Sampler

from lightning_stateful.errors import ConfigurationError, PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers import DDPSamplerWrapper, winding


class Listed(Sampler[Any]):
    """Yields what it is given."""

    def __init__(self, items: list[Any], count: list[int] | None = None) -> None:
        self.items = items
        self._count = [] if count is None else count.append

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


class Reuses(Sampler[list[int]]):
    """Yields one list again and again, filled anew: right for whoever reads a batch before asking for the next."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(24):
            batch.append(index)
            if len(batch) == 3:
                yield batch
                batch.clear()


class Refills(Sampler[Any]):
    """The same with an array."""

    def __iter__(self) -> Iterator[Any]:
        batch = np.zeros(3, dtype=np.int64)
        for start in range(0, 24, 3):
            batch[:] = range(start, start + 3)
            yield batch


class ForgetsItsPlace(Sampler[int]):
    """Has a state, and does not go on from it."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        for index in range(50):
            self.place = index + 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class KeepsItsGenerator(Sampler[int]):
    """Its state is that of its generator at the epoch's start, and how many items it has served since."""

    def __init__(self, length: int = 50) -> None:
        self.length, self.generator = length, torch.Generator()
        self.began, self.served, self.goes_on_at = self.generator.get_state(), 0, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.began = self.generator.get_state()
        self.served, self.goes_on_at = self.goes_on_at, 0
        for index in torch.randperm(self.length, generator=self.generator).tolist()[self.served :]:
            self.served += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began, "served": self.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["began"])
        self.goes_on_at = state["served"]


class DrawsAsItGoes(Sampler[int]):
    """Its state is its place; every item is drawn from the generator that it holds."""

    def __init__(self) -> None:
        self.rng, self.place = np.random.default_rng(3), 0

    def __len__(self) -> int:
        return 50

    def set_epoch(self, epoch: int) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 50:
            self.place += 1
            yield int(self.rng.integers(1000))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class DrawsFrom(Sampler[int]):
    """Draws every item from a generator that others may hold, too."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        for _ in range(200):
            yield int(self.rng.integers(1000))


class Range(Sampler[int]):
    """Counts, and holds nothing."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        index = 0
        while index != self.length:
            yield index
            index += 1


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """More and more is drawn at a time, however long it takes."""
    monkeypatch.setattr(winding, "_LONG_DRAW", math.inf)


def stopped(make: Callable[[], Any], count: int, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The state after so many items, and the rest of the epoch."""
    sampler = DDPSamplerWrapper(make(), **options)
    items = iter(sampler)
    for _ in range(count):
        next(items)
    return sampler.state_dict(), list(items)


def resumed(make: Callable[[], Any], state: dict[str, Any], **options: Any) -> DDPSamplerWrapper:
    sampler = DDPSamplerWrapper(make(), **options)
    sampler.load_state_dict(state)
    return sampler


def changed(*places: int) -> list[int]:
    return [index + 1000 * (index in places) for index in range(200)]


class TestBeginnings:
    @pytest.mark.parametrize("count", [0, 1, 2, 17, 64, 65, 199, 200])
    @pytest.mark.parametrize("slot", [0, 1, 40, 63])
    def test_a_sequence_that_begins_otherwise_is_refused_when_it_is_loaded(self, slot: int, count: int) -> None:
        state, _ = stopped(lambda: Listed(changed()), count)
        fresh = DDPSamplerWrapper(Listed(changed(slot)))
        with pytest.raises(StateMismatchError, match=r"sequence: saved .* does not begin an epoch as it did") as caught:
            fresh.load_state_dict(state)

        assert [difference.path for difference in caught.value.differences] == ["sequence"]

    def test_a_sampler_that_is_shorter_than_that_is_refused(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 70)
        with pytest.raises(StateMismatchError, match="sequence"):
            resumed(lambda: Listed(changed()[:10]), state)

    def test_what_was_refused_leaves_the_object_where_it_was(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 20)
        fresh = DDPSamplerWrapper(Listed(changed(0)))
        items = iter(fresh)
        found = [next(items) for _ in range(5)]
        held = fresh.state_dict()
        with pytest.raises(StateMismatchError):
            fresh.load_state_dict(state)

        assert fresh.state_dict() == held
        assert [*found, *items] == changed(0)

    def test_a_changed_sequence_goes_on_if_accepted_with_a_warning(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 20)
        fresh = resumed(lambda: Listed(changed(0, 25)), state, accept=("sequence",))
        with pytest.warns(StatefulWarning, match="Accepted: sequence at slot 16"):
            assert list(fresh) == changed(0, 25)[20:]

    def test_once_accepted_the_changed_sequence_is_the_one_to_come(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 20)
        fresh = resumed(lambda: Listed(changed(0)), state, accept=("sequence",))
        with pytest.warns(StatefulWarning):
            next(iter(fresh))

        assert list(resumed(lambda: Listed(changed(0)), fresh.state_dict())) == changed(0)[21:]


class TestMarks:
    @pytest.mark.parametrize(("slot", "count"), [(64, 65), (64, 70), (64, 128), (128, 129), (128, 199)])
    def test_what_changed_behind_the_beginning_is_refused_at_the_first_item(self, slot: int, count: int) -> None:
        state, _ = stopped(lambda: Listed(changed()), count)
        fresh = resumed(lambda: Listed(changed(slot)), state)
        with pytest.raises(StateMismatchError, match=rf"sequence at slot {slot}: .*Listed no longer yields"):
            next(iter(fresh))

    def test_marks_are_chained(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 150)
        with pytest.raises(StateMismatchError, match="sequence at slot 128"):
            next(iter(resumed(lambda: Listed(changed(64)), state)))

    @pytest.mark.parametrize("slot", [70, 71, 100, 199])
    def test_a_sequence_that_changes_only_behind_the_place_is_none_of_its_business(self, slot: int) -> None:
        state, _ = stopped(lambda: Listed(changed()), 70)

        assert list(resumed(lambda: Listed(changed(slot)), state)) == changed(slot)[70:]

    def test_a_sampler_that_ends_before_the_place_is_refused(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 80)
        fresh = resumed(lambda: Listed(changed()[:70]), state)
        with pytest.raises(PositionError, match="80 items of Listed were used in epoch 0, but now it ends before"):
            next(iter(fresh))

    def test_a_refused_state_stays_as_it_was_loaded(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 70)
        fresh = resumed(lambda: Listed(changed(64)), state)
        for _ in range(2):
            with pytest.raises(StateMismatchError):
                next(iter(fresh))

            assert fresh.state_dict() == state

    def test_what_is_accepted_there_goes_on_with_a_warning(self) -> None:
        state, _ = stopped(lambda: Listed(changed()), 70)
        fresh = resumed(lambda: Listed(changed(64, 80)), state, accept=("sequence",))
        with pytest.warns(StatefulWarning, match="Accepted: sequence at slot 64"):
            assert list(fresh) == changed(64, 80)[70:]


@pytest.mark.usefixtures("patient")
class TestDrawnAhead:
    @pytest.mark.parametrize("make", [Reuses, Refills])
    def test_a_batch_that_is_filled_anew_is_served_as_it_was_yielded(self, make: Callable[[], Any]) -> None:
        expected = [list(range(start, start + 3)) for start in range(0, 24, 3)]

        assert [[int(index) for index in batch] for batch in DDPSamplerWrapper(make())] == expected

    def test_a_second_iterator_leaves_what_a_first_one_has_drawn_ahead(self) -> None:
        expected = list(DDPSamplerWrapper(theirs.ShufflesInPlace()))
        sampler = DDPSamplerWrapper(theirs.ShufflesInPlace())
        first = iter(sampler)
        found = [next(first), next(first)]
        next(iter(sampler))

        assert [*found, *first] == expected

    @pytest.mark.parametrize("make", [theirs.GlobalRandom, theirs.ClassBalanced, theirs.WithoutLen])
    def test_two_iterators_at_a_time_yield_the_same(self, make: Callable[[], Any]) -> None:
        expected = list(DDPSamplerWrapper(make()))
        sampler = DDPSamplerWrapper(make())

        assert list(zip(sampler, sampler, strict=True)) == [(item, item) for item in expected]

    @pytest.mark.parametrize("make", [theirs.OwnState, KeepsItsGenerator, DrawsAsItGoes])
    def test_two_iterators_over_a_sampler_with_one_state_go_on_by_turns(self, make: Callable[[], Any]) -> None:
        expected = list(DDPSamplerWrapper(make()))
        sampler = DDPSamplerWrapper(make())

        assert list(zip(sampler, sampler, strict=True)) == [(item, item) for item in expected]

    def test_the_earlier_of_two_iterators_over_a_sampler_that_depends_on_training_is_refused(self) -> None:
        sampler = DDPSamplerWrapper(theirs.HardNegatives())
        first, second = iter(sampler), iter(sampler)
        next(first)
        next(second)
        with pytest.raises(ConfigurationError, match="HardNegatives is iterated by two at a time"):
            next(first)

    def test_samplers_that_hold_the_same_generator_do_not_disturb_each_other(self) -> None:
        expected = list(DDPSamplerWrapper(DrawsFrom(np.random.default_rng(3))))
        shared = np.random.default_rng(3)
        training, validation = (DDPSamplerWrapper(DrawsFrom(shared)) for _ in range(2))

        assert [item for item, _ in zip(training, validation, strict=True)] == expected


class TestOwnState:
    @pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 21])
    def test_a_sampler_goes_on_by_its_own_state(self, count: int) -> None:
        state, rest = stopped(theirs.OwnState, count)

        assert list(resumed(theirs.OwnState, state)) == (rest or list(DDPSamplerWrapper(theirs.OwnState())))

    @pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 33, 49])
    def test_what_it_draws_from_a_generator_on_the_way_is_the_same_again(self, count: int) -> None:
        state, rest = stopped(DrawsAsItGoes, count)

        assert list(resumed(DrawsAsItGoes, state)) == rest

    @pytest.mark.parametrize(
        "count",
        [1, 15, 17, 32, 40],
    )
    def test_a_sampler_that_keeps_the_state_of_its_generator_goes_on_by_it(self, count: int) -> None:
        state, rest = stopped(KeepsItsGenerator, count)

        assert list(resumed(KeepsItsGenerator, state)) == rest

    @pytest.mark.parametrize("count", [1, 16, 17, 31, 32, 49])
    def test_a_sampler_that_does_not_go_on_from_its_state_is_wound_like_any_other(self, count: int) -> None:
        state, rest = stopped(ForgetsItsPlace, count)

        assert state["config"]["sampler"]["way"] == "wound"
        assert list(resumed(ForgetsItsPlace, state)) == rest

    @pytest.mark.parametrize("num_items", [0, 1, 15, 16, 17, 20])
    def test_training_may_lie_behind_what_was_drawn(self, num_items: int) -> None:
        sampler = DDPSamplerWrapper(theirs.OwnState())
        items = list(DDPSamplerWrapper(theirs.OwnState()))
        running = iter(sampler)
        for _ in range(21):
            next(running)

        assert list(resumed(theirs.OwnState, sampler.state_dict(num_items=num_items))) == items[num_items:]


class TestFeedback:
    @pytest.mark.parametrize("count", [1, 4, 8])
    def test_what_training_taught_a_sampler_is_kept(self, count: int) -> None:
        def taught(sampler: theirs.HardNegatives) -> None:
            sampler.update(torch.tensor([3, 4]), 9.0)

        theirs_first = theirs.HardNegatives()
        sampler = DDPSamplerWrapper(theirs_first)
        items = iter(sampler)
        for _ in range(count):
            next(items)
            taught(theirs_first)
        fresh = resumed(theirs.HardNegatives, sampler.state_dict())

        assert list(fresh) == list(items)

    def test_what_it_yielded_ahead_of_training_is_kept(self) -> None:
        sampler = DDPSamplerWrapper(theirs.HardNegatives())
        items = iter(sampler)
        batches = [next(items) for _ in range(6)]
        state = sampler.state_dict(num_items=2)
        sampler.sampler.losses[:] = torch.arange(theirs.LENGTH)
        rest = list(items)
        fresh = iter(resumed(theirs.HardNegatives, state))
        found = [next(fresh) for _ in range(4)]

        assert found == batches[2:]
        assert len(list(fresh)) == len(rest)

    def test_a_look_at_the_first_batch_takes_nothing_away(self) -> None:
        sampler = DDPSamplerWrapper(theirs.HardNegatives())
        next(iter(sampler))

        assert len(list(sampler)) == len(sampler)

    @pytest.mark.parametrize("count", [1, 4, 8])
    def test_a_pass_that_was_broken_off_begins_anew_as_it_began(self, count: int) -> None:
        expected = list(DDPSamplerWrapper(theirs.HardNegatives()))
        sampler = DDPSamplerWrapper(theirs.HardNegatives())
        items = iter(sampler)
        for _ in range(count):
            next(items)
            sampler.sampler.update(torch.tensor([3, 4]), 9.0)

        assert list(sampler) == expected

    def test_what_was_learnt_in_earlier_epochs_is_kept_by_a_pass_that_begins_anew(self) -> None:
        def trained(looks: int) -> list[Any]:
            sampler = DDPSamplerWrapper(theirs.HardNegatives())
            for _ in sampler:
                sampler.sampler.update(torch.tensor([3, 4]), 9.0)
            for _ in range(looks):
                next(iter(sampler))
            return list(sampler)

        assert trained(looks=2) == trained(looks=0)

    def test_a_pass_that_was_loaded_and_broken_off_begins_anew_where_it_was_loaded(self) -> None:
        state, rest = stopped(theirs.HardNegatives, 4)
        fresh = resumed(theirs.HardNegatives, state)
        next(iter(fresh))

        assert list(fresh) == rest


class TestUsedObjects:
    @pytest.mark.parametrize("make", [theirs.GlobalRandom, theirs.OwnState, theirs.HardNegatives])
    def test_a_state_that_is_loaded_into_a_used_object_is_given_back(self, make: Callable[[], Any]) -> None:
        state, _ = stopped(make, 8)
        used = DDPSamplerWrapper(make())
        next(iter(used))
        used.load_state_dict(state)

        assert used.state_dict() == state

    @pytest.mark.parametrize("make", {**theirs.PERMUTATIONS, **theirs.BATCHED}.values())
    def test_a_used_object_goes_on_from_a_loaded_state(self, make: Callable[[], Any]) -> None:
        state, rest = stopped(make, 3)
        used = DDPSamplerWrapper(make())
        list(used)
        next(iter(used))
        used.load_state_dict(state)

        assert list(used) == rest


class TestMemory:
    @pytest.mark.parametrize("options", [{}, {"length": 10**5}], ids=["unsized", "cut"])
    def test_winding_over_1e5_slots_keeps_little(self, options: dict[str, Any]) -> None:
        state, _ = stopped(lambda: Range(200), 5)
        state["progress"].update(consumed=10**5 - 10)
        state["progress"]["sampler"]["mark"] = []
        state["config"]["sampler"]["length"] = options.get("length", "unknown")
        fresh = resumed(lambda: Range(None), state, **options)
        items = iter(fresh)
        tracemalloc.start()
        try:
            first = next(items)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

        assert first == 10**5 - 10
        assert peak < 500_000

    @pytest.mark.usefixtures("patient")
    def test_iterating_without_end_keeps_little(self) -> None:
        sampler = DDPSamplerWrapper(Range(None))
        items = iter(sampler)
        for _ in range(3 * 10**4):
            next(items)

        assert sampler.source.live is not None
        assert len(sampler.source.live._ready) <= 8192
        assert len(sampler.source.live._marks) <= 512

    def test_of_the_states_of_a_sampler_a_bounded_number_is_kept(self) -> None:
        class Counts(Range):
            place = 0

            def state_dict(self) -> dict[str, Any]:
                return {"table": [0] * 50}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                """Nothing to do."""

        sampler = DDPSamplerWrapper(Counts(None), num_replicas=1000, rank=0)
        items = iter(sampler)
        for _ in range(10):
            next(items)

        assert sampler.source.live is not None
        assert len(sampler.source.live._states) <= 512
        assert len(sampler.source.live._marks) <= 8192
