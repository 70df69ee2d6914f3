"""Floor 3: the only package that imports lightning."""

from lightning_stateful.trainer.bucket_module import BucketDataModule
from lightning_stateful.trainer.callback import StatefulDataCallback
from lightning_stateful.trainer.datamodule import StatefulDataModule
from lightning_stateful.trainer.source_modules import MixtureDataModule, RoundRobinDataModule
from lightning_stateful.trainer.stream_module import StreamDataModule

__all__ = [
    "BucketDataModule",
    "MixtureDataModule",
    "RoundRobinDataModule",
    "StatefulDataCallback",
    "StatefulDataModule",
    "StreamDataModule",
]
