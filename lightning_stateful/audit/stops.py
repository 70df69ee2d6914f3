"""States taken on the way of a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_stateful.audit.compare import difference
from lightning_stateful.audit.result import Divergence
from lightning_stateful.audit.runs import Reference, Run, Tally
from lightning_stateful.errors import ConfigurationError

Stops = Sequence[int] | Literal["spread", "every"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A state that was taken on the way.

    Attributes:
        num_items: Items that the rank had been given.
        place: Epoch and step at which a resumed run goes on.
        state: A copy made at once.
        held: What ``state_dict`` returned; it must not change later.
    """

    num_items: int
    place: tuple[int, int]
    state: Any
    held: Any

    def resume(self, run: Run) -> Run:
        """Load a copy of the state into a fresh object."""
        return run.load(copy.deepcopy(self.state), self.place)


def record(run: Run, reference: Reference, stops: Stops, tally: Tally) -> tuple[list[Stop], Divergence | None]:
    """Run to the end once more, taking states on the way; an epoch's end has up to three moments."""
    wanted = find_stops(reference, stops)
    taken: list[Stop] = []

    def take() -> None:
        if run.num_items in wanted:
            held = run.state()
            stop = Stop(
                num_items=run.num_items,
                place=reference.after(run.epoch, run.step),
                state=copy.deepcopy(held),
                held=held,
            )
            if not taken or taken[-1].place != stop.place or difference(taken[-1].state, held):
                tally.weigh(held)
                taken.append(stop)

    take()
    while not run.is_done(reference):
        if not run.step:
            run.open()
            take()
        divergence = run.advance(reference, tally, law="repeatable")
        if divergence:
            return taken, divergence
        take()
    return taken, None


def check_held(taken: list[Stop], rank: int) -> Iterator[Divergence]:
    """States that changed after they had been taken."""
    for stop in taken:
        what = difference(stop.state, stop.held, "state")
        if what:
            epoch, step = stop.place
            yield Divergence(
                law="snapshot",
                what=f"iterating on changed a state that had been taken before: {what}",
                epoch=epoch,
                step=step,
                rank=rank,
                stop=stop.num_items,
                expected=stop.state,
                got=stop.held,
            )


def find_stops(reference: Reference, stops: Stops) -> set[int]:
    """The numbers of items after which to take a state.

    Raises:
        ConfigurationError: A number is negative or more than the run has.
    """
    total = sum(reference.lengths)
    if stops == "every":
        return set(range(total + 1))
    if stops == "spread":
        ends = [sum(reference.lengths[:epoch]) for epoch in range(len(reference.lengths) + 1)]
        places = [{0, 1, n // 4, n // 2, n - 1, n} for n in reference.lengths]
        return {start + place for start, some in zip(ends, places, strict=False) for place in some if place >= 0}
    wrong = [stop for stop in stops if not isinstance(stop, int) or not 0 <= stop <= total]
    if wrong:
        raise ConfigurationError(
            f"stops must be 'spread', 'every' or numbers from 0 to {total} (the items of a rank in the run), "
            f"got {wrong}."
        )
    return {int(stop) for stop in stops}
