"""A map-style dataset of sequences of one length, packed out of a map-style dataset of documents."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from lightning_stateful.bucketing.lengths import LengthArray, chunks, digest
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import Indices, bounds_of, concatenated_ranges
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.length_cache import lengths_of
from lightning_stateful.loaders.planned_batches import read_batch
from lightning_stateful.packing.documents import DocumentReader
from lightning_stateful.packing.plan import Counts, PackingPlan, Part, Parts, SequenceOrder, reported
from lightning_stateful.packing.sequences import lay_out
from lightning_stateful.packing.settings import DOCUMENTS, IGNORED_LABEL, LABELS, TOKENS, Packing
from lightning_stateful.packing.split import SplitPlan
from lightning_stateful.packing.whole import WholePlan
from lightning_stateful.samplers.batch_samplers import Lengths
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.samplers.fingerprint import digest as fingerprint

PackedSequence = dict[str, NDArray[Any]]


class PackedDataset(Dataset[PackedSequence]):
    """Packs the documents of a map-style dataset into sequences of one length, for any loader.

    Every epoch has the same number of sequences, other ones in each, and holds every document once: every token of it,
    but for what ``too_long`` drops or truncates. Index ``i`` below ``len(dataset)`` is sequence ``i`` of the epoch that
    :meth:`set_epoch` has told; ``epoch * len(dataset) + i`` names the epoch itself, whatever was told. The sequences of
    an epoch are shuffled already: read them in order. A stateful loader takes :attr:`order` as its sampler::

        StatefulLoader(dataset, sampler=dataset.order, batch_size=8)

    A sequence is a dict of arrays of shape ``(sequence_length,)``: ``input_ids``, ``labels`` (not shifted: the label of
    a token is the token), other columns of one number a token, ``position_ids``, which begin anew with every document,
    and ``document_ids``, which count the documents of a sequence and are -1 in padding.

    Args:
        dataset: Its samples are lists, arrays or tensors of tokens, or dicts with them as ``input_ids``.
        lengths: The number of tokens of every sample, without the separator: integers, the path of a ``.npy`` file, the
            name of a column or attribute, or a function of a sample; see :class:`BucketDataModule`.
        packing: The settings.
        seed: Chooses the order of documents.
        shuffle: False for documents in the dataset's order (with ``how="whole"`` in that of their lengths), the same in
            every epoch.
        cache_file: Path of a ``.npy`` file for lengths that a function measures.
        measure_workers: Processes that measure lengths.

    Attributes:
        order: The sequences of each epoch in turn.
        num_tokens: Tokens of documents in an epoch; the rest of its sequences is padding.
        num_dropped: Documents left out because they are longer than a sequence.

    Raises:
        ConfigurationError: A document is empty or too long, or lengths are not found; or, when a sample is read, it has
            another number of tokens than ``lengths`` says.
    """

    dataset: Any
    num_dropped: int
    num_tokens: int
    packing: Packing

    def __init__(
        self,
        dataset: Any,
        *,
        lengths: Lengths | Callable[[Any], int],
        packing: Packing,
        seed: int = 0,
        shuffle: bool = True,
        cache_file: str | Path | None = None,
        measure_workers: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"PackedDataset needs a dataset with __getitem__ and __len__, which a {type(dataset).__name__} has "
                "not. StreamDataModule(..., packing=...) packs datasets without an index."
            )
        self.dataset, self.packing = dataset, packing
        self.lengths: LengthArray = lengths_of(dataset, lengths, cache_file=cache_file, num_workers=measure_workers)
        for start, chunk in chunks(self.lengths):
            if not int(chunk.min()):
                raise ConfigurationError(
                    f"Document {start + int(chunk.argmin())} has no tokens, as lengths say. Leave documents without "
                    "any out of the dataset."
                )
        self._seed = as_int("seed", seed) if shuffle else None
        self._plan: PackingPlan = (
            WholePlan(self.lengths, packing, self._seed)
            if packing.is_whole
            else SplitPlan(self.lengths, packing.sequence_length, packing.num_separators, self._seed)
        )
        self._epoch, self._digest = 0, digest(self.lengths)
        self._named: set[str] = set()
        # Of whole epochs.
        self._whole: dict[int, Counts] = {}
        self.num_tokens, self.num_dropped = self._plan.num_tokens, getattr(self._plan, "num_dropped", 0)
        if not len(self):
            raise ConfigurationError(
                f"All {len(dataset)} documents are longer than a sequence of {packing.sequence_length} tokens, and "
                'dropped. Raise sequence_length, or pass too_long="split" or "truncate".'
            )

    def __len__(self) -> int:
        """Sequences of one epoch."""
        return self._plan.num_sequences

    def __iter__(self) -> Iterator[PackedSequence]:
        """The sequences of the epoch that was told."""
        return (self[index] for index in range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch that the indices below ``len(dataset)`` belong to; before workers are started."""
        self._epoch = as_int("epoch", epoch, least=0)

    @property
    def packs_anew(self) -> bool:
        """Whether each epoch has other sequences."""
        return self._seed is not None

    @property
    def order(self) -> SequenceOrder:
        """The sequences of each epoch in turn, as a loader's ``sampler``."""
        return SequenceOrder(len(self), self.packing, self._digest, self._seed)

    def describe(self) -> dict[str, Any]:
        """For a state: a digest of all that decides what sequences hold, and the documents."""
        return {"packed": fingerprint(self.order.config()), "of": describe_dataset(self.dataset)}

    def parts(self, index: int) -> list[Part]:
        """The documents' indices in the sequence at ``index``, and which tokens of each; nothing is read.

        Raises:
            IndexError: ``index`` is negative.
        """
        number = as_int("index", index)
        if number < 0:
            raise IndexError(f"Sequences are counted from 0 on, got index {number}.")
        epoch, sequence = divmod(number, len(self))
        return self._plan.parts(sequence, epoch or self._epoch)

    def num_tokens_at(self, indices: Sequence[int]) -> tuple[int, int]:
        """Tokens of documents in the sequences at ``indices``, and the same with padding; nothing is read."""
        by_epoch: dict[int, list[int]] = {}
        for epoch, sequence in (divmod(index, len(self)) for index in indices):
            by_epoch.setdefault(epoch or self._epoch, []).append(sequence)
        tokens = sum(self._plan.tokens_of(sequences, epoch) for epoch, sequences in by_epoch.items())
        return tokens, len(indices) * self.packing.sequence_length

    def counts(
        self, passes: Iterable[tuple[int, int]], skipped: Iterable[tuple[int, int, int]] = ()
    ) -> dict[str, float]:
        """Counts of what was served; nothing is read.

        Args:
            passes: Pairs of an epoch and a number of sequences, of which the first ones of that epoch were served.
            skipped: Of an epoch the first sequence that was left out, and the one behind the last.

        Returns:
            ``tokens`` of documents; ``documents`` whose last tokens are among these; ``cut``, the share of these that
            were cut into several sequences, or truncated; and ``padding``, the share of padding.
        """
        found, sequences = Counts(), 0
        for epoch, number in passes:
            known = epoch if self.packs_anew else 0
            if number == len(self) and known not in self._whole:
                self._whole[known] = self._plan.counts(number, known)
            counts = self._whole[known] if number == len(self) else self._plan.counts(number, known)
            found = Counts(*map(sum, zip(found, counts, strict=True)))
            sequences += number
        for epoch, *ends in skipped:
            known = epoch if self.packs_anew else 0
            first, last = (self._plan.counts(number, known) for number in ends)
            found = Counts(*(of + before - behind for of, before, behind in zip(found, first, last, strict=True)))
            sequences -= ends[1] - ends[0]
        return reported(sequences * self.packing.sequence_length, found)

    def __getitem__(self, index: int) -> PackedSequence:
        """The sequence at ``index``."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[PackedSequence]:
        """The sequences at ``indices``; a document that several of them share is read once."""
        parts = self._parts_of(indices)
        places: dict[int, int] = {}
        which = np.array([places.setdefault(document, len(places)) for document in parts.documents.tolist()])
        columns, bounds = self._read(list(places))
        sizes = parts.ends - parts.firsts
        tokens = concatenated_ranges(bounds[which] + parts.firsts, sizes)
        columns = {name: column.take(tokens) for name, column in columns.items()}
        return lay_out(columns, sizes, parts.firsts == 0, parts.counts, self.packing)

    def _parts_of(self, indices: Sequence[int]) -> Parts:
        """The parts of documents in the sequences at ``indices``."""
        numbers = np.array(list(map(operator.index, indices)), dtype=np.int64)
        if int(numbers.min()) < 0:
            raise IndexError(f"Sequences are counted from 0 on, got index {numbers.min()}.")
        epochs, sequences = np.divmod(numbers, len(self))
        first = int(epochs[0])
        if (epochs == first).all():
            return self._plan.parts_of(sequences, first or self._epoch)
        found = [self._plan.parts_of(sequences[[at]], epoch or self._epoch) for at, epoch in enumerate(epochs.tolist())]
        return Parts(*map(np.concatenate, zip(*found, strict=True)))

    def _read(self, numbers: list[int]) -> tuple[dict[str, NDArray[Any]], Indices]:
        """The documents of these indices, with their separators, one after the other; and where each begins."""
        reader = DocumentReader(self.packing, self._named)
        samples = read_batch(self.dataset, numbers)
        lists = reader.read_lists(samples)
        if lists is not None:
            columns, bounds = {TOKENS: lists[0]}, np.array(lists[1])
        else:
            found = [reader.read(sample, f"document {number}") for number, sample in zip(numbers, samples, strict=True)]
            # Labels that are the tokens are made of these.
            are_tokens = all(document[LABELS] is document[TOKENS] for document in found)
            names = [name for name in found[0] if name != LABELS or not are_tokens]
            columns = {name: np.concatenate([document[name] for document in found]) for name in names}
            bounds = bounds_of(np.array([len(document[TOKENS]) for document in found]))
        sizes = np.diff(bounds) - self.packing.num_separators
        expected = self.lengths[numbers]
        if not np.array_equal(sizes, expected):
            which = int(np.flatnonzero(sizes != expected)[0])
            raise ConfigurationError(
                f"Document {numbers[which]} has {sizes[which]} tokens, and lengths say {expected[which]}. Measure the "
                "lengths of what the dataset returns, without the separator; a dataset must return as many tokens each "
                "time."
            )
        return columns, bounds


def collate_flat(sequences: Sequence[PackedSequence]) -> dict[str, Any]:
    """Join sequences to one row without padding, as attention kernels for documents of many lengths take it.

    Args:
        sequences: Of a :class:`PackedDataset` or a packed stream.

    Returns:
        The columns of the sequences as tensors of shape ``(tokens,)``, but ``document_ids``; ``cu_seqlens``, int32 of
        shape ``(documents + 1,)``, where each document begins and, last, the number of tokens; and ``max_seqlen``, the
        tokens of the longest, an int. A document that goes on in another sequence counts as one in each. The first
        label of every sequence is -100: what stands before it in the row is another sequence's.
    """
    numbers = np.concatenate([sequence[DOCUMENTS] for sequence in sequences])
    is_real = numbers >= 0
    starts = np.cumsum([0, *(len(sequence[DOCUMENTS]) for sequence in sequences[:-1])])
    is_first = np.append(True, numbers[1:] != numbers[:-1])
    is_first[starts] = True
    # A document begins where another number stands than before.
    begins = np.flatnonzero(is_first[is_real])
    bounds = np.append(begins, int(is_real.sum())).astype(np.int32)
    flat: dict[str, Any] = {}
    for name in sequences[0]:
        if name != DOCUMENTS:
            column = np.concatenate([sequence[name] for sequence in sequences])
            if name == LABELS:
                column[starts] = IGNORED_LABEL
            flat[name] = torch.from_numpy(column[is_real])
    return {**flat, "cu_seqlens": torch.from_numpy(bounds), "max_seqlen": int(np.diff(bounds).max())}
