"""What a training epoch has logged over its batches covers all of them in a resumed epoch too."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import (
    Moment,
    Outcome,
    SaveAt,
    assert_goes_on_from_every_moment,
    assert_resumes,
    assert_same_end,
    ended,
    numbers_module,
    seeded,
    stopped,
    train,
    train_alone,
    training,
)
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics import CatMetric, ConfusionMatrix, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.samplers.state_codec import from_plain

NAMES = ("mean_epoch", "sum", "most", "least", "of_first", "metric", "all", "low", "high", "f1", "some_a", "some_b")


class Noise(torch.nn.Module):
    """Draws from generators of its own, of each kind, which nobody seeds; other ranks draw other numbers."""

    def __init__(self) -> None:
        super().__init__()
        seed = 5 + int(os.environ.get("RANK", "0"))
        self.generators = [torch.Generator().manual_seed(seed), np.random.default_rng(seed), random.Random(seed)]
        self.old = np.random.RandomState(seed)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        of_torch, of_numpy, of_python = self.generators
        drawn = torch.rand((), generator=of_torch) + of_numpy.random() + of_python.random() + self.old.rand()
        return loss * (1 + drawn)


class Averages(LedgerModel):
    """Logs an epoch's values in every way; its learning rate follows one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()
        self.metric, self.all = MeanMetric(), CatMetric()
        # After their first update all three have equal states, which torchmetrics then shares, right or wrong.
        kinds = {"low": BinaryAccuracy(0.3), "high": BinaryAccuracy(0.6), "f1": BinaryF1Score(0.3)}
        self.shared = MetricCollection(kinds)
        self.unshared = MetricCollection({"a": MeanMetric(), "b": MeanMetric()}, prefix="some_", compute_groups=False)
        self.seen: list[dict[str, float]] = []

    def _loss(self, batch: Any) -> torch.Tensor:
        loss = super()._loss(batch)
        is_windowed = self.trainer.accumulate_grad_batches > 1
        return loss if is_windowed and not self.training else self.noise(loss)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        self.all.update(loss.detach())
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        for name, reduce in (("sum", "sum"), ("most", "max"), ("least", "min")):
            self.log(name, loss, on_step=False, on_epoch=True, reduce_fx=reduce, sync_dist=True)
        if batch_idx < 2:
            self.log("of_first", loss, on_step=False, on_epoch=True, reduce_fx="min", sync_dist=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.shared.update(torch.tensor([batch_idx / 11, 0.1]), torch.tensor([1, batch_idx % 2]))
        self.unshared(loss.detach())
        self.log_dict(self.shared, on_step=False, on_epoch=True)
        self.log_dict(self.unshared, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("all", self.all.compute().sum(), sync_dist=True)
        self.all.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        return [optimizer], [{"scheduler": plateau, "monitor": "mean_epoch"}]


class Seen(pl.Callback):
    """What is known at the end of every epoch; and it changes batches, at random."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.random = random.Random(9)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch["x"] += self.random.random()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            known = trainer.callback_metrics
            self.epochs.append({name: float(known[name]) for name in NAMES if name in known})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_epoch_start(trainer, pl_module)


def run(make: Any = numbers_module, *, callbacks: Any = (), seed: int = 1, **options: Any) -> Outcome:
    seen = Seen()
    found = train(make, callbacks=[seen, *callbacks], model=seeded(Averages, seed), **options)
    # Compared as the weights are.
    found.weights |= {name: torch.tensor(value) for name, value in (seen.epochs[-1] if seen.epochs else {}).items()}
    return found


MOMENTS = [
    ("on_before_backward", 1, 4),
    ("on_train_batch_end", 1, 6),
    ("on_validation_end", 1, 0),
    ("on_train_epoch_end", 1, 0),
]
MORE_MOMENTS = [
    ("on_train_batch_start", 1, 0),
    ("on_train_batch_end", 1, 0),
    ("on_validation_start", 1, 0),
    ("on_train_batch_end", 2, 9),
]


@pytest.mark.parametrize("moments", [MOMENTS, pytest.param(MORE_MOMENTS, marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4, "val_check_interval": 3}], ids=str)
def test_an_epochs_values_are_those_of_all_its_batches(
    tmp_path: Path, options: dict[str, Any], moments: list[Moment]
) -> None:
    moments = [moment for moment in moments if not options or moment[0] != "on_validation_start"]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=3, **options)


def test_a_callback_before_that_of_the_data_module_may_save_in_any_hook(tmp_path: Path) -> None:
    hooks = ("on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end")
    saver = SaveAt(tmp_path, [(hook, 1, 1) for hook in hooks])
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 4}
    run(callbacks=[LambdaCallback(**{hook: getattr(saver, hook) for hook in hooks})], **options)
    whole = run(**options)
    for number, hook in enumerate(hooks):
        try:
            assert_resumes(saver.path(number), saver.ledgers[number], run=run, whole=whole, **options)
        except AssertionError as error:
            raise AssertionError(hook) from error


def test_a_run_that_is_saved_after_max_steps_has_cut_the_epoch_goes_on_with_its_sums(tmp_path: Path) -> None:
    ended(tmp_path / "end.ckpt", run=run, max_steps=17)
    resumed, whole = run(ckpt_path=tmp_path / "end.ckpt", seed=99, max_epochs=3), run(max_epochs=3)
    assert_same_end(resumed, whole)


class Late(Averages):
    """Its learning rate follows what it, and a callback, log as an epoch ends."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateaus = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3) for _ in range(2)]
        return [optimizer], [{"scheduler": one, "monitor": name} for one, name in zip(plateaus, LATE, strict=True)]


LATE = ("all", "of_callback")
LATE_MOMENTS = [
    ("on_train_batch_end", 0, 1),
    ("on_train_batch_end", 0, 10),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
    ("on_train_batch_end", 1, 10),
]


def run_late(make: Any = numbers_module, *, callbacks: Any = (), seed: int = 1, **options: Any) -> Outcome:
    """With what an epoch's end logs, and a stop by the epoch before, which is all that a validation knows of."""

    def log(trainer: Any, pl_module: Any) -> None:
        pl_module.log("of_callback", -float(trainer.current_epoch))

    early = EarlyStopping("mean_epoch", patience=1, check_on_train_epoch_end=False, strict=False, min_delta=1.0)
    callbacks = [LambdaCallback(on_train_epoch_end=log), early, *callbacks]
    found = train(make, callbacks=callbacks, model=seeded(Late, seed), **options)
    plateaus: list[Any] = [config.scheduler for config in found.trainer.lr_scheduler_configs]
    steps = [number for plateau in plateaus for number in (plateau.best, plateau.last_epoch)]
    found.weights["late"] = torch.tensor([early.best_score, early.wait_count, early.stopped_epoch, *steps])
    return found


def test_what_is_monitored_is_what_is_logged_by_then(tmp_path: Path) -> None:
    whole = assert_goes_on_from_every_moment(tmp_path, numbers_module, LATE_MOMENTS, run_late, max_epochs=4)
    assert whole.current_epoch == 4 - 1


class Large(Averages):
    """Has an object whose states are too many to be copied for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.confusion = ConfusionMatrix(task="multiclass", num_classes=200)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.confusion.update(batch["id"], batch["id"])
        return super().training_step(batch, batch_idx)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(2, tmp_path)


def on_two(folder: Path) -> list[dict[str, Any]]:
    """Runs of three epochs on the ranks that there are: whole, and resumed from several moments."""
    moments = [("on_train_batch_end", 1, 2), ("on_before_backward", 1, 3), ("on_validation_end", 1, 0)]
    found = [run(**on_ranks()).weights]
    for number, (hook, epoch, batch) in enumerate(moments):
        path = folder / f"{number}.ckpt"
        stopped(path, hook=hook, epoch=epoch, batch=batch, run=run, **on_ranks())
        found.append(run(ckpt_path=path, seed=99, **on_ranks()).weights)
    return [{name: value.tolist() for name, value in weights.items()} for weights in found]


def test_each_rank_goes_on_with_its_own_part_and_one_rank_with_all(ranks: Ranks) -> None:
    of_ranks = ranks.of(on_two)
    for whole, *resumed in of_ranks:
        for found in resumed:
            assert found == whole
    with (
        pytest.warns(StatefulWarning, match="Of all, metric the checkpoint does not hold"),
        pytest.warns(StatefulWarning, match=r"Averages\.noise\.generators\.0, .*Seen\.random could not be put back"),
    ):
        alone = run(ckpt_path=ranks.folder_of(on_two) / "0.ckpt", max_epochs=2, callbacks=[EarlyStopping("metric")])
    state = torch.load(ranks.folder_of(on_two) / "0.ckpt", weights_only=True)["callbacks"]["StatefulDataCallback"]
    sums = [part["logged"]["training_step.sum"]["value"] for part in state["results"]["ranks"]]
    assert len(sums) == 2
    assert float(alone.weights["sum"]) > sum(sums) > max(sums) > 0


def test_an_object_of_which_a_part_is_not_known_is_named(tmp_path: Path) -> None:
    model = seeded(Large)
    stop: Any = {"hook": "on_before_backward", "epoch": 1, "batch": 4}
    stopped(tmp_path / "x.ckpt", run=lambda *args, **options: train(*args, model=model, **options), **stop)
    with pytest.warns(StatefulWarning, match="Of confusion the checkpoint does not hold"):
        train(ckpt_path=tmp_path / "x.ckpt", model=seeded(Large), max_epochs=2)


class Forgets(LedgerModel):
    """Makes a generator when it is first needed."""

    noise: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.noise = self.noise or torch.Generator().manual_seed(2)
        return super().training_step(batch, batch_idx)


def test_a_generator_that_a_resume_cannot_find_is_named(tmp_path: Path) -> None:
    stopped(tmp_path / "x.ckpt", run=training(Forgets), batch=2)
    with pytest.warns(StatefulWarning, match=r"Forgets\.noise could not be put back"):
        train(ckpt_path=tmp_path / "x.ckpt", model=seeded(Forgets), max_epochs=1)


class Blurs(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.held = [torch.Generator().manual_seed(number)]


class Replaces(LedgerModel):
    """Gets another submodule with a generator within an epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noise = torch.nn.Sequential(Blurs(batch_idx))


def test_a_generator_of_a_submodule_that_a_hook_has_replaced_is_saved_as_it_is(tmp_path: Path) -> None:
    stopped(tmp_path / "x.ckpt", run=training(Replaces), batch=3)
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["StatefulDataCallback"]
    (saved,) = state["results"]["ranks"][0]["generators"].items()
    assert saved[0] == "Replaces.noise.0.held.0"
    assert torch.equal(from_plain(saved[1]), torch.Generator().manual_seed(2).get_state())


class Validates(LedgerModel):
    """Draws from a generator in validations alone."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(2)

    def on_validation_start(self) -> None:
        torch.rand((), generator=self.noise)


def test_a_generator_of_a_validation_that_a_window_leaves_out_is_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "val_check_interval": 3, "max_epochs": 1}
    stopped(tmp_path / "x.ckpt", run=training(Validates), batch=6, **options)
    with pytest.warns(StatefulWarning, match=r"Validates\.noise could not be put back"):
        train(ckpt_path=tmp_path / "x.ckpt", model=seeded(Validates), **options)


def test_a_generator_of_the_data_is_none_of_the_module(tmp_path: Path) -> None:
    """The position of the data says what it draws; put back, it would draw another order."""
    model: Any = seeded()
    model.order = torch.Generator().manual_seed(4)

    def make() -> Any:
        return DataLoader(Numbers(22), 2, sampler=RandomSampler(range(22), generator=model.order))

    ended(tmp_path / "x.ckpt", make, run=train_alone, model=model, max_steps=15)
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["StatefulDataCallback"]
    assert "generators" not in str(state["results"])


class DrawsInStep(LedgerModel):
    """Draws in its steps from a generator that it is given."""

    order: torch.Generator

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + torch.rand((), generator=self.order))


@pytest.mark.filterwarnings("ignore:DrawsInStep.order is a random generator")
@pytest.mark.parametrize("num_steps", [15, 11])
def test_a_generator_that_module_and_data_both_draw_from_is_named_in_the_run_and_on_a_resume_within_an_epoch(
    tmp_path: Path, num_steps: int
) -> None:
    def run(**options: Any) -> Any:
        model: Any = seeded(DrawsInStep)
        model.order = torch.Generator().manual_seed(4)
        sampler = RandomSampler(range(22), generator=model.order)
        return train_alone(lambda: DataLoader(Numbers(22), 2, sampler=sampler), model=model, **options)

    whole = run(max_epochs=2)
    with pytest.warns(StatefulWarning, match=r"DrawsInStep\.order is a random generator that training data draw from"):
        ended(tmp_path / "x.ckpt", run=lambda _, **options: run(**options), max_steps=num_steps)
    if num_steps == 11:
        assert_same_end(run(max_epochs=2, ckpt_path=tmp_path / "x.ckpt"), whole)
    else:
        with pytest.warns(StatefulWarning, match=r"DrawsInStep\.order could not be put back"):
            run(max_epochs=2, ckpt_path=tmp_path / "x.ckpt")


class OfRank(LedgerModel):
    """Monitors values of each rank alone: that of rank 0 goes on to improve, and that of others does not."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        epoch = self.current_epoch
        self.log("of_rank", [float(9 - epoch), (1.0, 1.5, 1.4, 1.3, 1.2, 1.1)[epoch]][self.global_rank])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
        return [optimizer], [{"scheduler": plateau, "monitor": "of_rank"}]


def of_each_rank(folder: Path) -> list[Any]:
    """How many epochs a run takes whole and resumed, and what each EarlyStopping has counted then."""
    options = on_ranks(max_epochs=6)
    early_stopping = training(OfRank, lambda: [EarlyStopping("of_rank", patience=3)])
    stopped(folder / "x.ckpt", run=early_stopping, epoch=2, batch=2, **options)
    found = []
    for path in (None, folder / "x.ckpt"):
        early = EarlyStopping("of_rank", patience=3)
        with pytest.warns(StatefulWarning, match="waited differently") if path and not rank() else nullcontext():
            run = training(OfRank)(callbacks=[early], ckpt_path=path, **options)
        found.append([run.current_epoch, float(early.best_score), early.wait_count])
    return found


def rank() -> int:
    return int(os.environ["RANK"])


def test_each_rank_waits_on_for_a_value_of_its_own(ranks: Ranks) -> None:
    assert ranks.of(of_each_rank) == [[[4, 6.0, 0]] * 2, [[4, 1.0, 3]] * 2]


class LogsRepeatedly(LedgerModel):
    """Logs under the same names several times in a batch, in turns, as its optimizer tries several steps."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=True, on_epoch=True)
        self.log("sum", loss / 3, on_step=False, on_epoch=True, reduce_fx="sum")
        if batch_idx % 4 == 3:
            self.log("of_some", loss * 7, on_step=False, on_epoch=True)
        return loss

    def on_before_backward(self, loss: torch.Tensor) -> None:
        super().on_before_backward(loss)
        self.log("before_backward", loss / 7, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=4)


LOGGED_REPEATEDLY = ("mean_epoch", "sum", "of_some", "before_backward")


def logged(**options: Any) -> dict[str, float]:
    """What the last of two epochs has logged, in full."""
    found = train(model=seeded(LogsRepeatedly), max_epochs=2, **options)
    known = found.trainer.callback_metrics
    return {name: float(known[name]) for name in LOGGED_REPEATEDLY}


def test_what_a_batch_logs_several_times_is_added_up_in_the_order_of_an_uninterrupted_epoch(tmp_path: Path) -> None:
    moments: list[Moment] = [("on_train_batch_end", 1, batch) for batch in range(11)]
    moments += [("on_train_batch_start", 1, 0), ("on_train_batch_start", 1, 5), ("on_validation_end", 0, 0)]
    saver = SaveAt(tmp_path, moments)
    whole = logged(callbacks=[saver])
    found = {moment: logged(ckpt_path=saver.path(number)) for number, moment in enumerate(moments)}
    assert found == dict.fromkeys(moments, whole)


def test_sums_are_kept_over_a_second_stop_within_the_window_that_a_resume_began_with(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    whole = run(**options)
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    stopped(first, hook="on_train_batch_end", epoch=1, batch=3, run=run, **options)
    stopped(second, hook="on_train_batch_end", epoch=1, batch=1, run=run, ckpt_path=first, **options)
    assert_same_end(run(ckpt_path=second, seed=99, **options), whole)
