"""The sequences of every epoch of documents with an index: which parts of which documents each of them holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lightning_stateful.bucketing.lengths import LengthArray
from lightning_stateful.core.checks import check_length
from lightning_stateful.core.permutation import Indices
from lightning_stateful.packing.settings import Packing

# Passes of one epoch, of a loader that starts over beside a longer one, are so many epochs apart.
_EPOCHS_OF_CYCLE = 2**20
# Sequences that are counted together.
_COUNTED_AT_ONCE = 4096


class Part(NamedTuple):
    """Consecutive tokens of a document, the separator counted as its last token.

    Attributes:
        document: The document's index.
        first: The first token.
        end: The token behind the last one.
    """

    document: int
    first: int
    end: int


class Counts(NamedTuple):
    """Counts of some of an epoch's sequences.

    Attributes:
        tokens: Tokens of documents; all else is padding.
        documents: Documents whose last tokens are in them.
        cut: Those of them that are cut: into several sequences, or truncated.
    """

    tokens: int = 0
    documents: int = 0
    cut: int = 0


class Parts(NamedTuple):
    """The parts of documents in several sequences, one sequence after the other.

    Attributes:
        documents: The documents' indices, int64 of shape ``(parts,)``.
        firsts: The first token of each part, of the same shape.
        ends: The token behind its last one.
        counts: Parts of each sequence, int64 of shape ``(sequences,)``.
    """

    documents: Indices
    firsts: Indices
    ends: Indices
    counts: Indices

    @classmethod
    def in_order(cls, numbers: Indices, num_sequences: int, *columns: Indices) -> Parts:
        """Parts that were found sequence by sequence in several turns.

        Args:
            numbers: Of each part the number of its sequence, from 0 on.
            num_sequences: How many there are.
            columns: ``documents``, ``firsts`` and ``ends``.
        """
        order = np.argsort(numbers, kind="stable")
        documents, firsts, ends = (column[order] for column in columns)
        return cls(documents, firsts, ends, np.bincount(numbers, minlength=num_sequences))


class PackingPlan(ABC):
    """The sequences of every epoch, as a pure function of lengths, settings and seed.

    Attributes:
        num_sequences: Sequences of one epoch, as many in each.
        num_tokens: Tokens of documents in them, padding left out.
    """

    num_sequences: int
    num_tokens: int
    # Tokens of each document, and of the separator behind each.
    _lengths: LengthArray
    _separators: int
    # Whether documents lose what does not fit into a sequence; and the epoch that was counted latest, up to where.
    _truncates: bool = False
    _counted: tuple[int, int, Counts] = (-1, 0, Counts())

    @abstractmethod
    def parts_of(self, sequences: Indices, epoch: int) -> Parts:
        """The parts of documents in some sequences of an epoch, in their order; together they take less time each."""

    @abstractmethod
    def tokens_of(self, sequences: Sequence[int], epoch: int) -> int:
        """Tokens of documents in a few sequences of an epoch, all together, without asking which documents."""

    def parts(self, sequence: int, epoch: int) -> list[Part]:
        """The parts of documents in a sequence of an epoch, in their order."""
        documents, firsts, ends, _ = self.parts_of(np.array([sequence]), epoch)
        return [Part(*row) for row in zip(documents.tolist(), firsts.tolist(), ends.tolist(), strict=True)]

    def counts(self, sequences: int, epoch: int) -> Counts:
        """Counts of the first sequences of an epoch; quick where some fewer of the same epoch were counted before."""
        of_epoch, first, found = self._counted
        if of_epoch != epoch or first > sequences:
            first, found = 0, Counts()
        for start in range(first, sequences, _COUNTED_AT_ONCE):
            numbers = np.arange(start, min(start + _COUNTED_AT_ONCE, sequences))
            documents, firsts, ends, _ = self.parts_of(numbers, epoch)
            sizes = self._sizes_of(documents)
            # Only a document that is truncated ends before its end.
            ended = (ends == sizes) | self._truncates
            is_cut = ended & ((firsts > 0) | (ends < sizes))
            more = Counts(int((ends - firsts).sum()), int(ended.sum()), int(is_cut.sum()))
            found = Counts(*map(sum, zip(found, more, strict=True)))
        self._counted = (epoch, sequences, found)
        return found

    def _sizes_of(self, documents: Indices) -> Indices:
        """Tokens of documents, with the separator."""
        return self._lengths[documents].astype(np.int64) + self._separators


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """The sequences of each epoch in turn, for a loader over a :class:`PackedDataset`.

    The plan behind the dataset has shuffled the documents. Epoch ``e`` has the indices ``e * length`` to
    ``(e + 1) * length - 1``, so that a worker reads from an index alone which epoch it is in.

    Attributes:
        length: Sequences of one epoch.
        packing: The settings that the plan was made with. These and what follows are there to be compared with a state.
        lengths: A digest of the lengths of documents.
        seed: The seed of the plan; None for the same sequences in every epoch.
    """

    length: int
    packing: Packing
    lengths: str
    seed: int | None = 0
    kind: ClassVar[str] = "packed"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_length(self.length)

    def __len__(self) -> int:
        return self.length

    def take(self, offsets: Indices, epoch: int, cycle: int) -> Indices:
        """The indices at ``offsets``."""
        return offsets + self.pass_of(epoch, cycle) * self.length

    def converted(self, consumed: int, saved: Mapping[str, Any]) -> int:
        """The sequences that have about as many tokens as so many of those that other settings of packing made.

        Args:
            consumed: Sequences of an epoch that were made with the other settings.
            saved: The configuration that has these.
        """
        before = saved.get("packing")
        if not isinstance(before, Mapping) or before == self.packing.config():
            return consumed
        tokens = consumed * int(before.get("sequence_length", self.packing.sequence_length))
        return min(tokens // self.packing.sequence_length, self.length)

    def config(self) -> dict[str, Any]:
        """Plain data to be compared."""
        shuffle = {"shuffle": False} if self.seed is None else {"shuffle": True, "seed": self.seed}
        return {**shuffle, "packing": self.packing.config(), "lengths": self.lengths}

    def pass_of(self, epoch: int, cycle: int) -> int:
        """The number by which the plan knows a pass of an epoch."""
        return epoch + cycle * _EPOCHS_OF_CYCLE


def reported(room: int, counts: Counts) -> dict[str, float]:
    """Counts as a report has them.

    Args:
        room: Tokens that the sequences have room for.
        counts: Counts of these sequences.
    """
    tokens, documents, cut = counts
    shares = {"cut": cut / max(documents, 1), "padding": 1 - tokens / room if room else 0.0}
    return {"tokens": tokens, "documents": documents, **shares}
