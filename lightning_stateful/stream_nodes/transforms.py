"""Runs functions over a stream: map, filter, sliding windows and a running state."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, ClassVar, TypeVar, cast

from torchdata.nodes import BaseNode

from lightning_stateful.core.checks import as_int
from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError
from lightning_stateful.generators.held_generators import HeldGenerators
from lightning_stateful.generators.rng import seed_randomness
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.shapes import COUNT
from lightning_stateful.stream_nodes.hugging_face_pipelines import name_and_arguments
from lightning_stateful.stream_nodes.nodes import NodeState, StreamNode, next_many, reset_to, skip, state_of
from lightning_stateful.stream_nodes.numbered import Numbered, numbered, without_numbers
from lightning_stateful.stream_nodes.shard_reader import OnError, check_on_error

T = TypeVar("T")

# Says where the samples of a stream come from, for errors.
Where = Callable[[], str]

# Of a sample in an error.
_MOST_CHARACTERS = 80
# Items between two states of the source, which may cost more than the items.
_STRIDE = 64
# A running state is taken anew once so many of its characters, as JSON, fall to each item since.
_CHARACTERS_AN_ITEM = 256
# Stands for what became of a sample on which the function failed.
_FAILED = object()


class _SampleNode(StreamNode[Any]):
    """Runs a function over each sample by itself."""

    context: ClassVar[tuple[str, ...]] = ("seed", "on_error", "where")
    state_shape: ClassVar = {"source": object, "item": COUNT}
    keeps_numbers = True
    _keeps_all: ClassVar[bool] = True

    def __init__(
        self,
        source: BaseNode[Any],
        function: Callable[[Any], Any],
        *,
        seed: int | None = None,
        on_error: OnError = "raise",
        where: Where | None = None,
    ) -> None:
        super().__init__()
        check_function("function", function)
        check_on_error(on_error)
        self.source = source
        self._function, self._on_error, self._where = function, on_error, where
        self._seed = None if seed is None else derive_seed("transform", as_int("seed", seed))
        self._held = HeldGenerators(is_repeatable=False, function=function)
        # Which samples are left out may not depend on how many are asked for together.
        self._one_by_one = seed is not None and (on_error == "skip" or not self._keeps_all)

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or go to where a state was taken."""
        super().reset(initial_state)
        begun = initial_state or {"source": None, "item": 0}
        reset_to(self.source, begun["source"])
        # Samples that were read, and those of them on which the function failed.
        self._item: int = begun["item"]
        self._skipped: int = begun.get("skipped_samples", 0)

    def next_many(self, number: int) -> list[Any]:
        """The next items, up to ``number``; the samples that are read for them together are seeded together."""
        items: list[Any] = []
        while len(items) < number:
            samples: list[Any] = next_many(self.source, 1 if self._one_by_one else number - len(items))
            if not samples:
                break
            items += self._items_of(samples)
        return items

    def get_state(self) -> NodeState:
        """The state of the source, and what was read of it."""
        state: NodeState = {"source": state_of(self.source), "item": self._item}
        return {**state, "skipped_samples": self._skipped} if self._on_error == "skip" else state

    @abstractmethod
    def _items_of(self, samples: list[Any]) -> list[Any]:
        """Map or filter some samples."""

    def _run(self, samples: list[Any], function: Callable[[Any], Any]) -> list[Any]:
        """The results of a function for each sample; ``_FAILED`` where it failed and that is skipped."""
        item, self._item = self._item, self._item + len(samples)
        read = partial(self._results, samples, function)
        if self._seed is None:
            return read()
        seed = mixed_seed(self._seed, item)
        seed_randomness(seed)
        return read() if self._held.is_idle else self._held.isolated(seed, read)

    def _results(self, samples: list[Any], function: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = []
        left = iter(samples)
        while len(results) < len(samples):
            try:
                for sample in left:
                    results.append(function(sample))
            except Exception as error:
                if self._on_error == "raise":
                    raise failed(self._function, samples[len(results)], error, self._where) from error
                self._skipped += 1
                results.append(_FAILED)
        return results


class MapNode(_SampleNode):
    """Applies a function to each sample.

    Args:
        source: The samples.
        function: From a sample to what takes its place.
        seed: Seeds torch, NumPy and ``random`` by (seed, number of the sample): before each sample that is asked for by
            itself or may be left out, and before the first of those that are asked for together, as those of a batch,
            which are the same after a resume; None to leave them.
        on_error: ``"skip"`` to leave out samples on which the function fails, and count them.
        where: Says where the samples come from, for errors.

    State:
        ``source``; ``item``, how many samples were read; ``skipped_samples``, where samples may be left out.

    Raises:
        ConfigurationError: An argument is wrong.
        ShardError: The function failed; with the sample.
    """

    def skip(self, number: int) -> int:
        """Leave out items, without running the function unless some of them might be left out anyway."""
        if self._on_error == "skip":
            return super().skip(number)
        skipped = skip(self.source, number)
        self._item += skipped
        return skipped

    def describe(self) -> list[Any]:
        """Plain data to be compared."""
        return ["map", name_of(self._function)]

    def _items_of(self, samples: list[Any]) -> list[Any]:
        samples, numbers = without_numbers(samples)
        results = self._run(samples, self._function)
        items = numbered(results, numbers)
        if self._on_error != "skip":
            return items
        return list(compress(items, [result is not _FAILED for result in results]))


class FilterNode(_SampleNode):
    """Keeps the samples for which a function is true.

    Args:
        source: The samples.
        function: From a sample to whether it stays.
        seed: Seeds torch, NumPy and ``random`` before each sample, by (seed, number of the sample); None to leave them.
        on_error: ``"skip"`` to leave out samples on which the function fails, and count them.
        where: Says where the samples come from, for errors.

    State:
        As :class:`MapNode`.

    Raises:
        ConfigurationError: An argument is wrong.
        ShardError: The function failed, or gave what is neither true nor false; with the sample.
    """

    _keeps_all = False

    def describe(self) -> list[Any]:
        """Plain data to be compared."""
        return ["filter", name_of(self._function)]

    def _items_of(self, samples: list[Any]) -> list[Any]:
        alone, _ = without_numbers(samples)
        return list(compress(samples, [kept is True for kept in self._run(alone, self._keeps)]))

    def _keeps(self, sample: Any) -> bool:
        return bool(self._function(sample))


class WindowNode(StreamNode[tuple[T, ...]]):
    """Gives sliding windows: tuples of ``width`` consecutive items, each ``step`` items after the last.

    What does not fill a window is left out.

    Args:
        source: What the windows slide over.
        width: Items of a window, at least 1.
        step: Items from the beginning of a window to that of the next, at least 1.

    State:
        ``source``, its state a little before the next window; ``since``, how many items to leave out from there.

    Raises:
        ConfigurationError: ``width`` or ``step`` is no integer, or below 1.
        PositionError: The source ends before the windows that were given.
    """

    state_shape: ClassVar = {"source": object, "since": COUNT}
    keeps_numbers = True

    def __init__(self, source: BaseNode[T], width: int, step: int = 1) -> None:
        super().__init__()
        self.source = source
        self._width, self._step = as_int("width", width, least=1), as_int("step", step, least=1)

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or go to where a state was taken."""
        super().reset(initial_state)
        begun = initial_state or {"source": None, "since": 0}
        reset_to(self.source, begun["source"])
        # All counted from here: the items read or left out, of which the last are at hand, and where the next window
        # begins.
        self._items: deque[T] = deque(maxlen=self._width)
        self._read, self._first = 0, 0
        # States of the source, from the last that the next window has not passed, and how many items were read there.
        self._bases: list[tuple[int, NodeState]] = [(0, state_of(self.source))]
        if begun["since"]:
            self._first = begun["since"]
            self._read = skip(self.source, self._first)
            # The next window may lie beyond the end, where there are items between windows.
            if self._first - self._read > max(self._step - self._width, 0):
                raise _ended_early(self._first, self._read)

    def next(self) -> tuple[T, ...]:
        """The next window."""
        if self._first > self._read:
            self._read += skip(self.source, self._first - self._read)
        missing = self._first + self._width - self._read
        if missing > 0 and self._read - self._bases[-1][0] >= _STRIDE:
            self._bases.append((self._read, state_of(self.source)))
        for _ in range(missing):
            # A StopIteration is the end of the windows too.
            self._items.append(next(self.source))
            self._read += 1
        self._first += self._step
        while len(self._bases) > 1 and self._bases[1][0] <= self._first:
            del self._bases[0]
        items, numbers = without_numbers(self._items)
        # The window has the numbers of its first sample.
        return tuple(items) if numbers is None else cast(tuple[T, ...], Numbered((tuple(items), numbers[0])))

    def get_state(self) -> NodeState:
        """A state of the source that the next window has not passed, and how far from there it begins."""
        read, state = self._bases[0]
        return {"source": state, "since": self._first - read}

    def describe(self) -> list[Any]:
        """Plain data to be compared."""
        return ["windowed", self._width, self._step]


class RunningStateNode(StreamNode[Any]):
    """Gives a value for each sample that depends on all samples before it, by way of a running state.

    Args:
        source: The samples.
        function: ``value, state = function(state, sample)``. It has to follow from these alone, because it is run again
            over a few samples on a resume; it is not seeded. It may change the state in place, but not what it has
            returned as a value.
        initial: The state at the beginning, which is copied: numbers, strings, containers, arrays or tensors.
        where: Says where the samples come from, for errors.

    State:
        ``state``, the running state as plain data; ``source``, its state where that was taken; ``since``, the samples
        since. It is taken only when the node is asked for its state, and, if large, only once in many samples.

    Raises:
        ConfigurationError: ``function`` is no function.
        StateError: The running state cannot be kept in a checkpoint.
        ShardError: The function failed; with the sample.
        PositionError: The source ends before the samples that were read.
    """

    context: ClassVar[tuple[str, ...]] = ("where",)
    state_shape: ClassVar = {"source": object, "since": COUNT, "state": object}
    keeps_numbers = True

    def __init__(
        self,
        source: BaseNode[Any],
        function: Callable[[Any, Any], tuple[Any, Any]],
        initial: Any,
        *,
        where: Where | None = None,
    ) -> None:
        super().__init__()
        check_function("function", function)
        self.source = source
        self._function, self._initial, self._where = function, to_plain(initial, "running state", "stream"), where

    def reset(self, initial_state: NodeState | None = None) -> None:
        """Begin, or go to where a state was taken."""
        super().reset(initial_state)
        begun = initial_state or {"source": None, "since": 0, "state": self._initial}
        reset_to(self.source, begun["source"])
        self._plain = begun["state"]
        self._state = from_plain(self._plain)
        self._source_state, self._since = state_of(self.source), 0
        if (found := self.skip(begun["since"])) < begun["since"]:
            raise _ended_early(begun["since"], found)

    def next(self) -> Any:
        """The next value."""
        (sample,), numbers = without_numbers([next(self.source)])
        try:
            value, self._state = self._function(self._state, sample)
        except Exception as error:
            raise failed(self._function, sample, error, self._where) from error
        self._since += 1
        return value if numbers is None else Numbered((value, numbers[0]))

    def get_state(self) -> NodeState:
        """A state of some samples ago, that of the source there, and how many samples."""
        if self._since > len(json.dumps(self._plain)) // _CHARACTERS_AN_ITEM:
            self._plain = to_plain(self._state, "running state", "stream")
            self._source_state, self._since = state_of(self.source), 0
        return {"source": self._source_state, "since": self._since, "state": self._plain}

    def describe(self) -> list[Any]:
        """Plain data to be compared."""
        return ["recurrent", name_of(self._function)]


def name_of(function: Any) -> str:
    """The name of a function, with plain arguments of ``functools.partial``, or of an object; a column's is its own."""
    if isinstance(function, str):
        return function
    name, *given = name_and_arguments(function)
    return f"{name}({', '.join(given)})" if given else name


def check_function(what: str, function: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        ConfigurationError: That is so.
    """
    if not callable(function):
        raise ConfigurationError(f"{what} must be a function, got {function!r}.")


def sample_in_words(sample: Any, where: Where | None, *, is_there: bool = False) -> str:
    """A sample as errors show it: its beginning, and how far its stream has been read.

    Args:
        sample: The sample.
        where: Says where the stream stands.
        is_there: Whether that is behind this very sample, which no other was read after.
    """
    text = repr(sample)
    text = f"the sample {text if len(text) <= _MOST_CHARACTERS else f'{text[:_MOST_CHARACTERS]}...'}"
    if where is None:
        return text
    return (
        f"{text} (of {where()}, counted from 1)" if is_there else f"{text} (the stream has been read up to {where()})"
    )


def failed(function: Callable[..., Any], sample: Any, error: Exception, where: Where | None) -> ShardError:
    """The error that a user's function has failed on a sample."""
    return ShardError(
        f"{name_of(function)} failed on {sample_in_words(sample, where)}: {type(error).__name__}: {error}. A "
        "resume from any state taken before loses nothing: mend the sample or the function and resume."
    )


def _ended_early(since: int, found: int) -> PositionError:
    return PositionError(
        f"{since} items were used from a state on, but now the items end after {found}. Read the same data, or resume "
        "from another checkpoint."
    )
