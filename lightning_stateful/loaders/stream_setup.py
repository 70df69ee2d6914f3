"""How a loader's stream is read on the present ranks and workers, and how one of others goes on there."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.errors import Difference, StatefulWarning, StateMismatchError
from lightning_stateful.loaders.stream_options import StreamOptions
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.streams.lane import ALONE, StreamConfig
from lightning_stateful.streams.own_loader import IterableBatches, OwnLoader
from lightning_stateful.streams.own_stream import OwnStream, beginning_of
from lightning_stateful.streams.shards import num_parts_for
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.standing import Standing
from lightning_stateful.streams.stream import as_stream


class StreamSetup:
    """The configuration of a stream, and its lanes.

    Args:
        loader: The user's loader.
        config: How the stream is read; None to read it as the loader says.
        options: How it is served.
        seed: Chooses the randomness of what has none of its own.
        path: The place of the loader among several, which draw apart.
        seed_samples: Seed what is drawn at samples.
        num_replicas: Data-parallel ranks; None for those of the process group.
        rank: This rank.
        accept: Names of differences between a state and what is read now to let pass.

    Attributes:
        loader, options, seed_samples, accept: As they were given.
        seed: The seed of this loader among several.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        config: StreamConfig | None,
        options: StreamOptions,
        seed: int,
        *,
        path: str,
        seed_samples: bool,
        num_replicas: int | None,
        rank: int | None,
        accept: Collection[str] = (),
    ) -> None:
        self.accept = accept
        self.loader, self.options, self.seed_samples = loader, options, seed_samples
        self.seed, self._seed_given, self._path = loader_seed(seed, path), seed, path
        self.topology = partial(detect_topology, num_replicas, rank)
        self._batching: dict[str, Any] = {
            "batch_size": loader.batch_size,
            "is_batched": loader.batch_size is not None,
            "drop_last": loader.drop_last,
        }
        stream = as_stream(loader.dataset, seed, seed_samples=seed_samples)
        if config is None and stream is not None:
            config = stream.config(**self._batching)
        if config is not None and not seed_samples:
            sources = {name: replace(source, seed_samples=False) for name, source in config.sources.items()}
            config = replace(config, sources=sources)
        if config is not None and config.mixing is not None and options.exact:
            # Each sample once.
            config = replace(config, mixing=replace(config.mixing, stop="all_exhausted"))
        self._given = None if config is None else config.at(path)
        self._beginning_of_own = beginning_of(loader.dataset)
        self._has_warned = False
        own = loader.dataset
        self._own: Any = own.iterable if isinstance(own, IterableBatches) else own

    @property
    def name(self) -> str:
        """What people know the stream by."""
        return type(self._own).__qualname__

    @property
    def is_loader(self) -> bool:
        """Whether it is an iterable of batches that every epoch begins anew."""
        return self._own is not self.loader.dataset

    @property
    def num_workers(self) -> int:
        """Lanes of a rank: its workers, or itself."""
        return max(self.loader.num_workers, 1)

    @property
    def config(self) -> StreamConfig:
        """How the stream is read on the present ranks and workers."""
        return self.config_on(self.topology().num_replicas, self.num_workers)

    def config_on(self, num_replicas: int, num_workers: int) -> StreamConfig:
        """How it is read on others: an iterable dataset without shards has one for each of its lanes."""
        if self._given is not None:
            # In evaluation workers without a shard cost nothing, and ranks without one would be waited for.
            sources = {
                name: replace(source, splits=not self.options.exact or source.shards.num_shards < num_replicas)
                for name, source in self._given.sources.items()
            }
            return replace(self._given, sources=sources)
        is_checked = "nondeterministic" not in self.accept
        if self.is_loader:
            shards: OwnStream = OwnLoader(self._own, num_replicas, is_checked=is_checked)
        else:
            stays = not self.loader.num_workers or self.loader.persistent_workers
            beginning = self._beginning_of_own
            shards = OwnStream(self._own, num_replicas, num_workers, beginning, stays=stays, is_checked=is_checked)
        source = Source(shards=shards, seed=self._seed_given, path=self._path, seed_samples=self.seed_samples)
        return StreamConfig(sources={ALONE: source}, **self._batching)

    def beginning(self, epoch: int) -> Standing:
        """The beginning of a pass before which nothing was left."""
        self._warn_of_few_shards()
        return Standing.beginning(self.config, epoch, self.topology().num_replicas, self.num_workers)

    def here(self, standing: Standing, where: str) -> Standing:
        """A standing on the present ranks and workers.

        Args:
            standing: Where lanes stand, perhaps others.
            where: How an error calls that.

        Raises:
            StateMismatchError: What is left cannot be dealt out to others.
        """
        present = self.topology().num_replicas, self.num_workers
        saved = standing.num_replicas, standing.num_workers
        if present == saved:
            return standing
        pinned = any(source.shards.pinned for source in standing.config.sources.values())
        if not pinned and (standing.is_known or not standing.steps):
            self._warn_of_few_shards()
            return standing.on(*present)
        if pinned and not standing.has_begun:
            return self.beginning(standing.epoch)
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

    def _warn_of_few_shards(self) -> None:
        """Say once what it costs where lanes have to read shards together."""
        ranks = self.topology().num_replicas
        lanes = ranks * self.num_workers
        few = {
            num_parts_for(source.shards.num_shards, lanes): (name, source.shards.num_shards)
            for name, source in self.config.sources.items()
            if source.splits and not source.shards.pinned and source.shards.num_shards < lanes
        }
        if not few or self._has_warned:
            return
        self._has_warned = True
        parts = max(few)
        name, number = few[parts]
        of, fewer = f" of source {name!r}" if name else "", f"num_workers={number // ranks}, or " * (ranks <= number)
        warnings.warn(
            f"{ranks} ranks with {self.num_workers} workers each are {lanes} lanes, more than the {number} shards{of} "
            f"that {self.name} has. So each shard is read {parts} times, and one sample in {parts} is kept each time: "
            f"that much more work for reading and decoding. Use {fewer}more and smaller shards (Hugging Face: "
            "dataset.reshard() for parquet files).",
            StatefulWarning,
            stacklevel=2,
        )
