"""Places of lanes as JSON, of which large states are said once."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from lightning_stateful.streams.stage import Place

# JSON in parts. Every second part is a large state: where that stays as it is, the part is the very same string.
Text = tuple[str, ...]
# The same in fewer words: None for a large state that is as it was in the text before.
News = tuple[str | None, ...]

# Characters from which on a state is large.
_LARGE = 1024
# Stands where a large state belongs; nobody's own data holds it.
_MARK = secrets.token_hex(8)
_MARKS = re.compile(rf'"{_MARK}(\d+)"')


class PlaceTexts:
    """Says where one lane stands, time after time. Each of its states is looked at once, however often it is said."""

    def __init__(self) -> None:
        # By source and depth: the latest state, which stays alive so that another cannot be taken for it; as JSON if
        # it is large.
        self._states: dict[tuple[str, int], tuple[Any, str | None]] = {}
        self._before: Text = ()

    def text(self, place: Place) -> Text:
        """A place of the lane's."""
        large: list[str] = []
        short = {}
        for name, lane in place["of"].items():
            at = lane["place"] and self._shortened(lane["place"], (name, 0), large)
            if at is not lane["place"]:
                short[name] = {**lane, "place": at}
        if not large:
            return (json.dumps(place),)
        parts = _MARKS.split(json.dumps({**place, "of": {**place["of"], **short}}))
        return tuple(large[int(part)] if number % 2 else part for number, part in enumerate(parts))

    def news(self, place: Place) -> News:
        """A place for somebody who has been told all the places before."""
        before, self._before = self._before, self.text(place)
        return tuple(
            None if number % 2 and number < len(before) and part is before[number] else part
            for number, part in enumerate(self._before)
        )

    def _shortened(self, place: Place, key: tuple[str, int], large: list[str]) -> Place:
        short = place
        if "at" in place:
            at = self._shortened(place["at"], (key[0], key[1] + 1), large)
            if at is not place["at"]:
                short = {**short, "at": at}
        state = place.get("state")
        if state is not None and (text := self._if_large(state, key)) is not None:
            short = {**short, "state": f"{_MARK}{len(large)}"}
            large.append(text)
        return short

    def _if_large(self, state: Any, key: tuple[str, int]) -> str | None:
        known, text = self._states.get(key, (None, None))
        if known is state:
            return text
        new = json.dumps(state)
        # Another object may say the same.
        text = text if new == text else new if len(new) >= _LARGE else None
        self._states[key] = state, text
        return text


def heard(news: Sequence[str | None], before: Place | Text) -> Text:
    """What :meth:`PlaceTexts.news` said, given what it had said before."""
    known = () if isinstance(before, dict) else before
    return tuple(known[number] if part is None else part for number, part in enumerate(news))


def text_of_list(texts: Sequence[Text]) -> Text:
    """Several texts as one list."""
    parts = ["["]
    for number, (first, *others) in enumerate(texts):
        parts[-1] += f", {first}" if number else first
        parts += others
    parts[-1] += "]"
    return tuple(parts)


def as_place(place: Place | Text) -> Place:
    """A place, which may have been said as JSON."""
    read: Place = place if isinstance(place, dict) else json.loads("".join(place))
    return read
