"""Loaders with other people's samplers under the callback, in one process and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed
from lhotse import CutSet
from lhotse.dataset.sampling import SimpleCutSampler
from lhotse.testing.dummies import dummy_cut
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as TorchdataDistributedSampler

from lightning_stateful import StatefulDataCallback
from support import samplers
from support.ledger import LedgerModel, Numbers
from support.runs import Outcome, quiet_trainer, train_alone
from support.samplers import LENGTH

MakeLoaders = Callable[[], Any]

VAL_FIRST = 100


class PlainData(pl.LightningDataModule):
    """A data module that knows nothing of the toolkit, with five samples for validation unless it is told otherwise."""

    def __init__(self, make: MakeLoaders, val: MakeLoaders | None = None) -> None:
        super().__init__()
        self.make, self.val = make, val or val_loader

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return self.val()


class OfCuts(Dataset[Any]):
    """A dataset as lhotse's: it is given a whole set of cuts, and makes a batch of it."""

    def __getitem__(self, cuts: Any) -> Any:
        ids = [int(cut.id.rsplit("-", 1)[-1]) for cut in cuts]
        return {"id": torch.tensor(ids), "x": torch.rand(len(ids), 4) + torch.tensor(ids)[:, None] / 100}


def cuts_loader(num_cuts: int = LENGTH, **options: Any) -> DataLoader[Any]:
    """lhotse's sampler as its documentation uses it; it asks torch for the ranks by itself."""
    cuts = CutSet.from_cuts(dummy_cut(number, duration=1.0 + number % 4) for number in range(num_cuts))
    sampler = SimpleCutSampler(cuts, max_duration=6.0, shuffle=True, seed=3)
    return DataLoader(OfCuts(), sampler=sampler, batch_size=None, **options)


def torchdatas_distributed(batch_size: int = 2) -> DataLoader[Any]:
    """torchdata's sampler as it is built under DDP, where it asks torch for the ranks by itself."""
    asks = torch.distributed.is_initialized()
    ranks = {} if asks else {"num_replicas": 1, "rank": 0}
    return samplers.loader(sampler=TorchdataDistributedSampler(range(LENGTH), seed=3, **ranks), batch_size=batch_size)


def val_loader() -> DataLoader[Any]:
    """Five samples in order."""
    return DataLoader(Numbers(5, first=VAL_FIRST), batch_size=2)


def train_with(make: MakeLoaders, *, settings: dict[str, Any] | None = None, **options: Any) -> Outcome:
    """:func:`train_alone` on loaders that a plain data module makes."""
    return train_alone(lambda: PlainData(make), settings={"seed": 5, **(settings or {})}, **options)


# Evaluation


class Writes(pl.callbacks.BasePredictionWriter):
    """Remembers the indices and predictions that it should write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.batches.append((list(indices or []), prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = batch_indices


# Batches that ranks cannot share evenly, by what is left of them.
TO_EVALUATE: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: samplers.loader(batch_size=3),
    "an odd batch": lambda: samplers.loader(batch_sampler=[[0, 1], [2, 3, 4], [5, 6, 7]]),
    "one sample": lambda: samplers.loader(batch_sampler=[[0, 1], [2, 3, 4], [5]]),
    "one sample after many": lambda: samplers.loader(batch_sampler=[[0, 1], [2, 3, 4], [5, 6], [7], [8]]),
    "one batch": lambda: samplers.loader(batch_sampler=[[0, 1, 2]]),
    "shuffled batches": lambda: samplers.loader(batch_sampler=samplers.ShuffledBatches(samplers.BATCHES[:7])),
    "batches without len": lambda: samplers.loader(batch_sampler=samplers.BatchesWithoutLen()),
    "samples without len": lambda: samplers.loader(sampler=samplers.WithoutLen(), batch_size=3),
    "own state": lambda: samplers.loader(sampler=samplers.OwnState(), batch_size=5),
    "one at a time": lambda: samplers.loader(sampler=samplers.GlobalRandom()),
}


def evaluate(make: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """The samples that the model gets in ``validate``, ``test`` and ``predict``."""
    found: dict[str, Any] = {}
    for stage in ("validate", "test", "predict"):
        writer, model = Writes(), Evaluates()
        trainer = quiet_trainer(StatefulDataCallback(seed=5), writer, **options)
        result = getattr(trainer, stage)(model, dataloaders=make())
        found[stage] = model.batches
        if stage == "predict":
            found["predictions"] = [prediction.tolist() for prediction in result]
            found["written"], found["written at the end"] = writer.batches, writer.epoch
    return found


class Evaluates(LedgerModel):
    """Remembers the samples of every batch that it is to evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.batches.append(batch["id"].tolist())
        return batch["id"]

    validation_step = test_step = predict_step
