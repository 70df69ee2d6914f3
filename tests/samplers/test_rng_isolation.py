"""A sampler runs as a copy, apart from the process: containers, generators, other ranks, nothing seen outside."""

from __future__ import annotations

import random
import threading
from collections import deque, namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.ledger import Numbers
from torch.utils.data import BatchSampler

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.rng_isolation import DeepCopy, IsolatedCopy

Point = namedtuple("Point", "x y")


class Bag:
    """Holds whatever it is given, and can be iterated."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Any:
        return iter(())


class Helper:
    """An object that is no sampler."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> Any:
        return self.held


class Stubborn(Bag):
    """Does not let its rank be set any more."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rank":
            raise AttributeError(name)
        super().__setattr__(name, value)


class Secret:
    """Cannot be pickled."""

    def __getstate__(self) -> Any:
        raise TypeError("secret")


def copied(value: Any, **options: Any) -> Any:
    """The copy of something that a sampler holds."""
    return DeepCopy(Bag(held=value), **options).sampler.held


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "set": ({1, 2}, lambda held: held.pop()),
    "deque": (deque(range(5)), lambda held: held.rotate(1)),
    "dict of lists": ({0: [0]}, lambda held: (held[0].append(1), held.update({1: [1]}))),
    "array of lists": (np.array([[1], [2, 3]], dtype=object), lambda held: held[1].reverse()),
    "expanded tensor": (torch.ones(1).expand(3), lambda held: held.zero_()),
    "named tuple": (Point([1], 2), lambda held: held.x.append(1)),
    "many lists": ([[number, -number] for number in range(2000)], lambda held: (held[7].reverse(), held.pop())),
    "many and a nested list": ([*([number] for number in range(2000)), [1, [2]]], lambda held: held[-1][1].append(3)),
    "dict of many lists": ({number: [number] for number in range(2000)}, lambda held: held[7].clear()),
}


class TestContainers:
    @pytest.mark.parametrize(("held", "change"), CHANGES.values(), ids=CHANGES)
    def test_what_is_done_to_a_copy_is_not_seen_in_the_original(self, held: Any, change: Any) -> None:
        before = repr(held)
        first, second = copied(held), copied(held)
        assert repr(first) == before
        change(first)

        assert repr(first) != before
        assert repr(held) == repr(second) == before

    def test_a_container_under_two_names_is_one_in_the_copy(self) -> None:
        shared = [1, 2]
        made = DeepCopy(Bag(a=shared, b=[shared, shared], many=[shared, *([number] for number in range(2000))])).sampler

        assert made.a is made.b[0] is made.b[1] is made.many[0] is not shared

    def test_containers_and_samplers_that_hold_themselves_end(self) -> None:
        items: list[Any] = [1]
        items.append(items)
        first, second = Bag(items=items), Bag(rng=random.Random(1))
        first.me, first.other, second.other = first, second, first  # type: ignore[attr-defined]
        first.lock = threading.Lock()  # type: ignore[attr-defined]
        copying = DeepCopy(first)
        made = copying.sampler

        assert made.items[1] is made.items is not items
        assert made.me is made.other.other is made is not first
        assert made.lock is first.lock  # type: ignore[attr-defined]
        assert copying.samplers == [made.other, made]
        assert copying.generators == [made.other.rng]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Secret(),
            lambda: Numbers(3),
            lambda: torch.nn.Linear(2, 2),
            lambda: (number for number in range(3)),
            lambda: random.SystemRandom(),
            lambda: np.broadcast_to(np.ones(1), (4,)),
        ],
    )
    def test_what_cannot_be_copied_or_holds_data_is_shared(self, make: Any) -> None:
        held = make()

        assert copied(held) is held
        assert copied([held])[0] is held

    def test_a_mapped_file_and_the_dataset_of_the_loader_are_shared(self, tmp_path: Path) -> None:
        mapped = np.lib.format.open_memmap(tmp_path / "scores.npy", "w+", "float64", (40,))
        dataset = Helper([1, 2])

        assert copied(mapped) is mapped
        assert copied(mapped[3:]).base is mapped[3:].base
        assert copied({"data": dataset}, dataset=dataset)["data"] is dataset

    def test_objects_in_long_lists_are_data_but_generators_are_not(self) -> None:
        held = [*map(Helper, range(2000)), random.Random(1)]
        made = copied(held)

        assert all(mine is yours for mine, yours in zip(made[:-1], held[:-1], strict=True))
        assert made[-1] is not held[-1]

    def test_helpers_bound_methods_and_partials_are_copied_together(self) -> None:
        helper = Helper([1])
        made = DeepCopy(Bag(helper=helper, method=helper.method, call=partial(helper.method))).sampler

        assert made.helper.held is made.method() is made.call() is not helper.held

    def test_lists_in_a_very_long_list_are_shared_and_their_order_is_not(self) -> None:
        rows = [[number] for number in range(70_000)]
        made = copied(rows)
        made.reverse()

        assert rows[0] == [0]
        assert made[-1] is rows[0]


KINDS: dict[str, Any] = {
    "torch": lambda: torch.Generator(),
    "NumPy": lambda: np.random.default_rng(1),
    "NumPy, Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "NumPy, MT19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "NumPy, old": lambda: np.random.RandomState(1),
    "random": lambda: random.Random(1),
}


def draw_from(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return float(generator.rand() if isinstance(generator, np.random.RandomState) else generator.random())


class TestGenerators:
    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_all_kinds_are_found_wherever_they_are_held(self, make: Any) -> None:
        held = Bag(own=make(), some=[make(), {"deep": (make(),)}], inner=Bag(rng=make(), of=Helper(make())))
        copying = DeepCopy(BatchSampler(held, 2, False))

        made = copying.sampler.sampler
        expected = [made.own, made.some[0], made.some[1]["deep"][0], made.inner.rng, made.inner.of.held]
        assert list(map(id, copying.generators)) == list(map(id, expected))

    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_a_copy_is_seeded_by_all_labels_and_the_original_is_not_touched(self, make: Any) -> None:
        sampler, untouched = Bag(a=make(), b=make()), make()
        found = []
        for labels in ((0, 1), (1, 0), (0, 1)):
            made = IsolatedCopy(sampler, seed=5)
            with made.entered():
                made.seed(*labels)
            found.append((draw_from(made.sampler.a), draw_from(made.sampler.b)))

        assert found[0] == found[2]
        assert len({*found[0], *found[1]}) == 4
        assert make is KINDS["torch"] or draw_from(sampler.a) == draw_from(untouched)  # type: ignore[attr-defined]

    def test_what_lightning_notes_of_a_sampler_is_no_part_of_it(self) -> None:
        generator, sampler = random.Random(1), Bag()
        vars(sampler).update({"__pl_saved_args": (generator,), "rng": generator})
        copying = DeepCopy(sampler)

        assert copying.generators == [copying.sampler.rng]


class TestProcess:
    def test_all_samplers_in_it_are_told_the_epoch_from_the_inside_out(self) -> None:
        told: list[str] = []

        class Told(Bag):
            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch
                told.append(f"{self.name} {epoch}")  # type: ignore[attr-defined]

        made = IsolatedCopy(Told(name="outer", parts=[Told(name="a"), {"deep": Told(name="b")}]), seed=0)
        with made.entered():
            made.begin(3, 0)

        assert told == ["a 3", "b 3", "outer 3"]


def alone(sampler: Any) -> Any:
    return IsolatedCopy(sampler, seed=0).sampler


class TestRanks:
    @pytest.mark.parametrize(
        ("held", "expected"),
        [
            ({"num_replicas": 4, "rank": 3}, {"num_replicas": 1, "rank": 0}),
            ({"world_size": 4, "rank": 3}, {"world_size": 1, "rank": 0}),
            ({"num_replicas": None, "_rank": None}, {"num_replicas": 1, "_rank": 0}),
            ({"num_replicas": 2, "rank": 1, "num_samples": 5}, {"num_replicas": 1, "rank": 0, "num_samples": 10}),
            (
                {"num_replicas": 4, "rank": 1, "num_samples": 30, "total_size": 120, "num_selected_samples": 10},
                {"num_replicas": 1, "rank": 0, "num_samples": 120, "total_size": 120, "num_selected_samples": 40},
            ),
            ({"num_replicas": 1, "rank": 0, "num_samples": 3}, {"num_replicas": 1, "rank": 0, "num_samples": 3}),
            ({"rank": 3}, {"rank": 3}),
        ],
    )
    def test_a_copy_that_deals_out_by_itself_is_told_of_one_rank(self, held: Any, expected: Any) -> None:
        inner = Bag(**held)

        assert vars(alone(Bag(inner=inner)).inner) == expected
        assert vars(IsolatedCopy(inner, seed=0, as_one_rank=False).sampler) == vars(inner) == held

    def test_arguments_that_a_sampler_keeps_are_told_too_and_other_objects_are_not(self) -> None:
        kept = {"world_size": 4, "rank": 3}
        made = alone(Bag(kwargs=kept, config=SimpleNamespace(**kept)))

        assert made.kwargs == {"world_size": 1, "rank": 0}
        assert vars(made.config) == kept == {"world_size": 4, "rank": 3}

    def test_one_that_does_not_let_itself_be_told_is_refused_and_left_as_it_was(self) -> None:
        stubborn = Stubborn(num_replicas=2, rank=1)
        stubborn.__dict__["rank"] = 1
        with pytest.raises(UnsupportedLoaderError, match=r"Stubborn .* its 'rank' cannot be set"):
            alone(Bag(inner=stubborn))

        assert vars(stubborn) == {"num_replicas": 2, "rank": 1}

    def test_an_assertion_that_fails_alone_becomes_an_error_with_the_remedy(self) -> None:
        made = IsolatedCopy(Bag(inner=Bag(num_replicas=4, rank=3)), seed=0)
        with (
            pytest.raises(
                ConfigurationError, match=r"Bag .*\(AssertionError: own share\).* \(num_replicas=1, rank=0\)"
            ),
            made.entered(),
        ):
            raise AssertionError("own share\nand more")

    @pytest.mark.parametrize("held", [{}, {"num_replicas": 1, "rank": 0}], ids=["no ranks", "one rank"])
    def test_an_assertion_of_a_sampler_that_was_told_nothing_comes_out(self, held: dict[str, int]) -> None:
        with pytest.raises(AssertionError, match=r"^theirs$"), IsolatedCopy(Bag(**held), seed=0).entered():
            raise AssertionError("theirs")
