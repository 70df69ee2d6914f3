"""Generators that objects hold: found, seeded by batch and place, and put back."""

from __future__ import annotations

import functools
import pickle
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lightning_stateful.generators.generator_states import GeneratorState, state_for
from lightning_stateful.generators.held_generators import HeldGenerators
from lightning_stateful.generators.rng import state_of_generator

MAKERS: dict[str, Any] = {
    "pcg64": lambda: np.random.default_rng(1),
    "philox": lambda: np.random.Generator(np.random.Philox(1)),
    "mt19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "RandomState": lambda: np.random.RandomState(1),
    "Random": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}
VARIABLE = np.random.default_rng(3)


class Holder:
    """Holds whatever it is given."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    __slots__ = ("generator",)


class OfClass:
    R = np.random.RandomState(1)


class Strict:
    """Fails wherever it is asked for anything."""

    def __init__(self, held: Any) -> None:
        self.held = held

    @property
    def shown(self) -> Any:
        raise AssertionError("asked for a property")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    __len__ = __iter__ = __call__ = shown.fget  # type: ignore[assignment]


def draw(generator: Any) -> tuple[float, ...]:
    """A whole number, of which some keep half a word, and normal numbers, of which some keep a second."""
    if isinstance(generator, torch.Generator):
        return tuple(torch.randn(3, generator=generator).tolist())
    if isinstance(generator, random.Random):
        return generator.random(), generator.gauss(0, 1)
    whole = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return float(whole(0, 99, dtype=np.uint32)), float(generator.standard_normal()), float(generator.random())


def drawn(generator: Any, root: Any, seed: int = 5) -> tuple[float, ...]:
    return HeldGenerators(dataset=root).isolated(seed, lambda: draw(generator))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_each_kind_is_seeded_by_batch_and_place_and_put_back(make: Any) -> None:
    one, other = make(), make()
    draw(other)
    # The second of two normal numbers is at hand.
    draw(one)
    before, held = state_of_generator(one), HeldGenerators(dataset=Holder(a=one, b=make()))
    found = [held.isolated(seed, lambda: (draw(one), draw(one))) for seed in (5, 6, 5)]

    assert state_of_generator(one) == before
    assert found[0] == found[2] != found[1]
    assert drawn(other, Holder(a=other)) == found[0][0] != drawn(other, Holder(b=other))
    expected = make()
    draw(expected)
    assert draw(one) == draw(expected)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_state_is_read_and_put_back_whatever_was_drawn(make: Any) -> None:
    generator = make()
    state = state_for(generator, 7)
    for _ in range(400):
        held, expected = state.get(), draw(generator)
        state.put(held)
        assert draw(generator) == expected


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_state_set_in_memory_is_the_one_that_its_functions_set(make: Any) -> None:
    one, other = make(), make()
    for generator in (one, other):
        draw(generator)
    state_for(one, 7).seed(2**64 - 3)
    GeneratorState(other, 7).seed(2**64 - 3)

    assert state_of_generator(one) == state_of_generator(other)
    assert [draw(one) for _ in range(300)] == [draw(other) for _ in range(300)]


def in_closure(generator: Any) -> Any:
    return lambda: draw(generator)


def by_default(generator: Any) -> Any:
    return lambda given=generator, **_: given


PLACES: dict[str, Any] = {
    "a list in a dict": lambda g: Holder(transforms={"a": [None, Holder(g=g)]}),
    "a tuple of objects": lambda g: Holder(x=(Holder(), Holder(g=g))),
    "a slot": lambda g: [setattr(held := Slotted(), "generator", g), held],
    "a closure": in_closure,
    "a default": by_default,
    "a partial": lambda g: functools.partial(draw, generator=[g]),
    "a bound method": lambda g: Holds(g).forward,
    "a method of the generator": lambda g: Holder(draw=g.normal),
    "a module of torch": lambda g: torch.nn.Sequential(torch.nn.Linear(2, 2), Holds(g)),
    "an object that must not be asked": lambda g: Strict([g]),
    "many samples": lambda g: Holder(samples=[Holder() for _ in range(5000)], g=g),
}


class Holds(torch.nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_it_is_found_in(place: Any) -> None:
    found = set()
    for number in (1, 2):
        generator = np.random.default_rng(number)
        found.add(drawn(generator, place(generator)))

    assert len(found) == 1


def test_it_is_found_in_a_class_and_in_a_variable_of_a_module_of_ones_own() -> None:
    assert drawn(OfClass.R, Holder(x=OfClass())) == drawn(OfClass.R, Holder(x=OfClass()))
    assert drawn(VARIABLE, lambda: VARIABLE.random()) == drawn(VARIABLE, lambda: VARIABLE.random())


class Draws:
    def draw(self) -> float:
        return float(VARIABLE.random())


class OfDraws:
    """Its functions name the class of what it holds, and another attribute is that class."""

    def __init__(self) -> None:
        self.an, self.held = Draws, Draws()


def test_it_is_found_behind_a_class_that_is_held_or_named_itself() -> None:
    assert drawn(VARIABLE, OfDraws()) == drawn(VARIABLE, OfDraws())


class Noise:
    """Draws from a generator of its class, and is never made."""

    rng = np.random.default_rng(5)

    @classmethod
    def drawn(cls) -> float:
        return cls._drawn()

    @classmethod
    def _drawn(cls) -> float:
        return float(cls.rng.random())


class Config:
    settings = Holder(rng=np.random.default_rng(6))
    generators: ClassVar = {"a": np.random.default_rng(7)}

    @property
    def shown(self) -> Any:
        return Config.generators["a"]


def test_it_is_found_in_a_class_that_is_only_named_and_in_what_a_class_holds() -> None:
    def draws() -> float:
        return Noise.drawn()

    assert drawn(Noise.rng, draws) == drawn(Noise.rng, draws)
    for generator in (Config.settings.rng, Config.generators["a"]):  # type: ignore[attr-defined]
        assert drawn(generator, Config()) == drawn(generator, Config())
    names_the_class = HeldGenerators(dataset=lambda other: isinstance(other, Noise))
    names_the_class.isolated(5, lambda: None)
    assert names_the_class.is_idle


def test_an_attribute_is_not_taken_for_a_variable_of_that_name() -> None:
    held = HeldGenerators(dataset=lambda other: other.VARIABLE)
    held.isolated(5, lambda: None)

    assert held.is_idle


def test_two_references_are_one_generator_whatever_came_first() -> None:
    generator = random.Random(1)
    one, other = Holder(a=generator, b=generator), Holder()
    other.b = other.a = generator

    assert drawn(generator, one) == drawn(generator, other)
    bits = np.random.PCG64(1)
    held = HeldGenerators(dataset=[np.random.Generator(bits), np.random.Generator(bits)])
    held.isolated(5, lambda: None)
    assert len(held._found) == 1


def test_what_belongs_to_the_process_or_to_nobody_is_left_alone() -> None:
    globals_ = [np.random.mtrand._rand, vars(random)["_inst"], torch.default_generator, random.SystemRandom()]
    held = HeldGenerators(dataset=[*globals_, random, np, type("Kind", (), {}), torch.utils.data.RandomSampler([1])])
    held.isolated(5, lambda: None)

    assert held.is_idle


def test_one_that_is_replaced_is_seeded_from_then_on_and_one_that_is_made_anew_each_time_is_let_go() -> None:
    dataset = Holder(compose=Holder(generator=np.random.default_rng(1)))
    held = HeldGenerators(dataset=dataset)
    expected = [held.isolated(seed, lambda: draw(dataset.compose.generator)) for seed in range(30)]
    found = []
    for seed in range(30):
        if seed == 20:
            dataset.compose = Holder(generator=np.random.default_rng(2))
        elif seed % 7 == 3:
            dataset.compose.generator = np.random.default_rng(seed)
        found.append(held.isolated(seed, lambda: draw(dataset.compose.generator)))
    assert found == expected

    looked, find = [], held._find
    held._find = lambda: (looked.append(1), find())[1]  # type: ignore[method-assign]
    for seed in range(30):
        held.isolated(seed, lambda: setattr(dataset.compose, "generator", np.random.default_rng(1)))
    assert len(looked) < 15


def test_one_that_is_made_while_the_first_batch_is_read_is_seeded_in_that_batch_too() -> None:
    class Lazy:
        generator: Any = None

        def read(self) -> float:
            self.generator = self.generator or np.random.default_rng()
            return float(self.generator.random())

    def first_two(begin: int) -> list[float]:
        lazy = Lazy()
        held = HeldGenerators(dataset=lazy)
        return [held(seed, lazy.read) for seed in (begin, begin + 1)]

    assert first_two(5)[1] == first_two(6)[0]


def test_it_is_pickled_together_with_what_it_looks_at() -> None:
    dataset = Holder(g=np.random.default_rng(1))
    held = HeldGenerators(dataset=dataset)
    expected = held.isolated(5, lambda: draw(dataset.g))
    other, theirs = pickle.loads(pickle.dumps((dataset, held)))

    assert theirs.isolated(5, lambda: draw(other.g)) == expected
