"""How many samples of some length a batch may have."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import MAX_LENGTH
from lightning_stateful.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class QuadraticCost:
    """A sample of length ``n`` costs ``n + n**2 / length`` tokens, as where attention takes its share of the work.

    Attributes:
        length: The length at which attention costs as much as all the rest, at least 1.

    Raises:
        ConfigurationError: The length is out of range.

    Source:
        The form is that of Lhotse's ``quadratic_duration``.
    """

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", _at_least_one("QuadraticCost.length", self.length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a batch may hold: so many tokens, padding included, or so many samples.

    A batch of ``count`` samples of which the longest has ``longest`` tokens costs ``count * longest`` tokens, or, with
    a ``cost``, ``count`` times what that says of ``longest``.

    Attributes:
        max_tokens: Tokens of a batch, counted as if every sample were as long as the longest.
        batch_size: In place of ``max_tokens``: samples of a batch; one for all, or one for each of ``ends``.
        ends: The lengths up to which each of several batch sizes holds, rising.
        max_samples: Samples that a batch never exceeds, beside ``max_tokens``.
        multiple: Batches of at least so many samples have a multiple of it.
        cost: What a sample costs beside its tokens.

    Raises:
        ConfigurationError: A value is out of range, or they contradict each other.
    """

    max_tokens: int | None = None
    batch_size: int | tuple[int, ...] | None = None
    ends: tuple[int, ...] = ()
    max_samples: int | None = None
    multiple: int = 1
    cost: QuadraticCost | None = None

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.batch_size is None):
            raise ConfigurationError(
                f"Pass either max_tokens or batch_size, got max_tokens={self.max_tokens}, batch_size={self.batch_size}."
                " Beside max_tokens, max_samples limits the samples of a batch."
            )
        for name in ("max_tokens", "batch_size", "max_samples", "multiple"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), tuple):
                object.__setattr__(self, name, _at_least_one(name, getattr(self, name)))
        if isinstance(self.batch_size, tuple):
            self._check_several(self.batch_size)
        if self.max_tokens is None and (self.max_samples is not None or self.cost is not None):
            raise ConfigurationError("max_samples and cost limit batches of max_tokens; leave them out of batch_size.")
        if self.cost is not None and not hasattr(self.cost, "length"):
            raise ConfigurationError(f"cost must be a QuadraticCost, got {self.cost!r}.")

    def num_samples(self, longest: int) -> int:
        """Samples of a full batch whose longest has ``longest`` tokens; 0 if not even one fits."""
        if self.max_tokens is None:
            count = self._own_size(longest)
        else:
            count = int(self.max_tokens // self._cost(max(longest, 1)))
        if self.max_samples is not None:
            count = min(count, self.max_samples)
        # More samples than a dataset can have are as good as these, and overflow nothing.
        count = min(count, MAX_LENGTH)
        return count - count % self.multiple if count > self.multiple else count

    def use(self, longest: int, count: int) -> float:
        """The share of the budget that ``count`` samples take up, the longest of ``longest`` tokens."""
        if self.max_tokens is None:
            return count / self._own_size(longest)
        return float(count * self._cost(longest) / self.max_tokens)

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared; what is not set is left out."""
        described: dict[str, Any] = {}
        for name in ("max_tokens", "batch_size", "max_samples"):
            if getattr(self, name) is not None:
                value = getattr(self, name)
                described[name] = list(value) if isinstance(value, tuple) else value
        if self.multiple > 1:
            described["multiple"] = self.multiple
        if self.cost is not None:
            described["quadratic_length"] = self.cost.length
        return described

    def _own_size(self, longest: int) -> int:
        if isinstance(self.batch_size, tuple):
            return self.batch_size[min(bisect_left(self.ends, longest), len(self.batch_size) - 1)]
        return self.batch_size or 0

    def _check_several(self, sizes: tuple[int, ...]) -> None:
        object.__setattr__(self, "batch_size", tuple(_at_least_one("batch_size", size) for size in sizes))
        if len(sizes) != len(self.ends) or not sizes:
            raise ConfigurationError(
                f"batch_size names {len(sizes)} buckets, and there are {len(self.ends)}, which end at {self.ends}."
            )
        if any(shorter < longer for shorter, longer in pairwise(sizes)):
            raise ConfigurationError(
                f"Batch sizes of buckets must not grow with the length, got {sizes}, shortest bucket first."
            )

    def _cost(self, longest: int) -> Fraction:
        return Fraction(longest) if self.cost is None else longest + Fraction(longest * longest, self.cost.length)


def _at_least_one(name: str, value: Any) -> int:
    number = as_int(name, value)
    if number < 1 or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be at least 1, got {value!r}.")
    return number
