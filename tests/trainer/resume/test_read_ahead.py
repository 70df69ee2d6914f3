"""What is read ahead of training: one batch of a loader without length, and items of samplers by workers."""

from __future__ import annotations

import collections
import warnings
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


class Replays(Sampler[Any]):
    """Random samples, or batches, and in place of some of them what a hook has put aside."""

    def __init__(self, size: int | None) -> None:
        self.aside, self.size = collections.deque[int](), size

    def __len__(self) -> int:
        return 64 if self.size is None else 64 // self.size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(64).tolist()
        for place in range(4, 64, 5):
            order[place : place + 1] = [None]
        items = (self.aside.popleft() if item is None and self.aside else item or 0 for item in order)
        if self.size is None:
            yield from items
        else:
            yield from ([next(items) for _ in range(self.size)] for _ in range(len(self)))


class PutsAside(pl.Callback):
    """Puts samples aside, and keeps them in its state."""

    def __init__(self, sampler: Replays, puts: bool) -> None:
        self.sampler, self.puts, self.kept = sampler, puts, list[int]()
        self.trained: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())
        if self.puts and index % 2:
            self.sampler.aside.append(int(batch[-1, 0]))

    def state_dict(self) -> dict[str, Any]:
        return {"aside": [*self.sampler.aside]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["aside"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sampler.aside.extend(self.kept)


@pytest.mark.filterwarnings("ignore:.*than when it was tried before training")
@pytest.mark.parametrize("size", [None, 4], ids=["samples", "batches"])
@pytest.mark.parametrize(("puts", "num_workers"), [(True, 2), (False, 2), (False, 0)])
def test_items_that_workers_had_been_given_ahead_of_a_stop_are_named_where_they_are_others(
    tmp_path: Path, size: int | None, puts: bool, num_workers: int
) -> None:
    def fit(path: Path | None = None, max_steps: int = -1) -> tuple[list[list[int]], Any, list[str]]:
        sampler = Replays(size)
        sets = PutsAside(sampler, puts)
        how: Any = {"sampler": sampler, "batch_size": 4} if size is None else {"batch_sampler": sampler}
        trainer = quiet_trainer(
            StatefulDataCallback(seed=0), sets, max_epochs=1, max_steps=max_steps, limit_val_batches=0
        )
        data = torch.arange(64.0)[:, None].expand(64, 32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(BoringModel(), DataLoader(data, num_workers=num_workers, **how), ckpt_path=path)
        said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
        return sets.trained, trainer, [one for one in said if "yields others" in one]

    whole, _, said = fit()
    assert said == []
    before, stopped, _ = fit(max_steps=3)
    stopped.save_checkpoint(tmp_path / "x.ckpt")
    after, _, said = fit(tmp_path / "x.ckpt")
    assert (before + after == whole) == (not puts)
    assert ["Replays yields others at items" in one for one in said] == [True] * puts
