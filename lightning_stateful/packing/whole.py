"""The sequences of an epoch of whole documents: planned from the histogram of lengths, with random access."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stateful.bucketing.lengths import LengthArray, chunks
from lightning_stateful.core.permutation import ClassShuffle, Indices, bounds_of, concatenated_ranges, keyed_permutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.packing.plan import PackingPlan, Parts
from lightning_stateful.packing.settings import Packing

# Sequences whose tokens are counted together.
_AT_ONCE = 1024


class Pattern(NamedTuple):
    """Sequences that hold documents of the same lengths.

    Attributes:
        number: Number of sequences.
        items: Pairs of a length and how many documents of it each of them holds, the longest first.
    """

    number: int
    items: tuple[tuple[int, int], ...]


class _Items(NamedTuple):
    """The items of all patterns, one pattern after the other.

    Attributes:
        firsts: Where the documents of each begin among those sorted by length.
        each: How many of them a sequence holds.
        bounds: Where the items of each pattern begin and, last, their number.
        tokens: Tokens in a sequence of each pattern; those of a sequence that a document fills come last.
    """

    firsts: Indices
    each: Indices
    bounds: Indices
    tokens: Indices


def best_fit_decreasing(counts: Indices, length: int) -> list[Pattern]:
    """Pack documents, the longest first, each into the sequence with the least room that it fits in.

    All documents of a length, and all sequences of a pattern, are handled at once: the result is that of best-fit
    decreasing, document by document, in a time that depends on the number of lengths alone.

    Args:
        counts: ``counts[n]`` is the number of documents of ``n`` tokens, int64 of shape ``(length + 1,)``; that of 0
            does not matter.
        length: Tokens of a sequence.

    Source:
        Packing from a histogram: Krell, Kosec, Perez and Fitzgibbon, "Efficient Sequence Packing without
        Cross-contamination", arXiv 2107.02027, 2021. Best fit: Johnson et al., SIAM Journal on Computing 3(4), 1974.
    """
    by_room: dict[int, list[Pattern]] = {}
    rooms: list[int] = []

    def put(room: int, pattern: Pattern) -> None:
        if room not in by_room:
            by_room[room] = []
            insort(rooms, room)
        by_room[room].append(pattern)

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size]) if size else 0
        while left:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                count, items = by_room[room].pop()
                if not by_room[room]:
                    del by_room[room], rooms[place]
            else:
                room, items = length, ()
                count = -(-left // (length // size))
            # A sequence that has taken one has the least room of all from then on: it takes as many as fit.
            each = room // size
            full = min(count, left // each)
            if full:
                put(room - each * size, Pattern(full, (*items, (size, each))))
            count, left = count - full, left - full * each
            if count and left:
                put(room - left * size, Pattern(1, (*items, (size, left))))
                count, left = count - 1, 0
            if count:
                put(room, Pattern(count, items))
    return [pattern for room in rooms for pattern in by_room[room]]


class WholePlan(PackingPlan):
    """Whole documents in sequences that are padded little.

    The patterns of sequences follow from the histogram of lengths and are the same in every epoch. An epoch shuffles
    the documents of each length among the places for that length, and the sequences. Beside the lengths, 4 bytes a
    document are held.

    Args:
        lengths: Tokens of each document without the separator, all at least 1.
        packing: The settings.
        seed: Chooses the orders; None for the same sequences in every epoch.

    Attributes:
        num_sequences: Sequences of one epoch.
        num_tokens: Tokens of documents in them.
        num_dropped: Documents that are too long and left out.

    Raises:
        ConfigurationError: A document is longer than a sequence, and ``too_long="error"``.
    """

    def __init__(self, lengths: LengthArray, packing: Packing, seed: int | None) -> None:
        self._lengths, self._packing, self._seed = lengths, packing, seed
        self._length, self._separators = packing.sequence_length, packing.num_separators
        # Those that are cut into full sequences, and where the full parts of each begin among all of them.
        sizes, self._cut, num_full = self._sizes()
        self._full_bounds = bounds_of(num_full)
        counts = np.bincount(sizes, minlength=self._length + 1)
        # Documents by their size; those that have nothing to be packed come first, and are never looked up.
        self._by_size = np.argsort(sizes, kind="stable").astype(np.min_scalar_type(len(lengths)))
        starts = bounds_of(counts)
        patterns = best_fit_decreasing(counts, self._length)
        self._items = _placed(patterns, starts, self._length)
        self._bounds = bounds_of(np.array([pattern.number for pattern in patterns], dtype=np.int64))
        self._starts = np.append(starts[np.flatnonzero(counts[1:]) + 1], starts[-1])
        self.num_sequences = int(self._bounds[-1] + self._full_bounds[-1])
        self.num_tokens = int(counts @ np.arange(len(counts)) + self._full_bounds[-1] * self._length)
        self.num_dropped = int(counts[0]) if packing.too_long == "drop" else 0
        self._truncates = packing.too_long == "truncate"
        self._shuffle = lru_cache(maxsize=2)(self._make_shuffle)
        self._tokens = lru_cache(maxsize=4)(self._tokens_from)

    def __reduce__(self) -> tuple[type[WholePlan], tuple[LengthArray, Packing, int | None]]:
        return type(self), (self._lengths, self._packing, self._seed)

    def tokens_of(self, sequences: Sequence[int], epoch: int) -> int:
        """Tokens of documents in a few sequences, as their patterns say."""
        return sum(self._tokens(epoch, at // _AT_ONCE)[at % _AT_ONCE] for at in sequences)

    def _tokens_from(self, epoch: int, block: int) -> list[int]:
        """The tokens in each of many sequences that follow one another."""
        first = block * _AT_ONCE
        numbers = self._numbers(np.arange(first, min(first + _AT_ONCE, self.num_sequences)), epoch)
        tokens: list[int] = self._items.tokens[np.searchsorted(self._bounds, numbers, side="right") - 1].tolist()
        return tokens

    def _numbers(self, sequences: Indices, epoch: int) -> Indices:
        """The numbers of sequences, one pattern after the other, that come at these places in an epoch."""
        if self._seed is None:
            return sequences
        key = derive_seed("whole sequences", self._seed, epoch)
        return keyed_permutation(self.num_sequences, key).take(sequences)

    def parts_of(self, sequences: Indices, epoch: int) -> Parts:
        """The documents in sequences, or the part of one that fills a sequence."""
        numbers = self._numbers(sequences, epoch)
        full = numbers - self._bounds[-1]
        is_full = full >= 0
        if not is_full.any():
            return self._packed(numbers, epoch)
        none = np.zeros(0, dtype=np.int64)
        packed = Parts(none, none, none, none) if is_full.all() else self._packed(numbers[~is_full], epoch)
        full = full[is_full]
        places = np.searchsorted(self._full_bounds, full, side="right") - 1
        firsts = (full - self._full_bounds[places]) * self._length
        filling = Parts(self._cut[places], firsts, firsts + self._length, np.ones(len(full), dtype=np.int64))
        of_packed, of_full = np.repeat(np.flatnonzero(~is_full), packed.counts), np.flatnonzero(is_full)
        columns = (np.concatenate(pair) for pair in zip(packed[:3], filling[:3], strict=True))
        return Parts.in_order(np.concatenate([of_packed, of_full]), len(sequences), *columns)

    def _packed(self, numbers: Indices, epoch: int) -> Parts:
        """The parts of the sequences of patterns, which are numbered one pattern after the other."""
        which = np.searchsorted(self._bounds, numbers, side="right") - 1
        within: Indices = numbers - self._bounds[which]
        items = self._items
        num_items: Indices = items.bounds[which + 1] - items.bounds[which]
        rows = concatenated_ranges(items.bounds[which], num_items)
        each = items.each[rows]
        places = concatenated_ranges(items.firsts[rows] + np.repeat(within, num_items) * each, each)
        if self._seed is not None:
            places = self._shuffle(epoch).take(places)
        documents = self._by_size[places].astype(np.int64)
        ends = self._sizes_of(documents)
        firsts = np.zeros(len(ends), dtype=np.int64)
        if self._packing.too_long == "truncate":
            ends = np.minimum(ends, self._length)
        elif len(self._cut):
            # Beside their full parts.
            firsts = np.where(ends > self._length, ends - ends % self._length, 0)
        held = np.add.reduceat(each, np.cumsum(num_items) - num_items)
        return Parts(documents, firsts, ends, held)

    def _make_shuffle(self, epoch: int) -> ClassShuffle:
        return ClassShuffle(self._starts, "whole documents", self._seed or 0, epoch)

    def _sizes(self) -> tuple[NDArray[Any], Indices, Indices]:
        """Read the lengths.

        Returns:
            The tokens of each document that are packed with others, 0 for none; the documents that fill sequences of
            their own; and how many each.
        """
        length, too_long = self._length, self._packing.too_long
        sizes = np.empty(len(self._lengths), dtype=np.min_scalar_type(length))
        cut, num_full = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for start, chunk in chunks(self._lengths):
            tokens = chunk.astype(np.int64) + self._separators
            longer = np.flatnonzero(tokens > length)
            if longer.size and too_long == "error":
                self._refuse(start + int(longer[0]), int(tokens[longer[0]]))
            if longer.size:
                if too_long == "split":
                    cut.append(start + longer)
                    num_full.append(tokens[longer] // length)
                tokens[longer] = {"drop": 0, "truncate": length}.get(str(too_long), tokens[longer] % length)
            sizes[start : start + len(chunk)] = tokens
        return sizes, np.concatenate(cut), np.concatenate(num_full)

    def _refuse(self, document: int, size: int) -> None:
        separator = ", its separator counted," if self._separators else ""
        raise ConfigurationError(
            f"Document {document} has {size} tokens{separator} and a sequence has {self._length}. Raise "
            'sequence_length, or say what becomes of such documents: too_long="drop", "truncate" or "split".'
        )


def _placed(patterns: list[Pattern], starts: Indices, length: int) -> _Items:
    """Places of the documents of patterns; ``starts`` tells where those of each length begin."""
    free = starts[:-1].tolist()
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    firsts, each_of, counts = columns
    for number, items in patterns:
        counts.append(len(items))
        for size, each in items:
            firsts.append(free[size])
            each_of.append(each)
            free[size] += number * each
    placed, held, sizes = (np.array(column, dtype=np.int64) for column in columns)
    tokens = [sum(size * each for size, each in items) for _, items in patterns]
    return _Items(placed, held, bounds_of(sizes), np.array([*tokens, length], dtype=np.int64))
