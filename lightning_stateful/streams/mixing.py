"""Which source of a mixed stream serves the next batch or sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture.draws import Draws
from lightning_stateful.mixture.sources import Stop
from lightning_stateful.mixture.weights import shares_of, whole_draws
from lightning_stateful.samplers.rng import seed_or_default

By = Literal["batch", "sample"]

_DRAWS_AT_ONCE = 256


@dataclass(frozen=True)
class Mixing:
    """In what proportion, and in what order, sources are drawn from.

    Attributes:
        names: The sources.
        draws: Draws of each source in a period.
        by: Whether a draw is a batch or a sample.
        stop: When a worker slot ends: when all sources are exhausted, when the first is, or when all have been and
            those that were earlier have begun again (``"cycle"``).
        in_turn: Whether sources come in turn, evenly spread: round robin.
        seed: Chooses the order of draws within a period; None for the seed of Lightning's
            ``seed_everything``, or 0.
        path: The place of the mixture among several that are read side by side.
    """

    names: tuple[str, ...]
    draws: tuple[int, ...]
    by: By = "batch"
    stop: Stop = "all_exhausted"
    in_turn: bool = True
    seed: int | None = None
    path: str = ""

    def __hash__(self) -> int:
        # Asked for at every draw.
        return hash((self.names, self.seed))

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        *,
        weights: Mapping[str, Any] | Sequence[Any] | None,
        temperature: float,
        by: str,
        stop: str,
        seed: int | None,
    ) -> Mixing:
        """Round robin without weights, a mixture with them.

        Raises:
            ConfigurationError: A weight is missing, or an argument out of range.
        """
        if by not in get_args(By):
            raise ConfigurationError(f"Streams are mixed by one of {get_args(By)}, got by={by!r}.")
        if stop not in get_args(Stop):
            raise ConfigurationError(f"stop must be one of {get_args(Stop)}, got {stop!r}.")
        if weights is None:
            if temperature != 1:
                raise ConfigurationError(f"temperature={temperature!r} makes weights more alike; pass weights.")
            draws: tuple[int, ...] = (1,) * len(names)
        else:
            draws = whole_draws(shares_of(names, weights, temperature=temperature))
        return cls(tuple(names), draws, by, stop, weights is None, seed)  # type: ignore[arg-type]  # looked at

    def at(self, path: str) -> Mixing:
        """The same mixture as part of what stands at ``path``."""
        return replace(self, seed=seed_or_default(self.seed), path=path)

    def source_at(self, draw: int, active: tuple[str, ...], epoch: int) -> str:
        """The source of a draw, of those that are not exhausted; the same on all ranks."""
        first, number = divmod(draw, _DRAWS_AT_ONCE)
        return _sources(self, active, epoch, first)[number]

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared."""
        return {
            "mixing_seed": seed_or_default(self.seed),
            "weights": dict(zip(self.names, self.draws, strict=True)),
            "by": self.by,
            "stop": self.stop,
            "in_turn": self.in_turn,
        }


@lru_cache(maxsize=64)
def _sources(mixing: Mixing, active: tuple[str, ...], epoch: int, first: int) -> list[str]:
    """So many draws from a multiple of their number on."""
    counts = [count if name in active else 0 for name, count in zip(mixing.names, mixing.draws, strict=True)]
    seed = loader_seed(seed_or_default(mixing.seed), mixing.path)
    key = None if mixing.in_turn else derive_seed("turns of streams", seed, epoch, *active)
    begin = first * _DRAWS_AT_ONCE
    found = Draws.repeated(counts, key=key).sources(begin, begin + _DRAWS_AT_ONCE)
    return [mixing.names[source] for source in found.tolist()]
