"""Passes over a user's own sampler: begun again where it remembers, by its own state, compared, and cheap."""

from __future__ import annotations

import random
import tracemalloc
import warnings
from collections import UserList
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from support import samplers as theirs
from support.orders import but_ahead, through_json
from torch.utils.data import DataLoader, Sampler

from lightning_stateful import patch_dataloader
from lightning_stateful.core import Progress
from lightning_stateful.errors import PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.sampler_copies.sampler_facts import SamplerFacts
from lightning_stateful.user_samplers import sampler_pass
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


class Listed(Sampler[Any]):
    """Yields what it is given."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


class CountsOnly(Listed):
    """Counts its passes, and yields the same."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


class CountsAtTheEnd(theirs.CountsEpochs):
    """Has another order by a count of its own, which it raises when an epoch is over."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.times).permutation(theirs.LENGTH).tolist()
        self.times += 1


class KeepsItsFirstDraw(Sampler[int]):
    """Draws a subset when it is first iterated, which it keeps."""

    kept: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        if self.kept is None:
            self.kept = random.sample(range(30), 12)
        yield from random.sample(self.kept, 12)


class MakesItsGenerator(Sampler[int]):
    """Makes a generator when it is first iterated, which goes on from epoch to epoch."""

    generator: Any = None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        yield from torch.randperm(12, generator=self.generator).tolist()


class GoesOn(Sampler[int]):
    """Goes on where the pass before was left."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(9):
            self.place += 1
            yield self.place - 1


class Sliding(Sampler[Any]):
    """Yields one container again and again, which it fills anew: right for whoever reads a batch before the next."""

    def __init__(self, container: Any) -> None:
        self.window = container

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, 300, 3):
            for offset in range(3):
                self.window[offset] = start + offset
            yield self.window


class BadState(theirs.KeepsItsPlace):
    """Has a state that cannot be loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no")


class ForgetsItsPlace(theirs.KeepsItsPlace):
    """Has a state, and does not go on from it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = 0


class DrawsAsItGoes(theirs.KeepsItsPlace):
    """Every item is drawn from the generator that it holds."""

    def item(self) -> int:
        return int(self.rng.integers(1000))


def order_of(sampler: Any, **options: Any) -> WrappedSampler:
    return WrappedSampler(sampler, batch_size=1 if not isinstance(sampler, theirs.ShufflesInPlace) else None, **options)


def items_of(order: WrappedSampler, epoch: int = 0, progress: Progress | None = None) -> list[Any]:
    """The rest of an epoch."""
    batches = order.plan(epoch, 1, progress).batches(0)
    return [list(batch) if order.whole_batches else batch[0] for _, batch in batches]


def stopped(sampler: Any, count: int, epoch: int = 0, **options: Any) -> Progress:
    """The progress after earlier epochs and so many items, as a checkpoint gives it back."""
    order = order_of(sampler, **options)
    for earlier in range(epoch):
        items_of(order, earlier)
    plan = order.plan(epoch, 1)
    assert len(list(islice(plan.batches(0), count))) == count
    return through_json(plan.progress_after(count))


def resumed(sampler: Any, progress: Progress, **options: Any) -> list[Any]:
    return items_of(order_of(sampler, **options), progress.epoch, progress)


REMEMBERING = [
    *(theirs.CountsEpochs, CountsAtTheEnd, theirs.ShufflesInPlace, KeepsItsFirstDraw, MakesItsGenerator, GoesOn),
    lambda: theirs.Proxy(CountsAtTheEnd()),
]


class TestSamplersThatChangeThemselves:
    @pytest.mark.parametrize("make", REMEMBERING)
    def test_a_fresh_one_goes_on_exactly_from_any_stop(self, make: Callable[[], Any]) -> None:
        whole = order_of(make())
        expected = [items_of(whole, epoch) for epoch in range(3)]

        assert whole.remembers
        assert expected[0] != expected[1] != expected[2]
        for epoch, items in enumerate(expected):
            for count in (0, 1, len(items) // 2, len(items) - 1):
                order, progress = order_of(make()), stopped(make(), count, epoch)
                assert items_of(order, epoch, progress) == items[count:], (epoch, count)
                assert [items_of(order, later) for later in range(epoch + 1, 3)] == expected[epoch + 1 :]

    def test_a_pass_that_was_broken_off_is_begun_again_as_far(self) -> None:
        order = order_of(GoesOn())
        list(islice(order.plan(0, 1).batches(0), 4))
        plan = order.plan(1, 1)
        list(islice(plan.batches(0), 3))
        progress = through_json(plan.progress_after(3))

        assert progress.details["passes"] == [[0, 0, 4, 1]]
        assert resumed(GoesOn(), progress) == [4 + number for number in range(3, 9)]

    def test_many_passes_are_few_words_in_a_state(self) -> None:
        assert stopped(GoesOn(), 2, epoch=50).details["passes"] == [[0, 0, -1, 50]]

    def test_one_that_was_iterated_in_this_process_already_cannot_be_resumed(self) -> None:
        order = order_of(CountsAtTheEnd())
        items_of(order)
        items_of(order, 1)
        with pytest.raises(
            PositionError, match=r"CountsAtTheEnd has been iterated 2 times in this process, .* 1 times"
        ):
            items_of(order, 1, stopped(CountsAtTheEnd(), 3, epoch=1))

    def test_one_whose_passes_have_not_shown_yet_is_resumed_with_a_warning(self) -> None:
        order = order_of(CountsOnly([5, 3, 8]))
        items_of(order)
        items_of(order, 1)
        with pytest.warns(StatefulWarning, match=r"CountsOnly .* iterated 2 times in this process, and 1 times before"):
            assert items_of(order, 1, stopped(CountsOnly([5, 3, 8]), 1, epoch=1)) == [3, 8]

    def test_one_that_begins_later_than_with_epoch_0_is_warned_of(self) -> None:
        with pytest.warns(StatefulWarning, match="CountsEpochs changes itself in each of its passes, and begins"):
            items_of(order_of(theirs.CountsEpochs()), 2)

    def test_one_that_somebody_else_changes_between_epochs_is_warned_of(self) -> None:
        sampler = Listed([1, 2, 3])
        order = order_of(sampler)
        items_of(order)
        sampler.items = [4, 5, 6]
        said = "Listed was changed between two epochs by something else .* Save it beside the loader's state"
        with pytest.warns(StatefulWarning, match=said):
            assert items_of(order, 1) == [4, 5, 6]


@pytest.mark.parametrize("make", [theirs.OwnState, DrawsAsItGoes, ForgetsItsPlace, BadState])
@pytest.mark.parametrize(("epoch", "count"), [(0, 1), (0, 16), (0, 17), (1, 0), (1, 18)])
def test_a_sampler_with_a_state_goes_on_exactly(make: Callable[[], Any], epoch: int, count: int) -> None:
    order, resumable = order_of(make()), make in (theirs.OwnState, DrawsAsItGoes)
    expected = [items_of(order, earlier) for earlier in range(epoch + 1)][epoch]

    assert order.resume_mode == ("own_state" if resumable else "fast_forward")
    assert resumed(make(), stopped(make(), count, epoch)) == expected[count:]


def changed(*items: int) -> list[int]:
    return [index + 1000 * (index in items) for index in range(200)]


class TestDigests:
    @pytest.mark.parametrize(("item", "count"), [(0, 1), (64, 65), (64, 128)])
    def test_what_changed_before_the_last_digest_is_refused_at_the_first_item(self, item: int, count: int) -> None:
        progress = stopped(Listed(changed()), count)
        for _ in range(2):
            with pytest.raises(StateMismatchError, match=r"sequence at item \d+: .*Listed no longer yields"):
                resumed(Listed(changed(item)), progress)

    # Of whole batches no size is given.
    @pytest.mark.parametrize(("whole", "size"), [(False, 1), (False, 3), (True, 1)])
    def test_what_changed_after_the_latest_digest_is_refused_as_well(self, whole: bool, size: int) -> None:
        def items(*changes: int) -> list[Any]:
            numbers = changed(*changes)
            return [[number, number] for number in numbers] if whole else numbers

        def order(*changes: int) -> WrappedSampler:
            return WrappedSampler(Listed(items(*changes)), batch_size=None if whole else size)

        step = 1 if whole else size
        plan = order().plan(0, 1)
        # Fetched ahead, as workers do.
        list(islice(plan.batches(0), 60))
        for steps in (13, 41):
            progress = through_json(plan.progress_after(steps))
            latest = steps * step - 1
            with pytest.raises(StateMismatchError, match=r"sequence at item \d+: .*Listed no longer yields"):
                items_of(order(latest), 0, progress)

            with pytest.warns(StatefulWarning, match=f"yields others at items {latest + 1} to .*So the resume is not"):
                others = items_of(order(latest + 1), 0, progress)
            assert others[0] != items_of(order(), 0, progress)[0]
            again = order().plan(0, 1, progress)
            list(islice(again.batches(0), 2))
            assert again.progress_after(0) == progress
            assert but_ahead(again.progress_after(1)) == but_ahead(through_json(plan.progress_after(steps + 1)))

    def test_what_changed_behind_a_stop_in_the_first_epoch_is_refused_by_its_configuration(self) -> None:
        first, same, other = (order_of(changed(*items)).config() for items in ((), (), (199,)))
        assert first == same
        assert first["sequence"] != other["sequence"]

    def test_a_sampler_that_ends_before_the_progress_is_refused(self) -> None:
        progress = stopped(Listed(changed()), 80)
        with pytest.raises(PositionError, match="80 items of Listed were used in epoch 0, but now it ends before"):
            resumed(Listed(changed()[:70]), progress)

    def test_what_is_accepted_goes_on_with_a_warning_and_is_the_sequence_to_come(self) -> None:
        order = order_of(Listed(changed(64, 80)), accept="sequence")
        plan = order.plan(0, 1, stopped(Listed(changed()), 70))
        batches = plan.batches(0)
        with pytest.warns(StatefulWarning, match="Accepted: sequence at item 64"):
            next(batches)

        assert resumed(Listed(changed(64, 80)), plan.progress_after(1)) == changed(64, 80)[71:]

    def test_one_that_cannot_be_repeated_is_warned_of_at_its_first_item_and_not_resumed(self) -> None:
        with pytest.warns(StatefulWarning, match=r"ByTheClock yields something else at item \d+ of its first"):
            progress = stopped(theirs.ByTheClock(), 5)
        with pytest.raises(StateMismatchError, match="ByTheClock no longer"), pytest.warns(StatefulWarning):
            resumed(theirs.ByTheClock(), progress)

    def test_one_that_cannot_be_repeated_is_resumed_with_a_warning_if_accepted(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            progress = stopped(theirs.ByTheClock(), 5, accept="nondeterministic")
        with pytest.warns(StatefulWarning, match="ByTheClock differs from run to run"):
            assert len(resumed(theirs.ByTheClock(), progress, accept="nondeterministic")) == theirs.LENGTH - 5


def test_samplers_are_told_the_epoch_from_the_inside_out_but_not_one_that_was_told_another() -> None:
    told: list[str] = []

    class Told(Listed):
        epoch, parts = 0, ()

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch
            told.append(f"{self.items} {epoch}")

    inner, outer = Told("a"), Told("outer")
    outer.parts = (inner, {"deep": Told("b")})  # type: ignore[assignment]
    order = order_of(outer)
    # It is not to be tried: that would tell copies.
    vars(order)["facts"] = SamplerFacts()
    order.memory.tell_epoch(order, 3)
    inner.set_epoch(9)
    order.memory.tell_epoch(order, 4)

    assert told == ["a 3", "b 3", "outer 3", "a 9", "b 4", "outer 4"]


@pytest.mark.parametrize("kind", [list, UserList, np.array], ids=["list", "UserList", "numpy"])
def test_a_batch_that_is_filled_anew_is_served_as_it_was_yielded(kind: Any) -> None:
    plan = WrappedSampler(Sliding(kind([0, 0, 0])), batch_size=None).plan(0, 4)
    found = [[*map(int, batch)] for _, batch in plan.batches(1)]

    assert found == [[n, n + 1, n + 2] for n in range(3, 300, 12)]


def test_items_before_an_exception_are_served_except_those_that_are_looked_at_for_the_end() -> None:
    before, found = random.getstate(), []
    batches = order_of(theirs.Fails()).plan(0, 1).batches(0)
    with pytest.raises(KeyError, match="theirs"):
        found.extend(batch[0] for _, batch in batches)

    assert found == list(range(70))
    assert random.getstate() == before


def test_iterating_without_end_keeps_little() -> None:
    order = order_of(theirs.Endless())
    batches = order.plan(0, 1).batches(0)
    next(batches)
    tracemalloc.start()
    try:
        for _ in range(6000):
            next(batches)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 500_000


def test_a_long_fast_forward_is_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_pass, "LONG_FAST_FORWARD", 0)
    batches = order_of(theirs.Endless()).plan(0, 1, Progress(consumed=100)).batches(0)
    with pytest.warns(StatefulWarning, match=r"Endless was fast-forwarded by 100 items to item 100 of epoch 0"):
        next(batches)


@pytest.mark.parametrize("size", [48, 64, 1500])
def test_notes_are_the_same_on_every_way_to_an_item(size: int) -> None:
    def order() -> WrappedSampler:
        return WrappedSampler(Listed([(7919 * index) % 5000 for index in range(5000)]), batch_size=size)

    whole = order().plan(0, 1)
    expected, served = [], []
    for number, (_, batch) in enumerate(whole.batches(0), 1):
        expected.append(whole.progress_after(number).details["sampler"])
        served.append(batch)
    assert {note[0] for note in expected} >= {1024, 2048, 4096}, "no step has passed a noted item"
    for stop in range(1, len(served), 5):
        consumed = Progress(epoch=0, consumed=stop * size, details={"sampler": expected[stop - 1]})
        rest = order().plan(0, 1, consumed)
        for number, (_, batch) in enumerate(rest.batches(0), 1):
            assert batch == served[stop + number - 1]
            assert rest.progress_after(number).details["sampler"] == expected[stop + number - 1]


class StateOfGenerator(Sampler[int]):
    """Draws with replacement; its state is where its generator stands, and no position."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return 46

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(48, (1,), generator=self.generator)) for _ in range(46))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_state_that_begins_to_count_anew_is_not_taken_for_a_longer_epoch(num_replicas: int) -> None:
    def make() -> Any:
        loader: Any = DataLoader(range(48), batch_size=4, sampler=StateOfGenerator())
        return patch_dataloader(loader, seed=0, num_replicas=num_replicas, rank=0)

    whole = [[batch.tolist() for batch in loader] for loader in [make()] for _ in range(2)]
    loader = make()
    list(loader)
    batches = iter(loader)
    before = [next(batches).tolist() for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert before + [batch.tolist() for batch in resumed] == whole[1]


class PlansAhead(Sampler[list[int]]):
    """Plans batches of one length in all for the epoch that it is told, and behind its last one for the next."""

    def __init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.planned = epoch, list[list[int]]()
        left = random.Random(42 + epoch).sample(range(40), 40)
        while left:
            size = 3 + (left[0] * 7 + epoch) % 5
            self.planned, left = [*self.planned, left[:size]], left[size:]

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.planned
        self.set_epoch(self.epoch + 1)


@pytest.mark.filterwarnings("error")
def test_one_that_plans_the_next_epoch_behind_its_last_batch_is_asked_for_its_length_when_told_the_epoch() -> None:
    def make() -> Any:
        return DataLoader(range(40), batch_sampler=PlansAhead())  # type: ignore[arg-type]  # a range is a dataset

    def epochs(loader: Any) -> list[Any]:
        return [[batch.tolist() for batch in loader] for _ in range(4)]

    expected = epochs(make())
    assert len({len(batches) for batches in expected}) > 1
    assert epochs(patch_dataloader(make(), seed=0)) == expected
