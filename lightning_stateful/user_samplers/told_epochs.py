"""Tells a user's objects the epoch by ``set_epoch``, unless somebody else has told them another."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.samplers.attributes import attributes_of
from lightning_stateful.samplers.rng import keep_randomness
from lightning_stateful.user_samplers.sampler_copy import SamplerCopy, SamplerParts, digest_of_contents


class ToldEpochs:
    """Remembers what objects held when they were told an epoch last, or before that at first.

    Whether somebody else has called ``set_epoch`` since shows in their attribute ``epoch``. Of one without that,
    attributes that ``set_epoch`` sets hold something else than in a copy that is told the same epoch.

    Args:
        holders: The objects, at first.

    Attributes:
        others: The numbers of those that somebody else has told another epoch, as of the latest call of :meth:`tell`.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        self.others: set[int] = set()
        self._epoch, self._held, self._has_warned = 0, [_held_by(holder) for holder in holders], False

    def tell(self, holders: Sequence[Any], epoch: int) -> None:
        """Call ``set_epoch`` of the objects, in their order, but of those that somebody else has told another epoch."""
        self.others = self._told_another(holders, (epoch, self._epoch))
        for place, holder in enumerate(holders):
            if place not in self.others and callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(epoch)
        self._epoch, self._held = epoch, [_held_by(holder) for holder in holders]

    def note_iterated(self, holders: Sequence[Any]) -> None:
        """Take what objects hold after their own iteration as told by nobody else: lhotse's go on to the next epoch."""
        held = enumerate(map(_held_by, holders))
        self._held = [self._held[place] if place in self.others else now for place, now in held]

    def warn(self, holders: Sequence[Any], *epochs: int) -> None:
        """Warn, once, of objects that somebody else has told another epoch than these."""
        if not self._has_warned and (others := self.others | self._told_another(holders, epochs)):
            self._has_warned = True
            warnings.warn(
                f"Something else has called set_epoch of {type(holders[min(others)]).__qualname__}, which stays as it "
                "was told. A resume from here on is exact only if it is told the same again before its first batch.",
                StatefulWarning,
                stacklevel=3,
            )

    def _told_another(self, holders: Sequence[Any], epochs: tuple[int, ...]) -> set[int]:
        found = set()
        for place, holder in enumerate(holders):
            before, now = self._held[place] if place < len(self._held) else {}, _held_by(holder)
            is_left = place in self.others and now == before
            if is_left or (now != before and _is_told_another(holder, before, now, epochs)):
                found.add(place)
        return found


def _is_told_another(holder: Any, before: dict[str, Any], now: dict[str, Any], epochs: tuple[int, ...]) -> bool:
    if "epoch" in now:
        return now["epoch"] not in (before.get("epoch", 0), *epochs)
    if any(callable(getattr(part, "set_epoch", None)) for part in SamplerParts(holder).shared):
        # A copy would tell what it shares.
        return False
    found = []
    with suppress(Exception), keep_randomness():
        tried = SamplerCopy(holder).sampler
        for epoch in (0, 1, *epochs) if tried is not holder else ():
            tried.set_epoch(epoch)
            found.append(_held_by(tried))
    if len(found) < 2 + len(epochs):
        return False
    sets = [name for name in found[0] if found[0][name] != found[1].get(name)]
    return any(now.get(name) not in [of.get(name) for of in (before, *found[2:])] for name in sets)


def _held_by(holder: Any) -> dict[str, Any]:
    """The attribute ``epoch`` of an object with ``set_epoch``, or digests of all its attributes."""
    if not callable(getattr(holder, "set_epoch", None)):
        return {}
    if getattr(holder, "epoch", None) is not None:
        return {"epoch": holder.epoch}
    return {name: digest_of_contents({name: value}) for name, value in attributes_of(holder).items()}
