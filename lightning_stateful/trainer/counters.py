"""Lightning's loop counters: where a run stands when it is saved, and how a resumed run is put there.

This is the only file that touches the counters. ``docs/traps.md`` says what Lightning does with them and why they are
rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.trainer.states import TrainerFn

from lightning_stateful.errors import DamagedStateError

_AFTER_VALIDATION = ("on_validation_end", "on_validation_model_train")
_TRACKED = ("ready", "started", "processed", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How far a training run has got.

    Attributes:
        epoch: Epochs that are over.
        batch: Batches of the running epoch that the model has been trained on; 0 between epochs.
        running: An epoch has begun and its end hooks have not run.
        ended: All batches of the running epoch are done, its end hooks are not.
        validate: A validation is due before the next batch.
        plateau: ``"step"`` or ``"epoch"`` if schedulers that monitor a metric have yet to take that step, or empty.
        stepped: Lightning's count of batches (of windows, under accumulation) for its loggers.
        train_reload_epoch: Epoch at which the training loaders were built last; -1 for none.
        val_reload_epoch: The same for validation loaders.
    """

    epoch: int = 0
    batch: int = 0
    running: bool = False
    ended: bool = False
    validate: bool = False
    plateau: str = ""
    stepped: int = 0
    train_reload_epoch: int = -1
    val_reload_epoch: int = -1

    @property
    def data(self) -> tuple[int, int]:
        """Epoch and step that the data goes on from: after the last batch of an epoch, the next epoch."""
        return (self.epoch + 1, 0) if self.ended else (self.epoch, self.batch)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a state."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Moment:
        """Read what :meth:`to_dict` wrote.

        Raises:
            DamagedStateError: A key is missing or has the wrong type.
        """
        fresh = asdict(cls())
        for key, default in fresh.items():
            if type(data.get(key)) is not type(default):
                raise DamagedStateError(
                    f"The callback's state must hold a {type(default).__name__} under {key!r}, got {data.get(key)!r}. "
                    "Resume from another checkpoint; this one's state is damaged."
                )
        return cls(**{key: data[key] for key in fresh})


def read_moment(trainer: pl.Trainer) -> Moment:
    """The moment that a checkpoint written now belongs to."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    moment = locate(fit_loop.state_dict(), max_batches=fit_loop.max_batches)
    validate = moment.running and _validation_is_due(trainer)
    in_window = moment.batch % trainer.accumulate_grad_batches
    if moment.running and not moment.ended and in_window:
        # Gradients are not saved: the open window is served again from its first batch.
        moment = replace(moment, batch=moment.batch - in_window)
        validate = False
    elif moment.running and not validate and _counts_batch_later(trainer):
        moment = replace(moment, stepped=moment.stepped + 1, plateau="step")
    elif not moment.running and _in_epoch_end(trainer):
        moment = replace(moment, plateau="epoch")
    return replace(
        moment,
        validate=validate,
        train_reload_epoch=_epoch_or_none(fit_loop._last_train_dl_reload_epoch),
        val_reload_epoch=_epoch_or_none(epoch_loop.val_loop._last_val_dl_reload_epoch),
    )


def locate(fit_loop_state: Mapping[str, Any], *, max_batches: float = float("inf")) -> Moment:
    """The moment that a fit loop's saved counters stand for, whatever hook they were saved in.

    Args:
        fit_loop_state: ``fit_loop.state_dict()``, or ``checkpoint["loops"]["fit_loop"]``.
        max_batches: Batches of a limited epoch, if known.
    """
    epoch = fit_loop_state["epoch_progress"]["current"]
    progress = fit_loop_state["epoch_loop.batch_progress"]
    batch = progress["current"]
    stepped = fit_loop_state["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
    if epoch["ready"] > epoch["started"]:
        return Moment(epoch=epoch["ready"] - 1, stepped=stepped)
    if epoch["started"] == 0:
        return Moment(stepped=stepped)
    is_last = progress["is_last_batch"] and batch["processed"] == batch["ready"]
    if is_last or batch["processed"] >= max_batches:
        if epoch["processed"] >= epoch["started"]:
            return Moment(epoch=epoch["started"], stepped=stepped)
        return Moment(epoch=epoch["started"] - 1, batch=batch["processed"], running=True, ended=True, stepped=stepped)
    return Moment(epoch=epoch["started"] - 1, batch=batch["processed"], running=True, stepped=stepped)


def rewritten(fit_loop_state: Mapping[str, Any], moment: Moment) -> dict[str, Any]:
    """A fit loop's state at ``moment`` in the one form that Lightning resumes from exactly."""
    state = {key: _copy(value) for key, value in fit_loop_state.items()}
    state["state_dict"].pop("combined_loader", None)
    old = state["epoch_loop.batch_progress"]
    before = old["total"]["processed"] - old["current"]["processed"]
    begun = moment.epoch + 1 if moment.running else moment.epoch
    state["epoch_progress"] = {
        scope: dict(zip(_TRACKED, (begun, begun, moment.epoch, moment.epoch), strict=True))
        for scope in ("total", "current")
    }
    if not moment.running:
        before += old["current"]["processed"]
    state["epoch_loop.batch_progress"] = {
        "total": dict.fromkeys(_TRACKED, before + moment.batch),
        "current": dict.fromkeys(_TRACKED, moment.batch),
        "is_last_batch": moment.ended or not moment.running,
    }
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = moment.stepped
    for key in ("epoch_loop.scheduler_progress", "epoch_loop.manual_optimization.optim_step_progress"):
        _complete(state.get(key, {}))
    optimizer = state.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {})
    for progress in optimizer.values():
        _complete(progress)
    _clear(state.get("epoch_loop.val_loop.batch_progress", {}))
    return state


def next_step(trainer: pl.Trainer) -> tuple[int, int]:
    """Epoch and step of the batch that training fetches next.

    ``processed`` it is, not ``ready``: a step that fetches by itself (``dataloader_iter``) is already counted ready.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return epoch.processed, batch.processed


def step_is_beyond_epoch(trainer: pl.Trainer, step: int) -> bool:
    """Whether the (limited) epoch has no such step."""
    return step >= trainer.fit_loop.max_batches


@contextmanager
def epoch_set_to(trainer: pl.Trainer, epoch: int) -> Iterator[None]:
    """Make ``trainer.current_epoch`` be ``epoch`` for a while, before Lightning restores its loops."""
    current = trainer.fit_loop.epoch_progress.current
    held = {name: getattr(current, name) for name in _TRACKED}
    for name in _TRACKED:
        setattr(current, name, epoch)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(current, name, value)


def continue_from(trainer: pl.Trainer, moment: Moment) -> None:
    """Put the loops of a trainer that has trained before at ``moment``, as a checkpoint would."""
    fit_loop = trainer.fit_loop
    fit_loop.load_state_dict(rewritten(fit_loop.state_dict(), moment))


def prepare_first_epoch(trainer: pl.Trainer, moment: Moment) -> None:
    """Make the first epoch after a resume run as it would have without the stop.

    To be called when training starts. Lightning's loops treat a restart specially in ways that lose or repeat work;
    with the counters in canonical form nothing of it is needed.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    if moment.train_reload_epoch >= 0:
        fit_loop._last_train_dl_reload_epoch = moment.train_reload_epoch
    if moment.val_reload_epoch >= 0:
        epoch_loop.val_loop._last_val_dl_reload_epoch = moment.val_reload_epoch
    if not moment.running:
        # With max_steps, Lightning restarts even a finished epoch: one batch, or a whole epoch, too many.
        fit_loop._restarting = False
        epoch_loop.restarting = False
    elif moment.validate:
        # Sends Lightning through the rest of its on_advance_end first: validate, then count the batch.
        epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
    else:
        _restart_in_reset_only(epoch_loop)


def step_plateau_schedulers(trainer: pl.Trainer, moment: Moment) -> None:
    """Let ReduceLROnPlateau take the step that was due when the checkpoint was written, if its metric is known."""
    if not moment.plateau or not _plateau_metrics_known(trainer):
        return
    with epoch_set_to(trainer, moment.epoch - (moment.plateau == "epoch")):
        trainer.fit_loop.epoch_loop.update_lr_schedulers(moment.plateau, update_plateau_schedulers=True)


def allow_plateau_schedulers(trainer: pl.Trainer) -> None:
    """Let ReduceLROnPlateau step at the end of a resumed epoch if what it monitors is known.

    Lightning leaves these schedulers out there, because it does not save metrics.
    """
    if _plateau_metrics_known(trainer):
        trainer.fit_loop._restarting = False


def _restart_in_reset_only(epoch_loop: Any) -> None:
    # A loop that still calls itself restarting after its reset skips or repeats a validation, steps schedulers and
    # counts a batch twice. There is no hook between reset and the first batch.
    original = epoch_loop.reset

    def reset_once() -> None:
        del epoch_loop.reset
        original()
        epoch_loop._restarting = False

    epoch_loop.reset = reset_once


def _validation_is_due(trainer: pl.Trainer) -> bool:
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if _validates_within_fit(trainer):
        # Until Lightning has logged its metrics, a validation has not been.
        return trainer.lightning_module._current_fx_name not in _AFTER_VALIDATION
    return _in_batch_end(trainer) and bool(epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def _counts_batch_later(trainer: pl.Trainer) -> bool:
    """Whether Lightning has yet to count the last processed batch for its loggers."""
    return _validates_within_fit(trainer) or _in_batch_end(trainer)


def _validates_within_fit(trainer: pl.Trainer) -> bool:
    return bool(trainer.state.fn == TrainerFn.FITTING and trainer.validating)


def _in_batch_end(trainer: pl.Trainer) -> bool:
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(current.processed > current.completed)


def _in_epoch_end(trainer: pl.Trainer) -> bool:
    epoch: Any = trainer.fit_loop.epoch_progress.current
    return bool(epoch.processed > epoch.completed)


def _plateau_metrics_known(trainer: pl.Trainer) -> bool:
    monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return all(monitor in trainer.callback_metrics for monitor in monitors)


def _epoch_or_none(epoch: float) -> int:
    return -1 if epoch == float("-inf") else int(epoch)


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _complete(progress: dict[str, Any]) -> None:
    for scope in ("total", "current"):
        if scope in progress:
            progress[scope] = dict.fromkeys(progress[scope], progress[scope]["completed"])


def _clear(progress: dict[str, Any]) -> None:
    for scope in ("total", "current"):
        if scope in progress:
            progress[scope] = dict.fromkeys(progress[scope], 0)
    if "is_last_batch" in progress:
        progress["is_last_batch"] = False
