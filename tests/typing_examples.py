"""What users write, checked by mypy in strict mode: the public types are part of the interface."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_stateful import (
    StatefulDataCallback,
    StatefulDataModule,
    StatefulDistributedSampler,
    StatefulLoader,
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


class Images(StatefulDataModule):
    def setup(self, stage: str) -> None:
        self.train = TensorDataset(torch.arange(8))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(4)))


module: StatefulDataModule = Images(batch_size=4, accept=("seed",))
callback: StatefulDataCallback = StatefulDataCallback(seed=1)
