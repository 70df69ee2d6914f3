"""Data modules for ``verify``: some that are right, and each kind of fault once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler


class Images(Dataset[Any]):
    """Samples that are augmented by torch's global generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index)) + torch.rand(3), "y": index % 3}


class Plain(pl.LightningDataModule):
    """What most users have."""

    dataset: Any = Images

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.data = self.dataset()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=10)


class Unseeded(Plain):
    """Noise of a generator that is made for each sample, of the system's entropy."""

    class dataset(Images):  # noqa: N801
        def __getitem__(self, index: int) -> Any:
            return index + np.random.default_rng().normal()


class Timed(Plain):
    """A sample that depends on when it is read."""

    class dataset(Images):  # noqa: N801
        def __getitem__(self, index: int) -> Any:
            return torch.tensor([float(index), time.time() % 1000])


class Unsorted(Plain):
    """An order of classes that is that of a set of strings."""

    class dataset(Images):  # noqa: N801
        def __init__(self) -> None:
            names = [f"class {number}" for number in range(20)]
            self.label = {name: number for number, name in enumerate(set(names))}
            self.of = dict(zip(range(40), names * 2, strict=True))

        def __getitem__(self, index: int) -> Any:
            return index, self.label[self.of[index]]


class Hardest(Sampler[int]):
    """Draws by weights that training changes."""

    def __init__(self) -> None:
        self.weights = torch.ones(40)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        yield from torch.multinomial(self.weights, 40, replacement=True).tolist()


class Learning(Plain):
    """A sampler that learns from batches."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.sampler = Hardest()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, sampler=self.sampler)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.sampler.weights[batch["x"][:, 0].long().clamp(max=39)] *= 3
        return batch


class Moving(IterableDataset[Any]):
    """Its ``__iter__`` moves on the position that its state says."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        self.position += 4
        while self.position < 84:
            self.position += 1
            yield torch.tensor([self.position])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Iterated(Plain):
    """State that advances in ``__iter__``."""

    def train_dataloader(self) -> Any:
        return DataLoader(Moving(), batch_size=4)


class Holding:
    """Reads batches ahead, and begins the next epoch with those that it still holds."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.held = loader, []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.held.append(batch)
            if len(self.held) > 3:
                yield self.held.pop(0)


class Prefetching(Plain):
    """Batches that a wrapper holds."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.loader = Holding(DataLoader(self.data, batch_size=4, shuffle=True))

    def train_dataloader(self) -> Any:
        return self.loader


def names_of(batch: Any) -> Any:
    """The samples of a batch of a stream."""
    return batch["id"]


class Listed(Plain):
    """Samples in the order in which a folder is listed."""

    class dataset(Images):  # noqa: N801
        def __init__(self) -> None:
            found = (path.stem for path in Path(os.environ["VERIFY_FOLDER"]).iterdir())
            self.ids = [int(name) for name in found if name.isdigit()]

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([self.ids[index]])


class Split(Plain):
    """A split that nobody seeds."""

    def setup(self, stage: str) -> None:
        self.data = torch.utils.data.random_split(Images(), [30, 10])[0]


class Hanging(Plain):
    """One sample of the second epoch never comes."""

    class dataset(Images):  # noqa: N801
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            if self.reads > 60:
                time.sleep(1000)
            return index


class Loaders(pl.LightningModule):
    """A model that brings its loaders."""

    def train_dataloader(self) -> Any:
        return {"a": loader, "b": DataLoader(range(12), batch_size=2)}


loader = DataLoader(Images(), batch_size=4, shuffle=True)


def fails() -> Any:
    raise KeyError("no such table")
