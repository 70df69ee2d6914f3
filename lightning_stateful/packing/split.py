"""The sequences of an epoch whose documents are joined and cut, with random access."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_stateful.bucketing.lengths import LengthArray, chunks
from lightning_stateful.core.permutation import Indices, bounds_of, keyed_permutation
from lightning_stateful.core.seeding import derive_seed, derive_words
from lightning_stateful.packing.plan import Counts, Part

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


class SplitPlan:
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
        # The last column that was counted, and documents in those before it.
        self._counted_epoch, self._counted = -1, (0, 0, 0)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._column = lru_cache(maxsize=_COLUMNS_KEPT)(self._make_column)

    def __reduce__(self) -> tuple[type[SplitPlan], tuple[LengthArray, int, int, int | None]]:
        return type(self), (self._lengths, self._length, self._separators, self._seed)

    def parts(self, sequence: int, epoch: int) -> list[Part]:
        """The parts of documents in a sequence; the last of an epoch may hold fewer than ``sequence_length`` tokens."""
        found: list[Part] = []
        at = sequence * self._length
        end = min(at + self._length, self.num_tokens)
        bounds = self._epoch(epoch).bounds
        place = int(np.searchsorted(bounds, at, side="right")) - 1
        while at < end:
            start = int(bounds[place])
            found += _between(self._column(epoch, place), at - start, end - start)
            place += 1
            at = int(bounds[place])
        return found

    def counts(self, sequences: int, epoch: int) -> Counts:
        """Counts of the first sequences of an epoch."""
        end = min(sequences * self._length, self.num_tokens)
        bounds = self._epoch(epoch).bounds
        last = int(np.searchsorted(bounds, end, side="left"))
        place, documents, cut = self._counted if self._counted_epoch == epoch else (0, 0, 0)
        if place >= last:
            place, documents, cut = 0, 0, 0
        for column in range(place, last):
            # The last one may go on beyond the end, and is counted again.
            self._counted_epoch, self._counted = epoch, (column, documents, cut)
            ends = self._column(epoch, column).bounds + int(bounds[column])
            of_these = int(np.searchsorted(ends[1:], end, side="right"))
            crosses = ends[:of_these] // self._length != (ends[1 : of_these + 1] - 1) // self._length
            documents, cut = documents + of_these, cut + int(crosses.sum())
        return Counts(end, documents, cut)

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
        return _Column(documents, bounds_of(self._lengths[documents].astype(np.int64) + self._separators))


def _between(column: _Column, first: int, end: int) -> list[Part]:
    """The parts of a column's documents between two of its tokens, or to its end."""
    documents, bounds = column
    low = int(np.searchsorted(bounds, first, side="right")) - 1
    high = min(int(np.searchsorted(bounds, end, side="left")), len(documents))
    starts, ends = bounds[low:high], bounds[low + 1 : high + 1]
    firsts = np.maximum(first - starts, 0)
    lasts = np.minimum(ends, end) - starts
    rows = zip(documents[low:high].tolist(), firsts.tolist(), lasts.tolist(), strict=True)
    return [Part(*row) for row in rows]
