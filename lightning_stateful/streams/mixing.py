"""Whose turn it is among the sources of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.mixture import Stop
from lightning_stateful.index.proportions import Proportions
from lightning_stateful.index.turns import Turns
from lightning_stateful.index.weights import exact_block, refuse_rare, shares_of, tempered
from lightning_stateful.samplers.rng import seed_or_default

By = Literal["batch", "sample"]

_TURNS_AT_ONCE = 256


@dataclass(frozen=True)
class Mixing:
    """In what proportion, and in what order, sources have their turns.

    Attributes:
        names: The sources.
        shares: Each source's share of the turns; they add up to 1.
        by: Whether a turn is a batch or a sample.
        stop: When a lane ends: when all sources are exhausted, when the first is, or when all have been exhausted and
            those that were earlier have begun again (``"cycle"``).
        in_turn: Whether sources come in turn, evenly spread: round robin.
        seed: Chooses the order of turns, in blocks whose shares are exact; None for the seed of Lightning's
            ``seed_everything``, or 0.
        path: The place of the mixture among several that are read side by side.
    """

    names: tuple[str, ...]
    shares: tuple[Fraction, ...]
    by: By = "batch"
    stop: Stop = "all_exhausted"
    in_turn: bool = True
    seed: int | None = None
    path: str = ""

    def __hash__(self) -> int:
        # Asked for at every turn, and fractions take long.
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
            shares = [Fraction(1, len(names))] * len(names)
        else:
            shares = tempered(shares_of(names, weights), temperature)
            refuse_rare(names, shares)
        return cls(tuple(names), tuple(shares), by, stop, weights is None, seed)  # type: ignore[arg-type]  # looked at

    def at(self, path: str) -> Mixing:
        """The same mixture as part of what stands at ``path``."""
        return replace(self, seed=seed_or_default(self.seed), path=path)

    def source_at(self, turn: int, active: tuple[str, ...], epoch: int) -> str:
        """The source of a turn, of those that are not exhausted; the same on all ranks."""
        first, number = divmod(turn, _TURNS_AT_ONCE)
        return _turns(self, active, epoch, first)[number]

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared."""
        shares = {
            name: str(share.limit_denominator(10**6)) for name, share in zip(self.names, self.shares, strict=True)
        }
        return {
            "mixing_seed": seed_or_default(self.seed),
            "weights": shares,
            "by": self.by,
            "stop": self.stop,
            "in_turn": self.in_turn,
        }


@lru_cache(maxsize=64)
def _turns(mixing: Mixing, active: tuple[str, ...], epoch: int, first: int) -> list[str]:
    shares = [share for name, share in zip(mixing.names, mixing.shares, strict=True) if name in active]
    total = sum(shares)
    shares = [share / total for share in shares]
    seed = loader_seed(seed_or_default(mixing.seed), mixing.path)
    key = None if mixing.in_turn else derive_seed("turns of streams", seed, epoch, *active)
    turns = Turns(proportions=Proportions(exact_block(shares), shares), key=key)
    begin = first * _TURNS_AT_ONCE
    return [active[number] for number in turns.sources(begin, begin + _TURNS_AT_ONCE).tolist()]
