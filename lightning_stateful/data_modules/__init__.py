"""Data modules for Lightning whose training data resume exactly."""

from lightning_stateful.data_modules.bucket_module import BucketDataModule
from lightning_stateful.data_modules.packed_module import PackedDataModule
from lightning_stateful.data_modules.source_modules import MixtureDataModule, RoundRobinDataModule
from lightning_stateful.data_modules.stateful_module import StatefulDataModule
from lightning_stateful.data_modules.stream_module import StreamDataModule

__all__ = [
    "BucketDataModule",
    "MixtureDataModule",
    "PackedDataModule",
    "RoundRobinDataModule",
    "StatefulDataModule",
    "StreamDataModule",
]
