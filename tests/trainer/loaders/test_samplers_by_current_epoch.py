"""Samplers that read the epoch from the Trainer: exact on a resume, and not called changed by training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.sampler_copies.sampler_copy import SamplerParts

SAMPLES, BATCH = 40, 4


class Model(BoringModel):
    """Notes what it was trained on, and changes an attribute with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[list[float]] = []
        self.num_seen = 0
        self.hardest = 10

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_seen += 1
        self.trained.append(batch[0][:, 0].tolist())
        return super().training_step(batch[0], batch_idx)


class Curriculum(Sampler[int]):
    """Draws from more samples with every epoch that the module's Trainer counts."""

    def __init__(self, module: Model) -> None:
        self.module = module

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        epoch = self.module.trainer.current_epoch
        yield from np.random.default_rng(epoch).integers(0, self.module.hardest * (1 + epoch), SAMPLES).tolist()


class Batches(Curriculum):
    """Yields batches, and tells no length."""

    __len__ = None  # type: ignore[assignment]  # it has none

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        yield from (indices[first : first + BATCH] for first in range(0, SAMPLES, BATCH))


def fit(model: Model, kind: type[Curriculum], path: Path, **options: Any) -> None:
    sampler = kind(model)
    dataset = TensorDataset(torch.arange(float(SAMPLES))[:, None].expand(-1, 32))
    how: dict[str, Any] = {"batch_sampler": sampler} if kind is Batches else {"sampler": sampler, "batch_size": BATCH}
    resumed = options.pop("resumed", False)
    trainer = quiet_trainer(StatefulDataCallback(seed=0), limit_val_batches=0, **{"max_epochs": 3, **options})
    trainer.fit(model, DataLoader(dataset, **how), ckpt_path=path if resumed else None)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("kind", [Curriculum, Batches])
@pytest.mark.parametrize("stop", [{"max_steps": 13}, {"max_steps": 10}, {"max_epochs": 2}], ids=str)
def test_a_sampler_that_reads_the_epoch_of_a_module_that_changes_is_exact_and_nothing_is_said(
    tmp_path: Path, kind: type[Curriculum], stop: dict[str, int]
) -> None:
    whole, stopped, resumed = Model(), Model(), Model()
    fit(whole, kind, tmp_path / "whole.ckpt")
    fit(stopped, kind, tmp_path / "stopped.ckpt", **stop)
    resumed.num_seen = stopped.num_seen
    fit(resumed, kind, tmp_path / "stopped.ckpt", resumed=True)
    assert stopped.trained + resumed.trained == whole.trained
    assert len(whole.trained) == 3 * SAMPLES // BATCH


def test_one_whose_range_training_changes_is_still_warned_of(tmp_path: Path) -> None:
    class Hardens(Model):
        def on_train_epoch_end(self) -> None:
            self.hardest += 1

    with pytest.warns(StatefulWarning, match="Curriculum no longer yields what it did before training"):
        fit(Hardens(), Curriculum, tmp_path / "whole.ckpt")


def test_a_sampler_that_holds_the_callbacks_of_the_trainer_is_copied_without_them() -> None:
    sampler: Any = Curriculum(Model())
    sampler.callbacks = [StatefulDataCallback(), LearningRateMonitor()]
    parts = SamplerParts(sampler)
    assert {*map(id, sampler.callbacks)} <= {*map(id, parts.shared)}
