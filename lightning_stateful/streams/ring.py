"""The latest messages of every rank in a run, under few keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_stateful.errors import PositionError, StreamError
from lightning_stateful.streams.group_store import GroupStore


class Ring:
    """The last ``length`` messages of every rank in a run, numbered alike on all."""

    def __init__(self, store: GroupStore, run: str, num_replicas: int, length: int, name: str = "places") -> None:
        self._store, self._run, self._ranks, self._length, self._name = store, run, range(num_replicas), length, name

    def say(self, rank: int, number: int, content: Any) -> None:
        """Leave a rank's message."""
        self._store.say(self._key(rank, number), [self._run, rank, number, content])

    def find(self, number: int, ranks: Sequence[int]) -> list[Any]:
        """What these ranks said in their messages of a number; None where there is none, or not any more."""
        messages = self._store.hear_all([self._key(rank, number) for rank in ranks])
        expected = ([self._run, rank, number] for rank in ranks)
        found = zip(messages, expected, strict=True)
        return [m[3] if isinstance(m, list) and m[:3] == own else None for m, own in found]

    def hear(self, number: int) -> list[Any]:
        """What all ranks said in their messages of a number, which all have left.

        Raises:
            PositionError: Some have been replaced by newer ones.
            StreamError: What stands in their place is none of this run.
        """
        contents = self.find(number, self._ranks)
        for rank in (rank for rank, content in enumerate(contents) if content is None):
            found = self._store.hear(self._key(rank, number))
            told = found[2] if isinstance(found, list) and found[:2] == [self._run, rank] else -1
            if told > number:
                raise PositionError(
                    f"Where rank {rank} stood in group {number} of its steps is not kept any more: it has told of "
                    f"group {told} since. Raise `keep`, or ask for places of later steps."
                )
            raise StreamError(
                "Stale or foreign entries in the key-value store of the run: where rank "
                f"{rank} should have left message {number} of run {self._run} there is {str(found)[:80]}. Let nothing "
                "else write to the same keys, and start all ranks anew together."
            )
        return contents

    def _key(self, rank: int, number: int) -> str:
        return f"{self._name}/{rank}/{number % self._length}"
