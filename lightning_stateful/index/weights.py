"""From the weights that people give to exact shares, and to a block in which they come out whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

from lightning_stateful.errors import ConfigurationError

_SIMPLE = 10_000
_LARGEST_EXACT_BLOCK = 256
_BLOCK = 64
_LEAST = Fraction(1, 10**15)


def shares_of(
    names: Sequence[str], weights: Mapping[str, Any] | Sequence[Any], *, zero: bool = False
) -> list[Fraction]:
    """Weights as fractions that add up to 1.

    A decimal such as 0.1 counts as 1/10, which its binary float is not.

    Args:
        names: The sources.
        weights: A positive number for every source, by name or in their order.
        zero: Whether some weights may be zero.

    Raises:
        ConfigurationError: A weight is missing, unknown, zero or negative; with the source's name.
    """
    given = by_name(names, weights, "weight")
    for name, weight in given.items():
        if not _is_number(weight) or weight < 0 or (weight == 0 and not zero):
            least = "zero or a positive" if zero else "a positive"
            raise ConfigurationError(
                f"The weight of source {name!r} must be {least} number, got {weight!r}. Leave out a source that is "
                "not to be served."
            )
    exact = [_simple(weight) for weight in given.values()]
    total = sum(exact)
    if not total:
        raise ConfigurationError(f"At least one weight must be positive, got {dict(given)}.")
    return [weight / total for weight in exact]


def refuse_rare(names: Sequence[str], shares: Sequence[Fraction]) -> None:
    """Refuse a share so small that a source would hardly ever have its turn.

    Raises:
        ConfigurationError: With the source's name.
    """
    for name, share in zip(names, shares, strict=True):
        if share < _LEAST:
            raise ConfigurationError(
                f"Source {name!r} would be served less than once in {1 / _LEAST} turns; leave it out, or give it a "
                "larger weight."
            )


def tempered(shares: Sequence[Fraction], temperature: float) -> list[Fraction]:
    """Shares raised to the power ``1 / temperature``: at 1 as they are, above 1 more alike.

    Raises:
        ConfigurationError: The temperature is not positive.

    Source:
        Arivazhagan et al., "Massively Multilingual Neural Machine Translation in the Wild", 2019, section 4.
    """
    if not _is_number(temperature) or temperature <= 0:
        raise ConfigurationError(f"temperature must be a positive number, got {temperature!r}.")
    if temperature == 1:
        return list(shares)
    raised = [Fraction(float(share) ** (1 / float(temperature))) for share in shares]
    total = sum(raised)
    return [share / total for share in raised]


def exact_block(shares: Sequence[Fraction]) -> int:
    """Turns in a block: the fewest that give every source a whole number, or 64 if that takes over 256."""
    block = math.lcm(*(share.denominator for share in shares))
    return block if block <= _LARGEST_EXACT_BLOCK else _BLOCK


def by_name(names: Sequence[str], values: Mapping[str, Any] | Sequence[Any], what: str) -> dict[str, Any]:
    """One value for every source, in the order of the sources.

    Raises:
        ConfigurationError: A source has no value, or a value no source.
    """
    if not isinstance(values, Mapping):
        if not hasattr(values, "__len__") or isinstance(values, str):
            raise ConfigurationError(
                f"Give a {what} for each of the sources {list(names)}, by name or in order, not {values!r}."
            )
        if len(values) != len(names):
            raise ConfigurationError(
                f"{len(values)} values were given as {what} for the {len(names)} sources {list(names)}; give one for "
                "each, or a dict by name."
            )
        return dict(zip(names, values, strict=True))
    values = {str(name): value for name, value in values.items()}
    for name in names:
        if name not in values:
            raise ConfigurationError(f"Source {name!r} has no {what}; there is one for {list(values)}.")
    for name in values:
        if name not in names:
            raise ConfigurationError(f"There is a {what} for {name!r}, which is none of the sources {list(names)}.")
    return {name: values[name] for name in names}


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


def _simple(weight: Any) -> Fraction:
    exact = Fraction(weight) if isinstance(weight, (int, Fraction)) else Fraction(float(weight))
    simple = exact.limit_denominator(_SIMPLE)
    return simple if abs(simple - exact) <= exact * Fraction(1, 10**15) else exact
