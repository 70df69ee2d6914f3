"""The one rule by which the rest of an epoch is cut into steps and dealt out to ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.topology import split_evenly
from lightning_stateful.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """Cuts ``remaining`` samples into steps that give every rank the same number of batches.

    A full step serves ``num_replicas * batch_size`` consecutive samples, each rank its consecutive share. The last
    step splits what is left as evenly as it goes. Where less than one sample a rank would be left over, the step before
    it gives some of its own away, so that still nothing is repeated. What that cannot help is an epoch (or the rest of
    one) smaller than the number of ranks, and, with ``batch_size=1``, a remainder smaller than the number of ranks:
    there some samples are served twice (:meth:`num_repeated` counts them), unless ``exact`` says to serve the
    remainder with the last full step in batches of two. Samples are counted here by their offset in the epoch; whole
    batches that nobody may cut are counted in the same way, with ``batch_size=1``.

    Every answer depends on ``remaining`` alone and not on how one got there: that is what makes a resume on another
    number of ranks, or with another batch size, arithmetic.

    Attributes:
        batch_size: Samples in a full batch of one rank.
        num_replicas: Data-parallel ranks.
        drop_last: Leave out the last step if it is not full.
        exact: For evaluation: never repeat a sample unless there are fewer samples than ranks.
        pad: Fill the last step up to equal shares with samples of its own, in place of splitting it.
    """

    batch_size: int
    num_replicas: int = 1
    drop_last: bool = False
    exact: bool = False
    pad: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_replicas"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} must be an int of at least 1, got {value!r}.")

    @property
    def full(self) -> int:
        """Samples in a full step, over all ranks."""
        return self.batch_size * self.num_replicas

    def num_steps(self, remaining: int) -> int:
        """Steps that serve ``remaining`` samples."""
        quotient, rest = divmod(remaining, self.full)
        return quotient + (rest > 0 and not self.drop_last and not self._merges(quotient, rest))

    def step_size(self, remaining: int) -> int:
        """Samples of the next step (0 when there is none), not counting repeated ones."""
        quotient, rest = divmod(remaining, self.full)
        if quotient == 0:
            return 0 if self.drop_last else rest
        if quotient == 1:
            return self.full + self._correction(quotient, rest)
        return self.full

    def served(self, remaining: int, steps: int) -> int:
        """Samples that ``steps`` steps serve; all ``remaining`` ones (dropped ones too) once no step is left."""
        if steps >= self.num_steps(remaining):
            return remaining
        quotient, rest = divmod(remaining, self.full)
        return steps * self.full + (self._correction(quotient, rest) if steps >= quotient else 0)

    def share(self, remaining: int, rank: int) -> Indices:
        """What ``rank`` serves in the next step: offsets from the first remaining sample, int64, ``(batch,)``."""
        size = self.step_size(remaining)
        if self.pad and size:
            equal = -(-size // self.num_replicas)
            return (rank * equal + np.arange(equal, dtype=np.int64)) % size
        if 0 < size < self.num_replicas:
            return np.array([rank % size], dtype=np.int64)
        part = split_evenly(size, self.num_replicas, rank)
        return np.arange(part.start, part.stop, dtype=np.int64)

    def num_repeated(self, remaining: int) -> int:
        """Samples that are served a second time in the rest of the epoch: fewer than ``num_replicas``."""
        rest = remaining - self.served(remaining, self.num_steps(remaining) - 1) if remaining else 0
        if self.pad and self.num_steps(remaining):
            return 0 if self.drop_last else -rest % self.num_replicas
        short = 0 < rest < self.num_replicas and self.num_steps(remaining) > 0
        return self.num_replicas - rest if short else 0

    def merges(self, remaining: int) -> bool:
        """Whether the last full step also serves what is left, in batches of two."""
        return self._merges(*divmod(remaining, self.full))

    def num_dropped(self, remaining: int) -> int:
        """Samples that ``drop_last`` leaves out."""
        return remaining % self.full if self.drop_last else 0

    def _short(self, quotient: int, rest: int) -> bool:
        return quotient > 0 and 0 < rest < self.num_replicas and not self.drop_last and not self.pad

    def _merges(self, quotient: int, rest: int) -> bool:
        return self.exact and self.batch_size == 1 and self._short(quotient, rest)

    def _correction(self, quotient: int, rest: int) -> int:
        """What the last full step takes more (or, negative, leaves to the short one)."""
        if not self._short(quotient, rest):
            return 0
        if self.batch_size == 1:
            return rest if self.exact else 0
        return rest - self.num_replicas
