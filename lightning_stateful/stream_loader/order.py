"""A stream's batches as an order, which reads them on this rank and knows where all worker slots stood lately."""

from __future__ import annotations

import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, NoReturn

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
from lightning_stateful.state import differences
from lightning_stateful.stream_loader.options import StreamSetup
from lightning_stateful.stream_loader.rank_sync import RankSync, Record
from lightning_stateful.stream_loader.worker_slots import SlotLoader, StreamRun
from lightning_stateful.streams.stream_state import StreamState

# Steps that a trainer may have fetched beyond those that the model was trained on, and some more.
_READ_AHEAD = 16
# Passes without a step, one after the other, that are put up with.
_MOST_EMPTY = 4
# Of each name, loaders in this process that have met those of other ranks.
_COUNTED: Counter[str] = Counter()


class _Served:
    """Where worker slots stand after the latest batch of a run, which can tell for a while."""

    def __init__(self, run: StreamRun) -> None:
        self.run, self.num_served, self._states = run, run.num_served, run.states

    @cached_property
    def state(self) -> StreamState:
        return self.run.state_at(self.num_served, self._states)


class StreamOrder:
    """The batches of a stream, in the order in which its shards are read: a ``BatchOrder``.

    It can plan from the beginning of an epoch, from any progress that was saved, and from the steps that were read here
    lately; it cannot compute what comes at a step that nobody has read.

    An epoch is a pass over the stream unless it is limited. A pass is read in one run or more: where the first rank has
    nothing left, what the others have is shared evenly, until no step happens on all ranks.

    Args:
        setup: How the stream is read and served.
        num_steps: Steps of an epoch; :data:`~lightning_stateful.core.UNKNOWN` if they are known only at its end.

    Attributes:
        setup: How the stream is read and served.
        ended: The latest epoch that has ended, and its steps.
    """

    kind: ClassVar[str] = "stream"
    version: ClassVar[int] = 1
    carries_over: ClassVar[bool] = True

    def __init__(self, setup: StreamSetup, num_steps: int = UNKNOWN) -> None:
        self.setup, self.num_steps, self.name = setup, num_steps, setup.name
        self.ended: tuple[int, int] | None = None
        # Where the stream stands before steps, by epoch and step: the latest, and that at which the latest iteration
        # began, however long ago.
        self._known: OrderedDict[tuple[int, int], StreamState | _Served] = OrderedDict()
        self._began: tuple[int, int] | None = None
        # The latest details that a state was loaded from: they are looked up from then on.
        self._loaded: Mapping[str, Any] | None = None
        self._run: StreamRun | None = None
        self._slots: SlotLoader | None = None
        self._limit = setup.options.steps_per_epoch or UNKNOWN
        self._repeats = False
        self._lag = 0  # Steps that a state may lie behind the batches handed over, beside those read ahead.
        # Tells loaders apart that are read side by side, the same on all ranks; where nobody says, they are counted.
        self._label: str | None = None
        for source in setup.config.sources.values():
            if source.shards.warning:
                warnings.warn(source.shards.warning, StatefulWarning, stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        # Plans are pickled where a trainer's loop is: what reads stays here.
        known = {at: known for at, known in self._known.items() if isinstance(known, StreamState)}
        if self._began is not None:
            known[self._began] = self.state_at(*self._began)
        return {**vars(self), "_known": OrderedDict(known), "_run": None, "_slots": None}

    def config(self) -> dict[str, Any]:
        """What determines the batches, as plain data to be compared."""
        return self.setup.config.describe()

    def plan(self, epoch: int, num_replicas: int, progress: Progress | None = None) -> StreamEpochPlan:
        """Plan ``epoch``, or the rest of it.

        A progress with details brings the stream there; one without is looked up among the steps that were read here.

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
        details = progress.details
        is_loaded = details is self._loaded and (progress.epoch, progress.consumed) in self._known
        is_own = is_loaded or (isinstance(details, StreamDetails) and details.order is self)
        if details and not is_own:
            self._load(progress)
        is_over = progress.consumed and progress.consumed >= self.num_steps
        if is_over and not (is_own and (progress.epoch + 1, 0) in self._known):
            self.end_at(progress)
        return StreamEpochPlan(self, epoch, progress.consumed if progress.epoch == epoch else 0)

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """The same, where the accepted differences leave what its details say as it is.

        Raises:
            StateMismatchError: They do not, as within a pass over shards that are others now.
        """
        try:
            self.plan(progress.epoch, self.setup.topology.num_replicas, progress)
        except (DamagedStateError, PositionError) as error:
            envelope = {"kind": self.kind, "order_version": self.version}
            before, now = {**envelope, "config": saved}, {**envelope, "config": self.config()}
            remedy = "Within a pass this cannot be let pass. Put it back, or resume where a pass begins."
            changed = [replace(one, remedy=remedy) for one in differences(before, now, fingerprints=False)]
            if not changed:
                raise
            raise StateMismatchError(changed, where=f"The progress of {self.name}") from error
        return progress

    def adapted(self, *, path: str = "", exact: bool = False, shuffle: bool = True) -> StreamOrder:
        """Itself: a stream is read for another use by a copy of its loader."""
        return self

    def prepare(self, label: str, *, limit: int | None = None, lag: int = 0, repeats: bool = False) -> None:
        """Serve a trainer.

        Args:
            label: Tells the loaders of a trainer apart, the same on all ranks.
            limit: Steps after which epochs end at the latest; the next goes on from there.
            lag: So many steps ago may be asked for.
            repeats: Begin every epoch as the first: to overfit on its batches.
        """
        self._label, self._lag, self._repeats = label, lag, repeats
        if limit is not None:
            self._limit = min(limit, self._limit)

    def begin_at(self, progress: Progress) -> None:
        """Let a pass begin at a progress of which no state says where the stream stood, within an epoch too."""
        self._know(progress.epoch, progress.consumed, self.setup.beginning(progress.epoch))

    def end_at(self, progress: Progress) -> None:
        """The epoch of a known progress ends there: the next goes on from it."""
        if (progress.epoch, progress.consumed) in self._known:
            self._end(progress.epoch, progress.consumed)

    def state_at(self, epoch: int, step: int) -> StreamState:
        """Where all worker slots stand before ``step`` of ``epoch``.

        Raises:
            PositionError, StreamError: Nobody knows, or not any more.
        """
        known = self._known.get((epoch, step))
        if known is not None:
            return known.state if isinstance(known, _Served) else known
        if not step:
            return self.setup.beginning(epoch)
        raise PositionError(
            f"Where {self.name} stood before step {step} of epoch {epoch} is not known: it was not read there, and "
            "no state of it was loaded. Resume from a checkpoint that holds the data's state, as runs with this "
            "package's data module or callback write it, or begin with an epoch."
        )

    def read(self, epoch: int, step: int) -> Iterator[Any]:
        """The batches from ``step`` to the end of the epoch; at the last, :attr:`ended` says how many steps it had.

        Raises:
            StreamError: A stream broke off, here or on another rank.
            PositionError: Nobody knows where the stream stands before ``step``.
        """
        self._forget_end(epoch)
        run = self._run_at(epoch, step)
        num_served = run.num_served
        # A loader may use the memory of a batch again for the next, which is asked for ahead only if it has to be.
        has_limit = self._limit != UNKNOWN
        looks_ahead = self.setup.options.steps_per_epoch is None and not (self.setup.is_loader and has_limit)
        while step < self._limit:
            if not run.goes_on(num_served):
                # Another iteration has taken over what is read.
                run = self._run_at(epoch, step)
            if not run.has_next():
                run = self._with_batches(run, at_start=not step)
                if run.is_over:
                    break
            batch = run.next()
            step += 1
            self._know(epoch, step, _Served(run))
            is_last = step == self._limit
            if looks_ahead and not is_last:
                if not run.has_next():
                    run = self._shared_if_over(run)
                    if not run.is_over:
                        self._know(epoch, step, _Served(run))
                is_last = run.is_over
            num_served = run.num_served
            if is_last:
                self._end(epoch, step, run)
                yield batch
                return
            yield batch
        if not step and self._limit:
            self.setup.warn_of_nothing()
        self._end(epoch, step, run)

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
    def _keep(self) -> int:
        return _READ_AHEAD + self._lag

    @property
    def _is_joined(self) -> bool:
        """Whether there are other ranks to be in step with."""
        if self.setup.topology.num_replicas == 1 or self.setup.options.exact:
            return False
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def _know(self, epoch: int, step: int, known: StreamState | _Served) -> None:
        self._known[epoch, step] = known
        self._known.move_to_end((epoch, step))
        if len(self._known) > self._keep + 1:
            oldest = next(at for at in self._known if at != self._began)
            del self._known[oldest]

    def _load(self, progress: Progress) -> None:
        """Know from the details of a progress where all worker slots stand, on the present ranks."""
        data, where, options = progress.details, f"The progress of {self.name}", self.setup.options
        saved = self.setup.config_on(data["num_replicas"], data["workers"])
        state = self.setup.moved_here(StreamState.from_dict(data, saved), where)
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
        self._know(progress.epoch, progress.consumed, state)
        self._loaded = progress.details

    def _forget_end(self, epoch: int) -> None:
        """An epoch that is read again, perhaps on other ranks, may have another end."""
        if self.ended is not None and self.ended[0] >= epoch:
            self.ended = None

    def _run_at(self, epoch: int, step: int) -> StreamRun:
        known = self._known.get((epoch, step))
        if isinstance(known, _Served) and known.run is self._run and known.run.goes_on(known.num_served):
            # Its batches are read ahead already; for how long it says where they began is not known.
            self._began, _ = (epoch, step), known.state
            return known.run
        state = self.setup.moved_here(self.state_at(epoch, step), "The stream")
        again = state.read_again(range(self.setup.topology.rank, state.num_slots, state.num_replicas))
        started = time.perf_counter()
        run = self._begin(state)
        if again and run.has_next() and not run.is_broken:
            warnings.warn(
                f"{sum(again.values())} {'batches' if self.setup.is_loader else 'samples'} of {', '.join(again)} were "
                f"read again, and left out, to go on in epoch {epoch}, which took "
                f"{time.perf_counter() - started:.1f} s, because {self.setup.reasons_to_read_again(if_drawn=True)}.",
                StatefulWarning,
                stacklevel=3,
            )
        self._began = epoch, step
        self._know(epoch, step, state)
        return run

    def _begin(self, state: StreamState) -> StreamRun:
        setup = self.setup
        if self._run is not None:
            self._run.close()
        if self._slots is None:
            self._slots = SlotLoader(setup.loader, setup.config, setup.own_seed if setup.options.seed_samples else None)
        setup.warn_of_many_reads(state)
        connect = partial(self._connect, state) if self._is_joined else None
        self._run = StreamRun(state, self._slots, setup.topology, connect, seed=setup.own_seed)
        return self._run

    def _begin_after(self, run: StreamRun, state: StreamState) -> StreamRun:
        """Begin where a run is over."""
        # What other ranks have published in it is about to be deleted.
        late = [(at, known) for at, known in self._known.items() if isinstance(known, _Served) and known.run is run]
        for at, known in late[-self._lag - 1 :]:
            self._known[at] = known.state
        return self._begin(state)

    def _with_batches(self, run: StreamRun, *, at_start: bool) -> StreamRun:
        """The run that follows in an epoch where one is over: over what other ranks have left, or the next pass."""
        run = self._shared_if_over(run)
        for _ in range(_MOST_EMPTY):
            # A limited epoch may begin where a pass ends; a whole pass in which a rank has nothing is no epoch.
            has_none = self._is_joined and not run.num_served and not run.begun.steps + run.begun.steps_before
            # Where no rank has anything, the epoch is over, as it is on a single rank.
            has_none = has_none and (run.has_next() or not run.gave_nothing)
            begins = at_start and (self._limit != UNKNOWN or has_none) and not self.setup.is_loader
            if run.has_next() or not (self.setup.options.steps_per_epoch or begins):
                return run
            run = self._shared_if_over(self._begin_after(run, self._following(run)))
        if run.has_next():
            return run
        raise ConfigurationError(
            f"{self.name} has given no batch to all ranks in {_MOST_EMPTY} passes. Look for shards that are "
            "empty or missing, or a filter that keeps no sample; else use fewer ranks and workers, or fuller shards."
        )

    def _shared_if_over(self, run: StreamRun) -> StreamRun:
        """A run over what other ranks have left, where a run is over; itself where sharing that gives no step."""
        if not run.has_next() and not run.is_broken and (self._is_joined or run.begun.num_replicas == 1):
            self.setup.warn_of_empty_sources(run.final_state)
        while not run.has_next() and self._is_joined:
            shared = run.final_state.shared_anew()
            if shared is None:
                break
            run = self._begin_after(run, shared)
        return run

    def _following(self, run: StreamRun) -> StreamState:
        """The beginning of the pass after a run that is over."""
        final = run.final_state
        if self.setup.options.exact or (final.num_replicas > 1 and not self._is_joined):
            # Each rank ends for itself.
            return self.setup.beginning(final.epoch + 1)
        return final.following()

    def _end(self, epoch: int, step: int, run: StreamRun | None = None) -> None:
        """End ``epoch`` before ``step``: with the pass of ``run``, or within a pass at the limit and without a run."""
        self.ended = epoch, step
        known: StreamState | _Served
        if self._repeats:
            known = self.setup.beginning(0)
        elif run is not None and step != self._limit:
            known = self._following(run)
        elif self.setup.is_loader:
            known = self.state_at(epoch, step).following()
        else:
            known = self._known[epoch, step]
        self._know(epoch + 1, 0, known)

    def _connect(self, state: StreamState, describe: Callable[[int, Record], str]) -> RankSync:
        setup, world = self.setup, torch.distributed.get_world_size()
        if world != setup.topology.num_replicas:
            raise ConfigurationError(
                f"{world} processes are {setup.topology.num_replicas} data-parallel ranks. Streams need one process "
                "for each rank, as under DDP or FSDP."
            )
        if self._label is None:
            _COUNTED[self.name] += 1
            self._label = f"{self.name} {_COUNTED[self.name]}"
        where = f"step {state.steps} of pass {state.epoch}, state {digest(state.to_dict())}"
        read = {"workers": state.num_workers, "steps_per_epoch": setup.options.steps_per_epoch}
        return RankSync(
            torch.distributed.distributed_c10d._get_default_store(),
            setup.topology,
            label=self._label,
            keep=self._keep,
            timeout=setup.options.timeout,
            describe=describe,
            terms={**self.config(), **read, **setup.first_samples, "progress": where},
        )


class StreamEpochPlan:
    """The rest of an epoch of a stream on the present ranks.

    Args:
        order: The stream.
        epoch: Which epoch.
        consumed: Steps of the epoch that were taken before.
    """

    def __init__(self, order: StreamOrder, epoch: int, consumed: int = 0) -> None:
        self.order, self.epoch, self.consumed = order, epoch, consumed

    @property
    def num_steps(self) -> int:
        """Steps to the end of the epoch; UNKNOWN until it has been seen, if the stream does not say."""
        ended = self.order.ended
        end = ended[1] if ended is not None and ended[0] == self.epoch else self.order.num_steps
        return UNKNOWN if end == UNKNOWN else max(end - self.consumed, 0)

    def read(self, first_step: int = 0) -> Iterator[Any]:
        """Read the batches of this rank from a step on; when the last is handed over, :attr:`num_steps` is known.

        Raises:
            StreamError: The stream broke off, here or on another rank.
            PositionError: Nobody knows where the stream stands at that step.
        """
        return self.order.read(self.epoch, self.consumed + first_step)

    def batches(self, rank: int, first_step: int = 0) -> NoReturn:
        """A stream has no indices: :meth:`read` gives its batches.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"{self.order.name} is a stream, which has no indices. Iterate over its loader, or loader.batches(plan)."
        )

    def progress_after(self, steps: int) -> Progress:
        """The progress after ``steps`` steps; its details are looked up when they are asked for."""
        step = self.consumed + steps
        return Progress(epoch=self.epoch, consumed=step, details=StreamDetails(self.order, self.epoch, step))

    def report_after(self, steps: int) -> dict[str, Any]:
        """Steps of the epoch, pass over the stream, and shards not read to their end or left out.

        Raises:
            StreamError: It is too long ago.
        """
        step = self.consumed + steps
        return {"batches": step, **self.order.state_at(self.epoch, step).report()}

    def repeats(self) -> str:
        """Nothing is served twice."""
        return ""


class StreamDetails(Mapping[str, Any]):
    """Where every worker slot stands before a step, looked up when it is first asked for: a read-only dict.

    Nothing is gathered for the many steps of which nobody writes a state. Copies and pickles are plain dicts.

    Args:
        order: The stream.
        epoch: The epoch of the step.
        step: The number of the step.

    Raises:
        PositionError, StreamError: When asked for what nobody knows, or not any more.
    """

    def __init__(self, order: StreamOrder, epoch: int, step: int) -> None:
        self.order, self._epoch, self._step = order, epoch, step

    @cached_property
    def _data(self) -> dict[str, Any]:
        return self.order.state_at(self._epoch, self._step).to_dict()

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._data,)
