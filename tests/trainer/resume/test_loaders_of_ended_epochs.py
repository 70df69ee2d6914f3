"""Loaders that are built anew for each epoch are built once for it on a resume, as without the stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning


def rows_from(first: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(first, first + 8.0)[:, None], 2, shuffle=True)


class Served:
    """Stands for what is built later."""


class Chunks(pl.LightningDataModule):
    """Serves the next chunk at each call."""

    def __init__(self, *, saves: bool = True, make: Any = None) -> None:
        super().__init__()
        self.make = make or rows_from
        self.saves, self.chunk, self.built = saves, 0, list[int]()
        self.latest: Any = Served()

    def train_dataloader(self) -> Any:
        first = 100 * self.chunk
        self.latest = first
        self.chunk += 1
        self.built.append(first)
        return self.make(first)

    def state_dict(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "built": list(self.built)} if self.saves else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("env", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-5)


class RollsOut(Model):
    """Goes on in an environment, whose state is a buffer, for each epoch's samples."""

    def train_dataloader(self) -> Any:
        first = int(self.env)
        self.env += 8
        self.steps = self.steps + 1
        return rows_from(first)


class Looks(pl.Callback):
    """Notes samples by their epochs, and needs what the data module has built by then."""

    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.seen.setdefault(trainer.current_epoch, []).extend(batch.flatten().tolist())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert data is None or not isinstance(data.latest, Served)


def run(folder: Path, model: Model, data: Any, checkpoint: Path | None = None) -> dict[int, list[float]]:
    saver = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    looks, how = Looks(), {"max_epochs": 4, "enable_checkpointing": checkpoint is None}
    callbacks = [StatefulDataCallback(seed=3), looks, *([] if checkpoint else [saver])]
    trainer = quiet_trainer(*callbacks, reload_dataloaders_every_n_epochs=1, **how)
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    return looks.seen


class Hidden(Dataset[torch.Tensor]):
    """Shows nothing of its samples."""

    def __init__(self, first: int) -> None:
        self._sample = lambda index: torch.tensor([first + index], dtype=torch.float32)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._sample(index)


def hidden_from(first: int) -> DataLoader[Any]:
    return DataLoader(Hidden(first), 2, shuffle=True)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("make", [rows_from, hidden_from])
def test_a_data_module_that_serves_its_next_part_at_each_call_leaves_none_out(
    tmp_path: Path, after: int, make: Any
) -> None:
    whole = run(tmp_path, Model(), Chunks(make=make))
    data = Chunks(make=make)
    resumed = run(tmp_path, Model(), data, tmp_path / f"epoch={after}.ckpt")
    assert resumed == {epoch: seen for epoch, seen in whole.items() if epoch > after}
    assert data.built == [0, 100, 200, 300]


@pytest.mark.parametrize("after", [0, 1])
def test_a_model_whose_buffers_go_on_at_each_call_goes_on_where_it_was(tmp_path: Path, after: int) -> None:
    whole = run(tmp_path, RollsOut(), None)
    model = RollsOut()
    resumed = run(tmp_path, model, None, tmp_path / f"epoch={after}.ckpt")
    assert resumed == {epoch: seen for epoch, seen in whole.items() if epoch > after}
    assert (model.env, model.steps) == (32, 4)


def test_one_that_restores_nothing_is_warned_of(tmp_path: Path) -> None:
    run(tmp_path, Model(), Chunks(saves=False))
    with pytest.warns(StatefulWarning, match="chunk was 2 and is 0"):
        run(tmp_path, Model(), Chunks(saves=False), tmp_path / "epoch=1.ckpt")
