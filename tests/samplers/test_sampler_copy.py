"""A sampler is copied apart from its data, and its generators and changes are found wherever it holds them."""

from __future__ import annotations

import io
import random
import sys
import threading
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.ledger import Numbers
from support.samplers import Bag, Unpicklable
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.sampler_copies.sampler_copy import (
    SamplerCopy,
    SamplerParts,
    digest_of_contents,
    held_at,
    surroundings_of,
)
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

Point = namedtuple("Point", "x y")


class Helper:
    """An object that is no sampler."""

    def __init__(self, held: Any) -> None:
        self.held = held


class InSlots(Sampler[int]):
    """Holds what it is given in a slot."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Any:
        return iter(())


class Secret:
    """Cannot be pickled."""

    def __getstate__(self) -> Any:
        raise TypeError("secret")


def copied(value: Any, **options: Any) -> Any:
    """The copy of something that a sampler holds."""
    return SamplerCopy(Bag(held=value), **options).sampler.held


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "set": ({1, 2}, lambda held: held.pop()),
    "dict of lists": ({0: [0]}, lambda held: (held[0].append(1), held.update({1: [1]}))),
    "array": (np.arange(4), lambda held: held.put(2, 9)),
    "array of lists": (np.array([[1], [2, 3]], dtype=object), lambda held: held[1].reverse()),
    "tensor": (torch.arange(4), lambda held: held.mul_(2)),
    "tensor of a type that NumPy lacks": (torch.ones(4, dtype=torch.float8_e5m2), lambda held: held[2:].fill_(2)),
    "named tuple": (Point([1], 2), lambda held: held.x.append(1)),
    "many lists": ([[number, -number] for number in range(2000)], lambda held: (held[7].reverse(), held.pop())),
    "many and a nested list": ([*([number] for number in range(2000)), [1, [2]]], lambda held: held[-1].pop()),
    "dict of many lists": ({number: [number] for number in range(2000)}, lambda held: held[7].clear()),
    "helper": (Helper([1]), lambda held: held.held.append(2)),
    "object in a slot": (SimpleNamespace(count=1), lambda held: vars(held).update(count=2)),
}


@pytest.mark.parametrize(("held", "change"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", [lambda held: Bag(held=held), InSlots, lambda held: Unpicklable(Bag(held=held))])
def test_a_change_of_a_copy_shows_in_it_and_not_in_the_original(held: Any, change: Any, kind: Any) -> None:
    sampler = kind(held)
    original, made = digest_of_contents(sampler), SamplerCopy(sampler)
    before = digest_of_contents(made.sampler)
    change(made.sampler.held)

    assert made.is_apart
    assert digest_of_contents(made.sampler) != before
    assert digest_of_contents(sampler) == original


def test_containers_of_other_kinds_are_copied() -> None:
    lines, expanded = deque(range(5)), torch.ones(1).expand(3)
    copied(lines).rotate(1)
    copied(expanded).zero_()

    assert (list(lines), expanded.tolist()) == ([0, 1, 2, 3, 4], [1.0, 1.0, 1.0])


def test_a_container_under_two_names_is_one_in_the_copy() -> None:
    shared = [1, 2]
    made = SamplerCopy(Bag(a=shared, b=[shared, shared], many=[shared, *([n] for n in range(2000))])).sampler

    assert made.a is made.b[0] is made.b[1] is made.many[0] is not shared


def test_equal_sets_show_the_same_though_each_has_its_own_order() -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    assert digest_of_contents(Bag(held=one)) == digest_of_contents(Bag(held=other))
    assert digest_of_contents(Bag(held=one)) != digest_of_contents(Bag(held={0, 16}))


def test_containers_and_samplers_that_hold_themselves_end() -> None:
    items: list[Any] = [1]
    items.append(items)
    first, second = Bag(items=items, lock=threading.Lock()), Bag(rng=random.Random(1))
    first.me, first.other, second.other = first, second, first  # type: ignore[attr-defined]
    made, parts = SamplerCopy(first).sampler, SamplerParts(first)

    assert made.items[1] is made.items is not items
    assert made.me is made.other.other is made is not first
    assert made.lock is first.lock  # type: ignore[attr-defined]
    assert parts.samplers == [second, first]
    assert list(parts.generators) == [("other", "rng")]
    assert digest_of_contents(first) == digest_of_contents(first)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Secret(),
        lambda: Numbers(3),
        lambda: torch.nn.Linear(2, 2),
        lambda: DataLoader(Numbers(3)),
        lambda: random.SystemRandom(),
        lambda: np.broadcast_to(np.ones(1), (4,)),
    ],
)
def test_what_cannot_be_copied_or_holds_data_is_shared(make: Any) -> None:
    held = make()

    assert copied(held) is held
    assert copied([held])[0] is held


@pytest.mark.parametrize("make", [lambda: (n for n in range(3)), lambda: iter([1]), lambda: io.StringIO("1")])
def test_a_copy_that_shares_an_iterator_or_a_file_is_not_apart(make: Any) -> None:
    held = make()
    found = SamplerCopy(Bag(held=held))
    getattr(held, "close", tuple)()

    assert found.sampler.held is held
    assert not found.is_apart


def test_an_array_of_a_file_is_shared_if_nobody_can_write_it_and_so_is_the_dataset_of_the_loader(
    tmp_path: Path,
) -> None:
    mapped = np.lib.format.open_memmap(tmp_path / "scores.npy", "w+", "float64", (40,))
    read = np.load(tmp_path / "scores.npy", mmap_mode="r")
    dataset = Helper([1, 2])
    copied(mapped)[:] = 1
    copied(mapped[3:])[:] = 1

    assert not mapped.any()
    assert copied(read) is read
    assert copied({"data": dataset}, dataset=dataset)["data"] is dataset


def test_objects_in_long_lists_are_data_the_changes_of_which_are_seen() -> None:
    held = [*map(Helper, range(2000))]
    sampler, made = Bag(held=held), copied(held)
    before = surroundings_of(sampler)
    held[3].held = -1

    assert made is not held
    assert all(mine is yours for mine, yours in zip(made, held, strict=True))
    assert surroundings_of(sampler)["Bag.held"] != before["Bag.held"]


KINDS: dict[str, Any] = {
    "torch": lambda: torch.Generator(),
    "NumPy": lambda: np.random.default_rng(1),
    "NumPy, old": lambda: np.random.RandomState(1),
    "random": lambda: random.Random(1),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_generators_of_all_kinds_are_found_wherever_they_are_held(make: Any) -> None:
    held = Bag(own=make(), some=[make(), {"deep": (make(),)}], inner=Bag(rng=make(), of=Helper(InSlots(make()))))
    sampler = BatchSampler(held, 2, False)
    found, made = SamplerParts(sampler).generators, SamplerCopy(sampler).sampler
    expected = [held.own, held.some[0], held.some[1]["deep"][0], held.inner.rng, held.inner.of.held.held]  # type: ignore[attr-defined]

    assert list(map(id, found.values())) == list(map(id, expected))
    for path, generator in found.items():
        assert held_at(sampler, path) is generator
        assert type(held_at(made, path)) is type(generator)
        assert held_at(made, path) is not generator


def test_what_lightning_notes_of_a_sampler_is_no_part_of_it() -> None:
    generator, sampler = random.Random(1), Bag()
    vars(sampler).update({"__pl_saved_args": (generator,), "rng": generator})

    assert list(SamplerParts(sampler).generators) == [("rng",)]


class RemovesFile(Sampler[int]):
    """Reads its order from a file that ends with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("2 0 1")

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(map(int, self.path.read_text().split()))

    def __del__(self) -> None:
        self.path.unlink()


def test_one_that_does_something_where_it_is_dropped_is_not_copied(tmp_path: Path) -> None:
    sampler = RemovesFile(tmp_path / "order")
    copied = SamplerCopy(sampler)
    assert (copied.sampler, copied.is_apart) == (sampler, False)
    facts = WrappedSampler(sampler).facts
    assert "cannot be copied" in facts.error
    del copied, facts
    assert list(sampler) == [2, 0, 1]


@pytest.mark.parametrize("kind", [deque, dict, set, type("Own", (deque,), {})])
def test_a_container_that_a_thread_changes_is_looked_into(kind: Any) -> None:
    seconds = sys.getswitchinterval()
    held, is_over = kind(zip(range(300), range(300), strict=True)), threading.Event()

    def change() -> None:
        for number in count(300):
            if is_over.is_set():
                return
            if isinstance(held, deque):
                held.append((number, number))
                held.popleft()
            elif isinstance(held, dict):
                held[number] = Bag()
                del held[number - 1 if number > 300 else 0]
            else:
                held.add((number, number))
                held.discard((number - 1, number - 1))

    sampler, thread = Bag(held=held), threading.Thread(target=change)
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            assert digest_of_contents(sampler)
            assert HeldState(sampler).containers() is not None
    finally:
        sys.setswitchinterval(seconds)
        is_over.set()
        thread.join()
