"""Factories of training data, as the command is told them: ``support.command_data:numbers``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, WeightedRandomSampler

from lightning_stateful import (
    BucketBatchSampler,
    BucketDataModule,
    MixedStream,
    PackedDataModule,
    Packing,
    StatefulDataModule,
)
from support.ledger import Numbers
from support.runs import numbers_module
from support.sources import MODULES
from support.stream_runs import chunks, document, of_sequences
from support.stream_runs import module as stream_module

mixture = MODULES["mixture, steps"]
round_robin = MODULES["round robin"]


def numbers() -> StatefulDataModule:
    return numbers_module()


def other_seed() -> StatefulDataModule:
    return numbers_module(seed=8)


def fewer() -> StatefulDataModule:
    return numbers_module(train=Numbers(20))


def large_batches() -> StatefulDataModule:
    return numbers_module(batch_size=3)


def plain() -> DataLoader[Any]:
    return DataLoader(Numbers(22), batch_size=2, shuffle=True)


def side_by_side() -> dict[str, DataLoader[Any]]:
    return {"a": plain(), "b": DataLoader(Numbers(10), batch_size=2)}


def drawn() -> DataLoader[Any]:
    return DataLoader(Numbers(22), batch_size=2, sampler=WeightedRandomSampler([1.0] * 22, 22))


def buckets() -> BucketDataModule:
    return BucketDataModule(Numbers(40), lengths=[1 + index % 7 for index in range(40)], max_tokens=12, seed=7)


def stream(**options: Any) -> Any:
    return stream_module(chunks(), num_workers=0, **options)


class OwnSampler(StatefulDataModule):
    """Has a seed, and a sampler that was made without one, so that it has the process's default."""

    def __init__(self) -> None:
        super().__init__(seed=7)
        self.batches = BucketBatchSampler([1 + index % 7 for index in range(40)], max_tokens=12)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(40), batch_sampler=self.batches)


def own_sampler() -> StatefulDataModule:
    return OwnSampler()


def mixed_sequences() -> StatefulDataModule:
    """Sequences of two streams, of which the second begins again several times."""
    streams = {"long": chunks(transform=document), "short": chunks((3, 2), 90, transform=document)}
    mixed = MixedStream(streams, weights={"long": 1, "short": 2}, stop="cycle")
    return stream_module(mixed, packing=Packing(12), collate_fn=of_sequences, steps_per_epoch=20, val=None)


def packed() -> StatefulDataModule:
    documents = [[number] * (1 + number % 5) for number in range(40)]
    return PackedDataModule(documents, lengths=len, packing=Packing(8), batch_size=2, seed=7, collate_fn=of_sequences)


def nothing() -> None:
    """A factory that forgets to return."""


number = 3


class Given(IterableDataset[Any]):
    """Samples that nobody divides."""

    def __iter__(self) -> Any:
        data = Numbers(22)
        return iter([data[index] for index in range(22)])


def iterable() -> DataLoader[Any]:
    return DataLoader(Given(), batch_size=2)


def fails() -> Any:
    raise KeyError("no such table")


class Pool(LightningDataModule):
    """Trains on the first samples, of which a hook adds some at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = list(range(8))

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(Numbers(40), list(self.pool)), batch_size=4, shuffle=True)


class KeptPool(Pool):
    """Keeps the samples in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"pool": list(self.pool)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pool = state_dict["pool"]


class TensorPool(Pool):
    """Keeps them in a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"pool": torch.tensor(self.pool)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pool = state_dict["pool"].tolist()


class TrainerPool(KeptPool):
    """Asks its Trainer before it restores them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.trainer.sanity_checking:
            super().load_state_dict(state_dict)


class KeptWeights(LightningDataModule):
    """Draws samples by weights that a hook changes, and keeps them in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0] * 22

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(22), batch_size=4, sampler=WeightedRandomSampler(self.weights, 22))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights = state_dict["weights"]


class FromFirst(Sampler[int]):
    """All samples in order, from one on that a hook sets."""

    first = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return ((self.first + place) % 12 for place in range(12))


def curriculum() -> DataLoader[Any]:
    return DataLoader(Numbers(12), batch_size=4, sampler=FromFirst())
