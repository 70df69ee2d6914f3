"""Manual optimization: a checkpoint between two steps of an optimizer lacks gradients that have been added up."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

EVERY = 3


class Manual(BoringModel):
    """Saves behind some batches, or within one."""

    def __init__(self, folder: Path | None = None, saves: tuple[int, ...] = (), within: int = -1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.folder, self.saves, self.within = folder, saves, within

    def loss(self, batch: Any) -> Any:
        return self.layer(batch.float()[:, None].expand(-1, 32)).square().mean()

    def save(self, name: int | str) -> None:
        self.trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.saves:
            self.save(batch_idx)


class Accumulates(Manual):
    """Steps behind every third batch, and clears gradients before the next or behind the step."""

    clears_behind = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if not self.clears_behind and batch_idx % EVERY == 0:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx % EVERY == EVERY - 1:
            optimizer.step()
            if self.clears_behind:
                optimizer.zero_grad()


class ClearsBefore(Accumulates):
    clears_behind = False


class Adversarial(Manual):
    """Two networks, the gradients of one of which flow through the other, and are cleared before its next step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.other = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.other(self.layer(batch.float()[:, None].expand(-1, 32))).square().mean())
            optimizer.step()
            if batch_idx == self.within and not number:
                self.save("within")

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 1e-5) for part in (self.other, self.layer)]


class SkipsOne(Manual):
    """Steps in every batch but for one, which it leaves out, or of which it leaves out the step."""

    has_gradients = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx != 4 or self.has_gradients:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
        if batch_idx != 4:
            optimizer.step()


class SkipsAStep(SkipsOne):
    has_gradients = True


class Seldom(Adversarial):
    """The second network steps in every third batch, and clears before what the loss of the first has left."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            if not number or batch_idx % EVERY == EVERY - 1:
                optimizer.zero_grad()
                self.manual_backward(self.other(self.layer(batch.float()[:, None].expand(-1, 32))).square().mean())
                optimizer.step()


class ForTheLog(Manual):
    """Adds gradients behind the step, to log them, which the next batch clears."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.manual_backward(self.loss(batch))


class OfTwo(Adversarial):
    """One optimizer steps in every batch, the other in every second one, on the gradients of both."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.other(self.layer(batch.float()[:, None].expand(-1, 32))).square().mean())
        for number, optimizer in enumerate(self.optimizers()):
            if not number or batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()


class OneLater(Manual):
    """Steps at the beginning of the next batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))


def fit(model: Manual, checkpoint: Path | None = None) -> list[str]:
    """The warnings of this package."""
    trainer = quiet_trainer(StatefulDataCallback(seed=0), max_epochs=1, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(range(18), batch_size=2), ckpt_path=checkpoint)
    return [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize("kind", [Accumulates, ClearsBefore])
def test_a_checkpoint_between_two_steps_is_warned_of_as_it_is_written_and_on_the_resume(
    tmp_path: Path, kind: Any
) -> None:
    whole = kind(tmp_path, (2, 3, 5))
    said = fit(whole)
    assert len(said) == 1
    assert "gradients have been added up since the latest step" in said[0]
    resumed = kind()
    said = fit(resumed, tmp_path / "3.ckpt")
    assert len(said) == 1
    assert "lacks gradients that had been added up" in said[0]
    assert not torch.equal(resumed.layer.weight, whole.layer.weight)
    for behind in (2, 5):
        resumed = kind()
        assert not fit(resumed, tmp_path / f"{behind}.ckpt")
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("kind", [Adversarial, SkipsOne, SkipsAStep, Seldom, ForTheLog])
def test_gradients_that_nobody_steps_on_are_not_warned_of(tmp_path: Path, kind: Any) -> None:
    whole = kind(tmp_path, (3, 4, 5))
    assert not fit(whole)
    for behind in (3, 4):
        resumed = kind()
        assert not fit(resumed, tmp_path / f"{behind}.ckpt")
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("kind", [OfTwo, OneLater])
def test_gradients_are_missed_where_another_optimizer_has_stepped_since(tmp_path: Path, kind: Any) -> None:
    whole, resumed = kind(tmp_path, (4,)), kind()
    assert len(fit(whole)) == 1
    assert "lacks gradients that had been added up" in fit(resumed, tmp_path / "4.ckpt")[0]
    assert not torch.equal(resumed.layer.weight, whole.layer.weight)


def test_a_checkpoint_within_a_batch_that_has_stepped_an_optimizer_is_warned_of(tmp_path: Path) -> None:
    said = fit(Adversarial(tmp_path, within=3))
    assert len(said) == 1
    assert "within batch 3 of epoch 0, in which an optimizer has stepped" in said[0]
    said = fit(Adversarial(), tmp_path / "within.ckpt")
    assert len(said) == 1
    assert "had stepped within batch 3 of epoch 0" in said[0]


class WithoutOptimizers(Manual):
    """Trains nothing, or by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Takes no step."""

    def configure_optimizers(self) -> Any:
        return []


def test_a_module_without_optimizers_is_run_as_without_the_callback(tmp_path: Path) -> None:
    assert not fit(WithoutOptimizers(tmp_path, (3,)))
    assert not fit(WithoutOptimizers(), tmp_path / "3.ckpt")
