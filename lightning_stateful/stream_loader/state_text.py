"""JSON text of node states, in which large states that stay the same are written once, under their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# Characters from which on a value under the key "state" is large, and from which on a whole node state is.
_LARGE, _LARGE_WHOLE = 1024, 4096


class StateText(NamedTuple):
    """A node state as JSON text.

    Attributes:
        text: The state without its large parts and, for each of them, the path to it and its digest; one line.
        digests: Digests of the large parts.
        large: JSON text of large parts by digest: of all, or of those that the text before did not have.
    """

    text: str
    digests: tuple[str, ...]
    large: Mapping[str, str]


class StateEncoder:
    """Encodes the node states of one worker slot, one after the other.

    What stands in a state under the key ``"state"`` is that of a dataset, which may be large: it is encoded once for as
    long as it is the same object, which must not change after it was handed over.
    """

    def __init__(self) -> None:
        # By path: the latest object, kept alive so that no other takes its id; its digest and text if it is large.
        self._known: dict[tuple[str | int, ...], tuple[Any, tuple[str, str] | None]] = {}
        self._before: tuple[str, ...] = ()

    def encode(self, state: Any) -> StateText:
        """Encode a state, plain JSON data."""
        places: list[tuple[tuple[str | int, ...], str]] = []
        large: dict[str, str] = {}
        text = _dumps(self._without_large(state, (), places, large))
        if len(text) >= _LARGE_WHOLE:
            digest = digest_of(text)
            large[digest], text = text, "null"
            places.insert(0, ((), digest))
        found = "".join(f",{_dumps(place)}" for place in places)
        return StateText(f"[{text}{found}]", tuple(large), large)

    def encode_changes(self, state: Any) -> StateText:
        """Encode a state for somebody who has been given all states before: without the large parts of the last one."""
        encoded, before = self.encode(state), self._before
        self._before = encoded.digests
        return encoded._replace(large={key: text for key, text in encoded.large.items() if key not in before})

    def _without_large(self, value: Any, path: tuple[str | int, ...], places: list[Any], large: dict[str, str]) -> Any:
        if not isinstance(value, (dict, list, tuple)):
            return value
        items: Iterable[tuple[str | int, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        changed: dict[Any, Any] = {}
        for key, part in items:
            if key == "state" and isinstance(part, (dict, list, tuple, str)):
                if (found := self._if_large(part, (*path, key))) is not None:
                    large[found[0]], changed[key] = found[1], None
                    places.append(((*path, key), found[0]))
            elif isinstance(part, (dict, list, tuple)):
                short = self._without_large(part, (*path, key), places, large)
                if short is not part:
                    changed[key] = short
        if not changed:
            return value
        if isinstance(value, dict):
            return {**value, **changed}
        return [changed.get(index, part) for index, part in enumerate(value)]

    def _if_large(self, state: Any, path: tuple[str | int, ...]) -> tuple[str, str] | None:
        known, found = self._known.get(path, (None, None))
        if known is not state:
            text = _dumps(state)
            found = (digest_of(text), text) if len(text) >= _LARGE else None
            self._known[path] = state, found
        return found


def complete(changes: StateText, before: StateText | None) -> StateText:
    """What :meth:`StateEncoder.encode_changes` gave, with the large parts that the text before has."""
    known = {**(before.large if before else {}), **changes.large}
    return changes._replace(large={digest: known[digest] for digest in changes.digests})


def decode(text: str | list[Any], large: Mapping[str, str]) -> Any:
    """The state in a text, which may be parsed already, with its large parts by digest."""
    state, *places = json.loads(text) if isinstance(text, str) else text
    for path, digest in places:
        part = json.loads(large[digest])
        if not path:
            state = part
            continue
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = part
    return state


def digest_of(text: str) -> str:
    """The digest under which a large part is kept."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
