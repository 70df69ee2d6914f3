"""Each of torch's samplers has an order of the same kind, parameters and distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.index import (
    BlockShuffledOrder,
    Order,
    ReplacementOrder,
    SequentialOrder,
    ShuffledOrder,
    SubsetOrder,
    WeightedOrder,
)
from lightning_stateful.loaders import order_of
from lightning_stateful.samplers import StatefulDistributedSampler

DATA = list(range(10))
WEIGHTS = [0.0, 1.0, 2.0, 3.0, 4.0]


def epoch(order: Order, number: int = 0) -> list[int]:
    return order.take(np.arange(len(order), dtype=np.int64), number).tolist()


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (None, SequentialOrder(10)),
        (SequentialSampler(DATA), SequentialOrder(10)),
        (SequentialSampler(DATA[:4]), SequentialOrder(4)),
        (RandomSampler(DATA), ShuffledOrder(10, 3)),
        (RandomSampler(DATA, num_samples=4), ShuffledOrder(10, 3, 4)),
        (RandomSampler(DATA, num_samples=25), ShuffledOrder(10, 3, 25)),
        (RandomSampler(DATA, replacement=True), ReplacementOrder(10, 10, 3)),
        (RandomSampler(DATA, replacement=True, num_samples=7), ReplacementOrder(10, 7, 3)),
        (DistributedSampler(DATA, 2, 1, shuffle=False), SequentialOrder(10)),
        (DistributedSampler(DATA, 2, 1), ShuffledOrder(10, 3)),
        (DistributedSampler(DATA, 2, 1, seed=8), ShuffledOrder(10, 8)),
        (StatefulDistributedSampler(DATA, 2, 1, seed=8), ShuffledOrder(10, 8)),
        (TorchdataRandomSampler(DATA), ShuffledOrder(10, 3)),
        (TorchdataDistributedSampler(DATA, 2, 1, shuffle=False), SequentialOrder(10)),
        (BlockShuffledOrder(10, 1), BlockShuffledOrder(10, 1)),
    ],
)
def test_a_sampler_has_an_order_of_its_kind_and_parameters(sampler: Any, expected: Order) -> None:
    assert order_of(DATA, sampler=sampler, seed=3) == expected


def test_without_a_sampler_shuffle_decides() -> None:
    assert order_of(DATA, shuffle=True, seed=3) == ShuffledOrder(10, 3)


def test_a_subset_sampler_has_an_order_over_its_indices() -> None:
    for indices in ([7, 1, 4], torch.tensor([7, 1, 4]), np.array([7, 1, 4])):
        order = order_of(DATA, sampler=SubsetRandomSampler(indices), seed=3)
        assert isinstance(order, SubsetOrder)
        assert sorted(epoch(order)) == [1, 4, 7]


@pytest.mark.parametrize("replacement", [False, True])
def test_a_weighted_sampler_has_an_order_of_its_weights(replacement: bool) -> None:
    order = order_of(DATA, sampler=WeightedRandomSampler(WEIGHTS, 4, replacement), seed=3)

    assert isinstance(order, WeightedOrder)
    assert order.weights.tolist() == WEIGHTS
    assert (len(order), order.replacement, order.seed) == (4, replacement, 3)


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(DATA, num_samples=10),
        RandomSampler(DATA, num_samples=4),
        RandomSampler(DATA, num_samples=25),
        RandomSampler(DATA, replacement=True, num_samples=13),
        SubsetRandomSampler([4, 2, 9]),
        WeightedRandomSampler(WEIGHTS, 3, replacement=False),
        WeightedRandomSampler(WEIGHTS, 30),
    ],
)
def test_an_epoch_has_the_length_of_the_samplers(sampler: Sampler[int]) -> None:
    assert len(order_of(DATA, sampler=sampler)) == len(list(sampler))


def test_more_samples_than_data_are_several_whole_passes_and_a_part() -> None:
    served = epoch(order_of(DATA, sampler=RandomSampler(DATA, num_samples=25)))

    assert sorted(served[:10]) == sorted(served[10:20]) == DATA
    assert len(set(served[20:])) == 5
    assert served[:10] != served[10:20]


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [
        (RandomSampler(DATA, replacement=True, num_samples=20_000), [1.0] * 10),
        (WeightedRandomSampler(WEIGHTS, 20_000), WEIGHTS),
        (WeightedRandomSampler([1e-300, 1.0, 1e300], 1000), [0.0, 0.0, 1.0]),
    ],
)
def test_draws_follow_the_weights(sampler: Sampler[int], weights: list[float]) -> None:
    counts = Counter(epoch(order_of(DATA, sampler=sampler, seed=1)))
    expected = np.array(weights) / sum(weights) * len(sampler)

    assert {index for index, count in enumerate(expected) if count} == set(counts)
    positive = [index for index, count in enumerate(expected) if count]
    if len(positive) > 1:
        assert chisquare([counts[index] for index in positive], expected[positive]).pvalue > 1e-4


@pytest.mark.parametrize("replacement", [False, True])
def test_first_draws_over_many_epochs_are_distributed_as_torchs(replacement: bool) -> None:
    """The second draw without replacement depends on the first, so both places are compared."""
    order = order_of(DATA, sampler=WeightedRandomSampler(WEIGHTS, 2, replacement), seed=1)
    places: list[Counter[int]] = [Counter(), Counter()]
    for number in range(4000):
        for place, index in zip(places, epoch(order, number), strict=True):
            place[index] += 1

    first = np.array(WEIGHTS[1:]) / 10
    second = first
    if not replacement:
        second = np.array([sum(p * q / (1 - p) for j, p in enumerate(first) if j != i) for i, q in enumerate(first)])
    for place, expected in zip(places, (first, second), strict=True):
        assert place[0] == 0
        assert chisquare([place[index] for index in range(1, 5)], expected * 4000).pvalue > 1e-4


def test_every_sample_comes_first_equally_often() -> None:
    order = order_of(DATA, sampler=RandomSampler(DATA), seed=1)
    firsts = Counter(epoch(order, number)[0] for number in range(3000))

    assert chisquare([firsts[index] for index in DATA]).pvalue > 1e-4


def test_the_samplers_own_generator_is_neither_used_nor_moved() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    order = order_of(DATA, sampler=RandomSampler(DATA, generator=generator), seed=3)

    assert epoch(order) == epoch(ShuffledOrder(10, 3))
    assert torch.equal(generator.get_state(), before)


class Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


@pytest.mark.parametrize("sampler", [Reversed(DATA), Own(), [3, 1, 2], iter([1])])
def test_a_sampler_that_may_yield_anything_is_refused_with_the_alternatives(sampler: Any) -> None:
    with pytest.raises(UnsupportedLoaderError, match=r"is none of torch's own, .* Use shuffle=True or False"):
        order_of(DATA, sampler=sampler)


def test_weights_that_cannot_be_drawn_from_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"num_samples=5 needs as many weights above zero, got 4"):
        order_of(DATA, sampler=WeightedRandomSampler(WEIGHTS, 5, replacement=False))
    with pytest.raises(ConfigurationError, match="At least one weight must be greater than zero"):
        order_of(DATA, sampler=WeightedRandomSampler([0.0, 0.0], 2))
    with pytest.raises(ConfigurationError, match="finite numbers that are not negative"):
        order_of(DATA, sampler=WeightedRandomSampler([1.0, float("nan")], 2))
