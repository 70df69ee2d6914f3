"""Runs the worker slots of a rank in a copy of the user's DataLoader: in this process, or in torch's workers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data.dataloader import _DatasetKind, _InfiniteConstantSampler

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import StatefulError, StreamError
from lightning_stateful.samplers.rng import seed_randomness
from lightning_stateful.stream_loader.rank_store import Changes, StateEncoder
from lightning_stateful.streams.nodes import NodeState
from lightning_stateful.streams.worker_slot import SlotTask, StreamConfig, WorkerSlot

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

    tasks: list[SlotTask]
    queues: list[Any]
    _process: int | None

    def __init__(self, config: StreamConfig, collate: Callable[[Any], Any], dataset: Any, seed: int | None) -> None:
        if seed is not None:
            seed = None if collate in (default_collate, default_convert) else derive_seed("collate", seed)
        # Persistent workers hold a copy of this dataset from their first pass: tasks reach them through queues.
        own: dict[str, Any] = {"tasks": [], "queues": [], "_process": None}
        vars(self).update(own, _config=config, _collate=collate, _dataset=dataset, _seed=seed)

    def __iter__(self) -> Iterator[Delivery]:
        info = get_worker_info()
        encode: Callable[[NodeState], OpaqueState | Changes] = OpaqueState
        if info is None:
            task = self.tasks[0]
        else:
            # The number of this process, before it takes on that of its slot.
            self._process = info.id if self._process is None else self._process
            task = self.queues[self._process].get() if self.queues else self.tasks[self._process]
            # Datasets that divide themselves see the number of the slot; in what all slots read they must not.
            hides = any(source.shards.hides_workers for source in self._config.sources.values())
            seen = {"id": 0, "num_workers": 1} if hides else {"id": task.worker}
            torch_worker._worker_info = replace(info, **seen, dataset=self._dataset)
            encode = StateEncoder().encode_changes
        slot = WorkerSlot(self._config, task)
        try:
            for samples in slot:
                state = slot.state()
                yield Delivery(task.worker, encode(state), self._collated(samples, task, state["batches"]), False)
            yield Delivery(task.worker, encode(slot.state()), None, True)
        finally:
            slot.close()

    def _collated(self, samples: list[Any], task: SlotTask, number: int) -> Any:
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


class SlotLoader:
    """Runs the worker slots of a rank in a copy of the user's loader, of its class and with its options.

    Args:
        loader: The user's loader.
        config: How the stream is read.
        seed: Seeds what ``collate_fn`` draws; None to leave it.

    Attributes:
        loader: The copy.
    """

    def __init__(self, loader: DataLoader[Any], config: StreamConfig, seed: int | None) -> None:
        self._original = loader
        self._dataset = SlotDataset(config, loader.collate_fn, loader.dataset, seed)
        self._generator = torch.Generator()
        # A loader of torchdata's would keep a state of its own.
        is_torchdatas = type(loader).__module__.startswith("torchdata.")
        kind = DataLoader if is_torchdatas else type(loader)
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
        )
        if loader.num_workers and loader.persistent_workers:
            context: Any = loader.multiprocessing_context or torch.multiprocessing
            self._dataset.queues = [context.SimpleQueue() for _ in range(loader.num_workers)]

    def read(self, tasks: Sequence[SlotTask], seed: int) -> Iterator[Delivery]:
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


def copied(loader: Any) -> Any:
    """Copy a user's loader, without Lightning's record of what was set on it, from which it builds loaders again."""
    made = copy.copy(loader)
    vars(made).pop("__pl_attrs_record", None)
    return made


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Whether a loader's class leaves iteration to torch, so that nothing but torch sees its batches on their way."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def _forget_frames(error: BaseException | None) -> None:
    """Frames of torch's would keep workers alive as long as the error."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
