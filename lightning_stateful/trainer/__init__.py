"""Makes a Trainer resume exactly: the callback, and what it puts between Lightning's loops and their loaders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_stateful.trainer.callback import StatefulDataCallback

__all__ = ["StatefulDataCallback"]


def __getattr__(name: str) -> Any:
    # The command reads checkpoints by saved_progress.py, without Lightning.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.callback"), name)
