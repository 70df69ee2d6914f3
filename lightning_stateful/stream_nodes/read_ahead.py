"""Shuffles samples in blocks, and cuts batches of like lengths: blocks are read ahead, and again on a resume."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import compress
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.bucketing.lengths import MAX_SAMPLE_LENGTH
from lightning_stateful.core.checks import as_int
from lightning_stateful.core.permutation import Indices, KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StreamError
from lightning_stateful.shapes import COUNT, refuse_unless
from lightning_stateful.stream_nodes.nodes import NodeState, StreamNode, next_many, reset_to, skip, state_of
from lightning_stateful.stream_nodes.numbered import without_numbers
from lightning_stateful.stream_nodes.transforms import Where, name_of, sample_in_words

T = TypeVar("T")

# Lengths whose batch sizes are kept at hand.
_KEPT_SIZES = 4096
# NumPy sorts numbers of two bytes by counting.
_MOST_COUNTED = 2**15
# Ends errors on items that are not those of the run that was saved.
OTHER_SEED = "Another seed, that accept=('seed',) let pass, may be the cause: pass the saved one until the epoch ends."


class BlockNode(StreamNode[T]):
    """Reads blocks of samples ahead, and gives what is made of each, one item after the other.

    Args:
        source: The samples.
        size: Samples of a block; the last may have fewer. A block that was begun keeps the size that it had.

    State:
        ``source``, its state where the block begins; ``block``, the number of the block; ``served``, how many of its
        items have been given, and ``of`` how many; ``size``, how many samples it has at most.

    Raises:
        PositionError: A block that was begun has another number of items than before.
    """

    keeps_numbers = True
    state_shape: ClassVar[Mapping[str, Any]] = {
        "source": object,
        "block": COUNT,
        "served": COUNT,
        "of": COUNT,
        "size": range(1, COUNT.stop),
    }

    def __init__(self, source: BaseNode[Any], size: int) -> None:
        super().__init__()
        self.source, self._size = source, size

    def check_state(self, state: Any, path: str) -> None:
        """Refuse a state of another shape, or with more items served than a block has; see :class:`StreamNode`."""
        super().check_state(state, path)
        served, of = state["served"], state["of"]
        refuse_unless(not served or served < of, served, f"0 or below the {of} items of the block", f"{path}.served")

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or read the block again in which a state was taken."""
        super().reset(initial_state)
        begun = initial_state or {"source": None, "block": 0, "served": 0}
        reset_to(self.source, begun["source"])
        # The number of the next block; the items of this one, and how many of them have been given.
        self._next_block: int = begun["block"]
        self._items: list[T] = []
        self._served = 0
        if begun["served"]:
            self._read_block(begun["size"])
            self._served = begun["served"]
            if len(self._items) != begun["of"] or self._served > begun["of"]:
                raise PositionError(
                    f"{self._served} of {begun['of']} items of a block were used, and now it has {len(self._items)}. "
                    "Read the same data with the same functions, lengths and budget, or resume from another "
                    f"checkpoint. {OTHER_SEED}"
                )

    def next_many(self, number: int) -> list[T]:
        """The next items, up to ``number``."""
        items: list[T] = []
        # Of a block, nothing may be made at all.
        while len(items) < number and (self._served < len(self._items) or self._read_block(self._size)):
            stop = self._served + number - len(items)
            items += self._items[self._served : stop]
            self._served = min(stop, len(self._items))
        return items

    def get_state(self) -> NodeState:
        """The beginning of the block, and the items that have been given of it."""
        if self._served == len(self._items):
            at = {"source": state_of(self.source), "block": self._next_block, "served": 0, "of": 0}
            return {**at, "size": self._size}
        at = {"source": self._block_state, "block": self._next_block - 1, "served": self._served}
        return {**at, "of": len(self._items), "size": self._block_size}

    @abstractmethod
    def _made_of(self, samples: list[Any], block: int) -> list[T]:
        """The items of a block, in their order."""

    def _read_block(self, size: int) -> bool:
        """Read the next block; False if there is none."""
        self._block_state: Any = state_of(self.source)
        self._items, self._served, self._block_size = [], 0, size
        samples: list[Any] = next_many(self.source, size)
        if samples:
            self._items = self._made_of(samples, self._next_block)
            self._next_block += 1
        return bool(samples)


class BlockShuffle(BlockNode[T]):
    """Shuffles consecutive blocks of items, each in an order of its own.

    An item moves by less than the size of a block. The order follows from the seed and the number of the block.

    Args:
        source: What is shuffled.
        size: Items of a block.
        seed: Chooses the orders.

    Raises:
        ConfigurationError: ``size`` or ``seed`` is no integer, or ``size`` is below 1.
    """

    context: ClassVar[tuple[str, ...]] = ("seed",)

    def __init__(self, source: BaseNode[T], size: int, *, seed: int) -> None:
        super().__init__(source, as_int("size", size, least=1))
        self._seed = as_int("seed", seed)

    def go_behind_last(self) -> None:
        """Read the block again up to the item that was given last, to say where it comes from; reset it then."""
        order = self._made_of(list(range(len(self._items))), self._next_block - 1)  # type: ignore[arg-type]  # numbers
        reset_to(self.source, self._block_state)
        skip(self.source, int(order[self._served - 1]) + 1)  # type: ignore[call-overload]  # a number

    def _made_of(self, samples: list[T], block: int) -> list[T]:
        return _permuted(samples, derive_seed("block", self._seed, block))


class LengthBatcher(BlockNode[list[Any]]):
    """Gives batches of samples of like lengths.

    A window is read, sorted, the longest sample first, cut and given batch by batch; then the next is read. Equally
    long samples stay in the order in which they were read, and a batch never reaches beyond its window.

    Args:
        source: The samples.
        window: Samples of a window; the last may have fewer.
        budget: What a batch may hold; of samples that are too long for it, the first breaks the stream off, or all are
            left out.
        length: From a sample to its length, or the name of a column of the samples: of a number that, of anything else
            its ``len``. It is not seeded, and asked again on a resume: it has to follow from the sample alone.
        boundary_key: From a sample to an integer, or the name of a column of integers; a batch holds samples of one. A
            window is sorted by key, and then by length. It has to follow from the sample alone, as ``length``. None if
            all samples may meet.
        shuffle_batches: Whether the batches of a window come in random order, which follows from the seed and
            the number of the window; by key and the longest first, if not.
        order_seed: Chooses the orders of batches.
        where: Says where the samples come from, for errors.

    State:
        That of a :class:`BlockNode`, and ``dropped``, the samples left out so far because they are too long.

    Raises:
        ConfigurationError: An argument is wrong, or no sample fits the budget.
        ShardError: A length or a key could not be had.
        StreamError: A sample is too long.
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
        order_seed: int = 0,
        where: Where | None = None,
    ) -> None:
        super().__init__(source, as_int("window", window, least=1))
        if not isinstance(budget, Budget):
            raise ConfigurationError(f"budget must be a Budget, got {budget!r}.")
        _check_column("length", length)
        if boundary_key is not None:
            _check_column("boundary_key", boundary_key)
        self._seed, self._where = as_int("order_seed", order_seed), where
        self._budget, self._shuffle_batches = budget, shuffle_batches
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
        self._dropped = 0
        super().reset(initial_state)
        # Those of this window were counted before.
        self._dropped = 0 if initial_state is None else initial_state.get("dropped", 0)

    def get_state(self) -> NodeState:
        """The beginning of the window, the items given of it, and those left out."""
        return {**super().get_state(), "dropped": self._dropped}

    def describe(self) -> list[Any]:
        """Plain data to be compared; of functions, their names. What is not set is left out."""
        described = {**self._budget.config(), "window": self._size}
        if self._boundary_key is not None:
            described["boundary_key"] = name_of(self._boundary_key)
        described.update(lengths=name_of(self._length), shuffle_batches=self._shuffle_batches)
        return ["read_ahead", described]

    def _made_of(self, samples: list[Any], block: int) -> list[list[Any]]:
        given, (samples, _) = samples, without_numbers(samples)
        lengths = self._measure(samples)
        if int(lengths.max()) > self._longest:
            fits = lengths <= self._longest
            if self._budget.too_long == "error":
                raise self._too_long_error(samples[int(fits.argmin())], int(lengths[fits.argmin()]))
            self._dropped += len(samples) - int(fits.sum())
            samples, given = (list(compress(some, fits.tolist())) for some in (samples, given))
            lengths = lengths[fits]
        keys = None if self._key_of is None else self._integers(samples, self._key_of, "boundary key", -(2**63), 2**63)
        batches = cut_window(lengths, self._num_samples, keys)
        if self._shuffle_batches:
            batches = _permuted(batches, derive_seed("length batches", self._seed, block))
        return [[given[index] for index in batch] for batch in batches]

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
            'a Budget with too_long="drop" to leave them out.'
        )

    def _said(self, sample: Any) -> str:
        return sample_in_words(sample, self._where)


def cut_window(lengths: Indices, num_samples: Callable[[int], int], keys: Indices | None = None) -> list[list[int]]:
    """Sort a window and cut it.

    By key, the longest first, and in the given order where equally long. A batch ends where its budget is used up,
    where the key changes, and with the window.

    Args:
        lengths: The length of every sample, not negative; int64 of shape ``(samples,)``.
        num_samples: From the longest of a batch to the samples of a full one, at least 1.
        keys: A batch holds samples of one of these; of the same shape. None if they may all meet.

    Returns:
        The indices of the samples of each batch.
    """
    negative = -lengths
    small = int(lengths.max(initial=0)) < _MOST_COUNTED
    order = np.argsort(negative.astype(np.int16) if small else negative, kind="stable")
    ends = [len(lengths)]
    if keys is not None:
        order = order[np.argsort(keys[order], kind="stable")]
        ends = [*(np.flatnonzero(np.diff(keys[order])) + 1).tolist(), len(lengths)]
    in_order: list[int] = lengths[order].tolist()
    indices: list[int] = order.tolist()
    batches, start = [], 0
    for end in ends:
        while start < end:
            stop = min(start + num_samples(in_order[start]), end)
            batches.append(indices[start:stop])
            start = stop
    return batches


def _permuted(items: list[T], seed: int) -> list[T]:
    """Items in the random order of a seed."""
    order = KeyedPermutation(len(items), seed).take(np.arange(len(items)))
    return [items[index] for index in order.tolist()] if items else []


def _check_column(name: str, given: Any) -> None:
    if not isinstance(given, str) and not callable(given):
        raise ConfigurationError(f"{name} must be a function of a sample or the name of a column, got {given!r}.")


def _length_in_column(name: str, sample: Any) -> Any:
    value = sample[name]
    # Numbers of NumPy and tensors without dimensions are numbers, and arrays of one number are not.
    return value if isinstance(value, int) or getattr(value, "ndim", None) == 0 else len(value)
