"""Every law of the contract can be broken, and the contract says which one was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_stateful import testing
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.testing import LAWS, ContractError, Recorder, ResumeContract


class Honest:
    """A sampler in plain Python that obeys every law; each class below breaks one."""

    def __init__(self, length: int, num_replicas: int = 1, rank: int = 0, seed: int = 0) -> None:
        self.length, self.num_replicas, self.rank, self.seed = length, num_replicas, rank, seed
        self._epoch = self._consumed = 0

    def __len__(self) -> int:
        return -(-self.length // self.num_replicas)

    def _order(self) -> list[int]:
        return random.Random(f"{self.seed} {self._epoch}").sample(range(self.length), self.length)

    def __iter__(self) -> Iterator[int]:
        while True:
            order, start = self._order(), self._consumed
            served = min(self.num_replicas, self.length - start)
            self._advance(served)
            yield order[start + self.rank % served]
            if not self._consumed:
                return

    def _advance(self, served: int) -> None:
        self._consumed += served
        if self._consumed == self.length:
            self._epoch, self._consumed = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        config = {"length": self.length, "seed": self.seed}
        return {"epoch": self._epoch, "consumed": self._consumed, "config": config}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["config"] != {"length": self.length, "seed": self.seed}:
            raise ValueError(f"The state is of {state['config']}.")
        self._epoch, self._consumed = state["epoch"], state["consumed"]


class ReadsItsPositionInIter(Honest):
    def __iter__(self) -> Iterator[int]:
        left, self._left = self._order()[self._consumed + self.rank :: self.num_replicas], 0
        return map(self._count, left)

    def _count(self, index: int) -> int:
        self._advance(min(self.num_replicas, self.length - self._consumed))
        return index


class RefusesItsOwnState(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("Call iter() first.")


class CountsInIter(Honest):
    def __iter__(self) -> Iterator[int]:
        self._epoch += 1
        return iter(self._order()[self.rank :: self.num_replicas])


class ForgetsAStateUntilTheFirstItem(Honest):
    _fresh = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._fresh = True

    def _advance(self, served: int) -> None:
        self._fresh = False
        super()._advance(served)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "consumed": 0} if self._fresh else state


class KeepsATupleInItsState(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "done": (self._epoch, self._consumed)}


class KeepsAnObjectInItsState(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "random": random.Random(0).getrandbits}


class AddsAKeyOnTheWay(Honest):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "buffer": []} if self._consumed else state


class GivesAwayItsInternals(Honest):
    def __init__(self, length: int, num_replicas: int = 1, rank: int = 0, seed: int = 0) -> None:
        self._state: dict[str, Any] = {}
        super().__init__(length, num_replicas, rank, seed)

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


class CountsItsOwnItems(Honest):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "consumed": self._consumed // self.num_replicas}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._consumed = state["consumed"] * self.num_replicas


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
        self._epoch, self._consumed = state["epoch"], state["consumed"]


class MovesBeforeItRefuses(Honest):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"] + 1
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
    """What pytest collects from a contract: one test a law."""

    def make(self, num_replicas: int = 1, rank: int = 0) -> Honest:
        return Honest(11, num_replicas, rank)

    def make_other(self) -> Honest:
        return Honest(11, seed=1)


def test_every_law_is_a_function_and_a_test_and_broken_by_someone() -> None:
    names = [law.replace(" ", "_").replace("-", "_") for law in LAWS]

    assert {law for _, law in BROKEN} == set(LAWS)
    assert [getattr(testing, f"check_{name}") for name in names] == list(LAWS.values())
    assert {f"test_{name}" for name in names} == {name for name in dir(ResumeContract) if name.startswith("test_")}


@pytest.mark.parametrize(("broken", "law"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_subclass_of_the_contract_fails_in_the_test_of_the_broken_law(broken: type[Honest], law: str) -> None:
    class Contract(ResumeContract):
        def make(self, num_replicas: int = 1, rank: int = 0) -> Honest:
            return broken(11, num_replicas, rank)

        def make_other(self) -> Honest:
            return broken(11, seed=1)

    with pytest.raises(ContractError, match=f"^{law}: epoch ") as caught:
        getattr(Contract(), f"test_{law.replace(' ', '_').replace('-', '_')}")()

    assert caught.value.divergence.law == law
    assert caught.value.divergence.cause


# torchdata's own constructor calls what torch deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_torchdata_loader_breaks_the_laws_that_it_does_not_promise() -> None:
    make = Recorder(lambda num_replicas, rank: StatefulDataLoader(list(range(12)), batch_size=2))
    other = {"make_other": lambda: StatefulDataLoader(list(range(12)), batch_size=3)}
    for law in ("fresh", "suffix", "echo", "not configuration"):
        with pytest.raises(ContractError, match=f"^{law}: "):
            LAWS[law](make, **(other if law == "not configuration" else {}))


def test_all_laws_of_a_contract_read_one_recording() -> None:
    made: list[tuple[int, int]] = []

    class Contract(ResumeContract):
        stops = (3,)

        def make(self, num_replicas: int = 1, rank: int = 0) -> Honest:
            made.append((num_replicas, rank))
            return Honest(11, num_replicas, rank)

    Contract().test_suffix()
    before = len(made)
    Contract().test_plain()
    Contract().test_snapshot()

    # The run without stops, the run with them, the resume, and the five objects of the chain of kills.
    assert made == [(1, 0)] * 8
    assert len(made) == before


def test_a_contract_without_make_says_what_to_define() -> None:
    with pytest.raises(ConfigurationError, match=r"Unfinished must define make\(self, num_replicas=1, rank=0\)"):
        type("Unfinished", (ResumeContract,), {})().test_fresh()
