"""Options of a loader over an iterable dataset: those of a user's loader, and what a stream of shards makes of them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import loader_seed
from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import ConfigurationError, Difference, ShardError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers.rng import keep_randomness, seed_or_default
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.state import accepted_names
from lightning_stateful.stream_loader.worker_slots import draws_in_collation
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.streams.iterable_state import IterableState
from lightning_stateful.streams.pass_history import digest_of_sample
from lightning_stateful.streams.stream import Stream
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import StreamConfig

Replay = Literal["warn", "refuse"]

# Readings of each shard, on average, from which on a user is told.
_MANY_READS = 1.5


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options by which a stream is read and served.

    Attributes:
        config: How the stream is read; None to read it as the loader says.
        steps_per_epoch: Steps of an epoch; the next goes on where it ends, and the stream begins again where it ends.
        replay: Whether a stream that has to be read again up to where it stood is read, with a warning, or refused.
        exact: Whether each rank serves what it has, however many steps it takes, of every source: for evaluation.
        timeout: Seconds to wait for the other ranks' batches.
        seed: Chooses the randomness of what has none of its own; None for that of Lightning's ``seed_everything``, or 0
            if there is none.
        path: Where several loaders are served side by side, which of them this is: each draws from (seed, path).
        seed_samples: Seed what torch, NumPy and ``random`` draw, by (seed, path, pass, shards, samples before).
        num_replicas: Data-parallel ranks; None for those of the process group at the first batch, or 1.
        rank: This rank.
        accept: Names of differences between a state and this configuration to let pass.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    config: StreamConfig | None = None
    steps_per_epoch: int | None = None
    replay: Replay = "warn"
    exact: bool = False
    timeout: float = 1800.0
    seed: int | None = None
    path: str = ""
    seed_samples: bool = True
    num_replicas: int | None = None
    rank: int | None = None
    accept: Collection[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept", accepted_names(self.accept))
        if self.steps_per_epoch is not None and as_int("steps_per_epoch", self.steps_per_epoch) < 1:
            raise ConfigurationError(f"steps_per_epoch must be at least 1, got {self.steps_per_epoch}.")
        if not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise ConfigurationError(f"timeout must be a number of seconds above 0, got {self.timeout!r}.")
        if self.replay not in ("warn", "refuse"):
            raise ConfigurationError(f"replay must be one of ('warn', 'refuse'), got {self.replay!r}.")


class IterableBatches(IterableDataset[Any]):
    """An iterable of batches as the dataset of a DataLoader that hands them over as they are.

    Args:
        iterable: The iterable.
    """

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


class LoaderSetup:
    """A user's loader over an iterable dataset, with options.

    Args:
        loader: The user's loader, which nobody has read yet.
        options: How it is read and served.

    Attributes:
        dataset: What is read: the dataset, or the iterable of batches.
        name: What people know it by.
        num_workers: Worker slots of a rank: its workers, or itself.
        seed: The user's.
        own_seed: That of this loader among several.
        items: What the reader reads, in words.
        warning: What a user should know before training, and what to do about it; empty for nothing.
        config: How the dataset is read.
        state_kind: Says where the worker slots stand.
    """

    config: Any
    state_kind: ClassVar[Any]

    items = "samples"
    warning = ""

    def __init__(self, loader: DataLoader[Any], options: StreamOptions) -> None:
        self.loader, self.options = loader, options
        self.dataset: Any = loader.dataset.iterable if isinstance(loader.dataset, IterableBatches) else loader.dataset
        self.name = type(self.dataset).__qualname__
        self.num_workers = max(loader.num_workers, 1)
        self.seed = seed_or_default(options.seed)
        self.own_seed = loader_seed(self.seed, options.path)

    @property
    def topology(self) -> Topology:
        """The present ranks."""
        return detect_topology(self.options.num_replicas, self.options.rank)

    @property
    def seeds_process(self) -> bool:
        """Whether the generators of this process are seeded while batches are read in it."""
        return self.options.seed_samples and not self.loader.num_workers

    @property
    def first_samples(self) -> dict[str, str]:
        """Digests of what has to be the same on all ranks."""
        return {}

    def beginning(self, epoch: int) -> Any:
        """The beginning of a pass before which nothing was left, on the present ranks and workers."""
        return self.state_kind.beginning(self.config, epoch, self.topology.num_replicas, self.num_workers)

    def state_from(self, data: Mapping[str, Any]) -> Any:
        """Read a state from plain data."""
        return self.state_kind.from_dict(data, self.config)

    def moved_here(self, state: Any, where: str) -> Any:
        """A state, perhaps of other ranks and workers, on the present ones.

        Args:
            state: Where worker slots stand.
            where: How an error calls that.

        Raises:
            StateMismatchError: What is left cannot be given to others.
        """
        present = self.topology.num_replicas, self.num_workers
        if present == (state.num_replicas, state.num_workers):
            return state
        if not state.is_known and state.steps:
            raise self.mismatch(state, where)
        return state.on(*present)

    def note_of_epochs(self) -> str:
        """That the dataset is told the epoch, for the log; empty if it is not, or is this package's."""
        if isinstance(self.dataset, Stream) or not callable(getattr(self.dataset, "set_epoch", None)):
            return ""
        return " It is told every epoch by set_epoch, in workers too; Lightning alone tells samplers only."

    def mismatch(self, state: StreamState | IterableState, where: str) -> StateMismatchError:
        """The error that what is left of a pass cannot be given to other ranks or workers."""
        # A state does not tell one worker from none.
        workers: int | str = "0 or 1" if state.num_workers == 1 else state.num_workers
        remedy = (
            f"What {self.name} gives to one rank and worker cannot be given to others: resume on "
            f"{state.num_replicas} ranks with num_workers={workers}, or from a checkpoint at the end of an epoch."
        )
        changed, ranks = [], self.topology.num_replicas
        if ranks != state.num_replicas:
            changed.append(Difference(path="ranks", saved=state.num_replicas, present=ranks, remedy=remedy))
        if self.num_workers != state.num_workers:
            now = self.loader.num_workers
            changed.append(Difference(path="num_workers", saved=workers, present=now, remedy=remedy))
        return StateMismatchError(changed, where=where)

    def warn_of_nothing(self) -> None:
        """Say that an epoch had no step; nothing is said in evaluation, as by torch and Lightning."""
        if not self.options.exact:
            warnings.warn(
                f"{self.name} has given no batch in an epoch, so nothing was trained on. Look for shards that are "
                "empty or missing, a filter that keeps no sample, or drop_last=True with less than a batch.",
                StatefulWarning,
                stacklevel=3,
            )


class StreamSetup(LoaderSetup):
    """A user's loader over a stream of shards, as it is read on the present ranks and workers.

    Args:
        loader: The user's loader, which nobody has read yet.
        options: How it is read and served.
        config: How the stream is read, but for the options.

    Attributes:
        config: How the stream is read.
    """

    state_kind = StreamState

    def __init__(self, loader: DataLoader[Any], options: StreamOptions, config: StreamConfig) -> None:
        super().__init__(loader, options)
        self._has_warned = False
        self._empty: set[str] = set()  # Sources that were warned of.
        if not options.seed_samples:
            sources = {name: replace(source, seed_samples=False) for name, source in config.sources.items()}
            config = replace(config, sources=sources)
        if config.mixing is not None and options.exact:
            # Each sample once.
            config = replace(config, mixing=replace(config.mixing, stop="all_exhausted"))
        self.config: StreamConfig = config.at(options.path)
        self.warning = " ".join(
            dict.fromkeys(one.shards.warning for one in self.config.sources.values() if one.shards.warning)
        )

    @property
    def seeds_process(self) -> bool:
        """Whether the generators of this process are seeded while batches are read in it."""
        draws = self.config.seeds_process or draws_in_collation(self.loader.collate_fn)
        return super().seeds_process and draws

    @cached_property
    def first_samples(self) -> dict[str, str]:
        """Digests of the first samples of graphs of nodes, which differ among ranks if a dataset divides itself."""
        found: dict[str, str] = {}
        if self.loader.num_workers:
            # There it would find no other ranks.
            return found
        for source in self.config.sources.values():
            if source.shards.hides_workers:
                reader = ShardReader(source.shards, [0], 0, seed=self.own_seed)
                # What cannot be read is raised where it is read to be trained on.
                with keep_randomness(), suppress(ShardError), closing(reader):
                    reader.reset()
                    samples = reader.next_many(1)
                    name = f"the first sample of {source.shards.name(0)}, of which each rank has to read all samples,"
                    found[name] = digest_of_sample(samples)
        return found

    def describe(self) -> str:
        """A sentence on how the stream is divided and resumed."""
        number = sum(source.shards.num_shards for source in self.config.sources.values())
        reasons = self.reasons_to_read_again()
        return (
            f"{self.name} is a stream: its {number} shards are shared evenly among ranks and workers, and a resume "
            f"{f'reads it again, because {reasons}' if reasons else 'goes on within it'}.{self.note_of_epochs()}"
        )

    def reasons_to_read_again(self, *, if_drawn: bool = False) -> str:
        """Why a resume reads samples again, if need be once functions have drawn; empty if it does not."""
        shards = [source.shards for source in self.config.sources.values()]
        return "; ".join(sorted({one.reread or (if_drawn and one.reread_if_drawn) or "" for one in shards} - {""}))

    def warn_of_empty_sources(self, state: StreamState) -> None:
        """Say once of each source of a mixture that a whole pass over it, which has ended, gave nothing."""
        for name, source in state.config.sources.items():
            assigned, number = state.assignments[name], source.shards.num_shards
            is_whole = not assigned.begun and len(assigned.whole) == number
            is_empty = all(slot is not None and name in slot["gone"] for slot in state.slots)
            if is_whole and is_empty and name not in self._empty and not self.options.exact:
                self._empty.add(name)
                warnings.warn(
                    f"Source {name!r} of {self.name} has given nothing in pass {state.epoch}, out of {number} "
                    "shards: the others are trained on without it. Look for shards that are empty or missing, or a "
                    "filter that keeps no sample.",
                    StatefulWarning,
                    stacklevel=3,
                )

    def warn_of_many_reads(self, state: StreamState) -> None:
        """Say once what it costs where there are more worker slots than shards."""
        for name, slots in state.slices.items():
            num_shards = state.config.sources[name].shards.num_shards
            if self._has_warned or self.options.exact or num_shards >= state.num_slots:
                continue
            slices = [(one.of.epoch, shard) for slot in slots for one in slot for shard in one.of.shards]
            times = Counter(slices)
            if len(slices) <= _MANY_READS * len(times):
                continue
            self._has_warned = True
            several, of = sum(1 for number in times.values() if number > 1), f" of source {name!r}" if name else ""
            workers = num_shards // state.num_replicas
            fewer = f"num_workers={workers}, or " if workers else ""
            warnings.warn(
                f"{state.num_replicas} ranks with num_workers={self.loader.num_workers} are {state.num_slots} worker "
                f"slots, more than the {num_shards} shards{of} that {self.name} has. So {several} shards are read by "
                f"several slots, each of which keeps its part of the samples: {len(slices) / len(times):.1f} times as "
                f"much work for reading and decoding. Use {fewer}more and smaller shards (Hugging Face: "
                "dataset.reshard() for parquet files).",
                StatefulWarning,
                stacklevel=2,
            )


def batching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments by which a loader makes batches of samples."""
    return {
        "batch_size": loader.batch_size,
        "is_batched": loader.batch_size is not None,
        "drop_last": loader.drop_last,
    }
