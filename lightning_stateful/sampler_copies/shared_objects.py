"""Leaves what copies of a user's sampler share with it as it was found."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from types import FunctionType
from typing import Any

from lightning_stateful.contents.held_state import HeldState
from lightning_stateful.generators.attributes import PLAIN, attributes_of, is_users, named_outside, names_in
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts, surroundings_of

# Objects in lists of more than 1,024 are shared too.
_MOST_SHARED = 64
# Of an array or tensor.
_MOST_BYTES = 2**27


class SharedObjects:
    """What copies of a sampler share with it, its dataset above all: the end of a block puts their attributes back.

    Copies are iterated within the block. A ``set_epoch`` or an ``__iter__`` that hands the epoch on to the dataset
    would else leave there the epoch that the copy was told.

    Args:
        sampler: The sampler.
        dataset: Another object that copies share, or None.
        in_training: Whether training goes on, so that containers, arrays and tensors are put back too that the code of
            the sampler names: in what copies share, in its classes, and in variables. Before training a sampler that
            changes such is refused.
    """

    def __init__(self, sampler: Any, dataset: Any = None, *, in_training: bool = False) -> None:
        parts = SamplerParts(sampler, dataset)
        self._shared = list(islice(parts.shared, _MOST_SHARED))
        self._named = _named_by(parts, self._shared) if in_training else []

    def keep(self) -> None:
        """Keep what the attributes are now, to put that back."""
        # Without containers: they may be large, and a thread may read them meanwhile.
        self._held = HeldState(*self._shared, containers=False)
        self._contents = HeldState(*self._named, most_bytes=_MOST_BYTES)

    def put_back(self) -> None:
        """Set the attributes as they were."""
        self._held.restore()
        self._contents.restore()

    def __enter__(self) -> SharedObjects:
        self.keep()
        return self

    def __exit__(self, *error: object) -> None:
        self.put_back()


def _named_by(parts: SamplerParts, shared: Sequence[Any]) -> list[Any]:
    """What the code of a sampler names, outside of it and in what copies share with it, but for plain values."""
    names: set[str] = set()
    kinds = {kind for part in parts.found for kind in type(part).__mro__}
    # Methods of what is shared, too, that it calls.
    for of in (kinds, {kind for part in shared for kind in type(part).__mro__}):
        functions = [one for kind in of if is_users(kind.__module__) for one in vars(kind).values()]
        codes = [one.__code__ for one in functions if isinstance(one, FunctionType)]
        names |= {name for code in codes if of is kinds or code.co_name in names for name in names_in(code)}
    within = [value for part in shared for name, value in attributes_of(part).items() if name in names]
    outside = [value for part in parts.found for value in named_outside(part).values()]
    return [value for value in (*within, *outside) if type(value) not in PLAIN and not callable(value)]


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
