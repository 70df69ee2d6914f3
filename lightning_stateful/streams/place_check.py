"""Whether what a state says of a place is one that the stages of a stream can be opened at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.streams.lane import Lane, StreamConfig
from lightning_stateful.streams.portion import Portion, leaf_of
from lightning_stateful.streams.share import Share
from lightning_stateful.streams.source import Source

# What stands there is a source's or a user's own.
_FREE = ("state",)


def check_lane_place(place: Any, config: StreamConfig, shares: Mapping[str, Share]) -> None:
    """Refuse what is no place of a lane with these shares.

    Raises:
        DamagedStateError: A key is missing, or its value of another kind than a lane writes.
        PositionError: It lies beyond what the lane was dealt.
    """
    fresh = Lane(config, dict.fromkeys(config.sources, Share())).place()
    _compare(place, fresh, "the place of a lane", missing=("repeated",))
    for name, source in config.sources.items():
        held, dealt = place["of"][name], shares[name].in_round(place["of"][name]["round"], source)
        if held["portion"] > len(dealt):
            raise PositionError(f"A lane stands in portion {held['portion']} of {len(dealt)}.{_REMEDY}")
        if held["place"] is not None and held["portion"] < len(dealt):
            shards = dealt[held["portion"]].shards
            check_portion(Portion(0, shards, held["place"]), source)
            if held["opened"] > len(shards):
                raise PositionError(f"A lane has opened {held['opened']} of {len(shards)} shards.{_REMEDY}")


def check_portion(portion: Portion, source: Source) -> None:
    """Refuse a portion of shards that there are not, or a place in it that its source cannot be opened at.

    Raises:
        DamagedStateError, PositionError: That is so.
    """
    number = source.shards.num_shards
    if (
        portion.epoch < 0
        or not portion.shards
        or any(type(s) is not int or not 0 <= s < number for s in portion.shards)
    ):
        raise DamagedStateError(f"a part of a stream has shards of range({number}), got {portion.shards}.{_REMEDY}")
    if portion.place is not None:
        check_place(portion.place, source)
        at = leaf_of(portion.place)["shard"]
        if at > len(portion.shards):
            raise PositionError(f"A place in a stream lies in shard {at} of {len(portion.shards)}.{_REMEDY}")


def check_place(place: Any, source: Source) -> None:
    """Refuse what is no place within a portion of a source.

    Raises:
        DamagedStateError: A key is missing, or its value of another kind than the source's stages write.
    """
    stage, _ = source.open(Portion(0, ()), None)
    _compare(place, stage.place(), "a place in a stream")


def _compare(saved: Any, fresh: Any, path: str, missing: tuple[str, ...] = ()) -> None:
    if isinstance(fresh, Mapping):
        if not isinstance(saved, Mapping) or set(saved) - set(missing) != set(fresh):
            raise DamagedStateError(f"{path} holds {', '.join(sorted(fresh))}, got {saved!r}.{_REMEDY}")
        for key, value in fresh.items():
            if key not in _FREE:
                _compare(saved[key], value, f"{path}, {key},")
    elif fresh is not None and (type(saved) is not type(fresh) or (type(fresh) is int and saved < 0)):
        raise DamagedStateError(f"{path} is a {type(fresh).__name__}, got {saved!r}.{_REMEDY}")


_REMEDY = " Resume from another checkpoint; this one's data state is damaged."
