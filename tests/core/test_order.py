"""Orders of samples keep the laws of all orders; what several orders share does what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from support.orders import OrderCase, every_law

from lightning_stateful.core import BlockShuffledOrder, SampleBatchOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.core.order import read_in_chunks, say_repeats, seeded_at
from lightning_stateful.core.seeding import loader_seed


def case(length: int, **options: int) -> OrderCase:
    return OrderCase(
        order=SampleBatchOrder(samples=ShuffledOrder(length, 3), **options),
        longer=SampleBatchOrder(samples=ShuffledOrder(length + 1, 3), **options),
        samples=range(length),
        drops=bool(options.get("drop_last")),
    )


CASES = {
    "batches": case(47, batch_size=4),
    "single samples": case(20),
    "exact": case(20, exact=True),
    "drop_last": case(47, batch_size=3, drop_last=True),
    "blocks": OrderCase(
        order=SampleBatchOrder(samples=BlockShuffledOrder(47, 3, 4, 3), batch_size=4), samples=range(47)
    ),
    "in turn": OrderCase(
        order=SampleBatchOrder(samples=SequentialOrder(31), batch_size=2), samples=range(31), shuffled=False
    ),
}


@every_law
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_orders_of_samples_keep_the_laws(law: Callable[[OrderCase], None], case: OrderCase) -> None:
    law(case)


@dataclass(frozen=True)
class Unseeded:
    length: int = 3


def test_an_order_draws_from_the_path_of_its_loader() -> None:
    assert seeded_at(ShuffledOrder(9, 3), "1.a") == ShuffledOrder(9, loader_seed(3, "1.a"))


@pytest.mark.parametrize(("order", "path"), [(ShuffledOrder(9, 3), ""), (Unseeded(), "1"), ("no dataclass", "1")])
def test_an_order_without_a_seed_or_a_path_is_left_as_it_is(order: object, path: str) -> None:
    assert seeded_at(order, path) is order


@pytest.mark.parametrize(("first", "last"), [(0, 100), (7, 60), (5, 5), (6, 5)])
@pytest.mark.parametrize("largest", [1, 10, 1000])
def test_chunks_together_are_the_batches_of_all_steps(first: int, last: int, largest: int) -> None:
    def read(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        chunks.append(stop - start)
        steps = np.arange(start, stop)
        return np.repeat(steps, steps % 4), steps % 4

    chunks: list[int] = []
    found = list(read_in_chunks(read, first, last, largest=largest))

    assert found == [[step] * (step % 4) for step in range(first, last)]
    assert max(chunks, default=0) <= largest


def test_the_first_chunk_is_small_and_the_next_ones_grow() -> None:
    chunks: list[int] = []

    def read(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        chunks.append(stop - start)
        return np.arange(start, stop), np.ones(stop - start, dtype=np.int64)

    next(batches := read_in_chunks(read, 0, 10**6))
    assert chunks == [8]
    assert [next(batches) for _ in range(30)] == [[step] for step in range(1, 31)]
    assert chunks == [8, 16, 32]


def test_nothing_is_said_where_nothing_is_repeated() -> None:
    assert say_repeats(0, 10) == ""
    assert say_repeats(2, 10, "batches") == "2 of 10 batches are served twice in every epoch"
