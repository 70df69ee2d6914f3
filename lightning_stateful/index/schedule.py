"""Weights that change as training goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.weights import shares_of

Unit = Literal["steps", "samples", "tokens"]
Between = Literal["constant", "linear"]


@dataclass(frozen=True)
class WeightSchedule:
    """Weights of the sources as a function of training progress.

    Attributes:
        points: Weights by progress, the first at 0: ``{0: {"en": 9, "sw": 1}, 10_000: {"en": 1, "sw": 1}}``. A weight
            may be zero for a while. After the last point its weights stay.
        unit: What progress is counted in, since the beginning of training and over all ranks: ``"steps"``,
            ``"samples"`` or ``"tokens"`` (mean lengths times samples).
        between: Whether the weights stay ``"constant"`` until the next point or go there in a ``"linear"`` way.

    Raises:
        ConfigurationError: The points do not begin at 0, are not integers, or name an unknown unit.
    """

    points: Mapping[int, Mapping[str, Any] | Sequence[Any]]
    unit: Unit = "steps"
    between: Between = "constant"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit) or self.between not in get_args(Between):
            raise ConfigurationError(
                f"A schedule has a unit among {get_args(Unit)} and goes on in one of {get_args(Between)} between its "
                f"points, got unit={self.unit!r}, between={self.between!r}."
            )
        if not isinstance(self.points, Mapping):
            raise ConfigurationError(f"A schedule is a dict of weights by progress, got {self.points!r}.")
        places = [as_int("a point of a schedule", place) for place in self.points]
        if not places or places[0] != 0 or sorted(set(places)) != places:
            raise ConfigurationError(f"A schedule begins at 0 and its points rise, got points at {places}.")

    def resolved(self, names: Sequence[str]) -> Schedule:
        """The schedule with a share for every source.

        Raises:
            ConfigurationError: A weight is missing or negative, or a source never has one.
        """
        shares = tuple(tuple(shares_of(names, weights, zero=True)) for weights in self.points.values())
        for number, name in enumerate(names):
            if not any(point[number] for point in shares):
                raise ConfigurationError(f"The schedule gives source {name!r} no weight at any point; leave it out.")
        return Schedule(tuple(int(place) for place in self.points), shares, self.unit, self.between)


@dataclass(frozen=True)
class Stretch:
    """A part of a schedule between two points.

    Attributes:
        begin: Progress at which it begins.
        end: Progress at which it ends; None for the last one.
        first: Shares at its beginning.
        final: Shares towards its end.
    """

    begin: int
    end: int | None
    first: tuple[Fraction, ...]
    final: tuple[Fraction, ...]

    def shares_at(self, progress: Fraction) -> tuple[Fraction, ...]:
        """Shares at a progress within the stretch."""
        if self.end is None or self.first == self.final:
            return self.first
        return self.partway(Fraction(progress - self.begin) / (self.end - self.begin))

    def partway(self, done: Fraction) -> tuple[Fraction, ...]:
        """Shares where ``done`` of the stretch, from 0 to 1, is behind."""
        return tuple(a + (b - a) * done for a, b in zip(self.first, self.final, strict=True))


@dataclass(frozen=True)
class Schedule:
    """A :class:`WeightSchedule` with a share for every source at every point."""

    places: tuple[int, ...]
    shares: tuple[tuple[Fraction, ...], ...]
    unit: Unit
    between: Between

    def stretches(self, progress: Fraction) -> Iterator[Stretch]:
        """The stretch that ``progress`` lies in, and all that follow."""
        for number, begin in enumerate(self.places):
            end = self.places[number + 1] if number + 1 < len(self.places) else None
            if end is None or progress < end:
                first = self.shares[number]
                final = self.shares[number + 1] if end is not None and self.between == "linear" else first
                yield Stretch(begin, end, first, final)

    def describe(self) -> str:
        """What a state says about it in words: short, whatever the number of points."""
        return f"{self.between} over {self.unit}, {len(self.places)} points, {digest(self)}"


def digest(*values: Any) -> str:
    """Six hexadecimal digits that change with any of the values."""
    return hashlib.blake2b(repr(values).encode(), digest_size=3).hexdigest()
