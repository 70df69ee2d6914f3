"""A stream over all epochs on this rank: pass after pass, and where all lanes stood at each of the latest steps."""

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
from lightning_stateful.loaders.pass_run import PassRun
from lightning_stateful.loaders.rank_reader import RankReader
from lightning_stateful.loaders.stream_setup import StreamSetup
from lightning_stateful.samplers.fast_forward import digest
from lightning_stateful.streams.exchange import Exchange
from lightning_stateful.streams.lane import StreamConfig
from lightning_stateful.streams.standing import Standing

# Steps that a trainer may have fetched beyond those that the model was trained on, and some more.
_READ_AHEAD = 16
# Passes without a step, one after the other, that are put up with.
_MOST_EMPTY = 4
# Of each name, loaders in this process that have met those of other ranks.
_COUNTED: Counter[str] = Counter()


class _Known(NamedTuple):
    """Where all lanes stand before some step: said outright, or by a run and how much that had served."""

    standing: Standing | None
    run: PassRun | None = None
    served: int = 0


class StreamCourse:
    """Reads a stream from any step that it has come by, and knows where all lanes stood there.

    Args:
        setup: How the stream is read and served on the present ranks and workers.
    """

    def __init__(self, setup: StreamSetup) -> None:
        self._setup, self._options = setup, setup.options
        self._known: OrderedDict[tuple[int, int], _Known] = OrderedDict()
        # Where the latest iteration began, however long ago.
        self._origin: dict[tuple[int, int], _Known] = {}
        self._run: PassRun | None = None
        self._reader: RankReader | None = None
        self._limit = setup.options.steps_per_epoch
        self._repeats = self._is_prepared = False
        # The latest epoch that has ended, and its steps.
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
        return {**vars(self), "_known": known, "_origin": origin, "_run": None, "_reader": None}

    @property
    def config(self) -> StreamConfig:
        """How the stream is read on the present ranks and workers."""
        return self._setup.config

    @property
    def name(self) -> str:
        """What people know the stream by."""
        return self._setup.name

    @property
    def num_replicas(self) -> int:
        """The present number of ranks."""
        return self._setup.topology().num_replicas

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

    def say(self) -> str:
        """How it is dealt out and resumed, in words."""
        sources = self.config.sources.values()
        if self._setup.is_loader:
            dealt = "is no DataLoader: each rank trains on what its own gives, without seed_samples"
        elif any(source.shards.pinned for source in sources):
            dealt = "is a stream: every rank and worker trains on what its own dataset gives it"
        else:
            number = sum(source.shards.num_shards for source in sources)
            dealt = f"is a stream: its {number} shards are dealt out to ranks and workers"
        again = "; ".join(sorted({source.shards.reread for source in sources} - {""}))
        return f"{dealt}, and a resume {f'reads it again, because {again}' if again else 'goes on within it'}."

    @property
    def _keep(self) -> int:
        return _READ_AHEAD + self._lag

    def read(self, epoch: int, step: int) -> Iterator[tuple[Any, bool]]:
        """The batches from ``step`` to the end of the epoch, and whether each is the last.

        Raises:
            StreamError: A stream broke off, here or on another rank.
            PositionError: Nobody knows where the stream stands before ``step``.
        """
        self._forget_end(epoch)
        run = self._run_at(epoch, step)
        served = run.served
        endless, joined = self._options.steps_per_epoch is not None, self._is_joined()
        # A loader may use the memory of a batch again for the next, which is asked for ahead only if it has to be.
        looks_ahead = not endless and not (self._setup.is_loader and self._limit is not None)
        while self._limit is None or step < self._limit:
            if not run.goes_on(served):
                # Another iteration has taken over what is read.
                run = self._run_at(epoch, step)
            if not run.has_next():
                # A limited epoch may begin where a pass ends; a whole pass in which a rank has nothing is no epoch.
                begins = not step and (self._limit is not None or (joined and run.is_empty))
                if not endless and (self._setup.is_loader or not begins):
                    break
                run = self._next_with_batches(run)
            batch = run.next()
            step, served = step + 1, run.served
            self._know(epoch, step, _Known(None, run, served))
            is_last = step == self._limit
            if is_last:
                self._begin_next(epoch, step, _Known(None, run, served))
            elif looks_ahead and not run.has_next():
                is_last = True
                self._begin_next(epoch, step, _Known(self._following(run)), is_over=True)
            yield batch, is_last
            if is_last:
                return
        at_limit = step == self._limit
        known = self._known[epoch, step] if at_limit else _Known(self._following(run))
        self._begin_next(epoch, step, known, is_over=not at_limit)

    def knows(self, epoch: int, step: int) -> bool:
        """Whether the stream was read up to this step, or brought there."""
        return (epoch, step) in self._known or (epoch, step) in self._origin

    def standing_at(self, epoch: int, step: int) -> Standing:
        """Where all lanes stand before ``step`` of ``epoch``.

        Raises:
            PositionError, StreamError: Nobody knows, or not any more.
        """
        key = epoch, step
        known = self._known.get(key, self._origin.get(key))
        if known is not None and known.run is not None:
            return known.run.standing_at(known.served)
        if known is not None and known.standing is not None:
            return known.standing
        if step:
            raise PositionError(
                f"Where {self.name} stood before step {step} of epoch {epoch} is not known: it was not read there, and "
                "no state of it was loaded. Resume from a checkpoint that holds the data's state, as runs with this "
                "package's data module or callback write it, or begin with an epoch."
            )
        return self._setup.beginning(epoch)

    def go_on(self, progress: Progress) -> None:
        """Know from the details of a progress where all lanes stand, on the present ranks.

        Raises:
            StateError: It cannot be continued on these ranks and workers, or with this configuration.
        """
        data, where = progress.details, f"The progress of {self.name}"
        saved = self._setup.config_on(data["num_replicas"], data["workers"])
        standing = self._setup.here(Standing.from_dict(data, saved), where)
        again = standing.read_again()
        if again and "replay" in self._setup.accept:
            # As without this package: what is left of the epoch is the beginning of the data.
            standing, again = standing.begun_again(), {}
        if again and self._options.replay == "refuse":
            remedy = 'Pass replay="warn" to read them again, or give the dataset state_dict and load_state_dict.'
            saying = f"{sum(again.values())} samples of {', '.join(again)} to be read again"
            raise StateMismatchError(
                [Difference(path="replay", saved=saying, present="refuse", remedy=remedy)], where=where
            )
        self._forget_end(progress.epoch)
        self._know(progress.epoch, progress.consumed, _Known(standing))

    def begin_at(self, progress: Progress) -> None:
        """Let a pass begin at a progress of which no state says where the stream stood, within an epoch too."""
        self._know(progress.epoch, progress.consumed, _Known(self._setup.beginning(progress.epoch)))

    def end_at(self, progress: Progress) -> None:
        """The epoch of a known progress ends there: the next goes on from it."""
        key = progress.epoch, progress.consumed
        if key in self._known:
            self._begin_next(*key, self._known[key])

    def _forget_end(self, epoch: int) -> None:
        """An epoch that is read again, perhaps on other ranks, may have another end."""
        if self.ended is not None and self.ended[0] >= epoch:
            self.ended = None

    def end_workers(self) -> None:
        """End workers, persistent ones too."""
        if self._run is not None:
            self._run.close()
        if self._reader is not None:
            self._reader.shut_down()

    @property
    def iterator(self) -> Any:
        """Persistent workers."""
        return None if self._reader is None else self._reader.loader._iterator

    def _run_at(self, epoch: int, step: int) -> PassRun:
        known = self._known.get((epoch, step))
        if known is not None and known.run is not None and known.run is self._run and known.run.goes_on(known.served):
            # Its batches are read ahead already.
            if not self._is_prepared:
                self._origin = {(epoch, step): _Known(known.run.standing_at(known.served))}
            return known.run
        standing = self._setup.here(self.standing_at(epoch, step), "The stream")
        again = standing.read_again(range(self._setup.topology().rank, standing.num_lanes, standing.num_replicas))
        started = time.perf_counter()
        run = self._begin(standing)
        if again and run.has_next() and not run.is_broken:
            why = "; ".join(sorted({source.shards.reread for source in self.config.sources.values()}))
            warnings.warn(
                f"{sum(again.values())} {'batches' if self._setup.is_loader else 'samples'} of {', '.join(again)} were "
                f"read again, and left out, to go on in epoch {epoch}, which took "
                f"{time.perf_counter() - started:.1f} s, because {why}.",
                StatefulWarning,
                stacklevel=3,
            )
        self._know(epoch, step, _Known(standing))
        self._origin = {(epoch, step): _Known(standing)}
        return run

    def _begin(self, standing: Standing) -> PassRun:
        setup = self._setup
        if self._run is not None:
            self._run.close()
        if self._reader is None:
            self._reader = RankReader(setup.loader, self.config, setup.seed, seed_samples=setup.seed_samples)
        self._run = PassRun(
            standing,
            self._reader,
            setup.topology(),
            partial(self._connect, standing) if self._is_joined() else None,
            seed=setup.seed,
            keep=self._keep,
        )
        return self._run

    def _next_with_batches(self, run: PassRun) -> PassRun:
        """The next pass; the next but one, and so on, where ranks have nothing and are dealt what others have left."""
        for _ in range(_MOST_EMPTY):
            run = self._next_pass(run)
            if run.has_next():
                return run
        raise ConfigurationError(
            f"{self.name} has given no batch to all ranks in {_MOST_EMPTY} passes. Use fewer ranks and workers, "
            "or more and fuller shards."
        )

    def _next_pass(self, run: PassRun) -> PassRun:
        following = self._following(run)
        # The other ranks' places of this pass are about to be taken away.
        late = [(at, known) for at, known in self._known.items() if known.run is run]
        for at, known in late[len(late) - self._lag - 1 :]:
            self._known[at] = _Known(run.standing_at(known.served))
        return self._begin(following)

    def _following(self, run: PassRun) -> Standing:
        final = run.final()
        if self._options.exact or (final.num_replicas > 1 and not self._is_joined()):
            # Each rank ends for itself.
            return self._setup.beginning(final.epoch + 1)
        return final.following()

    def _begin_next(self, epoch: int, step: int, known: _Known, *, is_over: bool = False) -> None:
        """Know where the epoch after ``epoch``, which ends before ``step``, begins; ``is_over``: with a pass."""
        self.ended = epoch, step
        if self._repeats:
            known = _Known(self._setup.beginning(0))
        elif self._setup.is_loader and not is_over:
            standing = known.standing if known.run is None else known.run.standing_at(known.served)
            known = _Known(None if standing is None else standing.following())
        self._know(epoch + 1, 0, known)

    def _know(self, epoch: int, step: int, known: _Known) -> None:
        self._known[epoch, step] = known
        self._known.move_to_end((epoch, step))
        while len(self._known) > self._keep:
            self._known.popitem(last=False)

    def _is_joined(self) -> bool:
        """Whether there are other ranks to agree with."""
        if self.num_replicas == 1 or self._options.exact:
            return False
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def _connect(self, standing: Standing, describe: Callable[[int, str], str]) -> Exchange:
        topology, name = self._setup.topology(), self.name
        world = torch.distributed.get_world_size()
        if world != topology.num_replicas:
            raise ConfigurationError(
                f"{world} processes are {topology.num_replicas} data-parallel ranks. Streams need one process for each "
                "rank, as under DDP or FSDP."
            )
        if self._label is None:
            _COUNTED[name] += 1
            self._label = f"{name} {_COUNTED[name]}"
        return Exchange(
            torch.distributed.distributed_c10d._get_default_store(),
            topology,
            label=self._label,
            first_step=0,
            keep=self._keep,
            timeout=self._options.timeout,
            describe=describe,
            terms=self._terms(standing),
        )

    def _terms(self, standing: Standing) -> dict[str, Any]:
        """What has to be equal on all ranks."""
        where = f"step {standing.steps} of pass {standing.epoch}, state {digest(standing.to_dict())}"
        read = {"workers": standing.num_workers, "steps_per_epoch": self._options.steps_per_epoch}
        return {**self.config.describe(), **read, "progress": where}
