"""Digests by which one run of a sampler is told from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.samplers.marks import STRIDE, digest, next_mark


@dataclass(frozen=True)
class Named:
    """Something with an id."""

    id: str
    text: str = ""


class Cuts:
    """A collection that is no list."""

    def __init__(self, *names: str) -> None:
        self.cuts = [Named(name) for name in names]

    def __len__(self) -> int:
        return len(self.cuts)

    def __iter__(self) -> Any:
        return iter(self.cuts)


def test_marks_are_close_at_the_beginning_and_then_evenly_apart() -> None:
    found, slot = [], 0
    while slot <= 3 * STRIDE:
        found.append(next_mark(slot))
        slot = found[-1] + 1

    assert found == [0, *(2**power for power in range(13)), STRIDE, 2 * STRIDE, 3 * STRIDE]


def test_the_next_mark_is_the_first_at_or_after_a_slot() -> None:
    marks = sorted({next_mark(slot) for slot in range(2 * STRIDE)})
    for slot in [*range(200), *(mark + step for mark in marks[8:-1] for step in (-1, 0, 1))]:
        assert next_mark(slot) == min(mark for mark in marks if mark >= slot)


DIFFERENT: list[Any] = [
    0,
    1,
    "1",
    1.5,
    None,
    b"1",
    [1],
    [1, 2],
    [2, 1],
    [12],
    [[1], 2],
    [[1, 2]],
    [[1], [2]],
    [],
    [[]],
    ["a", "b"],
    ["ab"],
    ["a;strb"],
    {"a": 1},
    {"b": 1},
    {"a": 2},
    (1, "a"),
    ("a", 1),
    np.array([1, 3]),
    np.array([[1, 3]]),
    torch.tensor([0.5]),
    Named("x"),
    Named("y"),
    Cuts("x", "y"),
    Cuts("y", "x"),
    -1,
    2**70,
]


def test_different_items_have_different_digests() -> None:
    assert len({digest(item) for item in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("item", "same"),
    [
        ([1, 2], np.array([1, 2])),
        ([1, 2], torch.tensor([1, 2])),
        ((1, 2), [1, 2]),
        (3, np.int32(3)),
        (3, torch.tensor(3)),
        (["a", 1], ("a", 1)),
        (Named("x", "one"), Named("x", "two")),
    ],
    ids=str,
)
def test_indices_are_alike_in_whatever_they_are_held(item: Any, same: Any) -> None:
    assert digest(item) == digest(same)


@pytest.mark.parametrize(
    "kind",
    [
        np.int64,
        np.int32,
    ],
)
def test_lists_of_numpy_integers_are_like_lists_of_ints(kind: Any) -> None:
    assert digest([kind(1), kind(2)]) == digest([1, 2])


def test_digests_are_the_same_on_every_platform() -> None:
    found = (digest(3), digest([1, 2]), digest("a"))

    assert found == ("50163cd4ae7e6fb1", "74f912167ab67550", "035081a1cd3e973d")


def test_a_chained_digest_knows_what_came_before() -> None:
    assert digest(1, digest(2)) != digest(1, digest(3))
    assert digest(1, digest(2)) == digest(1, digest(2))


def test_a_container_in_itself_ends() -> None:
    item: list[Any] = [1, "a"]
    item.append(item)

    assert digest(item)
