"""JSON text of node states, in which large states that stay the same are written once, under their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_LARGE = 1024  # Characters from which on what stands under a key "state" is large.
_LARGE_WHOLE = 16_384  # And from which on what is left of a state is.
_PIECE = 2**20  # A large part is cut into pieces of so many: a TCPStore takes no more than 8 MiB at once.

_HOLDERS = (dict, list, tuple)
_dumps = json.JSONEncoder(separators=(",", ":")).encode

Path = tuple[str | int, ...]


class StateText(NamedTuple):
    """A node state as JSON text.

    Attributes:
        text: ``[state, [path, digests], ...]``: the state without its large parts, and where each belongs; one line.
        large: Pieces of large parts by digest.
    """

    text: str
    large: Mapping[str, str]


# A StateText for somebody who has the one before: None for a piece that was in that.
Changes = tuple[str, Mapping[str, str | None]]


class StateEncoder:
    """Encodes the states of one worker slot, one after the other.

    What stands under a key ``"state"`` may be the state of a user's dataset, and large: it is encoded once for as long
    as it is the same object, which must not be changed in place.
    """

    def __init__(self) -> None:
        # By path: the latest object, kept alive so that it is not taken for another; its pieces, none if it is small.
        self._known: dict[Path, tuple[Any, list[tuple[str, str]]]] = {}
        self._latest: Mapping[str, str] = {}  # Pieces of the latest state.

    def encode(self, state: Any) -> StateText:
        """Encode a state, plain JSON data."""
        if not self._latest and len(text := _dumps(state)) < _LARGE:
            return StateText(f"[{text}]", {})
        parts: dict[Path, list[tuple[str, str]]] = {}
        text = _dumps(self._short(state, (), parts) if isinstance(state, _HOLDERS) else state)
        if len(text) >= _LARGE_WHOLE:
            text, parts = "null", {(): in_pieces(text), **parts}
        places = [f",{_dumps([path, [digest for digest, _ in pieces]])}" for path, pieces in parts.items()]
        self._latest = {digest: piece for pieces in parts.values() for digest, piece in pieces}
        return StateText(f"[{text}{''.join(places)}]", self._latest)

    def encode_changes(self, state: Any) -> Changes:
        """Encode a state for somebody who was given all before, which :func:`complete` puts together again."""
        before = self._latest
        text, large = self.encode(state)
        return text, {digest: None if digest in before else piece for digest, piece in large.items()}

    def _short(self, value: Any, path: Path, parts: dict[Path, list[tuple[str, str]]]) -> Any:
        """A copy without large parts, which are put into ``parts``."""
        short: Any = dict(value) if isinstance(value, dict) else list(value)
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            here = (*path, key)
            # A slot's state of a source is a node's, which may have a large one of the user's in it.
            if key == "state" and not (len(path) == 2 and path[0] == "of"):
                if pieces := self._pieces_if_large(part, here):
                    short[key], parts[here] = None, pieces
            elif isinstance(part, _HOLDERS):
                short[key] = self._short(part, here, parts)
        return short

    def _pieces_if_large(self, state: Any, path: Path) -> list[tuple[str, str]]:
        known, pieces = self._known.get(path, (None, []))
        if known is not state:
            text = _dumps(state)
            pieces = in_pieces(text) if len(text) >= _LARGE else []
            self._known[path] = state, pieces
        return pieces


def complete(changes: Changes, before: StateText | None) -> StateText:
    """What :meth:`StateEncoder.encode_changes` gave, with the pieces that the text before it has."""
    text, large = changes
    known = before.large if before else {}
    return StateText(text, {digest: known[digest] if piece is None else piece for digest, piece in large.items()})


def decode(text: str | list[Any], large: Mapping[str, str]) -> Any:
    """The state in :attr:`StateText.text`, which may be parsed already."""
    state, *places = json.loads(text) if isinstance(text, str) else text
    for path, digests in places:
        part = json.loads("".join(large[digest] for digest in digests))
        if not path:
            state = part
            continue
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = part
    return state


def digest_of(piece: str) -> str:
    """The digest under which a piece of a large part is kept."""
    return hashlib.blake2b(piece.encode(), digest_size=16).hexdigest()


def in_pieces(text: str) -> list[tuple[str, str]]:
    """A text cut into pieces, each with its digest."""
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [(digest_of(piece), piece) for piece in pieces]
