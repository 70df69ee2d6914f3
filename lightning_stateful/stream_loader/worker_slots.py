"""Reads the worker slots of a rank, in this process or in torch's workers, in step with the other ranks."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data.dataloader import _DatasetKind, _InfiniteConstantSampler

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.core.steps import Topology
from lightning_stateful.errors import PositionError, StatefulError, StreamError
from lightning_stateful.samplers.rng import seed_randomness
from lightning_stateful.stream_loader.rank_store import Changes, StateEncoder, StateText, complete, decode
from lightning_stateful.stream_loader.rank_sync import RankSync, Record
from lightning_stateful.streams.nodes import NodeState
from lightning_stateful.user_loaders import copied, is_torchdatas

# Where the worker slots of this rank stand; a worker's is JSON until somebody wants it.
SlotStates = list[NodeState | StateText]
# What torch says when a worker is gone, or slow.
_OF_WORKERS = re.compile(r"DataLoader (worker|timed out)|Pin memory thread")


class OpaqueState:
    """A state that torch hands on as it is: it would copy a dict to pin what is in it to memory.

    Attributes:
        state: The state of a worker slot.
    """

    __slots__ = ("state",)

    def __init__(self, state: NodeState) -> None:
        self.state = state


class Delivery(NamedTuple):
    """What a worker slot hands over.

    Attributes:
        worker: Which of the rank's workers the slot is.
        state: Its state afterwards; as text, without large parts that it had before, if it comes from another process.
        batch: The batch; None in the last delivery, which only says where the slot ended.
        is_end: Whether it is the last.
    """

    worker: int
    state: OpaqueState | Changes
    batch: Any
    is_end: bool


class SlotDataset(IterableDataset[Delivery]):
    """The deliveries of one worker slot: of another one in each worker process, or of the only one in this process.

    Every other attribute is the user's dataset's, as a ``worker_init_fn`` may ask for.

    Args:
        config: How the stream is read.
        collate: Makes a batch of samples; of a single sample where the loader does not batch.
        dataset: The user's dataset.
        seed: Seeds what ``collate`` draws, by (seed, pass, slot, batch of the slot); None to leave it.
    """

    tasks: list[Any]
    queues: list[Any]
    _process: int | None

    def __init__(self, config: Any, collate: Callable[[Any], Any], dataset: Any, seed: int | None) -> None:
        if seed is not None:
            seed = None if collate in (default_collate, default_convert) else derive_seed("collate", seed)
        # Persistent workers hold a copy of this dataset from their first pass: tasks reach them through queues.
        own: dict[str, Any] = {"tasks": [], "queues": [], "_process": None}
        vars(self).update(own, _config=config, _collate=collate, _dataset=dataset, _seed=seed)

    def __iter__(self) -> Iterator[Delivery]:
        return _Deliveries(self)

    def task(self) -> tuple[Any, Callable[[NodeState], OpaqueState | Changes]]:
        """What this process reads, and what makes of a slot's state what is handed over."""
        info = get_worker_info()
        if info is None:
            return self.tasks[0], OpaqueState
        # The number of this process, before it takes on that of its slot.
        self._process = info.id if self._process is None else self._process
        task = self.queues[self._process].get() if self.queues else self.tasks[self._process]
        # Datasets that divide themselves see the number of the slot; in what all slots read they must not.
        seen = {"id": 0, "num_workers": 1} if self._config.hides_workers else {"id": task.worker}
        # A dataclass in newer versions of torch only.
        given = {name: getattr(info, name) for name in type(info).__annotations__}
        torch_worker._worker_info = type(info)(**{**given, **seen, "dataset": self._dataset})
        return task, StateEncoder().encode_changes

    def collated(self, samples: list[Any], task: Any, number: int) -> Any:
        """The batch of a slot of that number."""
        if self._seed is not None:
            seed_randomness(mixed_seed(self._seed, task.epoch, task.slot, task.steps_before, number))
        return self._collate(samples if self._config.is_batched else samples[0])

    def send_tasks(self) -> None:
        """Send persistent workers, which wait for them, their tasks."""
        for queue, task in zip(self.queues, self.tasks, strict=False):
            queue.put(task)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._dataset, name, value)


class _Deliveries:
    """The deliveries of a slot: the batches, and one that says where it ended. Behind an error they go on.

    Args:
        dataset: The dataset whose slot it is.
    """

    def __init__(self, dataset: SlotDataset) -> None:
        self._dataset = dataset
        self._slot: Any = None
        self._is_over = False

    def __iter__(self) -> _Deliveries:
        return self

    def __next__(self) -> Delivery:
        if self._is_over:
            raise StopIteration
        is_first = self._slot is None
        if is_first:
            self._task, self._encode = self._dataset.task()
            self._slot = self._dataset._config.open(self._task)
        slot, task = self._slot, self._task
        if is_first and task.waits:
            return Delivery(task.worker, self._encode(slot.state()), None, True)
        # What raises is over, as a generator is, unless it goes on; a batch that cannot be collated is left out.
        self._is_over = not slot.goes_on
        for samples in slot:
            self._is_over = False
            state = slot.state()
            batch = self._dataset.collated(samples, task, state["batches"])
            return Delivery(task.worker, self._encode(state), batch, False)
        self._is_over = True
        slot.close()
        return Delivery(task.worker, self._encode(slot.state()), None, True)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # As Python exits modules are gone already, and what is open is closed with the process.
        if self._slot is not None and not is_exiting():
            self._slot.close()


class SlotLoader:
    """Runs the worker slots of a rank in a copy of the user's loader, of its class and with its options.

    Args:
        loader: The user's loader.
        config: How the stream is read.
        seed: Seeds what ``collate_fn`` draws; None to leave it.

    Attributes:
        loader: The copy.
    """

    def __init__(self, loader: DataLoader[Any], config: Any, seed: int | None) -> None:
        self._original = loader
        self._dataset = SlotDataset(config, loader.collate_fn, loader.dataset, seed)
        self._generator = torch.Generator()
        # A loader of torchdata's would keep a state of its own.
        kind = DataLoader if is_torchdatas(loader) else type(loader)
        self.loader: Any = kind.__new__(kind)
        # Past torch's guard against changes.
        vars(self.loader).update(
            vars(copied(loader)),
            dataset=self._dataset,
            batch_size=None,
            batch_sampler=None,
            sampler=_InfiniteConstantSampler(),
            collate_fn=tuple,  # Plain tuples are sent from workers faster.
            drop_last=False,
            generator=self._generator,
            _dataset_kind=_DatasetKind.Iterable,
            _iterator=None,
            _IterableDataset_len_called=None,  # Of batches, and not of deliveries.
        )
        if loader.num_workers and loader.persistent_workers:
            context: Any = loader.multiprocessing_context or torch.multiprocessing
            self._dataset.queues = [context.SimpleQueue() for _ in range(loader.num_workers)]

    def read(self, tasks: Sequence[Any], seed: int) -> Iterator[Delivery]:
        """Begin to read; workers that are not persistent end as soon as nobody holds the iterator.

        Args:
            tasks: What each worker slot reads, the one first whose batch comes first.
            seed: Seeds torch's workers.
        """
        self._generator.manual_seed(seed)
        self._dataset.tasks = list(tasks)
        # What was set since the last time.
        vars(self.loader).update({name: getattr(self._original, name) for name in ("worker_init_fn", "timeout")})
        if not self.loader.num_workers and not self.loader.pin_memory:
            # What torch's iterator does here, without its bookkeeping for each batch.
            return iter(self._dataset)
        deliveries: Iterator[Any] = iter(self.loader)
        self._dataset.send_tasks()
        return map(Delivery._make, deliveries)

    def num_outstanding(self, process: int) -> int:
        """Deliveries that a persistent worker was asked for and that nobody has received."""
        tasks = getattr(self.loader._iterator, "_task_info", {})
        return sum(1 for task in tasks.values() if task[0] == process)

    def shut_down(self) -> None:
        """End persistent workers."""
        self.loader._iterator = None
        # Within Fabric.launch, Lightning records what is set on loaders, iterators too.
        vars(self.loader).pop("__pl_attrs_record", None)

    def explained(self, error: Exception, name_shards: Callable[[], list[str]]) -> Exception:
        """The error to raise where a worker is gone, or has raised.

        Args:
            error: What came in place of a delivery.
            name_shards: The shards that are being read, by name.
        """
        if self.loader.num_workers:
            _forget_frames(error)
        is_own = isinstance(error, StatefulError) or not isinstance(error, RuntimeError)
        if is_own or not _OF_WORKERS.search(str(error)):
            return error
        # Those that persist are not all there, or still at it.
        self.shut_down()
        broken_off = StreamError(
            f"The workers broke off: {error} By their last batches they had come to {', '.join(name_shards())}, and "
            "may have read on since. Nothing is lost: the state is that of the last batch handed over. Look for a "
            "worker out of memory or a slow disk, and resume."
        )
        broken_off.__cause__ = error
        return broken_off


class StreamRun:
    """The batches of this rank from a stream's state on, until the first rank has nothing left.

    Args:
        begun: Where to begin.
        slots: Reads this rank's worker slots.
        topology: The ranks.
        connect: Makes what synchronizes the ranks, from what says in words what a rank reads; None if there is nobody
            to be in step with.
        seed: Seeds the workers.

    Attributes:
        begun: Where it began.
        num_served: Batches that were handed over.
        states: Where the slots of this rank stood after the latest of them.
        is_closed: Whether it reads no more.
        is_over: Whether :meth:`has_next` has found that there is no further batch on all ranks.
    """

    def __init__(
        self,
        begun: Any,
        slots: SlotLoader,
        topology: Topology,
        connect: Callable[[Callable[[int, Record], str]], RankSync] | None,
        *,
        seed: int = 0,
    ) -> None:
        self.begun, self.num_served, self.is_closed = begun, 0, False
        self._slots, self._topology = slots, topology
        self._sync = None if connect is None else connect(self._describe)
        # Batches that were read ahead, and where this rank's slots stand after each.
        self._buffer: deque[tuple[Any, SlotStates]] = deque()
        self._num_read = 0
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
        seed = derive_seed("stream", seed, begun.epoch, begun.steps_before, rank)
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
                self._error = self._broken = None
            raise broken
        batch, self.states = self._buffer.popleft()
        self.num_served += 1
        return batch

    def has_next(self) -> bool:
        """Whether another batch follows on all ranks, or an error in its place."""
        if self._sure == self.num_served or self.is_over or self._broken is not None:
            return not self.is_over
        sync, step = self._sync, self.num_served
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
        """Where all worker slots stood after ``num_served`` batches of each rank.

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
        """Where all worker slots stand at the end; with other ranks, all ask for it."""
        if self._sync is not None:
            return self._state_of(self._sync.final_records(self.num_served), self.num_served)
        return self._state_alone(self._states, self.num_served)

    def left(self) -> Any:
        """Where all worker slots stand as a pass is left, be it at its end; with other ranks, all ask for it."""
        return self.final_state if self.is_over else self.state_at(self.num_served, self.states)

    def num_ahead(self) -> list[int]:
        """By worker of this rank, the batches that it was asked for beyond those of :meth:`left`."""
        left = self.left().slots[self._topology.rank :: self.begun.num_replicas]
        return [
            _decoded(read)["batches"] - (state or {"batches": 0})["batches"] + self._slots.num_outstanding(worker)
            for worker, (read, state) in enumerate(zip(self._states, left, strict=True))
        ]

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

    def _read(self) -> tuple[Any, SlotStates] | None:
        """The next batch of this rank, and where its slots stand then; None at its end."""
        rank = self._topology.rank
        try:
            for delivery in () if self._deliveries is None else self._deliveries:
                self._note(delivery)
                if not delivery.is_end:
                    return delivery.batch, self._states
        except Exception as error:
            explained = self._slots.explained(error, lambda: self._shards_in(rank, list(map(_decoded, self._states))))
            if explained is not error or self._sync is not None:
                self._deliveries = None
            raise explained from explained.__cause__
        self._deliveries = None
        return None

    def _note(self, delivery: Delivery) -> None:
        """Note where the slot that has delivered stands now."""
        state, before = delivery.state, self._states[delivery.worker]
        # A new list: the old one is part of the history.
        self._states = list(self._states)
        if isinstance(state, OpaqueState):
            self._states[delivery.worker] = state.state
        else:
            self._states[delivery.worker] = complete(state, before if isinstance(before, StateText) else None)

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


def _forget_frames(error: BaseException | None) -> None:
    """Frames of torch's would keep workers alive as long as the error."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
