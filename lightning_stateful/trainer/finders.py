"""Callbacks that train a while before training and then start over: not on a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.trainer.lightning import BatchSizeFinder, LearningRateFinder, pl

# What the finders call the file that they restore from themselves.
_OWN_FILES = (".lr_find", ".scale_batch_size")


def refuse_finders(trainer: pl.Trainer) -> None:
    """Refuse a finder in a resumed run: it would throw the restored progress away without a word.

    Raises:
        ConfigurationError: A LearningRateFinder or BatchSizeFinder is among the callbacks.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    finders = [type(found).__name__ for found in callbacks if isinstance(found, (LearningRateFinder, BatchSizeFinder))]
    if finders and not Path(str(trainer.ckpt_path)).name.startswith(_OWN_FILES):
        raise ConfigurationError(
            f"{' and '.join(finders)} would restart the run that ckpt_path={trainer.ckpt_path!r} is to resume, from "
            "its first step. Leave it out when you resume; what it found is in the checkpoint or its log."
        )
