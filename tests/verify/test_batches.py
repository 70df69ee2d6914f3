"""Digests tell samples by all that they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_stateful.verify.batches import digests_of, shown
from lightning_stateful.verify.comparison import count_samples
from lightning_stateful.verify.records import Batch, Part


@dataclass
class Graph:
    nodes: Any
    label: Any


SAMPLES: list[Any] = [
    {"x": torch.rand(3), "y": index, "name": f"sample {index}", "mask": np.array([index, 1], dtype=bool)}
    for index in range(4)
]


@pytest.mark.parametrize("collate", [default_collate, list], ids=["columns", "rows"])
def test_a_sample_has_the_same_digest_in_any_batch(collate: Any) -> None:
    whole = digests_of(collate(SAMPLES), 4)
    other = digests_of(collate(SAMPLES[::-1]), 4)

    assert len(set(whole)) == 4
    assert other == whole[::-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch["x"][2].add_(1e-6),
        lambda batch: batch["y"][2].add_(1),
        lambda batch: batch["name"].__setitem__(2, "other"),
        lambda batch: batch["mask"][2].logical_not_(),
    ],
    ids=["tensor", "number", "string", "mask"],
)
def test_any_change_of_a_sample_changes_its_digest_alone(change: Any) -> None:
    torch.manual_seed(0)
    batch = default_collate([{**sample, "x": torch.zeros(3)} for sample in SAMPLES])
    before = digests_of(batch, 4)
    change(batch)

    assert [one == other for one, other in zip(before, digests_of(batch, 4), strict=True)] == [True, True, False, True]


def test_batches_that_cannot_be_divided_have_one_digest_of_all_that_they_hold() -> None:
    def graph(last: float) -> Graph:
        return Graph(torch.tensor([1.0, 2.0, last]), torch.tensor(3))

    assert digests_of(graph(3.0)) == digests_of(graph(3.0))
    assert len(digests_of(graph(3.0))) == 1
    assert digests_of(graph(3.0)) != digests_of(graph(4.0))


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize("kind", [lambda n: Path(f"{n}.png"), lambda n: date(2020, 1, n), Decimal, Slotted])
def test_objects_without_a_dict_are_told_apart(kind: Any) -> None:
    one, other, again = digests_of([kind(1), kind(2), kind(1)])

    assert one == again != other


def test_types_that_numpy_does_not_know_and_sets_are_told_apart() -> None:
    half = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)

    assert digests_of(half)[0] != digests_of(half)[1]
    assert digests_of([{"of": {"a", "b"}}]) == digests_of([{"of": {"b", "a"}}])


def test_a_batch_is_shown_in_a_line() -> None:
    assert shown({"x": torch.tensor([[0.5, 2.0]]), "y": torch.tensor([7])}) == "x float32[1, 2] 0.5 2; y int64[1] 7"


def rows(*batches: list[int], first: int = 1) -> list[list[Batch]]:
    """The batches of one rank, of samples by index."""
    return [[Batch(0, first + at, (Part("", items, [], ""),)) for at, items in enumerate(batches)]]


WHOLE = rows([0, 1], [2, 3], [4, 5])


def test_samples_that_come_once_are_no_fault_and_few_may_be_repeated_by_ranks() -> None:
    assert count_samples(0, rows([0, 1]), rows([2, 3, 4], [5]), WHOLE, WHOLE, spare=0).fault is None
    on_two = [*rows([2, 3], [4]), *rows([5], [4])]
    assert count_samples(0, rows([0, 1]), on_two, WHOLE, WHOLE, spare=0).fault is None


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (rows([0, 1], [2, 3, 4, 5], first=2), "2 samples came too often, first sample 0"),
        (rows([4, 5], first=2), "2 samples never came, for example sample 2"),
    ],
    ids=["replayed", "skipped"],
)
def test_samples_that_are_replayed_or_skipped_are_a_fault(after: Any, what: str) -> None:
    fault = count_samples(0, rows([0, 1]), after, WHOLE, WHOLE, spare=0).fault

    assert fault is not None
    assert fault.what == what


def test_samples_of_other_content_on_other_ranks_are_not_compared() -> None:
    others = rows([10, 11], [12, 13], [14, 15])

    assert not count_samples(0, rows([0, 1]), rows([12, 13], [14, 15]), WHOLE, others, spare=0).compared


def test_where_an_epoch_serves_samples_several_times_one_may_be_a_pass_ahead() -> None:
    twice = rows([0, 1], [0, 1], [2, 2])
    assert Counter(name for batch in twice[0] for name in batch.names)["", 2] == 2
    ahead = count_samples(0, rows([0, 1]), rows([0, 1, 2], [2, 0]), twice, twice, spare=None)
    assert ahead.fault is None
