"""A cheap test, before anything is trained, of whether a sampler gives the same again."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_stateful.errors import ConfigurationError, UnsupportedLoaderError
from lightning_stateful.samplers.marks import digest
from lightning_stateful.samplers.own_words import from_plain

if TYPE_CHECKING:
    from lightning_stateful.samplers.user_sampler import UserSampler

# Slots at the beginning of an epoch that are compared, and epochs in which one may chance to begin like another.
_COMPARED, _EPOCHS = 64, 8


class Trial:
    """Winds a sampler through the beginning of an epoch twice.

    If the two differ, but agree where the sampler's data are put back to what they were at first, it will be begun
    like that in every epoch. torch's own samplers, and those that depend on training, are taken at their word.

    Attributes:
        begins: Digest of how epoch 0 begins; empty where that was not looked at. It has to be equal on all ranks.
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
        if source.is_known:
            return
        if source.way == "feedback":
            self.first = self._peek()
            return
        first = self._wind(0, note_first=True)
        self.begins = digest(first)
        if not self._repeats(first):
            self._accept_or_refuse()
        self._compare_length(len(first))

    def _peek(self) -> Any:
        # Its own state undoes what looking at it may have done.
        source = self._source
        state = source.own_state()
        with source.surroundings.entered():
            first = next(source.begin(0, 0), None)
            source.sampler.load_state_dict(from_plain(state))
        return first

    def _repeats(self, first: list[str]) -> bool:
        if first == self._wind(0):
            return True
        source = self._source
        source.restores = True
        first = self._wind(0)
        if first != self._wind(0):
            return False
        self.begins = digest(first)
        if all(first == self._wind(epoch) for epoch in range(1, _EPOCHS)):
            raise UnsupportedLoaderError(
                f"{source.name} counts its epochs by itself, so a resumed run could not say which one it is. Give it "
                "set_epoch(epoch), and let the order depend on that."
            )
        return True

    def _accept_or_refuse(self) -> None:
        source = self._source
        if "nondeterministic" not in source.accept:
            raise UnsupportedLoaderError(
                f"{source.name} yields something else when the same epoch is begun a second time, though torch, NumPy, "
                "random and the generators that it holds were seeded alike. So neither could ranks agree on it, nor a "
                "resumed run go on in it. Let it draw from those (not from the time, the system or the order of a "
                "set), or from a generator seeded in set_epoch(epoch); or give it state_dict() and "
                "load_state_dict() and depends_on_training = True, if it depends on what training computes; or accept "
                "an inexact resume with accept=('nondeterministic',)."
            )
        source.restores, source.is_repeatable = False, False

    def _wind(self, epoch: int, *, note_first: bool = False) -> list[str]:
        """Digests of the first slots: a sampler may change later what it has yielded."""
        source = self._source
        found: list[str] = []
        with source.surroundings.entered():
            for slot in islice(source.begin(epoch, 0), _COMPARED):
                if note_first and not found:
                    self.first = slot
                found.append(digest(slot))
        return found

    def _compare_length(self, found: int) -> None:
        source = self._source
        if (
            found < _COMPARED
            and source.is_sized
            and found != len(source)
            and not (source.is_cut and found > len(source))
        ):
            raise wrong_length(source, found, 0)


def wrong_length(source: UserSampler, found: int | str, epoch: int) -> ConfigurationError:
    """What to say of a sampler that yields more or fewer items than it says."""
    says = f"length={len(source)} was given" if source.is_cut else f"its len() is {len(source)}"
    return ConfigurationError(
        f"{source.name} yields {found} items in epoch {epoch}, but {says}. Steps and the end of an epoch follow from "
        "that: correct it, or wrap the sampler in DDPSamplerWrapper(sampler, length='unknown'), which finds out where "
        "it ends."
    )
