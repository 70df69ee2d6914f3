"""Samples of many lengths, modules that put them into buckets, and what their runs are compared with."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from lightning_stateful import BucketDataModule, QuadraticCost
from support.bucket_cases import in_budget
from support.ledger import Numbers

NUM_SAMPLES = 47
MAX_TOKENS = 40
VAL_FIRST = 500


def length_of(index: int) -> int:
    """Tokens of a sample: mostly few, sometimes many, at most 19."""
    return 1 + (index * index * 7 + index * 3) % 19 if index % 3 else 1 + index % 5


class Texts(Numbers):
    """Samples that know their index and have as many tokens as stand in ``num_tokens``."""

    def __init__(self, length: int = NUM_SAMPLES, *, first: int = 0) -> None:
        super().__init__(length, first=first)
        self.num_tokens = [length_of(first + index) for index in range(length)]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "tokens": torch.tensor(self.num_tokens[index])}


def measure(sample: dict[str, torch.Tensor]) -> int:
    """The length of a sample, by the sample."""
    return int(sample["tokens"])


def bucketed(**options: Any) -> BucketDataModule:
    """Batches of 40 tokens in four buckets, and nine samples for validation."""
    defaults: dict[str, Any] = {
        "train": Texts(),
        "val": Texts(9, first=VAL_FIRST),
        "lengths": "num_tokens",
        "seed": 7,
    }
    if "batch_size" not in options:
        defaults["max_tokens"] = MAX_TOKENS
    if "boundaries" not in options:
        defaults["num_buckets"] = 4
    return BucketDataModule(**in_budget({**defaults, **options}))


MODULES: dict[str, Callable[..., Any]] = {
    "tokens": lambda **options: bucketed(**options),
    "equal counts": lambda **options: bucketed(boundaries="equal_counts", num_buckets=3, **options),
    "given boundaries": lambda **options: bucketed(boundaries=[3, 8, 20], **options),
    "batch size": lambda **options: bucketed(batch_size=4, **options),
    "limited and in multiples": lambda **options: bucketed(max_samples=7, multiple=3, **options),
    "quadratic cost": lambda **options: bucketed(max_tokens=60, cost=QuadraticCost(12), **options),
    "too long dropped": lambda **options: bucketed(max_tokens=15, too_long="drop", eval_batch_size=3, **options),
    "full steps": lambda **options: bucketed(drop_last=True, **options),
    "in order": lambda **options: bucketed(shuffle=False, **options),
}


def fits(name: str, batch: tuple[int, ...]) -> bool:
    """Whether a batch of one of these modules is within its budget."""
    longest, count = max(map(length_of, batch)), len(batch)
    if name == "batch size":
        return count <= 4
    if name == "limited and in multiples":
        return count <= 6 and longest * count <= MAX_TOKENS
    if name == "quadratic cost":
        return count * (longest + Fraction(longest**2, 12)) <= 60
    if name == "too long dropped":
        return longest * count <= 15
    return longest * count <= MAX_TOKENS


def cost_of(name: str, longest: int) -> Fraction:
    """The share of its batch's budget that a sample takes, where the longest has so many tokens."""
    if name == "quadratic cost":
        return (longest + Fraction(longest**2, 12)) / 60
    if name == "batch size":
        return Fraction(1, 4)
    return Fraction(longest, 15 if name == "too long dropped" else MAX_TOKENS)


def padding_of(name: str, *of_ranks: tuple[int, ...]) -> dict[str, float]:
    """The padding to log for the batches of all ranks in one step, of one of these modules."""
    longest = [max(map(length_of, batch)) for batch in of_ranks]
    tokens = sum(length_of(index) for batch in of_ranks for index in batch)
    padded = sum(most * len(batch) for most, batch in zip(longest, of_ranks, strict=True))
    used = sum(cost_of(name, most) * len(batch) for most, batch in zip(longest, of_ranks, strict=True))
    return {
        "padding/share": float(1 - Fraction(tokens, padded)),
        "padding/tokens": tokens,
        "padding/budget_use": float(used / len(of_ranks)),
    }
