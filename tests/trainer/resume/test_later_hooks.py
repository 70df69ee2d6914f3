"""Checkpoints that a callback writes within a hook, and what the module's hook of that name changes behind it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from support.runs import quiet_trainer
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

STEPS = 6
SAVED, RESUMED = "A callback has written a checkpoint in", "The checkpoint was written by a callback in"


class Plain(pl.LightningModule):
    """Trains beside a teacher that nothing updates."""

    def __init__(self) -> None:
        super().__init__()
        self.student = torch.nn.Linear(1, 1)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch.float().view(-1, 1) / 10
        return (self.student(batch) - batch).pow(2).mean() + (self.student(batch) - self.teacher(batch)).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.trainer.global_step))

    def follow(self) -> None:
        """Moves the teacher towards the student."""
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Counts(Plain):
    def on_train_batch_end(self, *arguments: Any) -> None:
        self.seen += 1


class Follows(Plain):
    def on_train_batch_end(self, *arguments: Any) -> None:
        self.follow()


class FollowsInData(Plain):
    def on_train_batch_end(self, *arguments: Any) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)


class StepsByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.lr_schedulers().step()  # type: ignore[union-attr]


class FollowsValidation(Plain):
    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.follow()


class FollowsEpochs(Plain):
    def on_train_epoch_end(self) -> None:
        self.follow()


class LowersRate(Plain):
    """Has no scheduler, and a learning rate that its own hook sets."""

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[0]

    def on_train_epoch_end(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class StepsEpochsByHand(StepsByHand):
    def on_train_batch_end(self, *arguments: Any) -> None: ...

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()  # type: ignore[union-attr]


class StepsPlateausByHand(StepsEpochsByHand):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)]

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step(1.0)  # type: ignore[union-attr, arg-type]


class FollowsInCallback(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *arguments: Any) -> None:
        pl_module.follow()


class SavesEpochs(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(kind: Any, folder: Path, saves: Any, step: int = 0) -> tuple[list[torch.Tensor], list[str]]:
    """The weights after three epochs, and what the package has said of checkpoints."""
    torch.manual_seed(0)
    model = kind()
    callbacks = [FollowsInCallback()] if saves == "in a callback" else []
    how: dict[str, Any] = {"every_n_train_steps": 2}
    how = {"monitor": "loss"} if saves == "validation" else how
    saver = SavesEpochs(folder) if saves == "epochs" else ModelCheckpoint(folder, "{step}", save_top_k=-1, **how)
    # With a validation at the end alone ModelCheckpoint would save at the end of the epoch.
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": STEPS // 2, "enable_checkpointing": True}
    trainer = quiet_trainer(*callbacks, saver, StatefulDataCallback(seed=0), **options)
    path = folder / (f"{step}.ckpt" if saves == "epochs" else f"step={step}.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaders = DataLoader(range(2 * STEPS), batch_size=2, shuffle=True), DataLoader(range(2), batch_size=2)  # type: ignore[arg-type]
        trainer.fit(model, *loaders, ckpt_path=path if step else None)
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return [*model.parameters()], [one for one in said if SAVED in one or RESUMED in one]


@pytest.mark.parametrize(
    ("kind", "saves", "hook", "names"),
    [
        (Follows, "steps", "on_train_batch_end", "teacher.weight, teacher.bias"),
        (FollowsInData, "steps", "on_train_batch_end", "teacher.weight, teacher.bias"),
        (StepsByHand, "steps", "on_train_batch_end", "lr_scheduler 0"),
        (FollowsValidation, "validation", "on_validation_end", "teacher.weight, teacher.bias"),
        (FollowsEpochs, "epochs", "on_train_epoch_end", "teacher.weight, teacher.bias"),
        (LowersRate, "epochs", "on_train_epoch_end", "learning rates or other settings of optimizers"),
        (StepsEpochsByHand, "epochs", "on_train_epoch_end", "lr_scheduler 0"),
        (StepsPlateausByHand, "epochs", "on_train_epoch_end", "lr_scheduler 0"),
    ],
)
def test_what_the_modules_hook_changes_behind_a_checkpoint_is_named(
    tmp_path: Path, kind: Any, saves: str, hook: str, names: str
) -> None:
    whole, said = fit(kind, tmp_path, saves)
    assert [SAVED in one and f"{kind.__name__}.{hook} has changed {names}." in one for one in said] == [True]
    resumed, said = fit(kind, tmp_path, saves, 2 * STEPS)
    assert [one for one in said if RESUMED in one and f"{kind.__name__}.{hook} had changed {names} behind" in one]
    assert not all(map(torch.equal, resumed, whole))


@pytest.mark.parametrize(
    ("kind", "saves"), [(Plain, "in a callback"), (Counts, "steps"), (Follows, "validation"), (Plain, "epochs")]
)
def test_nothing_is_said_where_the_checkpoint_holds_it(tmp_path: Path, kind: Any, saves: str) -> None:
    whole, said = fit(kind, tmp_path, saves)
    resumed, said_then = fit(kind, tmp_path, saves, 2 * STEPS)
    assert said + said_then == []
    assert all(map(torch.equal, resumed, whole))


class Worse(Plain):
    """Logs a loss that is worse in each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("worse", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class SavesLast(ModelCheckpoint):
    """Lightning calls it behind EarlyStopping, in whatever order they are given."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=True)
        self.CHECKPOINT_EQUALS_CHAR = ""


@pytest.mark.parametrize("kind", [SavesEpochs, SavesLast])
def test_what_early_stopping_counts_behind_a_callback_that_saves_is_named(tmp_path: Path, kind: Any) -> None:
    is_behind = kind is SavesEpochs

    def train(path: Path | None = None) -> tuple[int, list[str]]:
        callbacks = [EarlyStopping("worse", patience=3, check_on_train_epoch_end=True), kind(tmp_path)]
        trainer = quiet_trainer(
            StatefulDataCallback(seed=0),
            *callbacks,
            max_epochs=9,
            limit_val_batches=0,
            enable_checkpointing=not is_behind,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Worse(), DataLoader(range(STEPS)), ckpt_path=path)  # type: ignore[arg-type]
        return trainer.global_step, [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]

    whole, said = train()
    assert whole == 4 * STEPS
    steps, again = train(tmp_path / f"{'' if is_behind else 'step'}{2 * STEPS}.ckpt")
    assert (steps == whole) is not is_behind
    assert [SAVED in one and "EarlyStopping of worse" in one for one in said] == [True] * is_behind, said
    assert [RESUMED in one for one in again[:1]] == [True] * is_behind, again
