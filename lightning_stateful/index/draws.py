"""The orders behind torch's other samplers: draws with replacement, by weight, and from a subset."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.checks import check_num_samples
from lightning_stateful.core.permutation import hashed_words
from lightning_stateful.core.ranges import Indices
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.index.orders import ShuffledOrder


@dataclass(frozen=True, slots=True)
class ReplacementOrder:
    """Independent uniform draws with replacement, as ``RandomSampler(replacement=True)``.

    Attributes:
        length: Number of samples to draw from.
        num_samples: Slots of an epoch.
        seed: Chooses the draws.
    """

    length: int
    num_samples: int
    seed: int = 0
    kind: ClassVar[str] = "replacement"
    order_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_num_samples(self.length, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def take(self, slots: Indices, epoch: int) -> Indices:
        """Sample indices at ``slots``."""
        words = hashed_words(slots, "replacement", self.seed, epoch)
        drawn: Indices = (words % np.uint64(max(self.length, 1))).astype(np.int64)
        return drawn

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        return {"shuffle": True, "replacement": True, "seed": self.seed, "num_samples": self.num_samples}


@dataclass(frozen=True, slots=True, eq=False)
class WeightedOrder:
    """Draws in proportion to weights, as ``torch.utils.data.WeightedRandomSampler``.

    With replacement each slot is drawn on its own by inversion of the cumulated weights. Without, an epoch is the
    race of exponential clocks, which takes one sort of all weights an epoch.

    Attributes:
        weights: One non-negative weight a sample, float64 of shape ``(n,)``, not all zero.
        num_samples: Slots of an epoch.
        replacement: Whether a sample may be drawn twice in an epoch.
        seed: Chooses the draws.

    Raises:
        ConfigurationError: Weights are negative, not finite or all zero, or too few for ``num_samples``.

    Source:
        Efraimidis and Spirakis, "Weighted random sampling with a reservoir", IPL 97 (2006), for the race.
    """

    weights: NDArray[np.float64]
    num_samples: int
    replacement: bool = True
    seed: int = 0
    _scaled: NDArray[np.float64] = field(init=False, repr=False)
    _cumulated: NDArray[np.float64] = field(init=False, repr=False)
    _digest: str = field(init=False, repr=False)
    kind: ClassVar[str] = "weighted"
    order_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_num_samples(self.weights.size, self.num_samples)
        if self.weights.ndim != 1 or not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ConfigurationError("weights must be a one-dimensional array of finite numbers that are not negative.")
        positive = int(np.count_nonzero(self.weights))
        if self.num_samples and not positive:
            raise ConfigurationError("At least one weight must be greater than zero.")
        if not self.replacement and positive < self.num_samples:
            raise ConfigurationError(
                f"Without replacement num_samples={self.num_samples} needs as many weights above zero, got {positive}."
            )
        # A copy, scaled by a power of two: exact, and sums can neither overflow nor vanish.
        scale = -int(np.frexp(self.weights.max())[1]) if self.weights.size else 0
        own = np.ldexp(self.weights.astype(np.float64), scale)
        own.flags.writeable = False
        object.__setattr__(self, "_scaled", own)
        object.__setattr__(self, "_digest", _digest(self.weights))
        object.__setattr__(self, "_cumulated", np.cumsum(own))

    def __len__(self) -> int:
        return self.num_samples

    def take(self, slots: Indices, epoch: int) -> Indices:
        """Sample indices at ``slots``."""
        if not slots.size:
            return slots
        if self.replacement:
            uniform = _uniform(hashed_words(slots, "weighted", self.seed, epoch))
            # side="right" skips samples of weight zero; the last one with weight closes the interval.
            drawn = np.searchsorted(self._cumulated, uniform * self._cumulated[-1], side="right")
            last = np.searchsorted(self._cumulated, self._cumulated[-1], side="left")
            chosen: Indices = np.minimum(drawn, last).astype(np.int64)
            return chosen
        passes, places = np.divmod(slots, max(self.num_samples, 1))
        result = np.empty_like(slots)
        for number in np.unique(passes):
            chosen = passes == number
            result[chosen] = _race(self, epoch, int(number))[places[chosen]]
        return result

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data; weights by a digest."""
        return {
            "shuffle": "weighted",
            "replacement": self.replacement,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "weights": self._digest,
        }


@dataclass(frozen=True, slots=True, eq=False)
class SubsetOrder:
    """A shuffled order over chosen indices, as ``torch.utils.data.SubsetRandomSampler``.

    Attributes:
        indices: The indices to serve, int64 of shape ``(n,)``.
        seed: Chooses the orders.
    """

    indices: Indices
    seed: int = 0
    _inner: ShuffledOrder = field(init=False, repr=False)
    kind: ClassVar[str] = "subset"
    order_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        own = np.array(self.indices, dtype=np.int64)
        own.flags.writeable = False
        object.__setattr__(self, "indices", own)
        object.__setattr__(self, "_inner", ShuffledOrder(own.size, self.seed))

    def __len__(self) -> int:
        return int(self.indices.size)

    def take(self, slots: Indices, epoch: int) -> Indices:
        """Sample indices at ``slots``."""
        return self.indices[self._inner.take(slots, epoch)]

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data; indices by a digest."""
        return {"shuffle": True, "seed": self.seed, "num_samples": len(self), "indices": _digest(self.indices)}


@lru_cache(maxsize=4)
def _race(order: WeightedOrder, epoch: int, number: int) -> Indices:
    runners = np.flatnonzero(order._scaled)
    uniform = _uniform(hashed_words(runners, "weighted race", order.seed, epoch, number))
    with np.errstate(over="ignore"):
        arrival = -np.log1p(-uniform) / order._scaled[runners]
    winners: Indices = runners[np.argsort(arrival, kind="stable")[: order.num_samples]]
    return winners


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    uniform: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def _digest(array: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
