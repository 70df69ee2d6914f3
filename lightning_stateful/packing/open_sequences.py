"""Fills sequences with documents as these come: joined and cut, or whole ones where they fit best."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from lightning_stateful.packing.sequences import Piece
from lightning_stateful.packing.settings import TOKENS, Packing

# An open sequence is closed once so many others, for each that may be open, were finished while it was the oldest:
# documents that are held never lie further back than that.
_PATIENCE = 2


class OpenSequence:
    """A sequence that is not full yet.

    Attributes:
        room: Tokens that fit in.
        block: The block of documents that its first one was read in; -1 where its pieces are not known.
        pieces: The pieces of documents in it.
    """

    __slots__ = ("block", "pieces", "room")

    def __init__(self, room: int, block: int) -> None:
        self.room, self.block = room, block
        self.pieces: list[Piece] = []


class SequenceFiller(ABC):
    """Puts documents into open sequences, and gives those that are finished.

    It goes on from the rooms of open sequences alone: which document goes where does not depend on what they hold.

    Args:
        packing: The settings.
        rooms: Tokens that fit into each open sequence, the oldest first.
        waited: Sequences finished since the oldest has been the oldest.
    """

    def __init__(self, packing: Packing, rooms: Iterable[int], waited: int) -> None:
        self._packing, self._length, self.waited = packing, packing.sequence_length, waited
        self._hold([OpenSequence(room, -1) for room in rooms])

    @property
    @abstractmethod
    def open(self) -> Sequence[OpenSequence]:
        """The open sequences, the oldest first."""

    @abstractmethod
    def add(self, columns: Mapping[str, NDArray[Any]], block: int) -> list[OpenSequence]:
        """Put a document into sequences; returns those that are finished.

        Args:
            columns: The document.
            block: The block that it was read in.
        """

    @abstractmethod
    def take_all(self) -> list[OpenSequence]:
        """Finish the open sequences, the oldest first."""

    @abstractmethod
    def _hold(self, sequences: list[OpenSequence]) -> None:
        """Begin with open sequences, the oldest first."""


class SplitFiller(SequenceFiller):
    """Joins documents, and cuts them where a sequence is full."""

    _open: list[OpenSequence]

    @property
    def open(self) -> Sequence[OpenSequence]:
        """The sequence that is filled, if there is one."""
        return self._open

    def add(self, columns: Mapping[str, NDArray[Any]], block: int) -> list[OpenSequence]:
        """Put a document into as many sequences as it takes."""
        first, num_tokens = 0, len(columns[TOKENS])
        if self._open and num_tokens < self._open[0].room:
            # Most documents are short.
            self._open[0].pieces.append(Piece(columns, 0, num_tokens))
            self._open[0].room -= num_tokens
            return []
        finished: list[OpenSequence] = []
        while first < num_tokens:
            if not self._open:
                self._open.append(OpenSequence(self._length, block))
            sequence = self._open[0]
            end = min(first + sequence.room, num_tokens)
            sequence.pieces.append(Piece(columns, first, end))
            sequence.room -= end - first
            first = end
            if not sequence.room:
                finished += self.take_all()
        return finished

    def take_all(self) -> list[OpenSequence]:
        """Finish the sequence that is filled."""
        taken, self._open = self._open, []
        return taken

    def _hold(self, sequences: list[OpenSequence]) -> None:
        self._open = sequences


class BestFitFiller(SequenceFiller):
    """Puts each document into the open sequence with the least room that it fits in.

    One that fits in none opens a sequence; where as many are open as may be, the fullest is closed for it.
    """

    # By number, in which they were opened; and the pairs of room and number, sorted.
    _by_number: dict[int, OpenSequence]
    _rooms: list[tuple[int, int]]

    @property
    def open(self) -> Sequence[OpenSequence]:
        """The open sequences, the oldest first."""
        return list(self._by_number.values())

    def add(self, columns: Mapping[str, NDArray[Any]], block: int) -> list[OpenSequence]:
        """Put a document into a sequence; or its parts, where it is too long and is to be cut."""
        num_tokens, finished = len(columns[TOKENS]), list[OpenSequence]()
        if num_tokens <= self._length or self._packing.too_long == "truncate":
            self._add(Piece(columns, 0, min(num_tokens, self._length)), block, finished)
        elif self._packing.too_long == "split":
            for first in range(0, num_tokens, self._length):
                self._add(Piece(columns, first, min(first + self._length, num_tokens)), block, finished)
        return finished

    def take_all(self) -> list[OpenSequence]:
        """Finish the open sequences, the oldest first."""
        taken = list(self._by_number.values())
        self._by_number, self._rooms, self.waited = {}, [], 0
        return taken

    def _add(self, piece: Piece, block: int, finished: list[OpenSequence]) -> None:
        size = piece.end - piece.first
        where = bisect_left(self._rooms, (size, -1))
        if where < len(self._rooms):
            _, number = self._rooms.pop(where)
            sequence = self._by_number[number]
        else:
            if len(self._rooms) == self._most and size < self._length:
                self._close(self._rooms.pop(0)[1], finished)
            number, sequence = self._next, OpenSequence(self._length, block)
            self._by_number[number] = sequence
            self._next += 1
        sequence.pieces.append(piece)
        sequence.room -= size
        if sequence.room:
            insort(self._rooms, (sequence.room, number))
        else:
            self._close(number, finished)

    def _close(self, number: int, finished: list[OpenSequence]) -> None:
        """Finish a sequence, which has left the rooms, and the oldest if it has waited for too long."""
        oldest = next(iter(self._by_number))
        finished.append(self._by_number.pop(number))
        self.waited = 0 if number == oldest else self.waited + 1
        if self.waited >= _PATIENCE * self._most:
            sequence = self._by_number.pop(oldest)
            del self._rooms[bisect_left(self._rooms, (sequence.room, oldest))]
            finished.append(sequence)
            self.waited = 0

    def _hold(self, sequences: list[OpenSequence]) -> None:
        self._most = self._packing.open_sequences or 1
        self._by_number = dict(enumerate(sequences))
        self._rooms = sorted((sequence.room, number) for number, sequence in enumerate(sequences))
        self._next = len(sequences)


def filler_of(packing: Packing, rooms: Iterable[int], waited: int) -> SequenceFiller:
    """Make what fills sequences by these settings."""
    return (BestFitFiller if packing.is_whole else SplitFiller)(packing, rooms, waited)
