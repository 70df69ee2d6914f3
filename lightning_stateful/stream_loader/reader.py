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

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.errors import (
    ConfigurationError,
    DamagedStateError,
    Difference,
    PositionError,
    StatefulWarning,
    StateMismatchError,
)
from lightning_stateful.samplers.fingerprint import digest
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.state import differences
from lightning_stateful.stream_loader.plan import StreamDetails, StreamEpochPlan
from lightning_stateful.stream_loader.rank_sync import RankSync, Record
from lightning_stateful.stream_loader.recent_states import RecentStates, ServedState
from lightning_stateful.stream_loader.stream_run import StreamRun
from lightning_stateful.stream_loader.worker_slots import SlotLoader
from lightning_stateful.stream_nodes.numbered import NOTHING

# Of each name, loaders in this process that have met those of other ranks.
_COUNTED: Counter[str] = Counter()


class StreamReader(ABC):
    """A reader with a memory, which offers plans of epochs.

    It can plan from the beginning of an epoch, from any progress that was saved, and from the steps that were read here
    lately; it cannot compute what comes at a step that nobody has read.

    Args:
        setup: How the stream is read and served.
        num_steps: Steps of an epoch; :data:`~lightning_stateful.core.UNKNOWN` if they are known only at its end.

    Attributes:
        setup: How the stream is read and served.
        recent: The states before recent steps.
        ended: The latest epoch that has ended, and its steps.
        given: The part that sources have in the latest batch; empty where that is not known.
    """

    num_steps: int
    setup: Any
    given = NOTHING

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    carries_over: ClassVar[bool] = True
    # Whether processes of the same data-parallel rank read the same.
    _reads_alike: ClassVar[bool] = True
    # Where the readers stand, they go on in other batches.
    harmless: ClassVar[tuple[str, ...]] = ("batch_size",)

    def __init__(self, setup: Any, num_steps: int = UNKNOWN) -> None:
        self.setup, self.num_steps = setup, num_steps
        self.name: str = setup.name
        self.ended: tuple[int, int] | None = None
        self.recent: RecentStates = RecentStates()
        # The latest details that a state was loaded from: they are looked up from then on.
        self._loaded: Mapping[str, Any] | None = None
        self._run: StreamRun | None = None
        self._slots: SlotLoader | None = None
        self._limit = setup.options.steps_per_epoch or UNKNOWN
        # Tells loaders apart that are read side by side, the same on all ranks; where nobody says, they are counted.
        self._label: str | None = None
        if setup.warning:
            warnings.warn(setup.warning, StatefulWarning, stacklevel=4)

    def __getstate__(self) -> dict[str, Any]:
        # Plans are pickled where a trainer's loop is: what reads stays here.
        return {**vars(self), "_run": None, "_slots": None}

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

    def config(self) -> dict[str, Any]:
        """The settings that determine the batches, as plain data to be compared."""
        described: dict[str, Any] = self.setup.config.describe()
        return described

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> StreamEpochPlan:
        """Plan ``epoch``, or the rest of it.

        A progress with details is remembered as where the stream stands; one without is looked up among the steps that
        were read here.

        Raises:
            ConfigurationError: The stream is read on another number of ranks.
            StateError: The details cannot be continued on these ranks and workers.
        """
        present = self.setup.topology.num_replicas
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
        self._label, self.recent.lag = label, lag
        if limit is not None:
            self._limit = min(limit, self._limit)

    def begin_at(self, progress: Progress) -> None:
        """Let a pass begin at a progress of which no state says where the stream stood, within an epoch too."""
        self.recent.note(progress.epoch, progress.consumed, self.setup.beginning(progress.epoch))

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
            return self.setup.beginning(epoch)
        raise PositionError(
            f"Where {self.name} stood before step {step} of epoch {epoch} is not known: it was not read there, and "
            "no state of it was loaded. Resume from a checkpoint that holds the data's state, as runs with this "
            "package's data module or callback write it, or begin with an epoch."
        )

    def details_at(self, epoch: int, step: int) -> dict[str, Any]:
        """The same as plain data, for a state."""
        details: dict[str, Any] = self.state_at(epoch, step).to_dict()
        return details

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
        if self.setup.topology.num_replicas == 1 or self.setup.options.exact:
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
        data, where, options = progress.details, f"The progress of {self.name}", self.setup.options
        state = self.setup.moved_here(self.setup.state_from(data), where)
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
        state = self.setup.moved_here(self._beginning_of_run(epoch, step), "The stream")
        again = state.read_again(range(self.setup.topology.rank, state.num_slots, state.num_replicas))
        started = time.perf_counter()
        run = self._begin(state)
        if again and run.has_next() and not run.is_broken:
            warnings.warn(
                f"{sum(again.values())} {self.setup.items} of {', '.join(again)} were "
                f"read again, and left out, to go on in epoch {epoch}, which took "
                f"{time.perf_counter() - started:.1f} s, because {self.setup.reasons_to_read_again(if_drawn=True)}.",
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
        setup = self.setup
        if self._run is not None:
            self._run.close()
        if self._slots is None:
            self._slots = SlotLoader(setup.loader, setup.config, setup.own_seed if setup.options.seed_samples else None)
        connect = partial(self._connect, state) if self._is_joined else None
        self._run = StreamRun(
            state, self._slots, setup.topology, connect, seed=setup.own_seed, limit=self._limit_after(state)
        )
        return self._run

    def _begin_after(self, run: StreamRun, state: Any) -> StreamRun:
        """Begin where a run is over."""
        self.recent.settle(run)
        return self._begin(state)

    def _refuse_shared_ranks(self, num_processes: int) -> None:
        """Refuse processes that cannot read alike where they share a data-parallel rank."""
        num_ranks = self.setup.topology.num_replicas
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
        setup, world = self.setup, detect_topology()
        self._refuse_shared_ranks(world.num_replicas)
        if self._label is None:
            _COUNTED[self.name] += 1
            self._label = f"{self.name} {_COUNTED[self.name]}"
        where = f"step {state.steps} of pass {state.epoch}, state {digest(state.to_dict())}"
        read = {"workers": state.num_workers, "steps_per_epoch": setup.options.steps_per_epoch}
        return RankSync(
            torch.distributed.distributed_c10d._get_default_store(),
            setup.topology,
            label=self._label,
            keep=self.recent.keep,
            timeout=setup.options.timeout,
            describe=describe,
            world=world,
            terms={**self.config(), **read, **setup.first_samples, "progress": where},
        )
