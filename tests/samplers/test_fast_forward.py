"""A sampler is brought to where it is to go on: digests, states of its own, and what is kept in memory."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from collections import UserList
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support import samplers as theirs
from torch.utils.data import Sampler

from lightning_stateful.core import Progress
from lightning_stateful.errors import PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers import fast_forward
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.wrapped_sampler import WrappedSampler


class Listed(Sampler[Any]):
    """Yields what it is given."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


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


class Range(Sampler[int]):
    """Counts without end, and holds nothing."""

    def __iter__(self) -> Iterator[int]:
        index = 0
        while True:
            yield index
            index += 1


class FailsWithLen(theirs.Fails):
    """The same, and says how many there would be."""

    def __len__(self) -> int:
        return 100


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """More and more is drawn at a time, however long it takes."""
    monkeypatch.setattr(fast_forward, "_LONG_DRAW", math.inf)


def slots_of(order: WrappedSampler, progress: Progress | None = None) -> list[Any]:
    """The rest of an epoch."""
    return [batch if order.whole_batches else batch[0] for _, batch in order.plan(0, 1, progress).batches(0)]


def stopped(sampler: Any, count: int, **options: Any) -> Progress:
    """The progress after so many slots, as a checkpoint gives it back."""
    plan = WrappedSampler(sampler, **options).plan(0, 1)
    batches = plan.batches(0)
    for _ in range(count):
        next(batches)
    return Progress.from_dict(json.loads(json.dumps(plan.progress_after(count).to_dict())))


def resumed(sampler: Any, progress: Progress, **options: Any) -> list[Any]:
    return slots_of(WrappedSampler(sampler, **options), progress)


def changed(*slots: int) -> list[int]:
    return [index + 1000 * (index in slots) for index in range(200)]


class TestDigests:
    @pytest.mark.parametrize(("slot", "count"), [(0, 1), (64, 65), (64, 128)])
    def test_what_changed_before_the_last_digest_is_refused_at_the_first_slot(self, slot: int, count: int) -> None:
        progress = stopped(Listed(changed()), count)
        for _ in range(2):
            with pytest.raises(StateMismatchError, match=r"sequence at item \d+: .*Listed no longer yields"):
                resumed(Listed(changed(slot)), progress)

    def test_a_sampler_that_ends_before_the_progress_is_refused(self) -> None:
        progress = stopped(Listed(changed()), 80)
        with pytest.raises(PositionError, match="80 items of Listed were used in epoch 0, but now it ends before"):
            resumed(Listed(changed()[:70]), progress)

    def test_what_is_accepted_goes_on_with_a_warning_and_is_the_sequence_to_come(self) -> None:
        order = WrappedSampler(Listed(changed(64, 80)), accept="sequence")
        plan = order.plan(0, 1, stopped(Listed(changed()), 70))
        batches = plan.batches(0)
        with pytest.warns(StatefulWarning, match="Accepted: sequence at item 64"):
            next(batches)

        assert resumed(Listed(changed(64, 80)), plan.progress_after(1)) == changed(64, 80)[71:]


class TestStates:
    @pytest.mark.parametrize("make", [theirs.OwnState, DrawsAsItGoes, ForgetsItsPlace, BadState])
    @pytest.mark.parametrize("count", [1, 16, 17])
    def test_a_sampler_with_a_state_goes_on_exactly(self, make: Callable[[], Any], count: int) -> None:
        expected = slots_of(WrappedSampler(make()))

        assert resumed(make(), stopped(make(), count)) == expected[count:]

    def test_a_state_that_leads_nowhere_is_done_without(self) -> None:
        assert WrappedSampler(ForgetsItsPlace()).resume_mode == "fast_forward"
        assert WrappedSampler(BadState()).resume_mode == "fast_forward"
        assert WrappedSampler(DrawsAsItGoes()).resume_mode == "own_state"


@pytest.mark.usefixtures("patient")
class TestDrawnAhead:
    @pytest.mark.parametrize("kind", [list, UserList, np.array], ids=["list", "UserList", "numpy"])
    def test_a_batch_that_is_filled_anew_is_served_as_it_was_yielded(self, kind: Any) -> None:
        found = slots_of(WrappedSampler(Sliding(kind([0, 0, 0])), batch_size=None))

        assert [[*map(int, batch)] for batch in found] == [[n, n + 1, n + 2] for n in range(0, 300, 3)]

    @pytest.mark.parametrize(("make", "served"), [(theirs.Fails, 69), (FailsWithLen, 70)], ids=["unsized", "sized"])
    def test_slots_before_an_exception_are_served_except_those_that_are_looked_at_for_the_end(
        self, make: Callable[[], Any], served: int
    ) -> None:
        before, found = random.getstate(), []
        batches = WrappedSampler(make()).plan(0, 1).batches(0)
        with pytest.raises(KeyError, match="theirs"):
            found.extend(batch[0] for _, batch in batches)

        assert found == list(range(served))
        assert random.getstate() == before


class TestCost:
    @pytest.mark.usefixtures("patient")
    def test_iterating_without_end_keeps_little(self) -> None:
        order = WrappedSampler(Range())
        order.check()
        batches = order.plan(0, 1).batches(0)
        tracemalloc.start()
        try:
            for _ in range(3 * 10**4):
                next(batches)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

        assert peak < 1_500_000

    def test_a_long_fast_forward_is_worth_a_word(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast_forward, "_LONG_FAST_FORWARD", 0)
        batches = WrappedSampler(Range()).plan(0, 1, Progress(consumed=100)).batches(0)
        with pytest.warns(StatefulWarning, match=r"Range was fast-forwarded by 100 items to item 100 of epoch 0"):
            next(batches)


@dataclass(frozen=True)
class Named:
    """Something with an id."""

    id: str
    text: str = ""


DIFFERENT: list[Any] = [
    *(0, 1, -1, 2**70, 1.5, "1", b"1", None),
    *([1], [1, 2], [2, 1], [12], [[1], 2], [[1, 2]], [[1], [2]], [], [[]]),
    *(["a", "b"], ["ab"], ["a;strb"], (1, "a"), ("a", 1)),
    *({"a": 1}, {"b": 1}, {"a": 2}),
    *(np.array([1, 3]), np.array([[1, 3]]), torch.tensor([0.5])),
    *(Named("x"), Named("y"), {Named("x"), Named("y")}),
]


class TestDigest:
    def test_different_slots_have_different_digests(self) -> None:
        assert len({digest(item) for item in DIFFERENT}) == len(DIFFERENT)

    @pytest.mark.parametrize(
        ("item", "same"),
        [
            ([1, 2], np.array([1, 2])),
            ((1, 2), [1, 2]),
            (3, np.int32(3)),
            (Named("x", "one"), Named("x", "two")),
        ],
        ids=str,
    )
    def test_indices_are_alike_in_whatever_they_are_held(self, item: Any, same: Any) -> None:
        assert digest(item) == digest(same)

    def test_digests_are_the_same_on_every_platform(self) -> None:
        assert (digest(3), digest([1, 2]), digest("a")) == ("50163cd4ae7e6fb1", "74f912167ab67550", "035081a1cd3e973d")
