"""A shuffle for datasets on disks that dislike random reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lightning_stateful.core.checks import check_length
from lightning_stateful.core.permutation import keyed_permutation
from lightning_stateful.core.ranges import Indices
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class BlockShuffledOrder:
    """Blocks of neighbours in a shuffled order, and samples shuffled within a window of blocks.

    While a window is served, only ``window`` blocks of the dataset are read. A sample can meet any sample of its own
    block and of the ``window - 1`` blocks that the epoch puts beside it; another epoch puts others there.

    Attributes:
        length: Number of samples.
        seed: Chooses the orders.
        block_size: Consecutive samples in a block, at least 1; the dataset's last block may be shorter.
        window: Blocks that are shuffled together, at least 1.

    Raises:
        ConfigurationError: A value is out of range.
    """

    length: int
    seed: int = 0
    block_size: int = 1024
    window: int = 16
    kind: ClassVar[str] = "block_shuffled"
    order_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_length(self.length)
        if self.block_size < 1 or self.window < 1:
            raise ConfigurationError(
                f"block_size and window must be at least 1, got block_size={self.block_size}, window={self.window}."
            )

    def __len__(self) -> int:
        return self.length

    def take(self, slots: Indices, epoch: int) -> Indices:
        """Sample indices at ``slots``."""
        if not slots.size:
            return slots
        passes, places = np.divmod(slots, self.length)
        result = np.empty_like(slots)
        for number in np.unique(passes):
            chosen = passes == number
            result[chosen] = self._pass(derive_seed("block_shuffled", self.seed, epoch, int(number)), places[chosen])
        return result

    def _pass(self, key: int, places: Indices) -> Indices:
        num_blocks = -(-self.length // self.block_size)
        window = min(self.window, num_blocks)
        blocks = keyed_permutation(num_blocks, derive_seed("blocks", key))
        # The one short block stands somewhere among the permuted blocks; everything after it comes `missing` earlier.
        missing = num_blocks * self.block_size - self.length
        short_place = int(blocks.positions_of(np.array([num_blocks - 1]))[0])
        short_window = short_place // window
        span = window * self.block_size

        windows = np.where(places < (short_window + 1) * span - missing, places, places + missing) // span
        starts = windows * span - missing * (windows > short_window)
        result = np.empty_like(places)
        for number in np.unique(windows):
            chosen = windows == number
            end = min((int(number) + 1) * span - missing * (number >= short_window), self.length)
            start = int(starts[chosen][0])
            within = keyed_permutation(end - start, derive_seed("window", key, int(number)))
            offsets = start + within.take(places[chosen] - start)
            # Now an unshuffled place among the permuted blocks: skip the hole behind the short block.
            offsets += missing * (offsets >= (short_place + 1) * self.block_size - missing)
            result[chosen] = blocks.take(offsets // self.block_size) * self.block_size + offsets % self.block_size
        return result

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        return {"shuffle": "blocks", "seed": self.seed, "block_size": self.block_size, "window": self.window}
