"""Reads samples as documents: named columns of one number a token."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.packing.settings import LABELS, MOST_INT, OF_SEQUENCES, TOKENS, Packing

Column = NDArray[Any]
Document = dict[str, Column]

# These do not hold for sequences, which have documents beside one another, and padding.
_OF_SAMPLES = ("attention_mask", *OF_SEQUENCES)
# Another name for the column of tokens, in samples without input_ids.
_OTHER_NAME = "tokens"

_log = logging.getLogger(__name__)


class DocumentReader:
    """Makes documents of samples: arrays of shape ``(tokens,)`` by name, with the separator and labels.

    A sample is a list, array or tensor of tokens, or bytes, which become ``input_ids``; or a dict with ``input_ids``
    (or, without these, ``tokens``) and other columns of one number a token (``labels``, ``loss_mask``), which are
    packed alike. Columns of another kind, and ``attention_mask`` and ``position_ids``, which do not hold for sequences,
    are left out; a log line names them once. ``labels`` are made of ``input_ids`` where samples have none. They are not
    shifted: the label of a token is the token itself, as Hugging Face's models take them.

    All documents of a reader have the same columns.

    Args:
        packing: The settings.
        named: Columns that a log line has named as left out: a set that several readers may share.
    """

    def __init__(self, packing: Packing, named: set[str] | None = None) -> None:
        self._packing = packing
        self._columns: tuple[str, ...] | None = None
        self._left_out: set[str] = set() if named is None else named

    def read(self, sample: Any, name: str) -> Document:
        """The columns of a sample, each of as many elements, the separator's among them.

        Args:
            sample: The sample.
            name: A name for it in errors, for example ``"document 17"``.

        Raises:
            ConfigurationError: The sample has no tokens, or tokens that are no integers, columns of unequal lengths or
                others than the documents before; or ``padding`` names a column that documents have not.
        """
        document = _columns_of(sample, name)
        self._check_columns(sample, document, name)
        if self._packing.separator is not None:
            document = {key: self._with_separator(key, column) for key, column in document.items()}
        document.setdefault(LABELS, document[TOKENS])
        return document

    def is_document(self, sample: Any) -> bool:
        """Whether a sample by itself is a document, whatever columns the others have."""
        try:
            _columns_of(sample, "a document")
        except ConfigurationError:
            return False
        return True

    def read_lists(self, samples: Sequence[Any]) -> tuple[Column, list[int]] | None:
        """The tokens of samples that are all lists of integers, or dicts with nothing else to pack.

        They are what :meth:`read` gives, in half the time; labels are the tokens.

        Returns:
            The tokens of all, one document after the other, and where each begins and, last, their number; None where
            a sample is anything else.
        """
        if self._columns not in (None, (TOKENS,)):
            return None
        joined, separator = list[int](), self._packing.separator
        others = self._left_out.intersection(_OF_SAMPLES)
        bounds = [0]
        for row in samples:
            if type(row) is dict and row.keys() - others == {TOKENS}:
                row = row[TOKENS]
            if type(row) is not list or not row or type(row[0]) is not int:
                return None
            joined += row
            if separator is not None:
                joined.append(separator)
            bounds.append(len(joined))
        tokens = _as_int64(joined)
        if tokens is None:
            return None
        if self._columns is None:
            self._check_padding((TOKENS,), "a document")
            self._columns = (TOKENS,)
        return tokens, bounds

    def _check_columns(self, sample: Any, document: Document, name: str) -> None:
        columns = tuple(sorted(document))
        if self._columns is None:
            self._check_padding(columns, name)
            self._columns = columns
        if columns != self._columns:
            raise ConfigurationError(
                f"{name} has the columns {list(columns)}, and the documents before it had {list(self._columns)}. Only "
                "documents of the same columns can be packed; leave out those that some lack."
            )
        if not isinstance(sample, Mapping):
            return
        left_out = {str(key) for key in sample if key not in {*document, _key_of_tokens(sample)}} - self._left_out
        self._left_out |= left_out
        if untrue := sorted(left_out.intersection(_OF_SAMPLES)):
            _log.warning(
                "Packing leaves out %s of the samples: they hold for a document by itself. Sequences have position_ids "
                "and document_ids of their own, and document_ids are -1 in padding.",
                ", ".join(untrue),
            )
        if others := sorted(left_out.difference(_OF_SAMPLES)):
            _log.warning(
                "Packing leaves out %s of the samples: only columns of one number a token can be packed.",
                ", ".join(others),
            )

    def _check_padding(self, columns: tuple[str, ...], name: str) -> None:
        unknown = sorted(self._packing.padded_columns - {TOKENS, LABELS, *columns})
        if unknown:
            raise ConfigurationError(
                f"padding names {', '.join(map(repr, unknown))}, and {name} has the columns {list(columns)}. Leave out "
                "of padding what documents have not."
            )

    def _with_separator(self, key: str, column: Column) -> Column:
        last = self._packing.separator if key in (TOKENS, LABELS) else column[-1]
        if column.dtype.kind in "iu":
            column = column.astype(np.int64)
        return np.append(column, np.asarray(last, dtype=column.dtype))


def _columns_of(sample: Any, name: str) -> Document:
    """The columns of a sample that are packed, without a separator."""
    given = sample if isinstance(sample, Mapping) else {TOKENS: sample}
    key_of_tokens = _key_of_tokens(given)
    if key_of_tokens not in given:
        raise ConfigurationError(
            f"{name} is a {type(sample).__name__} with the keys {sorted(map(str, given))}, and {TOKENS!r} is none of "
            "them. Give its tokens that name, or return them alone."
        )
    document = {TOKENS: _tokens_of(given[key_of_tokens], key_of_tokens, name)}
    num_tokens = len(document[TOKENS])
    for key, value in given.items():
        column = None if key == key_of_tokens or key in _OF_SAMPLES else _as_row(value)
        # An empty list may be of anything: names, spans.
        if column is not None and column.size:
            document[key] = _checked_column(key, column, num_tokens, name)
    return document


def _key_of_tokens(sample: Mapping[str, Any]) -> str:
    return _OTHER_NAME if TOKENS not in sample and _OTHER_NAME in sample else TOKENS


def _as_row(value: Any) -> Column | None:
    """A list, array or tensor of numbers as an array; None for anything else."""
    if isinstance(value, (str, bytes, Mapping)) or not (hasattr(value, "__len__") or hasattr(value, "__array__")):
        return None
    if isinstance(value, list) and value and type(value[0]) is int:
        integers = _as_int64(value)
        if integers is not None:
            return integers
    try:
        row = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        # RuntimeError is torch's, of tensors that are elsewhere.
        return None
    return row if row.ndim == 1 and row.dtype.kind in "biuf" else None


def _as_int64(numbers: list[int]) -> Column | None:
    """A list of integers as an array; None where one of them is no integer, or none that fits."""
    try:
        # Takes half of NumPy's time, and integers alone.
        return np.frombuffer(struct.pack(f"={len(numbers)}q", *numbers), dtype=np.int64)
    except struct.error:
        return None


def _tokens_of(value: Any, key: str, name: str) -> Column:
    row = np.frombuffer(value, dtype=np.uint8) if isinstance(value, (bytes, bytearray)) else _as_row(value)
    if (row is None or row.dtype.kind == "f") and isinstance(value, list) and {*map(type, value)} == {int}:
        # NumPy makes floats or objects of integers that no integer of its own holds.
        row = np.array(value, dtype=object)
    if row is None:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigurationError(
            f"{key} of {name} must be a row of integers in the CPU's memory, got a {type(value).__name__}{shape}. "
            "Return a list, array or tensor of tokens, or a dict with them as 'input_ids'."
        )
    if not row.size:
        raise ConfigurationError(f"{name} has no tokens. Leave documents without any out of the dataset.")
    row = _in_int64(key, row, name)
    if row.dtype.kind not in "iu":
        raise ConfigurationError(f"{key} of {name} must be integers, got {row.dtype}: {row[:3].tolist()}.")
    return row


def _checked_column(key: str, column: Column, num_tokens: int, name: str) -> Column:
    if len(column) != num_tokens:
        raise ConfigurationError(
            f"{key!r} of {name} has {len(column)} elements for {num_tokens} tokens in {TOKENS!r}. Give it one element "
            "a token, or leave it out of the samples."
        )
    if key == LABELS and column.dtype.kind not in "iu":
        raise ConfigurationError(f"{key!r} of {name} must be integers, got {column.dtype}: {column[:3].tolist()}.")
    return _in_int64(key, column, name)


def _in_int64(key: str, column: Column, name: str) -> Column:
    """A column of the largest unsigned integers as int64; others as they are."""
    if column.dtype != np.uint64 and column.dtype.kind != "O":
        return column
    largest = max(map(int, column.tolist()), key=abs)
    if abs(largest) > MOST_INT:
        raise ConfigurationError(
            f"{key} of {name} has the value {largest}, and sequences hold int64, up to {MOST_INT}."
        )
    return column.astype(np.int64)
