"""Packs the documents of a stream into sequences of one length: a torchdata node whose state holds no tokens."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StreamError
from lightning_stateful.packing.documents import Document, DocumentReader
from lightning_stateful.packing.open_sequences import OpenSequence, filler_of
from lightning_stateful.packing.sequences import make_sequences
from lightning_stateful.packing.settings import LABELS, TOKENS, Packing
from lightning_stateful.shapes import COUNT, refuse_unless
from lightning_stateful.stream_nodes.nodes import NodeState, StreamNode, next_many, reset_to, skip, sources_of, state_of
from lightning_stateful.stream_nodes.numbered import numbered, without_numbers
from lightning_stateful.stream_nodes.read_ahead import OTHER_SEED, BlockShuffle
from lightning_stateful.stream_nodes.shard_reader import OnError, check_on_error
from lightning_stateful.stream_nodes.transforms import Where, sample_in_words

# Documents of the first block, and of a block at most; the next has more where a block has few tokens, or less.
_FIRST_BLOCK, _MOST_DOCUMENTS = 16, 128
_FEW_TOKENS, _MANY_TOKENS = 2**13, 2**16
# Of the number of open sequences in a state.
_BITS_OF_NUMBER = 24
# Short sequences take less time each where some are made together, in arrays that a processor's cache holds.
_TOKENS_AT_ONCE = 8192
# Columns that are left out, which a process names once and not in every shard.
_named: set[str] = set()


class _Block(NamedTuple):
    """The state before a block of documents was read.

    Attributes:
        number: The number of the block since the node was reset.
        source: The state of the source.
        size: Documents of the block; the last may have fewer.
        rooms: Tokens that fit into each open sequence, the oldest first.
        waited: Sequences finished since the oldest of these has been the oldest.
        num_made: Sequences finished before it since the node was reset.
        dropped: Documents that are too long and left out before it.
        skipped: Samples that are no documents and left out before it.
    """

    number: int
    source: NodeState
    size: int
    rooms: tuple[int, ...]
    waited: int
    num_made: int
    dropped: int
    skipped: int


class _NumberedDocument(Document):
    """A document with the numbers of the sample that it was read from."""

    def __init__(self, columns: Document, numbers: tuple[int, ...]) -> None:
        super().__init__(columns)
        self.numbers = numbers


class DocumentPacker(StreamNode[dict[str, NDArray[Any]]]):
    """Packs documents into sequences of one length.

    Documents are read in blocks. With ``how="split"`` they are joined and cut; with ``how="whole"`` each is put into
    the open sequence with the least room that it fits in, and where it fits in none and as many are open as may be, the
    fullest is closed. Where the source ends, the sequences that are still open are filled up with padding and given.

    Args:
        source: The documents, as :class:`~lightning_stateful.packing.DocumentReader` takes them.
        packing: The settings.
        on_error: ``"skip"`` to leave out samples that are no documents (without tokens, or with some that are no
            integers) or too long, and count them. Documents of other columns than those before are an error still.
        where: Says where the samples come from, for errors.

    State:
        ``source``, its state before the block that has the first document of the oldest sequence not given yet;
        ``size``, the documents of that block; ``open``, how many tokens had room in the sequences that were open there,
        and how many were finished since the oldest of them was the oldest, as text; ``served``, how many sequences have
        been given since; where documents may be left out, also how many were before, as ``dropped`` those that are too
        long and as ``skipped_samples`` the others. On a resume
        documents are read again from there on, and go where they went before, which follows from ``open`` alone: what
        sequences held there has been given, and what they hold now is read.

    Raises:
        ConfigurationError: ``packing`` is none.
        ShardError: A document is empty, has no integers, or other columns than those before.
        StreamError: A document is too long.
        PositionError: The source has other documents than before.
    """

    context: ClassVar[tuple[str, ...]] = ("on_error", "where")
    keeps_numbers = True
    state_shape: ClassVar[Mapping[str, Any]] = {
        "source": object,
        "size": range(1, _MOST_DOCUMENTS + 1),
        "open": str,
        "served": COUNT,
    }

    def __init__(
        self,
        source: BaseNode[Any],
        packing: Packing,
        *,
        on_error: OnError = "raise",
        where: Where | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(packing, Packing):
            raise ConfigurationError(f"packing must be a Packing, got {packing!r}.")
        check_on_error(on_error)
        self.source = source
        self._packing, self._skips, self._where = packing, on_error == "skip", where
        self._documents = DocumentReader(packing, _named)

    def check_state(self, state: Any, path: str) -> None:
        """Refuse a state of another shape, or whose text is not one that is written; see :class:`StreamNode`."""
        super().check_state(state, path)
        length, most = self._packing.sequence_length, self._packing.open_sequences or 1
        is_text, rooms = False, list[int]()
        with suppress(ValueError):
            rooms, waited = _decoded(state["open"], length, most)
            is_text = waited >= 0 and all(rooms) and _encoded(rooms, waited, length) == state["open"]
        refuse_unless(is_text, state["open"], f"the rooms of at most {most} open sequences", f"{path}.open")
        # What was open held documents that are not read again, so it has been given since.
        has_given = bool(state["served"] or not rooms)
        refuse_unless(has_given, state["served"], "the number of sequences given since, 1 or more", f"{path}.served")

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or read the documents again that were held when a state was taken."""
        super().reset(initial_state)
        begun = initial_state or {"source": None, "size": _FIRST_BLOCK, "open": "", "served": 0}
        reset_to(self.source, begun["source"])
        self._filler = filler_of(self._packing, *_decoded(begun["open"], self._packing.sequence_length))
        # The states before those blocks whose documents are still held; and the number of the next block.
        self._blocks: deque[_Block] = deque()
        self._next_block, self._size = 0, begun["size"]
        self._dropped, self._skipped = begun.get("dropped", 0), begun.get("skipped_samples", 0)
        # Finished sequences of the latest block, how many of them have been given, and of each number of them the
        # oldest block that the others need.
        self._finished: list[OpenSequence] = []
        self._at = 0
        self._oldest = [0]
        # Some of them that were made, from the first of these on.
        self._made: list[dict[str, NDArray[Any]]] = []
        self._first_made = 0
        self._num_made = 0
        self._is_over = False
        left_out = self.skip(begun["served"])
        if left_out < begun["served"] or (begun["served"] and self._oldest[self._at] < 0):
            raise PositionError(
                f"{begun['served']} sequences were given since a document that is read again, and now its stream gives "
                f"{left_out}, or others. Read the same data with the same functions and the same packing, or resume "
                f"from another checkpoint. {OTHER_SEED}"
            )

    def next_many(self, number: int) -> list[dict[str, NDArray[Any]]]:
        """The next sequences, up to ``number``."""
        sequences: list[Any] = []
        self._given: list[OpenSequence] = []
        while len(sequences) < number and self._has_next():
            if self._at >= self._first_made + len(self._made):
                some = self._finished[self._at : self._at + max(_TOKENS_AT_ONCE // self._packing.sequence_length, 1)]
                self._made = make_sequences([sequence.pieces for sequence in some], self._packing)
                self._first_made = self._at
            taken = self._made[self._at - self._first_made :][: number - len(sequences)]
            self._given += self._finished[self._at : self._at + len(taken)]
            self._at += len(taken)
            sequences += taken
        if not sequences or not isinstance(self._given[0].pieces[0].columns, _NumberedDocument):
            return sequences
        return numbered(sequences, list(map(_numbers_of, self._given)))

    def counts(self) -> tuple[int, int, int]:
        """Counts of the sequences that :meth:`next_many` gave latest.

        Returns:
            Tokens of padding; documents whose last tokens are in them; and those of these documents that are cut: into
            several sequences, or truncated.
        """
        padding = documents = cut = 0
        truncates = self._packing.too_long == "truncate"
        for sequence in self._given:
            padding += sequence.room
            for columns, first, end in sequence.pieces:
                size = len(columns[TOKENS])
                documents += end == size or truncates
                cut += (first > 0 and end == size) or (truncates and end < size)
        return padding, documents, cut

    def skip(self, number: int) -> int:
        """Leave out sequences, up to ``number``; their documents are read."""
        skipped = 0
        while skipped < number and self._has_next():
            taken = min(number - skipped, len(self._finished) - self._at)
            self._at += taken
            skipped += taken
        return skipped

    def get_state(self) -> NodeState:
        """The state before the oldest block that is needed, and what has been given since."""
        number = self._oldest[self._at]
        block = self._blocks[number - self._blocks[0].number] if number < self._next_block else self._next()
        state = {
            "source": block.source,
            "size": block.size,
            "open": _encoded(block.rooms, block.waited, self._packing.sequence_length),
            "served": self._num_made - len(self._finished) + self._at - block.num_made,
        }
        if self._skips:
            state["skipped_samples"] = block.skipped
        return {**state, "dropped": block.dropped} if self._skips or self._packing.too_long == "drop" else state

    def describe(self) -> list[Any]:
        """Plain data to be compared."""
        described = self._packing.config()
        if self._packing.is_whole:
            described["open_sequences"] = self._packing.open_sequences
        return ["packed", described]

    def _has_next(self) -> bool:
        """Whether there is another finished sequence; reads blocks until there is, or to the end."""
        while self._at == len(self._finished) and not self._is_over:
            self._read_block()
        return self._at < len(self._finished)

    def _next(self) -> _Block:
        """The state before the next block."""
        rooms = tuple(sequence.room for sequence in self._filler.open)
        at = (self._next_block, state_of(self.source), self._size)
        return _Block(*at, rooms, self._filler.waited, self._num_made, self._dropped, self._skipped)

    def _read_block(self) -> None:
        """Read a block, or finish what is open where there is none."""
        while self._blocks and self._blocks[0].number < self._oldest[self._at]:
            self._blocks.popleft()
        block = self._next()
        samples: list[Any] = next_many(self.source, self._size)
        finished: list[OpenSequence] = []
        if samples:
            finished = self._fill(samples, block)
            self._blocks.append(block)
            self._next_block += 1
        else:
            self._is_over = True
            finished = self._filler.take_all()
        self._finished, self._made, self._at, self._first_made = finished, [], 0, 0
        self._num_made += len(finished)
        oldest = min((sequence.block for sequence in self._filler.open), default=self._next_block)
        blocks = (sequence.block for sequence in reversed(finished))
        self._oldest = list(accumulate(blocks, min, initial=oldest))[::-1]

    def _fill(self, samples: Sequence[Any], block: _Block) -> list[OpenSequence]:
        """Put the documents of a block into sequences; returns those that are finished."""
        finished: list[OpenSequence] = []
        samples, numbers = without_numbers(samples)
        num_tokens, most = 0, self._packing.sequence_length if self._packing.is_whole else None
        documents = self._read_lists(samples)
        for number, sample in enumerate(samples):
            document = self._read(sample, number, block) if documents is None else documents[number]
            if document is None:
                continue
            size = len(document[TOKENS])
            num_tokens += size
            if most is not None and size > most and self._packing.too_long in ("error", "drop"):
                if self._packing.too_long == "error" and not self._skips:
                    raise self._too_long(document, sample, number, block)
                self._dropped += 1
                continue
            if numbers is not None:
                document = _NumberedDocument(document, numbers[number])
            finished += self._filler.add(document, block.number)
        if num_tokens > _MANY_TOKENS:
            self._size = max(self._size // 2, 1)
        elif num_tokens < _FEW_TOKENS:
            self._size = min(self._size * 2, _MOST_DOCUMENTS)
        return finished

    def _read_lists(self, samples: Sequence[Any]) -> list[Document] | None:
        """All samples as documents, if they are lists."""
        try:
            found = self._documents.read_lists(samples)
        except ConfigurationError:
            # Said of the first of them.
            return None
        if found is None:
            return None
        rows = [found[0][first:end] for first, end in pairwise(found[1])]
        if self._packing.is_whole:
            # One that waits for others does not keep all that were read with it.
            rows = [row.copy() for row in rows]
        return [{TOKENS: row, LABELS: row} for row in rows]

    def _read(self, sample: Any, number: int, block: _Block) -> Document | None:
        """A sample as a document; None where it is none, and left out."""
        try:
            return self._documents.read(sample, "a document")
        except ConfigurationError:
            # Which of differing columns are right is not to be known: they follow from where reading began.
            if self._skips and not self._documents.is_document(sample):
                self._skipped += 1
                return None
            raise self._error_of(sample, number, block) from None

    def _error_of(self, sample: Any, number: int, block: _Block) -> Exception:
        """The error that a sample is no document, which says where it comes from."""
        try:
            self._documents.read(sample, self._said(sample, number, block))
        except ConfigurationError as error:
            is_skipped = not self._documents.is_document(sample)
            remedy = ' Or pass on_error="skip" to leave such samples out, and count them.' if is_skipped else ""
            return ShardError(f"A document could not be packed: {error}{remedy}")
        return ShardError(f"A document could not be packed: {self._said(sample, number, block)}.")

    def _too_long(self, document: Document, sample: Any, number: int, block: _Block) -> StreamError:
        return StreamError(
            f"A document is too long: {self._said(sample, number, block)} has {len(document[TOKENS])} tokens, and a "
            f'sequence has {self._packing.sequence_length}. Pass a Packing with too_long="drop", "truncate" or '
            '"split", or a larger sequence_length; on_error="skip" leaves such documents out, too.'
        )

    def _said(self, sample: Any, number: int, block: _Block) -> str:
        """A sample in words, after reading its block again up to it."""
        is_there = False
        with suppress(Exception):
            reset_to(self.source, block.source)
            skip(self.source, number)
            is_there = bool(next_many(self.source, 1))
            node: BaseNode[Any] | None = self.source
            while node is not None:
                if isinstance(node, BlockShuffle):
                    node.go_behind_last()
                    break
                node = next(iter(sources_of(node)), None)
        return sample_in_words(sample, self._where, is_there=is_there)


def _numbers_of(sequence: OpenSequence) -> tuple[int, ...]:
    """The numbers of the samples whose documents begin in a sequence."""
    documents: Any = [columns for columns, first, _ in sequence.pieces if not first]
    return tuple(number for document in documents for number in document.numbers)


def packed_otherwise(state: Any) -> Any:
    """A copy of plain data in which packers begin anew with the oldest block of documents that they hold.

    So a state goes on under other settings of packing: no document that was held is lost, and some may come again.

    Args:
        state: Where worker slots stand, with the states of packers anywhere in it.
    """
    if isinstance(state, Mapping):
        begins = {"open": "", "served": 0} if state.keys() >= {"source", "size", "open", "served"} else {}
        return {**{name: packed_otherwise(value) for name, value in state.items()}, **begins}
    return list(map(packed_otherwise, state)) if isinstance(state, (list, tuple)) else state


def _encoded(rooms: Sequence[int], waited: int, length: int) -> str:
    """The rooms of open sequences, and for how long the oldest has waited, as text: one number, to base 85."""
    if not rooms:
        return ""
    number = waited + 1
    for room in rooms:
        number = number * (length + 1) + room
    number = number << _BITS_OF_NUMBER | len(rooms)
    return base64.b85encode(number.to_bytes((number.bit_length() + 7) // 8, "big")).decode()


def _decoded(text: str, length: int, most: int = 2**_BITS_OF_NUMBER) -> tuple[list[int], int]:
    """Read what :func:`_encoded` wrote, of at most so many sequences."""
    if not text:
        return [], 0
    number = int.from_bytes(base64.b85decode(text), "big")
    number, count = number >> _BITS_OF_NUMBER, number & (1 << _BITS_OF_NUMBER) - 1
    rooms = []
    for _ in range(min(count, most)):
        number, room = divmod(number, length + 1)
        rooms.append(room)
    return rooms[::-1], number - 1
