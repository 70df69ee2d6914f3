"""Samplers that cannot be copied, so that nobody can try what they yield: they hold an iterator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, UnsupportedLoaderError


class Scored(Dataset[Any]):
    """Has scores of its samples, and counts what is read."""

    def __init__(self) -> None:
        self.scores, self.read = torch.ones(12), 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


class ByScores:
    """Leaves out the samples with scores below their mean."""

    def __init__(self, dataset: Scored) -> None:
        self.dataset, self.left = dataset, iter(list[int]())

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        self.left = iter(self.dataset.scores.argsort(descending=True, stable=True).tolist()[:6])
        yield from self.left


class InTurn:
    def __init__(self, dataset: Scored) -> None:
        self.dataset, self.left = dataset, iter(list[int]())

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        self.left = iter(range(6))
        yield from self.left


class OwnIterator(ByScores):
    """Is its own iterator, and begins anew in ``__iter__``."""

    def __iter__(self) -> Any:
        self.left = iter(range(6))
        return self

    def __next__(self) -> int:
        return next(self.left)


class Scores(BoringModel):
    """Gives scores to the samples that it is trained on."""

    def __init__(self, dataset: Scored) -> None:
        super().__init__()
        self.dataset, self.trained = dataset, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch.tolist())
        self.dataset.scores[batch] -= 1
        return self.layer(torch.ones(1, 32)).sum()


def fit(kind: Any, *more: Any, ckpt_path: Any = None) -> tuple[list[Any], str]:
    """What was trained on, and the warnings of this package."""
    dataset = Scored()
    model = Scores(dataset)
    trainer = quiet_trainer(*more, max_epochs=3, enable_checkpointing=len(more) > 1, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(dataset, batch_size=2, sampler=kind(dataset)), ckpt_path=ckpt_path)
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return model.trained, " ".join(said)


def test_one_that_reads_what_training_writes_is_warned_of(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    plain, _ = fit(ByScores)
    whole, said = fit(ByScores, StatefulDataCallback(seed=0), saver)
    assert whole == plain
    assert "ByScores may yield other items than before training" in said
    resumed, _ = fit(ByScores, StatefulDataCallback(seed=0), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert resumed != whole[3:]


def test_one_that_does_not_is_not() -> None:
    assert not fit(InTurn, StatefulDataCallback(seed=0))[1]


def test_one_that_is_its_own_iterator_is_refused_under_torchs_batch_sampler() -> None:
    with pytest.raises(UnsupportedLoaderError, match="so nobody can tell whether it returns itself from __iter__"):
        fit(OwnIterator, StatefulDataCallback(seed=0))


class PlansWhenTold:
    """Has other batches as it is built than ``set_epoch(0)`` makes."""

    def __init__(self, dataset: Any) -> None:
        self.batches = [[number] for number in range(5)]

    def set_epoch(self, epoch: int) -> None:
        self.batches = [[number] for number in range(7 - epoch)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def test_one_that_set_epoch_gives_another_length_is_asked_behind_that() -> None:
    trained = []
    for more in ([], [StatefulDataCallback(seed=0)]):
        model = Scores(Scored())
        loader = DataLoader(model.dataset, batch_sampler=PlansWhenTold(None))  # type: ignore[arg-type]  # as users write
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StatefulWarning)
            quiet_trainer(*more, max_epochs=1, limit_val_batches=0).fit(model, loader)
        trained.append(model.trained)
    assert trained[0] == trained[1]
