"""Buffers of a module that no checkpoint holds (``persistent=False``), and that training has changed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.loops.lightning import pl
from lightning_stateful.loops.loop_progress import call_before_epochs
from lightning_stateful.samplers.fingerprint import digest

# Kept with the loop.
_WATCH = "_passing_buffers"
# Numbers in a buffer up to which it is looked at: a metric, a queue.
_MOST_NUMBERS = 2**16


class _Watch:
    """What is known of such buffers in a fit.

    Args:
        saved: What :func:`changed_buffers` gave, of the checkpoint that the run is resumed from.
    """

    def __init__(self, saved: Mapping[str, str]) -> None:
        self.saved = saved
        # Digests as the first epoch began; None before.
        self.begun: dict[str, str] | None = None
        # Of those that are others, as the fit ended.
        self.at_end: dict[str, str] | None = None


def watch(trainer: pl.Trainer, saved: Mapping[str, str] | None) -> None:
    """Begin to follow the buffers; to be called in ``on_train_start``.

    Args:
        trainer: The trainer.
        saved: What :func:`changed_buffers` gave, if the run is resumed from a checkpoint that has it.
    """
    vars(trainer.fit_loop)[_WATCH] = _Watch(saved or {})
    call_before_epochs(trainer, partial(_begin, trainer))


def end_watching(trainer: pl.Trainer) -> None:
    """Undo :func:`watch`, but keep what was changed: the model may be used before another checkpoint is written."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is not None and known.at_end is None:
        known.at_end = changed_buffers(trainer)


def changed_buffers(trainer: pl.Trainer) -> dict[str, str]:
    """Digests of small buffers that no checkpoint holds and that are others than before the first epoch, by name."""
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None:
        return {}
    if known.at_end is not None:
        return known.at_end
    if known.begun is None:
        return dict(known.saved)
    now = _digests(trainer.lightning_module)
    return {name: held for name, held in now.items() if name in known.saved or known.begun.get(name) != held}


def _begin(trainer: pl.Trainer) -> None:
    """Compare with the checkpoint, once: behind the hooks ``on_train_start``, which may restore buffers.

    Warns:
        StatefulWarning: Some are others than at the save.
    """
    known: _Watch | None = vars(trainer.fit_loop).get(_WATCH)
    if known is None or known.begun is not None:
        return
    known.begun = now = _digests(trainer.lightning_module)
    if others := sorted(name for name, held in known.saved.items() if now.get(name) != held):
        rank_zero_warn(
            f"Buffers of the module that no checkpoint holds (persistent=False) had been changed in training when the "
            f"checkpoint was written, and are others here: {some_of(others)}. If training "
            "depends on them, as on a metric that they sum up, the resume is not exact. Register them with "
            "persistent=True, or restore them in on_load_checkpoint or on_train_start.",
            category=StatefulWarning,
        )


def _digests(module: torch.nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for prefix, part in module.named_modules():
        held = vars(part)
        for name in sorted(held.get("_non_persistent_buffers_set", ())):
            buffer = held["_buffers"].get(name)
            if isinstance(buffer, torch.Tensor) and buffer.numel() <= _MOST_NUMBERS:
                found[f"{prefix}.{name}".lstrip(".")] = digest(buffer.detach().cpu())
    return found
