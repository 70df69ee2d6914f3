"""A difference comes with what usually causes it: one broken sampler for each cause."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.honest import CountsItsOwnItems, Honest

from lightning_stateful.audit import Divergence, check_resume


class LoadsNothing(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class CountsPrefetched(Honest):
    def state_dict(self) -> dict[str, Any]:
        ahead = 2 if 0 < self.consumed < 12 - 2 else 0
        return {**super().state_dict(), "consumed": self.consumed + ahead}


class CountsAfterTheYield(Honest):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.order()[self.consumed]
            self.advance()
            if not self.consumed:
                return


class TakesOffTwice(Honest):
    loaded = 0

    def __iter__(self) -> Iterator[Any]:
        for index in self.order()[self.consumed : 12 - self.loaded]:
            self.advance()
            yield index

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = self.consumed


class StaysAtTheEnd(Honest):
    def advance(self) -> None:
        self.consumed += 1

    def __iter__(self) -> Iterator[Any]:
        for index in self.order()[self.consumed :]:
            self.advance()
            yield index
        self.epoch, self.consumed = self.epoch + 1, 0


class AlwaysAsLong(Honest):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(12):
            index = self.order()[self.consumed]
            self.advance()
            yield index


class DrawsValues(Honest):
    def item(self, index: int) -> Any:
        return torch.tensor(float(index)), torch.tensor(self.noise.random())

    def __init__(self, num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(num_replicas, rank)
        self.noise = random.Random(0)


class StartsEveryPassThere(Honest):
    start = 0

    def __iter__(self) -> Iterator[Any]:
        self.consumed = max(self.consumed, self.start)
        return super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.start = self.consumed


class CountsTheEpochAgain(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch += 1


class ForgetsTheEpoch(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed"]


class LoadsTheRank(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rank = state["rank"]


class DrawsItsOrder(Honest):
    salt = ""

    def order(self) -> list[int]:
        return random.Random(f"{self.salt}{self.epoch}").sample(range(12), 12)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.salt = "another stream of random numbers"


class ReadsOtherData(Honest):
    def order(self) -> list[int]:
        return [index + self.moved for index in super().order()]

    moved = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.moved = 1000


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


TWO = {"num_replicas": 2, "chain": ()}
OTHERS = {**TWO, "resize": (3,), "stops": [1]}
CAUSES: list[tuple[Callable[..., Honest], dict[str, Any], str]] = [
    (LoadsNothing, {}, "The epoch's first items came again: the state was not loaded, or iter() starts over."),
    (CountsPrefetched, {}, "The pass goes on 2 too far ahead: what was prefetched is counted, "),
    (
        CountsAfterTheYield,
        {"stops": [4]},
        "The pass goes on 1 too far back: the state lags behind ",
    ),
    (TakesOffTwice, {}, "The pass ended too early: what was consumed is taken off twice, "),
    (StaysAtTheEnd, {}, "Nothing was left: at the end of an epoch the state must be that of the next one's beginning."),
    (AlwaysAsLong, {}, "The pass is too long: it must end after the items that are left, "),
    (DrawsValues, {"key": first_of}, "The same samples with other values: seed augmentation by epoch and sample, "),
    (StartsEveryPassThere, {}, "A later pass begins where the resumed one did: "),
    (CountsTheEpochAgain, {"stops": [4]}, "These are items of epoch 1: loading counts the epoch and iter() again, "),
    (CountsTheEpochAgain, {"stops": [16]}, "These are items of epoch 2: loading counts the epoch and iter() again, "),
    (ForgetsTheEpoch, {"chain": ()}, "These are items of epoch 0: the epoch is not in the state, "),
    (LoadsTheRank, TWO, "These are items of another rank: the state holds the rank that saved it, "),
    (LoadsTheRank, {"num_replicas": 2, "stops": [], "chain": (2,)}, "These are items of another rank: "),
    (DrawsItsOrder, {}, "The same samples in another order: it is drawn from a generator that is not in the state."),
    (ReadsOtherData, {}, ""),
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


@pytest.mark.parametrize(("kind", "options", "cause"), CAUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_explained(kind: Callable[..., Honest], options: dict[str, Any], cause: str) -> None:
    found = divergence_of(kind, **options)

    assert found.cause.startswith(cause)
    assert bool(found.cause) == bool(cause)


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
