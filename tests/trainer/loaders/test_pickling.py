"""What hangs on a loader, a data module or a trainer can be pickled: workers and ranks may be spawned."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ledger import LedgerModel, Numbers
from support.runs import StopAt, numbers_module, seeded, train
from support.stream_runs import chunks
from torch.utils.data import DataLoader, default_collate

from lightning_stateful import StatefulDataCallback, StatefulDataModule, patch_dataloader
from lightning_stateful.trainer.lightning import pl


class Collates(StatefulDataModule):
    """Workers need one of its methods."""

    def __init__(self, context: str) -> None:
        options: Any = {"num_workers": 1, "multiprocessing_context": context, "persistent_workers": True}
        super().__init__(Numbers(8), batch_size=2, collate_fn=self.collate, seed=3, **options)

    def collate(self, samples: list[Any]) -> Any:
        return {**default_collate(samples), "x": torch.ones(len(samples), 4)}


class Plain(pl.LightningDataModule):
    """The same in Lightning's own words; a worker gets the whole trainer with it."""

    def __init__(self, context: str) -> None:
        super().__init__()
        self.options: Any = {"num_workers": 1, "multiprocessing_context": context, "persistent_workers": True}

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(8), batch_size=2, collate_fn=self.collate, **self.options)

    collate = Collates.collate


class Own(DataLoader[Any]):
    """A user's class."""


@pytest.mark.parametrize("kind", [Collates, Plain])
def test_workers_that_are_spawned_have_methods_of_data_modules(kind: Any) -> None:
    def run(context: str) -> Any:
        callbacks = [StatefulDataCallback(seed=3)]
        return train(lambda: kind(context), callbacks=callbacks, max_epochs=1).ledger

    assert run("forkserver") == run("fork")


class Pickles(pl.Callback):
    """Pickles a trainer, with all that hangs on it, in hooks of a resumed run."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def _pickle(self, hook: str, trainer: pl.Trainer) -> None:
        for again in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
            assert again.global_step == trainer.global_step
        self.done.append(hook)

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._pickle("start", trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._pickle("batch", trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._pickle("validation", trainer)


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_a_trainer_can_be_pickled_at_any_moment_of_a_resumed_run(tmp_path: Path, kind: str) -> None:
    def make() -> Any:
        return DataLoader(chunks(), batch_size=2) if kind == "stream" else numbers_module()

    def ours() -> list[Any]:
        return [StatefulDataCallback()] if kind == "stream" else []

    stop = StopAt("on_train_batch_end", tmp_path / "stop.ckpt", batch=2)
    train(make, callbacks=[*ours(), stop])
    pickles = Pickles()
    train(make, callbacks=[*ours(), pickles], ckpt_path=tmp_path / "stop.ckpt", max_epochs=1)
    assert {"start", "batch"} <= set(pickles.done)


@pytest.mark.parametrize("again", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.deepcopy])
def test_a_loader_that_is_read_can_be_copied(again: Any) -> None:
    loader = patch_dataloader(Own(Numbers(8), batch_size=2, num_workers=1, persistent_workers=True))
    served = iter(loader)
    next(served)
    copied = again(loader)

    assert isinstance(copied, Own)
    assert copied.state_dict() == loader.state_dict()
    copied.load_state_dict(copied.state_dict())
    rest = [batch["id"].tolist() for batch in served]
    assert [batch["id"].tolist() for batch in copied] == rest == [[2, 3], [4, 5], [6, 7]]


def test_a_stream_that_is_read_can_be_pickled_and_begins_anew() -> None:
    loader = patch_dataloader(DataLoader(chunks(), batch_size=2))
    first = [batch["id"].tolist() for _, batch in zip(range(3), loader, strict=False)]
    copied = pickle.loads(pickle.dumps(loader))

    assert [batch["id"].tolist() for _, batch in zip(range(3), copied, strict=False)] == first


def test_ranks_that_are_spawned_train_on_all_samples(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        strategy="ddp_spawn",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Writes(tmp_path)],
    )
    trainer.fit(seeded(LedgerModel), datamodule=numbers_module())
    found = [torch.load(path, weights_only=True) for path in sorted(tmp_path.iterdir())]
    assert len(found) == 2
    assert sorted(index for of_rank in found for index in of_rank) == list(range(22))


class Writes(pl.Callback):
    """Writes down what a rank was trained on, for the process that spawned it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        seen = [index for event in module.ledger if event[0] == "train" for index in event[-1]]
        torch.save(seen, self.folder / str(trainer.global_rank))
