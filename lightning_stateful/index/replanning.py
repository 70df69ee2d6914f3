"""What batch orders have in common that plan the rest of an epoch anew: how such a position is read, and refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_stateful.core.permutation import MAX_LENGTH
from lightning_stateful.errors import ConfigurationError, DamagedStateError, Difference, StateMismatchError
from lightning_stateful.index.position import Position


def save_position(position: Position, origin: str) -> dict[str, Any]:
    """A position as plain data, its origin under the name that the order has for it."""
    return {**position.to_dict(), "since": position.since, origin: list(position.origin)}


def read_position(data: Mapping[str, Any], origin: str) -> Position:
    """The position that :func:`save_position` wrote.

    Raises:
        DamagedStateError: Keys are missing, or contradict each other.
        PositionError: A value is out of range.
    """
    position = Position.from_dict(data)
    since, served = data.get("since"), data.get(origin)
    if type(since) is not int or not isinstance(served, list) or any(type(part) is not int for part in served):
        raise DamagedStateError(f"a position needs since, and {origin} as integers, got {dict(data)}")
    if (
        not 0 <= since <= position.consumed
        or any(not 1 <= part <= MAX_LENGTH for part in served)
        or bool(since) != bool(served)
    ):
        raise DamagedStateError(f"{origin} and since of a position contradict each other: {dict(data)}")
    if position.consumed % position.width or since % position.width:
        raise DamagedStateError(f"slots come in groups of width={position.width}, got {dict(data)}")
    return replace(position, since=since, origin=tuple(served))


def refuse_within_epoch(position: Position, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to go on within an epoch that was cut into other batches.

    Raises:
        StateMismatchError: With everything that differs and decides about batches.
    """
    if not position.consumed:
        return
    remedy = (
        "Which samples were served follows from it, so it cannot change within an epoch. Train to the epoch's end "
        "under the saved value, or resume from a checkpoint at the beginning of an epoch."
    )
    found = [
        Difference(path=name, saved=saved.get(name, "<nothing>"), present=present.get(name, "<nothing>"), remedy=remedy)
        for name in sorted((saved.keys() | present.keys()) - {"dataset"})
        if saved.get(name) != present.get(name)
    ]
    if found:
        raise StateMismatchError(found, where="The position within an epoch")


def no_step(num_samples: int, width: int) -> ConfigurationError:
    """What to say of an epoch that ``drop_last`` leaves without a step."""
    return ConfigurationError(
        f"With drop_last=True and {width} ranks, an epoch of {num_samples} samples would have no full step. Train on "
        "fewer ranks, with a smaller budget, or without drop_last."
    )
