"""How a stream is served, beside how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError

Replay = Literal["warn", "refuse"]


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How a stream is served.

    Attributes:
        steps_per_epoch: Steps of an epoch; the next goes on where it ends, and the stream begins again where it ends.
        replay: Whether a stream that has to be read again up to its place is read, with a warning, or refused.
        exact: Whether each rank serves what it has, however many steps it takes: for evaluation.
        timeout: Seconds to wait for the other ranks' batches.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    steps_per_epoch: int | None = None
    replay: Replay = "warn"
    exact: bool = False
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.steps_per_epoch is not None and as_int("steps_per_epoch", self.steps_per_epoch) < 1:
            raise ConfigurationError(f"steps_per_epoch must be at least 1, got {self.steps_per_epoch}.")
        if not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise ConfigurationError(f"timeout must be a number of seconds above 0, got {self.timeout!r}.")
        if self.replay not in ("warn", "refuse"):
            raise ConfigurationError(f"replay must be one of ('warn', 'refuse'), got {self.replay!r}.")
