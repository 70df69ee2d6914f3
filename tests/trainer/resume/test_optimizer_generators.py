"""Random generators that optimizers and learning rate schedulers hold go on where the checkpoint was written."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import (
    assert_goes_on_from_every_moment,
    assert_resumes,
    numbers_module,
    seeded,
    stopped,
    train,
    train_alone,
    training,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler

from lightning_stateful.errors import StatefulWarning


class NoisySGD(torch.optim.SGD):
    """Adds noise behind each step, from generators of each kind."""

    def __init__(self, parameters: Any, lr: float, seed: int = 3) -> None:
        super().__init__(parameters, lr=lr)
        self.of_torch = torch.Generator().manual_seed(seed)
        self.others = {"numpy": np.random.default_rng(seed), "old": np.random.RandomState(seed)}
        self.of_python = random.Random(seed)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        scale = 0.01 * (self.others["numpy"].random() + self.others["old"].rand() + self.of_python.random())
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    each.add_(scale * torch.randn(each.shape, generator=self.of_torch))
        return loss


def jitters() -> Callable[[int], float]:
    """A learning rate with a jitter, by a plain function: LambdaLR leaves those out of its state."""
    drawn = np.random.default_rng(4)

    def factor(step: int) -> float:
        return float(1 + drawn.random())

    return factor


class Noisy(LedgerModel):
    """Both draw: the optimizer in each step, the scheduler in each of its own."""

    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = NoisySGD(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, jitters()), "interval": self.interval}]


class NoisyByEpoch(Noisy):
    interval = "epoch"


class Manual(Noisy):
    """Two optimizers of one class, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        for each in self.optimizers():  # type: ignore[union-attr]
            each.zero_grad()
        self.manual_backward(loss)
        for each in self.optimizers():  # type: ignore[union-attr]
            each.step()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [NoisySGD([first], lr=self.lr), NoisySGD(others, lr=self.lr, seed=8)]


MOMENTS = [
    ("on_train_batch_end", 0, 4),
    ("on_before_backward", 1, 3),
    ("on_before_zero_grad", 1, 5),
    ("on_train_epoch_end", 0, 0),
    ("on_validation_end", 0, 0),
]


@pytest.mark.parametrize("model", [Noisy, NoisyByEpoch, Manual])
def test_optimizers_and_schedulers_draw_on_where_the_run_was_stopped(tmp_path: Path, model: Any) -> None:
    # With manual optimization Lightning does not call that hook.
    moments = [one for one in MOMENTS if model is not Manual or one[0] != "on_before_zero_grad"]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, training(model))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_after_backward"])
def test_they_draw_on_in_a_window_of_accumulated_gradients(tmp_path: Path, hook: str) -> None:
    moments = [(hook, 0, 5), (hook, 1, 3)]
    assert_goes_on_from_every_moment(tmp_path, numbers_module, moments, training(Noisy), accumulate_grad_batches=4)


class Shares(LedgerModel):
    """Draws from the generator of its optimizer, and holds it deeper than that."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Any = {"of": {"optimizer": torch.Generator().manual_seed(6)}}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        drawn = torch.rand((), generator=self.noise["of"]["optimizer"])
        return super().training_step(batch, batch_idx) * (1 + drawn)

    def configure_optimizers(self) -> Any:
        optimizer = NoisySGD(self.parameters(), lr=self.lr)
        optimizer.of_torch = self.noise["of"]["optimizer"]
        return optimizer


def names_in(path: Path) -> list[str]:
    """Names of the generators in a checkpoint."""
    state = torch.load(path, weights_only=True)["callbacks"]["StatefulDataCallback"]
    return sorted(state["results"]["ranks"][0]["generators"])


def test_one_that_the_module_holds_too_is_kept_once_under_its_name_there(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    before = stopped(path, run=training(Shares), batch=4)
    assert names_in(path) == [
        "NoisySGD.of_python",
        "NoisySGD.others.numpy",
        "NoisySGD.others.old",
        "Shares.noise.of.optimizer",
    ]
    assert_resumes(path, before, run=training(Shares))


def test_optimizers_of_one_class_are_told_apart(tmp_path: Path) -> None:
    stopped(tmp_path / "x.ckpt", run=training(Manual), batch=4)
    assert {"NoisySGD.of_torch", "NoisySGD#2.of_torch"} < set(names_in(tmp_path / "x.ckpt"))


class Lazy(LedgerModel):
    """Its optimizer makes a generator in its first step."""

    def configure_optimizers(self) -> Any:
        return LazySGD(self.parameters(), lr=self.lr)


class LazySGD(torch.optim.SGD):
    noise: Any = None

    def step(self, closure: Any = None) -> Any:
        self.noise = self.noise or torch.Generator().manual_seed(2)
        return super().step(closure)


def test_one_that_a_resume_cannot_find_is_named(tmp_path: Path) -> None:
    stopped(tmp_path / "x.ckpt", run=training(Lazy), batch=2)
    with pytest.warns(StatefulWarning, match=r"optimizers or schedulers, LazySGD\.noise could not be put back"):
        train(ckpt_path=tmp_path / "x.ckpt", model=seeded(Lazy), max_epochs=1)


class OfOrder(LedgerModel):
    """Its optimizer draws from the generator of the order of the training data."""

    def configure_optimizers(self) -> Any:
        optimizer = NoisySGD(self.parameters(), lr=self.lr)
        optimizer.of_torch = self.trainer.fit_loop._data_source.instance.sampler.generator
        return optimizer


def test_one_that_training_data_draw_from_too_is_named_in_the_run() -> None:
    def make() -> Any:
        return DataLoader(Numbers(22), 2, sampler=RandomSampler(range(22), generator=torch.Generator().manual_seed(4)))

    with pytest.warns(StatefulWarning, match=r"NoisySGD\.of_torch is a random generator that training data draw from"):
        train_alone(make, model=seeded(OfOrder), max_epochs=1)


def on_two(folder: Path) -> list[list[str]]:
    """The names that a run on ranks has kept of each; its resume ends as it does without the stop."""
    before = stopped(folder / "x.ckpt", run=training(Noisy), epoch=1, batch=2, **on_ranks())
    assert_resumes(folder / "x.ckpt", before, run=training(Noisy), **on_ranks())
    state = torch.load(folder / "x.ckpt", weights_only=True)["callbacks"]["StatefulDataCallback"]
    return [sorted(part["generators"]) for part in state["results"]["ranks"]]


@pytest.mark.slow
def test_each_rank_keeps_its_own(tmp_path: Path) -> None:
    first, second = Ranks(2, tmp_path).of(on_two)[0]
    assert first == second
    assert {"NoisySGD.of_torch", "LambdaLR.lr_lambdas.0.drawn"} < set(first)
