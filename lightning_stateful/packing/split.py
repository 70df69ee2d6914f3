"""The sequences of an epoch whose documents are joined and cut, with random access."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_stateful.bucketing.lengths import LengthArray, chunks
from lightning_stateful.core.permutation import Indices, bounds_of, concatenated_ranges, keyed_permutation
from lightning_stateful.core.seeding import derive_seed, derive_words
from lightning_stateful.packing.plan import PackingPlan, Parts

# Up to so many documents are shuffled as one column; more lie in columns of so many.
_ONE_COLUMN, _ROWS = 2**15, 1024
# Columns whose documents are remembered: a batch reads from one or two.
_COLUMNS_KEPT = 8


class _Column(NamedTuple):
    """The documents of a column in their order.

    Attributes:
        documents: Their indices, int64 of shape ``(n,)``.
        bounds: Where each begins among the column's tokens and, last, the end of the last; of shape ``(n + 1,)``.
    """

    documents: Indices
    bounds: Indices


class _Epoch(NamedTuple):
    """The order of an epoch's columns.

    Attributes:
        columns: Their numbers in the order of the epoch, int64 of shape ``(columns,)``.
        bounds: Where each begins among the epoch's tokens and, last, their end; of shape ``(columns + 1,)``.
        shifts: How far each row is rolled.
    """

    columns: Indices
    bounds: Indices
    shifts: Indices


class SplitPlan(PackingPlan):
    """All documents of an epoch one after the other, in a shuffled order, cut every ``sequence_length`` tokens.

    The documents lie in 1,024 rows, one row behind the other. Each epoch rolls every row by a shift of its own. The
    columns come in a shuffled order, and so do the documents of each column. So two documents that are neighbours in
    the dataset never stand in one column (where there is more than one), and the tokens of all columns are counted by
    adding rolled rows: no order of all documents is ever stored, only two numbers a column.

    Args:
        lengths: Tokens of each document without the separator, all at least 1.
        sequence_length: Tokens of a sequence.
        num_separators: Tokens that are put behind each document.
        seed: Chooses the orders; None for the documents in the dataset's order in every epoch.
    """

    def __init__(self, lengths: LengthArray, sequence_length: int, num_separators: int, seed: int | None) -> None:
        self._lengths, self._length, self._separators, self._seed = lengths, sequence_length, num_separators, seed
        count = len(lengths)
        self._num_rows = count if count <= _ONE_COLUMN else _ROWS
        self._width = -(-count // self._num_rows)
        self.num_tokens = sum(int(chunk.sum(dtype=np.int64)) for _, chunk in chunks(lengths)) + count * num_separators
        self.num_sequences = -(-self.num_tokens // sequence_length)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._column = lru_cache(maxsize=_COLUMNS_KEPT)(self._make_column)

    def __reduce__(self) -> tuple[type[SplitPlan], tuple[LengthArray, int, int, int | None]]:
        return type(self), (self._lengths, self._length, self._separators, self._seed)

    def tokens_of(self, sequences: Sequence[int], epoch: int) -> int:
        """Tokens of documents in a few sequences: all are full but the last of an epoch."""
        left_in_last = self.num_sequences * self._length - self.num_tokens
        return len(sequences) * self._length - left_in_last * (self.num_sequences - 1 in sequences)

    def parts_of(self, sequences: Indices, epoch: int) -> Parts:
        """The parts of documents in sequences; the last of an epoch may hold fewer than ``sequence_length`` tokens."""
        begins = sequences * self._length
        ends = np.minimum(begins + self._length, self.num_tokens)
        bounds = self._epoch(epoch).bounds
        first_places = np.searchsorted(bounds, begins, side="right") - 1
        last_places = np.searchsorted(bounds, ends, side="left") - 1
        place = int(first_places.min())
        if place == int(last_places.max()):
            # Most batches lie in one column.
            return _between(self._column(epoch, place), begins - bounds[place], ends - bounds[place])
        found = []
        for place in np.unique(concatenated_ranges(first_places, last_places - first_places + 1)).tolist():
            numbers = np.flatnonzero((first_places <= place) & (last_places >= place))
            first = np.maximum(begins[numbers], bounds[place]) - bounds[place]
            end = np.minimum(ends[numbers], bounds[place + 1]) - bounds[place]
            parts = _between(self._column(epoch, place), first, end)
            found.append((np.repeat(numbers, parts.counts), parts.documents, parts.firsts, parts.ends))
        numbers, *columns = map(np.concatenate, zip(*found, strict=True))
        return Parts.in_order(numbers, len(sequences), *columns)

    def _make_epoch(self, epoch: int) -> _Epoch:
        width = self._width
        if self._seed is None:
            sums = np.zeros(width, dtype=np.int64)
            columns, shifts = np.arange(width), np.zeros(0, dtype=np.int64)
            for column in range(width):
                rows = self._lengths[column * self._num_rows : (column + 1) * self._num_rows]
                sums[column] = int(rows.sum(dtype=np.int64)) + len(rows) * self._separators
        else:
            columns = keyed_permutation(width, derive_seed("split columns", self._seed, epoch)).take(np.arange(width))
            words = derive_words(self._num_rows, "split rows", self._seed, epoch) if width > 1 else [0] * self._num_rows
            shifts = np.array([word % width for word in words], dtype=np.int64)
            sums = self._sums(shifts)
        return _Epoch(columns, bounds_of(sums[columns]), shifts)

    def _sums(self, shifts: Indices) -> Indices:
        """The tokens of each column where rows are rolled by ``shifts``."""
        width = self._width
        if width == 1:
            return np.array([self.num_tokens])
        sums = np.zeros(width, dtype=np.int64)
        for row, shift in enumerate(shifts.tolist()):
            tokens = self._lengths[row * width : (row + 1) * width]
            if self._separators:
                tokens = tokens.astype(np.int64) + self._separators
            # Column c of the rolled row has its element (c + shift) % width; the last rows may lack some.
            head = tokens[shift:]
            sums[: len(head)] += head
            tail = tokens[:shift]
            sums[width - shift : width - shift + len(tail)] += tail
        return sums

    def _make_column(self, epoch: int, place: int) -> _Column:
        """The column that stands at ``place`` in the order of an epoch."""
        order = self._epoch(epoch)
        column, count = int(order.columns[place]), len(self._lengths)
        if self._seed is None:
            documents = np.arange(column * self._num_rows, min((column + 1) * self._num_rows, count))
        else:
            documents = np.arange(self._num_rows) * self._width + (column + order.shifts) % self._width
            documents = documents[documents < count]
            key = derive_seed("split column", self._seed, epoch, column)
            documents = documents[keyed_permutation(len(documents), key).take(np.arange(len(documents)))]
        return _Column(documents, bounds_of(self._sizes_of(documents)))


def _between(column: _Column, begins: Indices, ends: Indices) -> Parts:
    """The parts of a column's documents between pairs of its tokens."""
    documents, bounds = column
    lows = np.searchsorted(bounds, begins, side="right") - 1
    counts = np.searchsorted(bounds, ends, side="left") - lows
    rows = concatenated_ranges(lows, counts)
    starts = bounds[rows]
    firsts = np.maximum(np.repeat(begins, counts) - starts, 0)
    return Parts(documents[rows], firsts, np.minimum(bounds[rows + 1], np.repeat(ends, counts)) - starts, counts)
