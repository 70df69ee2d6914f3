"""Metrics that schedulers and callbacks monitor, carried over a resume.

Lightning does not save metrics. Without them an EarlyStopping or a ReduceLROnPlateau whose metric was logged before the
stop, and is looked at after it, fails or leaves a step out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch


def monitored_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """The latest values of what learning rate schedulers and callbacks monitor, as far as they are known.

    Only what Lightning has already computed: asking it to compute would be a collective.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    names = {getattr(callback, "monitor", None) for callback in callbacks}
    names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    known = trainer._logger_connector._callback_metrics
    return {name: float(known[name]) for name in sorted(filter(None, names)) if name in known}


def restore_metrics(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Put saved values where callbacks and schedulers look, unless there are newer ones."""
    known = trainer._logger_connector._callback_metrics
    for name, value in metrics.items():
        single = torch.tensor(value, dtype=torch.float32)
        exact = single if float(single) == value or value != value else torch.tensor(value, dtype=torch.float64)
        known.setdefault(name, exact.to(trainer.strategy.root_device))
