"""Makes a Trainer resume exactly: the callback, and what it puts between Lightning's loops and their loaders."""

from lightning_stateful.trainer.callback import StatefulDataCallback

__all__ = ["StatefulDataCallback"]
