"""Runs that are told to stop within an epoch, by ``max_time`` or ``max_steps``, and saved when the fit is over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel
from support.ranks import Ranks
from support.runs import SaveAt, assert_same_end, ended, train, training

from lightning_stateful.errors import StatefulWarning


class StopsAt(pl.Callback):
    """Tells the run to stop as a batch ends, as Lightning's Timer does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class Noisy(LedgerModel):
    """Draws from a generator of its own in training and in validation; logs both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def _loss(self, batch: Any) -> torch.Tensor:
        return super()._loss(batch) * (1 + torch.rand((), generator=self.generator))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=True, on_epoch=True)
        known = self.trainer.callback_metrics
        return loss * (1 + known.get("train_epoch", 0) + known.get("valid", 0))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("valid", torch.rand((), generator=self.generator))


def stops_early() -> list[Any]:
    return [EarlyStopping("valid", patience=3, min_delta=2.0)]


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 4}, {"accumulate_grad_batches": 2}], ids=str)
def test_the_validation_that_a_stop_brings_counts_nowhere(tmp_path: Path, options: dict[str, Any]) -> None:
    run, limits = training(Noisy, stops_early), {"max_epochs": 5, **options}
    whole = run(**limits)
    for step in (2, 7):
        ended(tmp_path / "a.ckpt", run=run, callbacks=[StopsAt(step)], **limits)
        assert_same_end(run(ckpt_path=tmp_path / "a.ckpt", **limits), whole)


def test_so_it_is_for_a_checkpoint_that_is_written_behind_that_validation(tmp_path: Path) -> None:
    run = training(Noisy, stops_early)
    saver = SaveAt(tmp_path, [("on_validation_end", 0, 0)])
    run(callbacks=[StopsAt(5), saver], max_epochs=5)
    assert_same_end(run(ckpt_path=saver.path(0), max_epochs=5), run(max_epochs=5))


def test_what_is_logged_of_an_epoch_that_max_steps_has_cut_is_that_of_the_epoch_before(tmp_path: Path) -> None:
    run = training(Noisy)
    whole = run(max_epochs=3)
    for step in (4, 16):
        ended(tmp_path / "a.ckpt", run=run, max_epochs=3, max_steps=step)
        assert_same_end(run(ckpt_path=tmp_path / "a.ckpt", max_epochs=3), whole)


class AddsUp(LedgerModel):
    """Steps behind every third batch, by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self._loss(batch))
        if batch_idx % 3 == 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 0}], ids=str)
def test_gradients_that_are_lost_by_the_stop_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    def fit(*callbacks: Any, **how: Any) -> Any:
        return train(model=AddsUp(), callbacks=callbacks, **options, **how)

    class StopsAtBatch(StopsAt):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = batch_idx == self.step

    stopped = fit(StopsAtBatch(4))
    with pytest.warns(StatefulWarning, match="gradients have been added up since the latest step"):
        stopped.trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(StatefulWarning, match="The checkpoint lacks gradients"):
        fit(ckpt_path=tmp_path / "a.ckpt")
    # Behind a step there are none.
    fit(StopsAtBatch(5)).trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(ckpt_path=tmp_path / "a.ckpt")


class ByHand(LedgerModel):
    """Lowers its learning rate by hand as an epoch ends."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.7


def test_a_learning_rate_that_is_lowered_twice_is_named(tmp_path: Path) -> None:
    ended(tmp_path / "a.ckpt", run=training(ByHand), max_steps=15)
    with pytest.warns(StatefulWarning, match="settings of optimizers, such as learning rates, changed"):
        train(model=ByHand(), ckpt_path=tmp_path / "a.ckpt")


class Lookahead(torch.optim.SGD):
    """Keeps slow weights beside what it saves."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.slow: list[torch.Tensor] | None = None
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss, held = super().step(closure), self.param_groups[0]["params"]
        self.slow = self.slow or [one.detach().clone() for one in held]
        self.steps += 1
        if self.steps % 4 == 0:
            for one, slow in zip(held, self.slow, strict=True):
                one.data.copy_(slow.lerp_(one.detach(), 0.5))
        return loss


class SavesAll(Lookahead):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "beside": [self.slow, self.steps]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow, self.steps = state_dict.pop("beside")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [Lookahead, SavesAll])
def test_what_an_optimizer_keeps_beside_its_state_is_named(tmp_path: Path, kind: Any) -> None:
    class Optimized(LedgerModel):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=self.lr)

    run = training(Optimized)
    ended(tmp_path / "a.ckpt", run=run, max_steps=6)
    if kind is SavesAll:
        assert_same_end(run(ckpt_path=tmp_path / "a.ckpt"), run())
        return
    with pytest.warns(StatefulWarning, match=r"that step\(\) uses and .*Lookahead.slow.*steps was 6 and is 0"):
        run(ckpt_path=tmp_path / "a.ckpt")


class Remembers(LedgerModel):
    """Carries a value from batch to batch, which each epoch begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.hidden = loss.detach() if self.hidden is None else 0.9 * self.hidden + 0.1 * loss.detach()
        return loss * (1 + self.hidden)


def test_nothing_is_said_of_what_each_epoch_begins_anew(tmp_path: Path) -> None:
    run = training(Remembers)
    ended(tmp_path / "a.ckpt", run=run, max_epochs=1)
    assert_same_end(run(ckpt_path=tmp_path / "a.ckpt"), run())
    ended(tmp_path / "a.ckpt", run=run, max_steps=5)
    with pytest.warns(StatefulWarning, match="training_step uses and no checkpoint holds .*hidden"):
        run(ckpt_path=tmp_path / "a.ckpt")


class OfRanks(LedgerModel):
    """Weighs its loss by what it has logged of the last epoch, of all ranks or of its own."""

    is_shared = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss * (1 + self.global_rank), on_step=False, on_epoch=True, sync_dist=self.is_shared)
        return loss * (1 + self.trainer.callback_metrics.get("train", 0))


class Shared(OfRanks):
    is_shared = True


def of_both_ranks(folder: Path) -> list[bool]:
    """Whether runs end as they would have without the stop: what each rank logs for itself, and for all."""
    found = []
    for kind, moment in ((OfRanks, ("on_train_batch_end", 1, 2)), (Shared, ("on_train_epoch_end", 0, 0))):
        run, saver = training(kind), SaveAt(folder, [moment])
        options = on_ranks(max_epochs=3)
        whole = run(callbacks=[saver], **options)
        rest = run(ckpt_path=saver.path(0), **options)
        found.append(all(torch.equal(one, whole.weights[name]) for name, one in rest.weights.items()))
    return found


def test_each_rank_goes_on_with_what_it_had_logged(ranks: Ranks) -> None:
    assert ranks.of(of_both_ranks) == [[True, True]] * 2


class SetsAtEnd(LedgerModel):
    """Freezes a layer, puts another in eval mode and sets a third's rate, as the first epoch or its validation ends."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Dropout(0.1))

    def _loss(self, batch: Any) -> torch.Tensor:
        return super()._loss(batch) + self.extra(batch["x"].reshape(len(batch["x"]), -1, 4).mean(1)).square().mean()

    def set_all(self) -> None:
        self.extra[0].requires_grad_(False)
        self.extra[1].eval()
        self.extra[2].p = 0.5  # type: ignore[assignment]

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.set_all()


class SetsInValidation(SetsAtEnd):
    def on_train_epoch_end(self) -> None:
        LedgerModel.on_train_epoch_end(self)

    def on_validation_epoch_end(self) -> None:
        self.set_all()


@pytest.mark.filterwarnings("ignore:Found . module.* in eval mode at the start of training")
@pytest.mark.parametrize("kind", [SetsAtEnd, SetsInValidation])
@pytest.mark.parametrize("how", [{"callbacks": [StopsAt(5)]}, {"max_steps": 5}], ids=["told to stop", "max_steps"])
def test_what_the_end_of_a_cut_epoch_sets_is_not_set_before_its_real_end(
    tmp_path: Path, kind: Any, how: dict[str, Any]
) -> None:
    run = training(kind)
    ended(tmp_path / "a.ckpt", run=run, **how)
    assert_same_end(run(ckpt_path=tmp_path / "a.ckpt"), run())


class Saves(LedgerModel):
    """Keeps a factor in its checkpoints, which falls as an epoch ends."""

    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.factor

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.factor *= 0.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["factor"] = self.factor

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.factor = checkpoint["factor"]


def test_what_the_module_saves_and_the_end_of_a_cut_epoch_has_changed_is_named(tmp_path: Path) -> None:
    run = training(Saves)
    ended(tmp_path / "a.ckpt", run=run, max_steps=5)
    with pytest.warns(StatefulWarning, match="attributes that the module saves changed"):
        run(ckpt_path=tmp_path / "a.ckpt")
    ended(tmp_path / "a.ckpt", run=run, max_epochs=1)
    assert_same_end(run(ckpt_path=tmp_path / "a.ckpt"), run())


class InTurn(LedgerModel):
    """Trains one of two heads in each batch; zeros stay in place of the other's gradients, and its momentum goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch["x"].reshape(len(batch["x"]), -1, 4).mean(1)
        return super().training_step(batch, batch_idx) + self.heads[batch_idx % 2](rows).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_zeros_stay_in_place_of_gradients_where_the_module_leaves_them(tmp_path: Path) -> None:
    run = training(InTurn)
    for steps in (4, 11):
        ended(tmp_path / "a.ckpt", run=run, max_steps=steps)
        assert_same_end(run(ckpt_path=tmp_path / "a.ckpt"), run())


class ClearsNowAndThen(LedgerModel):
    """Clears gradients at every second batch, in one way or another."""

    def __init__(self, clear: Callable[[Any], None]) -> None:
        super().__init__()
        self.clear = clear

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            self.clear(optimizer)


def clear_by_data(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.data.zero_()


CLEARS = {
    "to none": lambda optimizer: optimizer.zero_grad(),
    "to zeros": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "by data": clear_by_data,
}


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
def test_gradients_that_the_module_leaves_to_the_next_batch_are_named_where_the_resume_lacks_them(
    tmp_path: Path, clear: Any
) -> None:
    run = training(partial(ClearsNowAndThen, clear))
    whole = run(max_epochs=1)
    for steps in (4, 5):
        ended(tmp_path / "a.ckpt", run=run, max_steps=steps, limit_val_batches=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = run(ckpt_path=tmp_path / "a.ckpt", max_epochs=1)
        said = [str(one.message) for one in caught if "has left gradients of net.0.weight" in str(one.message)]
        assert len(said) == steps % 2
    assert not torch.equal(resumed.weights["net.0.weight"], whole.weights["net.0.weight"])


class ClearsItself(LedgerModel):
    """Clears gradients behind its steps, or before its loss."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.before = before

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.before:
            self.zero_grad(set_to_none=False)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.before:
            self.zero_grad(set_to_none=False)


@pytest.mark.parametrize("before", [True, False])
def test_gradients_that_the_module_clears_elsewhere_are_not_named(tmp_path: Path, before: bool) -> None:
    run = training(partial(ClearsItself, before=before))
    ended(tmp_path / "a.ckpt", run=run, max_steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StatefulWarning)
        assert_same_end(run(ckpt_path=tmp_path / "a.ckpt", max_epochs=1), run(max_epochs=1))
