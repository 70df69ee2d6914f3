"""Which run of a sampler is the latest, and that a sampler is put back which a run was in the middle of."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from lightning_stateful.samplers import claims


class Plain:
    """A sampler, or a run of one."""

    def __init__(self) -> None:
        self.items = [1, 2, 3]


class Unhashable(Plain):
    """Says when it is equal, and so cannot be hashed."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


class Alike(Plain):
    """Equal to all others of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 1


class Source:
    """What runs a sampler, and knows what it held at first."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.at_first = sampler, list(getattr(sampler, "items", ()))

    def put_back(self) -> None:
        self.sampler.items[:] = self.at_first


def claimed(sampler: Any) -> tuple[Any, Any]:
    """What runs the sampler, and a run that has claimed it."""
    source: Any = Source(sampler)
    run: Any = Plain()
    claims.claim(source, run)
    return source, run


def test_the_latest_run_holds_the_claim() -> None:
    sampler = Plain()
    source, first = claimed(sampler)
    assert claims.is_claimed(source, first)
    other, second = claimed(sampler)

    assert claims.is_claimed(other, second)
    assert not claims.is_claimed(source, first)


def test_a_sampler_that_nobody_runs_is_anybodys() -> None:
    source: Any = Source(Plain())
    run: Any = Plain()

    assert claims.is_claimed(source, run)


def test_an_earlier_run_does_not_get_the_claim_back_when_the_latest_is_gone() -> None:
    sampler = Plain()
    source, first = claimed(sampler)
    claimed(sampler)

    assert not claims.is_claimed(source, first)


@pytest.mark.parametrize("kind", [Plain, Alike, Unhashable])
def test_samplers_are_claimed_one_by_one_even_if_they_are_equal(kind: Any) -> None:
    (first, of_first), (second, of_second) = claimed(kind()), claimed(kind())

    assert claims.is_claimed(first, of_first)
    assert claims.is_claimed(second, of_second)
    assert not claims.is_claimed(first, of_second)


@pytest.mark.parametrize("make", [lambda: [1, 2, 3], lambda: range(3)], ids=["list", "range"])
def test_what_cannot_be_noted_is_anybodys(make: Any) -> None:
    sampler = make()
    both = [claimed(sampler) for _ in range(2)]
    claims.take_over(both[0][0])

    assert [claims.is_claimed(source, run) for source, run in both] == [True, True]


def test_a_sampler_that_is_taken_over_is_put_back_to_what_it_held_at_first() -> None:
    sampler = Plain()
    before, _ = claimed(sampler)
    sampler.items.reverse()
    after: Any = Source(sampler)
    claims.take_over(after)

    assert sampler.items == before.at_first == [1, 2, 3]


def test_a_run_of_a_sampler_that_was_taken_over_has_to_begin_again() -> None:
    sampler = Plain()
    source, run = claimed(sampler)
    after: Any = Source(sampler)
    claims.take_over(after)

    assert not claims.is_claimed(source, run)


def test_a_sampler_that_nobody_runs_is_taken_over_as_it_is() -> None:
    sampler = Plain()
    source: Any = Source(sampler)
    run: Any = Plain()
    sampler.items.reverse()
    claims.take_over(source)

    assert sampler.items == [3, 2, 1]
    assert claims.is_claimed(source, run)


def test_a_sampler_of_which_the_source_is_gone_is_taken_over_as_it_is() -> None:
    sampler = Plain()
    claimed(sampler)
    sampler.items.reverse()
    source: Any = Source(sampler)
    claims.take_over(source)

    assert sampler.items == [3, 2, 1]


def test_neither_a_run_nor_its_source_is_kept_alive() -> None:
    sampler = Plain()
    gone = [weakref.ref(held) for held in claimed(sampler)]

    assert [held() for held in gone] == [None, None]


def test_a_sampler_is_not_kept_alive_and_forgotten_with_its_claim() -> None:
    sampler = Plain()
    claimed(sampler)
    gone, key = weakref.ref(sampler), id(sampler)
    assert key in claims._LATEST
    del sampler

    assert gone() is None
    assert key not in claims._LATEST
