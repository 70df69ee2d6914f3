"""Metrics that schedulers and callbacks monitor, carried over a resume.

Lightning does not save metrics. Without them an EarlyStopping or a ReduceLROnPlateau whose metric was logged before the
stop, and is looked at after it, fails or leaves a step out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_stateful.trainer.lightning import pl


def monitored_metrics(trainer: pl.Trainer, *, epoch_ended: bool = False) -> dict[str, float]:
    """The latest values of what learning rate schedulers and callbacks monitor, as far as they are known.

    Args:
        trainer: The trainer.
        epoch_ended: All batches of the running epoch are done, so that its averages can be known. Over several ranks
            they would take a collective, which a state may not, and are left out.
    """
    known = dict(trainer._logger_connector._callback_metrics)
    results: Any = trainer.fit_loop.epoch_loop._results
    if trainer.training:
        # What this step has logged: read, not computed.
        known.update(results.metrics(True)["callback"])
    if epoch_ended and trainer.world_size == 1:
        known.update(results.metrics(False)["callback"])
    elif epoch_ended:
        # Known are only those of an epoch before.
        averaged = {metric.meta.name for _, metric in results.valid_items() if metric.meta.on_epoch}
        known = {name: value for name, value in known.items() if name not in averaged}
    return {name: float(known[name]) for name in sorted(_monitors(trainer)) if name in known}


def _monitors(trainer: pl.Trainer) -> set[str]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    names = {getattr(callback, "monitor", None) for callback in callbacks}
    names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    return {name for name in names if isinstance(name, str)}


def restore_metrics(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Put saved values where callbacks and schedulers look, unless there are newer ones."""
    known = trainer._logger_connector._callback_metrics
    for name, value in metrics.items():
        single = torch.tensor(value, dtype=torch.float32)
        exact = single if float(single) == value or value != value else torch.tensor(value, dtype=torch.float64)
        known.setdefault(name, exact.to(trainer.strategy.root_device))
