"""Reads a stream epoch after epoch on this rank, and knows where all worker slots stood at each of the latest steps."""

from __future__ import annotations

import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch.distributed

from lightning_stateful.core.order import Progress
from lightning_stateful.errors import ConfigurationError, Difference, PositionError, StatefulWarning, StateMismatchError
from lightning_stateful.samplers.fast_forward import digest
from lightning_stateful.stream_loader.options import StreamSetup
from lightning_stateful.stream_loader.rank_sync import RankSync, Record
from lightning_stateful.stream_loader.run import StreamRun
from lightning_stateful.stream_loader.worker_slots import SlotLoader
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import StreamConfig

# Steps that a trainer may have fetched beyond those that the model was trained on, and some more.
_READ_AHEAD = 16
# Passes without a step, one after the other, that are put up with.
_MOST_EMPTY = 4
# Readings of each shard, on average, from which on a user is told.
_MANY_READS = 1.5
# Of each name, loaders in this process that have met those of other ranks.
_COUNTED: Counter[str] = Counter()


class _Known(NamedTuple):
    """Where all worker slots stand before some step: said outright, or by a run and how much that had served."""

    state: StreamState | None
    run: StreamRun | None = None
    num_served: int = 0


class StreamEpochs:
    """Reads a stream from any step that it has come by, and knows where all worker slots stood there.

    An epoch is a pass over the stream unless it is limited. A pass is read in one run or more: where the first rank has
    nothing left, what the others have is shared evenly, until no step happens on all ranks.

    Args:
        setup: How the stream is read and served.

    Attributes:
        ended: The latest epoch that has ended, and its steps.
    """

    def __init__(self, setup: StreamSetup) -> None:
        self._setup = setup
        self._known: OrderedDict[tuple[int, int], _Known] = OrderedDict()
        # Where the latest iteration began, however long ago.
        self._origin: dict[tuple[int, int], _Known] = {}
        self._run: StreamRun | None = None
        self._slots: SlotLoader | None = None
        self._limit = setup.options.steps_per_epoch
        self._repeats = self._is_prepared = self._has_warned = False
        self.ended: tuple[int, int] | None = None
        self._lag = 0  # Steps that a state may lie behind the batches handed over, beside those read ahead.
        # Tells loaders apart that are read side by side, the same on all ranks; where nobody says, they are counted.
        self._label: str | None = None
        for source in self.config.sources.values():
            if source.shards.warning:
                warnings.warn(source.shards.warning, StatefulWarning, stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        # What reads stays here: a copy in another process begins anew, or where a state is loaded.
        known = OrderedDict((at, known) for at, known in self._known.items() if known.run is None)
        origin = {at: known for at, known in self._origin.items() if known.run is None}
        return {**vars(self), "_known": known, "_origin": origin, "_run": None, "_slots": None}

    @property
    def config(self) -> StreamConfig:
        """How the stream is read on the present ranks and workers."""
        return self._setup.present_config

    @property
    def name(self) -> str:
        """What people know the stream by."""
        return self._setup.name

    @property
    def num_replicas(self) -> int:
        """The present number of ranks."""
        return self._setup.topology.num_replicas

    @property
    def is_unread(self) -> bool:
        """Whether nothing was read yet."""
        return self._run is None and self._slots is None

    @property
    def worker_iterator(self) -> Any:
        """The iterator of torch that holds persistent workers."""
        return None if self._slots is None else self._slots.loader._iterator

    def describe(self) -> str:
        """How the stream is divided and resumed, in words."""
        sources = self.config.sources.values()
        if self._setup.is_loader:
            divided = "is no DataLoader: each rank trains on what its own gives, without seed_samples"
        elif any(source.shards.pinned for source in sources):
            divided = "is a stream: every rank and worker trains on what its own dataset gives it"
        else:
            number = sum(source.shards.num_shards for source in sources)
            divided = f"is a stream: its {number} shards are shared evenly among ranks and workers"
        again = "; ".join(sorted({source.shards.reread for source in sources} - {""}))
        return f"{divided}, and a resume {f'reads it again, because {again}' if again else 'goes on within it'}."

    def prepare(self, label: str, *, limit: int | None = None, lag: int = 0, repeats: bool = False) -> None:
        """Serve a trainer, which never begins an epoch again of which it has trained on something.

        Args:
            label: Tells the loaders of a trainer apart, the same on all ranks.
            limit: Steps after which epochs end at the latest; the next goes on from there.
            lag: So many steps ago may be asked for.
            repeats: Begin every epoch as the first: to overfit on its batches.
        """
        self._label, self._lag, self._repeats, self._is_prepared = label, lag, repeats, True
        if limit is not None:
            self._limit = limit if self._limit is None else min(limit, self._limit)

    def read(self, epoch: int, step: int, on_end: Callable[[int], None] = lambda steps: None) -> Iterator[Any]:
        """The batches from ``step`` to the end of the epoch.

        Args:
            epoch: The epoch.
            step: Where to begin.
            on_end: Called with the number of steps of the epoch before its last batch is handed over, or at its end.

        Raises:
            StreamError: A stream broke off, here or on another rank.
            PositionError: Nobody knows where the stream stands before ``step``.
        """
        self._forget_end(epoch)
        run, endless = self._run_at(epoch, step), self._setup.options.steps_per_epoch is not None
        num_served = run.num_served
        # A loader may use the memory of a batch again for the next, which is asked for ahead only if it has to be.
        looks_ahead = not endless and not (self._setup.is_loader and self._limit is not None)
        while self._limit is None or step < self._limit:
            if not run.goes_on(num_served):
                # Another iteration has taken over what is read.
                run = self._run_at(epoch, step)
            if not run.has_next():
                run = self._with_batches(run, at_start=not step)
                if not run.has_next():
                    break
            batch = run.next()
            step, num_served = step + 1, run.num_served
            self._know(epoch, step, _Known(None, run, num_served))
            is_last = step == self._limit
            if is_last:
                self._begin_next(epoch, step, self._known[epoch, step])
            elif looks_ahead:
                run, before = self._shared_if_over(run), run
                is_last = not run.has_next()
                if is_last:
                    self._begin_next(epoch, step, _Known(self._following(run)), is_over=True)
                elif run is not before:
                    num_served = 0
                    self._know(epoch, step, _Known(None, run))
            if is_last:
                on_end(step)
            yield batch
            if is_last:
                return
        at_limit = step == self._limit
        known = self._known[epoch, step] if at_limit else _Known(self._following(run))
        self._begin_next(epoch, step, known, is_over=not at_limit)
        on_end(step)

    def knows(self, epoch: int, step: int) -> bool:
        """Whether the stream was read up to this step, or brought there."""
        return (epoch, step) in self._known or (epoch, step) in self._origin

    def state_at(self, epoch: int, step: int) -> StreamState:
        """Where all worker slots stand before ``step`` of ``epoch``.

        Raises:
            PositionError, StreamError: Nobody knows, or not any more.
        """
        key = epoch, step
        known = self._known.get(key, self._origin.get(key))
        if known is not None and known.run is not None:
            return known.run.state_at(known.num_served)
        if known is not None and known.state is not None:
            return known.state
        if step:
            raise PositionError(
                f"Where {self.name} stood before step {step} of epoch {epoch} is not known: it was not read there, and "
                "no state of it was loaded. Resume from a checkpoint that holds the data's state, as runs with this "
                "package's data module or callback write it, or begin with an epoch."
            )
        return self._setup.beginning(epoch)

    def go_on(self, progress: Progress) -> None:
        """Know from the details of a progress where all worker slots stand, on the present ranks.

        Raises:
            StateError: It cannot be continued on these ranks and workers, or with this configuration.
        """
        data, where = progress.details, f"The progress of {self.name}"
        saved = self._setup.config_on(data["num_replicas"], data["workers"])
        state = self._setup.here(StreamState.from_dict(data, saved), where)
        again = state.read_again()
        if again and "replay" in self._setup.accept:
            # As without this package: what is left of the epoch is the beginning of the data.
            state, again = state.begun_again(), {}
        if again and self._setup.options.replay == "refuse":
            remedy = 'Pass replay="warn" to read them again, or give the dataset state_dict and load_state_dict.'
            saying = f"{sum(again.values())} samples of {', '.join(again)} to be read again"
            raise StateMismatchError(
                [Difference(path="replay", saved=saying, present="refuse", remedy=remedy)], where=where
            )
        self._forget_end(progress.epoch)
        self._know(progress.epoch, progress.consumed, _Known(state))

    def begin_at(self, progress: Progress) -> None:
        """Let a pass begin at a progress of which no state says where the stream stood, within an epoch too."""
        self._know(progress.epoch, progress.consumed, _Known(self._setup.beginning(progress.epoch)))

    def end_at(self, progress: Progress) -> None:
        """The epoch of a known progress ends there: the next goes on from it."""
        key = progress.epoch, progress.consumed
        if key in self._known:
            self._begin_next(*key, self._known[key])

    def end_workers(self) -> None:
        """End workers, persistent ones too."""
        if self._run is not None:
            self._run.close()
        if self._slots is not None:
            self._slots.shut_down()

    @property
    def _keep(self) -> int:
        return _READ_AHEAD + self._lag

    def _run_at(self, epoch: int, step: int) -> StreamRun:
        known = self._known.get((epoch, step))
        run = None if known is None else known.run
        if known is not None and run is not None and run is self._run and run.goes_on(known.num_served):
            # Its batches are read ahead already.
            if not self._is_prepared:
                self._origin = {(epoch, step): _Known(run.state_at(known.num_served))}
            return run
        state = self._setup.here(self.state_at(epoch, step), "The stream")
        again = state.read_again(range(self._setup.topology.rank, state.num_slots, state.num_replicas))
        started = time.perf_counter()
        run = self._begin(state)
        if again and run.has_next() and not run.is_broken:
            why = "; ".join(sorted({source.shards.reread for source in self.config.sources.values()}))
            warnings.warn(
                f"{sum(again.values())} {'batches' if self._setup.is_loader else 'samples'} of {', '.join(again)} were "
                f"read again, and left out, to go on in epoch {epoch}, which took "
                f"{time.perf_counter() - started:.1f} s, because {why}.",
                StatefulWarning,
                stacklevel=3,
            )
        self._know(epoch, step, _Known(state))
        self._origin = {(epoch, step): _Known(state)}
        return run

    def _begin(self, state: StreamState) -> StreamRun:
        setup = self._setup
        if self._run is not None:
            self._run.close()
        if self._slots is None:
            self._slots = SlotLoader(setup.loader, self.config, setup.own_seed if setup.seed_samples else None)
        self._warn_of_many_reads(state)
        connect = partial(self._connect, state) if self._is_joined() else None
        self._run = StreamRun(state, self._slots, setup.topology, connect, seed=setup.own_seed, keep=self._keep)
        return self._run

    def _begin_after(self, run: StreamRun, state: StreamState) -> StreamRun:
        """Begin where a run is over."""
        # What other ranks have published in it is about to be deleted.
        late = [(at, known) for at, known in self._known.items() if known.run is run]
        for at, known in late[len(late) - self._lag - 1 :]:
            self._known[at] = _Known(run.state_at(known.num_served))
        return self._begin(state)

    def _with_batches(self, run: StreamRun, *, at_start: bool) -> StreamRun:
        """The run that goes on in an epoch: itself, one over what other ranks have left, or one over the next pass."""
        run = self._shared_if_over(run)
        endless, has_limit = self._setup.options.steps_per_epoch is not None, self._limit is not None
        for _ in range(_MOST_EMPTY):
            # A limited epoch may begin where a pass ends; a whole pass in which a rank has nothing is no epoch.
            has_none = self._is_joined() and not run.num_served and not run.begun.steps + run.begun.steps_before
            begins = at_start and (has_limit or has_none) and not self._setup.is_loader
            if run.has_next() or not (endless or begins):
                return run
            run = self._shared_if_over(self._begin_after(run, self._following(run)))
        if run.has_next():
            return run
        raise ConfigurationError(
            f"{self.name} has given no batch to all ranks in {_MOST_EMPTY} passes. Use fewer ranks and workers, "
            "or more and fuller shards."
        )

    def _shared_if_over(self, run: StreamRun) -> StreamRun:
        """A run over what other ranks have left, shared evenly, where a run is over; itself where nothing is left."""
        if run.has_next() or not self._is_joined():
            return run
        shared = run.final_state.shared_anew()
        return run if shared is None else self._begin_after(run, shared)

    def _following(self, run: StreamRun) -> StreamState:
        final = run.final_state
        if self._setup.options.exact or (final.num_replicas > 1 and not self._is_joined()):
            # Each rank ends for itself.
            return self._setup.beginning(final.epoch + 1)
        return final.following()

    def _begin_next(self, epoch: int, step: int, known: _Known, *, is_over: bool = False) -> None:
        """Know where the epoch after ``epoch``, which ends before ``step``, begins; ``is_over``: with a pass."""
        self.ended = epoch, step
        if self._repeats:
            known = _Known(self._setup.beginning(0))
        elif self._setup.is_loader and not is_over:
            state = known.state if known.run is None else known.run.state_at(known.num_served)
            known = _Known(None if state is None else state.following())
        self._know(epoch + 1, 0, known)

    def _know(self, epoch: int, step: int, known: _Known) -> None:
        self._known[epoch, step] = known
        self._known.move_to_end((epoch, step))
        while len(self._known) > self._keep:
            self._known.popitem(last=False)

    def _forget_end(self, epoch: int) -> None:
        """An epoch that is read again, perhaps on other ranks, may have another end."""
        if self.ended is not None and self.ended[0] >= epoch:
            self.ended = None

    def _is_joined(self) -> bool:
        """Whether there are other ranks to be in step with."""
        if self.num_replicas == 1 or self._setup.options.exact:
            return False
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def _connect(self, state: StreamState, describe: Callable[[int, Record], str]) -> RankSync:
        topology, name = self._setup.topology, self.name
        world = torch.distributed.get_world_size()
        if world != topology.num_replicas:
            raise ConfigurationError(
                f"{world} processes are {topology.num_replicas} data-parallel ranks. Streams need one process for each "
                "rank, as under DDP or FSDP."
            )
        if self._label is None:
            _COUNTED[name] += 1
            self._label = f"{name} {_COUNTED[name]}"
        where = f"step {state.steps} of pass {state.epoch}, state {digest(state.to_dict())}"
        read = {"workers": state.num_workers, "steps_per_epoch": self._setup.options.steps_per_epoch}
        return RankSync(
            torch.distributed.distributed_c10d._get_default_store(),
            topology,
            label=self._label,
            keep=self._keep,
            timeout=self._setup.options.timeout,
            describe=describe,
            terms={**self.config.describe(), **read, "progress": where},
        )

    def _warn_of_many_reads(self, state: StreamState) -> None:
        """Say once what it costs where there are more worker slots than shards."""
        for name, slots in state.slices.items():
            num_shards = state.config.sources[name].shards.num_shards
            slices = [(one.of.epoch, shard) for slot in slots for one in slot for shard in one.of.shards]
            times = Counter(slices)
            is_quiet = self._has_warned or self._setup.options.exact or num_shards >= state.num_slots
            if is_quiet or len(slices) <= _MANY_READS * len(times):
                continue
            self._has_warned = True
            several, of = sum(1 for number in times.values() if number > 1), f" of source {name!r}" if name else ""
            workers = num_shards // state.num_replicas
            fewer = f"num_workers={workers}, or " if workers else ""
            warnings.warn(
                f"{state.num_replicas} ranks with {state.num_workers} workers each are {state.num_slots} worker slots, "
                f"more than the {num_shards} shards{of} that {self.name} has. So {several} shards are read by several "
                f"slots, each of which keeps its part of the samples: {len(slices) / len(times):.1f} times as much "
                f"work for reading and decoding. Use {fewer}more and smaller shards (Hugging Face: dataset.reshard() "
                "for parquet files).",
                StatefulWarning,
                stacklevel=2,
            )
