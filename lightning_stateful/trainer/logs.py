"""Logs samples served of every source, and their padding, to the trainer's loggers.

Every rank computes the same numbers, so nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from lightning_stateful.bucketing.order import BucketEpochPlan, BucketOrder
from lightning_stateful.bucketing.padding import measure
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.trainer import loop_progress
from lightning_stateful.trainer.lightning import pl


def log_data(trainer: pl.Trainer, pl_module: pl.LightningModule, combined: CombinedLoaders) -> None:
    """After a batch, log what has been served and how it was padded, in the steps in which the trainer logs at all."""
    if not trainer._logger_connector.should_update_logs:
        return
    epoch, step = loop_progress.next_step(trainer)
    values = _padding_at(combined, epoch, step - 1)
    for path, report in combined.report_at(epoch, step).items():
        values |= _served(path, report)
    if values:
        # In double precision, because counts soon exceed what single precision can tell apart. The batch size weighs
        # averages over an epoch, of which there are none here.
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        pl_module.log_dict(exact, on_step=True, on_epoch=False, batch_size=1)


def _padding_at(combined: CombinedLoaders, epoch: int, step: int) -> dict[str, float]:
    """Values to log of the padding of a step on all ranks, of loaders with a budget; of several, with their paths."""
    values: dict[str, float] = {}
    for path, loader in combined.loaders.items():
        if not isinstance(loader.order, BucketOrder):
            continue
        # Of an exhausted loader nothing: zeros, lest its last figures be logged again.
        plan, first = combined.plan_at(path, epoch, step)
        padding = measure(cast(BucketEpochPlan, plan), first, min(first + 1, plan.num_steps))
        prefix = f"padding/{path}" if path else "padding"
        values[f"{prefix}/share"] = padding.padding()
        values[f"{prefix}/tokens"] = int(padding.tokens.sum())
        values[f"{prefix}/budget_use"] = padding.budget_use(loader.order.budget)
    return values


def _served(path: str, report: Mapping[str, Any]) -> dict[str, float]:
    """Values to log of every source of a loader, and of what is packed; none of other data."""
    prefix = f"/{path}" if path else ""
    values = {
        f"sources{prefix}/{name}/{what}": value
        for name, counts in report.get("sources", {}).items()
        for what, value in counts.items()
    }
    packed = {name: report[name] for name in ("tokens", "documents", "cut", "padding") if name in report}
    return values | {f"packed{prefix}/{what}": value for what, value in packed.items()}
