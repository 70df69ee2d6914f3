"""Code as users write it, checked by mypy in strict mode: the public types are part of the interface."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_stateful import (
    BucketBatchSampler,
    BucketDataModule,
    Budget,
    DDPSamplerWrapper,
    QuadraticCost,
    StatefulDataCallback,
    StatefulDataModule,
    StatefulDistributedSampler,
    StatefulLoader,
    is_patched,
    patch_dataloader,
)


def plain_loop() -> dict[str, Any]:
    loader = StatefulLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True, num_workers=0, seed=3)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(1)
    for batch in loader:
        print(batch, len(loader), loader.epoch)
    return loader.state_dict()


def sampler() -> DataLoader[Any]:
    own: StatefulDistributedSampler = StatefulDistributedSampler(8, num_replicas=2, rank=0)
    return DataLoader(TensorDataset(torch.arange(8)), sampler=own)


def lengths(sample: list[int]) -> int:
    return len(sample)


def buckets() -> int:
    own = BucketBatchSampler(
        [3, 1, 2], budget=Budget(max_tokens=8, cost=QuadraticCost(4)), boundaries="equal_counts", num_buckets=2
    )
    BucketBatchSampler(torch.arange(8), batch_size=4, boundaries=[4, 8], accept=("seed",))
    BucketBatchSampler("lengths.npy", batch_size=2, num_buckets=20)
    BucketDataModule([[1], [2, 3]], lengths=lengths, max_tokens=4, log_data=True, num_workers=2)
    return sum(len(batch) for batch in own)


def any_sampler() -> bool:
    tensors = TensorDataset(torch.arange(8))
    wrapped = DDPSamplerWrapper([[0, 1], [2, 3]], 2, 0, tail="pad", length=2, shuffle_samples_between_gpus=True)
    loader = patch_dataloader(DataLoader(tensors, batch_sampler=wrapped), seed=1)
    loader.load_state_dict(loader.state_dict())
    return is_patched([loader, {"val": loader}]) and wrapped.epoch == loader.epoch


class Images(StatefulDataModule):
    def setup(self, stage: str) -> None:
        self.train = TensorDataset(torch.arange(8))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(4)))


module: StatefulDataModule = Images(batch_size=4, accept=("seed",))
callback: StatefulDataCallback = StatefulDataCallback(seed=1)
