"""Samples that are longer than the budget of a batch."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.budget import Budget
from lightning_stateful.index.lengths import Histogram

TooLong = Literal["error", "drop", "alone"]


class Fitting(NamedTuple):
    """Lengths, with what happens to those too long.

    Attributes:
        lengths: Those that are served.
        longest: The longest that fits a budget; longer ones are served alone.
        num_dropped: Samples left out.
        num_alone: Samples in batches of their own, each over the budget.
    """

    lengths: Histogram
    longest: int
    num_dropped: int = 0
    num_alone: int = 0


def fit(lengths: Histogram, budget: Budget, too_long: TooLong) -> Fitting:
    """Decide about samples of which not even one fits the budget.

    Raises:
        ConfigurationError: There are some and they are an error, or none is left.
    """
    if too_long not in get_args(TooLong):
        raise ConfigurationError(f"too_long must be one of {get_args(TooLong)}, got {too_long!r}.")
    fits = _num_fitting(lengths, budget)
    longest = int(lengths.values[fits - 1]) if fits else 0
    count = int(lengths.counts[fits:].sum())
    if not count:
        return Fitting(lengths, longest)
    if too_long == "alone":
        return Fitting(lengths, longest, num_alone=count)
    said = (
        f"{count} of {int(lengths.counts.sum())} samples are longer than max_tokens={budget.max_tokens} allows; the "
        f"longest has {int(lengths.values[-1])} tokens"
    )
    if too_long == "error":
        raise ConfigurationError(
            f'{said}. Raise max_tokens, shorten the samples, or pass too_long="drop" to leave them out or '
            'too_long="alone" to serve each in a batch of its own.'
        )
    if not fits:
        raise ConfigurationError(f"{said}, so that too_long='drop' would leave no sample. Raise max_tokens.")
    return Fitting(Histogram(lengths.values[:fits], lengths.counts[:fits]), longest, num_dropped=count)


def _num_fitting(lengths: Histogram, budget: Budget) -> int:
    """How many of the distinct lengths fit; all shorter ones do, too."""
    below, above = 0, len(lengths.values)
    while below < above:
        middle = (below + above) // 2
        if budget.num_samples(int(lengths.values[middle])):
            below = middle + 1
        else:
            above = middle
    return below


def num_samples(budget: Budget, longest: int) -> int:
    """Samples of a full batch; one where not even that fits."""
    return max(budget.num_samples(longest), 1)
