"""What may be done to the samples of a stream on their way: the configurations of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_stateful.streams.read_ahead import ReadAhead, ReadAheadConfig
from lightning_stateful.streams.running import FilterStage, MapStage, RecurrentStage, WindowedStage
from lightning_stateful.streams.source import Way
from lightning_stateful.streams.stage import Open, Place, Stage


@dataclass(frozen=True)
class Mapped:
    """A function of a sample."""

    function: Callable[[Any], Any]

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return MapStage(open_inner, place, function=self.function, seed=way.sample_seed, on_error=way.on_error)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["map", _name(self.function)]


@dataclass(frozen=True)
class Filtered:
    """Samples of which a function is true."""

    function: Callable[[Any], Any]

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return FilterStage(open_inner, place, function=self.function, seed=way.sample_seed, on_error=way.on_error)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["filter", _name(self.function)]


@dataclass(frozen=True)
class Windowed:
    """Sliding windows of consecutive samples."""

    width: int
    step: int = 1

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return WindowedStage(open_inner, place, width=self.width, step=self.step)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["windowed", self.width, self.step]


@dataclass(frozen=True)
class Recurrent:
    """A running state: ``value, state = function(state, sample)``."""

    function: Callable[[Any, Any], tuple[Any, Any]]
    initial: Any

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return RecurrentStage(open_inner, place, function=self.function, initial=self.initial)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["recurrent", _name(self.function)]


@dataclass(frozen=True)
class Budgeted:
    """Batches of like lengths within a budget, window by window."""

    config: ReadAheadConfig

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return ReadAhead(open_inner, place, config=self.config, seed=way.seed)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["read_ahead", self.config.describe()]


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
