"""States of worker slots before the latest steps that were read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from lightning_stateful.stream_loader.stream_run import StreamRun

# Steps that a trainer may have fetched beyond those that the model was trained on, and some more.
_READ_AHEAD = 16


class ServedState:
    """The state after the latest batch of a run, which is made when it is asked for, within so many steps.

    Args:
        run: The run.
    """

    num_served: int
    run: StreamRun

    def __init__(self, run: StreamRun) -> None:
        self.run, self.num_served, self._states = run, run.num_served, run.states

    @cached_property
    def state(self) -> Any:
        """The state."""
        return self.run.state_at(self.num_served, self._states)


class RecentStates:
    """States by (epoch, step), the oldest dropped first; that at which the latest iteration began never is.

    Attributes:
        began: The epoch and step at which the latest iteration began.
        lag: So many more steps than a trainer fetches ahead are kept.
    """

    def __init__(self) -> None:
        self.began: tuple[int, int] | None = None
        self.lag = 0
        self._known: dict[tuple[int, int], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Runs stay in this process.
        known = {at: known for at, known in self._known.items() if not isinstance(known, ServedState)}
        if self.began is not None:
            known[self.began] = self.get(*self.began)
        return {**vars(self), "_known": known}

    @property
    def keep(self) -> int:
        """For how many steps back states are kept."""
        return _READ_AHEAD + self.lag

    def __contains__(self, at: tuple[int, int]) -> bool:
        return at in self._known

    def get(self, epoch: int, step: int) -> Any:
        """The state before a step; None if it is not known."""
        known = self._known.get((epoch, step))
        return known.state if isinstance(known, ServedState) else known

    def served(self, epoch: int, step: int) -> ServedState | None:
        """The counts that a run has served before a step, if they alone are known."""
        known = self._known.get((epoch, step))
        return known if isinstance(known, ServedState) else None

    def note(self, epoch: int, step: int, known: Any) -> None:
        """Note the state before a step, or what a run has served."""
        at, states = (epoch, step), self._known
        states.pop(at, None)  # The latest stands last.
        states[at] = known
        if len(states) > _READ_AHEAD + self.lag + 1:
            for oldest in states:
                if oldest != self.began:
                    del states[oldest]
                    return

    def copy(self, epoch: int, step: int, of_epoch: int, of_step: int) -> None:
        """Note before a step what is known of another."""
        self.note(epoch, step, self._known[of_epoch, of_step])

    def settle(self, run: StreamRun) -> None:
        """Make the states of a run that may be asked for later: what other ranks have published is about to go."""
        late = [at for at, known in self._known.items() if isinstance(known, ServedState) and known.run is run]
        for at in late[-self.lag - 1 :]:
            self._known[at] = self._known[at].state
