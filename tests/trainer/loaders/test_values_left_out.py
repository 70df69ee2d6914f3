"""What the state of an iterable leaves out is named on a resume, wherever it stands: helpers, objects, iterators."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ledger import batches
from support.runs import ended, train_alone
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.errors import StatefulWarning

NUMBERS = 40


class Positioned(IterableDataset[Any]):
    """Numbers in order, of which a stage may keep some back; its state is the number of those that were yielded."""

    loaded = 0

    def read(self) -> Iterator[int]:
        first, self.loaded = self.loaded, 0
        for self.at in range(first, NUMBERS):
            yield self.at

    def stage(self) -> Iterator[int]:
        return self.read()

    def __iter__(self) -> Iterator[Any]:
        for number in self.stage():
            yield {"id": number, "x": torch.ones(4)}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"]


def kept_back(numbers: Iterable[int]) -> Iterator[int]:
    """Yields each fifth number at the end."""
    late: list[int] = []
    for number in numbers:
        if number % 5:
            yield number
        else:
            late.append(number)
    yield from late


class InAnAttribute(Positioned):
    def stage(self) -> Iterator[int]:
        self.late: list[int] = []
        for number in self.read():
            if number % 5:
                yield number
            else:
                self.late.append(number)
        yield from self.late


class InAHelper(Positioned):
    def stage(self) -> Iterator[int]:
        return kept_back(self.read())


class InAHelperOfAHelper(Positioned):
    def stage(self) -> Iterator[int]:
        return (number for number in map(int, kept_back(self.read())))


class Stage:
    """Keeps back by way of attributes."""

    def __init__(self) -> None:
        self.late: list[int] = []

    def __call__(self, numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            if number % 5:
                yield number
            else:
                self.late.append(number)
        while self.late:
            yield self.late.pop()


class InAnObject(Positioned):
    def __init__(self) -> None:
        self.behind = Stage()

    def stage(self) -> Iterator[int]:
        return self.behind(self.read())


class InAnIteratorOfObjects(Positioned):
    """An iterator of the user's own, with slots."""

    class Batches:
        __slots__ = ("late", "numbers")

        def __init__(self, numbers: Iterator[int]) -> None:
            self.numbers, self.late = numbers, list[int]()

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            for number in self.numbers:
                if number % 5:
                    return number
                self.late.append(number)
            if self.late:
                return self.late.pop()
            raise StopIteration

    def stage(self) -> Iterator[int]:
        return self.Batches(self.read())


class InATuple(Positioned):
    """Adds the last two numbers."""

    def stage(self) -> Iterator[int]:
        last = (0, 0)
        for number in self.read():
            yield number + sum(last) * (number > 30)
            last = (last[1], number) if number < 5 else last


class InACycle(Positioned):
    """Adds one of three numbers in turn."""

    def __init__(self) -> None:
        self.signs = itertools.cycle([0, 100, 200])

    def stage(self) -> Iterator[int]:
        for number in self.read():
            yield number + (next(self.signs) if number % 7 == 6 else 0)


class InACount(Positioned):
    def __init__(self) -> None:
        self.number = itertools.count()

    def stage(self) -> Iterator[int]:
        for number in self.read():
            yield number + (100 * next(self.number) if number % 7 == 6 else 0)


NAMED = {
    InAnAttribute: "InAnAttribute.late",
    InAHelper: "kept_back.late",
    InAHelperOfAHelper: "kept_back.late",
    InAnObject: "InAnObject.behind.late",
    InAnIteratorOfObjects: "Batches.late",
    InATuple: "stage.last",
    InACycle: "InACycle.signs",
    InACount: "InACount.number",
}


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_value_that_a_state_leaves_out_is_named_in_the_log(
    tmp_path: Path, kind: Any, num_workers: int, caplog: Any
) -> None:
    def make() -> Any:
        return DataLoader(kind(), batch_size=2, num_workers=num_workers)

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_steps=6)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=1)
    said = [one for one in caplog.messages if "does not hold what it held before the stop in " in one]
    assert [NAMED[kind] in one for one in said] == [True], said


def drawn_from(numbers: Iterable[int], generator: random.Random) -> Iterator[int]:
    """Adds a random number now and then."""
    for number in numbers:
        yield number + (generator.randrange(1000) if number % 14 == 13 else 0)


class DrawsInAHelper(Positioned):
    def stage(self) -> Iterator[int]:
        return drawn_from(self.read(), random.Random(0))


class Draws(Stage):
    """Holds the generator."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self, numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            yield number + (self.generator.randrange(1000) if number % 14 == 13 else 0)


class DrawsInAnObject(InAnObject):
    def __init__(self) -> None:
        self.behind = Draws()


DRAWN = {DrawsInAHelper: "drawn_from.generator", DrawsInAnObject: "DrawsInAnObject.behind.generator"}


@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.__name__)
def test_a_random_generator_that_a_state_leaves_out_is_warned_of_once_drawn_from(tmp_path: Path, kind: Any) -> None:
    def make() -> Any:
        return DataLoader(kind(), batch_size=2)

    # 13 was drawn for before the stop, and 27 is not.
    ended(tmp_path / "x.ckpt", make, run=train_alone, max_steps=10)
    with pytest.warns(StatefulWarning, match=f"does not hold what it held before the stop in {DRAWN[kind]}"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=1)


OUTSIDE = random.Random(0)


class DrawsInABlock(Positioned):
    """Shuffles blocks by a generator in a list; its state has the order of the block that it is in."""

    order: Any = None

    def __init__(self) -> None:
        self.held: Any = [random.Random(0)]

    def generator(self) -> random.Random:
        return self.held[0]

    def stage(self) -> Iterator[int]:
        first, self.loaded = self.loaded, 0
        for self.at in range(first, NUMBERS):
            if self.at % 10 == 0:
                self.order = self.generator().sample(range(10), 10)
            yield self.at // 10 * 10 + self.order[self.at % 10]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.order = state["order"]


class OfADict(DrawsInABlock):
    def __init__(self) -> None:
        self.held = {"order": random.Random(0)}

    def generator(self) -> random.Random:
        return self.held["order"]


class OfAnObjectInAList(DrawsInABlock):
    def __init__(self) -> None:
        self.held = [Draws()]

    def generator(self) -> random.Random:
        return self.held[0].generator


class Net(torch.nn.Module):
    """A module with one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)


class OfAModule(DrawsInABlock):
    def __init__(self) -> None:
        self.held = Net()

    def generator(self) -> random.Random:
        return self.held.generator


class OfAVariable(DrawsInABlock):
    def __init__(self) -> None:
        OUTSIDE.seed(0)

    def generator(self) -> random.Random:
        return OUTSIDE


IN_CONTAINERS = {
    DrawsInABlock: "held.0",
    OfADict: "held.order",
    OfAnObjectInAList: "held.0.generator",
    OfAModule: "held.generator",
    OfAVariable: "__init__.OUTSIDE",
}


@pytest.mark.parametrize("kind", IN_CONTAINERS, ids=lambda kind: kind.__name__)
# Within the last block of a pass, and at its end.
@pytest.mark.parametrize("steps", [18, 20])
def test_a_generator_in_a_container_that_a_state_leaves_out_is_warned_of_once_drawn_from(
    tmp_path: Path, kind: Any, steps: int
) -> None:
    def make() -> Any:
        return DataLoader(kind(), batch_size=2)

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_steps=steps)
    named = f"does not hold what it held before the stop in {kind.__name__}.{IN_CONTAINERS[kind]}"
    with pytest.warns(StatefulWarning, match=named):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=2)


class Restores(DrawsInABlock):
    """Its state has where the generator stands; another one is there that nobody draws from, and one for each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.held += [random.Random()]
        self.of_pass: list[random.Random] = []

    def stage(self) -> Iterator[int]:
        self.of_pass = [random.Random(0)]
        self.of_pass[0].random()
        return super().stage()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": self.generator().getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.generator().setstate(state["generator"])


@pytest.mark.parametrize("steps", [13, 18, 20, 33])
def test_a_generator_in_a_container_that_a_state_restores_or_nobody_draws_from_is_not_named(
    tmp_path: Path, steps: int
) -> None:
    def make() -> Any:
        return DataLoader(Restores(), batch_size=2)

    whole = train_alone(make, max_epochs=3)
    before = ended(tmp_path / "x.ckpt", make, run=train_alone, max_steps=steps)
    after = train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    assert batches(before.ledger + after.ledger) == batches(whole.ledger)


class Whole(Positioned):
    """Leaves nothing out: its stages hold what follows from where they stand."""

    def stage(self) -> Iterator[int]:
        for (number,) in zip(filter(lambda number: number >= 0, self.read()), strict=True):
            yield number


def test_of_one_that_leaves_nothing_out_nothing_is_said(tmp_path: Path, caplog: Any) -> None:
    def make() -> Any:
        return DataLoader(Whole(), batch_size=2)

    ended(tmp_path / "x.ckpt", make, run=train_alone, max_steps=6)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=1)
    assert not [one for one in caplog.messages if "does not hold" in one]


class Ends(Positioned):
    """Shuffles by a generator that its state has, and seeds it anew behind its last sample; counts its passes."""

    passes = 0

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def stage(self) -> Iterator[int]:
        first, self.loaded = self.loaded, 0
        for self.at in range(first, NUMBERS):
            yield self.generator.randrange(1000)
        self.passes += 1
        self.at, self.generator = -1, random.Random(self.passes)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "passes": self.passes, "generator": self.generator.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.passes = state["passes"]
        self.generator.setstate(state["generator"])


class Forgets(Ends):
    """Its state has no count of passes."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "passes": 0}


@pytest.mark.parametrize("kind", [Ends, Forgets])
@pytest.mark.parametrize("stop", [{"max_epochs": 1}, {"max_steps": 26}, {"max_epochs": 2}], ids=str)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_later_passes_follow_from_is_compared_at_the_end_of_one_and_within_a_later_one(
    tmp_path: Path, kind: Any, stop: dict[str, int], num_workers: int, caplog: Any
) -> None:
    def make() -> Any:
        return DataLoader(kind(), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)

    whole = train_alone(make, max_epochs=3)
    before = ended(tmp_path / "x.ckpt", make, run=train_alone, **stop)
    with caplog.at_level("INFO", logger="lightning.pytorch"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = train_alone(make, ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    said = [one for one in caplog.messages if "before the stop in Forgets.passes" in one]
    said += [str(one.message) for one in caught if "a random generator that does not stand" in str(one.message)]
    is_exact = batches(before.ledger + after.ledger) == batches(whole.ledger)
    # At the end of the first pass it is 0 as without the stop.
    assert (is_exact, len(said)) == ((True, 0) if kind is Ends or stop == {"max_epochs": 1} else (False, 1))
