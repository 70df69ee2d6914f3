"""Floor 1: orders with a position, as torch samplers. torch only."""

from lightning_stateful.samplers.batch_sampler import StatefulBatchSampler
from lightning_stateful.samplers.buckets import BucketBatchSampler
from lightning_stateful.samplers.cursor import Cursor
from lightning_stateful.samplers.ddp_wrapper import DDPSamplerWrapper
from lightning_stateful.samplers.distributed import StatefulDistributedSampler
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.samplers.sources import MixtureBatchSampler, RoundRobinBatchSampler
from lightning_stateful.samplers.world import detect_topology

__all__ = [
    "BucketBatchSampler",
    "Cursor",
    "DDPSamplerWrapper",
    "MixtureBatchSampler",
    "RoundRobinBatchSampler",
    "StatefulBatchSampler",
    "StatefulDistributedSampler",
    "describe_dataset",
    "detect_topology",
]
