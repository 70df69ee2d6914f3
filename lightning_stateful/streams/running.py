"""Stages that run code of the user's over items: sliding windows, a running state, a map and a filter."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import PositionError, ShardError, StateError
from lightning_stateful.samplers.rng import seed_randomness
from lightning_stateful.samplers.state_codec import from_plain, to_plain
from lightning_stateful.streams.naming import NameShard, by_number, name_of, sample_of
from lightning_stateful.streams.reading import OnError
from lightning_stateful.streams.stage import Item, Open, Place, Run, Stage

# Items between two places of what lies below, which may cost more than the items.
_STRIDE = 64
# A running state is taken anew once so many of its characters, as JSON, fall to each item since.
_CHARACTERS_AN_ITEM = 256


class WindowedStage(Stage):
    """Sliding windows: tuples of the values of ``width`` consecutive items, each ``step`` items after the last.

    A window has the shard and the number of its first item. What does not fill a window is left out.

    Args:
        open_inner: Opens what the windows slide over, a stage of items.
        place: Where to begin; None for the beginning.
        width: Items of a window, at least 1.
        step: Items from the beginning of a window to that of the next, at least 1.

    State:
        ``at``, a place a little before the next window; ``since``, how many items to leave out from there.

    Raises:
        PositionError: The items end before the place.
    """

    def __init__(self, open_inner: Open, place: Place | None, *, width: int, step: int = 1) -> None:
        self._width, self._step = width, step
        self._inner = open_inner(None if place is None else place["at"])
        # All counted from where the inner stage was opened: the items read or left out, of which the last are at hand,
        # and where the next window begins.
        self._items: deque[Item] = deque(maxlen=self._width)
        self._read = 0
        self._first = 0
        # Places below, none at more than a stride from the next, and how many items had been read there.
        self._bases: list[tuple[int, Place]] = [(0, self._inner.place())]
        if place is not None and place["since"]:
            self._first = place["since"]
            self._read = self._inner.skip(self._first)
            # The next window may lie beyond the end, where there are items between windows.
            missing = self._first - self._read - max(self._step - self._width, 0)
            if missing > 0:
                raise _ended_early(self._first, self._read)

    def __next__(self) -> Item:
        if not self._fill():
            raise StopIteration
        self._first += self._step
        shard, number, _ = self._items[0]
        return Item(shard, number, tuple([item.value for item in self._items]))

    def skip(self, count: int) -> int:
        """Leave out windows; only the items of the last are read."""
        if count < 1:
            return 0
        begun = self._first
        self._first += (count - 1) * self._step
        skipped = count if self._fill() else max((self._read - begun - self._width) // self._step + 1, 0)
        self._first = begun + skipped * self._step
        return skipped

    def place(self) -> Place:
        """A place below that the next window has not passed, and how far from there it begins."""
        read, at = max((base for base in self._bases if base[0] <= self._first), key=lambda base: base[0])
        return {"at": at, "since": self._first - read}

    def close(self) -> None:
        """Close what the windows slide over."""
        self._inner.close()

    def _fill(self) -> bool:
        """Have the items of the next window at hand; False if there are too few."""
        if self._first > self._read:
            self._read += self._inner.skip(self._first - self._read)
        missing = self._first + self._width - self._read
        if missing > 0:
            if self._read - self._bases[-1][0] >= _STRIDE:
                self._bases.append((self._read, self._inner.place()))
            for item in islice(self._inner, missing):
                self._items.append(item)
                self._read += 1
        if self._read - self._first < self._width:
            return False
        while len(self._bases) > 1 and self._bases[1][0] <= self._first:
            del self._bases[0]
        return True


class RecurrentStage(Stage):
    """A value for each item that depends on all items before it, by way of a running state.

    Args:
        open_inner: Opens what is run over, a stage of items.
        place: Where to begin; None for the beginning.
        function: From the state and an item's value to the new value and the new state. It has to follow from these
            alone, because it is run again over a few items when the stage is opened. It may change the state in place,
            but not what it has returned as a value.
        initial: The state at the beginning, which is copied: numbers, strings, containers, arrays or tensors.
        name_shard: What errors call a shard.

    State:
        ``state``, the running state as plain data; ``at``, the place where it was taken; ``since``, the items since. It
        is taken only where somebody asks for the place, and, if large, only once in many items.

    Raises:
        StateError: The running state cannot be kept in a checkpoint.
        ShardError: The function failed.
        PositionError: The items end before the place.
    """

    def __init__(
        self,
        open_inner: Open,
        place: Place | None,
        *,
        function: Callable[[Any, Any], tuple[Any, Any]],
        initial: Any,
        name_shard: NameShard = by_number,
    ) -> None:
        self._function, self._name_shard = function, name_shard
        self._plain = _as_plain(initial) if place is None else place["state"]
        self._state = from_plain(self._plain)
        self._inner = open_inner(None if place is None else place["at"])
        self._at: Place = self._inner.place()
        self._since = 0
        self._gap = _gap(self._plain)
        self._failure: ShardError | None = None
        if place is not None and super().skip(place["since"]) < place["since"]:
            raise _ended_early(place["since"], self._since)

    def __next__(self) -> Item:
        if self._failure is not None:
            raise self._failure
        item = next(self._inner)
        try:
            value, self._state = self._function(self._state, item.value)
        except Exception as error:
            self._failure = _failed(self._function, item, error, self._name_shard)
            raise self._failure from error
        self._since += 1
        return Item(item.shard, item.number, value)

    def place(self) -> Place:
        """A state of some items ago, where that was, and how many items."""
        if self._since >= self._gap and self._failure is None:
            self._plain, self._at, self._since = _as_plain(self._state), self._inner.place(), 0
            self._gap = _gap(self._plain)
        return {"at": self._at, "since": self._since, "state": self._plain}

    def close(self) -> None:
        """Close what is run over."""
        self._inner.close()


class _Passing(Stage):
    """A stage that holds nothing back: it stands where the stage below does."""

    def __init__(
        self,
        open_inner: Open,
        place: Place | None,
        *,
        function: Callable[[Any], Any],
        seed: int | None = None,
        on_error: OnError = "raise",
        name_shard: NameShard = by_number,
    ) -> None:
        self._seed = None if seed is None else derive_seed("transform", seed)
        self._skips = on_error == "skip"
        # What was left out is counted in a place of its own around that of the stage below.
        self._skipped = place["skipped_samples"] if self._skips and place is not None else 0
        self._inner = open_inner(place["at"] if self._skips and place is not None else place)
        self._function, self._name_shard = function, name_shard
        self._failure: ShardError | None = None

    def __next__(self) -> Item:
        if self._failure is not None:
            raise self._failure
        while True:
            item: Item = next(self._inner)
            try:
                if self._seed is not None:
                    seed_randomness(mixed_seed(self._seed, item.shard, item.number))
                made = self._made(item)
            except Exception as error:
                if self._skips:
                    self._skipped += 1
                    continue
                self._failure = _failed(self._function, item, error, self._name_shard)
                raise self._failure from error
            if made is not None:
                return made

    @abstractmethod
    def _made(self, item: Item) -> Item | None:
        """What becomes of an item; None if it is left out."""

    def place(self) -> Place:
        """The place of the stage below."""
        # That has passed the item on which the function failed.
        if self._failure is not None:
            raise self._failure
        at = self._inner.place()
        return {"at": at, "skipped_samples": self._skipped} if self._skips else at

    def close(self) -> None:
        """Close the stage below."""
        self._inner.close()


class MapStage(_Passing):
    """Items with what a function makes of their values.

    Args:
        open_inner: Opens what it is applied to, a stage of items.
        place: Where to begin; None for the beginning.
        function: From a value to another.
        seed: Seeds torch, NumPy and ``random`` by (seed, shard, number) of an item: before each one that is asked for
            by itself, and before the first of those that are asked for together, as those of a batch; None to leave
            them.
        on_error: ``"skip"`` to leave out items on which the function fails, and count them.
        name_shard: What errors call a shard.

    State:
        That of the stage below; beside the number of items left out, where they may be.

    Raises:
        ShardError: The function failed; with the item.
    """

    def _made(self, item: Item) -> Item:
        return Item(item.shard, item.number, self._function(item.value))

    def skip(self, count: int) -> int:
        """Leave out items, without running the function where none of them may be left out anyway."""
        return super().skip(count) if self._skips else self._inner.skip(count)

    def take_runs(self, number: int) -> list[Run]:
        """The next samples under the name of the first, seeded together; one by one where they may be left out.

        A batch asks for the same ones after a resume.
        """
        if self._skips or self._failure is not None:
            return super().take_runs(number)
        items: list[Item] = self._inner.take(number)
        values: list[Any] = []
        try:
            if self._seed is not None and items:
                seed_randomness(mixed_seed(self._seed, items[0].shard, items[0].number))
            for item in items:
                values.append(self._function(item.value))
        except Exception as error:
            self._failure = _failed(self._function, items[len(values)], error, self._name_shard)
            raise self._failure from error
        return [Run(items[0].shard, items[0].number, values)] if items else []


class FilterStage(_Passing):
    """The items for whose values a function is true.

    Args:
        open_inner: Opens what is filtered, a stage of items.
        place: Where to begin; None for the beginning.
        function: From a value to whether its item stays.
        seed: As :class:`MapStage`.
        on_error: ``"skip"`` to leave out items on which the function fails, and count them.
        name_shard: What errors call a shard.

    State:
        As :class:`MapStage`.

    Raises:
        ShardError: The function failed; with the item.
    """

    def _made(self, item: Item) -> Item | None:
        # What is neither true nor false, as an array, fails here.
        return item if bool(self._function(item.value)) else None


def _failed(function: Callable[..., Any], item: Item, error: Exception, name_shard: NameShard) -> ShardError:
    return ShardError(
        f"{name_of(function)} failed on {sample_of(item, name_shard)}: {type(error).__name__}: {error}. Nothing is "
        "lost: the state is that of the last batch handed over. Mend the sample or the function and resume."
    )


def _as_plain(state: Any) -> Any:
    try:
        return to_plain(state, "state")
    except StateError as error:
        said = str(error).removeprefix("The sampler's ")
        raise StateError(f"The running state of a stream must be plain: {said}") from None


def _gap(plain: Any) -> int:
    """Items after which a state of this size is worth being taken again."""
    return 1 + len(json.dumps(plain)) // _CHARACTERS_AN_ITEM


def _ended_early(since: int, found: int) -> PositionError:
    return PositionError(
        f"{since} items were used from a place on, but now the items end after {found}. Read the same data, or resume "
        "from another checkpoint."
    )
