"""A loader without length is read one batch ahead: what samples follow in each step is named on a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning


class Stepped(Dataset[torch.Tensor]):
    """Samples that follow a value, or the Trainer's steps if it holds one."""

    value = 0

    def __init__(self) -> None:
        self.trainer: Any = None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        step = self.value if self.trainer is None else self.trainer.global_step
        return torch.full((32,), float(step))


class Batches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([first, first + 1] for first in range(0, 24, 2))


class Sized(Batches):
    def __len__(self) -> int:
        return 12


class Sets(pl.Callback):
    """Sets the value after each step, keeps it in its state, and notes what was trained on."""

    def __init__(self, dataset: Stepped, *, is_set: bool) -> None:
        self.dataset, self.is_set = dataset, is_set
        self.trained: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: torch.Tensor, index: int) -> None:
        self.trained.append(batch[0, 0].item())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.dataset.value = trainer.global_step if self.is_set else 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.dataset.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dataset.value = state_dict["value"]


def run(sampler: Any, path: Path | None = None, *, by: str, **options: Any) -> tuple[list[float], Any]:
    dataset = Stepped()
    sets = Sets(dataset, is_set=by == "hook")
    trainer = quiet_trainer(StatefulDataCallback(), sets, max_epochs=2, limit_val_batches=0, **options)
    dataset.trainer = trainer if by == "trainer" else None
    trainer.fit(BoringModel(), DataLoader(dataset, batch_sampler=sampler), ckpt_path=path)
    return sets.trained, trainer


# Said of any dataset that reads the trainer.
@pytest.mark.filterwarnings("ignore:.*batches depend on training")
@pytest.mark.parametrize(("by", "said"), [("hook", "value"), ("trainer", "holds a Trainer")])
def test_a_first_batch_that_is_read_under_a_later_value_is_named(tmp_path: Path, by: str, said: str) -> None:
    whole, _ = run(Batches(), by=by)
    _, stopped = run(Batches(), by=by, max_steps=5)
    stopped.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(StatefulWarning, match=f"{said}.*one batch ahead.*the resume is not exact"):
        rest, _ = run(Batches(), tmp_path / "x.ckpt", by=by)
    assert rest[0] == whole[5] + 1
    assert rest[1:] == whole[6:]


def test_from_an_epochs_end_and_with_a_length_nothing_is_said(tmp_path: Path) -> None:
    for sampler, steps in ((Batches, 12), (Sized, 5)):
        whole, _ = run(sampler(), by="hook")
        _, stopped = run(sampler(), by="hook", max_steps=steps)
        stopped.save_checkpoint(tmp_path / "x.ckpt")
        assert run(sampler(), tmp_path / "x.ckpt", by="hook")[0] == whole[steps:]
