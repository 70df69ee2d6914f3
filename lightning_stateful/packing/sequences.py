"""Makes sequences of one length of pieces of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.packing.settings import DOCUMENTS, IGNORED_LABEL, LABELS, POSITIONS, TOKENS, Packing


class Piece(NamedTuple):
    """Consecutive tokens of a document, the separator counted as its last token.

    Attributes:
        columns: The columns of the whole document, each of shape ``(tokens,)``; see
            :class:`~lightning_stateful.packing.documents.DocumentReader`.
        first: The first token of the piece.
        end: The token behind its last one.
    """

    columns: Mapping[str, NDArray[Any]]
    first: int
    end: int


def make_sequence(pieces: Sequence[Piece], packing: Packing) -> dict[str, NDArray[Any]]:
    """Put pieces of documents one after the other, and fill the sequence up.

    Args:
        pieces: At least one, of ``packing.sequence_length`` tokens together at most.
        packing: The settings.

    Returns:
        Arrays of shape ``(sequence_length,)``: the columns of the documents (integers as int64), and

        - ``position_ids``: 0, 1, 2 ... in every piece, beginning anew with each, and in the padding;
        - ``document_ids``: the number of the piece within the sequence, from 0, and -1 for padding.
    """
    return make_sequences([pieces], packing)[0]


def make_sequences(sequences: Sequence[Sequence[Piece]], packing: Packing) -> list[dict[str, NDArray[Any]]]:
    """Make several sequences at once, which takes less time a sequence; see :func:`make_sequence`.

    The arrays of a sequence are rows of those of all.
    """
    length, pieces = packing.sequence_length, [piece for each in sequences for piece in each]
    # Of all pieces, and of the padding behind those of each sequence.
    sizes: list[int] = []
    numbers: list[int] = []
    padded: list[tuple[int, int]] = []
    for end, each in enumerate(sequences, 1):
        sizes += [piece.end - piece.first for piece in each]
        numbers += range(len(each))
        room = length - sum(sizes[len(sizes) - len(each) :])
        if room:
            padded.append((end * length - room, end * length))
            sizes.append(room)
            numbers.append(-1)
    total = len(sequences) * length
    columns = _joined(pieces, packing, total, padded)
    starts = np.cumsum(sizes) - sizes
    if not packing.labels_across and LABELS in columns:
        begins = [start for start, number in zip(starts.tolist(), numbers, strict=True) if number >= 0]
        columns[LABELS][[start for start, piece in zip(begins, pieces, strict=True) if not piece.first]] = IGNORED_LABEL
    columns[POSITIONS] = np.arange(total, dtype=np.int64) - np.repeat(starts, sizes)
    columns[DOCUMENTS] = np.repeat(np.array(numbers, dtype=np.int64), sizes)
    rows = [column.reshape(-1, length) for column in columns.values()]
    return [dict(zip(columns, arrays, strict=True)) for arrays in zip(*rows, strict=True)]


def _joined(
    pieces: Sequence[Piece], packing: Packing, total: int, padded: Sequence[tuple[int, int]]
) -> dict[str, NDArray[Any]]:
    """The columns of pieces one after the other, with padding in the places that are given."""
    columns: dict[str, NDArray[Any]] = {}
    for key in pieces[0].columns:
        if key == LABELS and all(piece.columns[LABELS] is piece.columns[TOKENS] for piece in pieces):
            # As where documents have none of their own.
            column = columns[TOKENS].copy()
        else:
            parts = [piece.columns[key][piece.first : piece.end] for piece in pieces]
            dtype = np.result_type(*{part.dtype for part in parts})
            column = np.empty(total, dtype=np.int64 if dtype.kind in "iu" else dtype)
            _write(parts, column, padded)
        for start, end in padded:
            column[start:end] = packing.padding_of(key)
        columns[key] = column
    return columns


def _write(parts: Sequence[NDArray[Any]], column: NDArray[Any], padded: Sequence[tuple[int, int]]) -> None:
    """Write parts one after the other into a column, but for the places that are given."""
    if not padded:
        np.concatenate(parts, out=column, casting="unsafe")
        return
    joined, first, at = np.concatenate(parts), 0, 0
    for start, end in [*padded, (len(column), len(column))]:
        column[at:start] = joined[first : first + start - at]
        first, at = first + start - at, end
