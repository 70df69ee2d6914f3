"""Runs that are stopped at a chosen moment and resumed in fresh objects, and compared with one that is not."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from lightning_stateful import StatefulDataCallback, StatefulDataModule
from support.ledger import Event, LedgerModel, Numbers, StepLogger
from support.quick import is_thorough

# This release of Lightning begins the first pass of a resume twice.
BEGINS_TWICE = pl.__version__ == "2.5.0"
MakeData = Callable[[], Any]
# A hook, an epoch, and the number of the hook's calls in that epoch before.
Moment = tuple[str, int, int]


class StoppedError(Exception):
    """Ends a run as a crash would: nothing is saved after it."""


@dataclass
class Outcome:
    """The ledger, log, weights and counters of one run."""

    ledger: list[Event]
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

    def __init__(self, hook: str, path: Path | None, *, epoch: int = 0, batch: int = 0) -> None:
        self._epoch, self._batch, self._path = epoch, batch, path
        self._count = 0
        self.ledger: list[Event] | None = None
        self.logged: list[tuple[str, int]] = []
        setattr(self, hook, self._stop)

    def _stop(self, trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.sanity_checking or trainer.current_epoch != self._epoch:
            return
        self._count += 1
        if self._count - 1 != self._batch:
            return
        if self._path is not None:
            trainer.save_checkpoint(self._path)
        self.ledger = copy.deepcopy(module.ledger)
        self.logged = list(trainer.logger.steps)
        raise StoppedError


class SaveAt(Checkpoint):
    """Saves a checkpoint at every one of many moments of one run, and what the run had done until then.

    Args:
        folder: Where to save; the checkpoints are named by their number.
        moments: When.
    """

    def __init__(self, folder: Path, moments: Sequence[Moment]) -> None:
        self._folder, self._moments = folder, list(moments)
        self._calls: Counter[tuple[str, int]] = Counter()
        self.ledgers: dict[int, list[Event]] = {}
        self.logged: dict[int, list[tuple[str, int]]] = {}
        for hook in {hook for hook, _, _ in moments}:
            setattr(self, hook, self._saver(hook))

    def _saver(self, hook: str) -> Callable[..., None]:
        def save(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.sanity_checking:
                return
            moment = (hook, trainer.current_epoch, self._calls[hook, trainer.current_epoch])
            self._calls[hook, trainer.current_epoch] += 1
            if moment in self._moments:
                number = self._moments.index(moment)
                trainer.save_checkpoint(self.path(number))
                self.ledgers[number] = copy.deepcopy(module.ledger)
                self.logged[number] = list(trainer.logger.steps)

        return save

    def path(self, number: int) -> Path:
        """The checkpoint of a moment."""
        return self._folder / f"{number}.ckpt"


class SaveOnException(pl.Callback):
    """Saves where a run breaks off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def served_in_loop(loader: Any, epochs: int, state: Any = None, stop: int = -1) -> tuple[list[Any], Any]:
    """The batches of a plain loop over some epochs, from a state on if one is given; and its state if it is stopped.

    Args:
        loader: The patched loader.
        epochs: The number of epochs, with those before the state.
        state: What the loader saved.
        stop: After how many batches to stop; -1 for the end.
    """
    found = list[Any]()
    if state is not None:
        loader.load_state_dict(state)
    for _ in range(0 if state is None else state["progress"]["epoch"], epochs):
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == stop:
                return found, loader.state_dict()
    return found, None


class ChangesOnce(pl.Callback):
    """Changes a dataset at the end of the first epoch, and keeps the first column of every batch that is trained on.

    Args:
        dataset: The dataset.
        change: Called with it.
    """

    def __init__(self, dataset: Any, change: Callable[[Any], Any]) -> None:
        self.dataset, self.change = dataset, change
        self.trained: list[list[float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.change(self.dataset)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.trained.append(batch[:, 0].tolist())


def numbers_module(**options: Any) -> StatefulDataModule:
    """22 shuffled training samples in batches of 2, 5 validation samples."""
    defaults: dict[str, Any] = {"train": Numbers(22), "val": Numbers(5, first=100), "batch_size": 2, "seed": 7}
    return StatefulDataModule(**{**defaults, **options})


def seeded(make_model: Callable[[], LedgerModel] = LedgerModel, seed: int = 1) -> LedgerModel:
    """A model with the weights that :func:`train` begins with."""
    torch.manual_seed(seed)
    return make_model()


def quiet_trainer(*callbacks: Any, **options: Any) -> pl.Trainer:
    """A trainer for one epoch that logs and saves nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {**quiet, "accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    return pl.Trainer(**{**defaults, **options}, callbacks=list(callbacks))


def train(
    make_data: MakeData = numbers_module,
    *,
    callbacks: Sequence[Any] = (),
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
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "log_every_n_steps": 1,
        "logger": logger,
    }
    trainer = quiet_trainer(*callbacks, **{**options, **trainer_options})
    data = make_data()
    keyword = "datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders"
    with contextlib.suppress(StoppedError):
        trainer.fit(model, **{keyword: data}, ckpt_path=ckpt_path)
    return outcome_of(trainer, model, logger)


def train_alone(make_data: MakeData, *, callbacks: Sequence[Any] = (), settings: Any = None, **options: Any) -> Outcome:
    """:func:`train` with the callback, of such settings, on loaders that know nothing of the toolkit."""
    callback = StatefulDataCallback(**{"seed": 7, **(settings or {})})
    return train(make_data, callbacks=[callback, *callbacks], **options)


def training(make_model: Callable[[], LedgerModel] = LedgerModel, make_callbacks: Callable[[], Any] = tuple) -> Any:
    """A function that trains as :func:`train` does, a model and with callbacks that are made anew for each run."""

    def run(
        make: MakeData = numbers_module, *, seed: int = 1, callbacks: Sequence[Any] = (), **options: Any
    ) -> Outcome:
        return train(make, model=seeded(make_model, seed), callbacks=[*make_callbacks(), *callbacks], **options)

    return run


@cache
def uninterrupted(**options: Any) -> Outcome:
    """A run on numbers without a stop; what it did is not to be changed."""
    return train(**options)


def outcome_of(trainer: pl.Trainer, model: LedgerModel, logger: StepLogger) -> Outcome:
    """The outcome of a run so far."""
    return Outcome(
        ledger=model.ledger,
        logged=logger.steps,
        weights={name: value.clone() for name, value in model.state_dict().items()},
        global_step=trainer.global_step,
        current_epoch=trainer.current_epoch,
        total_batches=trainer.fit_loop.epoch_loop.batch_progress.total.processed,
        trainer=trainer,
    )


def callback_of(run: Outcome) -> Any:
    """The toolkit's callback of a run."""
    trainer: Any = run.trainer
    return next(callback for callback in trainer.callbacks if isinstance(callback, StatefulDataCallback))


def stopped(
    path: Path,
    make: MakeData = numbers_module,
    hook: str = "on_train_batch_end",
    *,
    epoch: int = 0,
    batch: int = 0,
    run: Any = train,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> list[Event]:
    """The ledger of a run up to a moment at which it saved a checkpoint and crashed."""
    stop = StopAt(hook, path, epoch=epoch, batch=batch)
    run(make, callbacks=[stop, *callbacks], **options)
    assert stop.ledger is not None, "the moment was never reached"
    return stop.ledger


def ended(path: Path, make: MakeData = numbers_module, *, run: Any = train, **options: Any) -> Outcome:
    """A run that came to its end, by ``max_steps`` perhaps, and was saved then."""
    found = run(make, **options)
    found.trainer.save_checkpoint(path)
    return found


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


def whole_from(whole: list[Any], before: list[Any], after: list[Any]) -> bool:
    """Whether ``before`` ends in ``whole`` exactly where ``after`` begins."""
    if not after:
        return True
    starts = [i for i in range(len(whole)) if whole[i : i + len(after)] == after]
    return any(whole[max(i - len(before), 0) : i] == before and i - len(before) >= 0 for i in starts)


def assert_log_goes_on(before: list[Any], after: list[Any], whole: list[Any]) -> None:
    """Two runs log what one does, at the same steps, save perhaps a training step that the first had yet to log."""
    assert after == whole[len(whole) - len(after) :]
    assert before == whole[: len(before)]
    missing = whole[len(before) : len(whole) - len(after)]
    assert len(missing) <= 1, missing
    assert all(name == "train" for name, _ in missing), missing


def assert_resumes(
    path: Path,
    before: list[Event],
    served_again: int | None = None,
    *,
    make: MakeData = numbers_module,
    run: Any = train,
    whole: Outcome | None = None,
    **options: Any,
) -> Outcome:
    """A run resumed from a checkpoint goes on where another was saved, and ends as one does without a stop.

    Args:
        path: The checkpoint.
        before: What the run that wrote it had done; nothing where only the end of the run is to be compared.
        served_again: As for :func:`assert_stitches`.
        make: Makes the data.
        run: What trains, as :func:`train` does.
        whole: The run without a stop, where it is known.
        **options: Of ``run``.

    Returns:
        What the resumed run did.
    """
    resumed = run(make, ckpt_path=path, seed=99, **options)
    if whole is None:
        is_common = make is numbers_module and run is train
        whole = uninterrupted(**options) if is_common else run(make, **options)
    assert_stitches([before, resumed.ledger], whole.ledger, served_again)
    assert_same_end(resumed, whole)
    return resumed


def assert_goes_on_from_every_moment(
    folder: Path,
    make: MakeData,
    moments: Sequence[Moment],
    run: Any = train,
    *,
    served_again: int | None = None,
    **options: Any,
) -> Outcome:
    """A run resumed from checkpoints of many moments does, each time, what it would have done without the stop.

    Args:
        folder: Where to save.
        make: Makes the data.
        moments: When a run is saved.
        run: What trains, as :func:`train` does.
        served_again: As for :func:`assert_stitches`.
        **options: Of ``run``; two epochs by default.

    Returns:
        What the run that was saved, and went on, did.
    """
    options = {"max_epochs": 2, **options}
    saver = SaveAt(folder, moments)
    whole = saving = run(make, callbacks=[saver], **options)
    # That saving changes nothing is otherwise tried in test_moments, under every schedule.
    if is_thorough():
        whole = run(make, **options)
        assert saving.ledger == whole.ledger
        assert_same_end(saving, whole)
    assert len(saver.ledgers) == len(moments), "a moment was never reached"
    for number, moment in enumerate(moments):
        try:
            ledger = saver.ledgers[number]
            assert_resumes(saver.path(number), ledger, served_again, make=make, run=run, whole=whole, **options)
        except AssertionError as error:
            raise AssertionError(f"stopped at {moment}") from error
    return whole


def assert_goes_on_from_stop_to_stop(
    folder: Path, make: MakeData, moments: Sequence[Moment], run: Any = train, **options: Any
) -> None:
    """Runs that go on from one another, each stopped at a moment of its own, do what one does without a stop."""
    ledgers: list[list[Event]] = []
    path = None
    for number, (hook, epoch, batch) in enumerate(moments):
        how = {"epoch": epoch, "batch": batch, "run": run, "ckpt_path": path, "seed": number + 1, **options}
        path = folder / f"{number}.ckpt"
        ledgers.append(stopped(path, make, hook, **how))
    whole, last = run(make, **options), run(make, ckpt_path=path, seed=99, **options)
    assert_stitches([*ledgers, last.ledger], whole.ledger)
    assert_same_end(last, whole)
