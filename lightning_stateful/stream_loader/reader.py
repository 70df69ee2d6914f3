"""Reads the batches of a stream or an iterable dataset on this rank, and remembers where it stood before recent steps.

A reader offers plans as a :class:`~lightning_stateful.core.BatchOrder` does, but it is no pure function: what it can
plan depends on what was read and loaded, and reading changes what it remembers.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch.distributed
from torch.utils.data import DataLoader

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.core.seeding import derive_seed, loader_seed
from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    Difference,
    PositionError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.generators.rng import keep_randomness, seed_or_default
from lightning_stateful.iterable_datasets.earlier_passes import refuse_open
from lightning_stateful.iterable_datasets.rank_draws import ALL_KINDS
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.state import differences
from lightning_stateful.stream_loader.options import IterableBatches, StreamOptions
from lightning_stateful.stream_loader.plan import StreamDetails, StreamEpochPlan
from lightning_stateful.stream_loader.rank_sync import RankSync, Record
from lightning_stateful.stream_loader.recent_states import RecentStates, ServedState
from lightning_stateful.stream_loader.stream_run import StreamRun
from lightning_stateful.stream_loader.worker_slots import SlotLoader
from lightning_stateful.stream_nodes.numbered import NOTHING
from lightning_stateful.streams.stream import Stream
from lightning_stateful.user_loaders import copied

# Seconds to wait for a batch that is read beside what is trained on, where a loader has no workers.
_PATIENCE = 120
# Passes without a step, one after the other, that are put up with.
MOST_EMPTY = 4
# Of each name, loaders in this process that have met those of other ranks.
_COUNTED: Counter[str] = Counter()


class StreamReader(ABC):
    """A reader with a memory, which offers plans of epochs.

    It can plan from the beginning of an epoch, from any progress that was saved, and from the steps that were read here
    lately; it cannot compute what comes at a step that nobody has read.

    Args:
        loader: The user's loader, which nobody has read yet.
        options: How it is read and served.

    Attributes:
        dataset: What is read: the dataset, or the iterable of batches.
        settings: How it is read.
        name: What people know it by.
        num_workers: Worker slots of a rank: its workers, or itself.
        seed: The user's.
        own_seed: That of this loader among several.
        num_steps: Steps of an epoch; :data:`~lightning_stateful.core.UNKNOWN` if they are known only at its end.
        recent: The states before recent steps.
        ended: The latest epoch that has ended, and its steps.
        given: The part that sources have in the latest batch; empty where that is not known.
    """

    settings: Any
    given = NOTHING
    # What it reads, in words.
    items = "samples"

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    # Says where the worker slots stand.
    state_kind: ClassVar[Any]
    carries_over: ClassVar[bool] = True
    # Whether processes of the same data-parallel rank read the same.
    _reads_alike: ClassVar[bool] = True
    # Where the readers stand, they go on in other batches.
    harmless: ClassVar[tuple[str, ...]] = ("batch_size",)

    def __init__(self, loader: DataLoader[Any], options: StreamOptions) -> None:
        self.loader, self.options = loader, options
        self.dataset: Any = loader.dataset.iterable if isinstance(loader.dataset, IterableBatches) else loader.dataset
        self.name: str = type(self.dataset).__qualname__
        self.num_workers = max(loader.num_workers, 1)
        self.seed = seed_or_default(options.seed)
        self.own_seed = loader_seed(self.seed, options.path)
        self.num_steps: int = options.steps_per_epoch or UNKNOWN
        self.ended: tuple[int, int] | None = None
        self.recent: RecentStates = RecentStates()
        # The latest details that a state was loaded from: they are looked up from then on.
        self._loaded: Mapping[str, Any] | None = None
        self._run: StreamRun | None = None
        self._slots: SlotLoader | None = None
        self._limit = self.num_steps
        # Tells loaders apart that are read side by side, the same on all ranks; where nobody says, they are counted.
        self._label: str | None = None
        self._repeats = False

    def __getstate__(self) -> dict[str, Any]:
        # Plans are pickled where a trainer's loop is: what reads, and looks at what hooks set, stays here.
        stays = {"_run", "_slots", "_watch", "_within"} & vars(self).keys()
        return {**vars(self), **dict.fromkeys(stays)}

    def number_samples(self) -> None:  # noqa: B027  # most readers have none
        """Let batches say the numbers of their samples, where these have numbers."""

    @abstractmethod
    def read(self, epoch: int, step: int) -> Iterator[Any]:
        """The batches from ``step`` to the end of the epoch; at the last, :attr:`ended` says how many steps it had.

        Raises:
            StreamError: A stream broke off, here or on another rank.
            PositionError: Nobody knows where the stream stands before ``step``.
        """

    @abstractmethod
    def _end(self, epoch: int, step: int, run: StreamRun | None = None) -> None:
        """End ``epoch`` before ``step``: with the pass of ``run``, or within a pass at the limit and without a run."""

    @abstractmethod
    def describe(self) -> str:
        """A sentence on how the dataset is divided and resumed."""

    @abstractmethod
    def reasons_to_read_again(self, *, if_drawn: bool = False) -> str:
        """Why a resume reads samples again, if need be once functions have drawn; empty if it does not."""

    @property
    @abstractmethod
    def values(self) -> dict[str, str]:
        """Digests of what it reads by, as it is now, the same in every process."""

    @property
    @abstractmethod
    def values_as_begun(self) -> tuple[dict[str, str], dict[str, str]]:
        """The same as it was built, and as the pass began that :attr:`begun_pass` names."""

    @property
    def begun_pass(self) -> int | None:
        """The pass of which the latest batch is the first one; None of another batch, or where more came before it."""
        run = self._run
        if run is None or run.num_served != 1 or run.begun.steps or run.begun.steps_before:
            return None
        begun = run.begun
        return int(begun.epoch) if begun.to_dict() == self.beginning_of(begun.epoch).to_dict() else None

    def read_first(self, epoch: int) -> Any:
        """Read the first batch of a pass in a worker that ends with it, so that nothing changes here.

        Raises:
            Exception: It cannot be read; or two processes cannot read the dataset side by side, as with an open file.
        """
        loader = copied(self.loader)
        changes: dict[str, Any] = {"pin_memory": False, "persistent_workers": False}
        refuse_open(self.dataset)
        if not loader.num_workers:
            changes |= {"worker_init_fn": None, "prefetch_factor": 1, "timeout": _PATIENCE}
        if not loader.num_workers or loader.worker_init_fn is None:
            changes["num_workers"] = 1
        vars(loader).update(changes)
        seed = self.own_seed if self.options.seed_samples else None
        how = {"is_trained_on": False, "hides_worker": not self.loader.num_workers}
        slots, ranks = SlotLoader(loader, self.settings, seed, **how), self.topology
        begun = self.beginning_of(epoch)
        with keep_randomness():
            deliveries = slots.read(begun.tasks(ranks.rank), self._seed_of_workers(begun))
            return next(delivery.batch for delivery in deliveries if not delivery.is_end)

    def _seed_of_workers(self, begun: Any) -> int:
        """The seed of torch's workers in a run that begins there: persistent ones have that of the first pass."""
        # A pass may show it, while what workers draw themselves is seeded by batch.
        is_kept = self.loader.num_workers > 0 and self.loader.persistent_workers and self.options.seed_samples
        of_pass = (0, 0) if is_kept else (begun.epoch, begun.steps_before)
        is_alike = begun.config.kinds_alike >= ALL_KINDS
        return derive_seed("stream", self.own_seed, *of_pass, 0 if is_alike else self.topology.rank)

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

    def beginning_of(self, epoch: int) -> Any:
        """The beginning of a pass before which nothing was left, on the present ranks and workers."""
        return self.state_kind.beginning(self.settings, epoch, self.topology.num_replicas, self.num_workers)

    def _moved_here(self, state: Any, where: str) -> Any:
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
            raise self._mismatch(state, where)
        return state.on(*present)

    def _note_of_epochs(self) -> str:
        """That the dataset is told the epoch, for the log; empty if it is not, or is this package's."""
        if isinstance(self.dataset, Stream) or not callable(getattr(self.dataset, "set_epoch", None)):
            return ""
        return " It is told every epoch by set_epoch, in workers too; Lightning alone tells samplers only."

    def _mismatch(self, state: Any, where: str) -> StateMismatchError:
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

    def config(self) -> dict[str, Any]:
        """The settings that determine the batches, as plain data to be compared."""
        described: dict[str, Any] = self.settings.describe()
        return described

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> StreamEpochPlan:
        """Plan ``epoch``, or the rest of it.

        A progress with details is remembered as where the stream stands; one without is looked up among the steps that
        were read here.

        Raises:
            ConfigurationError: The stream is read on another number of ranks.
            StateError: The details cannot be continued on these ranks and workers.
        """
        present = self.topology.num_replicas
        if num_replicas != present:
            raise ConfigurationError(
                f"{self.name} is read on {present} ranks and cannot be planned for {num_replicas}. "
                "Build its loader where the ranks are known."
            )
        if progress is None:
            return StreamEpochPlan(self, epoch)
        is_own = self._remember(progress)
        is_over = progress.consumed and progress.consumed >= self.num_steps
        if is_over and not (is_own and (progress.epoch + 1, 0) in self.recent):
            self.end_at(progress)
        return StreamEpochPlan(self, epoch, progress.consumed if progress.epoch == epoch else 0)

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """The same, where the accepted differences leave what its details say as it is.

        Raises:
            StateMismatchError: They do not, as within a pass over shards that are others now.
        """
        try:
            self._remember(progress)
        except (DamagedStateError, PositionError) as error:
            envelope = {"kind": self.kind, "order_version": self.version}
            before, now = {**envelope, "config": saved}, {**envelope, "config": self.config()}
            remedy = "Within a pass this cannot be let pass. Put it back, or resume where a pass begins."
            changed = [replace(one, remedy=remedy) for one in differences(before, now, fingerprints=False)]
            if not changed:
                raise
            raise StateMismatchError(changed, where=f"The progress of {self.name}") from error
        return progress

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> StreamReader:
        """Itself: a stream is read for another use by a copy of its loader."""
        return self

    def prepare(self, label: str, *, limit: int | None = None, lag: int = 0, repeats: bool = False) -> None:
        """Serve a trainer; see :meth:`~lightning_stateful.samplers.tracker.TrackedLoader.prepare`."""
        self._label, self.recent.lag, self._repeats = label, lag, repeats
        if limit is not None:
            self._limit = min(limit, self._limit)

    def begin_at(self, progress: Progress) -> None:
        """Let a pass begin at a progress of which no state says where the stream stood, within an epoch too."""
        self.recent.note(progress.epoch, progress.consumed, self.beginning_of(progress.epoch))

    def end_at(self, progress: Progress) -> None:
        """The epoch of a known progress ends there: the next goes on from it."""
        if (progress.epoch, progress.consumed) in self.recent:
            self._end(progress.epoch, progress.consumed)

    def state_at(self, epoch: int, step: int) -> Any:
        """The positions of all worker slots before ``step`` of ``epoch``.

        Raises:
            PositionError, StreamError: Nobody knows, or not any more.
        """
        known = self.recent.get(epoch, step)
        if known is not None:
            return known
        if not step:
            return self.beginning_of(epoch)
        raise PositionError(
            f"Where {self.name} stood before step {step} of epoch {epoch} is not known: it was not read there, and "
            "no state of it was loaded. Resume from a checkpoint that holds the data's state, as runs with this "
            "package's data module or callback write it, or begin with an epoch."
        )

    def details_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The same as plain data, for a state."""
        details: dict[str, Any] = self.state_at(epoch, step).to_dict()
        return {**details, **self.set_on_rank(epoch, step)}

    @abstractmethod
    def set_on_rank(self, epoch: int, step: int) -> dict[str, Any]:
        """Of the details, what something else than its passes has set on the data of this rank."""

    @abstractmethod
    def expect_set(self, details: Mapping[str, Any], *, is_within: bool) -> None:
        """Compare with what :meth:`set_on_rank` gave in the run that wrote a checkpoint; perhaps within a pass."""

    @property
    def calls_collectives(self) -> bool:
        """Whether reading a batch of the latest pass has begun a collective."""
        return self._run is not None and self._run.calls_collectives

    @property
    def is_unread(self) -> bool:
        """Whether nothing was read yet."""
        return self._slots is None

    @property
    def worker_iterator(self) -> Any:
        """The iterator of torch that holds persistent workers."""
        return None if self._slots is None else self._slots.loader._iterator

    def end_workers(self) -> None:
        """End workers, persistent ones too."""
        if self._run is not None:
            self._run.close()
        if self._slots is not None:
            self._slots.shut_down()

    @property
    def _is_joined(self) -> bool:
        """Whether there are other ranks to be in step with."""
        if self.topology.num_replicas == 1 or self.options.exact:
            return False
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def _remember(self, progress: Progress) -> bool:
        """Remember where a progress stands; whether that was known here already."""
        details = progress.details
        is_loaded = details is self._loaded and (progress.epoch, progress.consumed) in self.recent
        is_own = is_loaded or (isinstance(details, StreamDetails) and details.order is self)
        if details and not is_own:
            self._load(progress)
        return is_own

    def _load(self, progress: Progress) -> None:
        """Know from the details of a progress where all worker slots stand, on the present ranks."""
        where, options = f"The progress of {self.name}", self.options
        state = self._moved_here(self.state_kind.from_dict(progress.details, self.settings), where)
        again = state.read_again()
        if again and "replay" in options.accept:
            # As without this package: what is left of the epoch is the beginning of the data.
            state, again = state.begun_again(), {}
        if again and options.replay == "refuse":
            remedy = 'Pass replay="warn" to read them again, or give the dataset state_dict and load_state_dict.'
            saying = f"{sum(again.values())} samples of {', '.join(again)} to be read again"
            refused = Difference(path="replay", saved=saying, present="refuse", remedy=remedy)
            raise StateMismatchError([refused], where=where)
        self._forget_end(progress.epoch)
        self.recent.note(progress.epoch, progress.consumed, state)
        self._loaded = progress.details

    def _forget_end(self, epoch: int) -> None:
        """An epoch that is read again, perhaps on other ranks, may have another end."""
        if self.ended is not None and self.ended[0] >= epoch:
            self.ended = None

    def _run_at(self, epoch: int, step: int) -> StreamRun:
        """The run that reads from a step on: the latest, if it stands there, or one that begins there."""
        known = self.recent.served(epoch, step)
        if known is not None and known.run is self._run and known.run.goes_on(known.num_served):
            # Its batches are read ahead already; for how long it says where they began is not known.
            self.recent.began, _ = (epoch, step), known.state
            return known.run
        state = self._moved_here(self._beginning_of_run(epoch, step), "The stream")
        again = state.read_again(range(self.topology.rank, state.num_slots, state.num_replicas))
        started = time.perf_counter()
        run = self._begin(state)
        if again and run.has_next() and not run.is_broken:
            warnings.warn(
                f"{sum(again.values())} {self.items} of {', '.join(again)} were "
                f"read again, and left out, to go on in epoch {epoch}, which took "
                f"{time.perf_counter() - started:.1f} s, because {self.reasons_to_read_again(if_drawn=True)}.",
                StatefulWarning,
                stacklevel=3,
            )
        self.recent.began = epoch, step
        self.recent.note(epoch, step, run.begun if run.num_served else ServedState(run))
        return run

    def _beginning_of_run(self, epoch: int, step: int) -> Any:
        """The state at which a run is to begin."""
        return self.state_at(epoch, step)

    def _limit_after(self, state: Any) -> int:
        """Batches that a run from a state on is asked for at most."""
        return UNKNOWN

    def _begin(self, state: Any) -> StreamRun:
        if self._run is not None:
            self._run.close()
        if self._slots is None:
            seed = self.own_seed if self.options.seed_samples else None
            self._slots = SlotLoader(self.loader, self.settings, seed, is_trained_on=not self.options.exact)
        connect = partial(self._connect, state) if self._is_joined else None
        limit, seed = self._limit_after(state), self._seed_of_workers(state)
        self._run = StreamRun(state, self._slots, self.topology, connect, seed=seed, limit=limit)
        return self._run

    def _begin_after(self, run: StreamRun, state: Any) -> StreamRun:
        """Begin where a run is over."""
        self.recent.settle(run)
        return self._begin(state)

    def _refuse_shared_ranks(self, num_processes: int) -> None:
        """Refuse processes that cannot read alike where they share a data-parallel rank."""
        num_ranks = self.topology.num_replicas
        said = f"{num_processes} processes are {num_ranks} data-parallel ranks."
        if num_processes % num_ranks:
            raise ConfigurationError(f"{said} Each rank needs the same number of processes.")
        if num_processes > num_ranks and not self._reads_alike:
            raise ConfigurationError(
                f"{said} {self.name} divides itself, and a state holds what it gave to one process of each rank, not "
                "to the others that share the rank. Make shards of it (NodeShards, ChunkedDataset, a Hugging Face "
                "dataset), which all of them read alike."
            )

    def _connect(self, state: Any, describe: Callable[[int, Record], str]) -> RankSync:
        world = detect_topology()
        self._refuse_shared_ranks(world.num_replicas)
        if self._label is None:
            _COUNTED[self.name] += 1
            self._label = f"{self.name} {_COUNTED[self.name]}"
        where = f"step {state.steps} of pass {state.epoch}, state {digest(state.to_dict())}"
        read = {"workers": state.num_workers, "steps_per_epoch": self.options.steps_per_epoch}
        return RankSync(
            torch.distributed.distributed_c10d._get_default_store(),
            self.topology,
            label=self._label,
            keep=self.recent.keep,
            timeout=self.options.timeout,
            reads_ahead=self._reads_alike,
            describe=describe,
            world=world,
            terms={**self.settings.describe(), **read, **self.first_samples, "progress": where},
        )

    def _gave_nothing(self) -> ConfigurationError:
        """The error that several passes had no step."""
        return ConfigurationError(
            f"{self.name} has given no batch to all ranks in {MOST_EMPTY} passes. Look for shards that are "
            "empty or missing, or a filter that keeps no sample; else use fewer ranks and workers, or fuller shards."
        )

    def _warn_of_nothing(self) -> None:
        """Say that an epoch had no step; nothing is said in evaluation, as by torch and Lightning."""
        if not self.options.exact:
            warnings.warn(
                f"{self.name} has given no batch in an epoch, so nothing was trained on. Look for shards that are "
                "empty or missing, a filter that keeps no sample, or drop_last=True with less than a batch.",
                StatefulWarning,
                stacklevel=3,
            )
