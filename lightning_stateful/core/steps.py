"""The ranks of a run, and the rule by which the rest of an epoch is cut into steps and dealt out to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import Indices
from lightning_stateful.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One data-parallel rank among its replicas.

    Attributes:
        num_replicas: Data-parallel replicas of the run, at least 1.
        rank: This replica, in ``range(num_replicas)``.

    Raises:
        ConfigurationError: A value is out of range.
    """

    num_replicas: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_replicas", as_int("num_replicas", self.num_replicas, least=1))
        if isinstance(self.rank, bool):
            raise ConfigurationError(f"rank must be an integer, got {self.rank}.")
        object.__setattr__(self, "rank", as_int("rank", self.rank))
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigurationError(f"rank must be in range({self.num_replicas}), got {self.rank}.")


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

    On 4 ranks::

        batch_size  remaining  samples of each rank, step by step
        4           26         4 4 4 4 | 3 3 2 2
        4           17         4 3 3 3 | 1 1 1 1     16 and 1 would leave three ranks without a sample
        4           3          1 1 1 1               fewer samples than ranks: the first is served twice
        1           6          1 1 1 1 | 1 1 1 1     the fifth and the sixth are served twice
        1           6          2 2 1 1               the same with exact=True

    Every answer depends on ``remaining`` alone and not on how one got there: that is what makes a resume on another
    number of ranks, or with another batch size, arithmetic.

    Attributes:
        batch_size: Samples in a full batch of one rank.
        num_replicas: Data-parallel ranks.
        drop_last: Leave out the last step if it is not full.
        exact: For evaluation: never repeat a sample unless there are fewer samples than ranks.
        pad: Fill the last step up to equal shares by repeating samples of its own, instead of splitting it.
    """

    batch_size: int
    num_replicas: int = 1
    drop_last: bool = False
    exact: bool = False
    pad: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_replicas"):
            object.__setattr__(self, name, as_int(name, getattr(self, name), least=1))

    @property
    def full(self) -> int:
        """Samples in a full step, over all ranks."""
        return self.batch_size * self.num_replicas

    def num_alike(self, remaining: int) -> int:
        """Full steps at the beginning that are all alike: all steps but the last one or two."""
        return self._cut(remaining)[0]

    def num_steps(self, remaining: int) -> int:
        """Steps that serve ``remaining`` samples."""
        num_alike, last_sizes = self._cut(remaining)
        return num_alike + len(last_sizes)

    def step_size(self, remaining: int) -> int:
        """Samples of the next step (0 when there is none), not counting repeated ones."""
        num_alike, last_sizes = self._cut(remaining)
        return self.full if num_alike else sum(last_sizes[:1])

    def served(self, remaining: int, steps: int) -> int:
        """Samples that ``steps`` steps serve; all ``remaining`` ones (dropped ones too) once no step is left."""
        num_alike, last_sizes = self._cut(remaining)
        if steps >= num_alike + len(last_sizes):
            return remaining
        return steps * self.full if steps <= num_alike else num_alike * self.full + last_sizes[0]

    def share(self, remaining: int, rank: int) -> Indices:
        """The samples of ``rank`` in the next step: offsets from the first remaining one, int64, ``(batch,)``."""
        return self._share(self.step_size(remaining), rank)

    def last_shares(self, remaining: int, rank: int) -> Iterator[Indices]:
        """The samples of ``rank`` in each step after the :meth:`num_alike` first: offsets as in :meth:`share`."""
        num_alike, last_sizes = self._cut(remaining)
        served = num_alike * self.full
        for size in last_sizes:
            yield served + self._share(size, rank)
            served += size

    def num_samples(self, remaining: int, rank: int) -> int:
        """Samples of ``rank`` in all steps, repeated ones included."""
        in_last = sum(share.size for share in self.last_shares(remaining, rank))
        return self.num_alike(remaining) * self.batch_size + in_last

    def num_repeated(self, remaining: int) -> int:
        """Samples that are served a second time in the rest of the epoch: fewer than ``num_replicas``."""
        last_sizes = self._cut(remaining)[1]
        if not last_sizes:
            return 0
        return -last_sizes[-1] % self.num_replicas if self.pad else max(self.num_replicas - last_sizes[-1], 0)

    def ends_in_pairs(self, remaining: int) -> bool:
        """Whether the last full step also serves what is left, in batches of two."""
        return sum(self._cut(remaining)[1][:1]) > self.full

    def num_dropped(self, remaining: int) -> int:
        """Samples that ``drop_last`` leaves out."""
        return remaining % self.full if self.drop_last else 0

    def _cut(self, remaining: int) -> tuple[int, tuple[int, ...]]:
        """The number of full steps that are all alike, and the sizes of the last one or two steps."""
        quotient, rest = divmod(remaining, self.full)
        num_alike, last_full = max(quotient - 1, 0), (self.full,) * (quotient > 0)
        if not rest or self.drop_last:
            return num_alike, last_full
        if rest >= self.num_replicas or not quotient or self.pad:
            return num_alike, (*last_full, rest)
        if self.batch_size > 1:
            return num_alike, (self.full + rest - self.num_replicas, self.num_replicas)
        return num_alike, (self.full + rest,) if self.exact else (*last_full, rest)

    def _share(self, size: int, rank: int) -> Indices:
        """The samples of ``rank`` in a step of ``size`` samples."""
        if self.pad and size:
            equal = -(-size // self.num_replicas)
            return (rank * equal + np.arange(equal, dtype=np.int64)) % size
        if 0 < size < self.num_replicas:
            return np.array([rank % size], dtype=np.int64)
        part = split_evenly(size, self.num_replicas, rank)
        return np.arange(part.start, part.stop, dtype=np.int64)


def split_evenly(count: int, num_parts: int, part: int) -> range:
    """Split ``range(count)`` into ``num_parts`` consecutive shares, and return share number ``part``.

    Shares differ by at most one, the longer ones come first, and together they are ``range(count)`` in order.
    """
    quotient, remainder = divmod(count, num_parts)
    start = part * quotient + min(part, remainder)
    return range(start, start + quotient + (part < remainder))
