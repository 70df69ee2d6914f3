"""Batches of like lengths keep the laws of all orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.bucket_cases import in_budget
from support.orders import OrderCase, every_law

from lightning_stateful.bucketing import BucketOrder, Buckets, QuadraticCost

LENGTHS = [1 + (index * index * 7 + index * 3) % 19 for index in range(61)]


def case(lengths: list[int] = LENGTHS, *, shuffle: bool = True, drop_last: bool = False, **options: Any) -> OrderCase:
    def order(of: list[int]) -> BucketOrder:
        return BucketOrder(
            Buckets.of(of, **in_budget({"num_buckets": 4, **options})), seed=3, shuffle=shuffle, drop_last=drop_last
        )

    short = order(lengths)
    samples = [sample for sample, length in enumerate(lengths) if short.budget.num_samples(length)]
    return OrderCase(order=short, samples=samples, drops=drop_last, shuffled=shuffle, longer=order(lengths * 3))


CASES = {
    "tokens": case(max_tokens=40),
    "samples": case(batch_size=4),
    "batches of one": case(batch_size=1),
    "limited and in multiples": case(max_tokens=40, max_samples=7, multiple=3),
    "quadratic cost": case(max_tokens=60, cost=QuadraticCost(12)),
    "given boundaries": case(max_tokens=40, boundaries=[3, 8, 20, 50], num_buckets=None),
    "too long dropped": case(max_tokens=12, too_long="drop"),
    "full steps": case(max_tokens=20, drop_last=True),
    "unshuffled": case(max_tokens=40, shuffle=False),
    "one bucket": case(max_tokens=40, num_buckets=1),
}


@every_law
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_buckets_keep_the_laws(law: Callable[[OrderCase], None], case: OrderCase) -> None:
    law(case)
