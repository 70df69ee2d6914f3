"""Datasets with an index as streams, to stand beside streams in a mixture."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.stream_nodes.nodes import NodeState, Shards, StreamNode
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stream import Stream
from lightning_stateful.streams.worker_slot import ALONE

# Shards of a dataset, unless these would have more samples than the largest; then as many as that takes, up to most.
_SHARDS, _LARGEST, _MOST_SHARDS = 256, 1024, 2**16


class IndexedShards(Shards):
    """Runs of samples of a map-style dataset, which is shuffled as a whole in each epoch.

    Args:
        dataset: The dataset.
        shard_size: Samples of a shard; the last may have fewer.
        shuffle: Whether each epoch has an order of its own.
        seed: Chooses the orders; None for the seed of Lightning's ``seed_everything``, or 0.
    """

    draws = has_index = True

    def __init__(self, dataset: Any, shard_size: int, *, shuffle: bool, seed: int | None) -> None:
        self._dataset, self._size = dataset, shard_size
        self._shuffle, self._seed = shuffle, seed
        self._length = len(dataset)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self._length // self._size)

    def node(self, shard: int, epoch: int) -> BaseNode[Any]:
        """The samples of a shard in an epoch."""
        indices = np.arange(shard * self._size, min((shard + 1) * self._size, self._length))
        if self._shuffle:
            key = derive_seed("indexed", seed_or_default(self._seed), epoch)
            indices = KeyedPermutation(self._length, key).take(indices)
        return IndexedNode(self._dataset, indices.tolist())

    def name(self, shard: int) -> str:
        """The number of a shard."""
        return f"shard {shard} of {self.num_shards} of a {type(self._dataset).__qualname__}"

    def seeded(self, seed: int) -> Shards:
        """The same shards, with this seed if they have none."""
        if self._seed is not None:
            return self
        return IndexedShards(self._dataset, self._size, shuffle=self._shuffle, seed=seed)

    def describe(self) -> dict[str, Any]:
        """The dataset, and how it is cut."""
        return {"indexed": describe_dataset(self._dataset), "shard_size": self._size, "shuffled": self._shuffle}

    def sizes(self) -> list[int]:
        """Samples of each shard."""
        return np.diff([*range(0, self._length, self._size), self._length]).tolist()  # type: ignore[no-any-return]


class IndexedNode(StreamNode[Any]):
    """Samples of a map-style dataset, one by one.

    Args:
        dataset: The dataset.
        indices: Which samples, in their order.

    State:
        ``at``: how many were given.
    """

    def __init__(self, dataset: Any, indices: list[int]) -> None:
        super().__init__()
        self._dataset = dataset
        self.indices: list[int] = indices

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or go to where a state was taken."""
        super().reset(initial_state)
        self._at: int = 0 if initial_state is None else initial_state["at"]

    def next(self) -> Any:
        """The next sample."""
        if self._at >= len(self.indices):
            raise StopIteration
        sample = self._dataset[self.indices[self._at]]
        self._at += 1
        return sample

    def skip(self, number: int) -> int:
        """Leave out samples, which are not read."""
        skipped = min(number, len(self.indices) - self._at)
        self._at += skipped
        return skipped

    def get_state(self) -> NodeState:
        """The number of samples that were given."""
        return {"at": self._at}


class IndexedStream(Stream):
    """A map-style dataset as a stream, to be mixed with streams.

    Each epoch has every sample once, in an order of its own of the whole dataset, in shards that are assigned to ranks
    and workers. A resume goes on at the next index, and reads nothing again but the samples
    of a window, block or sequence that is being filled.

    Args:
        dataset: Its samples, by index.
        shard_size: Samples of a shard; by default a 256th of the dataset, from 1 to 1,024 (more of over 67 million).
        shuffle: False for the dataset's order.
        seed: Chooses the orders and the randomness; by default the seed of the data module or loader that serves it, as
            ``StreamDataModule(seed=...)``, or that of Lightning's ``seed_everything``, or 0.

    State:
        See :class:`Stream`.

    Raises:
        ConfigurationError: The dataset has no index or no samples, or an argument is out of range.
    """

    def __init__(
        self, dataset: Any, *, shard_size: int | None = None, shuffle: bool = True, seed: int | None = None
    ) -> None:
        if not has_index(dataset):
            raise ConfigurationError(
                f"IndexedStream takes a dataset with __getitem__ and __len__, which a {type(dataset).__qualname__} has "
                "not."
            )
        if shard_size is None:
            shard_size = max(min(-(-len(dataset) // _SHARDS), _LARGEST), -(-len(dataset) // _MOST_SHARDS), 1)
        size = as_int("shard_size", shard_size, least=1)
        shards = IndexedShards(dataset, size, shuffle=shuffle, seed=seed)
        super().__init__({ALONE: Source(shards=shards, seed=seed)})


def has_index(dataset: Any) -> bool:
    """Whether samples can be read by their index."""
    is_other = isinstance(dataset, (IterableDataset, dict, str, bytes))
    return not is_other and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
