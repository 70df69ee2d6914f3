"""Cuts batches of like lengths from windows that are read ahead and never saved."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import compress, pairwise
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torchdata.nodes import BaseNode

from lightning_stateful.bucketing.budget import Budget, TooLong, check_too_long
from lightning_stateful.bucketing.lengths import MAX_SAMPLE_LENGTH
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import Indices, KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StreamError
from lightning_stateful.streams.nodes import NodeState, StreamNode, next_many, reset_to, state_of
from lightning_stateful.streams.transforms import Where, name_of, sample_in_words

# Lengths whose batch sizes are kept at hand.
_KEPT_SIZES = 4096
# NumPy sorts numbers of two bytes by counting.
_MOST_COUNTED = 2**15


class LengthBatcher(StreamNode[list[Any]]):
    """Gives batches of samples of like lengths.

    A window is read, sorted, the longest sample first, cut and given batch by batch; then the next is read. Equally
    long samples stay in the order in which they were read, and a batch never reaches beyond its window. A window that
    was begun is read again on a resume.

    Args:
        source: The samples.
        window: Samples of a window; the last may have fewer.
        budget: What a batch may hold.
        length: From a sample to its length, or the name of a column of the samples: of a number that, of anything else
            its ``len``. It is not seeded, and asked again on a resume: it has to follow from the sample alone.
        boundary_key: From a sample to an integer, or the name of a column of integers; a batch holds samples of one. A
            window is sorted by key, and then by length. It has to follow from the sample alone, as ``length``. None if
            all samples may meet.
        shuffle_batches: Whether the batches of a window come in random order, which follows from the seed and
            the number of the window; by key and the longest first, if not.
        too_long: What to do about samples longer than the budget: ``"error"`` breaks the stream off at the first,
            ``"drop"`` leaves them out.
        order_seed: Chooses the orders of batches.
        where: Says where the samples come from, for errors.

    State:
        ``source``, its state where the window begins; ``window``, the number of the window; ``served``, how many of its
        batches have been given, and ``of`` how many; ``dropped``, the samples left out so far because they are too
        long.

    Raises:
        ConfigurationError: An argument is wrong, or no sample fits the budget.
        ShardError: A length or a key could not be had.
        StreamError: A sample is too long.
        PositionError: A window that was begun is cut into another number of batches than before.
    """

    context: ClassVar[tuple[str, ...]] = ("order_seed", "where")

    def __init__(
        self,
        source: BaseNode[Any],
        *,
        window: int,
        budget: Budget,
        length: Callable[[Any], Any] | str = len,
        boundary_key: Callable[[Any], Any] | str | None = None,
        shuffle_batches: bool = True,
        too_long: TooLong = "error",
        order_seed: int = 0,
        where: Where | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(budget, Budget):
            raise ConfigurationError(f"budget must be a Budget, got {budget!r}.")
        _check_column("length", length)
        if boundary_key is not None:
            _check_column("boundary_key", boundary_key)
        check_too_long(too_long)
        self.source, self._where = source, where
        self._window, self._seed = as_int("window", window, least=1), as_int("order_seed", order_seed)
        self._budget, self._too_long, self._shuffle_batches = budget, too_long, shuffle_batches
        self._length, self._boundary_key = length, boundary_key
        self._length_of = partial(_length_in_column, length) if isinstance(length, str) else length
        self._key_of = itemgetter(boundary_key) if isinstance(boundary_key, str) else boundary_key
        self._num_samples = lru_cache(_KEPT_SIZES)(budget.num_samples)
        self._longest = bisect_left(range(MAX_SAMPLE_LENGTH), True, key=lambda size: not budget.num_samples(size)) - 1
        if self._longest < 0:
            raise ConfigurationError(
                f"Not even a sample of one token fits max_tokens={budget.max_tokens} with {budget.cost}. Raise "
                "max_tokens."
            )

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or read the window again in which a state was taken."""
        super().reset(initial_state)
        begun = initial_state or {"source": None, "window": 0, "served": 0, "of": 0, "dropped": 0}
        reset_to(self.source, begun["source"])
        # The number of the next window; the samples of this one in the order of their batches; where each batch begins
        # and ends among them, in the order in which they are given; and how many have been given.
        self._next_window: int = begun["window"]
        self._samples: list[Any] = []
        self._batches: list[tuple[int, int]] = []
        self._served, self._dropped = 0, 0
        if begun["served"]:
            self._read_window()
            if begun["of"] != len(self._batches) or begun["served"] > begun["of"]:
                raise PositionError(
                    f"{begun['served']} of {begun['of']} batches of a window were used, and now it has "
                    f"{len(self._batches)}. Read the same data with the same lengths and the same budget, or resume "
                    "from another checkpoint."
                )
            self._served = begun["served"]
        # Those of this window were counted before.
        self._dropped = begun["dropped"]

    def next(self) -> list[Any]:
        """The next batch."""
        # Of a window, all samples may be too long.
        while self._served == len(self._batches):
            if not self._read_window():
                raise StopIteration
        start, stop = self._batches[self._served]
        self._served += 1
        return self._samples[start:stop]

    def get_state(self) -> NodeState:
        """Where the window begins, and what has been given of it."""
        if self._served == len(self._batches):
            at = {"source": state_of(self.source), "window": self._next_window, "served": 0, "of": 0}
        else:
            at = {"source": self._window_state, "window": self._next_window - 1, "served": self._served}
            at["of"] = len(self._batches)
        return {**at, "dropped": self._dropped}

    def describe(self) -> list[Any]:
        """Plain data to be compared; of functions, their names. What is not set is left out."""
        described = {**self._budget.config(), "window": self._window, "too_long": self._too_long}
        if self._boundary_key is not None:
            described["boundary_key"] = name_of(self._boundary_key)
        described.update(lengths=name_of(self._length), shuffle_batches=self._shuffle_batches)
        return ["read_ahead", described]

    def _read_window(self) -> bool:
        """Read and cut the next window; False if there is none."""
        self._window_state: Any = state_of(self.source)
        self._samples, self._batches, self._served = [], [], 0
        samples: list[Any] = next_many(self.source, self._window)
        if samples:
            self._cut(samples)
            self._next_window += 1
        return bool(samples)

    def _cut(self, samples: list[Any]) -> None:
        lengths = self._measure(samples)
        if int(lengths.max()) > self._longest:
            fits = lengths <= self._longest
            if self._too_long == "error":
                raise self._too_long_error(samples[int(fits.argmin())], int(lengths[fits.argmin()]))
            self._dropped += len(samples) - int(fits.sum())
            samples, lengths = list(compress(samples, fits.tolist())), lengths[fits]
        keys = None if self._key_of is None else self._integers(samples, self._key_of, "boundary key", -(2**63), 2**63)
        window = cut_window(lengths, self._num_samples, keys)
        batches = list(pairwise(window.bounds))
        if self._shuffle_batches:
            order = KeyedPermutation(len(batches), derive_seed("length batches", self._seed, self._next_window))
            batches = [batches[number] for number in order.take(np.arange(len(batches))).tolist()]
        self._samples, self._batches = [samples[number] for number in window.order.tolist()], batches

    def _measure(self, samples: list[Any]) -> Indices:
        first = samples[0]
        if self._length is len and isinstance(first, Mapping):
            raise StreamError(
                f"The len of {self._said(first)} is its number of columns. Pass length, the column that counts: "
                f"{', '.join(map(repr, first))}."
            )
        return self._integers(samples, self._length_of, "length", 0, MAX_SAMPLE_LENGTH)

    def _integers(self, samples: list[Any], function: Callable[[Any], Any], what: str, least: int, end: int) -> Indices:
        """An integer for every sample, ``least <= integer < end``."""
        found: list[Any] = []
        failure: Exception = StopIteration()
        try:
            # What comes before an error stays in the list; a StopIteration ends it without a word.
            found.extend(map(function, samples))
        except Exception as error:
            failure = error
        if len(found) < len(samples):
            raise ShardError(
                f"The {what} of {self._said(samples[len(found)])} could not be had: {type(failure).__name__}: "
                f"{failure}."
            ) from failure
        numbers = np.array(found, dtype=None if set(map(type, found)) == {int} else object)
        if numbers.dtype.kind != "i":
            read = [self._as_integer(sample, value, what) for sample, value in zip(samples, found, strict=True)]
            numbers = np.array(read, dtype=object)
        if numbers.size and (int(numbers.min()) < least or int(numbers.max()) >= end):
            sample, value = next(pair for pair in zip(samples, found, strict=True) if not least <= int(pair[1]) < end)
            raise ShardError(f"The {what} of {self._said(sample)} is {value}, and not between {least} and {end - 1}.")
        return numbers.astype(np.int64)

    def _as_integer(self, sample: Any, value: Any, what: str) -> int:
        try:
            return as_int(what, value)
        except ConfigurationError as error:
            raise ShardError(f"Of {self._said(sample)}: {error}") from None

    def _too_long_error(self, sample: Any, length: int) -> StreamError:
        return StreamError(
            f"The length of {self._said(sample)} is {length} tokens, and max_tokens={self._budget.max_tokens} has room "
            f"for {self._longest} of one sample. Raise max_tokens, shorten the samples, or pass "
            'too_long="drop" to leave them out.'
        )

    def _said(self, sample: Any) -> str:
        return sample_in_words(sample, self._where)


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


def _check_column(name: str, given: Any) -> None:
    if not isinstance(given, str) and not callable(given):
        raise ConfigurationError(f"{name} must be a function of a sample or the name of a column, got {given!r}.")


def _length_in_column(name: str, sample: Any) -> Any:
    value = sample[name]
    # Numbers of NumPy and tensors without dimensions are numbers, and arrays of one number are not.
    return value if isinstance(value, int) or getattr(value, "ndim", None) == 0 else len(value)
