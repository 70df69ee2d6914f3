"""Callbacks that average weights, or stop a run, do in a resumed run what they would have done without the stop."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from support.ledger import LedgerModel, batches
from support.runs import (
    Outcome,
    StoppedError,
    assert_goes_on_from_every_moment,
    ended,
    numbers_module,
    quiet_trainer,
    seeded,
    stopped,
    train,
    training,
)
from torch.utils.data import DataLoader

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StateError, StatefulWarning


class Averaged(LedgerModel):
    """With a learning rate schedule, which averaging replaces, and perhaps a BatchNorm, for which it adds an epoch."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        norm = torch.nn.BatchNorm1d(6) if normed else torch.nn.Tanh()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), norm, torch.nn.Dropout(0.3), torch.nn.Linear(6, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


# Without a BatchNorm, no epoch is left to train after the fourth; with one, there is a fifth for its statistics.
MOMENTS = {
    False: [("on_train_batch_end", 1, 4), ("on_train_epoch_end", 3, 0)],
    True: [("on_train_epoch_end", 3, 0), ("on_train_batch_end", 4, 4), ("on_validation_end", 4, 0)],
}


@pytest.mark.parametrize("windows", [{}, {"accumulate_grad_batches": 2, "val_check_interval": 3}], ids=str)
@pytest.mark.parametrize("normed", MOMENTS)
def test_34_stochastic_weight_averaging_goes_on_exactly(
    tmp_path: Path, normed: bool, windows: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    run = training(
        partial(Averaged, normed=normed), lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)]
    )
    assert_goes_on_from_every_moment(tmp_path, numbers_module, MOMENTS[normed], run, max_epochs=4, **windows)
    # Of the epoch that it adds, neither is the number of batches in a window another.
    assert "Arguments of the Trainer are others" not in caplog.text


def test_weights_after_the_epoch_for_statistics_are_those_of_lightning_without_the_callback() -> None:
    """Lightning takes a step at its end, on the gradients that the last step before has left."""
    weights = []
    for ours in ([], [StatefulDataCallback(seed=1)]):
        model = seeded(partial(Averaged, normed=True))
        model.net[2] = torch.nn.Identity()
        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        rows = [{"id": torch.tensor(n), "x": torch.tensor([n, n % 3, 1.0, -n]) / 8} for n in range(8)]
        quiet_trainer(averaging, *ours, max_epochs=2).fit(model, DataLoader(rows, batch_size=2))
        weights.append([one.tolist() for one in model.parameters()])
    assert weights[0] == weights[1]


@pytest.mark.parametrize("kind", ["StochasticWeightAveraging", "WeightAveraging"])
@pytest.mark.filterwarnings("ignore:.*is in eval mode.*")
def test_weights_that_averages_have_replaced_are_not_resumed(tmp_path: Path, kind: str) -> None:
    averaging = getattr(pl.callbacks, kind, None)
    if averaging is None:
        pytest.skip("since Lightning 2.6")
    options = {"swa_lrs": 0.01, "swa_epoch_start": 1} if kind == "StochasticWeightAveraging" else {}
    plain = {"max_steps": 15, "max_epochs": 2}
    run = training(partial(Averaged, normed=False), lambda: [averaging(**options)])
    with pytest.warns(StatefulWarning, match="good for evaluation; a resume from it is refused"):
        ended(tmp_path / "after.ckpt", run=run, **plain)
    with pytest.raises(StateError, match="averages in place of the weights"):
        run(ckpt_path=tmp_path / "after.ckpt")
    for hook in ("on_train_end", "on_fit_end"):
        path = tmp_path / f"{hook}.ckpt"
        save = LambdaCallback(**{hook: partial(save_in_training, path)})
        with pytest.warns(StatefulWarning, match="good for evaluation; a resume from it is refused"):
            train(callbacks=[averaging(**options), save], model=Averaged(normed=False), **plain)
        with pytest.raises(StateError, match="averages in place of the weights"):
            run(ckpt_path=path)
    if kind == "WeightAveraging":
        # Between its two swaps, whether it stands before the callback that saves or behind it.
        for hook, before in {"batch_end": True, "epoch_start": True, "epoch_end": False}.items():
            path = tmp_path / f"{hook}.ckpt"
            saver = LambdaCallback(**{f"on_validation_{hook}": partial(save_in_training, path)})
            callbacks = [averaging(), saver] if before else [saver, averaging()]
            with pytest.warns(StatefulWarning, match="good for evaluation; a resume from it is refused"):
                train(callbacks=callbacks, model=Averaged(normed=False), max_epochs=1)
            with pytest.raises(StateError, match="during a validation"):
                run(ckpt_path=path)


class OwnAverages(pl.Callback):
    """Puts averages in place of the weights while it validates, as people write it."""

    averages: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        weights = pl_module.state_dict()
        held = self.averages or weights
        self.averages = {name: held[name].lerp(weight, 0.5) for name, weight in weights.items()}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.averages:
            self.weights = {name: weight.clone() for name, weight in pl_module.state_dict().items()}
            pl_module.load_state_dict(self.averages)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.averages:
            pl_module.load_state_dict(self.weights)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = state_dict["averages"]


@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_end"])
def test_weights_that_a_hook_has_replaced_for_a_validation_are_named_at_the_save_and_on_the_resume(
    tmp_path: Path, hook: str
) -> None:
    path = tmp_path / "stop.ckpt"
    run = training(LedgerModel, lambda: [OwnAverages()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", StatefulWarning)
        stopped(path, hook=hook, epoch=1, run=run)
        run(ckpt_path=path)
    words = [str(one.message) for one in said if issubclass(one.category, StatefulWarning)]
    if hook == "on_validation_end":
        # Callbacks that save come last: the weights are back.
        assert words == []
    else:
        assert "written within a validation, and weights of the module (net.0.weight" in words[0]
        assert "Training goes on with these, so the resume is not exact" in words[1]


class KeepsAverages(OwnAverages):
    """Leaves them in place of the weights when training has ended."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.load_state_dict(self.averages)


@pytest.mark.parametrize(("kind", "is_told"), [(KeepsAverages, True), (OwnAverages, False)])
def test_so_are_those_that_a_hook_has_replaced_behind_training(
    tmp_path: Path, kind: type[OwnAverages], is_told: bool
) -> None:
    path = tmp_path / "after.ckpt"
    run = training(LedgerModel, lambda: [kind()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", StatefulWarning)
        ended(path, run=run, max_epochs=1)
        run(ckpt_path=path)
    words = [str(one.message) for one in said if issubclass(one.category, StatefulWarning)]
    expected = ["behind training, and weights of the module (net.0.weight", "Training goes on with these"]
    assert [text in word for text, word in zip(expected, words, strict=False)] == [True] * 2 * is_told, words
    assert len(words) == 2 * is_told


def save_in_training(path: Path, trainer: pl.Trainer, *args: Any) -> None:
    if not trainer.sanity_checking:
        trainer.save_checkpoint(path)


class Worsens(LedgerModel):
    """Its ``score`` falls up to step 3, and no more after it."""

    def on_validation_epoch_end(self) -> None:
        self.log("score", -float(min(self.global_step, 3)))


def test_35_early_stopping_counts_a_validation_in_an_open_window_once(tmp_path: Path) -> None:
    def run(make: Any, *, callbacks: Any = (), seed: int = 1, **options: Any) -> Outcome:
        stopping = EarlyStopping("score", patience=6)
        found = train(make, callbacks=[stopping, *callbacks], model=seeded(Worsens, seed), **options)
        # Compared as the weights are.
        found.weights["stopping"] = torch.tensor([stopping.wait_count, stopping.stopped_epoch])
        return found

    moments = [("on_train_batch_end", 1, 6), ("on_train_batch_end", 1, 4), ("on_validation_end", 1, 0)]
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "val_check_interval": 3, "max_epochs": 5}
    whole = assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, **options)
    assert whole.weights["stopping"][1] > 1


def stop_early(trainer: Any, *args: Any) -> None:
    """Tells a run to stop once, after so many batches."""
    if trainer.global_step == 5:
        trainer.should_stop = True


LIMITS: list[dict[str, int]] = [{"min_epochs": 3}, {"min_steps": 27}, {"min_steps": 27, "limit_val_batches": 0}]
STOPS = [
    ("on_train_batch_end", 0, 7),
    ("on_train_epoch_end", 0, 0),
    ("on_before_backward", 2, 3),
    ("on_train_batch_end", 2, 4),  # the last batch, by min_steps
]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_36_a_stop_that_waits_for_min_epochs_or_min_steps_is_remembered(tmp_path: Path, limit: dict[str, int]) -> None:
    run = training(make_callbacks=lambda: [LambdaCallback(on_train_batch_end=stop_early)])
    moments = STOPS if "limit_val_batches" in limit else [*STOPS, ("on_validation_start", 1, 0)]
    whole = assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=5, **limit)
    assert whole.current_epoch < 5


def test_36_a_run_that_has_stopped_after_min_epochs_is_trained_on(tmp_path: Path) -> None:
    stopping = LambdaCallback(on_train_batch_end=stop_early)
    stopped(tmp_path / "end.ckpt", hook="on_train_epoch_end", epoch=1, callbacks=[stopping], min_epochs=2)
    whole = train(max_epochs=3)
    again = train(ckpt_path=tmp_path / "end.ckpt", max_epochs=3)
    of_third_epoch = len(batches(whole.ledger)) // 3
    assert batches(again.ledger) == batches(whole.ledger)[-of_third_epoch:]


class Backbone(LedgerModel):
    """Trains its head alone at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def _loss(self, batch: Any) -> torch.Tensor:
        return self.net(self.backbone(batch["x"].reshape(len(batch["x"]), -1, 4).mean(1))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=self.lr)


class Unfreezes(BaseFinetuning):
    """Lightning's documented example."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class NotZero(Backbone):
    """Its zeros are those of masks alone."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.parameters():
            torch.nn.init.normal_(each)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def pruning(*, lottery: bool) -> Any:
    return partial(ModelPruning, "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)


def tuning() -> Any:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


CHANGES = {
    "unfrozen": (Backbone, tuning, {}),
    "unfrozen by a callback of one's own": (Backbone, Unfreezes, {}),
    "pruned": (NotZero, pruning(lottery=False), {}),
    "pruned, going back": (NotZero, pruning(lottery=True), {}),
    "double": (NotZero, pl.Callback, {"precision": "64-true"}),
}


@pytest.mark.parametrize(("model", "callback", "options"), CHANGES.values(), ids=CHANGES)
def test_a_module_that_callbacks_have_changed_is_changed_again(
    tmp_path: Path, model: Any, callback: Any, options: dict[str, Any]
) -> None:
    moments = [("on_train_epoch_end", 0, 0), ("on_train_batch_end", 1, 4), ("on_train_batch_start", 2, 0)]
    if model is Backbone:
        moments += [("on_train_epoch_start", 2, 0)]
    with warnings.catch_warnings():
        # Of layers that the optimizer has already, and of learning rates.
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
        run = training(model, lambda: [callback()])
        assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, run, max_epochs=3, **options)


@pytest.mark.filterwarnings("ignore:.*hold its batches twice")
def test_masks_that_are_not_known_and_statistics_that_count_twice_are_warned_of(tmp_path: Path) -> None:
    run = training(NotZero, lambda: [pruning(lottery=False)()])
    with pytest.warns(StatefulWarning, match=r"backbone\.1\.running_mean\) then hold (it|them) twice"):
        stopped(tmp_path / "a.ckpt", hook="on_before_backward", epoch=1, batch=3, run=run)
    contents = torch.load(tmp_path / "a.ckpt", weights_only=True)
    contents["callbacks"]["StatefulDataCallback"]["pruned"] = ["0" * 16]
    torch.save(contents, tmp_path / "a.ckpt")
    with pytest.warns(StatefulWarning, match="masks are not in Lightning's checkpoints"):
        run(ckpt_path=tmp_path / "a.ckpt")


class Queue(LedgerModel):
    """Keeps samples of earlier batches in a buffer, as contrastive learning does, or has statistics of a BatchNorm."""

    def __init__(self, *, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("queue", torch.zeros(3, 4))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)
        self.norm = torch.nn.BatchNorm1d(4) if kind == "norm" else torch.nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        queue: Any = self.queue
        if self.kind == "queue":
            queue.data[batch_idx % 3] = batch["x"].mean(0)
        self.unsaved += 1
        return super().training_step({**batch, "x": self.norm(batch["x"]) + queue.mean()}, batch_idx)


@pytest.mark.parametrize(
    ("kind", "named"), [("queue", r"\(queue\)"), ("norm", r"\(norm\.running_mean, .*"), ("none", "")]
)
def test_buffers_that_an_open_window_has_changed_are_named(tmp_path: Path, kind: str, named: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "val_check_interval": 6, "max_epochs": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stopped(tmp_path / "a.ckpt", hook="on_validation_end", run=training(partial(Queue, kind=kind)), **options)
    said = [str(one.message) for one in caught if "hold them twice" in str(one.message)]
    assert len(said) == bool(named)
    where = r"batch 4 of epoch 0, before the optimizer has taken its step"
    assert all(re.search(rf"began with {where}.* buffers of the module {named}", one) for one in said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training(partial(Queue, kind=kind))(ckpt_path=tmp_path / "a.ckpt", **options)
    said = [str(one.message) for one in caught if "hold its batches twice" in str(one.message)]
    assert ["queue" in one or "norm.running_mean" in one for one in said] == [True] * bool(named), said


@pytest.mark.parametrize(("window", "hook"), [(1, "on_before_zero_grad"), (4, "on_train_batch_end")])
def test_changed_buffers_are_named_once_a_run(tmp_path: Path, window: int, hook: str) -> None:
    saver: Any = LambdaCallback(**{hook: lambda trainer, *_: trainer.save_checkpoint(tmp_path / "a.ckpt")})
    model, data = Queue(kind="norm"), numbers_module()
    trainer = quiet_trainer(saver, accumulate_grad_batches=window, max_epochs=3)
    for max_epochs in (3, 5):
        trainer.fit_loop.max_epochs = max_epochs
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, datamodule=data)
        assert sum(bool(re.search(r"hold (it|them) twice", str(one.message))) for one in caught) == 1


class Breaks(pl.Callback):
    """Raises an error within a step."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise StoppedError


@pytest.mark.parametrize(("kind", "named"), [("queue", "(queue)"), ("norm", "norm.running_mean"), ("none", "")])
def test_buffers_that_a_step_which_fails_has_changed_are_named(tmp_path: Path, kind: str, named: str) -> None:
    saver = OnExceptionCheckpoint(tmp_path)
    trainer = quiet_trainer(Breaks(), saver, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught, suppress(StoppedError):
        warnings.simplefilter("always")
        trainer.fit(Queue(kind=kind), datamodule=numbers_module())
    said = [str(one.message) for one in caught if "hold it twice" in str(one.message)]
    assert [named in one for one in said] == [True] * bool(named)


class Teacher(LedgerModel):
    """Has a teacher that no optimizer trains, which averages the weights at the head of a step.

    Args:
        how: How it does so.
        is_given: Whether the optimizer is given the teacher's frozen parameters too, as ``self.parameters()``.
    """

    def __init__(self, *, how: str, is_given: bool) -> None:
        super().__init__()
        self.how, self.is_given = how, is_given
        self.teacher = torch.nn.Linear(4, 6).requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        student: Any = self.net[0]
        for averaged, weights in zip(self.teacher.parameters(), student.parameters(), strict=True):
            if self.how == "in place":
                averaged.data.mul_(0.9).add_(weights.data, alpha=0.1)
            elif self.how == "replaced":
                averaged.data = averaged.data * 0.9 + weights.data * 0.1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((self if self.is_given else self.net).parameters(), self.lr)


@pytest.mark.parametrize("how", ["in place", "replaced", "never"])
@pytest.mark.parametrize(("window", "is_given"), [(1, False), (4, False), (4, True)])
def test_parameters_that_no_optimizer_trains_are_named_where_a_batch_has_changed_them(
    tmp_path: Path, window: int, is_given: bool, how: str
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": window, "max_epochs": 1}
    run = training(partial(Teacher, how=how, is_given=is_given))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stopped(tmp_path / "a.ckpt", hook="on_before_backward", batch=5, run=run, **options)
    said = [str(one.message) for one in caught if "twice" in str(one.message)]
    expected = r"parameters that no optimizer trains \(teacher.weight, teacher.bias\) then hold (it|them) twice"
    assert [bool(re.search(expected, one)) for one in said] == [True] * (how != "never")


class FineTuneLearningRateFinder(LearningRateFinder):
    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        """Finds nothing at the start, as Lightning's documentation has it."""


def test_a_finder_that_does_not_restart_the_run_is_resumed(tmp_path: Path) -> None:
    stopped(tmp_path / "a.ckpt", epoch=1, batch=3)
    train(callbacks=[FineTuneLearningRateFinder()], ckpt_path=tmp_path / "a.ckpt")
