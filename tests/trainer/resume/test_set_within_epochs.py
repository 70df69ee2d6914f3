"""Attributes of an iterable dataset that a hook sets within an epoch, and what a resume says of them."""

from __future__ import annotations

import os
import random
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stateful import ChunkedDataset, StatefulDataCallback
from lightning_stateful.errors import StatefulWarning
from lightning_stateful.iterable_datasets import set_within_passes

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


CONFIG = {"level": 0.0}
LEVELS = [0.0]
ARRAY = np.zeros(3)


class InDict(WithLength):
    """Reads its level from a dict of its module, as others below from elsewhere outside of it."""

    @property
    def level(self) -> float:
        return CONFIG["level"]

    @level.setter
    def level(self, level: float) -> None:
        CONFIG["level"] = level


class InList(WithLength):
    """From a list, to which hooks add levels."""

    @property
    def level(self) -> float:
        return LEVELS[-1]

    @level.setter
    def level(self, level: float) -> None:
        LEVELS[1:] = [level] if level else []


class InArray(WithLength):
    @property
    def level(self) -> float:
        return float(ARRAY[1])

    @level.setter
    def level(self, level: float) -> None:
        ARRAY[1] = level


class OfClass(WithLength):
    levels: ClassVar[deque[float]] = deque([0.0], maxlen=1)

    @property
    def level(self) -> float:
        return self.levels[0]

    @level.setter
    def level(self, level: float) -> None:
        self.levels.append(level)


class InEnvironment(WithLength):
    @property
    def level(self) -> float:
        return float(os.environ.get("DATA_LEVEL") or 0)

    @level.setter
    def level(self, level: float) -> None:
        os.environ["DATA_LEVEL"] = str(level)


class Strength:
    value = 0.0


class InObject(WithLength):
    """From an attribute of an object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Strength()

    @property
    def level(self) -> float:
        return self.held.value

    @level.setter
    def level(self, level: float) -> None:
        self.held.value = level


class InObjectInList(InObject):
    def __init__(self) -> None:
        super().__init__()
        self.held_in, self.held = [Strength()], None

    @property
    def level(self) -> float:
        return self.held_in[0].value

    @level.setter
    def level(self, level: float) -> None:
        self.held_in[0].value = level


class InClass(WithLength):
    """From an attribute of its class."""

    of_all = 0.0

    @property
    def level(self) -> float:
        return self.of_all

    @level.setter
    def level(self, level: float) -> None:
        type(self).of_all = level


RARER = (InList, InArray, OfClass, InEnvironment, InObject, InObjectInList)
ELSEWHERE = [InDict, InClass, *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARER)]


class GivesBatches:
    """Is no dataset, but gives batches itself."""

    level = 0.0

    def __iter__(self) -> Iterator[Any]:
        for number in range(0, 2 * BATCHES, 2):
            yield torch.tensor([number, number + 1]), torch.tensor([number, number + 1]) + 100 * self.level


class Indexed(Dataset[Any]):
    """Has an index."""

    level = 0.0

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> Any:
        return index, index + 100 * self.level


class Records(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch[1].tolist())
        return self.layer(torch.ones(1, 32)).sum()


class Sets(pl.Callback):
    """Sets the level after a batch, and saves after some; perhaps sets it again from a checkpoint."""

    def __init__(self, dataset: Scaled, folder: Path, *, after: int, restores: bool, saved: Any = None) -> None:
        self.dataset, self.folder, self.after, self.restores, self.saved = dataset, folder, after, restores, saved

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.after:
            self.dataset.level = 2.0
        if trainer.ckpt_path is None and (self.saved is None or trainer.global_step in self.saved):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.dataset.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.restores:
            self.dataset.level = state["level"]


def fit(
    kind: Any,
    folder: Path,
    step: int = 0,
    *,
    after: int = 5,
    restores: bool = False,
    workers: int = 0,
    saved: Any = None,
) -> tuple[list[Any], list[str]]:
    """The batches, and the warnings of this package."""
    dataset, model = kind(), Records()
    sets = Sets(dataset, folder, after=after, restores=restores, saved=saved)
    trainer = quiet_trainer(sets, StatefulDataCallback(seed=0), max_epochs=2, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = dataset if kind is GivesBatches else DataLoader(dataset, batch_size=2, num_workers=workers)
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


def test_what_was_set_within_the_epoch_is_not_said_to_have_been_as_built(tmp_path: Path, caplog: Any) -> None:
    fit(Scaled, tmp_path)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(Scaled, tmp_path, 6, restores=True)
    assert not any("was as built in the run" in one for one in caplog.messages)


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("step", [4, 6, BATCHES, BATCHES + 2])
@pytest.mark.parametrize("restores", [False, True])
def test_neither_is_what_it_sets_elsewhere(tmp_path: Path, kind: Any, step: int, restores: bool) -> None:
    kind().level = 0.0
    whole, said = fit(kind, tmp_path)
    assert not said
    assert [batch[0] >= 200 for batch in whole[4:6]] == [False, True]
    kind().level = 0.0
    resumed, said = fit(kind, tmp_path, step, restores=restores)
    assert (resumed != whole[step:]) == any("was set within the epoch in the run" in one for one in said), said
    assert restores or step < 5 or said


def test_nothing_is_kept_of_what_the_dataset_changes_itself(tmp_path: Path) -> None:
    fit(Scaled, tmp_path, after=-1)
    for step in (5, BATCHES):
        assert not fit(Scaled, tmp_path, step, after=-1)[1]


@pytest.mark.parametrize("step", [4, 6, BATCHES + 2])
@pytest.mark.parametrize("restores", [False, True])
def test_what_comes_into_force_with_the_workers_of_the_next_epoch_is_not_missed(
    tmp_path: Path, step: int, restores: bool
) -> None:
    whole, _ = fit(WithLength, tmp_path, workers=1)
    assert [batch[0] >= 200 for batch in whole[5:10]] == [False, False, False, True, True]
    resumed, said = fit(WithLength, tmp_path, step, restores=restores, workers=1)
    early = "and came into force with the next one. Here workers start with it"
    expected = early if restores and step == 6 else "WithLength.level was set between two epochs in the run"
    assert (resumed != whole[step:]) == any(expected in one for one in said), said
    assert (resumed != whole[step:]) == (step == 6 or (step > BATCHES and not restores))


@pytest.mark.parametrize("step", [6, BATCHES + 2])
def test_nor_is_it_of_a_dataset_with_an_index(tmp_path: Path, step: int) -> None:
    whole, _ = fit(Indexed, tmp_path, workers=1)
    resumed, said = fit(Indexed, tmp_path, step, workers=1)
    assert resumed != whole[step:]
    assert any("Attributes of the dataset, a Indexed, were changed in training" in one for one in said), said
    resumed, said = fit(Indexed, tmp_path, step, workers=1, restores=True)
    assert (resumed != whole[step:]) == bool(said), said


OF_SHARDS = {"level": 0.0}
READ, SHARDS = {"shards": 0, "late": 0}, 6


def read_shard(shard: int) -> list[int]:
    return list(range(8 * shard, 8 * shard + 8))


def counted_shard(shard: int) -> list[int]:
    """Counts the shards, and those behind the first ones."""
    READ["shards"] += 1
    READ["late"] += shard > SHARDS // 2
    return read_shard(shard)


def with_level(number: int) -> Any:
    return number, number + 1000 * OF_SHARDS["level"]


class Shards(ChunkedDataset):
    """Is read by functions, up to 32 samples ahead, of a level that hooks set."""

    def __init__(self, read: Any = read_shard) -> None:
        super().__init__(range(SHARDS), read, transform=with_level, shuffle=False)
        OF_SHARDS["level"] = 0.0
        READ.update(shards=0, late=0)

    @property
    def level(self) -> float:
        return OF_SHARDS["level"]

    @level.setter
    def level(self, level: float) -> None:
        OF_SHARDS["level"] = level


# Before it is set, soon after that, long after that, at the end of the epoch, and in the next one.
@pytest.mark.parametrize("step", [4, 6, 22, 4 * SHARDS, 4 * SHARDS + 2])
@pytest.mark.parametrize("restores", [False, True])
def test_what_a_hook_sets_within_an_epoch_and_functions_of_shards_read_is_not_missed(
    tmp_path: Path, step: int, restores: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(set_within_passes, "_REST", 0)
    whole, said = fit(Shards, tmp_path, saved={step})
    assert not said
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        resumed, said = fit(Shards, tmp_path, step, restores=restores)
    assert step == 4 or not any("was as built in the run" in one for one in caplog.messages)
    assert (resumed != whole[step:]) == (step >= 5 and not (restores and step > 6))
    assert (resumed != whole[step:]) == any("was set within the epoch in the run" in one for one in said), said
    assert len(said) == (resumed != whole[step:]), said
    if restores and said:
        assert "There functions had been run on up to 32 samples" in said[0]


def test_nothing_is_kept_of_what_functions_of_shards_change_themselves(tmp_path: Path) -> None:
    def make() -> Any:
        return Shards(counted_shard)

    steps = (10, 22, 4 * SHARDS + 10)
    fit(make, tmp_path, after=-1, saved=steps)
    for step in steps:
        _, said = fit(make, tmp_path, step, after=-1)
        assert not [one for one in said if "was set" in one], said


class Raises(pl.Callback):
    """Raises the level after each batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_train_batch_end(self, *args: Any) -> None:
        self.dataset.level += 1.0


def test_nor_is_what_a_hook_counts_up_within_an_epoch_from_what_nobody_has_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    dataset = Indexed()
    trainer = quiet_trainer(Raises(dataset), StatefulDataCallback(seed=0), max_steps=3, limit_val_batches=0)
    trainer.fit(Records(), DataLoader(dataset, batch_size=2, num_workers=1))
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    dataset = Indexed()
    trainer = quiet_trainer(Raises(dataset), StatefulDataCallback(seed=0), max_epochs=2, limit_val_batches=0)
    trainer.fit(Records(), DataLoader(dataset, batch_size=2, num_workers=1), ckpt_path=tmp_path / "3.ckpt")
    assert f"On the resume level was 3.0, and went from 0.0 to {BATCHES - 3}.0" in caplog.text


class Told(IterableDataset[Any]):
    """Samples that follow from the epoch that it was told last, and from a generator that this seeds."""

    def __init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.draws = epoch, random.Random(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number in range(2 * BATCHES):
            yield number, number + 100 * self.epoch + self.draws.random()


class Tells(pl.Callback):
    """Tells a dataset the epoch, perhaps counted from another one; Lightning has read its first batch by then."""

    def __init__(self, dataset: Told, shift: int) -> None:
        self.dataset, self.shift = dataset, shift

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.dataset.set_epoch(trainer.current_epoch + self.shift)


class TellsEpoch(Tells):
    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.dataset.epoch = trainer.current_epoch + self.shift


@pytest.mark.parametrize(("tells", "shift"), [(Tells, 3), (Tells, 0), (TellsEpoch, 3), (TellsEpoch, 0)])
def test_nor_is_an_epoch_that_a_hook_tells_behind_the_first_batch(
    tmp_path: Path, tells: type[Tells], shift: int
) -> None:
    def fit(path: Path | None = None) -> tuple[list[Any], list[str]]:
        dataset, model = Told(), Records()
        saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        callbacks = [tells(dataset, shift), StatefulDataCallback(seed=0), *([saver] if path is None else [])]
        trainer = quiet_trainer(*callbacks, enable_checkpointing=path is None, limit_val_batches=0, max_epochs=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, DataLoader(dataset, batch_size=2), ckpt_path=path)
        said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
        return model.trained, [one for one in said if "Told." in one]

    whole, said = fit()
    assert bool(said) is (tells is Tells)
    assert all("Told.draws was set within an epoch" in one for one in said), said
    rest, said = fit(tmp_path / "step=1.ckpt")
    assert (rest == whole[1:]) is (not said)
    assert bool(said) is (tells is Tells or shift > 0)
    assert all("was set within the epoch in the run that wrote" in one for one in said), said
