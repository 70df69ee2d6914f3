"""A loader without length is read one batch ahead: what samples follow in each step is named on a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer, seeded
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning


class Stepped(Dataset[torch.Tensor]):
    """Samples that follow a value, or the Trainer's steps if it holds one."""

    value = 0

    def __init__(self) -> None:
        self.trainer: Any = None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        step = self.value if self.trainer is None else self.trainer.global_step
        return torch.full((32,), float(step))


class Batches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([first, first + 1] for first in range(0, 24, 2))


class Sized(Batches):
    def __len__(self) -> int:
        return 12


class Sets(pl.Callback):
    """Sets the value after each step, keeps it in its state, and notes what was trained on."""

    def __init__(self, dataset: Stepped, *, is_set: bool) -> None:
        self.dataset, self.is_set = dataset, is_set
        self.trained: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: torch.Tensor, index: int) -> None:
        self.trained.append(batch[0, 0].item())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.dataset.value = trainer.global_step if self.is_set else 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.dataset.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dataset.value = state_dict["value"]


def run(sampler: Any, path: Path | None = None, *, by: str, **options: Any) -> tuple[list[float], Any]:
    dataset = Stepped()
    sets = Sets(dataset, is_set=by == "hook")
    trainer = quiet_trainer(StatefulDataCallback(), sets, max_epochs=2, limit_val_batches=0, **options)
    dataset.trainer = trainer if by == "trainer" else None
    trainer.fit(BoringModel(), DataLoader(dataset, batch_sampler=sampler), ckpt_path=path)
    return sets.trained, trainer


# Said of any dataset that reads the trainer.
@pytest.mark.filterwarnings("ignore:.*batches depend on training")
@pytest.mark.parametrize(("by", "said"), [("hook", "value"), ("trainer", "holds a Trainer")])
def test_a_first_batch_that_is_read_under_a_later_value_is_named(tmp_path: Path, by: str, said: str) -> None:
    whole, _ = run(Batches(), by=by)
    _, stopped = run(Batches(), by=by, max_steps=5)
    stopped.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(StatefulWarning, match=f"{said}.*one batch ahead.*the resume is not exact"):
        rest, _ = run(Batches(), tmp_path / "x.ckpt", by=by)
    assert rest[0] == whole[5] + 1
    assert rest[1:] == whole[6:]


def test_from_an_epochs_end_and_with_a_length_nothing_is_said(tmp_path: Path) -> None:
    for sampler, steps in ((Batches, 12), (Sized, 5)):
        whole, _ = run(sampler(), by="hook")
        _, stopped = run(sampler(), by="hook", max_steps=steps)
        stopped.save_checkpoint(tmp_path / "x.ckpt")
        assert run(sampler(), tmp_path / "x.ckpt", by="hook")[0] == whole[steps:]


class ByEpoch(IterableDataset[torch.Tensor]):
    """Samples that follow from an attribute, which a hook sets as an epoch starts."""

    level = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(24):
            yield torch.full((32,), (self.level + index) / 100)


class SetsAtStart(pl.Callback):
    """Sets the attribute, and notes what was trained on."""

    def __init__(self, dataset: ByEpoch) -> None:
        self.dataset = dataset
        self.trained: list[list[float]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.dataset.level = trainer.current_epoch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: torch.Tensor, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs by something else")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("seed_model", [True, False])
def test_the_first_batch_of_an_epoch_that_is_resumed_at_its_beginning_is_read_behind_the_hooks_of_its_start(
    tmp_path: Path, num_workers: int, first: bool, epochs: int, seed_model: bool
) -> None:
    def fit(ckpt_path: Path | None = None, max_epochs: int = 4) -> tuple[list[list[float]], dict[str, Any], Any]:
        sets = SetsAtStart(ByEpoch())
        ours = StatefulDataCallback(seed=0, seed_model=seed_model)
        callbacks = [ours, sets] if first else [sets, ours]
        trainer = quiet_trainer(*callbacks, max_epochs=max_epochs, limit_val_batches=0)
        model = seeded(BoringModel)
        trainer.fit(model, DataLoader(sets.dataset, batch_size=4, num_workers=num_workers), ckpt_path=ckpt_path)
        return sets.trained, model.state_dict(), trainer

    whole, weights, _ = fit()
    before, _, stopped = fit(max_epochs=epochs)
    stopped.save_checkpoint(tmp_path / "x.ckpt")
    after, resumed, _ = fit(tmp_path / "x.ckpt")
    assert before + after == whole
    assert all(resumed[name].equal(value) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs", "ignore:.*is read by two iterations")
def test_a_hook_that_looks_at_a_batch_before_training_gets_one_and_a_resume_warns(tmp_path: Path) -> None:
    class Looks(SetsAtStart):
        seen: Any = None

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            loader: Any = trainer.train_dataloader
            self.seen = next(iter(loader))

    def fit(path: Path | None = None, max_epochs: int = 2) -> tuple[Looks, Any]:
        looks = Looks(ByEpoch())
        trainer = quiet_trainer(StatefulDataCallback(seed=0), looks, max_epochs=max_epochs, limit_val_batches=0)
        trainer.fit(BoringModel(), DataLoader(looks.dataset, batch_size=4), ckpt_path=path)
        return looks, trainer

    _, stopped = fit(max_epochs=1)
    stopped.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(StatefulWarning, match="A hook has looked at a batch of ByEpoch before the first one"):
        looks, _ = fit(tmp_path / "x.ckpt")
    assert looks.seen[:, 0].allclose(torch.arange(4) / 100)
    assert len(looks.trained) == 6
