"""Samplers and batch samplers with a state, for torch's DataLoader and for this package's loaders."""

from lightning_stateful.samplers.batch_samplers import BucketBatchSampler, StatefulBatchSampler
from lightning_stateful.samplers.distributed import StatefulDistributedSampler
from lightning_stateful.samplers.fingerprint import describe_dataset
from lightning_stateful.samplers.mixture_samplers import MixtureBatchSampler, RoundRobinBatchSampler
from lightning_stateful.samplers.tracker import Tracker, detect_topology

__all__ = [
    "BucketBatchSampler",
    "MixtureBatchSampler",
    "RoundRobinBatchSampler",
    "StatefulBatchSampler",
    "StatefulDistributedSampler",
    "Tracker",
    "describe_dataset",
    "detect_topology",
]
