"""Batches from several sources, in turn or in proportion, as a function of position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from lightning_stateful.errors import DamagedStateError, Difference, PositionError, StateMismatchError
from lightning_stateful.index.course import Course
from lightning_stateful.index.mixture import Mixture
from lightning_stateful.index.phases import amounts_of
from lightning_stateful.index.places import by_name, read_lengths, read_places
from lightning_stateful.index.position import Position
from lightning_stateful.index.slots import Batches, say_repeats

# Steps of so many epochs can be counted in 64 bits.
_BEYOND = 2**31


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """A canonical sequence of batches, each from one source or, by sample, from several in proportion.

    A step gives every rank one batch, all of the same source. The rest of an epoch that is resumed on another number
    of ranks, or with other sources or shares, is planned anew from where every source stands.

    Attributes:
        mixture: How the sources are mixed.
    """

    mixture: Mixture
    order_version: ClassVar[int] = 1

    @property
    def kind(self) -> str:
        """The name under which a state knows this order."""
        return self.mixture.kind

    @property
    def carries_over(self) -> bool:
        """Whether sources go on in an epoch where the last one left them."""
        return self.mixture.num_steps is not None

    # Positions

    def begin(self, epoch: int, width: int, held: Position | None = None) -> Position:
        """The beginning of ``epoch``, after whatever a position held in an earlier epoch of the run leaves behind."""
        begun = Position(epoch=epoch, width=width)
        if self.mixture.num_steps is None:
            return begun
        if held is None or held.epoch > epoch:
            held = Position(width=width)
        while held.epoch < epoch:
            held = self.reopen(held, width)
            # Only progress in samples or tokens has to be looked at epoch by epoch.
            skipped = 0 if self._is_measured else epoch - held.epoch - 1
            steps = self._own_steps(held) + skipped * self.mixture.num_steps
            places = self._course(held, steps).places(steps)
            held = Position(epoch=held.epoch + 1 + skipped, width=width, origin=places)
        return self.reopen(replace(held, consumed=held.since), width)

    def reopen(self, position: Position, width: int, places: tuple[int, ...] | None = None) -> Position:
        """The same position, from which the rest of the epoch is planned for ``width`` ranks.

        Args:
            position: A position.
            width: Number of ranks; if it is the position's, and no places are given, nothing changes.
            places: Samples served of each source, where they are not those of the position.
        """
        if width == position.width and places is None:
            return position
        if places is None:
            # Where nothing has been served since the plan was made, it need not be looked at.
            places = position.origin if position.consumed == position.since else self.places(position)
        slots = -(-position.consumed // position.width) * width
        origin = places if any(places) else ()
        return Position(epoch=position.epoch, consumed=slots, width=width, since=slots, origin=origin)

    def steps(self, position: Position) -> int:
        """Steps of the position's epoch, counted from its beginning, on as many ranks as the position is wide."""
        if self.mixture.num_steps is not None:
            return self.mixture.num_steps
        return position.steps_before + self._course(position).num_steps

    def places(self, position: Position) -> tuple[int, ...]:
        """Samples served of every source: in this epoch, or since training began where places carry over."""
        return self._course(position).places(position.steps_since)

    def batches(self, position: Position, first: int, last: int, rank: int) -> Batches:
        """The batches of ``rank`` in the steps ``first <= step < last`` of the position's epoch."""
        begun = position.steps_before
        return self._course(position).batches(first - begun, last - begun, rank)

    def _own_steps(self, position: Position) -> int:
        return max((self.mixture.num_steps or 0) - position.steps_before, 0)

    @property
    def _is_measured(self) -> bool:
        return self.mixture.schedule is not None and self.mixture.schedule.unit != "steps"

    def _course(self, position: Position, num_steps: int | None = None) -> Course:
        if self.mixture.num_steps is not None and num_steps is None:
            num_steps = self._own_steps(position)
        begun = position.steps_before
        return _course(self.mixture, position.epoch, begun, position.width, position.origin, num_steps)

    def repeats(self, width: int) -> list[str]:
        """What is served twice because ranks take equal steps, in words."""
        repeated = self._course(self.begin(0, width)).num_repeated
        total = sum(amounts_of(self.mixture))
        return say_repeats(repeated, total)

    def work(self, width: int) -> int:
        """Samples that have to be looked at to find one batch of one rank."""
        largest = max(self.mixture.sources.batch_sizes)
        return largest * width if self.mixture.by_sample else largest

    def unshuffled(self) -> MixtureOrder:
        """The same batches in the same order in every epoch: where places carried over, whole cycles in their stead."""
        if not self.carries_over:
            return MixtureOrder(replace(self.mixture, shuffle=False))
        return MixtureOrder(replace(self.mixture, shuffle=False, num_steps=None, schedule=None, stop="cycle"))

    # State

    def describe(self) -> dict[str, Any]:
        """Configuration as plain data."""
        return self.mixture.describe()

    def save(self, position: Position) -> dict[str, Any]:
        """A position as plain data, with the place of every source."""
        places = self.places(position)
        since, origin = position.since, position.origin
        if self.carries_over and not self._is_measured:
            # The sequence goes on alike from every step: keep the places once.
            since, origin = position.consumed, places
        stored = () if since == position.consumed else origin
        return {
            **position.to_dict(),
            "since": since,
            "origin": by_name(self.mixture.sources.names, stored),
            "places": by_name(self.mixture.sources.names, places),
        }

    def restore(self, data: Mapping[str, Any], saved: Mapping[str, Any], *, changed: bool) -> Position:
        """The position that :meth:`save` wrote.

        Args:
            data: What it wrote.
            saved: The configuration that wrote it.
            changed: Whether that differs from this one. Each source goes on at its own place then.

        Raises:
            DamagedStateError: Keys are missing, or the places are not those of the position.
            PositionError: A value is out of range.
            StateMismatchError: A change that cannot be accepted in the middle of a run.
        """
        position, names = Position.from_dict(data), self.mixture.sources.names
        if max(position.epoch, position.width) >= _BEYOND:
            raise PositionError(f"no run reaches an epoch or a width of {_BEYOND}, got {position}")
        lengths = read_lengths(saved)
        places, origin = (read_places(data, key, lengths) for key in ("places", "origin"))
        since = data.get("since")
        if type(since) is not int or not 0 <= since <= position.consumed or not places:
            raise DamagedStateError(f"a position needs places and a number since of at most consumed, got {dict(data)}")
        if position.consumed % position.width or since % position.width:
            raise DamagedStateError(f"slots come in groups of width={position.width}, got {dict(data)}")
        if changed:
            if position.consumed or position.epoch:
                self._refuse_other_counting(str(saved.get("stop")), position)
            if str(saved.get("stop")).endswith("steps") != self.carries_over:
                places = {}
            return self.reopen(replace(position, since=0, origin=()), position.width, self._kept(places, lengths))
        if since == position.consumed and (since or self.carries_over):
            origin = places
        begun = tuple(origin.get(name, 0) for name in names)
        once = not self.carries_over and self.mixture.stop == "all_exhausted"
        if once and any(place > lengths[name] for name, place in origin.items()):
            raise DamagedStateError(f"the places {origin} lie beyond the lengths {lengths}")
        position = replace(position, since=since, origin=begun if any(begun) else ())
        expected = tuple(places[name] for name in names)
        if position.consumed <= self.steps(position) * position.width and self.places(position) != expected:
            raise DamagedStateError(f"the places {places} are not those of the position {position}")
        return position

    def _refuse_other_counting(self, stop: str, position: Position) -> None:
        """Refuse what no permission can help: places and progress that are counted otherwise."""
        carried, now = stop.endswith("steps"), self.mixture.describe()["stop"]
        remedy = ""
        if carried != self.carries_over and position.consumed:
            remedy = (
                "With num_steps passes go on from epoch to epoch, and without they begin with each, in other orders: "
                "this cannot be changed within an epoch. Train to its end under the saved stop."
            )
        scheduled = self.mixture.schedule is not None and self.mixture.schedule.unit == "steps"
        if carried and self.carries_over and stop != now and scheduled:
            remedy = "A schedule over steps counts them by num_steps; keep it, or count the schedule in samples."
        if remedy:
            raise StateMismatchError([Difference(path="stop", saved=stop, present=now, remedy=remedy)])

    def _kept(self, places: Mapping[str, int], lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Places of sources by name, in sources of perhaps other lengths; a source that is new begins."""
        kept = []
        for name, length in zip(self.mixture.sources.names, self.mixture.sources.lengths, strict=True):
            passes, offset = divmod(places.get(name, 0), lengths.get(name, length))
            kept.append(passes * length + min(offset, length))
        return tuple(kept)

    def report(self, position: Position) -> dict[str, Any]:
        """Of each of the ``sources``: samples, passes ("epochs"), share of samples and, if lengths are known, tokens.

        Counted in the running epoch, or since training began where places carry over. Tokens of a pass that is not
        complete are its samples times their mean length.
        """
        places = self.places(position)
        total = sum(places)
        sources, tokens = self.mixture.sources, self.mixture.tokens
        result: dict[str, dict[str, float]] = {}
        for number, (name, length, place) in enumerate(zip(sources.names, sources.lengths, places, strict=True)):
            result[name] = {"samples": place, "epochs": place / length, "share": place / total if total else 0.0}
            if tokens is not None:
                result[name]["tokens"] = round(Fraction(place * tokens[number], length))
        return {"sources": result}


@lru_cache(maxsize=32)
def _course(
    mixture: Mixture, epoch: int, begun: int, width: int, origin: tuple[int, ...], num_steps: int | None
) -> Course:
    return Course(mixture, epoch=epoch, begun=begun, width=width, origin=origin, num_steps=num_steps)
