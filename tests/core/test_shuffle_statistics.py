"""Shuffled orders look random, by statistics at fixed seeds; the last test shows that they find a weak mixer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_stateful.core import KeyedPermutation, ShuffledOrder, permutation

ALMOST_NEVER = 1e-4
Array = np.ndarray
Square = tuple[float, int]


def shuffled(length: int, seed: int, epoch: int = 0) -> Array:
    return ShuffledOrder(length, seed).take(np.arange(length), epoch, 0)


def shuffled_at(length: int, seed: int, positions: Array) -> Array:
    return ShuffledOrder(length, seed).take(positions.ravel(), 0, 0).reshape(positions.shape)


large = pytest.mark.parametrize("length", [10**9, 2**33, 2**40])


def tails_of_chi_square(square: float, freedom: int) -> tuple[float, float]:
    """The chances of a chi-square up to and above a value, which are regularized incomplete gamma functions."""
    halves = torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(square / 2, dtype=torch.float64)
    return float(torch.special.gammainc(*halves)), float(torch.special.gammaincc(*halves))


def squares_of_counts(buckets: Array, num_buckets: int) -> Square:
    """Chi-square and degrees of freedom of equally likely buckets."""
    expected = buckets.size / num_buckets
    return ((np.bincount(buckets, minlength=num_buckets) - expected) ** 2).sum() / expected, num_buckets - 1


def p_of_sum(squares: list[Square]) -> float:
    """The p-value of independent chi-squares, each with its degrees of freedom; too even counts as well."""
    tails = tails_of_chi_square(sum(square for square, _ in squares), sum(freedom for _, freedom in squares))
    return min(1.0, 2 * min(tails))


@pytest.mark.parametrize("successive", ["seeds", "epochs"])
def test_all_120_orders_of_five_samples_are_equally_likely(successive: str) -> None:
    numbers = range(12_000)
    counts = Counter(tuple(shuffled(5, *((number, 0) if successive == "seeds" else (0, number)))) for number in numbers)

    assert len(counts) == 120
    squares = sum((count - 100) ** 2 for count in counts.values()) / 100
    assert tails_of_chi_square(squares, 119)[1] > ALMOST_NEVER


def random_positions(length: int, shape: int, seed: int) -> Array:
    return np.random.default_rng([length, seed]).integers(0, length, shape)


def high_bucket(values: Array, length: int, num_buckets: int) -> Array:
    return np.minimum(values // (length // num_buckets), num_buckets - 1)


def high_gap(gap: Array, length: int) -> Array:
    return high_bucket(gap, length, 64)


def low_gap(gap: Array, length: int) -> Array:
    return gap & 63


def p_of_strides(draw_at: Callable[..., Array], length: int, bucket: Callable[..., Array]) -> float:
    """Gaps between the samples at ``position`` and ``position + 2**k``, for every ``k``, in 64 buckets."""
    squares = []
    for seed in range(3):
        powers = 2 ** np.arange((length // 2).bit_length())
        positions = random_positions(length, 2**12, seed) // 2
        samples = draw_at(length, seed, np.concatenate([positions[None], (positions + powers[:, None]) % length]))
        squares += [squares_of_counts(bucket(gap, length), 64) for gap in (samples[1:] - samples[0]) % length]
    return p_of_sum(squares)


@large
@pytest.mark.parametrize("bucket", [high_gap, low_gap])
def test_gaps_at_every_power_of_two_in_huge_datasets_are_uniform(length: int, bucket: Callable[..., Array]) -> None:
    assert p_of_strides(shuffled_at, length, bucket) > ALMOST_NEVER


# Keys whose first six or seven multipliers mix the upper half of the range badly.
@pytest.mark.parametrize("key", [215, 2425, 2541, 13220, 5789, 6217, 12350])
def test_keys_with_weak_multipliers_are_mixed_as_well_as_others(key: int) -> None:
    length = 2**17
    order = KeyedPermutation(length, key).take(np.arange(length))
    pairs = np.bincount((order[length // 2 :] - order[: length // 2]) % length, minlength=length)
    expected = (length // 2) ** 2 / 2 / length

    assert (pairs * (pairs - 1) // 2).sum() < expected + 5 * np.sqrt(expected)


@pytest.mark.parametrize("length", [2**17, 2**33, 2**40])
def test_the_gaps_find_a_mixer_with_too_few_rounds(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_NUM_ROUNDS", 2)

    def weak_at(length: int, seed: int, positions: Array) -> Array:
        return KeyedPermutation(length, seed).take(positions)

    assert p_of_strides(weak_at, length, high_gap) < ALMOST_NEVER
