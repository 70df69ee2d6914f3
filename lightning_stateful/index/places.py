"""Places of sources as a state holds them: in the alphabetical order of names, whatever becomes of a dict's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_stateful.core.permutation import MAX_LENGTH
from lightning_stateful.errors import DamagedStateError


def by_name(names: Sequence[str], places: Sequence[int]) -> list[int]:
    """Places in the alphabetical order of the names; empty for none."""
    return [place for _, place in sorted(zip(names, places, strict=True))] if places else []


def read_lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """Lengths of the sources of a saved configuration, by name.

    Raises:
        DamagedStateError: There are none.
    """
    sources = config.get("sources")
    if not isinstance(sources, Mapping) or not sources:
        raise DamagedStateError(f"a configuration needs sources, got {sources!r}")
    lengths = {}
    for name, described in sources.items():
        # A loader adds a digest after the length.
        length = str(described).split(" ", maxsplit=1)[0]
        if isinstance(described, bool) or not length.isdecimal() or not 0 < int(length) <= MAX_LENGTH:
            raise DamagedStateError(f"source {name!r} must begin with its length, got {described!r}")
        lengths[name] = int(length)
    return lengths


def read_places(position: Mapping[str, Any], key: str, lengths: Mapping[str, int]) -> dict[str, int]:
    """Places of the sources by name; empty where there are none.

    Raises:
        DamagedStateError: They are not one non-negative integer a source.
    """
    places = position.get(key)
    good = isinstance(places, list) and all(type(place) is int and 0 <= place < 2**62 for place in places)
    if not isinstance(places, list) or not good or len(places) not in (0, len(lengths)):
        raise DamagedStateError(f"position.{key} must list a place for each of {len(lengths)} sources, got {places!r}")
    return dict(zip(sorted(lengths), places, strict=True)) if places else {}
