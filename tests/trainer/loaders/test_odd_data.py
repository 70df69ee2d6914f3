"""Data and checkpoints that are seldom what they seem: keys that look alike, lists that shrink, counters that lack."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, Numbers, trained
from support.ranks import Ranks
from support.runs import assert_resumes, numbers_module, quiet_trainer, seeded, stopped, train, train_alone
from torch.utils.data import DataLoader, Dataset

from lightning_stateful import StatefulDataCallback, StatefulLoader
from lightning_stateful.errors import RankMismatchError, StateMismatchError
from lightning_stateful.loops.lightning import pl


@pytest.mark.parametrize(
    ("loaders", "paths"),
    [
        ({0: 8, "0": 6}, ["0", "'0'"]),
        ({"a.b": 8, "a": {"b": 6}}, ["'a.b'", "'a'.'b'"]),
        ({"a": 8, "b": {"b": 6}}, ["a", "b.b"]),
    ],
)
def test_keys_that_look_alike_are_loaders_of_their_own(tmp_path: Path, loaders: Any, paths: list[str]) -> None:
    def made(of: Any, first: int = 0) -> Any:
        if isinstance(of, dict):
            return {key: made(part, 100 * number) for number, (key, part) in enumerate(of.items(), 1)}
        return DataLoader(Numbers(of, first=first), batch_size=2, shuffle=True)

    make = partial(made, loaders)
    before = stopped(tmp_path / "stop.ckpt", make, run=train_alone, epoch=1, batch=1)
    assert_resumes(tmp_path / "stop.ckpt", before, 0, make=make, run=train_alone)
    checkpoint = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    assert list(checkpoint["callbacks"]["StatefulDataCallback"]["data"]["loaders"]) == paths


class Unsupported(pl.LightningDataModule):
    """A data module whose loader the toolkit refuses."""

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(6), batch_size=2, in_order=False)


@pytest.mark.parametrize("later", [Unsupported, lambda: Unsupported().train_dataloader()])
def test_a_callback_that_was_brought_along_leaves_with_its_data_module(later: Any) -> None:
    run = train(max_epochs=1)
    trainer, model = run.trainer, seeded(LedgerModel)
    trainer.fit_loop.max_epochs = 2
    data = later()
    trainer.fit(model, **{"datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders": data})

    assert len(trained(model.ledger)) == 3
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=numbers_module())
    assert len([one for one in trainer.callbacks if isinstance(one, StatefulDataCallback)]) == 1
    assert len(trained(model.ledger)) == 3 + 11


class Windows(Dataset[Any]):
    """As many windows over a series as their width leaves."""

    width = 4

    def __len__(self) -> int:
        return 24 - self.width

    def __getitem__(self, index: int) -> Any:
        return index, self.width


class Records(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[Any] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append([self.current_epoch, *map(torch.Tensor.tolist, batch)])
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[0].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_windows(
    by: int, hook: str, *more: Any, workers: int = 0, shuffle: bool = True, ckpt_path: Any = None, **options: Any
) -> Any:
    """What was trained on, and how many samples were evaluated, of windows that a hook makes wider."""
    windows, model = Windows(), Records()

    def widen(trainer: Any, module: Any) -> None:
        windows.width = 4 + by * (trainer.current_epoch + (hook == "on_train_epoch_end"))

    callbacks: Any = [LambdaCallback(**{hook: widen}), *more]
    loaders = [
        DataLoader(windows, batch_size=2, shuffle=shuffles, num_workers=workers) for shuffles in (shuffle, False)
    ]
    with_options: Any = {"max_epochs": 3, "enable_checkpointing": len(more) > 1, "num_sanity_val_steps": 0, **options}
    quiet_trainer(*callbacks, **with_options).fit(model, *loaders, ckpt_path=ckpt_path)
    return model.trained, len(model.evaluated)


@pytest.mark.parametrize("by", [3, -3])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
@pytest.mark.parametrize(("workers", "shuffle"), [(0, True), (0, False), (1, True)])
def test_a_dataset_that_shrinks_or_grows_between_epochs_is_trained_on_whole(
    by: int, hook: str, workers: int, shuffle: bool
) -> None:
    plain, evaluated = fit_windows(by, hook, workers=workers, shuffle=shuffle)
    own, also_evaluated = fit_windows(by, hook, StatefulDataCallback(seed=0), workers=workers, shuffle=shuffle)
    for epoch in range(3):
        found = [sorted(index for of, ids, _ in run if of == epoch for index in ids) for run in (plain, own)]
        # Lightning alone keeps the number of batches that it was told first.
        assert len(found[1]) == 20 - by * epoch == len({*found[1]})
        assert found[0] == found[1] or by < 0
    # Which so leaves validations out.
    assert also_evaluated >= evaluated
    assert shuffle or own[:10] == plain[:10]


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_a_resume_of_one_that_has_shrunk_is_refused_or_exact(tmp_path: Path, hook: str) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    whole, _ = fit_windows(3, hook, StatefulDataCallback(seed=0), saver)
    path = next(tmp_path.glob("step=12*"))
    with pytest.raises(StateMismatchError, match=r"dataset\.length: saved 17, now 20"):
        fit_windows(3, hook, StatefulDataCallback(seed=0), ckpt_path=path)
    assert whole


class Grows(pl.LightningDataModule):
    """Has a narrower window behind the third batch, so more samples, and as many again in a resumed run."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = Windows()

    def train_dataloader(self) -> Any:
        return DataLoader(self.windows, batch_size=4, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        return {"width": self.windows.width}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows.width = state["width"]


class GrowsBehindThird(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.datamodule.windows.width = 3


def test_a_resume_within_an_epoch_over_one_that_has_grown_since_it_began_is_refused(tmp_path: Path) -> None:
    def run(step: int = 0) -> list[Any]:
        more = [] if step else [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")]
        options: Any = {"max_epochs": 2, "enable_checkpointing": not step, "limit_val_batches": 0}
        trainer, model = quiet_trainer(StatefulDataCallback(seed=0), GrowsBehindThird(), *more, **options), Records()
        trainer.fit(model, datamodule=Grows(), ckpt_path=tmp_path / f"step={step}.ckpt" if step else None)
        return model.trained

    whole = run()
    assert [len(batch[1]) for batch in whole[-6:]] == [4, 4, 4, 4, 4, 1]
    with pytest.raises(StateMismatchError, match=r"dataset\.length: saved 20, now 21"):
        run(4)
    assert run(5) == whole[5:]


def test_a_loop_over_a_list_that_grows_serves_it_whole() -> None:
    samples = [0, 1, 2, 3]
    loader = StatefulLoader(samples, batch_size=2, shuffle=True, seed=0)
    assert sorted(torch.cat(list(loader)).tolist()) == samples
    samples.append(4)
    assert sorted(torch.cat(list(loader)).tolist()) == samples
    assert loader.state_dict()["config"]["dataset"]["length"] == 5


def windows_on_rank(folder: Path, by: int, hook: str, own: bool) -> Any:
    """What this rank was trained on."""
    more = [StatefulDataCallback(seed=0)] if own else []
    return fit_windows(by, hook, *more, limit_val_batches=0, **on_ranks())[0]


def test_so_it_is_on_ranks(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path / "ranks")
    for by, hook in ((3, "on_train_epoch_end"), (-4, "on_train_epoch_start"), (4, "on_train_epoch_end")):
        found = ranks.of(windows_on_rank, by, hook, True)
        for epoch in range(2):
            ids = [index for run in found for of, indices, _ in run if of == epoch for index in indices]
            assert {*ids} == {*range(20 - by * epoch)}
            assert len(ids) <= 20 - by * epoch + 1


def other_length_on_each_rank(folder: Path) -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(RankMismatchError) as caught:
        fit_windows(3 + rank, "on_train_epoch_end", StatefulDataCallback(seed=0), limit_val_batches=0, **on_ranks())
    return str(caught.value)


def test_one_that_has_another_length_on_each_rank_is_refused(tmp_path: Path) -> None:
    for text in Ranks(2, tmp_path / "ranks").of(other_length_on_each_rank):
        assert "By now the length of Windows is another on each rank (17, 16 samples)" in text
