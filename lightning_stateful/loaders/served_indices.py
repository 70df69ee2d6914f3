"""The ``sampler`` and ``batch_sampler`` of a loader: the indices that a rank is served, and the user's attributes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from lightning_stateful.core.order import SampleCountingPlan
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders.planned_batches import known_steps
from lightning_stateful.samplers.tracker import Tracker


class ServedIndices(DistributedSampler[Any]):
    """The loader's ``sampler`` or ``batch_sampler``: what this rank is served in the current pass, from its beginning.

    It is a DistributedSampler by type, so that Lightning and Fabric see that the ranks are taken care of. The epoch
    that they set here only counts their ``iter()`` calls, and is ignored. Everything else is the user's own sampler's.

    Where the user's sampler ``is_iterated``, what is set on that comes into force. ``flat`` are the indices of batches
    one by one.
    """

    def __init__(self, tracker: Tracker, users: Any, *, flat: bool = False, is_iterated: bool = True) -> None:
        vars(self).update(_tracker=tracker, _users=users, _flat=flat, _is_iterated=is_iterated)

    def __iter__(self) -> Iterator[Any]:
        batches = (batch for _, batch in self._tracker.current_plan().batches(self._tracker.topology.rank))
        return chain.from_iterable(batches) if self._flat else batches

    def __len__(self) -> int:
        plan = self._tracker.plan_epoch(self._tracker.latest_epoch)
        if not self._flat:
            return known_steps(plan)
        if not isinstance(plan, SampleCountingPlan):
            raise TypeError("The samples of whole batches are counted only when they are served.")
        return plan.num_samples(self._tracker.topology.rank)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader's own :meth:`StatefulLoader.set_epoch` decides."""

    def __getattr__(self, name: str) -> Any:
        users = vars(self).get("_users")
        if users is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(users, name)

    def __setattr__(self, name: str, value: Any) -> None:
        users = self._users
        if users is not None and not self._is_iterated:
            _warn_of(f"{name} of {type(users).__qualname__}")
        if users is None:
            super().__setattr__(name, value)
        else:
            setattr(users, name, value)


class CutArguments:
    """The arguments of a loader's ``BatchSampler`` of torch's, which are read once; warns where one is set later."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._known = batches, self._present(batches)

    @staticmethod
    def _present(batches: Any) -> dict[str, Any]:
        return dict(vars(batches)) if type(batches) is BatchSampler else {}

    def compare(self) -> None:
        """Warn of what was set since."""
        known, self._known = self._known, self._present(self._batches)
        if changed := [name for name, value in self._known.items() if known.get(name) is not value]:
            _warn_of(f"{', '.join(changed)} of BatchSampler")


def _warn_of(what: str) -> None:
    warnings.warn(
        f"{what} was set on a patched loader, which has read it before, so it has no effect. Make a new loader with "
        "the new value, or give it a sampler or batch sampler class of your own, which is iterated.",
        StatefulWarning,
        stacklevel=3,
    )
