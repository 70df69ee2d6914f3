"""What hooks change again on a resume ahead of its first batch, from a value that nothing has restored, is named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

STEPS = 4


class Decays(BoringModel):
    """Lowers the weight of its loss behind each validation."""

    scale = 1.0

    def __init__(self, restores: bool = False) -> None:
        super().__init__()
        self.net, self.restores = torch.nn.Sequential(torch.nn.Dropout(0.1)), restores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.net(batch) * self.scale, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.change()

    def change(self) -> None:
        self.scale *= 0.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scale"] = self.scale

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.restores:
            self.scale = checkpoint["scale"]


class DecaysByEpoch(Decays):
    """The same at the end of an epoch."""

    def on_validation_epoch_end(self) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        self.change()


class FollowsStep(Decays):
    """Sets it anew, by the step."""

    def change(self) -> None:
        self.scale = 0.9**self.trainer.global_step


class DropsMore(Callback):
    """Raises the probability of Dropout behind each validation."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.net[0].p = min(module.net[0].p + 0.1, 0.9)


class DropsByStep(Callback):
    """Sets it by the step."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.net[0].p = 1 / (2 + trainer.global_step)


def fit(folder: Path, model: BoringModel, step: int = 0, *callbacks: Any) -> tuple[torch.Tensor, list[str]]:
    """The weights, and the warnings, of a run that saves ahead of each validation, which is behind two batches."""
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    torch.manual_seed(1)
    model.layer.reset_parameters()
    trainer = quiet_trainer(
        *callbacks,
        *([] if step else [saver]),
        StatefulDataCallback(seed=0),
        max_epochs=3,
        val_check_interval=2,
        enable_checkpointing=not step,
    )
    data = torch.arange(2 * STEPS * 32.0).reshape(-1, 32) / 256
    loaders = DataLoader(data, batch_size=2), DataLoader(data, batch_size=8)  # type: ignore[arg-type]  # torch reads any
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, *loaders, ckpt_path=folder / f"step={step}.ckpt" if step else None)
    return model.layer.weight.detach(), [
        str(one.message) for one in caught if issubclass(one.category, StatefulWarning)
    ]


@pytest.mark.parametrize("step", [4, 6, 8])
@pytest.mark.parametrize("kind", [Decays, DecaysByEpoch])
def test_an_attribute_that_is_changed_again_from_another_value_is_named(tmp_path: Path, kind: Any, step: int) -> None:
    whole, _ = fit(tmp_path, kind())
    rest, said = fit(tmp_path, kind(), step)
    # An epoch has four batches.
    is_other = kind is Decays or step > STEPS
    assert torch.equal(rest, whole) == (not is_other)
    assert ["scale was" in one for one in said] == [True] * is_other


@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("model", [lambda: Decays(restores=True), FollowsStep], ids=["restored", "set anew"])
def test_one_that_is_restored_or_set_anew_is_not(tmp_path: Path, model: Any, step: int) -> None:
    whole, _ = fit(tmp_path, model())
    rest, said = fit(tmp_path, model(), step)
    assert torch.equal(rest, whole)
    assert said == []


@pytest.mark.parametrize(("callback", "is_other"), [(DropsMore, True), (DropsByStep, False)])
def test_so_is_a_setting_of_a_layer(tmp_path: Path, callback: Any, is_other: bool) -> None:
    whole, _ = fit(tmp_path, Decays(restores=True), 0, callback())
    rest, said = fit(tmp_path, Decays(restores=True), 6, callback())
    assert torch.equal(rest, whole) == (not is_other)
    assert ["net.0.p was" in one for one in said] == [True] * is_other


class Anneals(BoringModel):
    """Lowers the weight of its loss, a buffer, as each validation begins, that of a sanity check among them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch * self.scale, batch_idx)

    def on_validation_start(self) -> None:
        self.scale *= 0.5


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_no_sanity_check_of_a_resume_between_epochs_calls_them(tmp_path: Path, hook: str) -> None:
    class Saves(Callback):
        pass

    def save(self: Any, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.ckpt_path is None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    setattr(Saves, hook, save)
    weights, checks = [], []
    for path in (None, tmp_path / "a.ckpt"):
        torch.manual_seed(1)
        model, options = Anneals(), {"max_epochs": 3, "num_sanity_val_steps": 1}
        checked = LambdaCallback(on_sanity_check_start=lambda *args: checks.append(1))
        trainer = quiet_trainer(Saves(), checked, StatefulDataCallback(seed=0), **options)
        data = torch.arange(2 * STEPS * 32.0).reshape(-1, 32) / 256
        trainer.fit(model, DataLoader(data, 2), DataLoader(data, 8), ckpt_path=path)  # type: ignore[arg-type]
        weights.append([model.layer.weight.detach(), model.scale])
    assert all(map(torch.equal, *weights))
    assert checks == [1]
    # Another fit has one again.
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, DataLoader(data, 2), DataLoader(data, 8))  # type: ignore[arg-type]
    assert checks == [1, 1]
