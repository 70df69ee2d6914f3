"""A dataset whose state is large, and changes with every sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from support.stream_cases import Make, Remembers, loaded, saved, steps


class RemembersMuch(Remembers):
    """As many numbers as make its state change within a pass, which is asked for once in many samples."""

    def __init__(self, length: int = 900) -> None:
        super().__init__(length)
        self.seen = [1000] * 300

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": [number + self.at for number in self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert state["seen"] == [number + self.at for number in self.seen]


def assert_gives_the_same(make: Make, legs: Sequence[int], total: int) -> None:
    """A run that is stopped after each of ``legs`` is given what it is without a stop.

    Its states need not be the same: a resumed run may ask for a new state of the dataset earlier.
    """
    items = list(islice(steps(make()), total))
    found: list[Any] = []
    state = None
    for leg in (*legs, total - sum(legs)):
        loader = make() if state is None else loaded(make(), state)
        found += islice(steps(loader), leg)
        state = saved(loader)
    assert found == items
