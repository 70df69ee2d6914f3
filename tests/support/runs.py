"""Runs that are stopped at a chosen moment and resumed in fresh objects."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from lightning_stateful import StatefulDataModule
from support.ledger import LedgerModel, Numbers, StepLogger

MakeData = Callable[[], Any]


class StoppedError(Exception):
    """Ends a run as a crash would: nothing is saved after it."""


@dataclass
class Outcome:
    """What one run did."""

    ledger: list[tuple[Any, ...]]
    logged: list[tuple[str, int]]
    weights: dict[str, torch.Tensor]
    global_step: int
    current_epoch: int
    total_batches: int
    trainer: pl.Trainer = field(repr=False)


class StopAt(Checkpoint):
    """Saves a checkpoint in a hook and crashes.

    Args:
        hook: Name of the callback hook.
        path: Where to save; None to crash without saving.
        epoch: In which epoch.
        batch: After how many calls of the hook in that epoch, from 0.
    """

    def __init__(
        self, hook: str, path: Path | None, *, epoch: int = 0, batch: int = 0, saves_weights_only: bool = False
    ):
        self._epoch, self._batch, self._path = epoch, batch, path
        self._weights_only = saves_weights_only
        self._count = 0
        self.ledger: list[tuple[Any, ...]] | None = None
        self.logged: list[tuple[str, int]] = []
        setattr(self, hook, self._stop)

    def _stop(self, trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.sanity_checking or trainer.current_epoch != self._epoch:
            return
        self._count += 1
        if self._count - 1 != self._batch:
            return
        if self._path is not None:
            trainer.save_checkpoint(self._path, weights_only=self._weights_only)
        self.ledger = copy.deepcopy(module.ledger)
        self.logged = list(trainer.logger.steps)
        raise StoppedError


def numbers_module(**options: Any) -> StatefulDataModule:
    """22 shuffled training samples in batches of 2, 5 validation samples."""
    defaults: dict[str, Any] = {"train": Numbers(22), "val": Numbers(5, first=100), "batch_size": 2, "seed": 7}
    return StatefulDataModule(**{**defaults, **options})


def seeded(make_model: Callable[[], LedgerModel], seed: int = 1) -> LedgerModel:
    """A model with the weights that :func:`train` begins with."""
    torch.manual_seed(seed)
    return make_model()


def train(
    make_data: MakeData = numbers_module,
    *,
    callbacks: list[Any] | tuple[Any, ...] = (),
    ckpt_path: Path | None = None,
    model: LedgerModel | None = None,
    seed: int = 1,
    **trainer_options: Any,
) -> Outcome:
    """Fit a fresh model in a fresh trainer; a crash by :class:`StoppedError` ends it quietly."""
    model = seeded(LedgerModel, seed) if model is None else model
    logger = StepLogger()
    options: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    trainer = pl.Trainer(**{**options, **trainer_options}, callbacks=list(callbacks), logger=logger)
    data = make_data()
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders"
    with contextlib.suppress(StoppedError):
        trainer.fit(model, **{keyword: data}, ckpt_path=ckpt_path)
    return outcome_of(trainer, model, logger)


def outcome_of(trainer: pl.Trainer, model: LedgerModel, logger: StepLogger) -> Outcome:
    """What a run has done so far."""
    return Outcome(
        ledger=model.ledger,
        logged=logger.steps,
        weights={name: value.clone() for name, value in model.state_dict().items()},
        global_step=trainer.global_step,
        current_epoch=trainer.current_epoch,
        total_batches=trainer.fit_loop.epoch_loop.batch_progress.total.processed,
        trainer=trainer,
    )


def assert_same_end(run: Outcome, reference: Outcome) -> None:
    """Weights bit by bit, and every counter."""
    assert run.weights.keys() == reference.weights.keys()
    for name, value in reference.weights.items():
        assert torch.equal(run.weights[name], value), name
    assert (run.global_step, run.current_epoch, run.total_batches) == (
        reference.global_step,
        reference.current_epoch,
        reference.total_batches,
    )


def assert_stitches(parts: list[list[Any]], whole: list[Any], served_again: int | None = None) -> None:
    """Runs one after the other give the uninterrupted run, each but the last cut where the next goes on.

    Args:
        parts: What each run did, up to its save.
        whole: What the uninterrupted run did.
        served_again: Events at the end of each part that the next run repeats: what was in flight at the save, or the
            batches of an open window of accumulation without the validations among them. By default up to 8 and 16.
    """
    parts = list(parts)
    for number, (part, following) in enumerate(itertools.pairwise(parts)):
        trained = [event for event in part if event[0] == "train"]
        windows = [
            size for size in range(min(len(trained), 16) + 1) if following[:size] == trained[len(trained) - size :]
        ]
        fitting = [
            (again + window, window)
            for window in windows
            for again in range(min(len(part), 8) + 1)
            if whole_from(whole, part[: len(part) - again], following[window:])
        ]
        assert fitting, f"run {number + 1} does not continue run {number}:\n{part}\n{following}\n{whole}"
        count, window = min(fitting)
        if served_again is not None:
            assert count == served_again, (number, fitting, part, following)
        parts[number + 1] = following[window:]
    assert parts[-1] == whole[len(whole) - len(parts[-1]) :]


def assert_log_goes_on(before: list[Any], after: list[Any], whole: list[Any]) -> None:
    """Two runs log what one does, at the same steps, save perhaps a training step that the first had yet to log."""
    assert after == whole[len(whole) - len(after) :]
    assert before == whole[: len(before)]
    missing = whole[len(before) : len(whole) - len(after)]
    assert len(missing) <= 1, missing
    assert all(name == "train" for name, _ in missing), missing


def whole_from(whole: list[Any], before: list[Any], after: list[Any]) -> bool:
    """Whether ``before`` ends in ``whole`` exactly where ``after`` begins."""
    if not after:
        return True
    starts = [i for i in range(len(whole)) if whole[i : i + len(after)] == after]
    return any(whole[max(i - len(before), 0) : i] == before and i - len(before) >= 0 for i in starts)
