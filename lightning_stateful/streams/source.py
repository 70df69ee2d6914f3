"""Sources of a stream: the settings of each, and the choice of the next among several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from torchdata.nodes import BaseNode, IterableWrapper

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.mixture.draws import Draws
from lightning_stateful.mixture.sources import Stop
from lightning_stateful.mixture.weights import DrawSchedule, WeightSchedule, shares_of, whole_draws
from lightning_stateful.samplers.fingerprint import hex_digest
from lightning_stateful.stream_nodes.document_packer import DocumentPacker
from lightning_stateful.stream_nodes.nodes import Shards, StreamNode
from lightning_stateful.stream_nodes.numbered import Numbering
from lightning_stateful.stream_nodes.read_ahead import BlockShuffle
from lightning_stateful.stream_nodes.shard_reader import OnError, ShardReader, check_on_error
from lightning_stateful.streams.assignment import ShardSlice, SlotSlice

By = Literal["batch", "sample"]

_DRAWS_AT_ONCE = 256


@dataclass(frozen=True)
class Transform:
    """A node to be put over the samples of a source: its class, and its arguments.

    Attributes:
        kind: The class. Its ``context`` names what else it is given: ``seed``, ``on_error``, ``where``.
        options: Its other arguments beside the source.

    Raises:
        ConfigurationError: The class refuses them.
    """

    kind: Any
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.describe()

    def node(self, source: BaseNode[Any], **context: Any) -> StreamNode[Any]:
        """The node over ``source``."""
        wanted = {name: context[name] for name in self.kind.context if name in context}
        node: StreamNode[Any] = self.kind(source, **self.options, **wanted)
        return node

    def describe(self) -> Any:
        """Plain data to be compared."""
        node: Any = self.node(IterableWrapper(()))
        return node.describe()


@dataclass(frozen=True, kw_only=True)
class Source:
    """Settings by which one source is read.

    Attributes:
        shards: The shards.
        shuffle: Whether each pass has an order of shards of its own.
        buffer_size: Samples of a block that is shuffled; 0 or 1 to leave samples in the order of their shards.
        seed: Chooses the orders, and the samples' randomness; None for the seed of Lightning's ``seed_everything``,
            or 0.
        path: The path of the source among several that are read side by side: each draws from (seed, path).
        seed_samples: Whether what user code draws at a sample is a function of (seed, pass, shard, sample).
        on_error: Whether a shard that cannot be read is an error or left out.
        steps: What is done to the samples, one after the other.
        numbering: Gives the samples numbers that go with them; None for none.

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
    steps: Sequence[Transform] = field(default=())
    numbering: Numbering | None = None

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        object.__setattr__(self, "buffer_size", as_int("buffer_size", self.buffer_size))
        if self.seed is not None:
            object.__setattr__(self, "seed", as_int("seed", self.seed, least=0))
        if self.buffer_size < 0:
            raise ConfigurationError(f"buffer_size must not be negative, got {self.buffer_size}.")
        if not self.shards.num_shards:
            raise ConfigurationError("The stream has no shards.")

    def seeded(self, seed: int) -> Source:
        """The same source, with this seed if it has none."""
        if self.seed is not None:
            return self
        return replace(self, seed=seed, shards=self.shards.seeded(seed))

    def at(self, path: str) -> Source:
        """The same source as part of what is read at ``path``."""
        return replace(self, seed=seed_or_default(self.seed), path=".".join(filter(None, (path, self.path))))

    @property
    def seeds_process(self) -> bool:
        """Whether the process's generators are seeded while it is read, for code of the user's."""
        return self.seed_samples and (self.shards.runs_users_code or bool(self.steps))

    @property
    def _own_seed(self) -> int:
        return loader_seed(seed_or_default(self.seed), self.path)

    def order(self, epoch: int) -> list[int]:
        """The order in which the shards of a pass are assigned: a keyed permutation, or 0, 1, 2 and so on."""
        numbers = np.arange(self.shards.num_shards)
        if self.shuffle:
            numbers = KeyedPermutation(len(numbers), derive_seed("shards", self._own_seed, epoch)).take(numbers)
        return numbers.tolist()  # type: ignore[no-any-return]  # a list of int

    def slices_again(self, epoch: int, slot: int, num_slots: int) -> list[SlotSlice]:
        """The slices of another pass when a worker slot begins the source again: its part of all shards."""
        order = self.order(epoch)
        if len(order) < num_slots:
            return [SlotSlice(ShardSlice(epoch, tuple(order)), slot, num_slots)]
        return [SlotSlice(ShardSlice(epoch, tuple(order[slot::num_slots])))] if order[slot::num_slots] else []

    def open(self, piece: ShardSlice) -> tuple[StreamNode[Any], ShardReader]:
        """The node that gives the samples, or batches, of a slice, not reset yet; and the one that reads the shards."""
        seed = derive_seed("stream", self._own_seed, piece.epoch, piece.first)
        is_seeded = self.seed_samples and self.shards.runs_users_code
        sample_seed = derive_seed("stream", self._own_seed, piece.epoch) if is_seeded else None
        reader = ShardReader(
            self.shards,
            piece.shards,
            piece.epoch,
            seed=sample_seed,
            seeds_samples=self.shards.draws,
            on_error=self.on_error,
            numbering=self.numbering,
        )
        node: StreamNode[Any] = reader
        if self.buffer_size > 1:
            node = BlockShuffle(node, self.buffer_size, seed=seed)
        for number, step in enumerate(self.steps):
            # Two functions of a sample do not draw the same.
            own = derive_seed("step", seed, number)
            context = {"seed": own if self.seed_samples else None, "order_seed": own, "on_error": self.on_error}
            node = step.node(node, **context, where=reader.where)
        return node, reader

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
            # They decide which slot a shard goes to.
            described["sizes"] = hex_digest(repr(sizes).encode())
        steps = [step.describe() for step in self.steps]
        if self.steps and self.steps[-1].kind is DocumentPacker:
            described["packing"] = steps.pop()[1]
        if steps:
            described["steps"] = steps
        return described


@dataclass(frozen=True)
class Mixing:
    """In what proportion, and in what order, sources are drawn from.

    Attributes:
        names: The sources.
        draws: Draws of each source in a period.
        by: Whether a draw is a batch or a sample.
        stop: When a worker slot ends: when all sources are exhausted, when the first is, or when all have been and
            those that were earlier have begun again (``"cycle"``).
        in_turn: Whether sources come in turn, evenly spread: round robin.
        seed: Chooses the order of draws within a period; None for the seed of Lightning's
            ``seed_everything``, or 0.
        path: The place of the mixture among several that are read side by side.
        schedule: Draws that change by step of training, in place of ``draws``.
    """

    names: tuple[str, ...]
    draws: tuple[int, ...]
    by: By = "batch"
    stop: Stop = "all_exhausted"
    in_turn: bool = True
    seed: int | None = None
    path: str = ""
    schedule: DrawSchedule | None = None

    def __hash__(self) -> int:
        # Asked for at every draw.
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
        schedule: WeightSchedule | Mapping[int, Any] | None = None,
    ) -> Mixing:
        """Round robin without weights, a mixture with them.

        Raises:
            ConfigurationError: A weight is missing, or an argument out of range.
        """
        if by == "document":
            raise ConfigurationError(
                'by="document" would put documents of several sources into one sequence. What is left of such '
                "sequences belongs to no source, and cannot be shared among other ranks or workers. Mix sequences, "
                'each of one source, with by="sample", or batches of them with by="batch": their shares are shares by '
                "token."
            )
        if by not in get_args(By):
            hint = " With packing, sequences have the same length: their shares are shares by token."
            raise ConfigurationError(
                f"Streams are mixed by one of {get_args(By)}, got by={by!r}.{hint if by == 'token' else ''}"
            )
        if stop not in get_args(Stop):
            raise ConfigurationError(f"stop must be one of {get_args(Stop)}, got {stop!r}.")
        if schedule is not None:
            if weights is not None or temperature != 1:
                raise ConfigurationError("schedule takes the place of weights and temperature; pass one or the other.")
            if stop != "cycle":
                raise ConfigurationError(
                    f"With stop={stop!r} a stream that is over leaves its share to the others, and a schedule would "
                    'not be kept. Pass stop="cycle", and StreamDataModule(..., steps_per_epoch=...) for shorter epochs.'
                )
            points = schedule if isinstance(schedule, WeightSchedule) else WeightSchedule(schedule)
            at = tuple(whole_draws(point) for point in points.shares(names))
            most = tuple(map(max, zip(*at, strict=True)))
            scheduled = DrawSchedule(tuple(map(int, points.points)), at, points.between)
            return cls(tuple(names), most, by, stop, False, seed, schedule=scheduled)  # type: ignore[arg-type]  # looked at
        if weights is None:
            if temperature != 1:
                raise ConfigurationError(f"temperature={temperature!r} makes weights more alike; pass weights.")
            draws: tuple[int, ...] = (1,) * len(names)
        else:
            draws = whole_draws(shares_of(names, weights, temperature=temperature))
        return cls(tuple(names), draws, by, stop, weights is None, seed)  # type: ignore[arg-type]  # looked at

    def seeded(self, seed: int) -> Mixing:
        """The same mixture, with this seed if it has none."""
        return replace(self, seed=seed) if self.seed is None else self

    def at(self, path: str) -> Mixing:
        """The same mixture as part of what stands at ``path``."""
        return replace(self, seed=seed_or_default(self.seed), path=path)

    def source_at(self, draw: int, active: tuple[str, ...], epoch: int, *, per_step: int = 1) -> str:
        """The source of a draw, of those that are not exhausted; the same on all ranks.

        Args:
            draw: The number of the draw in the pass or, with a schedule, in training.
            active: The sources that may be drawn.
            epoch: The pass.
            per_step: Draws in a step, for a schedule.
        """
        first, number = divmod(draw, _DRAWS_AT_ONCE)
        return _sources(self, active, 0 if self.schedule else epoch, first, per_step)[number]

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared."""
        weights = dict(zip(self.names, self.draws, strict=True))
        return {
            "mixing_seed": seed_or_default(self.seed),
            "weights": weights if self.schedule is None else self.schedule.describe(),
            "by": self.by,
            "stop": self.stop,
            "in_turn": self.in_turn,
        }


@lru_cache(maxsize=64)
def _sources(mixing: Mixing, active: tuple[str, ...], epoch: int, first: int, per_step: int) -> list[str]:
    """So many draws from a multiple of their number on."""
    begin = first * _DRAWS_AT_ONCE
    found = _draws(mixing, active, epoch, per_step).sources(begin, begin + _DRAWS_AT_ONCE)
    return [mixing.names[source] for source in found.tolist()]


@lru_cache(maxsize=8)
def _draws(mixing: Mixing, active: tuple[str, ...], epoch: int, per_step: int) -> Draws:
    is_active = [name in active for name in mixing.names]
    seed = loader_seed(seed_or_default(mixing.seed), mixing.path)
    key = None if mixing.in_turn else derive_seed("turns of streams", seed, epoch, *active)

    def left(draws: Sequence[int]) -> tuple[int, ...]:
        counts = tuple(count * kept for count, kept in zip(draws, is_active, strict=True))
        # Where none of those that are left has a weight, they come in turn.
        return counts if any(counts) else tuple(map(int, is_active))

    if mixing.schedule is None:
        return Draws.repeated(left(mixing.draws), key=key)
    points = tuple(map(left, mixing.schedule.draws))
    return Draws.scheduled(replace(mixing.schedule, draws=points), per_step, key=key)
