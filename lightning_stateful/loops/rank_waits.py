"""Counts of EarlyStopping and ReduceLROnPlateau on each rank, of a checkpoint that has those of rank 0 alone.

They differ where what is monitored is logged without ``sync_dist=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loops.lightning import EarlyStopping, pl
from lightning_stateful.loops.other_callbacks import callbacks_of

# By callback or scheduler: the best value, and how often there was none better.
Waits = dict[str, list[float]]


def waits_of(trainer: pl.Trainer) -> Waits:
    """What this rank has counted; nothing on a single one."""
    if trainer.world_size == 1:
        return {}
    waits = {key: [float(one.best_score), one.wait_count] for key, one in _early_stoppings(trainer).items()}
    for number, config in enumerate(trainer.lr_scheduler_configs):
        scheduler: Any = config.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            waits[f"ReduceLROnPlateau {number} of {config.monitor!r}"] = [
                float(scheduler.best),
                scheduler.num_bad_epochs,
            ]
    return waits


def go_on_waiting(trainer: pl.Trainer, of_ranks: Sequence[Waits | None]) -> None:
    """Give every EarlyStopping what it had counted on this rank.

    Args:
        trainer: The trainer.
        of_ranks: What each rank had counted; None where that is not known.

    Warns:
        StatefulWarning: Ranks had counted otherwise, and all go on with what rank 0 had.
    """
    is_known = len(of_ranks) == trainer.world_size and None not in of_ranks
    own = of_ranks[trainer.global_rank] if is_known else None
    restored = {key: one for key, one in _early_stoppings(trainer).items() if own and key in own}
    for key, callback in restored.items():
        best, callback.wait_count = (own or {})[key]
        callback.best_score = torch.full_like(callback.best_score, best)
    differing = {key for waits in of_ranks for key in _unlike(of_ranks[0] or {}, waits or {})} - restored.keys()
    if differing:
        rank_zero_warn(
            f"The ranks have waited differently long in {', '.join(sorted(differing))}, or that is not known of all of "
            "them: what is monitored is logged without sync_dist=True. The checkpoint has the state of rank 0, with "
            "which all ranks go on: they may stop, or change the learning rate, otherwise than without the stop. Log "
            "it with sync_dist=True.",
            category=StatefulWarning,
        )


def _unlike(one: Waits, other: Waits) -> set[str]:
    # As text, by which nan is nan.
    return {key for key, waits in one.items() if repr(waits) != repr(other.get(key))}


def _early_stoppings(trainer: pl.Trainer) -> dict[str, Any]:
    callbacks = callbacks_of(trainer)
    return {one.state_key: one for one in callbacks if isinstance(one, EarlyStopping)}
