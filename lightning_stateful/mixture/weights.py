"""From the weights that a user gives to whole draws of a period; weights that change by step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any, Literal, get_args

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError

Between = Literal["constant", "linear"]

MAX_PERIOD = 2**16

# A period of so many draws may be as long as exact shares need; beyond, a longer one has to make errors this small.
_LARGEST_EXACT = 256
_SMALL_ERROR = 0.005

# Decimals of so few digits count as what is written, which their binary floats are not.
_SIMPLE_DENOMINATOR = 10_000
_LEAST_SHARE = Fraction(1, 10**15)


def by_name(names: Sequence[str], values: Mapping[str, Any] | Sequence[Any], what: str) -> dict[str, Any]:
    """One value for every source, in the order of the sources.

    Args:
        names: The sources.
        values: A value for each, by name or in their order.
        what: What a value is, for messages.

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


def shares_of(
    names: Sequence[str],
    weights: Mapping[str, Any] | Sequence[Any],
    *,
    temperature: float = 1,
    costs: Sequence[Fraction] | None = None,
    zero: bool = False,
) -> list[Fraction]:
    """The share of every source in the draws, as fractions that add up to 1; a decimal such as 0.1 counts as 1/10.

    Args:
        names: The sources.
        weights: A positive number for every source, by name or in their order.
        temperature: Raise the weights to the power ``1 / temperature``: above 1, shares are more alike.
        costs: What a draw of each source makes, on average, of what the weights are shares of; by default 1.
        zero: Whether some weights may be zero.

    Raises:
        ConfigurationError: A weight is missing, unknown, zero, negative, or too small to be meant, with the source's
            name; or the temperature is not positive.

    Source:
        Arivazhagan et al., "Massively Multilingual Neural Machine Translation in the Wild", 2019, section 4.
    """
    given = by_name(names, weights, "weight")
    for name, weight in given.items():
        if not _is_number(weight) or weight < 0 or (weight == 0 and not zero):
            least = "zero or a positive" if zero else "a positive"
            raise ConfigurationError(
                f"The weight of source {name!r} must be {least} number, got {weight!r}. Leave out a source that is "
                "not to be served."
            )
    if not _is_number(temperature) or temperature <= 0:
        raise ConfigurationError(f"temperature must be a positive number, got {temperature!r}.")
    shares = [_simplest(weight) for weight in given.values()]
    if not any(shares):
        raise ConfigurationError(f"At least one weight must be positive, got {dict(given)}.")
    if temperature != 1:
        shares = [Fraction(float(share / max(shares)) ** (1 / float(temperature))) for share in shares]
    if costs is not None:
        shares = [share / cost for share, cost in zip(shares, costs, strict=True)]
    total = sum(shares)
    for name, share in zip(names, shares, strict=True):
        if share < _LEAST_SHARE * total and not zero:
            raise ConfigurationError(
                f"Source {name!r} would be served less than once in {1 / _LEAST_SHARE} draws; leave it out, or give "
                "it a larger weight."
            )
    return [share / total for share in shares]


def whole_draws(shares: Sequence[Fraction], period: int | None = None, *, exact: int = 0) -> tuple[int, ...]:
    """Rounds shares to whole draws of a period; a source whose share is not 0 has at least one.

    Args:
        shares: They add up to 1.
        period: Draws in a period; by default the fewest that are exact if that takes at most 256, else 512, 1,024 and
            so on up to 65,536, until no share is more than 0.5 % off or fewer are exact.
        exact: Take an exact period up to this length too.

    Raises:
        ConfigurationError: The period has fewer draws than there are sources.
    """
    if period is not None:
        return _rounded(shares, period)
    fewest = math.lcm(*(share.denominator for share in shares))
    period = max(_LARGEST_EXACT, exact)
    while fewest > period:
        period = max(2 * period, len(shares))
        if period >= MAX_PERIOD:
            return _rounded(shares, min(fewest, MAX_PERIOD))
        draws = _rounded(shares, period)
        if fewest > period and max(relative_errors(shares, draws)) <= _SMALL_ERROR:
            return draws
    return tuple(int(share * fewest) for share in shares)


def relative_errors(shares: Sequence[Fraction], draws: Sequence[int]) -> list[float]:
    """The relative error of each source's share of the draws."""
    period = sum(draws)
    return [
        abs(count / period / share - 1) if share else 0.0
        for count, share in zip(draws, map(float, shares), strict=True)
    ]


def _rounded(shares: Sequence[Fraction], period: int) -> tuple[int, ...]:
    served = [source for source, share in enumerate(shares) if share]
    if period < len(served):
        raise ConfigurationError(
            f"A period of {period} draws has none for some of {len(served)} sources; give it at least one for each."
        )
    draws = [max(int(share * period), 1) if share else 0 for share in shares]
    while rest := period - sum(draws):
        # Where another draw, or one less, changes a source's share the least.
        more = rest > 0
        change = {source: (draws[source] - (not more)) / float(shares[source]) for source in served}
        for source in sorted(served, key=change.__getitem__, reverse=not more)[: abs(rest)]:
            draws[source] += 1 if more else -(draws[source] > 1)
    return tuple(draws)


@dataclass(frozen=True)
class WeightSchedule:
    """Weights of the sources as a function of the steps taken since training began.

    Attributes:
        points: Weights by step, the first at 0: ``{0: {"en": 9, "sw": 1}, 10_000: {"en": 1, "sw": 1}}``. A weight may
            be zero for a while. After the last point its weights stay.
        between: Whether the weights stay ``"constant"`` until the next point or go there in a ``"linear"`` way.

    Raises:
        ConfigurationError: The points do not begin at 0 or are not integers, or ``between`` is unknown.
    """

    points: Mapping[int, Mapping[str, Any] | Sequence[Any]]
    between: Between = "constant"

    def __post_init__(self) -> None:
        if self.between not in get_args(Between):
            raise ConfigurationError(
                f"A schedule goes on in one of {get_args(Between)} between its points, got between={self.between!r}."
            )
        if not isinstance(self.points, Mapping):
            raise ConfigurationError(f"A schedule is a dict of weights by step, got {self.points!r}.")
        steps = [as_int("a point of a schedule", step) for step in self.points]
        if not steps or steps[0] != 0 or sorted(set(steps)) != steps:
            raise ConfigurationError(f"A schedule begins at 0 and its points rise, got points at {steps}.")

    def shares(self, names: Sequence[str], costs: Sequence[Fraction] | None = None) -> list[list[Fraction]]:
        """The share of every source at each point; see :func:`shares_of`.

        Raises:
            ConfigurationError: A weight is missing or negative, or a source never has one.
        """
        shares = [shares_of(names, weights, costs=costs, zero=True) for weights in self.points.values()]
        for number, name in enumerate(names):
            if not any(point[number] for point in shares):
                raise ConfigurationError(f"The schedule gives source {name!r} no weight at any point; leave it out.")
        return shares


@dataclass(frozen=True)
class DrawSchedule:
    """A :class:`WeightSchedule` in whole draws.

    Attributes:
        steps: The step of each point.
        draws: At each point, draws of every source in a period.
        between: What happens from one point to the next.
    """

    steps: tuple[int, ...]
    draws: tuple[tuple[int, ...], ...]
    between: Between

    def describe(self) -> str:
        """A short description for a state, whatever the number of points."""
        return f"{self.between}, {len(self.steps)} points, {digest(self.steps, self.draws)}"


def digest(*values: object) -> str:
    """Six hexadecimal digits that change with any of the values."""
    return hashlib.blake2b(repr(values).encode(), digest_size=3).hexdigest()


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


def _simplest(weight: Any) -> Fraction:
    exact = Fraction(weight) if isinstance(weight, (int, Fraction)) else Fraction(float(weight))
    simple = exact.limit_denominator(_SIMPLE_DENOMINATOR)
    return simple if abs(simple - exact) <= exact * Fraction(1, 10**15) else exact
