"""The sequences of every epoch of documents with an index: which parts of which documents each of them holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lightning_stateful.core.checks import check_length
from lightning_stateful.core.permutation import Indices
from lightning_stateful.packing.settings import Packing

# Passes of one epoch, of a loader that starts over beside a longer one, are so many epochs apart.
_EPOCHS_OF_CYCLE = 2**20


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

    @abstractmethod
    def parts_of(self, sequences: Indices, epoch: int) -> Parts:
        """The parts of documents in some sequences of an epoch, in their order; together they take less time each."""

    def parts(self, sequence: int, epoch: int) -> list[Part]:
        """The parts of documents in a sequence of an epoch, in their order."""
        documents, firsts, ends, _ = self.parts_of(np.array([sequence]), epoch)
        return [Part(*row) for row in zip(documents.tolist(), firsts.tolist(), ends.tolist(), strict=True)]


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
        return offsets + (epoch + cycle * _EPOCHS_OF_CYCLE) * self.length

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
