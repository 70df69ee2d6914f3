"""Two real ranks whose last batches differ in size: where one has a single sample, BatchNorm may refuse it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import quiet_trainer, train_alone
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_stateful import StatefulDataCallback, StatefulLoader
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.loaders.combined_loaders import CombinedLoaders
from lightning_stateful.loops.single_samples import warn_of_single_samples


class Normed(LedgerModel):
    """Has a BatchNorm, or something in its place."""

    def __init__(self, norm: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.norm = norm()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step({**batch, "x": self.norm(batch["x"])}, batch_idx)


def frozen() -> torch.nn.Module:
    return torch.nn.BatchNorm1d(4).eval().requires_grad_(False)


def loader(length: int, **how: Any) -> Any:
    return DataLoader(Numbers(length), **{"batch_size": 4, "shuffle": True, **how})


def drawn(**how: Any) -> Any:
    return loader(43, shuffle=False, sampler=WeightedRandomSampler([1.0] * 43, 43), **how)


norm = partial(torch.nn.BatchNorm1d, 4)
# What is trained on, by what, and how; and how often it is warned of.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], torch.nn.Module], dict[str, Any], int]] = {
    "43": (partial(loader, 43), norm, {"max_steps": 1}, 1),
    "41": (partial(loader, 41), norm, {"max_steps": 1}, 1),
    "drawn": (drawn, norm, {"max_steps": 1}, 1),
    "two samples at least": (partial(loader, 44), norm, {"max_epochs": 1}, 0),
    "in batches of one": (partial(loader, 9, batch_size=1), torch.nn.Identity, {"max_steps": 1}, 0),
    "without a norm": (partial(loader, 43), torch.nn.Identity, {"max_epochs": 1}, 0),
    "frozen": (partial(loader, 43), frozen, {"max_epochs": 1}, 0),
    "the last step is never reached": (partial(loader, 43), norm, {"max_epochs": 1, "limit_train_batches": 5}, 0),
    "left out": (partial(loader, 43, drop_last=True), norm, {"max_epochs": 1}, 0),
    "drawn, left out": (partial(drawn, drop_last=True), norm, {"max_epochs": 1}, 0),
}


def of_case(folder: Path, name: str) -> tuple[list[str], int]:
    """What is said of single samples, and the steps that are taken."""
    make, make_norm, options, _ = CASES[name]
    model = Normed(make_norm)
    trainer = quiet_trainer(StatefulDataCallback(), **on_ranks(**options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, make())
    return [str(one.message) for one in caught if "single sample" in str(one.message)], trainer.global_step


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("ranks"))


def all_cases(folder: Path) -> dict[str, tuple[list[str], int]]:
    return {name: of_case(folder, name) for name in CASES}


def test_a_batch_of_one_sample_that_a_batch_norm_may_refuse_is_named_at_the_start(ranks: Ranks) -> None:
    first, second = ranks.of(all_cases)
    assert {name: len(said) for name, (said, _) in first.items()} == {name: case[-1] for name, case in CASES.items()}
    assert not any(said for said, _ in second.values())
    (said,) = first["43"][0]
    assert "the last step of epoch 0 (43 samples) gives 1 of 2 ranks a single sample" in said
    assert "BatchNorm layers (norm)" in said
    assert "Lightning alone would repeat 1 there, so that each rank has 2" in said
    assert "drop_last=True in the DataLoader, or tail='drop' for a sampler of yours, leaves 3 samples out" in said
    (said,) = first["41"][0]
    assert "gives 2 of 2 ranks a single sample" in said
    assert "Lightning alone would too" in said
    (said,) = first["drawn"][0]
    assert "Lightning alone" not in said
    steps = {name: number for name, (_, number) in first.items()}
    assert (steps["left out"], steps["drawn, left out"], steps["two samples at least"]) == (5, 5, 6)


@pytest.mark.parametrize(("kind", "is_named"), [(torch.nn.BatchNorm1d, True), (torch.nn.SyncBatchNorm, False)])
def test_a_norm_over_all_ranks_is_not_named(kind: Any, is_named: bool) -> None:
    served = StatefulLoader(Numbers(43), batch_size=4, num_replicas=2, rank=0)
    # torch has the other kind on GPUs only.
    trainer: Any = SimpleNamespace(lightning_module=kind(4), fit_loop=SimpleNamespace(max_batches=float("inf")))
    with pytest.warns(StatefulWarning, match="single sample") if is_named else nullcontext():
        warn_of_single_samples(trainer, CombinedLoaders({"": served}, "max_size_cycle"), 0)


def test_one_process_is_told_nothing_as_torch_does_the_same() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_alone(partial(loader, 41), model=Normed(norm), max_steps=1)
    assert not any("single sample" in str(one.message) for one in caught)
