"""Lightning's loop counters: where a run stands when it is saved, and how a resumed run is put there.

This is the only file that touches the counters. ``docs/traps.md`` says what Lightning does with them and why they are
rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_stateful.trainer.lightning import RestartStage, TrainerFn, pl
from lightning_stateful.trainer.moment import Moment
from lightning_stateful.trainer.other_callbacks import announce_resumed_epoch, tell_to_stop, waits_to_stop

_AFTER_VALIDATION = ("on_validation_end", "on_validation_model_train")
_TRACKED = ("ready", "started", "processed", "completed")


@dataclass(frozen=True, slots=True)
class BatchBegun:
    """Counters when a batch began, by which its end is known to be unfinished.

    Attributes:
        processed: Batches of the epoch that were processed.
        stepped: Lightning's count for its loggers.
        stopping: The run had been told to stop, and could not yet.
    """

    processed: int
    stepped: int
    stopping: bool


def note_batch(trainer: pl.Trainer) -> BatchBegun:
    """Counters as a batch begins."""
    stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
    return BatchBegun(next_step(trainer)[1], stepped, waits_to_stop(trainer))


def read_moment(trainer: pl.Trainer, begun: BatchBegun | None = None) -> Moment:
    """The moment that a checkpoint written now belongs to.

    Args:
        trainer: The trainer.
        begun: What :func:`note_batch` said of the latest batch.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    moment = locate(fit_loop.state_dict(), max_batches=fit_loop.max_batches)
    in_batch_end = _in_batch_end(trainer, begun)
    validated = _validated_before(trainer, moment.epoch)
    validate = moment.running and moment.batch > validated and _validation_is_due(trainer, in_batch_end)
    stopping = waits_to_stop(trainer) or (in_batch_end and begun is not None and begun.stopping)
    # An epoch that only updates BatchNorm's statistics, from their beginning, is one window.
    window = moment.batch + 1 if fit_loop._skip_backward else trainer.accumulate_grad_batches
    in_window = moment.batch % window
    if moment.running and not moment.ended and in_window:
        # Gradients are not saved: the open window is served again from its first batch, without its validations.
        validated = max(moment.batch - validate, validated)
        moment = replace(moment, batch=moment.batch - in_window, validated=validated)
        validate = False
    elif moment.running and not validate and (in_batch_end or _validates_within_fit(trainer)):
        moment = replace(moment, stepped=moment.stepped + 1, plateau="step")
    elif not moment.running and _in_epoch_end(trainer):
        moment = replace(moment, plateau="epoch")
    return replace(
        moment,
        validate=validate,
        stopping=stopping,
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
    # Between epochs the batch counters are still those of the last one.
    return epoch.processed, batch.processed if epoch.started > epoch.processed else 0


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
    epoch_loop._validated = (moment.epoch, moment.validated)
    if moment.val_reload_epoch >= 0:
        epoch_loop.val_loop._last_val_dl_reload_epoch = moment.val_reload_epoch
    _around_reset(trainer, moment)
    if not moment.running:
        # With max_steps, Lightning restarts even a finished epoch: one batch, or a whole epoch, too many.
        fit_loop._restarting = False
        epoch_loop.restarting = False
    elif moment.validate:
        # Sends Lightning through the rest of its on_advance_end first: validate, then count the batch.
        epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        epoch_loop.val_loop._has_run = False  # in an earlier fit of this trainer, perhaps


def skip_repeated_validation(trainer: pl.Trainer) -> None:
    """Leave out a validation after this batch if it was run before the batch had to be trained on again."""
    epoch, batch = next_step(trainer)
    trainer.fit_loop.epoch_loop._skip_next_val = batch <= _validated_before(trainer, epoch)


def step_plateau_schedulers(trainer: pl.Trainer, moment: Moment) -> None:
    """Let ReduceLROnPlateau take the step that was due when the checkpoint was written, if its metric is known."""
    if not moment.plateau or not _plateau_metrics_known(trainer):
        return
    with epoch_set_to(trainer, moment.epoch - (moment.plateau == "epoch")):
        trainer.fit_loop.epoch_loop.update_lr_schedulers(moment.plateau, update_plateau_schedulers=True)


def end_resumed_epoch(trainer: pl.Trainer) -> None:
    """Let the end of a resumed epoch be that of any other.

    Lightning still calls itself restarting there if no batch was left, and leaves ReduceLROnPlateau out, because it
    does not save metrics: if what the scheduler monitors is known, it steps.
    """
    trainer.fit_loop.epoch_loop.restarting = False
    if _plateau_metrics_known(trainer):
        trainer.fit_loop._restarting = False


@contextmanager
def validation_loaders_as_of(trainer: pl.Trainer, epoch: int) -> Iterator[None]:
    """Build validation loaders as an uninterrupted run built them in ``epoch``, unless they are due for a reload."""
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set by a connector
    if epoch < 0 or (every and trainer.current_epoch - epoch >= every):
        yield
        return
    with epoch_set_to(trainer, epoch):
        yield
    trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epoch


def lift_max_steps(trainer: pl.Trainer, moment: Moment, global_step: int) -> None:
    """Let Lightning enter an epoch whose last step is done but whose validation or end hooks are not.

    :func:`prepare_first_epoch` puts the limit back.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if moment.running and (moment.validate or moment.ended) and -1 < epoch_loop.max_steps <= global_step:
        epoch_loop._lifted_max_steps, epoch_loop.max_steps = epoch_loop.max_steps, -1


def restore_max_steps(trainer: pl.Trainer) -> None:
    """Put a lifted limit back."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.max_steps = vars(epoch_loop).pop("_lifted_max_steps", epoch_loop.max_steps)


def _around_reset(trainer: pl.Trainer, moment: Moment) -> None:
    # There is no hook between the epoch loop's reset and its first batch, hence this wrapper for one call.
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop).pop("reset", None)
    epoch_loop.reset = partial(_reset_once, trainer, moment)


def _reset_once(trainer: pl.Trainer, moment: Moment) -> None:
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop).pop("reset", None)
    restore_max_steps(trainer)
    if moment.running:
        announce_resumed_epoch(trainer, ended=moment.ended)
    epoch_loop.reset()
    if not moment.validate:
        # A loop that still calls itself restarting skips or repeats a validation, steps schedulers and counts a
        # batch twice. With a validation due, that is what leads to it.
        epoch_loop._restarting = False
    if moment.stopping:
        tell_to_stop(trainer, after_validation=moment.validate)


def _validated_before(trainer: pl.Trainer, epoch: int) -> int:
    """Batches of an epoch up to which a run had validated before it was resumed, as far as they are served again."""
    resumed, validated = getattr(trainer.fit_loop.epoch_loop, "_validated", (-1, 0))
    return validated if resumed == epoch else 0


def _validation_is_due(trainer: pl.Trainer, in_batch_end: bool) -> bool:
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if _validates_within_fit(trainer):
        # Until Lightning has logged its metrics, a validation has not been.
        return trainer.lightning_module._current_fx_name not in _AFTER_VALIDATION
    return in_batch_end and bool(epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def _validates_within_fit(trainer: pl.Trainer) -> bool:
    return bool(trainer.state.fn == TrainerFn.FITTING and trainer.validating)


def _in_batch_end(trainer: pl.Trainer, begun: BatchBegun | None) -> bool:
    """Whether the latest batch is processed, and Lightning has yet to validate after it and to count it."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    now = note_batch(trainer)
    uncounted = begun is not None and (now.processed, now.stepped) == (begun.processed + 1, begun.stepped)
    return uncounted or bool(current.processed > current.completed)


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
