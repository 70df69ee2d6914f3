"""Reads one source for a worker slot, slice after slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_stateful.contents.read_watch import StreamWatch
from lightning_stateful.stream_nodes.document_packer import DocumentPacker
from lightning_stateful.stream_nodes.nodes import LEFT_OUT, NodeState, StreamNode
from lightning_stateful.stream_nodes.shard_reader import ShardReader
from lightning_stateful.streams.assignment import SlotProgress, SlotSlice
from lightning_stateful.streams.source import Source

# Where a slot begins to read a source.
FRESH: NodeState = {"round": 0, "slice": 0, "opened": 0, "state": None}
# Items, and of packed documents padding, documents, and those that were cut.
NOTHING_GIVEN = (0, 0, 0, 0)


class SourceTask(NamedTuple):
    """The part of a source that a worker slot is to read.

    Attributes:
        slot: The number of the slot: ``worker * num_replicas + rank``.
        num_slots: Worker slots of all ranks.
        slices: The slices that it was assigned.
        latest: The latest pass of their shards.
    """

    slot: int
    num_slots: int
    slices: Sequence[SlotSlice]
    latest: int

    def slices_in(self, source: Source, number: int) -> Sequence[SlotSlice]:
        """The slices of a round: those that were assigned, then the slot's part of all shards, pass by pass."""
        if not number:
            return self.slices
        return source.slices_again(self.latest + number, self.slot, self.num_slots)

    def progress(self, source: Source, state: NodeState) -> SlotProgress:
        """The slot's position, by the state of its :class:`SourceReader`."""
        return SlotProgress(self.slices_in(source, state["round"]), state["slice"], state["state"], state["opened"])


class SourceReader:
    """Reads one source for a worker slot, one slice after the other; of shared slices, every n-th item.

    Args:
        source: The source.
        task: What the slot reads of it.
        begin: Where to begin, as :meth:`state` gave it.
        said: Gets the texts that a user should read.
        counts: Whether to count what it gives.

    Attributes:
        has_given: Whether it has given anything since the beginning of its slices.
    """

    def __init__(
        self, source: Source, task: SourceTask, begin: NodeState, said: list[str], *, counts: bool = False
    ) -> None:
        self._source, self._task, self._said = source, task, said
        # Items and, of packed documents, padding, documents and those that were cut.
        self._counts, self._given = counts, list(begin.get("given", NOTHING_GIVEN))
        self._slices, self._index, self._begin, self._opened = task.progress(source, begin)
        self._round: int = begin["round"]
        # In slices that are done, and of those that several slots read in what the first of them has met.
        self._skipped: list[int] = begin.get("skipped", [0] * len(LEFT_OUT))
        self._node: StreamNode[Any] | None = None
        self._reader: ShardReader | None = None
        # A source that has nothing is read to its end at once.
        self.has_given = begin != FRESH
        if source.shards.watch is None:
            source.shards.watch = StreamWatch(source)
        self._watch: StreamWatch = source.shards.watch

    def next_many(self, number: int) -> list[Any]:
        """The next samples, or batches, up to ``number``; fewer at the end only."""
        taken: list[Any] = []
        while self._index < len(self._slices):
            found = self._next_of_slice(number - len(taken))
            taken = taken + found if taken else found
            if len(taken) >= number:
                break
            self._advance()
        if taken:
            self.has_given = True
        # Whether functions remember what they were given is said once in each process.
        if not self._watch.is_over and (text := self._watch.after_batch(is_last=self._index == len(self._slices))):
            self._said.append(text)
        return taken

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read, however often it is begun again."""
        return not self._task.slices_in(self._source, 1)

    def begin_again(self) -> None:
        """Read the slot's part of all shards, as those of another pass."""
        self.close()
        self._round += 1
        self._slices = self._task.slices_in(self._source, self._round)
        self._index, self._begin, self._opened = 0, None, 0

    def state(self) -> NodeState:
        """The slice, and where in it."""
        at, opened = self._begin, self._opened
        if self._node is not None and self._reader is not None:
            at, opened = self._state_in_slice(self._node), self._reader.num_opened
        # Of most slots nothing is left out.
        skipped = {"skipped": self._skipped} if any(self._skipped) else {}
        given = {"given": self._given} if any(self._given) else {}
        return {"round": self._round, "slice": self._index, "opened": opened, "state": at, **skipped, **given}

    def _count(self, node: StreamNode[Any], number: int) -> None:
        """Count the items that a node has just given."""
        if self._counts and number:
            more = [number, *(node.counts() if isinstance(node, DocumentPacker) else ()), *NOTHING_GIVEN]
            self._given = [before + now for before, now in zip(self._given, more, strict=False)]

    def close(self) -> None:
        """Close the slice that is open."""
        node, self._node, self._reader = self._node, None, None
        if node is not None:
            node.close()

    def _next_of_slice(self, number: int) -> list[Any]:
        """The next items of the present slice; of one that several slots read, those of this slot."""
        node = self._node or self._open()
        if self._is_whole:
            items: list[Any] = node.next_many(number)
            self._seen[0] += len(items)
            self._count(node, len(items))
            return items
        items, slot_slice = [], self._slices[self._index]
        while len(items) < number:
            left_out = slot_slice.skips(self._seen)
            if left_out and node.skip(left_out) < left_out:
                break
            found = node.next_many(1)
            if not found:
                break
            self._count(node, 1)
            items += found
        return items

    def _open(self) -> StreamNode[Any]:
        piece = self._slices[self._index].of
        node, self._reader = self._source.open(piece)
        self._reader.said = self._said
        begin = piece.state if self._begin is None else self._begin
        node.reset(None if begin is None else begin["source"])
        self._seen = [0] * (len(piece.served) + 1) if begin is None else list(begin["seen"])
        self._node, self._is_whole = node, self._slices[self._index].is_whole
        return node

    def _state_in_slice(self, node: StreamNode[Any]) -> NodeState:
        # The node was reset as it was opened.
        return {"source": node.get_state(), "seen": self._seen.copy()}

    def _advance(self) -> None:
        state = None if self._node is None else self._state_in_slice(self._node)
        if not self._slices[self._index].reader:
            self._skipped = [before + now for before, now in zip(self._skipped, skipped_in(state), strict=True)]
        self.close()
        self._index, self._begin, self._opened = self._index + 1, None, 0


def skipped_in(state: NodeState | None) -> list[int]:
    """Numbers of samples that the nodes of a slice have left out, for each of :data:`LEFT_OUT`."""
    total = [0] * len(LEFT_OUT)
    while state is not None:
        total = [number + state.get(name, 0) for number, name in zip(total, LEFT_OUT, strict=True)]
        state = state.get("source")
    return total
