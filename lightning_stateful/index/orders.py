"""What comes where in an epoch, as a pure function of slot and epoch."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from lightning_stateful.core.checks import check_length, check_num_samples
from lightning_stateful.core.permutation import keyed_permutation
from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import derive_seed, loader_seed


@runtime_checkable
class Order(Protocol):
    """A canonical sequence of samples for every epoch.

    Implementations are frozen values. ``len`` is the number of slots of one epoch. :meth:`take` also answers for slots
    past it: a loader that starts over within an epoch (``max_size_cycle``) goes on counting.

    Attributes:
        kind: The name under which a state knows this order.
        order_version: Raised whenever the same configuration gives another sequence.
    """

    kind: ClassVar[str]
    order_version: ClassVar[int]

    def __len__(self) -> int:
        """Slots of one epoch."""
        ...

    def take(self, slots: Indices, epoch: int) -> Indices:
        """Sample indices at ``slots``: int64 of shape ``(n,)`` -> int64 of shape ``(n,)``."""
        ...

    def describe(self) -> dict[str, Any]:
        """The configuration that determines the sequence, as plain data to be compared."""
        ...


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """Every sample in turn, the same in every epoch."""

    length: int
    kind: ClassVar[str] = "sequential"
    order_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_length(self.length)

    def __len__(self) -> int:
        return self.length

    def take(self, slots: Indices, epoch: int) -> Indices:
        """Sample indices at ``slots``."""
        return slots % self.length if self.length else slots

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        return {"shuffle": False}


@dataclass(frozen=True, slots=True)
class ShuffledOrder:
    """Every sample once, in an order of its own each epoch.

    Attributes:
        length: Number of samples.
        seed: Chooses the orders.
        num_samples: Slots of an epoch if they differ from ``length``, as in ``torch.utils.data.RandomSampler``: a part
            of one shuffled pass, or several shuffled passes one after the other.
    """

    length: int
    seed: int = 0
    num_samples: int | None = None
    kind: ClassVar[str] = "shuffled"
    order_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_num_samples(self.length, self.length if self.num_samples is None else self.num_samples)

    def __len__(self) -> int:
        return self.length if self.num_samples is None else self.num_samples

    def take(self, slots: Indices, epoch: int) -> Indices:
        """Sample indices at ``slots``."""
        if not slots.size or (int(slots.min()) >= 0 and int(slots.max()) < self.length):
            return self._pass(0, epoch, slots)
        passes, places = np.divmod(slots, self.length)
        result = np.empty_like(slots)
        for number in np.unique(passes):
            chosen = passes == number
            result[chosen] = self._pass(int(number), epoch, places[chosen])
        return result

    def _pass(self, number: int, epoch: int, places: Indices) -> Indices:
        return keyed_permutation(self.length, derive_seed("shuffled", self.seed, epoch, number)).take(places)

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        described: dict[str, Any] = {"shuffle": True, "seed": self.seed}
        if self.num_samples is not None:
            described["num_samples"] = self.num_samples
        return described


AnOrder = TypeVar("AnOrder")


def order_at(order: AnOrder, path: str) -> AnOrder:
    """The same kind of order for one of several loaders: its sequence is drawn from (seed, path).

    Args:
        order: An order, or one of batches. One that holds no ``seed`` stays as it is.
        path: The loader's place in the user's list or dict; empty for a loader that stands alone.
    """
    if not path or not is_dataclass(order):
        return order
    for part in ("mixture", "windows"):
        if hasattr(order, part):
            return replace(order, **{part: order_at(getattr(order, part), path)})  # type: ignore[type-var]  # an instance
    seed = getattr(order, "seed", None)
    return order if seed is None else replace(order, seed=loader_seed(seed, path))  # type: ignore[type-var]  # as above
