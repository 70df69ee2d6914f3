"""A model that keeps a ledger of everything a run does, ways to read it, and a logger that does the same for steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import Dataset

Event = tuple[Any, ...]


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that know their index and draw one augmentation from torch."""

    def __init__(self, length: int, *, first: int = 0, fail_at: int | None = None) -> None:
        self.length = length
        self.first = first
        self.fail_at = fail_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.fail_at:
            raise RuntimeError(f"sample {index} cannot be read")
        return {"id": torch.tensor(index + self.first), "x": torch.rand(4) + index / 100}


class LedgerModel(pl.LightningModule):
    """A small network with dropout; ``ledger`` lists what it did, in order.

    A batch has the ids of its samples, features of any shape that ends in four, and perhaps the name of its source. Of
    several loaders it is a list or dict of such batches.
    """

    lr = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1))
        self.ledger: list[Event] = []

    def _ids(self, batch: Any) -> Any:
        if batch is None:
            return None
        if isinstance(batch, dict) and "id" in batch:
            ids, tag = tuple(batch["id"].tolist()), batch.get("source")
            if tag is None:
                return ids
            return (tag if isinstance(tag, str) else tuple(tag), ids)
        if isinstance(batch, dict):
            return tuple((name, self._ids(part)) for name, part in batch.items())
        return tuple(self._ids(part) for part in batch)

    def _loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict) and "x" in batch:
            features = batch["x"].reshape(len(batch["x"]), -1, 4).mean(1)
            return self.net(features).square().mean()
        parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
        return torch.stack([self._loss(part) for part in parts if part is not None]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        self.ledger.append(("train", self.current_epoch, batch_idx, self.global_step, self._ids(batch)))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            self.ledger.append(("val", self.current_epoch, batch_idx, self.global_step, self._ids(batch)))
        # Lightning knows the size of a batch of one loader.
        self.log("val_loss", self._loss(batch), batch_size=None if "id" in batch else 1)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ledger.append(("test", batch_idx, self._ids(batch)))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.ledger.append(("predict", batch_idx, self._ids(batch)))
        return batch["id"]

    def on_train_epoch_start(self) -> None:
        self.ledger.append(("epoch start", self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.ledger.append(("epoch end", self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Asks(LedgerModel):
    """Asks for the number of steps as people do for their schedules: before any state is restored."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def trained(ledger: list[Event]) -> list[Event]:
    """The training steps of a ledger."""
    return [event for event in ledger if event[0] == "train"]


def ids_of(event: Event) -> tuple[int, ...]:
    """The samples of a step, whether its batch has a source or not."""
    batch = event[-1]
    return batch[1] if len(batch) == 2 and isinstance(batch[1], tuple) else batch


def batches(ledger: list[Event], epoch: int | None = None, stage: str = "train") -> list[Any]:
    """The samples of every batch trained on, in one epoch or in all; or of those of another stage."""
    return [ids_of(event) for event in ledger if event[0] == stage and epoch in (None, event[1])]


def samples(ledger: list[Event], epoch: int | None = None, stage: str = "train") -> list[int]:
    """The same samples without the borders of batches."""
    return [index for batch in batches(ledger, epoch, stage) for index in batch]


def parts(ledger: list[Event], name: str, epoch: int | None = None) -> list[Any]:
    """The batches that one of several loaders, in a dict, gave to every training step."""
    return [dict(event[4])[name] for event in trained(ledger) if epoch in (None, event[1])]


class StepLogger(DummyLogger):
    """Remembers the step of everything that is logged, and what is logged about sources and about padding."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, int]] = []
        self.sources: list[tuple[int, dict[str, float]]] = []
        self.padding: list[tuple[int, dict[str, float]]] = []
        self.packed: list[dict[str, float]] = []
        self.data: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        name = "val" if "val_loss" in metrics else "train"
        self.steps.append((name, step))
        data = {key.removeprefix("data/"): value for key, value in metrics.items() if key.startswith("data/")}
        if data:
            self.data.append((step, data))
        sources = {key.replace("sources/", ""): value for key, value in data.items() if "sources/" in key}
        if sources:
            self.sources.append((step, sources))
        padding = {key: value for key, value in data.items() if "padding/" in key}
        if padding:
            self.padding.append((step, padding))
        packed = {key.removeprefix("packed/"): value for key, value in data.items() if key.startswith("packed/")}
        if packed:
            self.packed.append({"tokens": data["tokens"], **packed})
