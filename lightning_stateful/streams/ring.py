"""The latest messages of every rank in a run, under few keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_stateful.errors import PositionError, StreamError
from lightning_stateful.streams.group_store import GroupStore
from lightning_stateful.streams.place_text import Text


class Ring:
    """The last ``length`` messages of every rank in a run, numbered alike on all: each a few texts.

    The large parts of texts are put aside, each once for all messages that hold it, and stay until the last of these
    has been replaced.
    """

    def __init__(self, store: GroupStore, run: str, num_replicas: int, length: int, name: str = "places") -> None:
        self._store, self._run, self._ranks, self._length, self._name = store, run, range(num_replicas), length, name
        # Of this rank, at each slot: what is put aside there, and the first and the last message that hold it.
        self._aside: list[tuple[str, int, int]] = []

    def say(self, rank: int, number: int, texts: Sequence[str | Text]) -> None:
        """Leave a rank's message."""
        content = [text if isinstance(text, str) else self._shortened(rank, number, text) for text in texts]
        self._store.say(self._key(rank, number), [self._run, rank, number, content])

    def find(self, number: int, ranks: Sequence[int]) -> list[list[str] | None]:
        """What these ranks said in their messages of a number; None where there is none, or not any more."""
        found = self._heard([(rank, number, self._key(rank, number)) for rank in ranks])
        aside = {
            self._key_aside(rank, slot): (rank, first, self._key_aside(rank, slot))
            for rank, content in zip(ranks, found, strict=True)
            for text in content or ()
            if isinstance(text, list)
            for slot, first in text[1::2]
        }
        large = dict(zip(aside, self._heard(list(aside.values())) if aside else (), strict=True))
        return [
            None if content is None else self._whole(rank, content, large)
            for rank, content in zip(ranks, found, strict=True)
        ]

    def hear(self, number: int) -> list[list[str]]:
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
            there = "is only a part of that" if told == number else f"is {str(found)[:80]}"
            raise StreamError(
                "Stale or foreign entries in the key-value store of the run: where rank "
                f"{rank} should have left message {number} of run {self._run} there {there}. Let nothing "
                "else write to the same keys, and start all ranks anew together."
            )
        return [content for content in contents if content is not None]

    def _shortened(self, rank: int, number: int, text: Text) -> str | list[str | list[int]]:
        """A text with the slots of its large parts in their place."""
        if len(text) == 1:
            return text[0]
        return [self._slot_of(rank, number, part) if place % 2 else part for place, part in enumerate(text)]

    def _slot_of(self, rank: int, number: int, part: str) -> list[int]:
        """Where a large part of a message is put aside, and since which message."""
        free = len(self._aside)
        for slot, (held, first, last) in enumerate(self._aside):
            if held is part or held == part:
                self._aside[slot] = held, first, number
                return [slot, first]
            if last < number - self._length:
                free = min(free, slot)
        self._store.say(self._key_aside(rank, free), [self._run, rank, number, part])
        self._aside[free : free + 1] = [(part, number, number)]
        return [free, number]

    def _whole(self, rank: int, content: list[Any], large: dict[str, str | None]) -> list[str] | None:
        """The texts of a message with their large parts; None if these are not there any more."""
        texts = []
        for text in content:
            parts = [text] if isinstance(text, str) else text
            found = [large[self._key_aside(rank, part[0])] if place % 2 else part for place, part in enumerate(parts)]
            known = [part for part in found if part is not None]
            if len(known) < len(found):
                return None
            texts.append("".join(known))
        return texts

    def _heard(self, wanted: Sequence[tuple[int, int, str]]) -> list[Any]:
        """What ranks have left in messages of some numbers at some keys; None where it is not there."""
        messages = self._store.hear_all([key for _, _, key in wanted])
        found = zip(messages, wanted, strict=True)
        return [m[3] if isinstance(m, list) and m[:3] == [self._run, *of[:2]] else None for m, of in found]

    def _key(self, rank: int, number: int) -> str:
        return f"{self._name}/{rank}/{number % self._length}"

    def _key_aside(self, rank: int, slot: int) -> str:
        return f"{self._name}/{rank}/aside/{slot}"
