"""Streams as people hold them: iterable datasets that can be shuffled, mapped, windowed, mixed and resumed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.nodes import BaseNode

from lightning_stateful import state as format_
from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError, DamagedStateError, PositionError
from lightning_stateful.mixture.sources import Stop
from lightning_stateful.samplers.mixture_samplers import refuse_splits
from lightning_stateful.samplers.rng import keep_if_drawn
from lightning_stateful.samplers.tracker import detect_topology
from lightning_stateful.streams.hugging_face import HuggingFaceShards, is_hugging_face
from lightning_stateful.streams.mixing import By, Mixing
from lightning_stateful.streams.node_shards import NodeShards
from lightning_stateful.streams.nodes import NodeState
from lightning_stateful.streams.shards import Shards
from lightning_stateful.streams.source import Source, Step
from lightning_stateful.streams.stream_state import StreamState
from lightning_stateful.streams.transforms import FilterNode, MapNode, RunningStateNode, WindowNode
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
        self.sources = dict(sources)
        self.mixing = mixing
        self._epoch = 0
        self._slot_state: NodeState | None = None
        # The rank and worker of that state, and whether it was loaded.
        self._held: tuple[dict[str, int], bool] = ({}, False)
        # The latest pass, which is over where nobody holds it any more, and where that was then.
        self._latest: weakref.ref[StreamIterator] | None = None
        self._left: tuple[int, NodeState | None] = (0, None)
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
            node: A class of :class:`~lightning_stateful.streams.nodes.StreamNode`, called with the node that it reads
                from and the options. Its ``context`` names what else it is given (``"seed"``, ``"on_error"``,
                ``"where"``), and its ``describe()`` gives plain data that changes with its options.
            **options: Its other arguments, which are pickled into workers.
        """
        step = Step(node, options)
        return self._with(lambda source: replace(source, steps=(*source.steps, step)))

    def config(self, **batching: Any) -> StreamConfig:
        """The configuration by which this stream is read."""
        return StreamConfig(sources=self.sources, mixing=self.mixing, **batching)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next iteration; progress within that same epoch is kept.

        Raises:
            ConfigurationError: It is no epoch.
        """
        epoch = as_int("epoch", epoch)
        if epoch < 0:
            raise ConfigurationError(f"epoch must be at least 0, got {epoch}.")
        if epoch != self._epoch:
            self._epoch, self._slot_state, self._latest = epoch, None, None

    def __iter__(self) -> Iterator[Any]:
        return StreamIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """Where the next sample comes from: fresh plain data. To know, one sample may be read ahead."""
        return self.pack(*self._stand())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with the next iteration; one that is left is begun there again.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        self._epoch, self._slot_state = self.unpack(state_dict)
        self._latest, self._held = None, (self._rank_and_worker(), True)

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
        epoch, slot_state = progress["epoch"], progress["slot"]
        if any(progress.get(name) != value for name, value in here.items()):
            saved = {name: progress.get(name) for name in here}
            raise DamagedStateError(
                f"{where} is that of the share {saved}, and this process reads the share {here}. Resume on the same "
                "ranks and workers, or through StreamDataModule or patch_dataloader, whose states fit any."
            )
        whole, slot = self.share(epoch)
        try:
            whole.at((*(None,) * slot, slot_state, *(None,) * (whole.num_slots - slot - 1))).check()
        except (DamagedStateError, PositionError) as error:
            raise type(error)(f"{where}: {error} Resume from another checkpoint.") from None
        return epoch, format_.copy_plain(slot_state)

    def share(self, epoch: int) -> tuple[StreamState, int]:
        """The beginning of an epoch, and which worker slot this process is."""
        here = self._rank_and_worker()
        whole = StreamState.beginning(self.config(is_batched=False), epoch, here["ranks"], here["workers"])
        return whole, here["worker"] * here["ranks"] + here["rank"]

    def begin_of(self, iterator: StreamIterator) -> tuple[int, NodeState | None]:
        """Where a pass begins that is the latest from now on."""
        here, loaded = self._held
        if self._slot_state is not None and here != self._rank_and_worker():
            if loaded:
                raise DamagedStateError(
                    f"The stream was loaded for the share {here}, and is read here as {self._rank_and_worker()}. "
                    "Load the state where it is read: in each worker, as torchdata's StatefulDataLoader does."
                )
            # Only looked at, in another process.
            self._slot_state = None
        self._latest = iterator.reference
        return self._epoch, self._slot_state

    def end_of(self, iterator: StreamIterator, epoch: int) -> None:
        """Go on with the next epoch, if this was the latest pass."""
        if self._latest is iterator.reference:
            self._epoch, self._slot_state, self._latest = epoch + 1, None, None

    def leave(self, iterator: StreamIterator, epoch: int, slot_state: NodeState | None) -> None:
        """Know where a pass stood that nobody holds any more, if this was the latest."""
        if self._latest is iterator.reference:
            self._left = epoch, slot_state

    def _stand(self) -> tuple[int, NodeState | None]:
        if self._latest is None:
            return self._epoch, self._slot_state
        # One that was left is opened again to know whether a sample follows, and left again.
        iterator = self._latest() or StreamIterator(self, self._left)
        return iterator.stand()

    def __getstate__(self) -> dict[str, Any]:
        # Open files stay here.
        epoch, slot_state = self._stand()
        held = self._held if self._latest is None else (self._rank_and_worker(), False)
        return {**vars(self), "_epoch": epoch, "_slot_state": slot_state, "_held": held, "_latest": None}

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
        begin: The epoch, and where its worker slot stands in it, to begin at instead.

    Attributes:
        reference: By this the stream knows the pass without holding it.
    """

    def __init__(self, stream: Stream, begin: tuple[int, NodeState | None] | None = None) -> None:
        self._stream, self._begin = stream, begin
        # Where its worker slot was opened, once it is begun.
        self._opened: tuple[int, NodeState | None] | None = None
        self._slot: WorkerSlot | None = None
        # A sample that was read ahead, and where the slot stood before it.
        self._ahead: list[Any] = []
        self._slot_state: NodeState | None = None
        self.reference = weakref.ref(self)

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        epoch, slot = self._open()
        try:
            return self._read(slot)
        except StopIteration:
            slot.close()
            self._stream.end_of(self, epoch)
            raise
        except BaseException:
            self._break_off(epoch, slot)
            raise

    def stand(self) -> tuple[int, NodeState | None]:
        """The epoch, and where the next sample comes from; it is read to know that there is one."""
        epoch, slot = self._open()
        if not self._ahead:
            self._slot_state = slot.state()
            try:
                self._ahead.append(self._read(slot))
            except StopIteration:
                return epoch + 1, None
            except BaseException as error:
                self._break_off(epoch, slot)
                # Whoever asks for that sample is told.
                if not isinstance(error, Exception):
                    raise
        return epoch, self._slot_state

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, be it at its end: fresh plain data."""
        epoch, slot = self._open()
        return self._stream.pack(epoch, self._slot_state if self._ahead else slot.state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with a pass where ``state_dict`` was taken.

        Raises:
            StateError: It is damaged, or of another stream, rank or worker.
        """
        self._begin = self._stream.unpack(state_dict)
        self._close()
        self._opened, self._ahead = None, []

    def _open(self) -> tuple[int, WorkerSlot]:
        if self._opened is None:
            began = self._stream.begin_of(self)
            self._opened = self._begin or began
        epoch, slot_state = self._opened
        if self._slot is None:
            whole, slot = self._stream.share(epoch)
            self._slot = WorkerSlot(whole.config, whole.task(slot, slot_state))
        return epoch, self._slot

    def _read(self, slot: WorkerSlot) -> Any:
        """The next sample. Where it is seeded, others in the main process draw from the same generators."""
        is_seeded = all(source.seed_samples for source in self._stream.sources.values())
        if not is_seeded or get_worker_info() is not None:
            return next(slot)[0]
        with keep_if_drawn():
            return next(slot)[0]

    def _break_off(self, epoch: int, slot: WorkerSlot) -> None:
        """Open the slot anew before the next sample: nodes that an error went through have lost what they held."""
        self._opened = epoch, slot.state()
        self._close()

    def _close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_exiting():
            # Modules are gone already, and what is open is closed with the process.
            return
        if self._opened is not None:
            epoch, slot_state = self._opened
            if self._slot is not None:
                slot_state = self._slot_state if self._ahead else self._slot.state()
            self._stream.leave(self, epoch, slot_state)
        self._close()


class MixedStream(Stream):
    """Several streams, of which one after the other gives a batch, or a sample.

    Without weights they come in turn, as :class:`RoundRobinDataModule` has it; with weights as often as
    these say, in periods of exact shares, as :class:`MixtureDataModule` has it. All ranks take a step's batch from the
    same source as long as none is exhausted.

    Args:
        streams: The streams by name, or in a list.
        weights: A positive number for each, by name or in order; None for round robin.
        temperature: Above 1, weights are made more alike.
        by: Whether one draw is a ``"batch"`` or a ``"sample"``.
        stop: When a worker's share of an epoch ends: ``"all_exhausted"``, ``"first_exhausted"`` (what is left comes
            first in the next epoch), or ``"cycle"``: those exhausted begin again until all have been.
        seed: Chooses the order of draws; by default the seed of Lightning's ``seed_everything``, or 0.

    Raises:
        ConfigurationError: An argument is out of range, a stream is mixed itself, or they are splits of one dataset.
    """

    def __init__(
        self,
        streams: Mapping[str, Any] | Sequence[Any],
        *,
        weights: Mapping[str, Any] | Sequence[Any] | None = None,
        temperature: float = 1,
        by: By = "batch",
        stop: Stop = "all_exhausted",
        seed: int | None = None,
    ) -> None:
        is_one = isinstance(streams, (str, bytes, IterableDataset, Shards, BaseNode)) or is_hugging_face(streams)
        if is_one or not isinstance(streams, Collection):
            raise ConfigurationError(
                f"MixedStream takes streams by name, or in a list, got a {type(streams).__qualname__}. Pass "
                "MixedStream([one, other]) or MixedStream({'one': one, 'other': other})."
            )
        refuse_splits(streams)
        named = streams if isinstance(streams, Mapping) else {str(n): stream for n, stream in enumerate(streams)}
        if not named:
            raise ConfigurationError("MixedStream was given no streams.")
        if len({str(name) for name in named}) < len(named):
            raise ConfigurationError(f"Streams need different names, got {list(named)}.")
        sources = {}
        for name, dataset in named.items():
            stream = as_stream(dataset)
            if stream is None or stream.mixing is not None:
                raise ConfigurationError(
                    f"Stream {name!r} is a {type(dataset).__qualname__}"
                    f"{' mixed already' if stream is not None else ', which has no shards'}. Mix ChunkedDatasets and "
                    "streams of Hugging Face's."
                )
            sources[str(name)] = replace(stream.sources[ALONE], path=str(name))
        mixing = Mixing.of(
            list(sources),
            weights=weights,
            temperature=temperature,
            by=by,
            stop=stop,
            seed=None if seed is None else as_int("seed", seed),
        )
        super().__init__(sources, mixing)


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
    return Stream({ALONE: Source(shards=dataset, seed=seed, seed_samples=seed_samples)})
