"""A difference comes with what usually causes it: one fault for each cause."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.honest import CountsItsOwnItems, Honest

from lightning_stateful.audit import Divergence, check_resume


class Resumed(Honest):
    """In every pass that follows a state, it yields what its fault makes of it."""

    def __init__(self, fault: Callable[[Resumed], list[Any]], num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(num_replicas, rank)
        self.fault, self.start, self.is_first = fault, 0, True

    def left(self, epoch: int | None = None) -> list[Any]:
        """The rest of the present epoch, or as much of another one."""
        present, self.epoch = self.epoch, self.epoch if epoch is None else epoch
        samples = self.order()[self.consumed :]
        self.epoch = present
        return samples

    def __iter__(self) -> Iterator[Any]:
        if not self.start:
            yield from super().__iter__()
            return
        items = self.fault(self)
        self.epoch, self.consumed, self.is_first = self.epoch + 1, 0, False
        yield from items

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.start = self.consumed or 12


class LoadsNothing(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class DrawsValues(Honest):
    def item(self, index: int) -> Any:
        return torch.tensor(float(index)), torch.tensor(self.noise.random())

    def __init__(self, num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(num_replicas, rank)
        self.noise = random.Random(0)


class LoadsTheRank(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rank = state["rank"]


class BeginsAnewOnOtherRanks(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ranks": self.num_replicas}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["ranks"] != self.num_replicas:
            self.consumed = 0


class ShufflesByTheNumberOfRanks(Honest):
    def order(self) -> list[int]:
        return random.Random(self.epoch + self.num_replicas).sample(range(12), 12)


class MovesWhenAsked(Honest):
    def state_dict(self) -> dict[str, Any]:
        self.epoch += 0 if self.consumed else 1
        return super().state_dict()


class DrawsWithoutASeed(Honest):
    generator = random.Random(0)

    def item(self, index: int) -> float:
        return self.generator.random()


def first_of(item: Any) -> list[Any]:
    return [int(item[0])]


# What a pass that goes on in the middle yields, where the state was taken, and the beginning of the cause.
FAULTS: list[tuple[Callable[[Resumed], list[Any]], int, str]] = [
    (lambda made: made.order(), 4, "The epoch's first items came again: the state was not loaded"),
    (lambda made: made.left()[2:], 4, "The pass goes on 2 too far ahead: what was prefetched is counted"),
    (lambda made: made.order()[made.consumed - 1 :], 4, "The pass goes on 1 too far back: the state lags behind"),
    (lambda made: made.left()[:-4], 4, "The pass ended too early: what was consumed is taken off twice"),
    (lambda made: [], 12, "Nothing was left: at the end of an epoch the state must be that of the next one's"),
    (lambda made: [*made.left(), 0], 4, "The pass is too long: it must end after the items that are left"),
    (lambda made: made.left() if made.is_first else made.order()[made.start :], 4, "A later pass begins where"),
    (lambda made: made.left(1), 4, "These are items of epoch 1: loading counts the epoch and iter() again"),
    (lambda made: made.left(2), 16, "These are items of epoch 2: loading counts the epoch and iter() again"),
    (lambda made: made.left(0), 16, "These are items of epoch 0: the epoch is not in the state"),
    (lambda made: made.left()[::-1], 4, "The same samples in another order: it is drawn from a generator"),
    (lambda made: [index + 1000 for index in made.left()], 4, ""),
]
TWO = {"num_replicas": 2, "chain": ()}
OTHERS = {**TWO, "resize": (3,), "stops": [1]}
CAUSES: list[tuple[Callable[..., Honest], dict[str, Any], str]] = [
    (DrawsValues, {"key": first_of}, "The same samples with other values: seed augmentation by epoch and sample, "),
    (LoadsTheRank, TWO, "These are items of another rank: the state holds the rank that saved it, "),
    (LoadsTheRank, {"num_replicas": 2, "stops": [], "chain": (2,)}, "These are items of another rank: "),
    (CountsItsOwnItems, OTHERS, "The state holds the rank's own count of items: "),
    (BeginsAnewOnOtherRanks, OTHERS, "The epoch begins anew on other ranks: "),
    (ShufflesByTheNumberOfRanks, OTHERS, "What is left must be dealt to the ranks anew, "),
    (MovesWhenAsked, {}, "Runs differ only when states are taken: state_dict() must not change anything."),
    (DrawsWithoutASeed, {}, "Two objects of the factory differ: one draws from an unseeded generator, "),
]


def divergence_of(kind: Callable[..., Honest], **options: Any) -> Divergence:
    result = check_resume(kind, **{"stops": "every", **options})
    assert result.divergence is not None
    return result.divergence


@pytest.mark.parametrize(("fault", "stop", "cause"), FAULTS, ids=[cause[:30] for _, _, cause in FAULTS])
def test_a_fault_of_a_resumed_pass_is_explained(fault: Any, stop: int, cause: str) -> None:
    found = divergence_of(partial(Resumed, fault), stops=[stop], chain=())

    assert found.cause.startswith(cause)
    assert bool(found.cause) == bool(cause)


@pytest.mark.parametrize(("kind", "options", "cause"), CAUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_explained(kind: Callable[..., Honest], options: dict[str, Any], cause: str) -> None:
    assert divergence_of(kind, **options).cause.startswith(cause)


def test_the_message_names_the_samples_where_a_key_tells_them() -> None:
    class Features(LoadsNothing):
        def item(self, index: int) -> Any:
            return {"index": index, "x": torch.zeros(2)}

    found = divergence_of(Features, key=lambda item: [item["index"]])
    first, second, *_ = Honest().order()

    assert (found.law, found.epoch, found.step, found.rank, found.stop) == ("suffix", 0, 1, 0, 1)
    assert (found.expected_samples, found.got_samples) == ([second], [first])
    assert str(found).splitlines() == [
        f"suffix: epoch 0, step 1, rank 0, stopped after 1 items: item['index']: expected {second}, got {first}",
        f"  expected {{'index': {second}, 'x': tensor([0., 0.])}}",
        f"  got      {{'index': {first}, 'x': tensor([0., 0.])}}",
        f"  samples  [{second}] expected, [{first}] got",
        "  usual cause: The epoch's first items came again: the state was not loaded, or iter() starts over.",
    ]


def test_an_error_after_the_first_difference_does_not_hide_it() -> None:
    class Fails(LoadsNothing):
        def item(self, index: int) -> Any:
            if self.broken and self.consumed > 3:
                raise OSError("disk on fire")
            return index

        broken = False

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.broken = True

    assert divergence_of(Fails, stops=[5]).cause.startswith("The epoch's first items came again")
