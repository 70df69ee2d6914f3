"""Every law of the contract can be broken, and the contract says which one was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.honest import CountsItsOwnItems, Honest

from lightning_stateful import testing
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.testing import LAWS, ContractError, ResumeContract


class ReadsItsPositionInIter(Honest):
    def __iter__(self) -> Iterator[int]:
        left, self._left = self.order()[self.consumed + self.rank :: self.num_replicas], 0
        return map(self._count, left)

    def _count(self, index: int) -> int:
        self.advance()
        return index


class RefusesItsOwnState(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("Call iter() first.")


class CountsInIter(Honest):
    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.order()[self.rank :: self.num_replicas])


class ForgetsAStateUntilTheFirstItem(Honest):
    _fresh = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._fresh = True

    def advance(self) -> None:
        self._fresh = False
        super().advance()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "consumed": 0} if self._fresh else state


class KeepsATupleInItsState(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "done": (self.epoch, self.consumed)}


class KeepsAnObjectInItsState(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "random": random.Random(0).getrandbits}


class AddsAKeyOnTheWay(Honest):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "buffer": []} if self.consumed else state


class GivesAwayItsInternals(Honest):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._state: dict[str, Any] = {}
        super().__init__(*arguments, **options)

    def state_dict(self) -> dict[str, Any]:
        self._state.update(super().state_dict())
        return self._state


class WritesIntoTheStateItLoads(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        state["consumed"] = None


class SavesItsRank(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rank": self.rank}


class TakesOverTheSavedSeed(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["config"]["seed"]
        super().load_state_dict(state)


class ShrinksWhenResumed(Honest):
    def __len__(self) -> int:
        return super().__len__() - self._resumed

    _resumed = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._resumed = state["consumed"]


class AcceptsEverything(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.consumed = state["epoch"], state["consumed"]


class MovesBeforeItRefuses(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"] + 1
        super().load_state_dict(state)


BROKEN: list[tuple[type[Honest], str]] = [
    (ReadsItsPositionInIter, "fresh"),
    (RefusesItsOwnState, "fresh"),
    (CountsInIter, "suffix"),
    (CountsInIter, "echo"),
    (ForgetsAStateUntilTheFirstItem, "echo"),
    (KeepsATupleInItsState, "plain"),
    (KeepsAnObjectInItsState, "plain"),
    (AddsAKeyOnTheWay, "steady"),
    (GivesAwayItsInternals, "snapshot"),
    (WritesIntoTheStateItLoads, "snapshot"),
    (SavesItsRank, "rank-free"),
    (CountsItsOwnItems, "rank-free"),
    (TakesOverTheSavedSeed, "not configuration"),
    (ShrinksWhenResumed, "not configuration"),
    (AcceptsEverything, "not configuration"),
    (MovesBeforeItRefuses, "not configuration"),
]


class TestAnHonestSampler(ResumeContract):
    """Pytest collects one test a law from a contract."""

    def make(self, num_replicas: int = 1, rank: int = 0) -> Honest:
        return Honest(num_replicas, rank, length=11)

    def make_other(self) -> Honest:
        return Honest(seed=1, length=11)


def test_every_law_is_a_function_and_a_test_and_broken_by_someone() -> None:
    names = [law.replace(" ", "_").replace("-", "_") for law in LAWS]

    assert {law for _, law in BROKEN} == set(LAWS)
    assert [getattr(testing, f"check_{name}") for name in names] == list(LAWS.values())
    assert {f"test_{name}" for name in names} == {name for name in dir(ResumeContract) if name.startswith("test_")}


@pytest.mark.parametrize(("broken", "law"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_subclass_of_the_contract_fails_in_the_test_of_the_broken_law(broken: type[Honest], law: str) -> None:
    class Contract(ResumeContract):
        def make(self, num_replicas: int = 1, rank: int = 0) -> Honest:
            return broken(num_replicas, rank)

        def make_other(self) -> Honest:
            return broken(seed=1)

    with pytest.raises(ContractError, match=f"^{law}: epoch ") as caught:
        getattr(Contract(), f"test_{law.replace(' ', '_').replace('-', '_')}")()

    assert caught.value.divergence.law == law
    assert caught.value.divergence.cause


def test_a_contract_without_make_says_what_to_define() -> None:
    with pytest.raises(ConfigurationError, match=r"Unfinished must define make\(self, num_replicas=1, rank=0\)"):
        type("Unfinished", (ResumeContract,), {})().test_fresh()
