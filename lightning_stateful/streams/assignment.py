"""Assigns shards to worker slots, alone or together with others, and assigns anew what is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from lightning_stateful.errors import PositionError
from lightning_stateful.shapes import COUNT, EPOCH, Either, check_shape, refuse_unless
from lightning_stateful.state import copy_plain
from lightning_stateful.stream_nodes.nodes import LEFT_OUT, NodeState, innermost

# Of more ranks, teams of so many share what is shared: each of them reads all of it.
_MOST_RANKS = 16
# In place of a number of items: all that a reader would have been given.
_ALL = -1
_OR_NO_SLOT = range(-1, COUNT.stop)
_SLICE = {
    "epoch": EPOCH,
    "shards": [COUNT],
    "state": Either(None, {"source": object, "seen": [COUNT]}),
    "served": [[range(_ALL, COUNT.stop)]],
    "first": _OR_NO_SLOT,
    "slot": _OR_NO_SLOT,
}
_SHAPE = {"epoch": EPOCH, "begun": [_SLICE], "older": [(EPOCH, COUNT)], "whole": [(COUNT, COUNT)]}


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Shards of one pass that are read one after the other, with buffers that begin and end with them.

    Attributes:
        epoch: The pass that the shards belong to.
        shards: Their numbers.
        state: Where to begin: ``source``, the state of the slice's nodes, and ``seen``, for each time that items were
            shared, how many of those left by then have come by. None for the beginning of the first shard.
        served: What was served of their items, for each time that they were shared among readers: reader ``i`` of ``n``
            was to have the items ``i``, ``i + n``, ``i + 2n`` and so on of those left by then, and had those below
            ``served[i]``.
        first: The shard that it began with, which chooses its randomness; by default the first of its shards.
        slot: The worker slot that goes on with it alone; -1 if slots share it.
    """

    epoch: int
    shards: tuple[int, ...]
    state: NodeState | None = None
    served: tuple[tuple[int, ...], ...] = ()
    first: int = -1
    slot: int = -1

    def __post_init__(self) -> None:
        if self.first < 0 and self.shards:
            object.__setattr__(self, "first", self.shards[0])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        held = {"epoch": self.epoch, "shards": list(self.shards), "state": copy_plain(self.state)}
        served = [list(numbers) for numbers in self.served]
        return {**held, "served": served, "first": self.first, "slot": self.slot}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardSlice:
        """Read what :meth:`to_dict` wrote."""
        served = tuple(tuple(numbers) for numbers in data["served"])
        return cls(data["epoch"], tuple(data["shards"]), copy_plain(data["state"]), served, data["first"], data["slot"])


class SlotSlice(NamedTuple):
    """The part of a slice that one worker slot reads.

    Attributes:
        of: The slice.
        reader: Which of its readers the slot is.
        num_readers: How many slots read it.
        number: Which of the slices that are shared, the same for all its readers; None where the slot reads it alone,
            or begins all shards again for itself.
    """

    of: ShardSlice
    reader: int = 0
    num_readers: int = 1
    number: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the slot has all items of the slice."""
        return self.num_readers == 1 and not self.of.served

    def skips(self, seen: list[int]) -> int:
        """The number of items of the slice before the next that this slot has: every n-th of those not served before.

        Args:
            seen: For each time that the items were shared, how many of those left by then have come by; counts on up to
                the next item of the slot.
        """
        if not self.of.served:
            number = (self.reader - seen[0]) % self.num_readers
            seen[0] += number + 1
            return number
        number = 0
        while not self._has_next(seen):
            number += 1
        return number

    def _has_next(self, seen: list[int]) -> bool:
        for which, served in enumerate(self.of.served):
            item = seen[which]
            seen[which] += 1
            until = served[item % len(served)]
            if until == _ALL or item < until:
                return False
        item = seen[-1]
        seen[-1] += 1
        return item % self.num_readers == self.reader


@dataclass(frozen=True, slots=True)
class Assignment:
    """The part of one source that is to be served, before it is assigned to worker slots.

    Attributes:
        epoch: The latest pass that a shard of it belongs to.
        begun: Slices that come first: what was open when shards were assigned anew, and shards that teams of equal
            numbers of ranks would not have shared evenly.
        whole: The other shards, as pairs of pass and number in the order in which they are read.
    """

    epoch: int
    begun: tuple[ShardSlice, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_pass(cls, epoch: int, order: Iterable[int]) -> Assignment:
        """All shards of a pass in their order."""
        return cls(epoch, (), tuple((epoch, shard) for shard in order))

    def slots(
        self, num_replicas: int, num_workers: int, *, sizes: Sequence[int] | None = None
    ) -> list[list[SlotSlice]]:
        """The tasks of all worker slots, in their order; slot ``worker * num_replicas + rank`` is a worker of a rank.

        Slices that were begun come first. Shards are given out whole as long as each slot gets one more of them. Begun
        slices, and the last shards, fewer than slots, are shared evenly by ranks, each of which reads all of them: one
        slice by one of its workers, or by several if there are fewer slices than workers.

        Args:
            num_replicas: Ranks.
            num_workers: Worker slots of a rank.
            sizes: Samples of each shard, if they are known: of those given out together, the largest goes to the slot
                with the least to read.
        """
        number = num_replicas * num_workers
        slots: list[list[SlotSlice]] = [[] for _ in range(number)]
        for piece in self.begun:
            if piece.slot >= 0:
                slots[piece.slot].append(SlotSlice(piece))
        shared = [piece for piece in self.begun if piece.slot < 0]
        teams = min(num_replicas // _MOST_RANKS, len(shared))
        for numbers, readers in _readers(len(shared), num_replicas, num_workers, teams):
            for index in numbers:
                _give(slots, shared[index], readers, index)
        num_full = len(self.whole) // number * number
        for slot, given in enumerate(_whole_rounds(self.whole[:num_full], number, sizes)):
            slots[slot] += map(SlotSlice, _slices_of(given))
        rest = self.whole[num_full:]
        # Teams with equally many shards, unless they would be large.
        teams = max(math.gcd(len(rest), num_replicas), min(num_replicas // _MOST_RANKS, len(rest)))
        which = len(shared)
        for numbers, readers in _readers(len(rest), num_replicas, num_workers, teams):
            for piece in _slices_of(rest[index] for index in numbers):
                _give(slots, piece, readers, which)
                which += 1
        return slots

    def shared(self) -> Assignment:
        """The same with nothing that one slot is to go on with alone."""
        return replace(self, begun=tuple(replace(piece, slot=-1) for piece in self.begun))

    def unshared(self, num_slots: int) -> Assignment:
        """The same with one slot for each begun slice."""
        return replace(self, begun=tuple(replace(piece, slot=n % num_slots) for n, piece in enumerate(self.begun)))

    @property
    def is_spread(self) -> bool:
        """Whether ranks share all of it."""
        return not self.whole and all(piece.slot < 0 for piece in self.begun)

    def spread(self) -> Assignment:
        """The same with every shard shared as what was begun is, by as many slots as can be."""
        whole = (ShardSlice(epoch, (shard,)) for epoch, shard in self.whole)
        return replace(self, begun=(*self.begun, *whole), whole=()).shared()

    def to_dict(self, order: Sequence[int]) -> dict[str, Any]:
        """Plain data for a state: shards of the latest pass as runs of indices into its order."""
        where = {shard: index for index, shard in enumerate(order)}
        runs = _runs_of(sorted(where[shard] for epoch, shard in self.whole if epoch == self.epoch))
        older = [list(pair) for pair in self.whole if pair[0] != self.epoch]
        begun = [piece.to_dict() for piece in self.begun]
        return {"epoch": self.epoch, "begun": begun, "older": older, "whole": runs}

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], order: Callable[[int], Sequence[int]], path: str, num_slots: int
    ) -> Assignment:
        """Read what :meth:`to_dict` wrote.

        Args:
            data: The plain data.
            order: From a pass to the order of its shards.
            path: A name for the data, with which errors begin.
            num_slots: Worker slots of all ranks.

        Raises:
            DamagedStateError: It has another shape.
            PositionError: There are fewer shards.
        """
        check_shape(data, _SHAPE, path)
        shards, begun = order(data["epoch"]), tuple(map(ShardSlice.from_dict, data["begun"]))
        named = [*(shard for piece in begun for shard in piece.shards), *(shard for _, shard in data["older"])]
        last = max([*(last for _, last in data["whole"]), *named], default=-1)
        if last >= len(shards):
            raise PositionError(f"A stream's progress names shard {last}, and there are {len(shards)}.")
        for number, piece in enumerate(data["begun"]):
            of, served, state = f"{path}.begun[{number}]", piece["served"], piece["state"]
            refuse_unless(piece["shards"] != [], piece["shards"], "a list of shards", f"{of}.shards")
            refuse_unless(piece["first"] < len(shards), piece["first"], "a shard", f"{of}.first")
            refuse_unless(piece["slot"] < num_slots, piece["slot"], f"below {num_slots}", f"{of}.slot")
            refuse_unless([] not in served, served, "lists of the readers", f"{of}.served")
            if state is not None:
                check_seen(state["seen"], len(served), f"{of}.state.seen")
        runs = [index for run in data["whole"] for index in run]
        rises = all(
            first < then or (first == then and not place % 2) for place, (first, then) in enumerate(pairwise(runs))
        )
        refuse_unless(rises, data["whole"], "runs of shards that rise", f"{path}.whole")
        whole = [(data["epoch"], shards[index]) for first, last in data["whole"] for index in range(first, last + 1)]
        older = [(epoch, shard) for epoch, shard in data["older"]]
        return cls(data["epoch"], begun, (*older, *whole))


def check_seen(seen: Sequence[int], num_served: int, path: str) -> None:
    """Refuse counts of what has come by that are not one for each time that items were shared, and one more.

    Raises:
        DamagedStateError: They are not.
    """
    refuse_unless(len(seen) == num_served + 1, seen, f"a list of {num_served + 1}", path)


class SlotProgress(NamedTuple):
    """The position of a worker slot in its slices of a source.

    Attributes:
        slices: The slices.
        current: Which of them it reads; as many as there are if all are served.
        state: Where it stands in that, as its node says; None if it has not begun it.
        num_opened: How many shards of that it has opened: what it has read ahead lies in them.
    """

    slices: Sequence[SlotSlice]
    current: int = 0
    state: NodeState | None = None
    num_opened: int = 0

    @property
    def reading(self) -> SlotSlice | None:
        """The slice that it reads; None if all are served."""
        return self.slices[self.current] if self.current < len(self.slices) else None


def left_of(slots: Sequence[SlotProgress], epoch: int, order: Sequence[int]) -> Assignment:
    """The part of a source that worker slots have not served; what one had begun alone has its number.

    Args:
        slots: Where each of them stands.
        epoch: The latest pass of its shards.
        order: The order of the shards of that pass.
    """
    # Of each slice, those of its readers that have something left; the others are not among them.
    reading: dict[Any, tuple[SlotSlice, dict[int, SlotProgress]]] = {}
    for number, slot in enumerate(slots):
        for index, slot_slice in enumerate(slot.slices):
            key = (number, index) if slot_slice.number is None else slot_slice.number
            _, readers = reading.setdefault(key, (slot_slice, {}))
            if slot_slice.num_readers == 1:
                reading[key] = slot_slice._replace(of=replace(slot_slice.of, slot=number)), readers
            if index >= slot.current:
                readers[slot_slice.reader] = slot if index == slot.current else SlotProgress(slot.slices, index)
    left = [_left_of_slice(one.of, one.num_readers, readers) for one, readers in reading.values() if readers]
    begun = [piece for piece, _ in left if piece is not None]
    whole = [pair for _, unopened in left for pair in unopened]
    where = {shard: index for index, shard in enumerate(order)}
    # Older passes first, and shards in the order of theirs.
    whole.sort(key=lambda pair: (pair[0], where[pair[1]]))
    begun.sort(key=lambda piece: piece.epoch)
    return Assignment(epoch, tuple(begun), tuple(whole))


def _left_of_slice(
    piece: ShardSlice, num_readers: int, readers: Mapping[int, SlotProgress]
) -> tuple[ShardSlice | None, list[tuple[int, int]]]:
    """The rest of a slice: its begun shards, and the others.

    Args:
        piece: The slice.
        num_readers: How many read it.
        readers: Those that have something left; the others have had all that they were to have.
    """
    are_all = len(readers) == num_readers
    if are_all and all(slot.state is None for slot in readers.values()):
        return (piece, []) if piece.state is not None else (None, [(piece.epoch, shard) for shard in piece.shards])
    begin: NodeState = piece.state or {"source": None, "seen": [0] * (len(piece.served) + 1)}
    states = {reader: slot.state or begin for reader, slot in readers.items()}
    # Of a slice that was begun before, all shards were open.
    is_new = are_all and piece.state is None
    opened = max(slot.num_opened for slot in readers.values()) if is_new else len(piece.shards)
    # Whatever comes before the reader that is last was served, or is another's.
    last = min(states.values(), key=lambda state: state["seen"][0])
    if num_readers == 1:
        return _trimmed(piece, last, opened)
    served = tuple(states[reader]["seen"][-1] if reader in states else _ALL for reader in range(num_readers))
    return _trimmed(replace(piece, served=(*piece.served, served)), {**last, "seen": [*last["seen"], 0]}, opened)


def _trimmed(piece: ShardSlice, state: NodeState, num_opened: int) -> tuple[ShardSlice | None, list[tuple[int, int]]]:
    """A slice from a state on, without the shards that nobody has opened, and these."""
    first = 0 if state["source"] is None else innermost(state)["shard"]
    opened, unopened = piece.shards[first:num_opened], piece.shards[num_opened:]
    begun = replace(piece, shards=opened, state=_behind(state, first)) if opened else None
    return begun, [(piece.epoch, shard) for shard in unopened]


def _behind(state: NodeState, by: int) -> NodeState:
    """The same state in a slice without its first ``by`` shards; what was left out is counted from here on."""
    counts: NodeState = {name: 0 for name in LEFT_OUT if name in state}
    if "source" not in state:
        return {**state, **counts, "shard": state["shard"] - by}
    source = state["source"]
    return {**state, **counts, "source": None if source is None else _behind(source, by)}


def _whole_rounds(
    whole: Sequence[tuple[int, int]], number: int, sizes: Sequence[int] | None
) -> list[list[tuple[int, int]]]:
    """The shards of each slot, one of every ``number``."""
    given: list[list[tuple[int, int]]] = [[] for _ in range(number)]
    loads = [0] * number
    for first in range(0, len(whole), number):
        round_, slots = list(whole[first : first + number]), list(range(number))
        if sizes is not None:
            round_.sort(key=lambda pair: -sizes[pair[1]])
            slots.sort(key=loads.__getitem__)
        for slot, pair in zip(slots, round_, strict=True):
            given[slot].append(pair)
            loads[slot] += 0 if sizes is None else sizes[pair[1]]
    return given


def _slices_of(shards: Iterable[tuple[int, int]]) -> Iterator[ShardSlice]:
    """Shards as slices of one pass each."""
    for epoch, of_pass in groupby(shards, key=itemgetter(0)):
        yield ShardSlice(epoch, tuple(shard for _, shard in of_pass))


def _readers(
    number: int, num_replicas: int, num_workers: int, num_teams: int
) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Divide so many among teams of ranks, and in these among groups of workers: which ones, and their slots."""
    num_teams = max(num_teams, 1)
    for team in range(num_teams if number else 0):
        own, ranks = range(number)[team::num_teams], _part(num_replicas, team, num_teams)
        groups = min(len(own), num_workers)
        for group in range(groups):
            # Ranks before workers: what does not go round is spread over ranks.
            slots = [worker * num_replicas + rank for worker in _part(num_workers, group, groups) for rank in ranks]
            yield own[group::groups], slots


def _part(number: int, which: int, of: int) -> range:
    """One of ``of`` parts of a range."""
    return range(number * which // of, number * (which + 1) // of)


def _give(slots: list[list[SlotSlice]], piece: ShardSlice, readers: Sequence[int], number: int) -> None:
    # Another one begins with each slice, lest the first has one item more of all.
    first = number % len(readers)
    for reader, slot in enumerate((*readers[first:], *readers[:first])):
        slots[slot].append(SlotSlice(piece, reader, len(readers), number))


def _runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Rising numbers as runs ``[first, last]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs
