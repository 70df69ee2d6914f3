"""Warns of changes that hooks of a resumed epoch make anew, where each may build on the one before the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import Subset

from lightning_stateful.contents.dataset_content import PATH
from lightning_stateful.core.order import BatchOrder
from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.attributes import attributes_of, is_users
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts
from lightning_stateful.samplers.fingerprint import as_array, is_plain_tensor
from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler

# Items of a list up to which it is looked at.
_MOST_ITEMS = 2**20


def warn_of_same_change(order: WrappedSampler, earlier: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> None:
    """Warn of a sampler that hooks of the first epoch here have changed to what it was in an earlier one.

    Args:
        order: The sampler.
        earlier: What had changed when the checkpoint was written, and by the first change in that run.
        now: What was as built when training began here, and has changed since.
    """
    names = [name for name, value in now.items() if value != "changed" and not name.startswith(PATH)]
    if order.has_set_epoch:
        # The epoch that it was told decides.
        names = [name for name in names if not name.endswith("sampler.length")]
    # One that goes by the epoch would hardly be what it was before.
    if names := [name for name in names if now[name] in [changes.get(name) for changes in earlier]]:
        shown = ", ".join(f"{name} {now[name]}" for name in names)
        rank_zero_warn(
            f"{type(order.sampler).__qualname__} was as built when training began here, and a hook has then changed it "
            f"to what it was in an earlier epoch, before the checkpoint ({shown}). If the change builds on the one "
            "before it, as sampler.weights *= 0.9, the resume is not exact: save the value, and restore it before the "
            "first batch, in load_state_dict or on_train_start. Ignore this if the hook sets the same value each time.",
            category=StatefulWarning,
        )


def say_third_values(
    order: WrappedSampler, saved: Mapping[str, Any], first: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Log what was set on a sampler as training began here, and is neither as built nor as in the checkpoint.

    It is no warning: a hook may have set it for the next epoch, and the one that wrote the checkpoint not yet.

    Args:
        order: The sampler.
        saved: What had changed when the checkpoint was written.
        first: What had changed as training began here, behind all hooks that restore.
        now: What has changed by now.
    """
    names = [name for name, value in first.items() if name in saved and value not in (saved[name], "changed")]
    if names := [name for name in names if now.get(name) == first[name]]:
        said = ", ".join(f"{name} was {saved[name]} and is {first[name]}" for name in names)
        rank_zero_info(
            f"{type(order.sampler).__qualname__} had been changed when the checkpoint was written, and was changed to "
            f"something else before the first batch here ({said}). That is exact if hooks set it by the epoch alone; "
            "else restore all of it, in load_state_dict of a callback or in on_train_start."
        )


class HeldLists:
    """The lists and arrays that a dataset and a sampler hold, as they are now.

    Args:
        dataset: The dataset.
        order: Its order, perhaps of a user's sampler.
    """

    def __init__(self, dataset: Any, order: BatchOrder) -> None:
        self._dataset, self._sampler = dataset, getattr(order, "sampler", None)
        self._noted = {name: (held, _items(held)) for name, held in self._held()}

    def shuffled(self) -> list[str]:
        """The names of those that have the same items in another order by now, and are the same objects."""
        return [
            name
            for name, held in self._held()
            if name in self._noted and held is self._noted[name][0] and _is_shuffled(self._noted[name][1], _items(held))
        ]

    def _held(self) -> Iterator[tuple[str, Any]]:
        dataset, owners = self._dataset, []
        while isinstance(dataset, Subset):
            owners.append(dataset)
            dataset = dataset.dataset
        samplers = [] if self._sampler is None else SamplerParts(self._sampler, dataset).samplers
        for owner in (*owners, dataset, *samplers):
            kind = type(owner).__qualname__
            held = attributes_of(owner) if is_users(type(owner).__module__) or isinstance(owner, Subset) else {}
            for name, value in ({kind: owner} | {f"{kind}.{name}": value for name, value in held.items()}).items():
                if _is_list(value):
                    yield name, value


def _is_list(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return is_plain_tensor(value) and value.dim() == 1 and len(value) <= _MOST_ITEMS
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and len(value) <= _MOST_ITEMS
    return type(value) is list and len(value) <= _MOST_ITEMS


def _items(held: Any) -> Any:
    """Its items; of a list their ids, as they may be anything."""
    if isinstance(held, list):
        return list(map(id, held))
    return np.array(as_array(held) if isinstance(held, torch.Tensor) else held)


def _is_shuffled(before: Any, now: Any) -> bool:
    if isinstance(before, list):
        return before != now and Counter(before) == Counter(now)
    is_other = before.shape == now.shape and not np.array_equal(before, now)
    return is_other and np.array_equal(np.sort(before), np.sort(now))


def warn_of_shuffled_lists(names: list[str]) -> None:
    """Warn of lists that a hook of the first epoch here has shuffled in place, and nobody had restored."""
    if names:
        rank_zero_warn(
            f"{some_of(names)} was as built when training began here, and was not when the checkpoint was written; a "
            "hook has then shuffled it in place. Each such shuffle builds on the one before it, so the resume is not "
            "exact, unless the hook brings it into the same order first. Save the list, and restore it before the "
            "first batch, in load_state_dict of a callback; or make a new one from the epoch, as by "
            "random.Random(epoch).sample(range(n), n).",
            category=StatefulWarning,
        )
