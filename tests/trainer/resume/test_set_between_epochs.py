"""Attributes of an iterable dataset that a hook sets between two of its passes, and what a resume says of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from support.runs import BEGINS_TWICE, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_stateful import ChunkedDataset, StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

BETWEEN = "Scaled.level was changed between two epochs"
BESIDE, ALONE = 4, 8


class Scaled(IterableDataset[Any]):
    """Samples that follow from a level that a hook sets; it counts what it has given."""

    level = 0.0
    given = 0

    def __iter__(self) -> Iterator[Any]:
        self.given = 0
        for number in range(2 * ALONE):
            self.given += 1
            yield number + 100 * self.level


class Closes(Scaled):
    """Counts the passes that were left, as each is closed."""

    left = 0

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        finally:
            self.left += 1


class HasState(Scaled):
    """Has a state of its own, from which a pass goes on."""

    def __iter__(self) -> Iterator[Any]:
        while self.given < 2 * ALONE:
            self.given += 1
            yield self.given + 100 * self.level
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class HoldsLevel(HasState):
    """Has the level in its state, too."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.level = state["level"]


class GoesOn(HoldsLevel):
    """Begins anew at once where a pass ends."""

    def __iter__(self) -> Iterator[Any]:
        self.given %= 2 * ALONE
        return super().__iter__()


class Short(IterableDataset[Any]):
    """Ends before the other does, which nobody knows before."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(2 * BESIDE))


class Records(BoringModel):
    """Keeps what the first of perhaps several loaders gives."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append((batch[0] if isinstance(batch, list) else batch).tolist())
        return self.layer(torch.ones(1, 32)).sum()


class SetsAndSaves(pl.Callback):
    """Sets the level in a hook of each epoch, by the epoch or by what it was; saves where epochs end."""

    def __init__(self, dataset: Scaled, folder: Path, hook: str, *, adds: bool) -> None:
        self.dataset, self.folder, self.hook, self.adds = dataset, folder, hook, adds

    def put(self, trainer: pl.Trainer, hook: str) -> None:
        if hook == self.hook:
            self.dataset.level = self.dataset.level + 1 if self.adds else trainer.current_epoch + 1.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.put(trainer, "on_train_start")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.put(trainer, "on_train_epoch_start")

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self.put(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if arguments[-1] == ALONE - 3:
            self.put(trainer, "on_train_batch_end")
        if trainer.current_epoch == 1 and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.folder / f"0.{arguments[-1] + 1}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.put(trainer, "on_train_epoch_end")
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def fit(
    folder: Path,
    hook: str,
    *,
    kind: Any = Scaled,
    is_beside: bool = True,
    adds: bool = False,
    epoch: float = -1,
    workers: int = 0,
) -> tuple[list[Any], list[str]]:
    """The batches of a dataset, and the warnings of this package.

    Args:
        folder: Where checkpoints are.
        hook: The hook that sets the level; empty for none.
        kind: The dataset.
        is_beside: Whether another dataset is read beside it, whose end cuts its passes.
        adds: Whether the hook adds to the level; else it goes by the epoch.
        epoch: The epoch behind which to go on; 0.3 to go on behind three batches of the second.
        workers: Of the loader.
    """
    dataset, model = kind(), Records()
    callbacks = [SetsAndSaves(dataset, folder, hook, adds=adds), StatefulDataCallback(seed=0)]
    trainer = quiet_trainer(*callbacks, max_epochs=3, limit_val_batches=0)
    loader: Any = DataLoader(dataset, batch_size=2, num_workers=workers)
    loader = CombinedLoader([loader, DataLoader(Short(), batch_size=2)], "min_size") if is_beside else loader
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader, ckpt_path=folder / f"{epoch}.ckpt" if epoch >= 0 else None)
    return model.trained, [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_what_a_hook_sets_between_cut_passes_is_not_taken_for_what_they_change(tmp_path: Path, epoch: int) -> None:
    whole, said = fit(tmp_path, "on_train_epoch_start")
    assert [BETWEEN in one for one in said] == [True]
    resumed, said = fit(tmp_path, "on_train_epoch_start", epoch=epoch)
    assert resumed == whole[BESIDE * (epoch + 1) :]
    assert all(BETWEEN in one for one in said), said


@pytest.mark.parametrize("epoch", [0, 1])
def test_what_a_hook_adds_to_between_cut_passes_is_named(tmp_path: Path, epoch: int) -> None:
    whole, said = fit(tmp_path, "on_train_epoch_end", adds=True)
    assert [BETWEEN in one for one in said] == [True]
    resumed, said = fit(tmp_path, "on_train_epoch_end", adds=True, epoch=epoch)
    assert resumed != whole[BESIDE * (epoch + 1) :]
    assert any("Scaled.level was set between two epochs in the run that wrote the checkpoint" in one for one in said)


@pytest.mark.parametrize("epoch", [0, 1])
def test_nothing_is_said_of_what_a_cut_pass_changes_as_it_is_left(tmp_path: Path, epoch: int) -> None:
    whole, said = fit(tmp_path, "", kind=Closes)
    resumed, said_then = fit(tmp_path, "", kind=Closes, epoch=epoch)
    assert (resumed, said, said_then) == (whole[BESIDE * (epoch + 1) :], [], [])


def test_that_an_ended_pass_is_read_again_with_another_level_is_left_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = fit(tmp_path, "on_train_epoch_start", kind=HasState, is_beside=False)
    caplog.set_level("INFO", logger="lightning.pytorch")
    for epoch in (0, 1):
        resumed, said = fit(tmp_path, "on_train_epoch_start", kind=HasState, is_beside=False, epoch=epoch)
        assert resumed == whole[(epoch + 1) * ALONE :]
        assert [one for one in said if "other samples" in one] == []
        hooks = "perhaps because hooks have set HasState.level since: that pass is over"
        assert f"of pass {epoch} on, {hooks}" in caplog.text


@pytest.mark.parametrize("kind", [HoldsLevel, GoesOn])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", ""])
def test_what_a_hook_sets_for_an_epoch_is_not_put_back_by_the_state_of_the_one_before(
    tmp_path: Path, kind: Any, workers: int, hook: str
) -> None:
    whole, _ = fit(tmp_path, hook, kind=kind, is_beside=False, workers=workers)
    for epoch, first in ((0, ALONE), (0.1, ALONE + 1), (0.2, ALONE + 2), (0.5, ALONE + 5), (1, 2 * ALONE)):
        resumed, said = fit(tmp_path, hook, kind=kind, is_beside=False, epoch=epoch, workers=workers)
        assert resumed == whole[first:], epoch
        assert [one for one in said if "another here" in one or "other samples" in one] == [], epoch


class ForNextPass(HoldsLevel):
    """Begins a pass with the level, and goes by a new one only in the next."""

    begun_with = 0.0

    def __iter__(self) -> Iterator[Any]:
        self.begun_with = self.level if not self.given else self.begun_with
        while self.given < 2 * ALONE:
            self.given += 1
            yield self.given + 100 * self.begun_with
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "begun_with": self.begun_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.begun_with = state["begun_with"]


def test_what_a_hook_sets_behind_the_latest_state_of_a_pass_is_named(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, "on_train_batch_end", kind=ForNextPass, is_beside=False)
    resumed, said = fit(tmp_path, "on_train_batch_end", kind=ForNextPass, is_beside=False, epoch=1)
    assert (resumed == whole[2 * ALONE :]) == (not said)
    assert all("ForNextPass.level was set within the epoch in the run that wrote" in one for one in said), said


class HoldsArray(HoldsLevel):
    """Has its level in an array, which hooks change in place."""

    def __init__(self) -> None:
        self.array = np.zeros(1)

    @property
    def level(self) -> float:
        return float(self.array[0])

    @level.setter
    def level(self, level: float) -> None:
        self.array[:] = level


@pytest.mark.parametrize("kind", [HoldsLevel, HoldsArray, GoesOn])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_what_a_hook_adds_to_behind_an_epochs_last_batch_goes_on_from_the_state(
    tmp_path: Path, kind: Any, hook: str
) -> None:
    whole, _ = fit(tmp_path, hook, kind=kind, is_beside=False, adds=True)
    resumed, said = fit(tmp_path, hook, kind=kind, is_beside=False, adds=True, epoch=0.8)
    assert resumed == whole[2 * ALONE :]
    assert [one for one in said if "another here" in one or "other samples" in one] == []


@pytest.mark.parametrize("kind", [HasState, HoldsLevel, HoldsArray])
@pytest.mark.parametrize(
    ("hook", "adds"), [("on_train_start", True), ("on_train_start", False), ("on_train_batch_start", True)]
)
def test_what_a_hook_sets_behind_the_first_batch_of_a_resume_is_named(
    tmp_path: Path, kind: Any, hook: str, *, adds: bool
) -> None:
    whole, _ = fit(tmp_path, hook, kind=kind, is_beside=False, adds=adds)
    for batches in range(1, ALONE + 1):
        resumed, said = fit(tmp_path, hook, kind=kind, is_beside=False, adds=adds, epoch=batches / 10)
        name = f"{kind.__name__}.{'array' if kind is HoldsArray else 'level'}"
        is_exact = resumed == whole[ALONE + batches :]
        assert is_exact or any(name in one or "other samples" in one for one in said), batches


class Grows(HasState):
    """Its level is the length of a list."""

    def __init__(self) -> None:
        self.levels: list[float] = []

    @property
    def level(self) -> float:
        return len(self.levels)

    @level.setter
    def level(self, level: float) -> None:
        self.levels += [level]


def test_a_list_that_a_hook_goes_on_to_fill_and_nobody_restores_is_named(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, "on_train_epoch_end", kind=Grows, is_beside=False)
    resumed, said = fit(tmp_path, "on_train_epoch_end", kind=Grows, is_beside=False, epoch=0.8)
    assert resumed != whole[2 * ALONE :]
    assert any("Grows.levels was set between two epochs in the run that wrote" in one for one in said)


class Sized(Scaled):
    """Says how many samples it has, so that Lightning reads none before ``on_train_start``."""

    def __len__(self) -> int:
        return 2 * ALONE


@pytest.mark.parametrize("adds", [True, False])
def test_what_a_hook_sets_before_the_first_pass_is_compared_on_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, adds: bool
) -> None:
    whole, said = fit(tmp_path, "on_train_start", kind=Sized, is_beside=False, adds=adds)
    assert said == []
    caplog.set_level("INFO", logger="lightning.pytorch")
    resumed, said = fit(tmp_path, "on_train_start", kind=Sized, is_beside=False, adds=adds, epoch=1)
    assert (resumed == whole[2 * ALONE :]) == adds
    assert any("Sized.level was set between two epochs in the run" in one for one in said) == (not adds)


def test_what_a_hook_sets_on_a_resume_alone_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = fit(tmp_path, "", kind=Sized, is_beside=False)
    caplog.set_level("INFO", logger="lightning.pytorch")
    resumed, _ = fit(tmp_path, "on_train_start", kind=Sized, is_beside=False, epoch=1)
    assert resumed != whole[2 * ALONE :]
    assert "Sized.level was set before the first batch of this run, and was as built in the run that" in caplog.text


def test_what_a_state_restores_in_workers_alone_is_named(tmp_path: Path) -> None:
    # Behind one batch the second worker has none; behind three, the next epoch's workers are copies without it.
    whole, _ = fit(tmp_path, "on_train_start", kind=HoldsLevel, is_beside=False, adds=True, workers=2)
    for batches in (1, 3):
        resumed, said = fit(tmp_path, "", kind=HoldsLevel, is_beside=False, epoch=batches / 10, workers=2)
        assert resumed != whole[ALONE + batches :]
        assert any("HoldsLevel.level was set between two epochs in the run" in one for one in said), batches


LEVELS = {"level": 0.0}


class OfVariable:
    """Has its level in a variable of the module."""

    @property
    def level(self) -> float:
        return LEVELS["level"]

    @level.setter
    def level(self, level: float) -> None:
        LEVELS["level"] = level


class InVariable(OfVariable, Scaled):
    """Reads the level from a variable of the module."""

    def __init__(self) -> None:
        LEVELS["level"] = 0.0

    def __iter__(self) -> Iterator[Any]:
        return (number + 100 * LEVELS["level"] for number in range(2 * ALONE))


class Settings:
    """Settings of a project."""

    def __init__(self) -> None:
        self.level = 0.0


SETTINGS = Settings()


class InSettings(Scaled):
    """Reads the level from an object that a variable of the module holds."""

    def __init__(self) -> None:
        SETTINGS.level = 0.0

    @property
    def level(self) -> float:  # type: ignore[override]
        return SETTINGS.level

    @level.setter
    def level(self, level: float) -> None:
        SETTINGS.level = level

    def __iter__(self) -> Iterator[Any]:
        return (number + 100 * SETTINGS.level for number in range(2 * ALONE))


def add_nothing(number: float) -> float:
    return number


def add_hundred(number: float) -> float:
    return number + 100


ADD = add_nothing


class InFunction(Scaled):
    """Calls a function that a variable of the module holds."""

    def __init__(self) -> None:
        self.level = 0.0

    @property
    def level(self) -> float:  # type: ignore[override]
        return float(ADD is add_hundred)

    @level.setter
    def level(self, level: float) -> None:
        global ADD
        ADD = add_hundred if level else add_nothing

    def __iter__(self) -> Iterator[Any]:
        return (ADD(number) for number in range(2 * ALONE))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "name"), [(InVariable, "LEVELS"), (InSettings, "SETTINGS.level"), (InFunction, "ADD")]
)
def test_a_variable_that_a_hook_sets_between_two_epochs_is_named(
    tmp_path: Path, kind: Any, name: str, workers: int
) -> None:
    how: dict[str, Any] = {"kind": kind, "is_beside": False, "adds": True, "workers": workers}
    whole, said = fit(tmp_path, "on_train_epoch_end", **how)
    assert any(f"{name} was changed between two epochs by something else" in one for one in said)
    resumed, said = fit(tmp_path, "on_train_epoch_end", **how, epoch=1)
    assert resumed != whole[2 * ALONE :]
    assert any(f"{name} was set between two epochs in the run that wrote" in one for one in said)


class SetsVariable(pl.Callback):
    """Sets the level in the variable as epochs end, and again from a checkpoint."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        LEVELS["level"] = trainer.current_epoch + 1.0

    def state_dict(self) -> dict[str, float]:
        return {**LEVELS}

    def load_state_dict(self, state: dict[str, float]) -> None:
        LEVELS.update(state)


class CountsInEnvironment(Scaled):
    """Counts its passes in a variable of the environment that was not there before."""

    def __iter__(self) -> Iterator[Any]:
        os.environ["PASSES_OF_TEST"] = str(int(os.environ.get("PASSES_OF_TEST", 0)) + 1)
        return (number + 100 * int(os.environ["PASSES_OF_TEST"]) for number in range(2 * ALONE))


@pytest.mark.parametrize(("kind", "step"), [(InVariable, 11), (CountsInEnvironment, 8)])
def test_a_resume_of_one_that_is_restored_or_counts_by_itself_is_exact_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, step: int
) -> None:
    monkeypatch.setenv("PASSES_OF_TEST", "0")
    found = []
    for path in (None, tmp_path / f"step={step}.ckpt"):
        os.environ.pop("PASSES_OF_TEST", None)
        callbacks: list[Any] = [StatefulDataCallback(seed=0), *([SetsVariable()] if kind is InVariable else [])]
        if path is None:
            callbacks.append(ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}"))
        options: Any = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": path is None}
        model, trainer = Records(), quiet_trainer(*callbacks, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, DataLoader(kind(), batch_size=2), ckpt_path=path)
        said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
        found.append((model.trained, [one for one in said if "were read again" not in one]))
    (whole, _), (resumed, said) = found
    assert resumed == whole[step:]
    assert not said


def numbers_of(chunk: int) -> range:
    return range(4 * chunk, 4 * chunk + 4)


def shifted(number: int) -> float:
    return number + 100 * LEVELS["level"]


class Shift:
    level = 0.0

    def __call__(self, number: int) -> float:
        return number + 100 * self.level


class ByFunction(OfVariable, ChunkedDataset):
    """A stream of shards, of which a function reads the level."""

    def __init__(self) -> None:
        LEVELS["level"] = 0.0
        super().__init__(range(ALONE // 2), numbers_of, transform=shifted)


def shifted_by_environment(number: int) -> float:
    return number + 100 * float(os.environ.get("STREAM_LEVEL") or 0)


class ByEnvironment(ChunkedDataset):
    """Likewise a function reads it from the environment."""

    def __init__(self) -> None:
        os.environ.pop("STREAM_LEVEL", None)
        super().__init__(range(ALONE // 2), numbers_of, transform=shifted_by_environment)

    @property
    def level(self) -> float:
        return float(os.environ.get("STREAM_LEVEL") or 0)

    @level.setter
    def level(self, level: float) -> None:
        os.environ["STREAM_LEVEL"] = str(level)


class ByObject(ChunkedDataset):
    """Likewise an object that is called."""

    def __init__(self) -> None:
        self.shift = Shift()
        super().__init__(range(ALONE // 2), numbers_of, transform=self.shift)

    @property
    def level(self) -> float:
        return self.shift.level

    @level.setter
    def level(self, level: float) -> None:
        self.shift.level = level


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [ByFunction, ByObject, pytest.param(ByEnvironment, marks=pytest.mark.slow)])
def test_what_functions_of_a_stream_read_and_a_hook_sets_between_two_epochs_is_named(
    tmp_path: Path, kind: Any, workers: int
) -> None:
    name = {ByFunction: "LEVELS", ByObject: "Shift.level", ByEnvironment: "STREAM_LEVEL']"}[kind]
    how: dict[str, Any] = {"kind": kind, "is_beside": False, "workers": workers}
    whole, said = fit(tmp_path, "on_train_epoch_end", adds=True, **how)
    assert any(f"{name} was changed between two epochs by something else" in one for one in said)
    for epoch, batches in ((0.3, ALONE + 3), (1, 2 * ALONE)):
        resumed, said = fit(tmp_path, "on_train_epoch_end", adds=True, **how, epoch=epoch)
        assert resumed != whole[batches:]
        assert any(f"{name} was set between two epochs in the run that wrote" in one for one in said)


@pytest.mark.parametrize("kind", [ByFunction, ByObject])
def test_what_a_hook_sets_by_the_epoch_for_a_stream_is_exact_from_the_end_of_one(tmp_path: Path, kind: Any) -> None:
    how: dict[str, Any] = {"kind": kind, "is_beside": False}
    whole, _ = fit(tmp_path, "on_train_epoch_start", **how)
    resumed, said = fit(tmp_path, "on_train_epoch_start", **how, epoch=1)
    assert resumed == whole[2 * ALONE :]
    assert not said or "was set between two epochs in the run" not in said[0]


def test_what_a_hook_sets_within_an_epoch_for_functions_of_a_stream_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    fit(tmp_path, "on_train_batch_end", kind=ByObject, is_beside=False)
    assert [text for text in caplog.messages if "Shift.level was changed within an epoch" in text], caplog.messages


class Shortens:
    """Collates the first numbers of each sample, as a warmup of lengths does."""

    length = 2

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.tensor([[number / 100] * self.length for number in samples])


class Lengthens(pl.Callback):
    """Sets the length by the epoch, or within it, and as training starts where it restores."""

    def __init__(self, collate: Shortens, *, is_within: bool, restores: bool) -> None:
        self.collate, self.is_within, self.restores = collate, is_within, restores

    def set(self, trainer: pl.Trainer) -> None:
        self.collate.length = 2 + (trainer.global_step // 4 if self.is_within else trainer.current_epoch)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.is_within:
            self.set(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.is_within:
            self.set(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.restores:
            self.set(trainer)


class Learns(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layer(batch.mean(1, keepdim=True).repeat(1, 32)).mean()


@pytest.mark.skipif(BEGINS_TWICE, reason="begins the first pass of a resume twice")
@pytest.mark.filterwarnings("ignore:.*was changed between two epochs", "ignore:.*were read again")
@pytest.mark.parametrize(("is_within", "restores"), [(False, False), (False, True), (True, True)])
def test_what_a_hook_sets_on_a_collate_fn_is_compared_too(tmp_path: Path, is_within: bool, restores: bool) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    def fit(*callbacks: Any, **options: Any) -> None:
        collate = Shortens()
        lengthens = Lengthens(collate, is_within=is_within, restores=restores)
        how: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": 2}
        trainer = quiet_trainer(StatefulDataCallback(seed=0), lengthens, *callbacks, **how)
        trainer.fit(Learns(), DataLoader(Scaled(), batch_size=4, collate_fn=collate), **options)

    fit(Saves())
    with pytest.warns(StatefulWarning, match=r"Shortens\.length was set (within the epoch|between two epochs) in the"):
        fit(ckpt_path=tmp_path / "x.ckpt")
