"""Values outside of loaders that hooks set, and that code reads which builds loaders or datasets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

LEVEL = 0


class Numbers(Dataset[torch.Tensor]):
    """Samples that follow from an attribute and from a variable of this module; counts and keeps what was read."""

    def __init__(self) -> None:
        self.level = self.reads = 0
        self.cache: dict[int, int] = {}

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.cache[index] = index
        return torch.full((32,), index + 1000.0 * (self.level + LEVEL))


class Pool(pl.LightningDataModule):
    """Trains on the first samples of its dataset, more of them in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"size": 0})
        self.dataset, self.pool, self.config = Numbers(), list(range(8)), SimpleNamespace(size=0)
        self.calls = self.ends = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        size = len(self.pool) + self.config.size + self.hparams["size"]
        return DataLoader(Subset(self.dataset, list(range(size))), batch_size=4, shuffle=True)


class KeepsPool(Pool):
    def state_dict(self) -> dict[str, Any]:
        return {"size": len(self.pool)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pool = list(range(state_dict["size"]))


class BuildsAnew(Pool):
    def train_dataloader(self) -> Any:
        self.dataset = Numbers()
        return DataLoader(self.dataset, batch_size=20, shuffle=True)


class Once(Pool):
    def train_dataloader(self) -> Any:
        return DataLoader(Subset(self.dataset, range(12)), batch_size=4, shuffle=True)


def grow(data: Pool, epoch: int) -> None:
    data.pool += range(len(data.pool), len(data.pool) + 4)


def configure(data: Pool, epoch: int) -> None:
    data.config.size += 4


def tune(data: Pool, epoch: int) -> None:
    data.hparams["size"] += 4


def harden(data: Pool, epoch: int) -> None:
    data.dataset.level += 1


def globally(data: Pool, epoch: int) -> None:
    global LEVEL
    LEVEL += 1


def by_epoch(data: Pool, epoch: int) -> None:
    data.pool = list(range(8 + 4 * (epoch + 1)))
    data.dataset.level = epoch + 1


def globally_by_epoch(data: Pool, epoch: int) -> None:
    global LEVEL
    LEVEL = epoch + 1


def count(data: Pool, epoch: int) -> None:
    data.ends += 1


Hook = Callable[[Any, int], None]


class Changes(pl.Callback):
    """Calls a function in a hook of training, and on a resume another one; notes batches."""

    def __init__(self, hook: str, change: Hook, restored_in: str, restore: Hook) -> None:
        self.trained: list[tuple[int, list[float]]] = []
        self.change, self.restore = change, restore
        if restored_in:
            setattr(self, restored_in, self.restores)
        setattr(self, hook, self.changes)

    def changes(self, trainer: Any, *args: Any) -> None:
        self.change(trainer.datamodule, trainer.current_epoch)

    def restores(self, trainer: Any, *args: Any, **named: Any) -> None:
        self.restore(trainer.datamodule, 0)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        self.trained.append((trainer.current_epoch, batch[:, 0].tolist()))


END, BATCH, START = "on_train_epoch_end", "on_train_batch_end", "on_train_epoch_start"


def outcome(
    folder: Path,
    hook: str,
    change: Hook,
    data: type[Pool] = Pool,
    *,
    after: int,
    every: int = 1,
    batch: int = 0,
    restored_in: str = "",
) -> tuple[bool, list[str]]:
    """Whether a resume is exact, and the warnings.

    Args:
        folder: For checkpoints.
        hook: The hook that changes something.
        change: The change.
        data: The data module.
        after: Resume from this epoch: from its end or, with ``batch``, from behind that batch, -1 for the last.
        every: Epochs after which loaders are built anew.
        batch: See ``after``.
        restored_in: The hook of a callback that makes the changes of all epochs up to the checkpoint again.
    """

    def again(data: Any, epoch: int) -> None:
        for earlier in range(after + 1 - bool(batch)):
            change(data, earlier)

    def run(path: Path | None) -> list[tuple[int, list[float]]]:
        global LEVEL
        LEVEL = 0
        changes = Changes(hook, change, restored_in if path else "", again)
        how: Any = {"every_n_train_steps": 1} if batch else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
        saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **how) if path is None else pl.Callback()
        trainer = quiet_trainer(
            changes,
            StatefulDataCallback(),
            saver,
            max_epochs=4,
            reload_dataloaders_every_n_epochs=every,
            enable_checkpointing=path is None,
        )
        trainer.fit(BoringModel(), datamodule=data(), ckpt_path=path)
        return changes.trained

    whole = run(None)
    steps = sum(epoch <= after for epoch, _ in whole)
    if batch > 0:
        steps += batch - sum(epoch == after for epoch, _ in whole)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = run(folder / f"step={steps}.ckpt")
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return rest == whole[steps:], said


@pytest.mark.parametrize(
    ("name", "hook", "change", "how"),
    [
        ("pool was", END, grow, {"after": 0}),
        ("pool was", END, grow, {"after": 1}),
        # The loaders that follow are built later.
        ("pool was", END, grow, {"after": 0, "every": 2}),
        ("pool was", BATCH, grow, {"after": 0, "batch": 1}),
        # Lightning calls the hooks of the epoch's end after such a checkpoint.
        ("pool was", END, grow, {"after": 1, "batch": -1}),
        ("config.size was", END, configure, {"after": 0}),
        ("hparams.size was", END, tune, {"after": 0}),
        ("level was", END, harden, {"after": 0}),
        ("level was", END, harden, {"after": 1, "batch": -1, "every": 0, "data": Once}),
        ("level was", START, harden, {"after": 1, "every": 0, "data": Once}),
        (".LEVEL was", END, globally, {"after": 0}),
        (".LEVEL was", END, globally, {"after": 0, "every": 0, "data": Once}),
        (".LEVEL was", END, globally, {"after": 1, "batch": -1, "every": 0, "data": Once}),
    ],
)
def test_what_nothing_restores_is_named(tmp_path: Path, name: str, hook: str, change: Hook, how: Any) -> None:
    exact, said = outcome(tmp_path, hook, change, **how)
    assert not exact
    assert sum(name in one and "the resume is not exact" in one for one in said) == 1, said


@pytest.mark.parametrize(
    ("hook", "change", "how"),
    [
        # No loader follows it.
        (END, count, {"after": 1}),
        (END, grow, {"after": 0, "every": 0}),
        (END, grow, {"after": 1, "data": KeepsPool}),
        (END, grow, {"after": 1, "data": KeepsPool, "batch": -1}),
        *((END, grow, {"after": 1, "restored_in": one}) for one in ("setup", "on_load_checkpoint", "on_train_start")),
        (END, harden, {"after": 1, "restored_in": "on_train_start"}),
        (END, globally, {"after": 1, "restored_in": "on_train_start"}),
        (END, globally, {"after": 1, "restored_in": "setup", "every": 0, "data": Once}),
        # Sets the same, whatever was set before.
        (END, by_epoch, {"after": 1, "batch": -1}),
        (END, globally_by_epoch, {"after": 1, "batch": -1}),
        (START, globally_by_epoch, {"after": 1}),
        (START, harden, {"after": 1, "data": BuildsAnew}),
    ],
)
def test_what_is_exact_is_not_warned_of(tmp_path: Path, hook: str, change: Hook, how: Any) -> None:
    assert outcome(tmp_path, hook, change, **how) == (True, [])
