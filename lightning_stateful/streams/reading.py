"""Samples of shards, one shard after the other."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, get_args

from lightning_stateful.core.seeding import derive_seed, mixed_seed
from lightning_stateful.errors import ConfigurationError, PositionError, ShardError, StateError
from lightning_stateful.samplers.rng import seed_randomness
from lightning_stateful.state import copy_plain
from lightning_stateful.streams.shards import ShardIterator, Shards, carried
from lightning_stateful.streams.stage import Item, Place, Run, Stage

OnError = Literal["raise", "skip"]

# A state is taken after so many items, and one more for so many of its characters as JSON: the items since are read
# again on a resume, which costs less than states of every batch would.
_LEAST_GAP = 256
_CHARACTERS_AN_ITEM = 16
# The same of batches.
_CHARACTERS_A_BATCH = 2**14
# Samples that are read together under one seed: to seed each costs more than many take to read.
_RUN = 32


def check_on_error(on_error: str) -> None:
    """Refuse what is no way to go on.

    Raises:
        ConfigurationError: It is neither ``"raise"`` nor ``"skip"``.
    """
    if on_error not in get_args(OnError):
        raise ConfigurationError(f"on_error must be one of {get_args(OnError)}, got {on_error!r}.")


class Reading(Stage):
    """The samples of some shards in one epoch.

    Args:
        shards: What they are shards of.
        numbers: Which shards, in the order in which they are read.
        epoch: The epoch that shards are told.
        place: Where to begin; None for the beginning.
        seed: Seeds torch, NumPy and ``random`` as a shard is opened, and before each run of samples, by (seed, shard,
            sample); None to leave them.
        seeds_samples: Whether samples are seeded, or only shards as they are opened. They are then read in runs, the
            same ones after a resume: up to 31 samples further than anybody has asked for.
        on_error: ``"skip"`` to leave out the rest of a shard that cannot be read, and count it.

    Raises:
        ShardError: A shard could not be read; with its name.
        PositionError: A shard ends before the place.
        StateError: What a shard says of its place is no plain data.
        ConfigurationError: The shards are read as something else than a :class:`ShardIterator`.
    """

    def __init__(
        self,
        shards: Shards,
        numbers: Sequence[int],
        epoch: int,
        place: Place | None = None,
        *,
        seed: int | None = None,
        seeds_samples: bool = True,
        on_error: OnError = "raise",
    ) -> None:
        self._shards, self._numbers, self._epoch = shards, numbers, epoch
        self._seed, self._on_error = None if seed is None else derive_seed("item", seed, epoch), on_error
        self._sample_seed = self._seed if seeds_samples else None
        begun = place or {"shard": 0, "item": 0, "since": 0, "state": None, "skipped_shards": 0}
        self._at: int = begun["shard"]
        self._item: int = begun["item"]
        # The item at which the state was taken.
        self._state_item: int = begun["item"] - begun["since"]
        self._state: Any = begun["state"]
        self._skipped: int = begun["skipped_shards"]
        # Digest of the pass's first samples, of what divides itself.
        self._first: str | None = begun.get("first")
        # What the next pass goes on from, of loaders.
        self.carried: Any = None
        self._gap = self._gap_after(self._state)
        self._iterator: ShardIterator | None = None
        # Of samples that are seeded: what is left of a run, the error that ended it, and where the next one begins.
        self._ahead: deque[Any] = deque()
        self._failure: Exception | None = None
        self._next_run = self._state_item

    @property
    def num_opened(self) -> int:
        """How many of the shards have been opened, the one that is read now among them."""
        return min(self._at + 1, len(self._numbers))

    def __next__(self) -> Item:
        for run in self.take_runs(1):
            return Item(run.shard, run.first, run.values[0])
        raise StopIteration

    def take(self, number: int) -> list[Any]:
        """The next items, many at a time."""
        runs = self.take_runs(number)
        return [Item(run.shard, run.first + place, value) for run in runs for place, value in enumerate(run.values)]

    def take_runs(self, number: int) -> list[Run]:
        """The next samples, shard by shard."""
        runs: list[Run] = []
        while number and self._at < len(self._numbers):
            shard = self._numbers[self._at]
            values: list[Any] = []
            try:
                # What comes before an error stays in the list.
                iterator = self._open(shard) if self._iterator is None else self._iterator
                self._extend(values, iterator, shard, number)
            except Exception as error:
                self._note(runs, shard, values)
                self._on_failure(shard, error)
            else:
                self._note(runs, shard, values)
                if len(values) < number:
                    self._advance()
            number -= len(values)
        return runs

    def place(self) -> Place:
        """The shard, the sample in it, the latest state that is worth its size, and the samples since."""
        if self._iterator is not None and not self._seeds(self._iterator):
            self._take_state(self._iterator, self._item)
        place = {
            "shard": self._at,
            "item": self._item,
            "since": self._item - self._state_item,
            "state": self._state,
            "skipped_shards": self._skipped,
        }
        if self._shards.pinned:
            if self._iterator is not None:
                self._first = self._iterator.first() or self._first
            place["first"] = self._first
        return place

    def close(self) -> None:
        """Close the shard that is open."""
        iterator, self._iterator = self._iterator, None
        self._ahead.clear()
        self._failure = None
        if iterator is not None:
            iterator.close()

    def _seeds(self, iterator: ShardIterator) -> bool:
        """Whether samples are read in runs, each under one seed."""
        return self._sample_seed is not None and iterator.draws

    def _extend(self, values: list[Any], iterator: ShardIterator, shard: int, number: int) -> None:
        """Append up to ``number`` samples; fewer at the end of the shard."""
        if not self._seeds(iterator):
            values.extend(islice(iterator, number))
            return
        while len(values) < number and (self._ahead or self._read_run(iterator, shard)):
            values.extend(self._ahead.popleft() for _ in range(min(number - len(values), len(self._ahead))))

    def _read_run(self, iterator: ShardIterator, shard: int) -> bool:
        """Read some samples ahead under one seed; whether there are any."""
        if self._failure is not None:
            raise self._failure
        self._take_state(iterator, self._next_run)
        seed_randomness(mixed_seed(self._sample_seed or 0, shard, self._next_run))
        try:
            self._ahead.extend(islice(iterator, _RUN))
        except Exception as error:
            if not self._ahead:
                raise
            # What was read before it comes first.
            self._failure = error
        self._next_run += len(self._ahead)
        return bool(self._ahead)

    def _take_state(self, iterator: ShardIterator, item: int) -> None:
        """Take the state that an iterator has before ``item``, if the last one lies far enough back."""
        if item - self._state_item < self._gap:
            return
        state = self._state_of(iterator)
        if state is not None:
            self._state, self._state_item, self._gap = state, item, self._gap_after(state)

    def _state_of(self, iterator: ShardIterator) -> Any:
        """What an iterator says of its place, as a copy that it does not change any more."""
        try:
            return copy_plain(iterator.state())
        except Exception as error:
            where = f"{self._shards.name(self._numbers[self._at])} at its sample {self._item}"
            of = f"state() of {type(iterator).__qualname__}"
            if isinstance(error, StateError):
                raise StateError(
                    f"{of} gave, for {where}, what cannot be kept in a checkpoint: {error} Return plain JSON data, "
                    "numbers as int(...) or float(...)."
                ) from error
            raise ShardError(
                f"{of} failed for {where}: {type(error).__name__}: {error}. Mend it, or let it return None where only "
                "reading the shard again leads there."
            ) from error

    def _open(self, shard: int) -> ShardIterator:
        if not self._item and self._state is None:
            self._shards.begin_passes(self._epoch)
        iterator = self._read(shard)
        found = iterator.first() if self._state is None else None
        if found is not None and self._first not in (None, found):
            # It counts its passes itself.
            iterator.close()
            self._shards.begin_passes(self._epoch, surely=True)
            iterator = self._read(shard)
            if iterator.first() != self._first:
                iterator.close()
                raise PositionError(
                    f"{self._shards.name(shard)} begins pass {self._epoch} with other samples than before the resume, "
                    f"however often it is begun, so that nobody can say which of its samples {self._item} were. Give "
                    "it state_dict and load_state_dict, or an order that follows from set_epoch(epoch), and make it "
                    'anew for a resume; or resume from the end of an epoch. accept=("nondeterministic",) reads on '
                    "behind as many samples."
                )
        self._iterator = iterator
        return iterator

    def _read(self, shard: int) -> ShardIterator:
        """A shard where its state was taken, behind what was served since."""
        if self._seed is not None:
            seed_randomness(mixed_seed(self._seed, shard, 0))
        # A copy, which a reader may go on counting in.
        iterator: Any = self._shards.read(shard, self._epoch, copy_plain(self._state))
        if not isinstance(iterator, ShardIterator):
            raise ConfigurationError(
                f"read() of {type(self._shards).__qualname__} gave a {type(iterator).__qualname__} for "
                f"{self._shards.name(shard)}. Let it return a ShardIterator, whose __next__ gives the samples."
            )
        self._ahead.clear()
        self._next_run, since = self._state_item, self._item - self._state_item
        missing = since - self._leave_out(iterator, shard, since)
        if missing:
            iterator.close()
            raise PositionError(
                f"{self._item} samples of {self._shards.name(shard)} were used, but now it ends after "
                f"{self._item - missing}. Read the same data, or resume from another checkpoint."
            )
        return iterator

    def _leave_out(self, iterator: ShardIterator, shard: int, since: int) -> int:
        """Read what was served since the state; returns how many samples there were."""
        found = 0
        while found < since:
            values: list[Any] = []
            self._extend(values, iterator, shard, min(since - found, _LEAST_GAP))
            if not values:
                break
            found += len(values)
        return found

    def _note(self, runs: list[Run], shard: int, values: list[Any]) -> None:
        if values:
            runs.append(Run(shard, self._item, values))
            self._item += len(values)

    def _gap_after(self, state: Any) -> int:
        """Items after which a state of this size is worth being taken again."""
        if self._shards.is_loader:
            begins = state is None or "after" in state
            return 1 if begins else 1 + len(json.dumps(state)) // _CHARACTERS_A_BATCH
        if state is None:
            # One that is there at all is taken at once where only reading all again would lead there otherwise.
            return 0 if self._shards.pinned else _LEAST_GAP
        return _LEAST_GAP + len(json.dumps(state)) // _CHARACTERS_AN_ITEM

    def _advance(self) -> None:
        if self._shards.is_loader and self._iterator is not None:
            self.carried = carried(self._epoch, self._state_of(self._iterator), 0, is_ended=True)
        self.close()
        self._at, self._item, self._state_item, self._state, self._first = self._at + 1, 0, 0, None, None
        self._gap = self._gap_after(None)

    def _on_failure(self, shard: int, error: Exception) -> None:
        self.close()
        if isinstance(error, (StateError, ConfigurationError)):
            # No bad shard, but another than the state was taken in, or none that could be read at all.
            raise error
        if self._on_error == "skip":
            self._skipped += 1
            self._advance()
            return
        raise ShardError(
            f"{self._shards.name(shard)} could not be read at its sample {self._item}: "
            f"{type(error).__name__}: {error}. Nothing is lost: the state is that of the last batch handed over. "
            'Mend the shard and resume, or pass on_error="skip" to leave out what is left of it.'
        ) from error
