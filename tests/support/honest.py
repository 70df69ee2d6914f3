"""A sampler in plain Python that resumes exactly; tests give it one fault at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class Honest:
    """Obeys every law, on any number of ranks."""

    def __init__(self, num_replicas: int = 1, rank: int = 0, seed: int = 0, length: int = 12) -> None:
        self.num_replicas, self.rank, self.seed, self.length = num_replicas, rank, seed, length
        self.epoch = self.consumed = 0

    def __len__(self) -> int:
        return -(-self.length // self.num_replicas)

    def order(self) -> list[int]:
        """The samples of the present epoch."""
        return random.Random(f"{self.seed} {self.epoch}").sample(range(self.length), self.length)

    def __iter__(self) -> Iterator[Any]:
        while True:
            served = min(self.num_replicas, self.length - self.consumed)
            index = self.order()[self.consumed + self.rank % served]
            self.advance()
            yield self.item(index)
            if not self.consumed:
                return

    def advance(self) -> None:
        """Count a sample of each rank, and at the end of an epoch go on to the next."""
        self.consumed += self.num_replicas
        if self.consumed >= self.length:
            self.epoch, self.consumed = self.epoch + 1, 0

    def item(self, index: int) -> Any:
        """The item that is yielded for a sample."""
        return index

    def state_dict(self) -> dict[str, Any]:
        config = {"length": self.length, "seed": self.seed}
        return {"epoch": self.epoch, "consumed": self.consumed, "config": config}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["config"] != {"length": self.length, "seed": self.seed}:
            raise ValueError(f"The state is of {state['config']}.")
        self.epoch, self.consumed = state["epoch"], state["consumed"]


class CountsItsOwnItems(Honest):
    """Its state says how many items this rank has had."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "consumed": self.consumed // self.num_replicas}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.consumed = state["consumed"] * self.num_replicas
