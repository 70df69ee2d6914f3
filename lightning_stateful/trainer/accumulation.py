"""How many batches a trainer accumulates gradients over."""

from __future__ import annotations

from lightning_stateful.trainer.lightning import GradientAccumulationScheduler, pl


def longest_accumulation(trainer: pl.Trainer) -> int:
    """Batches of the longest window of accumulated gradients, whatever the epoch."""
    windows = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if isinstance(callback, GradientAccumulationScheduler):
            windows += callback.scheduling.values()
    return max(windows)
