"""What has been served of every source, and how it was padded, in the trainer's loggers.

Every rank computes the same numbers, so nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_stateful.bucketing.budget import Budget
from lightning_stateful.bucketing.padding import StepPadding
from lightning_stateful.trainer import loop_progress
from lightning_stateful.trainer.lightning import pl
from lightning_stateful.trainer.train_loaders import Settings, TrainLoaders


def log_data(trainer: pl.Trainer, pl_module: pl.LightningModule, data: TrainLoaders, settings: Settings) -> None:
    """After a batch, log what has been served and how it was padded, in the steps in which the trainer logs at all."""
    if not settings.log_data or not trainer._logger_connector.should_update_logs:
        return
    epoch, step = loop_progress.next_step(trainer)
    values = {**_flat("sources", data.report_at(epoch, step)), **_padding(data.padding_at(epoch, step - 1))}
    if values:
        # In double precision, because counts soon exceed what single precision can tell apart. The batch size weighs
        # averages over an epoch, of which there are none here.
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        pl_module.log_dict(exact, on_step=True, on_epoch=False, batch_size=1)


def _padding(steps: Mapping[str, tuple[StepPadding, Budget]]) -> dict[str, float]:
    """How a step's batches were padded: of one loader as ``padding/...``, of several with their paths."""
    values: dict[str, float] = {}
    for path, (step, budget) in steps.items():
        prefix = f"padding/{path}" if path else "padding"
        values[f"{prefix}/share"] = step.padding()
        values[f"{prefix}/tokens"] = int(step.tokens.sum())
        values[f"{prefix}/budget_use"] = step.budget_use(budget)
    return values


def _flat(prefix: str, report: Mapping[str, Any]) -> dict[str, float]:
    """What every source has served, by path; of several loaders, each has a report."""
    if "sources" in report:
        return {
            f"{prefix}/{name}/{what}": value
            for name, counts in report["sources"].items()
            for what, value in counts.items()
        }
    # Those of a single dataset have no sources.
    parts = [_flat(f"{prefix}/{path}", part) for path, part in report.items() if isinstance(part, Mapping)]
    return {name: value for part in parts for name, value in part.items()}
