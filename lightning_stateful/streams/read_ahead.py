"""Batches of like lengths, cut from windows that are read ahead and never saved."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import compress, pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from lightning_stateful.bucketing.budget import Budget, TooLong, check_too_long
from lightning_stateful.bucketing.lengths import MAX_SAMPLE_LENGTH
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import Indices, KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StreamError
from lightning_stateful.streams.naming import NameShard, by_number, name_of, sample_of
from lightning_stateful.streams.stage import Item, Open, Place, Stage

# Lengths whose batch sizes are kept at hand.
_KEPT_SIZES = 4096
# NumPy sorts numbers of two bytes by counting.
_MOST_COUNTED = 2**15

_VALUE = attrgetter("value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAheadConfig:
    """How a window is sorted and cut.

    Attributes:
        window: Samples of a window; the last may have fewer.
        budget: What a batch may hold.
        length: From a sample to its length, or the name of a column of the samples: of a number that, of anything else
            its ``len``. It is not seeded, and asked again on a resume: it has to follow from the sample alone.
        boundary_key: From a sample to an integer, or the name of a column of integers; a batch holds samples of one. A
            window is sorted by key, and then by length. It has to follow from the sample alone, as ``length``. None if
            all samples may meet.
        shuffle_batches: Whether the batches of a window come in random order; by key and the longest first, if not.
        too_long: What to do about samples longer than the budget: ``"error"`` breaks the stream off at the first,
            ``"drop"`` leaves them out.
        longest: The longest length that fits the budget; -1 if none does.

    Raises:
        ConfigurationError: A value is out of range, or no sample fits the budget.
    """

    window: int
    budget: Budget
    length: Callable[[Any], Any] | str = len
    boundary_key: Callable[[Any], Any] | str | None = None
    shuffle_batches: bool = True
    too_long: TooLong = "error"
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", as_int("window", self.window))
        if self.window < 1:
            raise ConfigurationError(f"window must be at least 1, got {self.window}.")
        if not isinstance(self.budget, Budget):
            raise ConfigurationError(f"budget must be a Budget, got {self.budget!r}.")
        for name in ("length", "boundary_key"):
            given = getattr(self, name)
            if not isinstance(given, str) and not callable(given) and (name == "length" or given is not None):
                raise ConfigurationError(
                    f"{name} must be a function of a sample or the name of a column, got {given!r}."
                )
        check_too_long(self.too_long)
        fits = partial(_is_too_long, self.budget)
        object.__setattr__(self, "longest", bisect_left(range(MAX_SAMPLE_LENGTH), True, key=fits) - 1)
        if self.longest < 0:
            raise ConfigurationError(
                f"Not even a sample of one token fits max_tokens={self.budget.max_tokens} with {self.budget.cost}. "
                "Raise max_tokens."
            )

    def describe(self) -> dict[str, Any]:
        """Plain data to be compared; of functions, their names. What is not set is left out."""
        described = {**self.budget.config(), "window": self.window, "too_long": self.too_long}
        if self.boundary_key is not None:
            described["boundary_key"] = name_of(self.boundary_key)
        return {**described, "lengths": name_of(self.length), "shuffle_batches": self.shuffle_batches}


class ReadAhead(Stage):
    """Batches of items of like lengths.

    A window is read, sorted, the longest item first, cut and yielded batch by batch; then the next is read. Equally
    long items stay in the order in which they were read, and a batch never reaches beyond its window.

    Opened within a window, it reads that window again. Nothing is drawn that would have to be kept: in which order the
    batches come follows from the seed and from the first item of the window. So windows of an order that is alike in
    every epoch are shuffled alike too, unless the seed follows from the epoch.

    Args:
        open_inner: Opens what is cut, a stage of items.
        place: Where to begin; None for the beginning.
        config: How windows are cut.
        seed: Chooses the orders of batches.
        name_shard: What errors call a shard.

    Attributes:
        num_dropped: Samples left out so far because they are too long.

    State:
        ``at``, where the window begins; ``since``, how many of its batches have been yielded, and ``of`` how many;
        ``dropped``, which is ``num_dropped``.

    Raises:
        ShardError: A length or a key could not be had.
        StreamError: A sample is too long.
        PositionError: The window is cut into another number of batches than before.
    """

    def __init__(
        self,
        open_inner: Open,
        place: Place | None,
        *,
        config: ReadAheadConfig,
        seed: int,
        name_shard: NameShard = by_number,
    ) -> None:
        self._inner = open_inner(None if place is None else place["at"])
        self._config, self._seed, self._name_shard = config, seed, name_shard
        self._length = _read_length(config.length)
        self._key = itemgetter(config.boundary_key) if isinstance(config.boundary_key, str) else config.boundary_key
        self._num_samples = lru_cache(_KEPT_SIZES)(config.budget.num_samples)
        self._at: Place = self._inner.place()
        self._items: list[Item] = []
        # Where each batch begins and ends among the items, in the order in which they are yielded.
        self._batches: list[tuple[int, int]] = []
        self._served = 0
        # Not so while a window is read, and from then on if that failed.
        self._is_whole = True
        self.num_dropped = 0
        if place is not None:
            if place["since"]:
                self._read_window()
                self._leave_out(place["since"], place["of"])
            # Those of this window were counted before.
            self.num_dropped = place["dropped"]

    def __next__(self) -> list[Item]:
        if not self._find_batch():
            raise StopIteration
        start, stop = self._batches[self._served]
        self._served += 1
        return self._items[start:stop]

    def place(self) -> Place:
        """Where the window begins, and what has been yielded of it."""
        at, since, of = self._at, 0, 0
        if self._is_whole:
            if self._served == len(self._batches):
                at = self._inner.place()
            else:
                since, of = self._served, len(self._batches)
        return {"at": at, "since": since, "of": of, "dropped": self.num_dropped}

    def close(self) -> None:
        """Close what is cut."""
        self._inner.close()

    def _find_batch(self) -> bool:
        """Read on until there is a batch; False at the end."""
        # Of a window, all samples may be too long.
        while self._served == len(self._batches):
            if not self._is_whole:
                raise StreamError("This stream has broken off. Open it anew at its place, which no batch has passed.")
            if not self._read_window():
                return False
        return True

    def _read_window(self) -> bool:
        """Read and cut the next window; False if there is none."""
        self._at = self._inner.place()
        self._items, self._batches, self._served = [], [], 0
        self._is_whole = False
        items = self._inner.take(self._config.window)
        if items:
            self._cut(items)
        self._is_whole = True
        return bool(items)

    def _cut(self, items: list[Item]) -> None:
        first, num_read = items[0], len(items)
        lengths = self._measure(items)
        if int(lengths.max()) > self._config.longest:
            fits = lengths <= self._config.longest
            if self._config.too_long == "error":
                raise self._too_long(items[int(fits.argmin())], int(lengths[fits.argmin()]))
            items, lengths = list(compress(items, fits.tolist())), lengths[fits]
        keys = None if self._key is None else self._integers(items, self._key, "boundary key", -(2**63), 2**63 - 1)
        window = cut_window(lengths, self._num_samples, keys)
        batches = list(pairwise(window.bounds))
        if self._config.shuffle_batches:
            key = derive_seed("read ahead", self._seed, first.shard, first.number)
            turns = KeyedPermutation(len(batches), key).take(np.arange(len(batches)))
            batches = [batches[number] for number in turns.tolist()]
        self._items, self._batches = list(map(items.__getitem__, window.order.tolist())), batches
        self.num_dropped += num_read - len(items)

    def _measure(self, items: list[Item]) -> Indices:
        first = items[0]
        if self._length is len and isinstance(first.value, Mapping):
            raise StreamError(
                f"The len of {self._said(first)}, a {type(first.value).__qualname__}, is its number of columns. Pass "
                f"length, the column that counts: {', '.join(map(repr, first.value))}."
            )
        return self._integers(items, self._length, "length", 0, MAX_SAMPLE_LENGTH - 1)

    def _leave_out(self, since: int, of: int) -> None:
        """Go on behind the batches that have been yielded of a window."""
        if of != len(self._batches) or since > of:
            raise PositionError(
                f"{since} of {of} batches of a window were used, and now it has {len(self._batches)}. Read the same "
                "data with the same lengths and the same budget, or resume from another checkpoint."
            )
        self._served = since

    def _too_long(self, item: Item, length: int) -> StreamError:
        return StreamError(
            f"The length of {self._said(item)} is {length} tokens, and max_tokens={self._config.budget.max_tokens} "
            f"has room for {self._config.longest} of one sample. Raise max_tokens, "
            'shorten the samples, or pass too_long="drop" to leave them out.'
        )

    def _integers(self, items: list[Item], function: Callable[[Any], Any], what: str, least: int, most: int) -> Indices:
        """An integer for every item."""
        found: list[Any] = []
        failure: Exception = StopIteration()
        try:
            # What comes before an error stays in the list; a StopIteration ends it without a word.
            found.extend(map(function, map(_VALUE, items)))
        except Exception as error:
            failure = error
        if len(found) < len(items):
            raise ShardError(
                f"The {what} of {self._said(items[len(found)])} could not be had: {type(failure).__name__}: {failure}."
            ) from failure
        numbers = np.array(found, dtype=None if set(map(type, found)) == {int} else object)
        if numbers.dtype.kind != "i":
            read = [self._as_integer(item, value, what) for item, value in zip(items, found, strict=True)]
            numbers = np.array(read, dtype=object)
        if numbers.size and (int(numbers.min()) < least or int(numbers.max()) > most):
            item, value = next(pair for pair in zip(items, found, strict=True) if not least <= int(pair[1]) <= most)
            raise ShardError(f"The {what} of {self._said(item)} is {value}, and not between {least} and {most}.")
        return numbers.astype(np.int64)

    def _as_integer(self, item: Item, value: Any, what: str) -> int:
        try:
            return as_int(what, value)
        except ConfigurationError as error:
            raise ShardError(f"Of {self._said(item)}: {error}") from None

    def _said(self, item: Item) -> str:
        return sample_of(item, self._name_shard)


class SortedWindow(NamedTuple):
    """Samples of a window in the order of their batches.

    Attributes:
        order: The index of each in the window; int64 of shape ``(samples,)``.
        lengths: The length of each.
        bounds: Where each batch begins among them, and, at last, their number.
    """

    order: Indices
    lengths: list[int]
    bounds: list[int]


def cut_window(lengths: Indices, num_samples: Callable[[int], int], keys: Indices | None = None) -> SortedWindow:
    """Sort a window and cut it.

    By key, the longest first, and in the given order where equally long. A batch ends where its budget is used up,
    where the key changes, and with the window.

    Args:
        lengths: The length of every sample, not negative; int64 of shape ``(samples,)``.
        num_samples: From the longest of a batch to the samples of a full one, at least 1.
        keys: A batch holds samples of one of these; of the same shape. None if they may all meet.
    """
    negative = -lengths
    small = int(lengths.max(initial=0)) < _MOST_COUNTED
    order = np.argsort(negative.astype(np.int16) if small else negative, kind="stable")
    ends = [len(lengths)]
    if keys is not None:
        order = order[np.argsort(keys[order], kind="stable")]
        ends = [*(np.flatnonzero(np.diff(keys[order])) + 1).tolist(), len(lengths)]
    in_order: list[int] = lengths[order].tolist()
    bounds, start = [0], 0
    for end in ends:
        while start < end:
            start = min(start + num_samples(in_order[start]), end)
            bounds.append(start)
    return SortedWindow(order, in_order, bounds)


def _read_length(length: Callable[[Any], Any] | str) -> Callable[[Any], Any]:
    return partial(_length_in_column, length) if isinstance(length, str) else length


def _length_in_column(name: str, sample: Any) -> Any:
    value = sample[name]
    # Numbers of NumPy and tensors without dimensions are numbers, and arrays of one number are not.
    return value if isinstance(value, int) or getattr(value, "ndim", None) == 0 else len(value)


def _is_too_long(budget: Budget, length: int) -> bool:
    return budget.num_samples(length) == 0
