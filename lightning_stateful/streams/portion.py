"""Which shards a lane reads, and how what is left of them is dealt out anew."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_stateful.core.permutation import KeyedPermutation
from lightning_stateful.core.seeding import derive_seed
from lightning_stateful.errors import PositionError
from lightning_stateful.state import copy_plain
from lightning_stateful.streams.shards import carried
from lightning_stateful.streams.skipped import without_skipped
from lightning_stateful.streams.stage import Place

# Samples of shards by their numbers.
Sizes = Sequence[int] | Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Portion:
    """Shards of one epoch that a lane reads one after the other, with buffers that begin and end with them.

    Attributes:
        epoch: The epoch that the shards belong to; what was left of one is served within the next.
        shards: Their numbers.
        place: Where in them to begin; None for the beginning of the first.
    """

    epoch: int
    shards: tuple[int, ...]
    place: Place | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        return {"epoch": self.epoch, "shards": list(self.shards), "place": copy_plain(self.place)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Portion:
        """Read what :meth:`to_dict` wrote."""
        return cls(data["epoch"], tuple(data["shards"]), copy_plain(data["place"]))


@dataclass(frozen=True, slots=True)
class Deal:
    """What is to be served in a pass over one source, before it is dealt out to lanes.

    Attributes:
        epoch: The epoch of the shards that have not been opened.
        opened: Portions that are served first: shards that had been opened, and what was left of earlier epochs.
        unopened: The shards of ``epoch`` that have not been opened, in the order of that epoch.
    """

    epoch: int
    opened: tuple[Portion, ...]
    unopened: tuple[int, ...]

    def lanes(self, number: int, *, sizes: Sizes | None = None, pinned: bool = False) -> list[list[Portion]]:
        """The portions of each of ``number`` lanes, opened ones first.

        Args:
            number: How many lanes there are.
            sizes: Samples of each shard, if they are known: each shard then goes to the lane with the least to read.
                Otherwise lanes take shards in turn.
            pinned: Each shard goes to the lane of its own number, as streams do that divide themselves.
        """
        if pinned:
            own = [[portion for portion in self.opened if portion.shards[0] == lane] for lane in range(number)]
            return [
                [*opened, Portion(self.epoch, (lane,))] if lane in self.unopened else opened
                for lane, opened in enumerate(own)
            ]
        dealt: list[list[Portion]] = [[] for _ in range(number)]
        shards: list[list[int]] = [[] for _ in range(number)]
        lots = [(0, lane) for lane in range(number)]
        everything: tuple[Portion | int, ...] = (*self.opened, *self.unopened)
        for what in everything:
            # Of unknown sizes all count alike, and the lanes come in turn.
            load, lane = heapq.heappop(lots)
            if isinstance(what, Portion):
                dealt[lane].append(what)
            else:
                shards[lane].append(what)
            heapq.heappush(lots, (load + _size(what, sizes), lane))
        for lane, own_shards in enumerate(shards):
            if own_shards:
                dealt[lane].append(Portion(self.epoch, tuple(own_shards)))
        return dealt

    @property
    def shards(self) -> list[int]:
        """All shards in it."""
        return [*(shard for portion in self.opened for shard in portion.shards), *self.unopened]

    def to_dict(self, order: Sequence[int]) -> dict[str, Any]:
        """Plain data for a state: unopened shards as runs of places in the epoch's order."""
        where = {shard: place for place, shard in enumerate(order)}
        runs = runs_of(sorted(where[shard] for shard in self.unopened))
        return {"epoch": self.epoch, "opened": [portion.to_dict() for portion in self.opened], "unopened": runs}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], order: Callable[[int], Sequence[int]]) -> Deal:
        """Read what :meth:`to_dict` wrote.

        Raises:
            PositionError: There are fewer shards.
        """
        shards = order(data["epoch"])
        last = max((last for _, last in data["unopened"]), default=-1)
        if last >= len(shards):
            raise PositionError(f"what a stream has to serve comes to shard {last}, and there are {len(shards)}.")
        unopened = tuple(shards[place] for first, last in data["unopened"] for place in range(first, last + 1))
        return cls(data["epoch"], tuple(Portion.from_dict(portion) for portion in data["opened"]), unopened)


def order_of_shards(number: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """The order in which the shards of an epoch are dealt out: a keyed permutation, or 0, 1, 2 and so on."""
    places = np.arange(number)
    if not shuffle:
        return places.tolist()  # type: ignore[no-any-return]  # a list of int
    return KeyedPermutation(number, derive_seed("shards", seed, epoch)).take(places).tolist()  # type: ignore[no-any-return]


def left_of(portions: Sequence[Portion], number: int, place: Place | None, num_opened: int) -> list[Portion]:
    """What a lane has not served.

    Args:
        portions: The lane's portions.
        number: Which of them it reads; as many as there are if all are served.
        place: Where it stands in that.
        num_opened: How many shards of that it has opened: what it has read ahead lies in them.

    Returns:
        Portions; those with a place cannot be divided.
    """
    left = []
    for which, portion in enumerate(portions):
        if which < number:
            continue
        if which > number or place is None:
            left.append(portion)
            continue
        begun = leaf_of(place)["shard"]
        opened, others = portion.shards[begun:num_opened], portion.shards[num_opened:]
        if opened:
            left.append(Portion(portion.epoch, opened, _moved(without_skipped(place), begun)))
        if others:
            left.append(Portion(portion.epoch, others))
    return left


def redealt(
    left: Iterable[Portion],
    epoch: int,
    order: Sequence[int],
    regrouped: Callable[[Collection[int]], Collection[int]] = tuple,
) -> Deal:
    """A deal of what lanes have not served.

    Args:
        left: What :func:`left_of` gives, of all lanes.
        epoch: The epoch whose unopened shards stay in its order; those of others come first, each by itself.
        order: The order of its shards.
        regrouped: Puts parts of shards together, or divides shards, as the order has them.
    """
    opened: list[Portion] = []
    unopened: set[int] = set()
    for portion in left:
        if portion.place is not None:
            opened.append(portion)
        elif portion.epoch == epoch:
            unopened.update(portion.shards)
        else:
            opened += [Portion(portion.epoch, (shard,)) for shard in portion.shards]
    unopened = set(regrouped(unopened))
    # Parts that other lanes had begun to divide a shard into.
    opened += [Portion(epoch, (part,)) for part in sorted(unopened.difference(order))]
    # Opened shards first, because their buffers are at hand; older epochs before newer ones.
    opened.sort(key=lambda portion: (portion.place is None, portion.epoch))
    return Deal(epoch, tuple(opened), tuple(shard for shard in order if shard in unopened))


def begun_anew(held: Sequence[Place | None], epoch: int, fresh: Place) -> Deal:
    """The next pass over loaders: each goes on from the state that its pass has left, read to its end or not.

    Args:
        held: The place of each lane; None where nobody knows.
        epoch: The next pass.
        fresh: A place at the beginning of a pass.
    """
    states: dict[int, Portion] = {}
    for lane, place in enumerate(held):
        if place is None:
            continue
        state, at = place["carried"], place["place"]
        if state is None and at is not None:
            begins = at["state"] is not None and "after" in at["state"]
            state = at["state"] if begins else carried(epoch - 1, at["state"], at["since"], is_ended=False)
        if state is not None:
            states[lane] = Portion(epoch, (lane,), {**fresh, "state": copy_plain(state)})
    others = tuple(lane for lane in range(len(held)) if lane not in states)
    return Deal(epoch, tuple(states.values()), others)


def runs_of(numbers: Sequence[int]) -> list[list[int]]:
    """Rising numbers as runs ``[first, last]``."""
    if not numbers:
        return []
    breaks = [(a, b) for a, b in pairwise(numbers) if b != a + 1]
    firsts = [numbers[0], *(b for _, b in breaks)]
    lasts = [*(a for a, _ in breaks), numbers[-1]]
    return [list(run) for run in zip(firsts, lasts, strict=True)]


def _size(what: Portion | int, sizes: Sizes | None) -> int:
    """Samples of a shard, or left in a portion; 1 where they are not known."""
    if sizes is None:
        return 1
    if not isinstance(what, Portion):
        return sizes[what]
    total = sum(sizes[shard] for shard in what.shards)
    return total if what.place is None else max(total - leaf_of(what.place)["item"], 0)


def leaf_of(place: Place) -> Place:
    """Where the shards themselves are read, within the places of what lies around."""
    while "at" in place:
        place = place["at"]
    return place


def _moved(place: Place, by: int) -> Place:
    """A place in a portion that begins ``by`` shards later."""
    if "at" in place:
        return {**place, "at": _moved(place["at"], by)}
    return {**place, "shard": place["shard"] - by}
