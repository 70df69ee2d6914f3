"""Orders of samples keep the laws of all orders; what several orders share, and progress, do what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.orders import OrderCase, every_law

from lightning_stateful.core import BlockShuffledOrder, Progress, SampleBatchOrder, SequentialOrder, ShuffledOrder
from lightning_stateful.core.order import seeded_at
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import DamagedStateError, PositionError


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


def test_an_order_draws_from_the_path_of_its_loader() -> None:
    assert seeded_at(ShuffledOrder(9, 3), "1.a") == ShuffledOrder(9, loader_seed(3, "1.a"))


# Progress

COUNTS = ["epoch", "cycle", "consumed"]
WHOLE = {"epoch": 2, "cycle": 0, "consumed": 12288}


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
