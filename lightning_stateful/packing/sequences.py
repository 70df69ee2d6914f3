"""Makes sequences of one length of pieces of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.packing.settings import IGNORED_LABEL, LABELS, Packing

POSITIONS = "position_ids"
DOCUMENTS = "document_ids"


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
    length = packing.sequence_length
    sizes = [piece.end - piece.first for piece in pieces]
    used = sum(sizes)
    sequence: dict[str, NDArray[Any]] = {}
    for key in pieces[0].columns:
        parts = [piece.columns[key][piece.first : piece.end] for piece in pieces]
        dtype = np.result_type(*parts)
        column = np.full(length, packing.padding_of(key), dtype=np.int64 if dtype.kind in "iu" else dtype)
        column[:used] = np.concatenate(parts)
        sequence[key] = column
    all_sizes = [*sizes, length - used]
    starts = np.cumsum(all_sizes) - all_sizes
    if not packing.labels_across and LABELS in sequence:
        begins = [start for start, piece in zip(starts.tolist(), pieces, strict=False) if not piece.first]
        sequence[LABELS][begins] = IGNORED_LABEL
    sequence[POSITIONS] = np.arange(length, dtype=np.int64) - np.repeat(starts, all_sizes)
    sequence[DOCUMENTS] = np.repeat(np.array([*range(len(sizes)), -1], dtype=np.int64), all_sizes)
    return sequence
