"""Buffers that differ between ranks under DDP, over stops and resumes on real ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import Moment, Outcome, SaveAt, numbers_module, seeded, train

from lightning_stateful.errors import StatefulWarning

MOMENTS: list[Moment] = [
    ("on_train_batch_end", 0, 2),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
    ("on_train_batch_end", 1, 1),
]


class Queue(LedgerModel):
    """Has BatchNorm, and a queue of what this rank has seen, on which its loss depends."""

    size = 8

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        self.register_buffer("queue", torch.zeros(self.size, 6))
        self.register_buffer("forgotten", torch.zeros(2), persistent=False)
        self.queue: Any
        self.forgotten: Any

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seen = self.net[0](batch["x"])
        loss = super().training_step(batch, batch_idx) + (seen @ self.queue.clone().T).logsumexp(1).mean() / 10
        self.queue = torch.cat([self.queue[len(seen) :], seen.detach()])
        self.forgotten += self.global_rank
        return loss


class Manual(Queue):
    """Takes its steps itself: DDP broadcasts no buffers but before the first batch of all."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Wide(Manual):
    """Has a queue that is too large to be kept for each rank."""

    size = 2**16


class Normed(LedgerModel):
    """Has BatchNorm, and a mean of the validation's samples of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Any

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step({**batch, "x": batch["x"] - self.mean}, batch_idx)


class Validated(Normed):
    """Changes the mean in a validation, behind which DDP leaves buffers as they are for one batch."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.mean.mul_(0.5).add_(batch["x"].mean(0))


class Ignored(Queue):
    """Keeps its queue from DDP."""

    _ddp_params_and_buffers_to_ignore = ("queue",)


class Averaging(EMAWeightAveraging):
    """Averages weights, and buffers."""

    def __init__(self) -> None:
        super().__init__(decay=0.9)


unsynced = partial(DDPStrategy, broadcast_buffers=False)
KINDS: dict[str, tuple[type[LedgerModel], dict[str, Any]]] = {
    "manual": (Manual, {}),
    "unsynced": (Queue, {"strategy": unsynced}),
    "ignored": (Ignored, {}),
    "validated": (Validated, {}),
    "automatic": (Normed, {}),
    "windows": (Normed, {"accumulate_grad_batches": 2}),
    "averaged": (Normed, {"callbacks": [Averaging]}),
    "averaged, manual": (Manual, {"callbacks": [Averaging]}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("buffers") / "2")


def run(kind: str, *callbacks: Any, seed: int = 1, **options: Any) -> Outcome:
    """A run of a kind on all ranks, which take six batches of two in an epoch."""
    model, how = KINDS[kind]
    made: dict[str, Any] = {name: of() if isinstance(of, partial) else of for name, of in how.items()}
    callbacks = (*callbacks, *(of() for of in made.pop("callbacks", ())))
    make = partial(numbers_module, train=Numbers(24), val=Numbers(8, first=100))
    return train(make, model=seeded(model, seed), callbacks=callbacks, **on_ranks(**made, **options))


def state_of(path: Path) -> Any:
    """What a checkpoint has of buffers of ranks; None where it has nothing."""
    return torch.load(path, weights_only=True)["callbacks"]["StatefulDataCallback"]["results"].get("buffers")


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and its warnings of buffers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = call()
    of_ours = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return given, [text for text in of_ours if "uffers of the module" in text and "ranks" in text]


def plain(found: Outcome) -> dict[str, Any]:
    """All that the module has at the end of a run."""
    return {name: value.tolist() for name, value in found.weights.items()}


def saved_and_resumed(folder: Path, kind: str) -> dict[str, Any]:
    """A run that is saved at all moments, one that is not, and those that go on from there."""
    saver = SaveAt(folder, MOMENTS)
    (whole, texts), untouched = warned(lambda: run(kind, saver)), run(kind)
    found: dict[str, Any] = {}
    for number, moment in enumerate(MOMENTS):
        path = saver.path(number)
        resumed, said = warned(lambda path=path: run(kind, ckpt_path=path, seed=99))
        found[str(moment)] = plain(resumed), said, state_of(path)
    return {"whole": plain(whole), "untouched": plain(untouched), "texts": texts, "resumed": found}


QUICK = ("manual", "automatic")


@pytest.mark.parametrize(
    "kind", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in KINDS if one != "windows"]
)
def test_each_rank_goes_on_with_its_own_buffers(ranks: Ranks, kind: str) -> None:
    of_ranks = ranks.of(saved_and_resumed, kind)
    for rank, found in enumerate(of_ranks):
        assert found["whole"] == found["untouched"], rank
        assert found["texts"] == [], rank
        for moment, (weights, said, _) in found["resumed"].items():
            assert weights == found["whole"], (rank, moment)
            assert said == [], (rank, moment)
    kept = {name: state for name, (*_, state) in of_ranks[0]["resumed"].items() if state}
    if kind in ("automatic", "averaged"):
        assert kept == {}
    else:
        assert kept


def test_an_open_window_begins_with_buffers_that_are_broadcast(ranks: Ranks) -> None:
    for found in ranks.of(saved_and_resumed, "windows"):
        assert found["whole"] == found["untouched"]
        assert {str(state) for *_, state in found["resumed"].values()} == {"None"}
        assert [said for _, said, _ in found["resumed"].values()] == [[]] * len(MOMENTS)
