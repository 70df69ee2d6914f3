"""Checks that the stages of a stream can be opened at a place that was saved, perhaps by a stream built otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.streams.lane import Lane, StreamConfig
from lightning_stateful.streams.portion import Portion, leaf_of
from lightning_stateful.streams.shards import Part
from lightning_stateful.streams.share import Share
from lightning_stateful.streams.source import Source

# What stands there is a source's or a user's own.
_FREE = ("state",)


def check_lane_place(place: Any, config: StreamConfig, shares: Mapping[str, Share]) -> None:
    """Refuse a place of a lane that was built otherwise, or that was dealt less.

    Raises:
        DamagedStateError: It has other keys than a lane of this configuration writes.
        PositionError: It lies beyond what the lane was dealt.
    """
    _compare(place, Lane(config, dict.fromkeys(config.sources, Share())).place(), "The place of a lane")
    for name, source in config.sources.items():
        held = place["of"][name]
        number, opened = held["portion"], held["opened"]
        dealt = shares[name].in_round(held["round"], source)
        if not 0 <= number <= len(dealt):
            raise PositionError(f"A lane stands in portion {number} of {len(dealt)}.")
        shards = dealt[number].shards if number < len(dealt) else ()
        if not 0 <= opened <= len(shards):
            raise PositionError(f"A lane has opened {opened} of {len(shards)} shards.")
        if held["place"] is not None:
            check_portion(Portion(0, shards, held["place"]), source)


def check_portion(portion: Portion, source: Source) -> None:
    """Refuse a portion of shards that there are not, or a place in it that its source cannot be opened at.

    Raises:
        DamagedStateError: The place has other keys than the source's stages write.
        PositionError: It names shards that there are not.
    """
    number = source.shards.num_shards
    if not portion.shards or any(Part.of(shard, number) is None for shard in portion.shards):
        raise PositionError(f"A part of a stream has shards of range({number}), got {portion.shards}.")
    if portion.place is None:
        return
    stage, _ = source.open(Portion(0, ()), None)
    _compare(portion.place, stage.place(), "A place in a stream")
    at = leaf_of(portion.place)["shard"]
    if not 0 <= at <= len(portion.shards):
        raise PositionError(f"A place in a stream lies in shard {at} of {len(portion.shards)}.")


def _compare(saved: Any, fresh: Any, where: str) -> None:
    if not isinstance(fresh, Mapping):
        return
    if not isinstance(saved, Mapping) or saved.keys() != fresh.keys():
        raise DamagedStateError(f"{where} holds {', '.join(sorted(fresh))}, got {saved!r}.")
    for key, value in fresh.items():
        if key not in _FREE:
            _compare(saved[key], value, f"{where}, {key}" if key else where)
