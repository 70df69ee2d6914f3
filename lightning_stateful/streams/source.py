"""One source of a stream: its shards, and what is done to their samples on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.samplers.rng import seed_or_default
from lightning_stateful.streams.block_shuffle import BlockShuffle
from lightning_stateful.streams.naming import NameShard, by_number
from lightning_stateful.streams.portion import Portion, order_of_shards
from lightning_stateful.streams.reading import OnError, Reading, check_on_error
from lightning_stateful.streams.shards import Part, Parts, Shards, num_parts_for, parts_of
from lightning_stateful.streams.stage import Open, Place, Stage


class Way(NamedTuple):
    """What a stage has to know of the stream that it is part of.

    Attributes:
        seed: Chooses orders within the epoch.
        sample_seed: Seeds what is drawn at the epoch's samples; None if nothing is seeded.
        on_error: What to do where a function fails.
        name_shard: What errors call a shard.
    """

    seed: int
    sample_seed: int | None
    on_error: OnError
    name_shard: NameShard = by_number


class Step(Protocol):
    """What is done to samples on their way: the configuration of a stage."""

    def open(self, open_inner: Open, place: Place | None, way: Way) -> Stage:
        """The stage at a place."""

    def describe(self) -> Any:
        """Plain data to be compared."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """How one source is read.

    Attributes:
        shards: The shards.
        shuffle: Whether each epoch has an order of shards of its own.
        buffer_size: Items of a block that is shuffled; 0 or 1 to leave items in the order of their shards.
        seed: Chooses the orders, and the samples' randomness; None for the seed of Lightning's ``seed_everything``,
            or 0.
        path: The place of the source among several that are read side by side: each draws from (seed, path).
        seed_samples: Whether what user code draws at a sample is a function of (seed, epoch, shard, sample).
        on_error: Whether a shard that cannot be read is an error or left out.
        steps: What is done to the samples, one after the other.
        splits: Whether lanes that are more than the shards read each shard together, every lane its own samples.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    shards: Shards
    shuffle: bool = False
    buffer_size: int = 0
    seed: int | None = None
    path: str = ""
    seed_samples: bool = True
    on_error: OnError = "raise"
    steps: Sequence[Step] = field(default=())
    splits: bool = False

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        object.__setattr__(self, "buffer_size", as_int("buffer_size", self.buffer_size))
        if self.seed is not None:
            object.__setattr__(self, "seed", as_int("seed", self.seed))
        if self.buffer_size < 0:
            raise ConfigurationError(f"buffer_size must not be negative, got {self.buffer_size}.")
        if not self.shards.num_shards:
            raise ConfigurationError("The stream has no shards.")

    def at(self, path: str) -> Source:
        """The same source as part of what stands at ``path``."""
        return replace(self, seed=seed_or_default(self.seed), path=".".join(filter(None, (path, self.path))))

    @property
    def _own_seed(self) -> int:
        return loader_seed(seed_or_default(self.seed), self.path)

    def order(self, epoch: int, num_lanes: int = 1) -> list[int]:
        """The order in which the shards of an epoch, or their parts, are dealt out to so many lanes."""
        number = self.shards.num_shards
        order = order_of_shards(number, self._own_seed, epoch, shuffle=self.shuffle)
        parts = num_parts_for(number, num_lanes) if self.splits else 1
        return order if parts == 1 else [part for shard in order for part in parts_of(shard, parts, number)]

    def name(self, shard: int) -> str:
        """What people know a shard by, or a part of one."""
        return Parts(self.shards).name(shard)

    def sizes(self, numbers: Collection[int]) -> Sequence[int] | Mapping[int, int] | None:
        """Samples of each of some shards and parts, where that is known without reading."""
        sizes = self.shards.sizes()
        if sizes is None or all(number < len(sizes) for number in numbers):
            return sizes
        parts = {number: Part.of(number, len(sizes)) for number in numbers}
        return {number: part.size_in(sizes[part.shard]) for number, part in parts.items() if part is not None}

    def regrouped(self, numbers: Collection[int], num_lanes: int) -> set[int]:
        """Shards all of whose parts are there, divided as so many lanes have it; other parts as they are."""
        number, held = self.shards.num_shards, set(numbers)
        wanted = num_parts_for(number, num_lanes) if self.splits else 1
        for one in numbers:
            part = Part.of(one, number)
            if part is None or part.which or part.num_parts == wanted:
                continue
            parts = parts_of(part.shard, part.num_parts, number)
            if held.issuperset(parts):
                held = held.difference(parts).union(parts_of(part.shard, wanted, number))
        return held

    def open(self, portion: Portion, place: Place | None) -> tuple[Stage, Reading]:
        """The items of a portion from a place on, and the stage in which its shards are read."""
        readings: list[Reading] = []
        seed = derive_seed("stream", self._own_seed, portion.epoch)
        way = Way(seed, seed if self.seed_samples else None, self.on_error, self.name)
        is_whole = all(shard < self.shards.num_shards for shard in portion.shards)
        shards = self.shards if is_whole else Parts(self.shards)

        def read(at: Place | None) -> Stage:
            how: dict[str, Any] = {"seeds_samples": self.shards.draws, "on_error": self.on_error}
            readings.append(Reading(shards, portion.shards, portion.epoch, at, seed=way.sample_seed, **how))
            return readings[-1]

        opening: Open = read
        if self.buffer_size > 1:
            opening = partial(BlockShuffle, opening, size=self.buffer_size, seed=way.seed)
        for number, step in enumerate(self.steps):
            # Two functions of a sample do not draw the same.
            own = None if way.sample_seed is None else derive_seed("step", way.sample_seed, number)
            opening = partial(_opened, step, opening, way._replace(sample_seed=own))
        return opening(place), readings[0]

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared."""
        described = {
            "dataset": self.shards.describe(),
            "seed": seed_or_default(self.seed),
            "shuffle": self.shuffle,
            "buffer_size": self.buffer_size,
        }
        sizes = self.shards.sizes()
        if sizes is not None:
            # They decide which lane a shard goes to.
            described["sizes"] = hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()
        if self.steps:
            described["steps"] = [step.describe() for step in self.steps]
        return described


def _opened(step: Step, opening: Open, way: Way, place: Place | None) -> Stage:
    return step.open(opening, place, way)
