"""Samplers that begin a pass by clearing what training writes outside of them: a save tries them, and leaves that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_stateful import StatefulDataCallback

NUMBER, SIZE = 24, 4
HARD: set[int] = set()
LOSSES = np.zeros(NUMBER)
SEEN: dict[str, list[int]] = {"hard": []}


class Numbers(Dataset[Any]):
    def __init__(self) -> None:
        self.hard: set[int] = set()
        HARD.clear()
        SEEN["hard"].clear()
        LOSSES[:] = 0
        InClass.losses.zero_()

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))

    def forget(self) -> None:
        self.hard.clear()


class InDataset(Sampler[int]):
    """Clears what training writes as a pass begins, and goes by it as it ends."""

    def __init__(self, dataset: Numbers) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return NUMBER

    def begin(self) -> None:
        self.dataset.hard.clear()

    def hardest(self) -> list[int]:
        return sorted(self.dataset.hard)

    def note(self, index: int) -> None:
        self.dataset.hard.add(index)

    def __iter__(self) -> Iterator[int]:
        self.begin()
        yield from range(NUMBER - 8)
        hardest = self.hardest() or [0]
        yield from (hardest[-1 - number % len(hardest)] for number in range(8))


class ByMethod(InDataset):
    def begin(self) -> None:
        self.dataset.forget()


class InVariable(InDataset):
    def begin(self) -> None:
        HARD.clear()

    def hardest(self) -> list[int]:
        return sorted(HARD)

    def note(self, index: int) -> None:
        HARD.add(index)


class InList(InDataset):
    def begin(self) -> None:
        SEEN["hard"].clear()

    def hardest(self) -> list[int]:
        return list(SEEN["hard"])

    def note(self, index: int) -> None:
        SEEN["hard"].append(index)


class InArray(InDataset):
    def begin(self) -> None:
        LOSSES[:] = 0

    def hardest(self) -> list[int]:
        return np.argsort(LOSSES, kind="stable")[-8:].tolist()

    def note(self, index: int) -> None:
        LOSSES[index] = 1 + index % 5


class InClass(InDataset):
    losses = torch.zeros(NUMBER)

    def begin(self) -> None:
        InClass.losses.mul_(0.5)

    def hardest(self) -> list[int]:
        return torch.argsort(InClass.losses, stable=True)[-8:].tolist()  # type: ignore[no-any-return]

    def note(self, index: int) -> None:
        InClass.losses[index] += 1 + index % 5


class InAttribute(InDataset):
    """Of a module, as the next ones, and as training counts there."""

    def __init__(self, dataset: Numbers) -> None:
        super().__init__(dataset)
        self.module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        self.module.latest = 0  # type: ignore[assignment]  # a plain attribute

    def begin(self) -> None:
        self.module.latest = 0  # type: ignore[assignment]

    def hardest(self) -> list[int]:
        return [int(self.module.latest)]

    def note(self, index: int) -> None:
        self.module.latest = index  # type: ignore[assignment]


class InBuffer(InAttribute):
    def begin(self) -> None:
        self.module[0].running_mean.zero_()

    def hardest(self) -> list[int]:
        return [int(self.module[0].running_mean[0])]

    def note(self, index: int) -> None:
        self.module[0].running_mean[0] = index


class ByFunction(InDataset):
    """By a function that it is given, which clears a variable around it."""

    def __init__(self, dataset: Numbers) -> None:
        super().__init__(dataset)
        hard: list[int] = []
        self.hardest, self.note = lambda: hard[-8:], hard.append  # type: ignore[method-assign]

        def begin() -> None:
            hard.clear()

        self.begin = begin  # type: ignore[method-assign]


class Notes(pl.Callback):
    def __init__(self, sampler: InDataset) -> None:
        self.sampler = sampler
        self.trained: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(batch[:, 0].int().tolist())
        self.sampler.note(int(batch[:, 0].max()))


KINDS = [InDataset, ByMethod, InVariable, InList, InArray, InClass, InAttribute, InBuffer, ByFunction]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::lightning_stateful.errors.StatefulWarning")
def test_a_save_leaves_what_training_writes_for_a_sampler(tmp_path: Path, kind: Any) -> None:
    trained = []
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    for more in ([], [StatefulDataCallback(seed=0)], [StatefulDataCallback(seed=0), saver]):
        dataset = Numbers()
        notes = Notes(kind(dataset))
        trainer = quiet_trainer(*more, notes, max_epochs=3, limit_val_batches=0, enable_checkpointing=saver in more)
        trainer.fit(BoringModel(), DataLoader(dataset, batch_size=SIZE, sampler=notes.sampler))
        trained.append(notes.trained)
    assert trained[0] == trained[1] == trained[2]
