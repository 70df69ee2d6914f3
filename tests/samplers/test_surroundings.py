"""A sampler runs apart from the process: generators, other ranks, and nothing of it seen outside."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.surroundings import Surroundings


class Bag:
    """Holds whatever it is given, and can be iterated."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Any:
        return iter(())


class Stubborn(Bag):
    """Does not let its rank be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rank":
            raise AttributeError(name)
        super().__setattr__(name, value)


class NotIterable:
    """An object that is no sampler."""

    def __init__(self, held: Any) -> None:
        self.held = held


class InSlot:
    """Holds a generator in a slot."""

    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __iter__(self) -> Any:
        return iter(())


class Data(torch.utils.data.Dataset[int]):
    """A dataset of the sampler's own module."""


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def draw_from(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.rand() if isinstance(generator, np.random.RandomState) else generator.random()


KINDS: dict[str, Any] = {
    "torch": lambda: torch.Generator(),
    "NumPy": lambda: np.random.default_rng(1),
    "NumPy, old": lambda: np.random.RandomState(1),
    "random": lambda: random.Random(1),
}


class TestFinding:
    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_generators_of_all_kinds_are_found_wherever_they_are_held(self, make: Any) -> None:
        held = Bag(own=make(), some=[make(), {"deep": (make(),)}], inner=Bag(rng=make(), inner=Bag(rng=make())))
        found = Surroundings(BatchSampler(held, 2, False)).generators

        assert set(found) == {
            "sampler.own",
            "sampler.some.0",
            "sampler.some.1.deep.0",
            "sampler.inner.rng",
            "sampler.inner.inner.rng",
        }

    def test_samplers_in_lists_and_dicts_are_found(self) -> None:
        sampler = Bag(parts=[RandomSampler(range(3)), {"a": Bag()}])

        assert set(Surroundings(sampler).samplers) == {"", "parts.0", "parts.1.a"}

    def test_samplers_that_hold_themselves_or_each_other_end(self) -> None:
        first, second = Bag(), Bag(rng=random.Random(1))
        first.me, first.other, second.other = first, second, first  # type: ignore[attr-defined]
        found = Surroundings(first)

        assert list(found.samplers) == ["", "other"]
        assert list(found.generators) == ["other.rng"]

    def test_a_list_that_holds_itself_ends(self) -> None:
        items: list[Any] = [random.Random(1)]
        items.append(items)

        assert "items.0" in Surroundings(Bag(items=items)).generators

    def test_a_dataset_is_not_looked_into(self) -> None:
        dataset = torch.utils.data.TensorDataset(torch.zeros(3))
        dataset.rng = random.Random(1)  # type: ignore[attr-defined]

        assert not Surroundings(Bag(dataset=dataset)).generators

    def test_a_property_is_not_asked(self) -> None:
        class Raises(Sampler[int]):
            @property
            def late(self) -> Any:
                raise RuntimeError("not yet")

            def __iter__(self) -> Any:
                return iter(())

        assert list(Surroundings(Raises()).samplers) == [""]

    def test_classes_are_not_taken_for_samplers(self) -> None:
        assert list(Surroundings(Bag(kind=RandomSampler)).samplers) == [""]

    def test_a_generator_in_a_slot_is_found(self) -> None:
        assert Surroundings(InSlot()).generators

    @pytest.mark.parametrize(("count", "found"), [(100, 100), (1024, 1024), (1025, 16)])
    @pytest.mark.parametrize("kind", [list, tuple, lambda made: dict(enumerate(made))], ids=["list", "tuple", "dict"])
    def test_one_generator_a_class_is_found_and_of_very_many_the_first(self, count: int, found: int, kind: Any) -> None:
        rngs = kind([random.Random(number) for number in range(count)])

        assert list(Surroundings(Bag(rngs=rngs)).generators) == [f"rngs.{number}" for number in range(found)]

    def test_a_generator_among_numbers_is_found(self) -> None:
        assert list(Surroundings(Bag(held=[*range(1000), random.Random(1)])).generators) == ["held.1000"]

    def test_a_generator_in_a_helper_object_is_found(self) -> None:
        held = {"of": [NotIterable(NotIterable(random.Random(1)))]}

        assert list(Surroundings(Bag(policy=held)).generators) == ["policy.of.0.held.held"]

    def test_an_object_of_another_module_is_not_looked_into(self) -> None:
        elsewhere = type("Elsewhere", (NotIterable,), {"__module__": "elsewhere"})

        assert not Surroundings(Bag(policy=elsewhere(random.Random(1)))).generators

    @pytest.mark.parametrize("make", [torch.nn.Module, lambda: Data()], ids=["module", "dataset"])
    def test_what_holds_data_is_not_looked_into_even_in_the_samplers_module(self, make: Any) -> None:
        held = make()
        held.rng = random.Random(1)

        assert not Surroundings(Bag(held=held)).generators

    def test_a_generator_of_the_system_is_left_alone(self) -> None:
        assert not Surroundings(Bag(rng=random.SystemRandom())).generators


class TestRandomness:
    def test_nothing_that_is_drawn_inside_is_seen_outside(self) -> None:
        surroundings = Surroundings(Bag())
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        for _ in range(2):
            with surroundings.entered():
                surroundings.seed(1)
                draw()

        assert torch.equal(torch.get_rng_state(), state[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]  # type: ignore[index]

    def test_nothing_that_is_drawn_outside_is_seen_inside(self) -> None:
        found = []
        for outside in (0, 3):
            surroundings = Surroundings(Bag())
            with surroundings.entered():
                surroundings.seed(1)
                drawn = [draw()]
            for _ in range(outside):
                draw()
            with surroundings.entered():
                drawn.append(draw())
            found.append(drawn)

        assert found[0] == found[1]
        assert found[0][0] != found[0][1]

    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_held_generators_are_kept_apart_as_well(self, make: Any) -> None:
        sampler, alone = Bag(rng=make()), make()
        surroundings = Surroundings(sampler)
        with surroundings.entered():
            surroundings.seed(1)
            expected = [draw_from(sampler.rng) for _ in range(4)]  # type: ignore[attr-defined]
        found = []
        with surroundings.entered():
            surroundings.seed(1)
            found.append(draw_from(sampler.rng))  # type: ignore[attr-defined]
        for _ in range(3):
            assert draw_from(sampler.rng) == draw_from(alone)  # type: ignore[attr-defined]
            with surroundings.entered():
                found.append(draw_from(sampler.rng))  # type: ignore[attr-defined]

        assert found == expected

    def test_what_is_not_to_be_kept_is_forgotten(self) -> None:
        sampler = Bag(rng=random.Random(1))
        surroundings = Surroundings(sampler)
        random.seed(5)
        before = random.getstate(), sampler.rng.getstate()  # type: ignore[attr-defined]
        for _ in range(2):
            with surroundings.entered(keep_inner=False):
                assert (random.getstate(), sampler.rng.getstate()) == before  # type: ignore[attr-defined]
                surroundings.seed(1)
                draw()

        assert (random.getstate(), sampler.rng.getstate()) == before  # type: ignore[attr-defined]

    def test_an_exception_inside_leaves_the_process_as_it_was(self) -> None:
        before, held = torch.get_rng_state(), random.Random(1)
        expected = held.getstate()
        with pytest.raises(ZeroDivisionError), Surroundings(Bag(held=held)).entered():
            assert torch.rand(()).item() + held.random() // 0

        assert torch.equal(torch.get_rng_state(), before)
        assert held.getstate() == expected

    def test_held_generators_are_seeded_apart_from_each_other_and_by_all_labels(self) -> None:
        sampler = Bag(a=random.Random(), b=random.Random())
        surroundings = Surroundings(sampler)
        found = []
        for labels in ((0, 1), (1, 0), (0, 1)):
            surroundings.seed(*labels)
            found.append((sampler.a.random(), sampler.b.random()))  # type: ignore[attr-defined]

        assert found[0] == found[2]
        assert len({*found[0], *found[1]}) == 4


class TestAlone:
    @pytest.mark.parametrize("name", ["num_replicas", "world_size"])
    def test_samplers_that_deal_out_by_themselves_are_told_of_one_rank(self, name: str) -> None:
        inner = Bag(**{name: 4, "rank": 3})
        with Surroundings(Bag(inner=inner)).alone():
            assert (getattr(inner, name), inner.rank) == (1, 0)  # type: ignore[attr-defined]

        assert (getattr(inner, name), inner.rank) == (4, 3)  # type: ignore[attr-defined]

    def test_ranks_that_are_not_yet_known_are_set_and_forgotten_again(self) -> None:
        sampler = Bag(num_replicas=None, rank=None)
        with Surroundings(sampler).alone():
            assert (sampler.num_replicas, sampler.rank) == (1, 0)  # type: ignore[attr-defined]

        assert (sampler.num_replicas, sampler.rank) == (None, None)  # type: ignore[attr-defined]

    def test_torchs_distributed_sampler_yields_everything(self) -> None:
        sampler = DistributedSampler(range(11), num_replicas=3, rank=2, shuffle=False)  # type: ignore[arg-type]
        with Surroundings(sampler).alone():
            assert list(sampler) == list(range(11))
            assert len(sampler) == 11

        assert (len(sampler), sampler.num_replicas, sampler.rank, sampler.total_size) == (4, 3, 2, 12)

    def test_an_exception_puts_the_ranks_back(self) -> None:
        sampler = Bag(num_replicas=4, rank=3)
        with pytest.raises(KeyError), Surroundings(sampler).alone():
            raise KeyError

        assert vars(sampler) == {"num_replicas": 4, "rank": 3}

    def test_an_assertion_that_fails_alone_becomes_an_error_with_the_remedy(self) -> None:
        surroundings = Surroundings(Bag(inner=Bag(num_replicas=4, rank=3)))
        with (
            pytest.raises(
                ConfigurationError, match=r"Bag .*\(AssertionError: own share\).* \(num_replicas=1, rank=0\)"
            ),
            surroundings.entered(),
        ):
            raise AssertionError("own share\nand more")

    @pytest.mark.parametrize("held", [{}, {"num_replicas": 1, "rank": 0}], ids=["no ranks", "one rank"])
    def test_an_assertion_of_a_sampler_that_was_told_nothing_comes_out(self, held: dict[str, int]) -> None:
        with pytest.raises(AssertionError, match=r"^theirs$"), Surroundings(Bag(**held)).entered():
            raise AssertionError("theirs")

    def test_a_sampler_that_does_not_let_itself_be_told_is_refused_and_left_as_it_was(self) -> None:
        first, stubborn = Bag(num_replicas=4, rank=3), Stubborn(num_replicas=2, rank=1)
        surroundings = Surroundings(Bag(first=first, second=stubborn))
        with pytest.raises(UnsupportedLoaderError, match=r"Stubborn .* its 'rank' cannot be set"), surroundings.alone():
            pass

        assert (vars(first), vars(stubborn)) == ({"num_replicas": 4, "rank": 3}, {"num_replicas": 2, "rank": 1})

    @pytest.mark.parametrize("held", [{"num_replicas": 1, "rank": 0}, {"rank": 3}, {"num_replicas": 3}])
    def test_others_are_left_alone(self, held: dict[str, int]) -> None:
        sampler = Bag(**held)
        with Surroundings(sampler).alone():
            assert vars(sampler) == held


def test_what_lightning_notes_of_a_sampler_is_no_part_of_it() -> None:
    generator = random.Random(1)
    sampler = Bag()
    vars(sampler).update({"__pl_saved_args": (generator,), "rng": generator})

    assert set(Surroundings(sampler).generators) == {"rng"}


class TestSharesThatWereCounted:
    @pytest.mark.parametrize(
        ("held", "alone"),
        [
            ({"_world_size": 2, "_rank": 1}, {"_world_size": 1, "_rank": 0}),
            ({"num_replicas": 2, "rank": 1, "num_samples": 5}, {"num_replicas": 1, "rank": 0, "num_samples": 10}),
            (
                {"num_replicas": 4, "rank": 1, "num_samples": 30, "total_size": 120, "num_selected_samples": 10},
                {"num_replicas": 1, "rank": 0, "num_samples": 120, "total_size": 120, "num_selected_samples": 40},
            ),
        ],
    )
    def test_they_are_those_of_one_rank_for_a_while(self, held: dict[str, int], alone: dict[str, int]) -> None:
        sampler = Bag(**held)
        with Surroundings(sampler).alone():
            assert vars(sampler) == alone

        assert vars(sampler) == held
