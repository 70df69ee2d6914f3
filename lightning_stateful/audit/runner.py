"""Runs a sampler or loader with and without stops, and keeps what it yielded and its states for all checks."""

from __future__ import annotations

import copy
import inspect
import json
import pickle  # only measures states that are no plain data; nothing is loaded
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from lightning_stateful.audit.compare import END, Key, Place, difference, explain, identities, samples, shorten
from lightning_stateful.errors import ConfigurationError

Factory: TypeAlias = Callable[[int, int], Any]
Stops: TypeAlias = Sequence[int] | Literal["spread", "every"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first thing that was not as in the uninterrupted run.

    Attributes:
        law: What was broken, a law of the contract or: ``"repeatable"`` (a second run of the same factory differs),
            ``"even"`` (ranks have different numbers of items), ``"snapshot"`` (a state changed after it was taken),
            ``"suffix"`` (a resumed run differs) or ``"rank-free"`` (on another number of ranks a sample came twice or
            never, or all ranks are given the same).
        what: The difference in words.
        epoch: Of the item, counted from the beginning of the run.
        step: Of the item within its epoch, or None where no item is to blame.
        rank: Whose item, or None.
        stop: Items that every rank had been given when the run was last stopped, or None for a run without a stop.
        expected: The item of the uninterrupted run, or the number that should have been found.
        got: What came in its place.
        expected_samples: The samples of the item expected, where ``key`` tells them.
        got_samples: The samples of the item that came, where ``key`` tells them.
        cause: What usually makes such a difference, or ``""`` where nothing is known.
    """

    law: str
    what: str
    epoch: int
    step: int | None = None
    rank: int | None = None
    stop: int | None = None
    expected: Any
    got: Any
    expected_samples: list[Hashable] | None = None
    got_samples: list[Hashable] | None = None
    cause: str = ""

    def __str__(self) -> str:
        where = [f"epoch {self.epoch}"]
        where += [f"step {self.step}"] if self.step is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"stopped after {self.stop} items"] if self.stop is not None else []
        lines = [
            f"{self.law}: {', '.join(where)}: {self.what}",
            f"  expected {shorten(self.expected)}",
            f"  got      {shorten(self.got)}",
        ]
        if self.expected_samples != self.got_samples:
            lines.append(f"  samples  {shorten(self.expected_samples)} expected, {shorten(self.got_samples)} got")
        if self.cause:
            lines.append(f"  usual cause: {self.cause}")
        return "\n".join(lines)


class ContractError(AssertionError):
    """An object breaks a law of the contract.

    Attributes:
        divergence: Which law, where, what was expected and what was found.
    """

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(str(divergence))
        self.divergence = divergence


@dataclass(frozen=True, eq=False, kw_only=True)
class Stop:
    """A state that was taken on the way.

    Attributes:
        num_items: Items that the rank had been given.
        place: Epoch and step at which a resumed run goes on.
        state: A copy made at once.
        held: What ``state_dict`` returned; it must not change later.
    """

    num_items: int
    place: Place
    state: Any
    held: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording:
    """Batches of one rank in a run without a stop, and its states on the way.

    Attributes:
        items: The items of all epochs; ``END`` closes each, unless the run was cut off.
        stops: The states, in the order in which they were taken.
    """

    items: Sequence[Any]
    stops: Sequence[Stop] = ()

    @cached_property
    def passes(self) -> list[list[Any]]:
        """The items of every epoch."""
        passes: list[list[Any]] = [[]]
        for item in self.items:
            if item is END:
                passes.append([])
            else:
                passes[-1].append(item)
        return passes if passes[-1] else passes[:-1]

    @property
    def lengths(self) -> list[int]:
        """Items of every epoch."""
        return [len(items) for items in self.passes]

    def from_place(self, place: Place) -> Sequence[Any]:
        """The items from a step of an epoch on."""
        epoch, step = place
        return self.items[sum(self.lengths[:epoch]) + epoch + step :]

    def resumed_at(self, place: Place) -> Place:
        """The place at which a stopped run goes on: the end of an epoch is the beginning of the next."""
        epoch, step = place
        return (epoch + 1, 0) if step and self.from_place(place)[:1] == [END] else place


class Followed(NamedTuple):
    """The comparison of a run with a recording.

    Attributes:
        num_equal: Items that were as expected, the ends of epochs among them.
        rest: The rest of the pass from the first other item on; empty if there was none.
    """

    num_equal: int
    rest: list[Any]


class Run:
    """A fresh object of one rank that is iterated epoch by epoch.

    Args:
        factory: Makes the object.
        num_replicas: Ranks of the run.
        rank: Whose object.
        set_epoch: Whether to call ``set_epoch`` before every pass where the object has it.
    """

    def __init__(self, factory: Factory, num_replicas: int, rank: int, *, set_epoch: bool = False) -> None:
        self.place: Place = (0, 0)
        self._label = f"rank {rank} of {num_replicas}"
        self._set_epoch = set_epoch
        self._iterator: Iterator[Any] | None = None
        with self._context("while making the object"):
            self.source: Any = factory(num_replicas, rank)
        for name in ("state_dict", "load_state_dict", "__iter__"):
            if not callable(getattr(self.source, name, None)):
                raise ConfigurationError(
                    f"The factory returned a {type(self.source).__qualname__} without {name}(). It must return a "
                    "fresh object with state_dict(), load_state_dict(state) and __iter__()."
                )

    def load(self, state: Any, place: Place) -> Run:
        """Load a state that was taken at ``place``."""
        self.place = place
        with self._context("while loading a state"):
            self.source.load_state_dict(state)
        return self

    def state(self) -> Any:
        """The object's state, as it returns it."""
        with self._context("while taking a state"):
            return self.source.state_dict()

    def open(self) -> None:
        """Begin a pass unless one is running."""
        if self._iterator is None:
            with self._context("while beginning a pass"):
                if self._set_epoch and hasattr(self.source, "set_epoch"):
                    self.source.set_epoch(self.place[0])
                self._iterator = iter(self.source)

    def next(self) -> Any:
        """The next item, or ``END``; the call after that begins the next epoch."""
        self.open()
        with self._context("while iterating"):
            item = next(self._iterator, END)  # type: ignore[arg-type]  # open() has set it
        epoch, step = self.place
        if item is END:
            self._iterator = None
        self.place = (epoch + 1, 0) if item is END else (epoch, step + 1)
        return item

    def take(self, limit: int) -> list[Any]:
        """Up to ``limit`` items of the present pass."""
        items: list[Any] = []
        while len(items) < limit and (item := self.next()) is not END:
            items.append(item)
        return items

    def follow(self, expected: Sequence[Any], limit: int | None = None) -> Followed:
        """Iterate up to ``limit`` items, as long as they are those expected."""
        num_items = 0
        for number, item in enumerate(expected):
            if num_items == limit:
                return Followed(number, [])
            got = self.next()
            num_items += got is not END
            if difference(item, got):
                return Followed(number, [got, *self._rest(len(expected) * (got is not END))])
        return Followed(len(expected), [])

    def _rest(self, limit: int) -> list[Any]:
        try:
            return self.take(limit)
        except Exception:  # the difference is reported, not what followed from it
            return []

    @contextmanager
    def _context(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"Raised {doing}, {self._label}, at epoch {self.place[0]}, step {self.place[1]}.")
            raise


def _refuse_other_arguments(factory: Factory) -> None:
    """Make sure that a factory can be called with the number of ranks and a rank."""
    try:
        arguments = inspect.signature(factory)
    except ValueError:
        return  # Built in; it says so itself.
    try:
        arguments.bind(1, 0)
    except TypeError as error:
        raise ConfigurationError(
            f"The factory is called as factory(num_replicas, rank), and takes {arguments}: {error}. Make it a function "
            "of both, as lambda num_replicas, rank: ..., which returns a fresh object for that rank."
        ) from None


class Recorder:
    """A factory that records each run of its objects once, for all checks that are given it.

    Args:
        factory: ``factory(num_replicas, rank)`` returns a fresh object, always of the same configuration.
        set_epoch: Whether to call ``set_epoch`` before every pass where the object has it.
        max_items: Items of a rank after which a run is cut off.

    Attributes:
        num_resumes: Objects that a state was loaded into.
        num_comparisons: Items that were compared with those of a run without a stop.
        state_bytes: Size of the largest state, as JSON where it is plain data and pickled where it is not.

    Example:
        >>> from lightning_stateful import StatefulDistributedSampler
        >>> from lightning_stateful.testing import check_echo, check_suffix
        >>> make = Recorder(lambda num_replicas, rank: StatefulDistributedSampler(10, num_replicas, rank))
        >>> check_echo(make)
        >>> check_suffix(make)
    """

    num_comparisons: int
    num_resumes: int
    state_bytes: int

    def __init__(self, factory: Factory, *, set_epoch: bool = False, max_items: int | None = None) -> None:
        _refuse_other_arguments(factory)
        self.factory = factory
        self.num_resumes = self.num_comparisons = self.state_bytes = 0
        self._set_epoch = set_epoch
        self._max_items = max_items
        self._observed: dict[tuple[int, int], list[Recording]] = {}
        self._recorded: dict[tuple[Any, ...], Recording] = {}
        self._resumed: dict[tuple[Recording, Stop], tuple[Followed, Any]] = {}

    @classmethod
    def of(cls, factory: Factory, *, set_epoch: bool = False, max_items: int | None = None) -> Recorder:
        """The factory itself if it is a recorder already and runs are to be whole; otherwise a recorder of it."""
        if isinstance(factory, cls) and not set_epoch and max_items is None:
            return factory
        return cls(factory, set_epoch=set_epoch, max_items=max_items)

    def __call__(self, num_replicas: int, rank: int) -> Any:
        """A fresh object of one rank."""
        return self.factory(num_replicas, rank)

    def run(self, num_replicas: int = 1, rank: int = 0) -> Run:
        """A fresh run of one rank."""
        return Run(self.factory, num_replicas, rank, set_epoch=self._set_epoch)

    def load(self, stop: Stop, run: Run) -> Run:
        """Load a copy of a stop's state into a fresh object."""
        self.num_resumes += 1
        return run.load(copy.deepcopy(stop.state), stop.place)

    def observe(self, num_replicas: int, num_epochs: int) -> list[Recording]:
        """The batches of every rank if nothing is stopped, and no state taken."""
        key = (num_replicas, num_epochs)
        if key not in self._observed:
            self._observed[key] = []
            for rank in range(num_replicas):
                run = self.run(num_replicas, rank)
                items: list[Any] = []
                while run.place[0] < num_epochs and len(items) - run.place[0] != self._max_items:
                    items.append(run.next())
                self._observed[key].append(Recording(items=items))
        return self._observed[key]

    def record(self, num_epochs: int, stops: Stops, num_replicas: int = 1, rank: int = 0) -> Recording:
        """The batches of one rank, and its states at the stops.

        Raises:
            ConfigurationError: A stop lies outside the run.
            ContractError: A run in which states are taken is not as one in which none are.
        """
        key = (num_epochs, stops if isinstance(stops, str) else tuple(stops), num_replicas, rank)
        if key not in self._recorded:
            recordings = self.observe(num_replicas, num_epochs)
            observed, run = recordings[rank], self.run(num_replicas, rank)
            wanted = _find_stops(observed.lengths, stops)
            taken: list[Stop] = []
            for position, item in enumerate(observed.items):
                num_items, place = position - run.place[0], run.place
                if num_items in wanted:
                    self._take_state(run, num_items, observed.resumed_at(place), taken)
                    run.open()
                    self._take_state(run, num_items, observed.resumed_at(place), taken)
                self.demand_equal("repeatable", recordings, rank, place, run.follow([item]))
            if sum(observed.lengths) in wanted:
                self._take_state(run, sum(observed.lengths), observed.resumed_at(run.place), taken)
            self._recorded[key] = Recording(items=observed.items, stops=taken)
        return self._recorded[key]

    def _take_state(self, run: Run, num_items: int, place: Place, taken: list[Stop]) -> None:
        held = run.state()
        self.state_bytes = max(self.state_bytes, _num_bytes(held))
        if not taken or taken[-1].place != place or difference(taken[-1].state, held):
            taken.append(Stop(num_items=num_items, place=place, state=copy.deepcopy(held), held=held))

    def resume(self, recordings: Sequence[Recording], rank: int, stop: Stop) -> tuple[Followed, Any]:
        """Resume a rank at a stop, once for all checks.

        Returns:
            How it went on, and the state that was given to it, as it was after that.
        """
        recording = recordings[rank]
        if (recording, stop) not in self._resumed:
            self.num_resumes += 1
            given = copy.deepcopy(stop.state)
            run = self.run(len(recordings), rank).load(given, stop.place)
            self._resumed[recording, stop] = run.follow(recording.from_place(stop.place)), given
        return self._resumed[recording, stop]

    def demand_equal(
        self,
        law: str,
        recordings: Sequence[Recording],
        rank: int,
        start: Place,
        followed: Followed,
        *,
        stop: int | None = None,
        key: Key = identities,
    ) -> None:
        """Raise if a run of a rank that began at ``start`` was not as recorded.

        Raises:
            ContractError: With what is known of the cause.
        """
        items = recordings[rank].from_place(start)[: followed.num_equal + 1]
        self.num_comparisons += sum(item is not END for item in [*items[: followed.num_equal], *followed.rest[:1]])
        if not followed.rest:
            return
        place = start
        for item in items[:-1]:
            place = (place[0] + 1, 0) if item is END else (place[0], place[1] + 1)
        expected, got = items[-1], followed.rest[0]
        if stop is None:
            cause = self._explain_factory(recordings, rank)
        else:
            # One epoch more, because what came may be of that.
            longer = self.observe(len(recordings), len(recordings[rank].passes) + 1)
            cause = explain([recording.passes for recording in longer], rank, start, place, followed.rest, key)
        found: dict[str, Any] = {"epoch": place[0], "step": place[1], "rank": rank, "stop": stop, "cause": cause}
        found |= {"what": difference(expected, got), "expected": expected, "got": got}
        found |= {"expected_samples": samples(expected, key), "got_samples": samples(got, key)}
        raise ContractError(Divergence(law=law, **found))

    def _explain_factory(self, recordings: Sequence[Recording], rank: int) -> str:
        if self.run(len(recordings), rank).follow(recordings[rank].items).rest:
            return (
                "Two objects of the factory differ: one draws from an unseeded generator, or from a global one, or "
                "they share something."
            )
        return "Runs differ only when states are taken: state_dict() must not change anything."


def _num_bytes(state: Any) -> int:
    try:
        return len(json.dumps(state))
    except (TypeError, ValueError):
        return len(pickle.dumps(state))


def _find_stops(lengths: Sequence[int], stops: Stops) -> set[int]:
    """The numbers of items after which to take a state.

    Raises:
        ConfigurationError: A number is negative or more than the run has.
    """
    total = sum(lengths)
    if stops == "every":
        return set(range(total + 1))
    if stops == "spread":
        starts = [sum(lengths[:epoch]) for epoch in range(len(lengths))]
        places = [{0, 1, n // 4, n // 2, n - 1, n} for n in lengths]
        return {start + place for start, some in zip(starts, places, strict=True) for place in some if place >= 0}
    wrong = [stop for stop in stops if not isinstance(stop, int) or not 0 <= stop <= total]
    if wrong:
        raise ConfigurationError(
            f"stops must be 'spread', 'every' or numbers from 0 to {total} (the items of a rank in the run), "
            f"got {wrong}."
        )
    return {int(stop) for stop in stops}
