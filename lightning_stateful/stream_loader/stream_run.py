"""Reads the batches of a rank in step with the other ranks, and knows where all worker slots stood after each."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import PositionError, Remark, StatefulWarning, StreamError
from lightning_stateful.samplers.rank_exchange import collectives_begun
from lightning_stateful.stream_loader.rank_store import StateText, complete, decode
from lightning_stateful.stream_loader.rank_sync import RankSync, Record
from lightning_stateful.stream_loader.worker_slots import Delivery, OpaqueState, SlotLoader
from lightning_stateful.stream_nodes.nodes import NodeState
from lightning_stateful.stream_nodes.numbered import NOTHING, Given

# Where the worker slots of this rank stand; a worker's is JSON until somebody wants it.
SlotStates = list[NodeState | StateText]
# A batch, where the slots stand after it, and what each source gave to it.
_Read = tuple[Any, SlotStates, Given]
_log = logging.getLogger("lightning.pytorch.lightning_stateful")


class StreamRun:
    """The batches of this rank from a stream's state on, until the first rank has nothing left.

    Args:
        begun: Where to begin.
        slots: Reads this rank's worker slots.
        topology: The ranks.
        connect: Makes what synchronizes the ranks, from what says in words what a rank reads; None if there is nobody
            to be in step with.
        seed: Seeds the workers.
        limit: Batches that nobody asks more than, and that no rank reads more than to be in step with the others.

    Attributes:
        begun: Where it began.
        num_served: Batches that were handed over.
        states: Where the slots of this rank stood after the latest of them.
        given: The part that sources have in the latest of them.
        is_closed: Whether it reads no more.
        is_iterated: Whether somebody iterates over it.
        calls_collectives: Whether reading a batch in this process has begun a collective.
        is_over: Whether :meth:`has_next` has found that there is no further batch on all ranks.
    """

    begun: Any
    given: Given = NOTHING
    is_closed: bool
    is_iterated = False
    calls_collectives = False
    is_over: bool
    num_served: int
    states: SlotStates

    def __init__(
        self,
        begun: Any,
        slots: SlotLoader,
        topology: Topology,
        connect: Callable[[Callable[[int, Record], str]], RankSync] | None,
        *,
        seed: int,
        limit: int,
    ) -> None:
        self.begun, self.num_served, self.is_closed, self._limit = begun, 0, False, limit
        self._slots, self._topology = slots, topology
        self._sync = None if connect is None else connect(self._describe)
        # Batches that were read ahead.
        self._buffer: deque[_Read] = deque()
        self._num_read = self._num_beyond = 0
        self._is_read = self.is_over = False
        # Met where this rank reads ahead, and where it has to be raised.
        self._error: Exception | None = None
        self._broken: Exception | None = None
        self._sure = -1  # The step of which it is known that it happens.
        rank = topology.rank
        tasks = begun.tasks(rank)
        self._states: SlotStates = [
            begun.config.open(task).state() if task.state is None else task.state
            for task in sorted(tasks, key=lambda task: task.worker)
        ]
        self._deliveries: Iterator[Delivery] | None = slots.read(tasks, seed)
        self._skip_unknown()
        self.states = self._states

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: Some rank has no further batch.
            StreamError: A stream broke off, here or on another rank.
        """
        if not self.has_next():
            raise StopIteration
        if self._broken is not None:
            broken = self._broken
            if self._deliveries is None:
                self.close()
            else:
                # As torch, it goes on behind the error, if anybody asks.
                self._error, self._broken, self._sure = None, None, -1
            try:
                raise broken
            finally:
                del broken  # Its frames hold this one, and that the workers.
        batch, self.states, self.given = self._buffer.popleft()
        self.num_served += 1
        return batch

    def has_next(self) -> bool:
        """Whether another batch follows on all ranks, or an error in its place."""
        step = self.num_served
        if self._sure == step or self.is_over or self._broken is not None:
            return not self.is_over
        sync = self._sync
        self._read_until(step + 1 if sync is None else sync.horizon(step))
        if self._error is not None and not self._buffer:
            self._broken = self._error
        elif sync is None:
            self.is_over = not self._buffer
        else:
            try:
                self.is_over = not sync.happens(step)
            except StreamError as error:
                self._broken = error
        if not self.is_over:
            self._sure = step
        return not self.is_over

    @property
    def is_broken(self) -> bool:
        """Whether asking for the next batch raises."""
        return self._broken is not None

    def goes_on(self, num_served: int) -> bool:
        """Whether the next batch is the one after ``num_served``."""
        return num_served == self.num_served and not self.is_closed

    def state_at(self, num_served: int, states: SlotStates) -> Any:
        """The positions of all worker slots after ``num_served`` batches of each rank.

        Args:
            num_served: The number of batches.
            states: :attr:`states` after these.

        Raises:
            StreamError: That is too long ago, or what other ranks have published is not there.
        """
        if not num_served:
            return self.begun
        if self._sync is not None:
            return self._state_of(self._sync.records_at(num_served), num_served)
        return self._state_alone(states, num_served)

    @cached_property
    def final_state(self) -> Any:
        """The positions of all worker slots at the end; with other ranks, all ask for it."""
        if self._sync is not None:
            return self._state_of(self._sync.final_records(self.num_served), self.num_served)
        return self._state_alone(self._states, self.num_served)

    def read_beyond(self) -> None:
        """Read a batch that is not served, as of a loader that is asked for one more than the limit."""
        if self._sync is None:
            self.has_next()
        elif not self._num_beyond and self._error is None:
            self._num_beyond = 1
            with suppress(Exception):
                self._read()

    def left(self) -> Any:
        """The positions of all worker slots as a pass is left, be it at its end; with other ranks, all ask for it."""
        return self.final_state if self.is_over else self.state_at(self.num_served, self.states)

    def num_asked(self) -> list[int]:
        """By worker of a rank, the batches of the pass that it was asked for, be they handed over or not."""
        begun, sync = self.begun, self._sync
        if sync is None:
            return [
                _decoded(state)["batches"] + self._slots.num_outstanding(worker)
                for worker, state in enumerate(self._states)
            ]
        # As every rank can tell of the others: nobody has read further than to know that a step happens.
        ahead = min(sync.horizon(self.num_served if self.is_over else max(self._sure, 0)), self._limit)
        asked = begun.steps + ahead + self._num_beyond
        asked += self._slots.num_prefetched
        return [-(-(asked - worker) // begun.num_workers) for worker in range(begun.num_workers)]

    @property
    def gave_nothing(self) -> bool:
        """Whether no rank had a batch in a run that is over; all ranks ask for it."""
        return not self.num_served and all(state is not None for state in self.final_state.slots)

    def close(self) -> None:
        """Stop reading; where it stood can still be asked for until another run has a batch on all ranks."""
        self._deliveries, self.is_closed = None, True

    def _skip_unknown(self) -> None:
        """Read again what this rank was given, if the state does not say where its slots stood."""
        begun, rank = self.begun, self._topology.rank
        if not begun.steps or any(state is not None for state in begun.slots[rank :: begun.num_replicas]):
            return
        for number in range(begun.steps):
            if self._read() is None:
                raise PositionError(
                    f"The state says that each rank was given {begun.steps} batches, but not where rank {rank} stood, "
                    f"and this rank has only {number}. Ranks without a process group, and in evaluation, write down "
                    "only where they stood themselves: resume each from its own state, or have the process group begin "
                    "before the stream is read."
                )

    def _read_until(self, number: int) -> None:
        """Read ahead until so many batches were read, and publish where that leads."""
        sync = self._sync
        while self._num_read < number and self._error is None and not self._is_read:
            if sync is not None and self._num_read == self._limit:
                self._is_read = True
                sync.publish(self._states, is_end=True)
                return
            try:
                read = self._read()
            except Exception as error:
                # What was read before comes first.
                self._error = error
                if sync is not None:
                    sync.publish_failure(f"{type(error).__name__}: {error}")
                return
            if read is None:
                self._is_read = True
                if sync is not None:
                    sync.publish(self._states, is_end=True)
                return
            self._num_read += 1
            self._buffer.append(read)
            if sync is not None:
                sync.publish(self._states)

    def _read(self) -> _Read | None:
        """The next batch of this rank; None at its end."""
        deliveries, begun = self._deliveries, collectives_begun()
        try:
            while deliveries is not None and (delivery := next(deliveries, None)) is not None:
                self._note(delivery)
                if not delivery.is_end:
                    return delivery.batch, self._states, delivery.given
        except Exception as error:
            rank = self._topology.rank
            explained = self._slots.explained(error, lambda: self._shards_in(rank, list(map(_decoded, self._states))))
            if explained is not error or self._sync is not None:
                self._deliveries = None
            try:
                raise explained from explained.__cause__
            finally:
                del explained
        finally:
            self.calls_collectives = self.calls_collectives or collectives_begun() != begun
        self._deliveries = None
        return None

    def _note(self, delivery: Delivery) -> None:
        """Note where the slot that has delivered stands now."""
        worker, state = delivery.worker, delivery.state
        if delivery.said:
            for text in self._slots.unsaid(delivery):
                if isinstance(text, Remark):
                    _log.info(text)
                else:
                    warnings.warn(text, StatefulWarning, stacklevel=2)
        # A new list: the old one is part of the history.
        states = self._states = self._states.copy()
        if isinstance(state, dict):
            states[worker] = state
        elif isinstance(state, OpaqueState):
            states[worker] = state.state
        else:
            before = states[worker]
            states[worker] = complete(state, before if isinstance(before, StateText) else None)

    def _shards_in(self, rank: int, states: Sequence[NodeState]) -> list[str]:
        """The shards that a rank's slots have open, by name."""
        begun = self.begun
        slots = range(rank, begun.num_slots, begun.num_replicas)
        return sorted(
            {name for slot, state in zip(slots, states, strict=True) for name in begun.shards_at(slot, state)}
        )

    def _describe(self, rank: int, record: Record) -> str:
        return f"last known to read {', '.join(self._shards_in(rank, record)) or 'nothing more'}"

    def _state_of(self, records: Sequence[Record | None], num_served: int) -> Any:
        """The state in which all ranks stand at their records."""
        begun = self.begun
        slots: list[NodeState | None] = list(begun.slots)
        for rank, record in enumerate(records):
            if record is not None:
                slots[rank :: begun.num_replicas] = record
        return begun.at(tuple(slots), begun.steps + num_served)

    def _state_alone(self, states: SlotStates, num_served: int) -> Any:
        """The state of this rank; where the others stand by now, it does not know."""
        slots: list[NodeState | None] = [None] * self.begun.num_slots
        slots[self._topology.rank :: self.begun.num_replicas] = map(_decoded, states)
        return self.begun.at(tuple(slots), self.begun.steps + num_served)


def _decoded(state: NodeState | StateText) -> NodeState:
    """The state of a worker slot, which may be JSON."""
    return decode(state.text, state.large) if isinstance(state, StateText) else state
