"""How a loader's stream is served, and how it is read on the present ranks and workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch.utils.data import DataLoader

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.core.topology import Topology
from lightning_stateful.errors import ConfigurationError, Difference, StateMismatchError
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.streams.iterables import IterableBatches, IterableShards, LoaderShards, beginning_of
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stream import as_stream
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig

Replay = Literal["warn", "refuse"]


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How a stream is served.

    Attributes:
        steps_per_epoch: Steps of an epoch; the next goes on where it ends, and the stream begins again where it ends.
        replay: Whether a stream that has to be read again up to where it stood is read, with a warning, or refused.
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


@dataclass(frozen=True, kw_only=True)
class StreamSetup:
    """All that says how a loader's stream is read and served; from it, the same loader is built for others.

    Attributes:
        loader: The user's loader.
        config: How the stream is read; None to read it as the loader says.
        options: How it is served.
        seed: Chooses the randomness of what has none of its own.
        path: The loader's path among several that are served side by side, which draw apart.
        seed_samples: Whether what is drawn at samples is seeded.
        num_replicas: Data-parallel ranks; None for those of the process group.
        rank: This rank.
        accept: Names of differences between a state and what is read now to let pass.
    """

    loader: DataLoader[Any]
    config: StreamConfig | None = None
    options: StreamOptions = StreamOptions()
    seed: int = 0
    path: str = ""
    seed_samples: bool = True
    num_replicas: int | None = None
    rank: int | None = None
    accept: Collection[str] = ()
    _beginning: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Before anybody has read it.
        object.__setattr__(self, "_beginning", beginning_of(self.loader.dataset))

    @property
    def topology(self) -> Topology:
        """The present ranks."""
        return detect_topology(self.num_replicas, self.rank)

    @property
    def num_workers(self) -> int:
        """Worker slots of a rank: its workers, or itself."""
        return max(self.loader.num_workers, 1)

    @property
    def own_seed(self) -> int:
        """The seed of this loader among several."""
        return loader_seed(self.seed, self.path)

    @property
    def dataset(self) -> Any:
        """What is read: the dataset, or the iterable of batches."""
        dataset = self.loader.dataset
        return dataset.iterable if isinstance(dataset, IterableBatches) else dataset

    @property
    def is_loader(self) -> bool:
        """Whether it is an iterable of batches that every epoch begins anew."""
        return isinstance(self.loader.dataset, IterableBatches)

    @property
    def name(self) -> str:
        """What people know the stream by."""
        return type(self.dataset).__qualname__

    def config_on(self, num_replicas: int, num_workers: int) -> StreamConfig:
        """How the stream is read on some ranks and workers: what divides itself has a shard for each of their slots."""
        if self._shared_config is not None:
            return self._shared_config
        is_checked = "nondeterministic" not in self.accept
        if self.is_loader:
            shards: IterableShards = LoaderShards(self.dataset, num_replicas, is_checked=is_checked)
        else:
            stays = not self.loader.num_workers or self.loader.persistent_workers
            shards = IterableShards(
                self.dataset, num_replicas, num_workers, self._beginning, stays=stays, is_checked=is_checked
            )
        source = Source(shards=shards, seed=self.seed, path=self.path, seed_samples=self.seed_samples)
        return StreamConfig(sources={ALONE: source}, **self._batching)

    @property
    def present_config(self) -> StreamConfig:
        """How the stream is read on the present ranks and workers."""
        return self.config_on(self.topology.num_replicas, self.num_workers)

    def beginning(self, epoch: int) -> StreamState:
        """The beginning of a pass before which nothing was left, on the present ranks and workers."""
        return StreamState.beginning(self.present_config, epoch, self.topology.num_replicas, self.num_workers)

    def here(self, state: StreamState, where: str) -> StreamState:
        """A state on the present ranks and workers.

        Args:
            state: Where worker slots stand, perhaps those of others.
            where: How an error calls that.

        Raises:
            StateMismatchError: What is left cannot be assigned to others.
        """
        present = self.topology.num_replicas, self.num_workers
        saved = state.num_replicas, state.num_workers
        if present == saved:
            return state
        pinned = any(source.shards.pinned for source in state.config.sources.values())
        if not pinned and (state.is_known or not state.steps):
            return state.on(*present)
        if pinned and not state.has_begun:
            return self.beginning(state.epoch)
        remedy = (
            f"What {self.name} gives to one rank and worker cannot be given to others: resume on {saved[0]} ranks "
            f"with num_workers={self.loader.num_workers and saved[1]}, or from a checkpoint at the end of an epoch."
        )
        changed = [
            Difference(path=name, saved=before, present=now, remedy=remedy)
            for name, before, now in zip(("ranks", "workers"), saved, present, strict=True)
            if before != now
        ]
        raise StateMismatchError(changed, where=where)

    @property
    def _batching(self) -> dict[str, Any]:
        size = self.loader.batch_size
        return {"batch_size": size, "is_batched": size is not None, "drop_last": self.loader.drop_last}

    @cached_property
    def _shared_config(self) -> StreamConfig | None:
        """The configuration of a stream whose shards any slot can read; None for what divides itself."""
        config = self.config
        if config is None:
            stream = as_stream(self.loader.dataset, self.seed, seed_samples=self.seed_samples)
            if stream is None:
                return None
            config = stream.config(**self._batching)
        if not self.seed_samples:
            sources = {name: replace(source, seed_samples=False) for name, source in config.sources.items()}
            config = replace(config, sources=sources)
        if config.mixing is not None and self.options.exact:
            # Each sample once.
            config = replace(config, mixing=replace(config.mixing, stop="all_exhausted"))
        return config.at(self.path)
