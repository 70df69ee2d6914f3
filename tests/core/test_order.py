"""Orders of samples keep the laws of all orders; what several orders share, and progress, do what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.orders import OrderCase, every_law

from lightning_stateful.core import BlockShuffledOrder, Progress, SampleBatchOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.core.order import read_in_chunks, seeded_at
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError


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


# Progress

COUNTS = ["epoch", "cycle", "consumed"]
WHOLE = {"epoch": 2, "cycle": 0, "consumed": 12288}


def test_what_is_written_and_read_shares_nothing_with_the_progress() -> None:
    data: dict[str, Any] = {**WHOLE, "served": {"en": 5}}
    progress = Progress.from_dict(data)
    data["served"]["en"] = progress.to_dict()["served"]["en"] = 9

    assert progress.to_dict() == {**WHOLE, "served": {"en": 5}}


@pytest.mark.parametrize("name", COUNTS)
def test_a_negative_count_is_refused_with_all_values(name: str) -> None:
    values = {**WHOLE, name: -1}

    with pytest.raises(PositionError, match="got epoch={epoch}, cycle={cycle}, consumed={consumed}".format(**values)):
        Progress.from_dict(values)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [1.0, None, True])
def test_a_saved_count_that_is_no_int_is_damaged(name: str, value: Any) -> None:
    with pytest.raises(DamagedStateError) as caught:
        Progress.from_dict({**WHOLE, name: value})
    assert str(caught.value) == f"progress.{name} must be an int, got {value!r}."


def test_integers_of_numpy_become_pythons_and_other_numbers_are_refused() -> None:
    progress = Progress(epoch=np.int64(1), consumed=np.int32(4))

    assert [type(value) for value in progress.to_dict().values()] == [int, int, int]
    with pytest.raises(ConfigurationError, match=r"consumed must be an integer, got 1\.5"):
        Progress(consumed=1.5)  # type: ignore[arg-type]
