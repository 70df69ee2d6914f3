"""Whether loaders are this toolkit's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stateful.loaders.origins import is_lightnings
from lightning_stateful.loaders.stateful_loader import StatefulLoader
from lightning_stateful.loaders.stream_loader import StreamLoader

# What the toolkit makes of a DataLoader.
AnyLoader = StatefulLoader | StreamLoader


def is_patched(loaders: Any) -> bool:
    """Whether what would be iterated is a loader of this package, everywhere in a structure.

    Args:
        loaders: A loader, or lists, tuples, dicts and ``CombinedLoader`` of them, nested in any way; also what Fabric's
            ``setup_dataloaders`` and the callback make of a StatefulLoader.

    Returns:
        True if there is at least one loader and all are. A DataLoader that only has a sampler of this package is none:
        what its workers fetch ahead would count as trained on.
    """
    leaves = list(_leaves(loaders))
    return bool(leaves) and all(isinstance(leaf, (StatefulLoader, StreamLoader)) for leaf in leaves)


def _leaves(loaders: Any) -> Any:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    elif _is_lightnings(loaders, "CombinedLoader"):
        loaders = loaders.iterables
    if isinstance(loaders, (Mapping, list, tuple)) or _is_lightnings(loaders, "CombinedLoader"):
        for part in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _leaves(part)
    elif _is_lightnings(loaders, "_FabricDataLoader"):
        yield from _leaves(loaders._dataloader)
    else:
        yield getattr(loaders, "loader", None) if getattr(type(loaders), "is_view", False) is True else loaders


def _is_lightnings(value: Any, name: str) -> bool:
    return is_lightnings(value) and type(value).__name__ == name
