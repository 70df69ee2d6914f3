"""What has been served of every source, in the trainer's loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch


def log_sources(pl_module: pl.LightningModule, report: Mapping[str, Any]) -> None:
    """Log a position report through ``pl_module.log``, in the steps in which the trainer logs at all.

    Every rank computes the same numbers, so nothing is gathered.
    """
    values = dict(_flat("sources", report))
    if values:
        # The batch size weighs averages over an epoch, of which there are none here.
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)


def logs_now(trainer: pl.Trainer) -> bool:
    """Whether the trainer logs this step."""
    return trainer._logger_connector.should_update_logs


def _flat(prefix: str, report: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if "sources" not in report:
        # One report a loader; those of a single dataset have no sources.
        for path, part in report.items():
            if isinstance(part, Mapping):
                yield from _flat(f"{prefix}/{path}", part)
        return
    for name, counts in report["sources"].items():
        for what, value in counts.items():
            # In double precision, because counts soon exceed what single precision can tell apart.
            yield f"{prefix}/{name}/{what}", torch.tensor(value, dtype=torch.float64)
