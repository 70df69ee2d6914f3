"""Reads a stream of shards pass by pass, each in one run or more, in even shares of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lightning_stateful.core.order import UNKNOWN, Progress
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.stream_loader.options import StreamSetup
from lightning_stateful.stream_loader.reader import StreamReader
from lightning_stateful.stream_loader.recent_states import ServedState
from lightning_stateful.stream_loader.stream_run import StreamRun
from lightning_stateful.stream_nodes.document_packer import packed_otherwise
from lightning_stateful.streams.stream_state import StreamState

# Passes without a step, one after the other, that are put up with.
_MOST_EMPTY = 4


class StreamOrder(StreamReader):
    """Reads a stream of shards.

    An epoch is a pass over the stream unless it is limited, and then the next goes on from there. A pass is read in one
    run or more: where the first rank has nothing left, what the others have is shared evenly, until no step happens on
    all ranks.
    """

    kind: ClassVar[str] = "stream"
    setup: StreamSetup
    _repeats = False

    def convert(self, progress: Progress, saved: Mapping[str, Any]) -> Progress:
        """The progress under other settings, packing among them; see :meth:`StreamReader.convert`."""
        if progress.details and _packing_in(saved) != _packing_in(self.config()):
            progress = replace(progress, details=packed_otherwise(progress.details))
        return super().convert(progress, saved)

    def prepare(self, label: str, *, limit: int | None = None, lag: int = 0, repeats: bool = False) -> None:
        """Serve a trainer; see :meth:`StreamReader.prepare`."""
        super().prepare(label, limit=limit, lag=lag)
        self._repeats = repeats

    def number_samples(self) -> None:
        """Let batches say the numbers of their samples, unless workers have the settings already."""
        if self.is_unread:
            self.setup.config = self.setup.config.numbered()

    def read(self, epoch: int, step: int) -> Iterator[Any]:
        """The batches from ``step`` to the end of the epoch; see :meth:`StreamReader.read`."""
        self._forget_end(epoch)
        run = self._run_at(epoch, step)
        num_served = run.num_served
        looks_ahead = self.setup.options.steps_per_epoch is None
        while step < self._limit:
            if not run.goes_on(num_served):
                # Another iteration has taken over what is read.
                run = self._run_at(epoch, step)
            if not run.has_next():
                run = self._with_batches(run, at_start=not step)
                if run.is_over:
                    break
            batch, self.given = run.next(), run.given
            step += 1
            self.recent.note(epoch, step, ServedState(run))
            is_last = step == self._limit
            if looks_ahead and not is_last:
                if not run.has_next():
                    run = self._shared_if_over(run)
                    if not run.is_over:
                        self.recent.note(epoch, step, ServedState(run))
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

    def _begin(self, state: StreamState) -> StreamRun:
        self.setup.warn_of_many_reads(state)
        return super()._begin(state)

    def _with_batches(self, run: StreamRun, *, at_start: bool) -> StreamRun:
        """The run that follows in an epoch where one is over: over what other ranks have left, or the next pass."""
        run = self._shared_if_over(run)
        for _ in range(_MOST_EMPTY):
            # A limited epoch may begin where a pass ends; a whole pass in which a rank has nothing is no epoch.
            has_none = self._is_joined and not run.num_served and not run.begun.steps + run.begun.steps_before
            # Where no rank has anything, the epoch is over, as it is on a single rank.
            has_none = has_none and (run.has_next() or not run.gave_nothing)
            begins = at_start and (self._limit != UNKNOWN or has_none)
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
        final: StreamState = run.final_state
        ends_alone = self.setup.options.exact or (final.num_replicas > 1 and not self._is_joined)
        following: StreamState = self.setup.beginning(final.epoch + 1) if ends_alone else final.following()
        return following

    def _end(self, epoch: int, step: int, run: StreamRun | None = None) -> None:
        self.ended = epoch, step
        if self._repeats:
            self.recent.note(epoch + 1, 0, self.setup.beginning(0))
        elif run is not None and step != self._limit:
            self.recent.note(epoch + 1, 0, self._following(run))
        else:
            self.recent.copy(epoch + 1, 0, epoch, step)


def _packing_in(config: Mapping[str, Any]) -> list[Any]:
    """The settings of packing in a configuration, of each source."""
    sources = config.get("sources", {})
    return [config.get("packing"), *(sources[name].get("packing") for name in sorted(sources))]
