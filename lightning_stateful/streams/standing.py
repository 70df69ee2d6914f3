"""Where all lanes of a run stand in a pass over a stream, and what follows from it on any ranks and workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from lightning_stateful.errors import DamagedStateError, PositionError
from lightning_stateful.state import copy_plain
from lightning_stateful.streams.lane import Lane, StreamConfig
from lightning_stateful.streams.place_check import check_lane_place, check_portion
from lightning_stateful.streams.portion import Deal, Portion, begun_anew, leaf_of, redealt
from lightning_stateful.streams.share import Share
from lightning_stateful.streams.skipped import Skipped, skipped_at
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Place


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A pass over a stream: what was dealt out, and where each lane stands.

    Lanes are numbered worker by worker: lane ``worker * num_replicas + rank``.

    Attributes:
        config: How the stream is read.
        epoch: The number of the pass.
        num_replicas: Ranks.
        num_workers: Lanes of a rank.
        deals: What was dealt out of every source.
        places: Where each lane stands; None for a lane that has not begun.
        steps: Batches of each rank since the deal.
        skipped: What had been left out before the deal, since the beginning of training.
    """

    config: StreamConfig
    epoch: int
    num_replicas: int
    num_workers: int
    deals: Mapping[str, Deal]
    places: tuple[Place | None, ...]
    steps: int = 0
    skipped: Skipped = field(default_factory=Skipped)

    @classmethod
    def beginning(cls, config: StreamConfig, epoch: int, num_replicas: int, num_workers: int) -> Standing:
        """The beginning of a pass before which nothing was left."""
        lanes = num_replicas * num_workers
        deals = {name: Deal(epoch, (), tuple(source.order(epoch, lanes))) for name, source in config.sources.items()}
        return cls(
            config=config,
            epoch=epoch,
            num_replicas=num_replicas,
            num_workers=num_workers,
            deals=deals,
            places=(None,) * lanes,
        )

    @property
    def num_lanes(self) -> int:
        """Lanes of all ranks."""
        return self.num_replicas * self.num_workers

    @cached_property
    def portions(self) -> list[dict[str, list[Portion]]]:
        """The portions of each lane, by source."""
        dealt = {
            name: deal.lanes(self.num_lanes, sizes=source.sizes(deal.shards), pinned=source.shards.pinned)
            for name, deal in self.deals.items()
            for source in (self.config.sources[name],)
        }
        return [{name: lanes[lane] for name, lanes in dealt.items()} for lane in range(self.num_lanes)]

    @cached_property
    def shares(self) -> list[dict[str, Share]]:
        """The share of each lane, by source."""
        lanes = self.num_lanes
        return [
            {
                name: Share(portions=tuple(dealt), epoch=self.deals[name].epoch, lane=lane, num_lanes=lanes)
                for name, dealt in portions.items()
            }
            for lane, portions in enumerate(self.portions)
        ]

    def at(self, places: tuple[Place | None, ...], steps: int = 0) -> Standing:
        """The same pass, with lanes standing elsewhere."""
        moved = replace(self, places=places, steps=steps)
        # Cached properties live here; they are the same.
        vars(moved).update(portions=self.portions, shares=self.shares)
        return moved

    def on(self, num_replicas: int, num_workers: int) -> Standing:
        """What is left of the pass, dealt out to other lanes; the same if they are as many."""
        if (num_replicas, num_workers) == (self.num_replicas, self.num_workers):
            return self
        lanes = num_replicas * num_workers
        deals = {name: self._redealt(name, self._latest(name), lanes) for name in self.deals}
        dealt: dict[str, Any] = {"deals": deals, "places": (None,) * lanes, "steps": 0, "skipped": self.left_out}
        return replace(self, num_replicas=num_replicas, num_workers=num_workers, **dealt)

    def following(self) -> Standing:
        """The beginning of the next pass: first what is left of this one, then all shards once more."""
        deals = {}
        for name, source in self.config.sources.items():
            latest = self._latest(name)
            if source.shards.is_loader:
                fresh = source.open(Portion(latest, ()), None)[0].place()
                held = [None if place is None else place["of"][name] for place in self.places]
                deals[name] = begun_anew(held, latest + 1, fresh)
            elif self._has_plenty(self._left(name), source):
                deals[name] = self._redealt(name, latest, self.num_lanes)
            else:
                order = tuple(source.order(latest + 1, self.num_lanes))
                deals[name] = replace(self._redealt(name, latest + 1, self.num_lanes), unopened=order)
        places: tuple[Place | None, ...] = (None,) * self.num_lanes
        return replace(self, epoch=self.epoch + 1, deals=deals, places=places, steps=0, skipped=self.left_out)

    def workers_in_turn(self, rank: int) -> list[int]:
        """A rank's workers, the one first whose batch comes next."""
        lanes = range(rank, self.num_lanes, self.num_replicas)
        dealt = [worker for worker, lane in enumerate(lanes) if any(self.portions[lane].values())]
        places = {worker: self.places[lanes[worker]] or {} for worker in dealt}
        served = {worker: place.get("batches", 0) for worker, place in places.items() if not place.get("over")}
        # They take turns from the first on.
        first = min(served, key=lambda worker: (served[worker], worker), default=0)
        return [(first + number) % self.num_workers for number in range(self.num_workers)]

    @property
    def is_known(self) -> bool:
        """Whether each lane that was dealt something has said where it stands."""
        return all(
            place is not None or not any(portions.values())
            for portions, place in zip(self.portions, self.places, strict=True)
        )

    @property
    def has_begun(self) -> bool:
        """Whether something of the pass was served, or left of the one before."""
        opened = [portion.place for deal in self.deals.values() for portion in deal.opened]
        # A loader's next pass is opened by the state that the one before has left.
        return bool(self.steps) or any(place is None or leaf_of(place)["item"] for place in opened)

    @property
    def left_out(self) -> Skipped:
        """What has been left out since the beginning of training."""
        total = self.skipped
        for place in self.places:
            for of in () if place is None else place["of"].values():
                total = total.plus(Skipped(*of["skipped"])).plus(skipped_at(of["place"]))
        return total

    def report(self) -> dict[str, int]:
        """The pass, and shards not read to their end or left out."""
        left_out = self.left_out
        return {
            "pass": self.epoch,
            "shards_left": sum(len(portion.shards) for name in self.deals for portion in self._left(name)),
            "shards_skipped": left_out.shards,
            "samples_skipped": left_out.samples,
            "samples_too_long": left_out.too_long,
        }

    def shards_at(self, lane: int, place: Place | None) -> list[str]:
        """The shards that a lane has open at a place, by name."""
        names = []
        for name, share in self.shares[lane].items():
            at = {"round": 0, "portion": 0, "opened": 0} if place is None else place["of"][name]
            portions = share.in_round(at["round"], self.config.sources[name])
            if at["portion"] < len(portions):
                shard = portions[at["portion"]].shards[max(at["opened"] - 1, 0)]
                names.append(self.config.sources[name].name(shard))
        return names

    def read_again(self, lanes: Iterable[int] | None = None) -> dict[str, int]:
        """Samples that have to be read again to come to their lanes' places, by what they are samples of.

        Args:
            lanes: Of these; None for all.
        """
        found: dict[str, int] = {}
        for lane in range(self.num_lanes) if lanes is None else lanes:
            place = self.places[lane]
            if place is None:
                continue
            for name, source in self.config.sources.items():
                at = place["of"][name]["place"]
                if source.shards.reread and at is not None and (leaf := leaf_of(at))["state"] is None and leaf["since"]:
                    portions = self.shares[lane][name].in_round(place["of"][name]["round"], source)
                    shard = portions[place["of"][name]["portion"]].shards[leaf["shard"]]
                    found[source.name(shard)] = leaf["since"]
        return found

    def begun_again(self) -> Standing:
        """The same pass, with every lane at the beginning of what it was dealt."""
        lanes = [Lane(self.config, shares) for shares in self.shares]
        return self.at(tuple(lane.place() for lane in lanes), self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state; each lane goes by the first shard that it was dealt."""
        deals = {
            name: deal.to_dict(self.config.sources[name].order(deal.epoch, self.num_lanes))
            for name, deal in self.deals.items()
        }
        keys = self._keys()
        lanes = {
            keys[lane]: copy_plain(place)
            for lane, place in enumerate(self.places)
            if place is not None and lane in keys and self._has_read(lane, place)
        }
        return {
            "num_replicas": self.num_replicas,
            "pass": self.epoch,
            "workers": self.num_workers,
            "steps": self.steps,
            "skipped": list(self.skipped),
            "sources": deals,
            "shards": lanes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], config: StreamConfig) -> Standing:
        """Read what :meth:`to_dict` wrote.

        Args:
            data: The plain data.
            config: How the stream is read on the ranks and workers that wrote it.

        Raises:
            DamagedStateError, PositionError: It is that of a stream with other sources, shards or steps.
        """
        if set(data["sources"]) != set(config.sources):
            raise DamagedStateError(
                f"a stream's progress has the sources {list(data['sources'])}, and there are {list(config.sources)}."
            )
        order = {
            name: partial(source.order, num_lanes=data["num_replicas"] * data["workers"])
            for name, source in config.sources.items()
        }
        deals = {name: Deal.from_dict(data["sources"][name], order[name]) for name in config.sources}
        for name, deal in deals.items():
            for portion in deal.opened:
                check_portion(portion, config.sources[name])
        standing = cls(
            config=config,
            epoch=data["pass"],
            num_replicas=data["num_replicas"],
            num_workers=data["workers"],
            deals=deals,
            places=(),
            skipped=Skipped(*data["skipped"]),
        )
        lanes = {key: lane for lane, key in standing._keys().items()}
        unknown = sorted(set(data["shards"]) - set(lanes))
        if unknown:
            raise PositionError(f"a stream's progress names shards that were not dealt out: {unknown}.")
        places: list[Place | None] = [None] * standing.num_lanes
        for key, place in data["shards"].items():
            check_lane_place(place, config, standing.shares[lanes[key]])
            places[lanes[key]] = copy_plain(place)
        return standing.at(tuple(places), data["steps"])

    def _left(self, name: str) -> list[Portion]:
        left = []
        for shares, place in zip(self.shares, self.places, strict=True):
            left += shares[name].left(None if place is None else place["of"][name], self.config.sources[name])
        return left

    def _redealt(self, name: str, epoch: int, num_lanes: int) -> Deal:
        """What is left of a source, dealt out anew to so many lanes; ``epoch`` is that of its unopened shards."""
        source = self.config.sources[name]
        regrouped = partial(source.regrouped, num_lanes=num_lanes)
        return redealt(self._left(name), epoch, source.order(epoch, num_lanes), regrouped)

    def _has_plenty(self, left: list[Portion], source: Source) -> bool:
        """Whether so much is left of a source that it is not begun anew yet, lest it pile up pass by pass."""
        mixing, number = self.config.mixing, sum(len(portion.shards) for portion in left)
        cut_short = mixing is not None and mixing.stop == "first_exhausted"
        return cut_short and number >= self.num_lanes and 2 * number > len(source.order(0, self.num_lanes))

    def _latest(self, name: str) -> int:
        """The latest epoch of a source's shards that a lane has come to."""
        rounds = [place["of"][name]["round"] for place in self.places if place is not None]
        return self.deals[name].epoch + max(rounds, default=0)

    def _has_read(self, lane: int, place: Place) -> bool:
        """Whether a lane was dealt something, or has begun a source again."""
        return any(self.portions[lane].values()) or any(of["round"] for of in place["of"].values())

    def _keys(self) -> dict[int, str]:
        keys = {}
        for lane, shares in enumerate(self.shares):
            for name, share in shares.items():
                # One that was dealt nothing may begin the source again.
                dealt = share.portions or share.in_round(1, self.config.sources[name])
                if dealt:
                    key = f"{dealt[0].epoch}:{dealt[0].shards[0]}"
                    keys[lane] = f"{name}/{key}" if name else key
                    break
        return keys
