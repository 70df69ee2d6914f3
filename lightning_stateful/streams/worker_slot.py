"""Batches of one worker slot: what one worker of one rank reads, of one source or of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, ClassVar, NamedTuple

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.packing.settings import Packing
from lightning_stateful.shapes import COUNT, Either
from lightning_stateful.stream_nodes.document_packer import DocumentPacker
from lightning_stateful.stream_nodes.nodes import LEFT_OUT, NodeState
from lightning_stateful.stream_nodes.numbered import NOTHING, Given, Numbering, without_numbers
from lightning_stateful.streams.source import Mixing, Source
from lightning_stateful.streams.source_reader import FRESH, NOTHING_GIVEN, SourceReader, SourceTask

# The state of a slot, and where it stands in a slice of a source.
AT_SHAPE = Either(None, {"source": object, "seen": [COUNT]})
SLOT_SHAPE = {
    "batches": COUNT,
    "over": bool,
    "turn": COUNT,
    "ended": [str],
    "again": [str],
    "gone": [str],
    "of": {
        str: {
            "round": COUNT,
            "slice": COUNT,
            "opened": COUNT,
            "state": AT_SHAPE,
            "skipped?": (COUNT,) * len(LEFT_OUT),
            "given?": (COUNT,) * len(NOTHING_GIVEN),
        }
    },
}
# The name of a source that stands alone.
ALONE = ""


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Settings by which a stream is read: the same on all ranks, and pickled into workers.

    Attributes:
        sources: The sources by name; a single one is called :data:`ALONE`.
        mixing: Which source comes next; None for a single source.
        batch_size: Samples in a batch; None where the sources give batches themselves, or samples are not batched.
        is_batched: Whether the loader collates batches.
        drop_last: Leave the samples of a batch that is not full to the next epoch.

    Raises:
        ConfigurationError: An argument is out of range, or they contradict each other.
    """

    sources: Mapping[str, Source]
    # What is drawn follows from shards, and not from ranks.
    kinds_alike: ClassVar[frozenset[str]] = frozenset()
    mixing: Mixing | None = None
    batch_size: int | None = 1
    is_batched: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.gives_batches and self.mixing is not None and self.mixing.by == "sample":
            raise ConfigurationError(
                "Batches of like lengths are cut from the samples of one source: with max_tokens or read_ahead, mix "
                'streams by="batch".'
            )
        if self.batch_size is not None and as_int("batch_size", self.batch_size) < 1:
            raise ConfigurationError(f"batch_size must be at least 1, got {self.batch_size}.")

    @cached_property
    def gives_batches(self) -> bool:
        """Whether the sources cut their batches themselves."""
        return self.is_batched and self.batch_size is None

    @cached_property
    def counts_given(self) -> bool:
        """Whether worker slots count what each source has given: of a mixture, and of packed documents."""
        return self.mixing is not None or self.packing is not None

    @property
    def packing(self) -> Packing | None:
        """The settings by which documents are packed, the same for all sources; None if they are not."""
        first, *_ = self.sources.values()
        steps = [step for step in first.steps if step.kind is DocumentPacker]
        return steps[-1].options["packing"] if steps and steps[-1] is first.steps[-1] else None

    @property
    def hides_workers(self) -> bool:
        """Whether a dataset in a source, which would divide itself among workers, is told that there is one."""
        return any(source.shards.hides_workers for source in self.sources.values())

    @property
    def seeds_process(self) -> bool:
        """Whether the process's generators are seeded while it is read."""
        return any(source.seeds_process for source in self.sources.values())

    def open(self, task: SlotTask) -> WorkerSlot:
        """Open the reader of a worker slot's batches."""
        return WorkerSlot(self, task)

    def seeded(self, seed: int) -> StreamConfig:
        """The same stream, with this seed for the sources, and the order of draws, that have none of their own."""
        sources = {name: source.seeded(seed) for name, source in self.sources.items()}
        return replace(self, sources=sources, mixing=None if self.mixing is None else self.mixing.seeded(seed))

    def at(self, path: str) -> StreamConfig:
        """The same stream as one of several that are read side by side, whose randomness it does not share."""
        sources = {name: source.at(path) for name, source in self.sources.items()}
        return replace(self, sources=sources, mixing=None if self.mixing is None else self.mixing.at(path))

    def numbered(self) -> StreamConfig:
        """The same stream, whose worker slots say the numbers of samples, if all nodes keep these."""
        if not all(step.kind.keeps_numbers for source in self.sources.values() for step in source.steps):
            return self
        shards = [source.shards.num_shards for source in self.sources.values()]
        firsts = dict(zip(self.sources, accumulate(shards, initial=0), strict=False))
        numbering = {name: Numbering(first, sum(shards)) for name, first in firsts.items()}
        sources = {name: replace(source, numbering=numbering[name]) for name, source in self.sources.items()}
        return replace(self, sources=sources)

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared."""
        described: dict[str, Any] = {"drop_last": self.drop_last}
        if self.batch_size is not None:
            described["batch_size"] = self.batch_size
        if self.mixing is None:
            return {**self.sources[ALONE].describe(), **described}
        sources = {name: source.describe() for name, source in self.sources.items()}
        return {**self.mixing.describe(), "sources": sources, **described}


class SlotTask(NamedTuple):
    """The part of a pass that a worker slot is to read.

    Attributes:
        slot: Its number: ``worker * num_replicas + rank``.
        worker: Which of its rank's workers it is.
        of: What it is to read of every source.
        state: Where to begin; None for the beginning.
        epoch: The pass, which chooses the order of sources.
        steps_before: Batches of each rank in the pass before shards were assigned.
        waits: False: tasks come in the order in which batches do.
        num_workers: Worker slots of a rank.
        passed: Batches of each rank in earlier passes, where weights follow a schedule.
    """

    slot: int
    worker: int
    of: Mapping[str, SourceTask]
    state: NodeState | None
    epoch: int
    steps_before: int
    waits: bool = False
    num_workers: int = 1
    passed: int = 0


class WorkerSlot:
    """The batches of a worker slot: an iterator over lists of samples.

    Args:
        config: How the stream is read.
        task: What the slot reads.

    Attributes:
        epoch: The pass.
        goes_on: Whether there is something behind an error.
        said: Texts that a user should read, which whoever shows them takes out.
        given: The part that sources have in the latest batch.
    """

    goes_on = False
    given: Given = NOTHING

    def __init__(self, config: StreamConfig, task: SlotTask) -> None:
        self._config, self._task = config, task
        self.epoch: int = task.epoch
        self.said: list[str] = []
        self._keeps_tails = config.drop_last and config.mixing is not None and config.mixing.stop == "cycle"
        self._size = (config.batch_size or 1) if config.is_batched else 1
        self._begin(task)

    def _begin(self, task: SlotTask) -> None:
        state = task.state or {"turn": 0, "batches": 0, "over": False, "again": [], "gone": [], "ended": []}
        self._turn: int = state["turn"]
        self._served: int = state["batches"]
        self._over: bool = state["over"]
        # Sources that have begun again and given nothing since, and those that gave nothing from beginning to end.
        self._begun_again: set[str] = set(state["again"])
        self._gone: set[str] = set(state["gone"])
        self._ended: set[str] = set(state["ended"])
        begins = dict.fromkeys(task.of, FRESH) if task.state is None else task.state["of"]
        self._readers = {
            name: SourceReader(source, task.of[name], begins[name], self.said, counts=self._config.counts_given)
            for name, source in self._config.sources.items()
        }
        # After the latest batch: a slot may have read more, which then was no batch.
        self._states = {name: reader.state() for name, reader in self._readers.items()}
        self._note_ends()
        # Too little for a batch, of sources that begin again.
        self._tails: dict[str, list[Any]] = {}

    def __iter__(self) -> WorkerSlot:
        return self

    def __next__(self) -> list[Any]:
        mixing = self._config.mixing
        if self._over:
            raise StopIteration
        before = self._states.copy()
        if mixing is None:
            batch = self._of_source(ALONE)
        else:
            batch = self._in_turn(mixing) if mixing.by == "batch" else self._of_samples(mixing)
            self._note_ends()
        if not batch:
            self._over = True
            raise StopIteration
        self._served += 1
        batch, numbers = without_numbers(batch)
        if numbers is not None:
            self.given = Given(numbers=tuple(chain.from_iterable(numbers)))
        if self._config.counts_given:
            self.given = self.given._replace(sources=self._given_since(before, len(batch)))
        return batch

    def state(self) -> NodeState:
        """The position in each source after the latest batch: plain data that later batches leave as it is."""
        return {"batches": self._served, "over": self._over, "turn": self._turn, **self._ends, "of": dict(self._states)}

    def reopen(self) -> None:
        """Go back to where the slot stood after the latest batch, as is needed after an error."""
        self.close()
        self._begin(self._task._replace(state=self.state()))

    def close(self) -> None:
        """Close all sources."""
        for reader in self._readers.values():
            reader.close()

    def _given_since(self, before: Mapping[str, NodeState], size: int) -> tuple[tuple[int, int, int], ...]:
        found = []
        for number, (name, state) in enumerate(self._states.items()):
            if state is not before[name]:
                now, then = state.get("given", NOTHING_GIVEN), before[name].get("given", NOTHING_GIVEN)
                # Sources that cut batches count these.
                items = size if self._config.gives_batches else now[0] - then[0]
                found.append((number, items, now[1] - then[1]))
        return tuple(one for one in found if one[1])

    def _in_turn(self, mixing: Mixing) -> list[Any]:
        while active := self._active(mixing):
            # Each worker goes through the whole sequence, one draw ahead of the worker before: the same on all ranks.
            name = self._drawn(mixing, active, self._task.worker)
            batch = self._of_source(name)
            if batch:
                self._turn += 1
                self._begun_again.discard(name)
                return batch
            self._end(name, mixing)
        return []

    def _of_samples(self, mixing: Mixing) -> list[Any]:
        batch: list[Any] = []
        while len(batch) < self._size and (active := self._active(mixing)):
            name = self._drawn(mixing, active, len(batch))
            found = self._readers[name].next_many(1)
            batch += found
            if found:
                self._begun_again.discard(name)
            else:
                self._end(name, mixing)
        if len(batch) < self._size and self._config.drop_last:
            return []
        self._states = {name: reader.state() for name, reader in self._readers.items()}
        self._turn += len(batch)
        return batch

    def _drawn(self, mixing: Mixing, active: tuple[str, ...], more: int) -> str:
        """The source that is drawn so many draws behind those that the slot has made."""
        if mixing.schedule is None:
            return mixing.source_at(self._turn + more, active, self.epoch)
        task = self._task
        # Workers give a rank's batches in turn.
        step = task.passed + task.steps_before + self._served * task.num_workers + task.worker
        if mixing.by == "batch":
            return mixing.source_at(step, active, self.epoch)
        return mixing.source_at(step * self._size + more, active, self.epoch, per_step=self._size)

    def _of_source(self, name: str) -> list[Any]:
        """The next batch of a source; empty if there is none."""
        reader = self._readers[name]
        if self._config.gives_batches:
            found: list[list[Any]] = reader.next_many(1)
            self._states[name] = reader.state()
            return found[0] if found else []
        batch = self._with_tail(name) if self._keeps_tails else reader.next_many(self._size)
        if batch and len(batch) < self._size and self._config.drop_last:
            # They stay where they are, for the next epoch.
            return []
        self._states[name] = reader.state()
        return batch

    def _with_tail(self, name: str) -> list[Any]:
        """The rest of the round before, with as many further samples as a batch needs and the source has."""
        batch = self._tails.pop(name, [])
        batch = batch + self._readers[name].next_many(self._size - len(batch))
        if len(batch) < self._size:
            self._tails[name] = batch
        return batch

    def _note_ends(self) -> None:
        """As the states: an error may come after a source has ended, and before the batch."""
        self._ends = {"ended": sorted(self._ended), "again": sorted(self._begun_again), "gone": sorted(self._gone)}

    def _active(self, mixing: Mixing) -> tuple[str, ...]:
        """The sources that may be drawn; none if the slot is over."""
        is_over = mixing.stop == "first_exhausted" and self._ended
        if is_over or len(self._ended) == len(self._readers):
            return ()
        if mixing.stop == "cycle":
            return tuple(name for name in mixing.names if not self._readers[name].is_empty and name not in self._gone)
        return tuple(name for name in mixing.names if name not in self._ended)

    def _end(self, name: str, mixing: Mixing) -> None:
        self._ended.add(name)
        if mixing.stop != "cycle":
            if not self._readers[name].has_given:
                self._gone.add(name)
        else:
            self._ended.update(name for name, reader in self._readers.items() if reader.is_empty)
            if name in self._begun_again:
                # Else it would begin again for ever.
                self._gone.add(name)
            elif len(self._ended) < len(self._readers):
                self._readers[name].begin_again()
                self._begun_again.add(name)
