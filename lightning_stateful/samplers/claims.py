"""Which run of a user's sampler is the latest, over all that run the same object."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightning_stateful.samplers.user_sampler import UserSampler
    from lightning_stateful.samplers.winding import Winding


class _Claim(NamedTuple):
    sampler: weakref.ref[Any]
    run: weakref.ref[Winding] | None
    source: weakref.ref[UserSampler]


# By identity: a sampler may be equal to others, and need not have a hash.
_LATEST: dict[int, _Claim] = {}


def claim(source: UserSampler, run: Winding | None) -> None:
    """Note that ``run`` iterates the sampler of ``source`` from now on, or that nobody's run goes on."""
    key = id(source.sampler)
    try:
        held = weakref.ref(source.sampler, lambda gone: _forget(key, gone))
    except TypeError:
        return  # A list, say, which many may iterate at a time.
    _LATEST[key] = _Claim(held, None if run is None else weakref.ref(run), weakref.ref(source))


def _forget(key: int, gone: weakref.ref[Any]) -> None:
    # Another sampler may stand at the same address by now.
    if key in _LATEST and _LATEST[key].sampler is gone:
        del _LATEST[key]


def is_claimed(source: UserSampler, run: Winding) -> bool:
    """Whether no other run of the sampler has begun since, and nobody has looked into it."""
    found = _LATEST.get(id(source.sampler))
    return found is None or (found.run is not None and found.run() is run)


def take_over(source: UserSampler) -> None:
    """Have the sampler as it was found: an earlier run of it, which may be in the middle of a pass, begins again."""
    found = _LATEST.get(id(source.sampler))
    if found is None:
        return
    before = found.source()
    if before is not None:
        before.put_back()
    claim(source, None)
