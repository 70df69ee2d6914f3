"""The budget of a batch: limits its number of samples by their length, and finds samples that are too long."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from lightning_stateful.bucketing.lengths import Histogram
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import MAX_LENGTH
from lightning_stateful.errors import ConfigurationError

TooLong = Literal["error", "drop"]


@dataclass(frozen=True, slots=True)
class QuadraticCost:
    """A cost of ``n + n**2 / length`` tokens for a sample of length ``n``, as with attention.

    Attributes:
        length: The length at which attention costs as much as all the rest, at least 1.

    Raises:
        ConfigurationError: The length is out of range.

    Source:
        The same form as Lhotse's ``quadratic_duration``.
    """

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", as_int("QuadraticCost.length", self.length, least=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that a batch may hold: a number of tokens, padding included, or a number of samples.

    A batch of ``count`` samples of which the longest has ``longest`` tokens costs ``count * longest`` tokens or, with a
    ``cost``, ``count`` times the cost of ``longest``.

    Attributes:
        max_tokens: Tokens of a batch, counted as if every sample were as long as the longest.
        batch_size: In place of ``max_tokens``: samples of a batch.
        max_samples: Samples that a batch never exceeds, beside ``max_tokens``.
        multiple: Batches of at least so many samples have a multiple of it.
        cost: A cost of samples beside their tokens.
        too_long: How to treat samples longer than ``max_tokens`` allows: ``"error"`` refuses them, ``"drop"`` leaves
            them out.

    Raises:
        ConfigurationError: A value is out of range, or they contradict each other.
    """

    max_tokens: int | None = None
    batch_size: int | None = None
    max_samples: int | None = None
    multiple: int = 1
    cost: QuadraticCost | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.batch_size is None):
            raise ConfigurationError(
                f"Pass either max_tokens or batch_size, got max_tokens={self.max_tokens}, batch_size={self.batch_size}."
                " Beside max_tokens, max_samples limits the samples of a batch."
            )
        for name in ("max_tokens", "batch_size", "max_samples", "multiple"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_int(name, getattr(self, name), least=1))
        if self.max_tokens is None and (self.max_samples is not None or self.cost is not None):
            raise ConfigurationError("max_samples and cost limit batches of max_tokens; leave them out of batch_size.")
        if self.cost is not None and not isinstance(self.cost, QuadraticCost):
            raise ConfigurationError(f"cost must be a QuadraticCost, got {self.cost!r}.")
        if self.too_long not in get_args(TooLong):
            raise ConfigurationError(f"too_long must be one of {get_args(TooLong)}, got {self.too_long!r}.")

    @classmethod
    def of(cls, budget: Budget | None, *, max_tokens: int | None = None, batch_size: int | None = None) -> Budget:
        """The budget, or one of ``max_tokens`` or ``batch_size`` alone.

        Raises:
            ConfigurationError: None of the three is given, or several.
        """
        if budget is None:
            return cls(max_tokens=max_tokens, batch_size=batch_size)
        if not isinstance(budget, Budget):
            raise ConfigurationError(f"budget must be a Budget, got {budget!r}.")
        if max_tokens is not None or batch_size is not None:
            raise ConfigurationError(
                f"The budget says how large a batch is: {budget}. Leave out max_tokens={max_tokens} and "
                f"batch_size={batch_size}, or put them into it."
            )
        return budget

    def num_samples(self, longest: int) -> int:
        """Samples of a full batch whose longest sample has ``longest`` tokens; 0 if not even one fits."""
        # More samples than a dataset can have are as good as these, and overflow nothing.
        count = min(self.batch_size or MAX_LENGTH, self.max_samples or MAX_LENGTH, MAX_LENGTH)
        if self.max_tokens is not None:
            count = min(count, int(self.max_tokens // self._cost(max(longest, 1))))
        return count - count % self.multiple if count > self.multiple else count

    def use(self, longest: int, count: int) -> float:
        """The share of the budget that a batch of ``count`` samples takes up, the longest of ``longest`` tokens."""
        if self.batch_size is not None:
            return count / self.batch_size
        return float(count * self._cost(longest) / (self.max_tokens or 1))

    def config(self) -> dict[str, Any]:
        """Plain data to be compared; options that are not set are left out."""
        values = {name: getattr(self, name) for name in ("max_tokens", "batch_size", "max_samples")}
        if self.multiple > 1:
            values["multiple"] = self.multiple
        if self.cost is not None:
            values["quadratic_length"] = self.cost.length
        if self.too_long != "error":
            values["too_long"] = self.too_long
        return {name: value for name, value in values.items() if value is not None}

    def _cost(self, longest: int) -> Fraction:
        return Fraction(longest) if self.cost is None else longest + Fraction(longest * longest, self.cost.length)


def drop_too_long(lengths: Histogram, budget: Budget) -> tuple[Histogram, int]:
    """Leave out samples that are longer than the whole budget, or refuse them, as the budget says.

    Args:
        lengths: The number of samples of each length.
        budget: The budget of a batch.

    Returns:
        The lengths that fit, and the number of samples that do not.

    Raises:
        ConfigurationError: There are some and they are an error, or none is left.
    """
    # Where one length fits, all shorter ones do.
    fits = bisect_left(lengths.values.tolist(), True, key=lambda length: budget.num_samples(length) == 0)
    count = int(lengths.counts[fits:].sum())
    if not count:
        return lengths, 0
    found = (
        f"{count} of {int(lengths.counts.sum())} samples are longer than max_tokens={budget.max_tokens} allows; the "
        f"longest has {int(lengths.values[-1])} tokens"
    )
    if budget.too_long == "error":
        raise ConfigurationError(
            f"{found}. Raise max_tokens, shorten the samples, or pass "
            f'budget=Budget(max_tokens={budget.max_tokens}, too_long="drop") to leave them out.'
        )
    if not fits:
        raise ConfigurationError(f"{found}, so that too_long='drop' would leave no sample. Raise max_tokens.")
    return Histogram(lengths.values[:fits], lengths.counts[:fits]), count
