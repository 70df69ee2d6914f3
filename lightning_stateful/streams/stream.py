"""Streams as people hold them: iterable datasets that can be shuffled, mapped, windowed, mixed and resumed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.nodes import BaseNode

from lightning_stateful import state as format_
from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError, StatefulWarning
from lightning_stateful.generators.rng import keep_randomness
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.shapes import EPOCH, check_shape
from lightning_stateful.stream_nodes.hugging_face import HuggingFaceShards, is_hugging_face
from lightning_stateful.stream_nodes.node_shards import NodeShards
from lightning_stateful.stream_nodes.nodes import NodeState, Shards
from lightning_stateful.stream_nodes.transforms import FilterNode, MapNode, RunningStateNode, WindowNode
from lightning_stateful.streams.source import Mixing, Source, Transform
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.worker_slot import ALONE, StreamConfig, WorkerSlot

KIND = "stream"
ORDER_VERSION = 1


class Stream(IterableDataset[Any]):
    """A stream of samples out of shards, which knows where it stands.

    Iterated by itself, it gives the share of this process: of this rank, and of this worker of a DataLoader. A
    :class:`StreamDataModule`, or a loader patched by this package, assigns its shards instead, and resumes on any ranks
    and workers. Every method that changes something returns a new stream.

    Args:
        sources: What is read.
        mixing: Which source comes next, of several.

    State:
        Where this process's share stands. Loading one taken in another share is refused.
    """

    def __init__(self, sources: Mapping[str, Source], mixing: Mixing | None = None) -> None:
        self.sources: dict[str, Source] = dict(sources)
        self.mixing = mixing
        # Where the next pass begins; the rank and worker that stood there, and whether that was loaded or told.
        self._epoch = 0
        self._slot_state: NodeState | None = None
        self._held_by: dict[str, int] = {}
        self._is_loaded = self._is_told = False
        # What the latest pass reads; it knows where it stands once it is closed, too.
        self._latest: WorkerSlot | None = None
        self._described: dict[str, Any] | None = None

    def shuffle(self, *, buffer_size: int = 0, seed: int | None = None) -> Stream:
        """Shuffle the order of the shards in every epoch, and their samples in blocks of ``buffer_size``.

        A sample travels less than a block, within the shards that a worker reads. Blocks are read again on a resume,
        and never saved.
        """
        changes: dict[str, Any] = {"shuffle": True, "buffer_size": buffer_size}
        return self._with(lambda source: replace(source, **changes, seed=source.seed if seed is None else seed))

    def map(self, function: Callable[[Any], Any]) -> Stream:
        """Apply a function to every sample, after shuffling; what it draws follows from (seed, epoch, sample)."""
        return self.then(MapNode, function=function)

    def filter(self, function: Callable[[Any], Any]) -> Stream:
        """Keep the samples of which a function is true; what it draws follows from (seed, epoch, sample)."""
        return self.then(FilterNode, function=function)

    def windowed(self, width: int, step: int = 1) -> Stream:
        """Sliding windows: tuples of ``width`` consecutive samples of what one worker reads."""
        return self.then(WindowNode, width=width, step=step)

    def recurrent(self, function: Callable[[Any, Any], tuple[Any, Any]], initial: Any) -> Stream:
        """Carry a state from sample to sample: ``value, state = function(state, sample)`` gives ``value``.

        The state goes on through the samples that one worker reads and is part of a checkpoint; on other ranks or
        workers, shards that nobody has begun begin with ``initial``. The function is not seeded, and is run again over
        a few samples on a resume: what it returns has to follow from its arguments alone.
        """
        return self.then(RunningStateNode, function=function, initial=initial)

    def then(self, node: Any, **options: Any) -> Stream:
        """Put a node behind the samples.

        Args:
            node: A class of :class:`~lightning_stateful.streams.StreamNode`, called with the node that it reads
                from and the options. Its ``context`` names what else it is given (``"seed"``, ``"on_error"``,
                ``"where"``), and its ``describe()`` gives plain data that changes with its options.
            **options: Its other arguments, which are pickled into workers.
        """
        transform = Transform(node, options)
        return self._with(lambda source: replace(source, steps=(*source.steps, transform)))

    def config(self, **batching: Any) -> StreamConfig:
        """The configuration by which this stream is read."""
        return StreamConfig(sources=self.sources, mixing=self.mixing, **batching)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next iteration; progress within that same epoch is kept, be it at its end.

        Raises:
            ConfigurationError: It is no epoch.
        """
        epoch = as_int("epoch", epoch)
        if epoch < 0:
            raise ConfigurationError(f"epoch must be at least 0, got {epoch}.")
        self._is_told = True
        if epoch != self._epoch:
            self._epoch, self._slot_state, self._latest = epoch, None, None

    @property
    def told_epoch(self) -> int | None:
        """The epoch that :meth:`set_epoch` was told last; None before that, and behind a state that was loaded."""
        return self._epoch if self._is_told else None

    def __iter__(self) -> Iterator[Any]:
        return StreamIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next sample: fresh plain data."""
        return self.pack(*self._stand())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with the next iteration; one that is left is begun there again.

        Where nothing is left of the epoch, the next iteration is that of the epoch after it.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        self._epoch, self._slot_state = self.unpack(state_dict)
        self._held_by, self._is_loaded, self._is_told, self._latest = self._rank_and_worker(), True, False, None

    def pack(self, epoch: int, slot_state: NodeState | None) -> dict[str, Any]:
        """The state of this process's share where its worker slot stands."""
        progress = {"epoch": epoch, **self._rank_and_worker(), "slot": slot_state}
        if self._described is None:
            self._described = self.config(is_batched=False).describe()
        return format_.pack(KIND, ORDER_VERSION, self._described, progress)

    def unpack(self, state_dict: Mapping[str, Any]) -> tuple[int, NodeState | None]:
        """The epoch in a state, and where in it the worker slot stands.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        where = "The stream's state"
        format_.check(state_dict, where=where)
        format_.refuse_differences(state_dict, self.pack(0, None), where=where)
        progress, here = state_dict["progress"], self._rank_and_worker()
        if "slot" not in progress:
            raise DamagedStateError(f"{where} is that of a loader: {sorted(progress)}. Load it into its loader.")
        epoch, slot_state = progress.get("epoch"), progress["slot"]
        if any(progress.get(name) != value for name, value in here.items()):
            saved = {name: progress.get(name) for name in here}
            raise DamagedStateError(
                f"{where} is that of the share {saved}, and this process reads the share {here}. Resume on the same "
                "ranks and workers, or through StreamDataModule or patch_dataloader, whose states fit any."
            )
        try:
            check_shape(epoch, EPOCH, "progress.epoch")
            whole, slot = self.share(epoch)
            whole.at((*(None,) * slot, slot_state, *(None,) * (whole.num_slots - slot - 1))).check()
        except (DamagedStateError, PositionError) as error:
            raise type(error)(f"{where}: {error} Resume from another checkpoint.") from None
        return epoch, format_.copy_plain(slot_state)

    def share(self, epoch: int) -> tuple[StreamState, int]:
        """The beginning of an epoch, and which worker slot this process is."""
        here = self._rank_and_worker()
        whole = StreamState.beginning(self.config(is_batched=False), epoch, here["ranks"], here["workers"])
        return whole, here["worker"] * here["ranks"] + here["rank"]

    def open(self, begin: tuple[int, NodeState | None] | None = None) -> WorkerSlot:
        """Open the reader of a pass, the latest from now on.

        Args:
            begin: The epoch, and where the worker slot stands in it; None for where the stream stands.

        Raises:
            DamagedStateError: The stream was loaded for another share.
        """
        here = self._rank_and_worker()
        if self._slot_state is not None and self._held_by != here:
            if self._is_loaded:
                raise DamagedStateError(
                    f"The stream was loaded for the share {self._held_by}, and is read here as {here}. Load the state "
                    "where it is read: in each worker, as torchdata's StatefulDataLoader does."
                )
            # Only looked at, in another process.
            self._slot_state = None
        epoch, slot_state = begin or (self._epoch, self._slot_state)
        whole, slot = self.share(epoch)
        self._latest = WorkerSlot(whole.config, whole.task(slot, slot_state))
        return self._latest

    def end(self, slot: WorkerSlot) -> bool:
        """Go on with the next epoch, if this was the latest pass; tell whether that began at the end of its own."""
        if self._latest is not slot:
            return False
        begun = 0 if self._slot_state is None or self._is_told else self._slot_state["batches"]
        self._epoch, self._slot_state, self._latest = slot.epoch + 1, None, None
        return bool(begun) and begun == slot.state()["batches"]

    def _stand(self) -> tuple[int, NodeState | None]:
        if self._latest is None:
            return self._epoch, self._slot_state
        return self._latest.epoch, self._latest.state()

    def __getstate__(self) -> dict[str, Any]:
        # Open files stay here.
        held = {**vars(self), "_latest": None}
        if self._latest is not None:
            held["_epoch"], held["_slot_state"] = self._stand()
            held["_held_by"], held["_is_loaded"] = self._rank_and_worker(), False
        return held

    @staticmethod
    def _rank_and_worker() -> dict[str, int]:
        info, topology = get_worker_info(), detect_topology()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return {"rank": topology.rank, "ranks": topology.num_replicas, "worker": worker, "workers": workers}

    def _with(self, change: Callable[[Source], Source]) -> Stream:
        return Stream({name: change(source) for name, source in self.sources.items()}, self.mixing)


class StreamIterator:
    """One pass over this process's share of a stream, which can be resumed by itself as well.

    Args:
        stream: The stream; the pass begins where it stands at the first ``next()``.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._begin: tuple[int, NodeState | None] | None = None
        self._slot: WorkerSlot | None = None
        # What is seeded would have others in the main process draw the same from there on.
        self._is_seeded = all(source.seed_samples for source in stream.sources.values())

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Any:
        slot = self._opened()
        try:
            with keep_randomness() if self._is_seeded and get_worker_info() is None else nullcontext():
                return next(slot)[0]
        except StopIteration:
            slot.close()
            if not self._stream.end(slot) or self._begin is not None:
                raise
            self._slot = None
        except BaseException:
            # Nodes that an error went through have lost what they held.
            slot.reopen()
            raise
        finally:
            while slot.said:
                warnings.warn(slot.said.pop(0), StatefulWarning, stacklevel=2)
        return next(self)

    def state_dict(self) -> dict[str, Any]:
        """The position of this pass, be it at its end: fresh plain data."""
        slot = self._opened()
        return self._stream.pack(slot.epoch, slot.state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with a pass where ``state_dict`` was taken.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        self._begin = self._stream.unpack(state_dict)
        self._close()

    def _opened(self) -> WorkerSlot:
        if self._slot is None:
            self._slot = self._stream.open(self._begin)
        return self._slot

    def _close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # As Python exits modules are gone already, and what is open is closed with the process.
        if not is_exiting():
            self._close()


def as_stream(dataset: Any, seed: int | None = None, *, seed_samples: bool = True) -> Stream | None:
    """A dataset as a stream of shards; None where it has none that can be told apart.

    Args:
        dataset: Any dataset, or a graph of torchdata nodes.
        seed: The seed of one that has none of its own.
        seed_samples: Whether its samples are seeded.
    """
    if isinstance(dataset, Stream):
        return dataset
    if is_hugging_face(dataset):
        dataset = HuggingFaceShards(dataset)
    elif isinstance(dataset, BaseNode):
        dataset = NodeShards(dataset)
    if not isinstance(dataset, Shards):
        return None
    is_shuffled = isinstance(dataset, HuggingFaceShards) and dataset.is_shuffled
    return Stream({ALONE: Source(shards=dataset, seed=seed, seed_samples=seed_samples, shuffle=is_shuffled)})
