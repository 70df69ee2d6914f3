"""What a lane was dealt of a source, and what it reads when it begins the source again."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_stateful.streams.portion import Portion, left_of
from lightning_stateful.streams.source import Source
from lightning_stateful.streams.stage import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A lane's part of one source in a pass.

    Attributes:
        portions: What it was dealt.
        epoch: The latest epoch of the deal.
        lane: The lane.
        num_lanes: Lanes of all ranks.
    """

    portions: tuple[Portion, ...] = ()
    epoch: int = 0
    lane: int = 0
    num_lanes: int = 1

    def in_round(self, number: int, source: Source) -> list[Portion]:
        """Its portions in the ``number``-th round: what it was dealt, then its part of all shards, epoch by epoch."""
        if not number:
            return list(self.portions)
        epoch = self.epoch + number
        shards = source.order(epoch, self.num_lanes)[self.lane :: self.num_lanes]
        return [Portion(epoch, tuple(shards))] if shards else []

    def left(self, place: Place | None, source: Source) -> list[Portion]:
        """What the lane has not served of them where it stands at ``place``."""
        if place is None:
            return list(self.portions)
        return left_of(self.in_round(place["round"], source), place["portion"], place["place"], place["opened"])
