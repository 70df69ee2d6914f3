"""Reads samples as documents: named columns of one number a token."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.packing.settings import LABELS, TOKENS, Packing

Column = NDArray[Any]
Document = dict[str, Column]

# Sequences have their own: what the samples say of them would not be true any more.
_OF_SEQUENCES = ("attention_mask", "position_ids", "document_ids")

_log = logging.getLogger(__name__)


class DocumentReader:
    """Makes documents of samples: arrays of shape ``(tokens,)`` by name, with the separator and labels.

    A sample is a list, array or tensor of tokens, which become ``input_ids``; or a dict with ``input_ids`` and other
    columns of one number a token (``labels``, ``loss_mask``, ``token_type_ids``), which are packed alike. Columns of
    another kind, and ``attention_mask`` and ``position_ids``, which do not hold for sequences, are left out; a log line
    names them once. ``labels`` are made of ``input_ids`` where samples have none. They are not shifted: the label of a
    token is the token itself, as Hugging Face's models take them.

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
                others than the documents before.
        """
        given = sample if isinstance(sample, Mapping) else {TOKENS: sample}
        if TOKENS not in given:
            raise ConfigurationError(
                f"{name} is a {type(sample).__name__} with the keys {sorted(map(str, given))}, and {TOKENS!r} is none "
                f"of them. Give its tokens that name, or return them alone."
            )
        document = {TOKENS: _tokens_of(given[TOKENS], TOKENS, name)}
        num_tokens = len(document[TOKENS])
        for key, value in given.items():
            column = None if key == TOKENS or key in _OF_SEQUENCES else _as_row(value)
            # An empty list may be of anything: names, spans.
            if column is not None and column.size:
                _check_column(key, column, num_tokens, name)
                document[key] = column
        self._check_columns(given, document, name)
        if self._packing.separator is not None:
            document = {key: self._with_separator(key, column) for key, column in document.items()}
        document.setdefault(LABELS, document[TOKENS])
        return document

    def read_lists(self, samples: Sequence[Any]) -> list[Document] | None:
        """The documents of samples that are all lists of integers, or dicts with nothing else to pack.

        It gives what :meth:`read` does in half the time.

        Returns:
            The documents; None where a sample is anything else, or where none was read before.
        """
        if self._columns != (TOKENS,):
            return None
        joined, separator = array("q"), self._packing.separator
        others = self._left_out.intersection(_OF_SEQUENCES)
        ends = [0]
        for sample in samples:
            row = sample
            if type(sample) is dict and sample.keys() - others == {TOKENS}:
                row = sample[TOKENS]
            if type(row) is not list or not row or type(row[0]) is not int:
                return None
            try:
                joined.fromlist(row)
            except (TypeError, OverflowError):
                return None
            if separator is not None:
                joined.append(separator)
            ends.append(len(joined))
        tokens = np.frombuffer(joined, dtype=np.int64)
        rows = [tokens[first:end] for first, end in itertools.pairwise(ends)]
        if self._packing.is_whole:
            # One that waits for others does not keep all that were read with it.
            rows = [row.copy() for row in rows]
        return [{TOKENS: row, LABELS: row} for row in rows]

    def _check_columns(self, given: Mapping[str, Any], document: Document, name: str) -> None:
        columns = tuple(sorted(document))
        if self._columns is None:
            self._columns = columns
        if columns != self._columns:
            raise ConfigurationError(
                f"{name} has the columns {list(columns)}, and the documents before it had {list(self._columns)}. Only "
                "documents of the same columns can be packed; leave out those that some lack."
            )
        left_out = {str(key) for key in given if key not in document} - self._left_out
        if left_out:
            self._left_out |= left_out
            _log.warning(
                "Packing leaves out %s of the samples: columns need one number a token, and sequences have "
                "position_ids and document_ids of their own.",
                ", ".join(sorted(left_out)),
            )

    def _with_separator(self, key: str, column: Column) -> Column:
        last = self._packing.separator if key in (TOKENS, LABELS) else column[-1]
        if column.dtype.kind in "iu":
            column = column.astype(np.int64)
        return np.append(column, np.asarray(last, dtype=column.dtype))


def _as_row(value: Any) -> Column | None:
    """A list, array or tensor of numbers as an array; None for anything else."""
    if isinstance(value, (str, bytes, Mapping)) or not (hasattr(value, "__len__") or hasattr(value, "__array__")):
        return None
    if isinstance(value, list) and value and type(value[0]) is int:
        try:
            # Takes two thirds of NumPy's time, and integers alone.
            return np.frombuffer(array("q", value), dtype=np.int64)
        except (TypeError, OverflowError):
            pass
    try:
        row = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        # RuntimeError is torch's, of tensors that are elsewhere.
        return None
    return row if row.ndim == 1 and row.dtype.kind in "biuf" else None


def _tokens_of(value: Any, key: str, name: str) -> Column:
    row = _as_row(value)
    if row is None:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigurationError(
            f"{key} of {name} must be a row of integers in the CPU's memory, got a {type(value).__name__}{shape}. "
            "Return a list, array or tensor of tokens, or a dict with them as 'input_ids'."
        )
    if not row.size:
        raise ConfigurationError(f"{name} has no tokens. Leave documents without any out of the dataset.")
    if row.dtype.kind not in "iu":
        raise ConfigurationError(f"{key} of {name} must be integers, got {row.dtype}: {row[:3].tolist()}.")
    return row


def _check_column(key: str, column: Column, num_tokens: int, name: str) -> None:
    if len(column) != num_tokens:
        raise ConfigurationError(
            f"{key!r} of {name} has {len(column)} elements for {num_tokens} tokens in {TOKENS!r}. Give it one element "
            "a token, or leave it out of the samples."
        )
    if key == LABELS and column.dtype.kind not in "iu":
        raise ConfigurationError(f"{key!r} of {name} must be integers, got {column.dtype}: {column[:3].tolist()}.")
