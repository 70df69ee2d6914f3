"""Attributes of an iterable dataset that a hook sets within an epoch, or where one is cut, and a resume's words."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

BATCHES = 8


class Scaled(IterableDataset[Any]):
    """Samples that follow from a level that a hook sets; it counts what it has given."""

    level = 0.0

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.given = 0
        for number in range(2 * BATCHES):
            self.given += 1
            yield number, number + 100 * self.level


class WithLength(Scaled):
    def __len__(self) -> int:
        return 2 * BATCHES


class GivesBatches:
    """Is no dataset, but gives batches itself."""

    level = 0.0

    def __iter__(self) -> Iterator[Any]:
        for number in range(0, 2 * BATCHES, 2):
            yield torch.tensor([number, number + 1]), torch.tensor([number, number + 1]) + 100 * self.level


class Records(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch[1].tolist())
        return self.layer(torch.ones(1, 32)).sum()


class Sets(pl.Callback):
    """Sets the level after a batch, and saves after some; perhaps sets it again from a checkpoint."""

    def __init__(self, dataset: Scaled, folder: Path, *, after: int, restores: bool) -> None:
        self.dataset, self.folder, self.after, self.restores = dataset, folder, after, restores

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.after:
            self.dataset.level = 2.0
        if trainer.ckpt_path is None:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.dataset.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.restores:
            self.dataset.level = state["level"]


def fit(
    kind: Any, folder: Path, step: int = 0, *, after: int = 5, restores: bool = False
) -> tuple[list[Any], list[str]]:
    """The batches, and the warnings of this package."""
    dataset, model = kind(), Records()
    sets = Sets(dataset, folder, after=after, restores=restores)
    trainer = quiet_trainer(sets, StatefulDataCallback(seed=0), max_epochs=2, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = dataset if kind is GivesBatches else DataLoader(dataset, batch_size=2)
        trainer.fit(model, loader, ckpt_path=folder / f"{step}.ckpt" if step else None)
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return model.trained, [one for one in said if "were read again" not in one]


@pytest.mark.parametrize("kind", [Scaled, WithLength, GivesBatches])
@pytest.mark.parametrize("step", [4, 5, 6, BATCHES, BATCHES + 2])
@pytest.mark.parametrize("restores", [False, True])
def test_what_a_hook_sets_within_an_epoch_is_never_missed_in_silence(
    tmp_path: Path, kind: Any, step: int, restores: bool
) -> None:
    whole, said = fit(kind, tmp_path)
    assert not said
    assert [batch[0] >= 200 for batch in whole[5:7]] == [kind is WithLength, True]
    resumed, said = fit(kind, tmp_path, step, restores=restores)
    said = [one for one in said if "level was set within the epoch" in one]
    assert (resumed != whole[step:]) == bool(said), said
    if restores:
        assert bool(said) == (kind is not WithLength and step == 5)
        assert not said or "The first batch is read with what is set here" in said[0]
    else:
        assert bool(said) == (step >= 5)
        assert not said or "given" not in said[0]


def test_nothing_is_kept_of_what_the_dataset_changes_itself(tmp_path: Path) -> None:
    fit(Scaled, tmp_path, after=-1)
    for step in (5, BATCHES):
        assert not fit(Scaled, tmp_path, step, after=-1)[1]


class RecordsFirst(Records):
    """Keeps what the first of several loaders gives."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


class Short(IterableDataset[Any]):
    """Ends before the other does, which nobody knows before."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(8))


class SetsAt(pl.Callback):
    """Sets the level in a hook of each epoch, by the epoch or by what it was, and saves where epochs end."""

    def __init__(self, dataset: Scaled, folder: Path, hook: str, *, adds: bool) -> None:
        self.dataset, self.folder, self.adds = dataset, folder, adds
        setattr(self, hook, self.put)

    def put(self, trainer: pl.Trainer, module: Any) -> None:
        self.dataset.level = self.dataset.level + 1 if self.adds else trainer.current_epoch + 1.0


class SavesAtEnd(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def fit_beside(
    folder: Path, hook: str, *, adds: bool, epoch: int = -1, kind: Any = Scaled
) -> tuple[list[Any], list[str]]:
    """The batches of a dataset beside a shorter one, whose end cuts its passes, and the warnings of this package."""
    dataset, model = kind(), RecordsFirst()
    callbacks = [SetsAt(dataset, folder, hook, adds=adds), SavesAtEnd(folder), StatefulDataCallback(seed=0)]
    trainer = quiet_trainer(*callbacks, max_epochs=3, limit_val_batches=0)
    loaders = CombinedLoader([DataLoader(dataset, batch_size=2), DataLoader(Short(), batch_size=2)], "min_size")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loaders, ckpt_path=folder / f"{epoch}.ckpt" if epoch >= 0 else None)
    return model.trained, [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


BETWEEN = "Scaled.level was changed between two epochs"


@pytest.mark.parametrize("epoch", [0, 1])
def test_what_a_hook_sets_between_cut_passes_is_not_taken_for_what_they_change(tmp_path: Path, epoch: int) -> None:
    whole, said = fit_beside(tmp_path, "on_train_epoch_start", adds=False)
    assert [BETWEEN in one for one in said] == [True]
    resumed, said = fit_beside(tmp_path, "on_train_epoch_start", adds=False, epoch=epoch)
    assert resumed == whole[4 * (epoch + 1) :]
    assert all(BETWEEN in one for one in said), said


@pytest.mark.parametrize("epoch", [0, 1])
def test_what_a_hook_adds_to_between_cut_passes_is_named(tmp_path: Path, epoch: int) -> None:
    whole, said = fit_beside(tmp_path, "on_train_epoch_end", adds=True)
    assert [BETWEEN in one for one in said] == [True]
    resumed, said = fit_beside(tmp_path, "on_train_epoch_end", adds=True, epoch=epoch)
    assert resumed != whole[4 * (epoch + 1) :]
    assert any("Scaled.level was set between two epochs in the run that wrote the checkpoint" in one for one in said)


class Closes(Scaled):
    """Counts the passes that were left, and cleans up behind each."""

    left = 0

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        finally:
            self.left += 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_nothing_is_said_of_what_a_cut_pass_changes_as_it_is_left(tmp_path: Path, epoch: int) -> None:
    whole, said = fit_beside(tmp_path, "on_fit_start", adds=False, kind=Closes)
    resumed, said_then = fit_beside(tmp_path, "on_fit_start", adds=False, kind=Closes, epoch=epoch)
    assert (resumed, said, said_then) == (whole[4 * (epoch + 1) :], [], [])
