"""Reads the worker slots of a rank, in this process or in torch's workers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data.dataloader import _DatasetKind, _InfiniteConstantSampler

from lightning_stateful.contents.collate_watch import CollateWatch
from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import StatefulError, StreamError
from lightning_stateful.generators.held_generators import HeldGenerators
from lightning_stateful.generators.rng import seed_randomness
from lightning_stateful.stream_loader.rank_store import Changes, StateEncoder
from lightning_stateful.stream_nodes.nodes import NodeState
from lightning_stateful.stream_nodes.numbered import NOTHING, Given
from lightning_stateful.user_loaders import copied, is_torchdatas

# What torch says when a worker is gone, or slow.
_OF_WORKERS = re.compile(r"DataLoader (worker|timed out)|Pin memory thread")
# Of thousands of empty shards, only some are named.
_MOST_SAID = 20


class OpaqueState:
    """A state that torch hands on as it is: it would copy a dict to pin what is in it to memory.

    Attributes:
        state: The state of a worker slot.
    """

    __slots__ = ("state",)

    def __init__(self, state: NodeState) -> None:
        self.state = state


# A sample may be None.
_END: Any = object()


class Delivery(NamedTuple):
    """A batch that a worker slot hands over.

    Attributes:
        worker: Which of the rank's workers the slot is.
        state: Its state afterwards; an :class:`OpaqueState` where batches are pinned; as text, without large parts that
            it had before, if it comes from another process.
        batch: The batch; None in the last delivery, which only says where the slot ended.
        is_end: Whether it is the last.
        said: Texts that a user should read.
        given: The part that sources have in the batch.
    """

    worker: int
    state: NodeState | OpaqueState | Changes
    batch: Any
    is_end: bool
    said: tuple[str, ...] = ()
    given: Given = NOTHING


class SlotDataset(IterableDataset[Delivery]):
    """The deliveries of one worker slot: of another one in each worker process, or of the only one in this process.

    Every other attribute is the user's dataset's, as a ``worker_init_fn`` may ask for.

    Args:
        config: How the stream is read.
        collate: Makes a batch of samples; of a single sample where the loader does not batch.
        dataset: The user's dataset.
        seed: Seeds what ``collate`` draws, by (seed, pass, slot, batch of the slot); None to leave it.
        is_pinned: Whether torch pins what is handed over to memory.
        is_trained_on: Whether ``collate`` is looked at, and a warning says if it carries something over.
        hides_worker: Whether the dataset sees no worker, as in the training process, and gives its first batch alone.
    """

    tasks: list[Any]
    queues: list[Any]
    _process: int | None
    _held: HeldGenerators
    _watch: CollateWatch | None

    def __init__(
        self,
        config: Any,
        collate: Callable[[Any], Any],
        dataset: Any,
        seed: int | None,
        *,
        is_pinned: bool = False,
        is_trained_on: bool = False,
        hides_worker: bool = False,
    ) -> None:
        if seed is not None:
            seed = derive_seed("collate", seed) if draws_in_collation(collate) else None
        # Persistent workers hold a copy of this dataset from their first pass: tasks reach them through queues.
        own: dict[str, Any] = {"tasks": [], "queues": [], "_process": None}
        own["_held"] = HeldGenerators(is_repeatable=False, collate_fn=collate)
        is_watched = is_trained_on and config.is_batched and draws_in_collation(collate)
        own["_watch"] = CollateWatch(collate) if is_watched else None
        own |= {"_config": config, "_collate": collate, "_dataset": dataset, "_seed": seed}
        vars(self).update(own, _is_pinned=is_pinned, _hides_worker=hides_worker)

    def __iter__(self) -> Iterator[Delivery]:
        return _Deliveries(self)

    def task(self) -> tuple[Any, Callable[[NodeState], NodeState | OpaqueState | Changes]]:
        """The tasks of this process, and the function that makes a delivery of a slot's state."""
        info = get_worker_info()
        if info is None:
            return self.tasks[0], OpaqueState if self._is_pinned else _as_it_is
        # The number of this process, before it takes on that of its slot.
        self._process = info.id if self._process is None else self._process
        task = self.queues[self._process].get() if self.queues else self.tasks[self._process]
        if self._hides_worker:
            torch_worker._worker_info = None
            return task, StateEncoder().encode_changes
        # Datasets that divide themselves see the number of the slot; in what all slots read they must not.
        is_hidden = self._config.hides_workers
        seen = {"id": 0, "num_workers": 1} if is_hidden else {"id": task.worker, "num_workers": task.num_workers}
        # A dataclass in newer versions of torch only.
        given = {name: getattr(info, name) for name in type(info).__annotations__}
        torch_worker._worker_info = type(info)(**{**given, **seen, "dataset": self._dataset})
        return task, StateEncoder().encode_changes

    def collated(self, samples: list[Any], task: Any, number: int) -> Any:
        """The batch of a slot of that number."""
        if self._seed is None:
            return self._made(samples)
        seed = mixed_seed(self._seed, task.epoch, task.slot, task.steps_before, number)
        if self._held.is_idle:
            return self._collated(samples, seed)
        return self._held.isolated(seed, partial(self._collated, samples, seed))

    def _collated(self, samples: list[Any], seed: int) -> Any:
        seed_randomness(seed)
        return self._made(samples)

    def _made(self, samples: list[Any]) -> Any:
        given = samples if self._config.is_batched else samples[0]
        return self._collate(given) if self._watch is None else self._watch.around(self._collate, given)

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
        if self._slot is None:
            self._task, self._encode = self._dataset.task()
            self._slot = self._dataset._config.open(self._task)
            if self._task.waits:
                return Delivery(self._task.worker, self._encode(self._slot.state()), None, True)
        slot, task = self._slot, self._task
        # What raises is over, as a generator is, unless it goes on; a batch that cannot be collated is left out.
        self._is_over = not slot.goes_on
        samples = next(slot, _END)
        if samples is _END:
            self._is_over = True
            slot.close()
            return Delivery(task.worker, self._encode(slot.state()), None, True, self._said(slot))
        # The next one might be written over a tensor that was handed over.
        self._is_over = self._dataset._hides_worker
        state = slot.state()
        batch = self._dataset.collated(samples, task, state["batches"])
        given = getattr(slot, "given", NOTHING)
        return Delivery(task.worker, self._encode(state), batch, False, self._said(slot), given)

    @staticmethod
    def _said(slot: Any) -> tuple[str, ...]:
        """Take what the slot has said."""
        if not slot.said:
            return ()
        said = tuple(slot.said)
        slot.said.clear()
        return said

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
        is_trained_on: Whether a ``collate_fn`` that carries something over is warned of.
        hides_worker: As for :class:`SlotDataset`.

    Attributes:
        loader: The copy.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        config: Any,
        seed: int | None,
        *,
        is_trained_on: bool,
        hides_worker: bool = False,
    ) -> None:
        self._original = loader
        self._said: set[str] = set()
        how = {"is_pinned": loader.pin_memory, "is_trained_on": is_trained_on, "hides_worker": hides_worker}
        self._dataset = SlotDataset(config, loader.collate_fn, loader.dataset, seed, **how)
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
        self._dataset._held.begin()
        # What was set since the last time.
        vars(self.loader).update({name: getattr(self._original, name) for name in ("worker_init_fn", "timeout")})
        if not self.loader.num_workers and not self.loader.pin_memory:
            # What torch's iterator does here, without its bookkeeping for each batch.
            return iter(self._dataset)
        deliveries: Iterator[Any] = iter(self.loader)
        # Persistent workers wait for their tasks.
        for queue, task in zip(self._dataset.queues, tasks, strict=False):
            queue.put(task)
        return map(Delivery._make, deliveries)

    def unsaid(self, delivery: Delivery) -> Iterator[str]:
        """Each text of a delivery that no earlier one had, as long as there are few."""
        for text in delivery.said:
            if text not in self._said and len(self._said) < _MOST_SAID:
                self._said.add(text)
                yield text

    def num_outstanding(self, process: int) -> int:
        """Deliveries that a persistent worker was asked for and that nobody has received."""
        tasks = getattr(self.loader._iterator, "_task_info", {})
        return sum(1 for task in tasks.values() if task[0] == process)

    @property
    def num_prefetched(self) -> int:
        """Deliveries that workers are asked for before any is received."""
        return int((self.loader.prefetch_factor or 0) * self.loader.num_workers)

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
            _begin_with_message(error)
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


def _as_it_is(state: NodeState) -> NodeState:
    return state


def draws_in_collation(collate: Callable[[Any], Any]) -> bool:
    """Whether a ``collate_fn`` may draw random numbers: it is none of torch's own."""
    return collate not in (default_collate, default_convert)


def _begin_with_message(error: Exception) -> None:
    """Put the message of an error of ours first, of which torch makes a line below the worker's traceback."""
    name = f"\n{type(error).__module__}.{type(error).__qualname__}: "
    where, found, message = str(error).rpartition(name)
    if isinstance(error, StatefulError) and found and where.startswith("Caught "):
        error.args = (f"{message.rstrip()}\n\n{where}",)


def _forget_frames(error: BaseException | None) -> None:
    """Frames of torch's would keep workers alive as long as the error."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
