"""Whether Lightning trains on the loaders that it was given."""

from __future__ import annotations

from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loaders.patched import is_patched
from lightning_stateful.trainer.lightning import pl
from lightning_stateful.trainer.training_data import TrainingData


def check_in_use(trainer: pl.Trainer, data: TrainingData | None) -> None:
    """Make sure that the fit loop's loaders are those taken over, and not others that something put in their place.

    Raises:
        ConfigurationError: They are not.
    """
    combined: Any = trainer.fit_loop._combined_loader
    found = [] if combined is None else combined.flattened
    expected = None if data is None else list(data.group.loaders.values())
    if not is_patched(found) or [view.loader for view in found] != expected:
        names = ", ".join(type(loader).__qualname__ for loader in found) or "nothing"
        raise ConfigurationError(
            f"Lightning is about to train on loaders that are not the callback's ({names}): something has replaced "
            "them, or where they come from, after they were set up, and a resume would not be exact. Leave "
            "trainer.fit_loop's loaders alone, and let train_dataloader return what is to be trained on."
        )
