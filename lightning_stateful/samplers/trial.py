"""A cheap test, before anything is trained, of whether a sampler gives the same again."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.items import only_next
from lightning_stateful.samplers.marks import digest
from lightning_stateful.samplers.repeated import Repeated
from lightning_stateful.samplers.state_codec import from_plain
from lightning_stateful.samplers.winding import STATE_STRIDE

if TYPE_CHECKING:
    from lightning_stateful.samplers.user_sampler import UserSampler

# Slots at the beginning of an epoch that are compared, and epochs in which one may chance to begin like another.
_COMPARED, _EPOCHS = 64, 8
# Seconds for which a sampler is followed to its end.
_PATIENCE = 0.2


class Trial:
    """Winds a sampler through the beginning of an epoch several times.

    It should give the same after it was dropped in the middle, and, as far as that does not take long, after it was
    followed to its end. If it does so only where its data are put back to what they were at first, it will be begun
    like that in every epoch. torch's own samplers, and those that depend on training, are taken at their word.

    Attributes:
        begins: Digest of how epoch 0 begins; empty where that was not looked at, or is never the same. It has to be
            equal on all ranks, and in a resumed run.
        first: The first slot of epoch 0, or None.

    Args:
        source: The sampler.

    Raises:
        UnsupportedLoaderError: The sampler cannot be repeated, and that is not accepted.
        ConfigurationError: It yields more or fewer items than its ``len``.
    """

    def __init__(self, source: UserSampler) -> None:
        self._source = source
        self.begins = ""
        self.first: Any = None
        self._length: int | None = None
        if source.is_known:
            return
        if source.way == "feedback":
            self.first = self._peek()
            return
        try:
            begins = self._examine()
        finally:
            # The sampler is left as it was found.
            if source.pristine is not None:
                source.pristine.restore()
        self.begins = begins

    def _peek(self) -> Any:
        # Its own state undoes what looking at it may have done.
        source = self._source
        state = source.own_state()
        with source.entered():
            first = next(source.begin(0, 0), None)
            source.sampler.load_state_dict(from_plain(state))
        return first

    def _examine(self) -> str:
        started = time.perf_counter()
        first = self._wind(0, note_first=True)
        is_slow = time.perf_counter() - started > _PATIENCE
        followed = self._wind(0, to_the_end=not is_slow)
        if first == followed:
            self._compare_length()
            if is_slow or first == self._wind(0):
                return self._settle_way(first)
        source = self._source
        source.restores = True
        if source.pristine is not None:
            source.pristine.keep_changed()
        # Put back, it has to begin as it did the very first time.
        if not first == self._wind(0, to_the_end=True) == self._wind(0):
            self._accept_or_refuse()
            return ""
        self._compare_length()
        if all(first == self._wind(epoch) for epoch in range(1, _EPOCHS)) and not self._is_alike(first):
            if "nondeterministic" in source.accept:
                source.restores, source.is_repeatable = False, False
                return ""
            raise UnsupportedLoaderError(
                f"{source.name} counts its epochs by itself, so a resumed run could not say which one it is. Give it "
                "set_epoch(epoch), and let the order depend on that."
            )
        return self._settle_way(first)

    def _settle_way(self, first: list[str]) -> str:
        """Make sure that a sampler's own state leads where it should; if not, it is wound like any other."""
        source = self._source
        if source.way == "own_state" and len(first) > STATE_STRIDE:
            with source.entered():
                slots = source.begin(0, 0)
                for _ in range(STATE_STRIDE):
                    next(slots)
                source.seed_draws(0, 0, STATE_STRIDE)
                state = source.own_state()
                expected = [digest(slot) for slot in islice(slots, STATE_STRIDE)]
            with source.entered():
                source.prepare(0, 0)
                source.seed_draws(0, 0, STATE_STRIDE)
                source.sampler.load_state_dict(from_plain(state))
                found = [digest(slot) for slot in islice(only_next(iter(source.sampler)), STATE_STRIDE)]
            if found != expected:
                source.way = "wound"
        return digest(first)

    def _refuse_threads(self, threads: set[threading.Thread]) -> None:
        if threads and "nondeterministic" not in self._source.accept:
            raise UnsupportedLoaderError(
                f"{self._source.name} draws in a thread of its own, whose randomness cannot be told from the process's."
                " Let it draw in __iter__ itself, or accept an inexact resume with accept=('nondeterministic',)."
            )

    def _is_alike(self, first: list[str]) -> bool:
        """Whether every epoch is meant to be the same: so it is after one that was served whole."""
        source = self._source
        if isinstance(source.sampler, Repeated):
            return True
        self._wind(0, to_the_end=True)
        source.restores = False
        again = self._wind(0)
        source.restores = True
        return self._length is not None and again == first

    def _accept_or_refuse(self) -> None:
        source = self._source
        if "nondeterministic" not in source.accept:
            raise UnsupportedLoaderError(
                f"{source.name} yields something else when the same epoch is begun a second time, though torch, NumPy, "
                "random and the generators that it holds were seeded alike. So neither could ranks agree on it, nor a "
                "resumed run go on in it. Let it draw from those (not from the time, the system or the order of a "
                "set), or from a generator seeded in set_epoch(epoch), and begin anew whenever it is iterated (an "
                "iterator does not, nor what is shuffled in place in another object); or give it state_dict() and "
                "load_state_dict() and depends_on_training = True, if it depends on what training computes; or accept "
                "an inexact resume with accept=('nondeterministic',)."
            )
        source.restores, source.is_repeatable = False, False

    def _wind(self, epoch: int, *, note_first: bool = False, to_the_end: bool = False) -> list[str]:
        """Digests of the first slots: a sampler may change later what it has yielded."""
        source = self._source
        found: list[str] = []
        with source.entered():
            started, threads = time.perf_counter(), set(threading.enumerate())
            slots = source.begin(epoch, 0)
            # next() and not a loop: a sampler that is its own iterator may begin anew at iter().
            while len(found) < _COMPARED and (slot := next(slots, _END)) is not _END:
                if note_first and not found:
                    self.first = slot
                    self._refuse_threads(set(threading.enumerate()) - threads)
                found.append(digest(slot))
            if to_the_end:
                self._length = len(found) if len(found) < _COMPARED else self._follow(slots, started)
        if source.pristine is not None and not source.restores:
            source.pristine.note_changed()
        return found

    def _follow(self, slots: Any, started: float) -> int | None:
        """How many slots there are, if that is soon found."""
        count = _COMPARED
        # A sampler that fails further on is another matter, to be seen when it gets there.
        with suppress(Exception):
            most = len(self._source) if self._source.is_cut else math.inf
            while count <= most and time.perf_counter() - started < _PATIENCE:
                passed = sum(1 for _ in islice(slots, 256))
                count += passed
                if passed < 256:
                    return count
        return None

    def _compare_length(self) -> None:
        source, found = self._source, self._length
        if found is None or not source.is_sized or found == len(source) or (source.is_cut and found > len(source)):
            return
        raise wrong_length(source, found, 0)


_END = object()


def wrong_length(source: UserSampler, found: int | str, epoch: int) -> ConfigurationError:
    """What to say of a sampler that yields more or fewer items than it says."""
    says = f"length={len(source)} was given" if source.is_cut else f"its len() is {len(source)} (when it was wrapped)"
    return ConfigurationError(
        f"{source.name} yields {found} items in epoch {epoch}, but {says}. Steps and the end of an epoch follow from "
        "that: correct it, or wrap the sampler in DDPSamplerWrapper(sampler, length='unknown'), which finds out where "
        "it ends."
    )
