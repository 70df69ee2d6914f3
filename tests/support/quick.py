"""Shortens what other packages wait for, or read again and again, and lists of cases."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

# Examples of each property in make test, and in make test-all.
FEW_EXAMPLES, MANY_EXAMPLES = 15, 200


def shorten_waits() -> None:
    """Shorten the waits of those packages that this process has imported.

    torch waits 5 seconds for each worker of an iterator that the garbage collector finds in a cycle, such as that of an
    error's traceback: the worker is never told to end. torchdata's threads ask ten times a second whether to end.
    Lightning looks through all installed packages for each Trainer, and moves all that it knows of a logged value to a
    device whenever that is logged, which takes a fifth of the time of a small run. Here there is one device.
    """
    if "torch.utils.data" in sys.modules:
        sys.modules["torch.utils.data._utils"].MP_STATUS_CHECK_INTERVAL = 0.5  # type: ignore[attr-defined]
        # So often, too, it looks whether workers that say nothing have died.
        sys.modules["torch.utils.data.dataloader"]._MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.5,)
    for name in ("map", "snapshot_store", "_apply_udf", "_populate_queue"):
        if f"torchdata.nodes.{name}" in sys.modules:
            sys.modules[f"torchdata.nodes.{name}"].QUEUE_TIMEOUT = 0.01  # type: ignore[attr-defined]
    registry = sys.modules.get("lightning.fabric.utilities.registry")
    if registry is not None and not hasattr(registry.entry_points, "cache_info"):
        registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
    results = sys.modules.get("lightning.pytorch.trainer.connectors.logger_connector.result")
    if results is not None and not hasattr(results._ResultMetric.to, "moves"):
        results._ResultMetric.to = _staying(results._ResultMetric.to)  # type: ignore[attr-defined]


def _staying(move: Callable[..., Any]) -> Callable[..., Any]:
    """What moves a logged value to a device, but not a tensor to the only device that there is."""

    def to(value: Any, device: Any) -> Any:
        return value if value.is_tensor and str(device) == "cpu" else move(value, device)

    to.moves = move  # type: ignore[attr-defined]
    return to


def is_thorough() -> bool:
    """Whether this is ``make test-all``, by its profile of hypothesis."""
    return settings().max_examples >= MANY_EXAMPLES


def thinned(names: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Cases by name or number for a parametrisation; those in ``slow`` run in ``make test-all`` only."""
    names, slow = list(names), set(slow)
    assert slow <= set(names), slow - set(names)
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
