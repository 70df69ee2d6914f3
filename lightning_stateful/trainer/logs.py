"""Logs where training stands in its data, and what has been served of them, under names that begin with ``data/``.

Every rank computes the same numbers, so nothing is gathered. docs/logs.md has a table of the names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from lightning_stateful.bucketing.order import BucketEpochPlan, BucketOrder
from lightning_stateful.bucketing.padding import measure
from lightning_stateful.core.skip import whole_plan
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loops import loop_progress
from lightning_stateful.loops.lightning import pl

# Entries of a report of packed documents that stand together; their tokens are counted with those of other data.
_PACKED = ("documents", "cut", "padding")


def log_data(trainer: pl.Trainer, pl_module: pl.LightningModule, combined: CombinedLoaders) -> None:
    """After a batch, log position, counts and padding, in the steps in which the trainer logs at all."""
    if not trainer._logger_connector.should_update_logs:
        return
    epoch, step = loop_progress.next_step(trainer)
    values = {**_position(trainer, epoch, step), **_padding_at(combined, epoch, step - 1)}
    for path, report in combined.report_at(epoch, step).items():
        values |= _counts(_name("data", path), report)
    # In double precision, because counts soon exceed what single precision can tell apart. The batch size weighs
    # averages over an epoch, of which there are none here.
    exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    pl_module.log_dict(exact, on_step=True, on_epoch=False, batch_size=1)


def _name(*parts: str) -> str:
    return "/".join(filter(None, parts))


def _position(trainer: pl.Trainer, epoch: int, step: int) -> dict[str, float]:
    """The epoch, the batches of it that were trained on, and the fraction that these are of all where that is known."""
    length = trainer.num_training_batches
    of_all = {"data/fraction": step / length} if length and math.isfinite(length) else {}
    return {"data/epoch": epoch, "data/batch": step, **of_all}


def _padding_at(combined: CombinedLoaders, epoch: int, step: int) -> dict[str, float]:
    """Values to log of the padding of a step on all ranks, of loaders with a budget."""
    values: dict[str, float] = {}
    for path, loader in combined.loaders.items():
        if not isinstance(loader.order, BucketOrder):
            continue
        # Of an exhausted loader nothing: zeros, lest its last figures be logged again.
        plan, first = whole_plan(*combined.plan_at(path, epoch, step))
        padding = measure(cast(BucketEpochPlan, plan), first, min(first + 1, plan.num_steps))
        prefix = _name("data", path, "padding")
        values[f"{prefix}/share"] = padding.padding()
        values[f"{prefix}/tokens"] = int(padding.tokens.sum())
        values[f"{prefix}/budget_use"] = padding.budget_use(loader.order.budget)
    return values


def _counts(prefix: str, report: Mapping[str, Any]) -> dict[str, float]:
    """Values to log of what a loader has served: samples and tokens of all of its sources, and of each."""
    sources: Mapping[str, Mapping[str, float]] = report.get("sources", {})
    is_packed = "documents" in report
    values = {
        _name(prefix, "packed" if is_packed and what in _PACKED else "", what): value
        for what, value in _numbers(report)
        if what != "epoch"
    }
    for what in ("samples", "tokens"):
        if sources and all(what in counts for counts in sources.values()):
            values[f"{prefix}/{what}"] = sum(counts[what] for counts in sources.values())
    for name, counts in sources.items():
        values |= {f"{prefix}/sources/{name}/{what}": value for what, value in _numbers(counts)}
    return values


def _numbers(counts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in a report."""
    return ((what, value) for what, value in counts.items() if isinstance(value, (int, float)))
