"""Whether what a state says of a place is one that the stages of a stream can be opened at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.streams.lane import Lane, StreamConfig
from lightning_stateful.streams.portion import Portion, leaf_of
from lightning_stateful.streams.shards import Part
from lightning_stateful.streams.share import Share
from lightning_stateful.streams.skipped import are_counts
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Place

# What stands there is a source's or a user's own.
_FREE = ("state",)
# No count comes to more.
_MOST = 2**53
# A damaged state may name any number, for which there is no memory.
_MOST_LANES = 2**17


def check_fields(data: Mapping[str, Any], num_replicas: int) -> None:
    """Refuse what is no position of a stream.

    Raises:
        DamagedStateError: A key is missing, or its value of another kind than is written there.
    """
    kinds = {"pass": int, "workers": int, "steps": int, "skipped": list, "sources": dict, "shards": dict}
    damaged = [f"{name} {data.get(name)!r}" for name, kind in kinds.items() if type(data.get(name)) is not kind]
    numbers = () if damaged else ("pass", "steps", "workers")
    damaged += [f"{name} {data[name]}" for name in numbers if data[name] < (name == "workers")]
    if not damaged and not are_counts(data["skipped"]):
        damaged = [f"skipped {data['skipped']!r}"]
    if damaged:
        raise DamagedStateError(
            f"a stream's position holds {', '.join(kinds)}, but not as they are written: {', '.join(damaged)}. "
            "Resume from another checkpoint."
        )
    if num_replicas * data["workers"] > _MOST_LANES:
        raise DamagedStateError(
            f"a stream's position is that of {num_replicas} ranks with {data['workers']} workers each, more than "
            "there can be. Resume from another checkpoint."
        )


def check_lane_place(place: Any, config: StreamConfig, shares: Mapping[str, Share]) -> None:
    """Refuse what is no place of a lane with these shares.

    Raises:
        DamagedStateError: A key is missing, or its value of another kind than a lane writes.
        PositionError: It lies beyond what the lane was dealt.
    """
    fresh = Lane(config, dict.fromkeys(config.sources, Share())).place()
    # Only ranks that repeat batches say so.
    given = {"repeated": 0, **place} if isinstance(place, Mapping) else place
    _compare(given, {**fresh, "repeated": 0}, "The place of a lane")
    for key in ("ended", "again", "gone"):
        if any(type(name) is not str or name not in config.sources for name in place[key]):
            raise DamagedStateError(
                f"The place of a lane, {key}, names some of {list(config.sources)}, got {place[key]!r}.{_REMEDY}"
            )
    for name, source in config.sources.items():
        held = place["of"][name]
        if not are_counts(held["skipped"]):
            raise DamagedStateError(
                f"The place of a lane has three counts of skipped, got {held['skipped']!r}.{_REMEDY}"
            )
        _check_in_share(held, shares[name], source)


def _check_in_share(held: Place, share: Share, source: Source) -> None:
    number, place, opened = held["portion"], held["place"], held["opened"]
    dealt = share.in_round(held["round"], source)
    if number > len(dealt):
        raise PositionError(f"A lane stands in portion {number} of {len(dealt)}.{_REMEDY}")
    shards = dealt[number].shards if number < len(dealt) else ()
    if opened > len(shards):
        raise PositionError(f"A lane has opened {opened} of {len(shards)} shards.{_REMEDY}")
    if place is not None:
        check_portion(Portion(0, shards, place), source)
    begun = 0 if place is None else min(leaf_of(place)["shard"] + 1, len(shards))
    if opened < begun or (opened and place is None):
        raise DamagedStateError(f"A lane has opened {opened} shards, and stands at {place!r} in them.{_REMEDY}")


def check_portion(portion: Portion, source: Source) -> None:
    """Refuse a portion of shards that there are not, or a place in it that its source cannot be opened at.

    Raises:
        DamagedStateError, PositionError: That is so.
    """
    number = source.shards.num_shards
    if not portion.shards or any(type(shard) is not int or Part.of(shard, number) is None for shard in portion.shards):
        raise DamagedStateError(f"A part of a stream has shards of range({number}), got {portion.shards}.{_REMEDY}")
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
    _compare(place, stage.place(), "A place in a stream")
    leaf = leaf_of(place)
    if leaf["item"] < leaf["since"] or (leaf["state"] is None and leaf["item"] > leaf["since"]):
        raise DamagedStateError(
            f"A place in a stream is sample {leaf['item']} of a shard, {leaf['since']} after the state "
            f"{leaf['state']!r}, which cannot be.{_REMEDY}"
        )


def _compare(saved: Any, fresh: Any, where: str) -> None:
    if isinstance(fresh, Mapping):
        if not isinstance(saved, Mapping) or set(saved) != set(fresh):
            raise DamagedStateError(f"{where} holds {', '.join(sorted(fresh))}, got {saved!r}.{_REMEDY}")
        for key, value in fresh.items():
            if key not in _FREE:
                _compare(saved[key], value, f"{where}, {key}" if key else where)
    elif fresh is not None and (type(saved) is not type(fresh) or (type(fresh) is int and not 0 <= saved <= _MOST)):
        kind = f"a number from 0 to {_MOST}" if type(fresh) is int else f"a {type(fresh).__name__}"
        raise DamagedStateError(f"{where}, has to be {kind}, got {saved!r}.{_REMEDY}")


_REMEDY = " Resume from another checkpoint; this one's data state is damaged."
