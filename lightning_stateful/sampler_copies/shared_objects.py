"""Leaves what copies of a user's sampler share with it as it was found."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, surroundings_of

# Objects in lists of more than 1,024 are shared too.
_MOST_SHARED = 64


class SharedObjects:
    """What copies of a sampler share with it, its dataset above all: the end of a block puts their attributes back.

    Copies are iterated within the block. A ``set_epoch`` or an ``__iter__`` that hands the epoch on to the dataset
    would else leave there the epoch that the copy was told.

    Args:
        sampler: The sampler.
        dataset: Another object that copies share, or None.
    """

    def __init__(self, sampler: Any, dataset: Any = None) -> None:
        self._shared = list(islice(SamplerParts(sampler, dataset).shared, _MOST_SHARED))

    def keep(self) -> None:
        """Keep what the attributes are now, to put that back."""
        # Without containers: they may be large, and a thread may read them meanwhile.
        self._held = HeldState(*self._shared, containers=False)

    def put_back(self) -> None:
        """Set the attributes as they were."""
        self._held.restore()

    def __enter__(self) -> SharedObjects:
        self.keep()
        return self

    def __exit__(self, *error: object) -> None:
        self.put_back()


def changed_names(sampler: Any, dataset: Any, before: dict[str, str]) -> list[str]:
    """The names of what copies of a sampler share with it and now hold otherwise than in :func:`surroundings_of`."""
    now = surroundings_of(sampler, dataset)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def said_of_changes(names: Sequence[str], why: str) -> str:
    """Why a sampler is refused that changes what copies share with it, and what to do; without its name."""
    return (
        f" changes {', '.join(f'`{name}`' for name in names[:4])} while it is iterated, and {why}. It is tried before "
        "training, on a copy that shares this with it, so that training would begin with what the trial has left. Let "
        "the sampler keep what it changes in attributes of its own, or set it before training. (A cache is let "
        "through: one that a second pass leaves as it is, and with which the same comes.)"
    )
