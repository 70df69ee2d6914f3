"""Makes sequences of one length of pieces of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.core.permutation import Indices
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
    pieces = [piece for each in sequences for piece in each]
    columns: dict[str, NDArray[Any]] = {}
    for key in pieces[0].columns:
        if key != LABELS or any(piece.columns[LABELS] is not piece.columns[TOKENS] for piece in pieces):
            columns[key] = np.concatenate([piece.columns[key][piece.first : piece.end] for piece in pieces])
    sizes, firsts = np.array([piece.end - piece.first for piece in pieces]), np.array([piece.first for piece in pieces])
    return lay_out(columns, sizes, firsts == 0, np.array(list(map(len, sequences))), packing)


def lay_out(
    columns: Mapping[str, NDArray[Any]],
    sizes: Indices,
    are_first: NDArray[np.bool_],
    counts: Indices,
    packing: Packing,
) -> list[dict[str, NDArray[Any]]]:
    """Make sequences of columns in which their pieces lie one after the other; see :func:`make_sequence`.

    Args:
        columns: The columns, without padding, each of shape ``(tokens,)``. Where there are no labels, the tokens are.
        sizes: Tokens of each piece, int64 of shape ``(pieces,)``.
        are_first: Whether a piece begins its document, bool of the same shape.
        counts: Pieces of each sequence, at least 1, int64 of shape ``(sequences,)``.
        packing: The settings.
    """
    length, total = packing.sequence_length, packing.sequence_length * len(counts)
    # Behind the pieces of a sequence stands its padding, which may have no token.
    last = np.cumsum(counts)
    rooms = length - np.add.reduceat(sizes, last - counts)
    of_sequence = np.arange(len(counts))
    at_pieces = np.arange(len(sizes)) + np.repeat(of_sequence, counts)
    all_sizes = np.empty(len(sizes) + len(counts), dtype=np.int64)
    all_sizes[at_pieces], all_sizes[last + of_sequence] = sizes, rooms
    numbers = np.full(len(all_sizes), -1, dtype=np.int64)
    numbers[at_pieces] = np.arange(len(sizes)) - np.repeat(last - counts, counts)
    starts = np.cumsum(all_sizes) - all_sizes
    places = np.flatnonzero(rooms)
    ends = (places + 1) * length
    padded = list(zip((ends - rooms[places]).tolist(), ends.tolist(), strict=True))
    filled = {key: _filled(column, padded, total, packing.padding_of(key)) for key, column in columns.items()}
    if LABELS not in filled:
        labels = filled[TOKENS].copy()
        for start, end in padded:
            labels[start:end] = packing.padding_of(LABELS)
        filled[LABELS] = labels
    if not packing.labels_across:
        filled[LABELS][starts[at_pieces[are_first]]] = IGNORED_LABEL
    filled[POSITIONS] = np.arange(total) - np.repeat(starts, all_sizes)
    filled[DOCUMENTS] = np.repeat(numbers, all_sizes)
    rows = [column.reshape(-1, length) for column in filled.values()]
    return [dict(zip(filled, arrays, strict=True)) for arrays in zip(*rows, strict=True)]


def _filled(column: NDArray[Any], padded: Sequence[tuple[int, int]], total: int, padding: int) -> NDArray[Any]:
    """A column with padding in the places that are given; integers as int64."""
    dtype = np.dtype(np.int64) if column.dtype.kind in "iu" else column.dtype
    if not padded:
        return column.astype(dtype, copy=False)
    filled = np.empty(total, dtype=dtype)
    first, at = 0, 0
    for start, end in [*padded, (total, total)]:
        filled[at:start] = column[first : first + start - at]
        filled[start:end] = padding
        first, at = first + start - at, end
    return filled
