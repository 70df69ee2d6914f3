"""Parameters that hooks have frozen, and submodules in eval mode: a resume sets them again, or names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from support.ledger import LedgerModel
from support.runs import (
    SaveOnException,
    assert_goes_on_from_every_moment,
    assert_same_end,
    numbers_module,
    quiet_trainer,
    seeded,
    stopped,
    train,
    training,
)

from lightning_stateful.errors import StatefulWarning

# Lightning's.
pytestmark = pytest.mark.filterwarnings("ignore:Found . module.* in eval mode at the start of training")


class Layers(LedgerModel):
    """Has a part to be frozen, and one to be put in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3))

    def _loss(self, batch: Any) -> torch.Tensor:
        return self.net(self.part(batch["x"].reshape(len(batch["x"]), -1, 4).mean(1))).square().mean()


class AtEpochEnd(pl.Callback):
    """Freezes as the first epoch ends."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            pl_module.part[0].requires_grad_(False)


class AtStep(pl.Callback):
    """Freezes as a batch begins."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            pl_module.part[0].requires_grad_(False)


class Evaluates(pl.Callback):
    """Puts a layer in eval mode as a batch begins."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            pl_module.part[1].eval()


class Unfreezes(pl.Callback):
    """Freezes at the start of each run, and unfreezes behind the first epoch."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.part.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.part.requires_grad_(True)


FROZEN = r"part\.0\.weight\.requires_grad was False, part\.0\.bias\.requires_grad was False\."
# Callbacks, and moments of a save outside of batches.
SET_AGAIN: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "at an epoch's end": (AtEpochEnd, [("on_train_batch_end", 1, 2), ("on_train_epoch_end", 1, 0)]),
    "at a step": (AtStep, [("on_train_batch_end", 0, 5), ("on_validation_end", 0, 0), ("on_train_batch_end", 0, 8)]),
    "eval mode": (
        Evaluates,
        [("on_train_batch_end", 0, 5), ("on_validation_end", 0, 0), ("on_train_epoch_end", 1, 0)],
    ),
    "unfrozen": (Unfreezes, [("on_train_batch_end", 1, 2)]),
}


@pytest.mark.parametrize(("callback", "moments"), SET_AGAIN.values(), ids=SET_AGAIN)
def test_what_hooks_have_set_once_is_set_again(tmp_path: Path, callback: Any, moments: Any) -> None:
    run = training(Layers, lambda: [callback()])
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=3)


@pytest.mark.filterwarnings("ignore:.*hold it", "ignore:.*hold its batches twice")
def test_what_was_set_before_a_save_within_a_batch_is_named_once(tmp_path: Path) -> None:
    # BatchNorm's statistics hold that batch, of which another warning tells.
    run = training(Layers, lambda: [AtStep()])
    stopped(tmp_path / "x.ckpt", hook="on_after_backward", batch=5, run=run)
    with pytest.warns(StatefulWarning) as caught:
        run(ckpt_path=tmp_path / "x.ckpt")
    messages = [str(one.message) for one in caught if "are not trained as they were" in str(one.message)]
    assert len(messages) == 1
    assert re.search(FROZEN, messages[0])


@pytest.mark.parametrize("hook", ["setup", "on_train_start"])
def test_a_module_that_is_built_otherwise_stays_so_and_is_named(tmp_path: Path, hook: str) -> None:
    class Frozen(Layers):
        """Freezes another part as it is built."""

    def freeze(self: Any, **how: Any) -> None:
        self.part[1].requires_grad_(False)

    setattr(Frozen, hook, freeze)
    stopped(tmp_path / "x.ckpt", epoch=1, batch=2, run=training(Layers, lambda: [AtEpochEnd()]))
    model = seeded(Frozen)
    with pytest.warns(StatefulWarning, match="are not trained as they were") as caught:
        train(model=model, callbacks=[AtEpochEnd()], ckpt_path=tmp_path / "x.ckpt")
    (said,) = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    assert "part.1.weight.requires_grad was True" in said
    assert "part.0.weight.requires_grad was False" in said
    assert not model.part[1].weight.requires_grad


class Restores(pl.Callback):
    """Keeps in its state what it has frozen, and freezes it again."""

    def __init__(self, where: str) -> None:
        self.where, self.is_frozen = where, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 3 or (self.where == "batch" and trainer.global_step > 3):
            self.is_frozen = True
            self.freeze(pl_module)

    def freeze(self, pl_module: Any) -> None:
        if self.is_frozen:
            pl_module.part[0].requires_grad_(False)
            pl_module.part[1].eval()

    def state_dict(self) -> dict[str, Any]:
        return {"is_frozen": self.is_frozen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.is_frozen = state_dict["is_frozen"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "fit":
            self.freeze(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "train":
            self.freeze(pl_module)


class ByEpoch(pl.Callback):
    """Freezes in each epoch but the first."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.part[0].requires_grad_(trainer.current_epoch < 1)
        pl_module.part[1].train(trainer.current_epoch < 1)


class ByEpochAtStart(ByEpoch):
    """Does so as training begins, too, as a resume within an epoch needs it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_epoch_start(trainer, pl_module)


WITHIN = [("on_train_batch_end", 0, 5), ("on_train_batch_end", 1, 2), ("on_validation_end", 0, 0)]
AT_EPOCHS = [("on_train_epoch_end", 0, 0), ("on_train_epoch_end", 1, 0), ("on_train_epoch_start", 1, 0)]
AGAIN: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "in on_fit_start": (partial(Restores, "fit"), WITHIN),
    "in on_train_start": (partial(Restores, "train"), WITHIN),
    "as each batch begins": (partial(Restores, "batch"), WITHIN),
    "as each epoch begins": (ByEpoch, AT_EPOCHS),
    "as training and each epoch begin": (ByEpochAtStart, [*AT_EPOCHS, ("on_train_batch_end", 1, 2)]),
    "by the same step": (AtStep, [("on_train_batch_end", 0, 2)]),
}


@pytest.mark.parametrize(("callback", "moments"), AGAIN.values(), ids=AGAIN)
def test_what_a_hook_sets_again_goes_on_without_a_word(tmp_path: Path, callback: Any, moments: Any) -> None:
    run = training(Layers, lambda: [callback()])
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=3)


class AsBuilt(Layers):
    """Freezes as it is built, and as its optimizer is made."""

    def __init__(self) -> None:
        super().__init__()
        self.part[1].eval()

    def setup(self, stage: str) -> None:
        self.part[1].requires_grad_(False)

    def configure_model(self) -> None:
        self.part[2].eval()

    def configure_optimizers(self) -> Any:
        self.part[0].requires_grad_(False)
        return super().configure_optimizers()


class Adversarial(Layers):
    """Steps a part and the rest in turns, each with the other frozen."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type,var-annotated]
            loss = self._turn(number, optimizer, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self._end_turn(optimizer)
        self.ledger.append(("train", self.current_epoch, batch_idx, self.global_step, self._ids(batch)))

    def _turn(self, number: int, optimizer: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        self.toggle_optimizer(optimizer)
        return self._loss(batch)

    def _end_turn(self, optimizer: Any) -> None:
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=self.lr) for each in (self.part, self.net)]


class ByHand(Adversarial):
    """Leaves a part frozen until the next batch."""

    def _turn(self, number: int, optimizer: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        self.part.requires_grad_(number == 0)
        self.net.requires_grad_(number == 1)
        return self._loss(batch)

    def _end_turn(self, optimizer: Any) -> None:
        """Leaves all as it is."""


class EveryThird(ByHand):
    """Leaves a part frozen behind every third batch alone."""

    def _turn(self, number: int, optimizer: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super()._turn(number, optimizer, batch, batch_idx)
        if number and batch_idx % 3:
            self.part.requires_grad_(True)
        return loss


MODELS: dict[str, tuple[Any, list[Any]]] = {
    "built so": (AsBuilt, [*WITHIN, *AT_EPOCHS]),
    "toggled": (Adversarial, WITHIN),
    "toggled by hand": (ByHand, WITHIN),
    "toggled by hand in some batches": (EveryThird, [("on_train_batch_end", 0, 3), *WITHIN]),
}


@pytest.mark.parametrize(("model", "moments"), MODELS.values(), ids=MODELS)
def test_what_the_module_sets_itself_is_not_warned_of(tmp_path: Path, model: Any, moments: Any) -> None:
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, training(model), max_epochs=3)


@pytest.mark.filterwarnings("ignore:A checkpoint is being written after batch", "ignore:.*hold its batches twice")
@pytest.mark.filterwarnings("ignore:.*an optimizer ha[sd] stepped:lightning_stateful.errors.StatefulWarning")
@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward"])
@pytest.mark.parametrize("model", [Adversarial, ByHand])
def test_what_is_frozen_for_a_while_in_a_step_that_was_saved_within_is_not_warned_of(
    tmp_path: Path, model: Any, hook: str
) -> None:
    # In each batch each optimizer has its turn.
    for batch in (6, 7):
        stopped(tmp_path / "x.ckpt", hook=hook, batch=batch, run=training(model))
        train(ckpt_path=tmp_path / "x.ckpt", model=seeded(model))


def test_what_is_set_in_an_open_window_is_set_again_without_a_word(tmp_path: Path) -> None:
    class InWindow(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (trainer.current_epoch, batch_idx) == (0, 5):
                pl_module.net[0].requires_grad_(False)

    run = training(make_callbacks=lambda: [InWindow()])
    moments = [("on_train_batch_end", 0, 6)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, accumulate_grad_batches=4)


class Thaws(BaseFinetuning):
    """Unfreezes in the second epoch, and is seen to."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.part)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.part, optimizer)


class Trains(Layers):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=self.lr)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
def test_finetuning_callbacks_are_not_warned_of(tmp_path: Path) -> None:
    run = training(Trains, lambda: [Thaws()])
    assert_goes_on_from_every_moment(tmp_path, numbers_module, [*WITHIN, *AT_EPOCHS], run, max_epochs=3)


def test_a_checkpoint_of_a_run_that_is_over_has_the_flags_of_its_end(tmp_path: Path) -> None:
    model = seeded(Layers)
    run = train(model=model, max_epochs=2)
    model.eval()
    model.requires_grad_(False)
    run.trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert_same_end(train(model=seeded(Layers), ckpt_path=tmp_path / "x.ckpt"), train(model=seeded(Layers)))


def test_what_hooks_have_set_is_set_again_after_a_second_stop_too(tmp_path: Path) -> None:
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    run = training(Layers, lambda: [AtStep()])
    whole = run()
    stopped(first, batch=5, run=run)
    stopped(second, batch=1, run=run, ckpt_path=first)
    assert_same_end(run(ckpt_path=second), whole)


@pytest.mark.filterwarnings("ignore:.*hold its batches twice")
def test_an_error_within_a_step_keeps_what_was_frozen(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 14:
                raise RuntimeError("out of memory")

    saver = SaveOnException(tmp_path / "x.ckpt")
    with (
        pytest.warns(StatefulWarning, match="A checkpoint is being written after batch"),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        train(model=seeded(Layers), callbacks=[AtEpochEnd(), Fails(), saver])
    with pytest.warns(StatefulWarning, match=FROZEN):
        train(model=seeded(Layers), callbacks=[AtEpochEnd()], ckpt_path=tmp_path / "x.ckpt")


def test_a_trainer_that_is_fitted_again_says_nothing() -> None:
    model, data = seeded(Layers), numbers_module()
    trainer = quiet_trainer(AtStep(), Evaluates(), max_epochs=1)
    for max_epochs in (1, 2):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(model, datamodule=data)
    assert not any(each.requires_grad for each in model.part[0].parameters())


class FailsInValidation(Layers):
    """Fails in its first validation."""

    fails = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.fails and not self.trainer.sanity_checking:
            self.fails = False
            raise RuntimeError("out of memory")
        super().validation_step(batch, batch_idx, dataloader_idx)


@pytest.mark.filterwarnings("ignore:Found . modules")
def test_a_model_that_a_failed_validation_has_left_in_eval_mode_is_named_with_the_remedy(tmp_path: Path) -> None:
    model = seeded(FailsInValidation)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model=model, callbacks=[SaveOnException(tmp_path / "stop.ckpt")])
    with pytest.warns(StatefulWarning, match=r"call model\.train\(\) before it is fitted again"):
        train(model=model, ckpt_path=tmp_path / "stop.ckpt")
