"""What may be done to the samples of a stream on their way: the configurations of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.streams.naming import check_function, name_of
from lightning_stateful.streams.read_ahead import ReadAhead, ReadAheadConfig
from lightning_stateful.streams.running import FilterStage, MapStage, RecurrentStage, WindowedStage
from lightning_stateful.streams.source import Way
from lightning_stateful.streams.stage import Open, Place, Stage


@dataclass(frozen=True)
class Mapped:
    """A function of a sample.

    Raises:
        ConfigurationError: It is no function.
    """

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("What is mapped over samples", self.function)

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return MapStage(open_inner, place, function=self.function, **_handling(way))

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["map", name_of(self.function)]


@dataclass(frozen=True)
class Filtered:
    """Samples of which a function is true.

    Raises:
        ConfigurationError: It is no function.
    """

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("What samples are filtered by", self.function)

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return FilterStage(open_inner, place, function=self.function, **_handling(way))

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["filter", name_of(self.function)]


@dataclass(frozen=True)
class Windowed:
    """Sliding windows of consecutive samples.

    Raises:
        ConfigurationError: ``width`` or ``step`` is no integer, or below 1.
    """

    width: int
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("width", "step"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return WindowedStage(open_inner, place, width=self.width, step=self.step)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["windowed", self.width, self.step]


@dataclass(frozen=True)
class Recurrent:
    """A running state: ``value, state = function(state, sample)``.

    The function is not seeded, and is run again on a resume: what it returns has to follow from its arguments alone.

    Raises:
        ConfigurationError: It is no function.
    """

    function: Callable[[Any, Any], tuple[Any, Any]]
    initial: Any

    def __post_init__(self) -> None:
        check_function("What carries a state from sample to sample", self.function)

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        own: dict[str, Any] = {"function": self.function, "initial": self.initial}
        return RecurrentStage(open_inner, place, **own, name_shard=way.name_shard)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["recurrent", name_of(self.function)]


@dataclass(frozen=True)
class Budgeted:
    """Batches of like lengths within a budget, window by window."""

    config: ReadAheadConfig

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""
        return ReadAhead(open_inner, place, config=self.config, seed=way.seed, name_shard=way.name_shard)

    def describe(self) -> Any:
        """Plain data to be compared."""
        return ["read_ahead", self.config.describe()]


def _handling(way: Way) -> dict[str, Any]:
    return {"seed": way.sample_seed, "on_error": way.on_error, "name_shard": way.name_shard}
