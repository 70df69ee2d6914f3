"""Wrapped samplers keep the laws of all orders, as far as a sequence that is only walked forward can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.orders import OrderCase, every_law
from torch.utils.data import RandomSampler, Sampler

from lightning_stateful.samplers.wrapped_sampler import WrappedSampler

LENGTH = 47


class Shuffling(Sampler[int]):
    """A sampler that does not say how many samples it has."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class Batches(Sampler[list[int]]):
    """Whole batches of one to three samples, shuffled."""

    def __init__(self, length: int) -> None:
        self.batches = [list(range(start, min(start + 1 + start % 3, length))) for start in self.starts(length)]

    @staticmethod
    def starts(length: int) -> list[int]:
        starts = [0]
        while starts[-1] + 1 + starts[-1] % 3 < length:
            starts.append(starts[-1] + 1 + starts[-1] % 3)
        return starts

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(len(self.batches)).tolist():
            yield self.batches[number]


class SizedBatches(Batches):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self.batches)


def case(make: Callable[[int], Sampler[object]], *, forward: bool, **options: object) -> OrderCase:
    order, longer = (WrappedSampler(make(length), seed=3, **options) for length in (LENGTH, 2 * LENGTH))
    return OrderCase(
        order=order,
        longer=None if forward else longer,
        samples=range(LENGTH),
        drops=options.get("tail") == "drop",
        forward=forward,
        tells_repeats=not order.whole_batches and order.is_sized,
    )


CASES = {
    "samples": case(lambda length: RandomSampler(range(length)), forward=False, batch_size=4),
    "samples, dropped": case(lambda length: RandomSampler(range(length)), forward=False, batch_size=4, tail="drop"),
    "samples without len": case(Shuffling, forward=True, batch_size=2),
    "whole batches": case(SizedBatches, forward=False, whole_batches=True),
    "whole batches without len": case(Batches, forward=True, whole_batches=True),
}


@every_law
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_wrapped_samplers_keep_the_laws(law: Callable[[OrderCase], None], case: OrderCase) -> None:
    law(case)
