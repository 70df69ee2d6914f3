"""Orders of batches of like lengths keep the laws of all orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.orders import OrderCase, every_law

from lightning_stateful.bucketing import BucketOrder, Buckets

LENGTHS = [1 + 7 * number % 23 for number in range(80)]


def case(options: dict[str, Any], **flags: bool) -> OrderCase:
    order, longer = (
        BucketOrder(Buckets.of(lengths, num_buckets=5, **options), seed=3, **flags)
        for lengths in (LENGTHS, LENGTHS * 2)
    )
    return OrderCase(
        order=order,
        longer=longer,
        samples=range(len(LENGTHS)),
        drops=order.drop_last,
        shuffled=order.shuffle,
    )


CASES = {
    "tokens": case({"max_tokens": 60}),
    "batch size": case({"batch_size": 3}),
    "drop_last": case({"batch_size": 4}, drop_last=True),
    "in turn": case({"max_tokens": 60}, shuffle=False),
}


@every_law
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_orders_of_buckets_keep_the_laws(law: Callable[[OrderCase], None], case: OrderCase) -> None:
    law(case)
