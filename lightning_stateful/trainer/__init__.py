"""Floor 3: the only package that imports lightning."""

from lightning_stateful.trainer.callback import StatefulDataCallback
from lightning_stateful.trainer.datamodule import StatefulDataModule

__all__ = ["StatefulDataCallback", "StatefulDataModule"]
