"""Where a user's sampler stands, as a state keeps it beside the position."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_stateful.errors import DamagedStateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What has to be known of a sampler to go on from a slot, beside the slot.

    Attributes:
        slot: Slots that the sampler had yielded when ``state`` was taken; 0 without one.
        state: Its own state, as plain data, in a list of one; empty if it is begun anew and wound forward.
        pending: Slots that it has yielded since, as plain data, where it may not yield them again.
        mark: A slot that it had yielded, and the digest of that; empty if there is none.
    """

    slot: int = 0
    state: tuple[Any, ...] = ()
    pending: tuple[Any, ...] = ()
    mark: tuple[Any, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        return {
            "slot": self.slot,
            "state": list(self.state),
            "pending": list(self.pending),
            "mark": list(self.mark),
        }

    def to_text(self) -> str:
        """The same as text, as a position carries it; empty for the beginning."""
        return "" if self == Place() else json.dumps(self.to_dict())

    @classmethod
    def from_text(cls, text: str) -> Place:
        """Read what :meth:`to_text` wrote."""
        return cls.from_dict(json.loads(text)) if text else cls()

    @classmethod
    def from_dict(cls, data: Any) -> Place:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DamagedStateError: A key is missing, or its value is none that :meth:`to_dict` writes.
        """
        kinds = {"slot": int, "state": list, "pending": list, "mark": list}
        if not isinstance(data, Mapping) or any(type(data.get(key)) is not kind for key, kind in kinds.items()):
            raise DamagedStateError(f"a sampler's place holds {', '.join(kinds)}, got {data!r}")
        place = cls(
            slot=data["slot"], state=tuple(data["state"]), pending=tuple(data["pending"]), mark=tuple(data["mark"])
        )
        if place.slot < 0 or len(place.state) > 1 or [type(part) for part in place.mark] not in ([], [int, str]):
            raise DamagedStateError(f"a sampler's place is out of range: {data!r}")
        return place
