"""The sequences of every epoch of documents with an index: which parts of which documents each of them holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

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


class PackingPlan(Protocol):
    """The sequences of every epoch, as a pure function of lengths, settings and seed.

    Attributes:
        num_sequences: Sequences of one epoch, as many in each.
        num_tokens: Tokens of documents in them, padding left out.
    """

    num_sequences: int
    num_tokens: int

    def parts(self, sequence: int, epoch: int) -> list[Part]:
        """The parts of documents in a sequence of an epoch, in their order."""
        ...

    def counts(self, sequences: int, epoch: int) -> Counts:
        """Counts of the first sequences of an epoch; quick where some fewer of the same epoch were counted before."""
        ...


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
