"""Loop progress: how far a run has got by Lightning's counters, and how a resumed run is put there.

This file and ``saved_progress.py``, which knows them as they stand in a checkpoint, are the only ones that touch the
counters. ``docs/traps.md`` says what Lightning does with them and why they are rewritten. On a save
:func:`read_progress` makes a :class:`LoopProgress` of them; on a resume :func:`rewritten` makes counters of it, and
:func:`prepare_first_epoch` sees to what counters alone do not say. In between :func:`next_step` tells the loaders which
batch comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.generators.generator_states import process_states
from lightning_stateful.loops.lightning import RestartStage, TrainerFn, pl
from lightning_stateful.loops.other_callbacks import acts_before, announce_resumed_epoch, tell_to_stop, waits_to_stop
from lightning_stateful.loops.saved_progress import TRACKED, LoopProgress, count_step, read_counters, rewritten

_AFTER_VALIDATION = ("on_validation_end", "on_validation_model_train")
# Ours, kept with the loop: the batch of which the optimizer has taken the step; see optimizer_steps.py.
STEPPED_IN = "_stepped_in"
# Too: where an epoch was cut, and whether the run had been told to stop before the hooks of its end; see cut_epochs.py.
CUT_AT = "_cut_at"
# Stands for a batch that is not read yet, see read_later().
LATER = object()


class BatchBegun(NamedTuple):
    """Counters when a batch began: compared with the present ones, they tell whether the end of that batch is over.

    Attributes:
        processed: Batches of the epoch that were processed.
        stepped: Lightning's count for its loggers.
        stopping: The run had been told to stop, and could not yet.
        scheduled: How often each learning rate scheduler had stepped.
    """

    processed: int
    stepped: int
    stopping: bool
    scheduled: tuple[Any, ...]


def note_batch(trainer: pl.Trainer) -> BatchBegun:
    """Counters as a batch begins."""
    stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
    scheduled = tuple(getattr(config.scheduler, "last_epoch", None) for config in trainer.lr_scheduler_configs)
    stopping = trainer.should_stop and waits_to_stop(trainer, trainer.current_epoch)
    return BatchBegun(next_step(trainer)[1], stepped, stopping, scheduled)


def read_progress(trainer: pl.Trainer, begun: BatchBegun | None = None) -> LoopProgress:
    """The progress of training, for a checkpoint that is written now.

    Args:
        trainer: The trainer.
        begun: What :func:`note_batch` said of the latest batch.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    max_batches: float = fit_loop.max_batches
    if vars(epoch_loop).get("_ended_early") == next_step(trainer, begun=True):
        max_batches = 0
    # Weights that have been trained on a batch hold it, wherever Lightning stands.
    uncounted = vars(epoch_loop).get(STEPPED_IN) == next_step(trainer, begun=True)
    uncounted = uncounted or _schedulers_wait(trainer, begun)
    state = fit_loop.state_dict()
    progress = read_counters(count_step(state) if uncounted else state, max_batches=max_batches)
    in_batch_end = uncounted or _in_batch_end(trainer, begun)
    validated = _validated_before(trainer, progress.epoch)
    validate = progress.running and progress.batch > validated and _validation_is_due(trainer, in_batch_end)
    # Between epochs the one that has just been trained counts for min_epochs.
    epochs = trainer.current_epoch if progress.running else progress.epoch
    cut_at, was_told = vars(epoch_loop).get(CUT_AT, (None, True))
    was_told = was_told or not progress.running or cut_at != next_step(trainer, begun=True)
    stopping = (waits_to_stop(trainer, epochs) and was_told) or (in_batch_end and begun is not None and begun.stopping)
    # StochasticWeightAveraging adds an epoch that only updates BatchNorm's statistics. It can be resumed at its
    # beginning only, so it counts as one window.
    window = progress.batch + 1 if fit_loop._skip_backward else trainer.accumulate_grad_batches
    in_window = progress.batch % window
    if progress.running and not progress.ended and in_window:
        # Gradients are not saved: the open window is served again from its first batch, without the validations that
        # have been run in it. One that is due after this very batch has not been run yet.
        validated = max(progress.batch - validate, validated)
        progress = replace(progress, batch=progress.batch - in_window, validated=validated)
        validate = False
    elif progress.running and not validate and (in_batch_end or _validates_within_fit(trainer)):
        plateau = "" if _plateaus_have_stepped(trainer, begun, "step") else "step"
        progress = replace(progress, stepped=progress.stepped + 1, plateau=plateau)
    elif not progress.running and _in_epoch_end(trainer):
        progress = replace(progress, plateau="" if _plateaus_have_stepped(trainer, begun, "epoch") else "epoch")
    return replace(
        progress,
        validate=validate,
        stopping=stopping,
        uncounted=uncounted,
        train_reload_epoch=_epoch_or_none(fit_loop._last_train_dl_reload_epoch),
        val_reload_epoch=_epoch_or_none(epoch_loop.val_loop._last_val_dl_reload_epoch),
    )


def note_early_end(trainer: pl.Trainer) -> None:
    """The loaders of a run have no further batch: where Lightning knows their length, it does not ask for one."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if trainer.fit_loop.max_batches < float("inf"):
        # Ours, kept with the loop, as where a run has validated.
        epoch_loop._ended_early = next_step(trainer)


def next_step(trainer: pl.Trainer, *, begun: bool = False) -> tuple[int, int]:
    """Epoch and step of the batch that training fetches next.

    ``processed`` it is, not ``ready``: a step that fetches by itself (``dataloader_iter``) is already counted ready.

    Args:
        trainer: The trainer.
        begun: Count on in the epoch that began last, also at its end.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if begun:
        return epoch.started - 1, batch.processed
    # Between epochs the batch counters are still those of the last one.
    return epoch.processed, batch.processed if epoch.started > epoch.processed else 0


def epoch_has_begun(trainer: pl.Trainer) -> bool:
    """Whether all hooks ``on_train_epoch_start`` of an epoch that has not ended were called, in this run or before."""
    epoch: Any = trainer.fit_loop.epoch_progress.current
    return bool(epoch.started > epoch.processed)


def overfits(trainer: Any) -> bool:
    """Whether the same part of an epoch is trained and validated on, over and over."""
    # Set by Lightning's data connector, unknown to its types.
    return bool(trainer.state.fn == TrainerFn.FITTING and trainer.overfit_batches > 0)


def num_started(trainer: pl.Trainer | None) -> int:
    """Batches of the epoch that were given to ``training_step``; 0 without a trainer."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current if trainer else None
    return int(batch.started) if trainer else 0


def step_is_beyond_epoch(trainer: pl.Trainer, step: int) -> bool:
    """Whether the (limited) epoch has no such step."""
    return step >= trainer.fit_loop.max_batches


def follow_lengths(trainer: pl.Trainer) -> None:
    """Tell Lightning before every epoch how many batches it has, which Lightning asks only when it builds loaders."""
    trainer.fit_loop.setup_data = partial(_set_up_epoch, trainer)  # type: ignore[method-assign]


def call_before_epochs(trainer: pl.Trainer, call: Callable[[], None]) -> None:
    """Call a function, too, before every epoch: behind all hooks ``on_train_start``, and before those of the epoch.

    To be called in ``on_train_start``, in a trainer whose lengths are followed.
    """
    # Ours, kept with the loop.
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._before_epoch = [*vars(epoch_loop).get("_before_epoch", ()), call]


def read_later(trainer: pl.Trainer, progress: LoopProgress) -> object | None:
    """Have the loop read the first batch of an epoch behind the hooks of its start, and not when it is set up.

    Without the stop Lightning does so too, but for a run's first epoch. On a resume it fetches the first batch of
    loaders without length before any hook is called, and is to get what is returned, :data:`LATER`. Where loaders are
    built anew for that epoch, Lightning fetches it early without the stop too, and None is returned.
    """
    if is_rebuilt_next(trainer, progress):
        return None
    epoch_loop: Any = trainer.fit_loop.epoch_loop

    def on_run_start(fetcher: Any) -> None:
        vars(epoch_loop).pop("on_run_start", None)
        combined: Any = trainer.fit_loop._combined_loader
        early = combined._iterator
        epoch_loop.on_run_start(fetcher)
        if combined._iterator is early:
            # Lightning 2.5.0 reads it there on a resume, too.
            iter(fetcher)

    epoch_loop.on_run_start = on_run_start
    return LATER


def warn_of_draws_before_seeding(trainer: pl.Trainer) -> None:
    """Warn, in a trainer whose lengths are followed, if hooks have drawn since the data of this epoch were set up.

    Warns:
        StatefulWarning: They have, for the first time: a resume from the end of an epoch draws others there.
    """
    held: Any = vars(trainer.fit_loop.epoch_loop)
    before = held.pop("_before_hooks", None)
    has_drawn = before is not None and before != process_states()
    # Else a thread of a dataset has, say.
    if has_drawn and acts_before(trainer, "on_train_epoch_start") and not held.get("_said_draws"):
        # Ours, kept with the loop.
        held["_said_draws"] = True
        rank_zero_warn(
            "A callback that comes before StatefulDataCallback has drawn random numbers in on_train_epoch_start, where "
            "nothing has seeded them: a resume from the end of an epoch draws others. Let StatefulDataCallback be the "
            "first of Trainer(callbacks=[...]).",
            category=StatefulWarning,
        )


def end_following(trainer: pl.Trainer) -> None:
    """Undo :func:`follow_lengths`, :func:`call_before_epochs` and :func:`lift_max_steps`."""
    _restore_max_steps(trainer)
    vars(trainer.fit_loop).pop("setup_data", None)
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._before_epoch = []
    vars(epoch_loop).pop("_before_hooks", None)
    vars(epoch_loop).pop("on_run_start", None)


def _set_up_epoch(trainer: pl.Trainer) -> None:
    """Let Lightning set its data up, then take over the lengths of loaders as ``setup_data`` does."""
    fit_loop: Any = trainer.fit_loop
    for call in vars(fit_loop.epoch_loop).get("_before_epoch", ()):
        call()
    type(fit_loop).setup_data(fit_loop)
    fit_loop.epoch_loop._before_hooks = process_states()
    vars(fit_loop.epoch_loop).pop("_ended_early", None)
    take_over_lengths(trainer)


def take_over_lengths(trainer: pl.Trainer) -> None:
    """Tell Lightning how many batches loaders have now, as its ``setup_data`` does when it builds them."""
    fit_loop: Any = trainer.fit_loop
    combined, limit = fit_loop._combined_loader, trainer.limit_train_batches
    if combined is None or fit_loop.max_batches == float("inf"):
        return
    limits = [_limited(loader, limit) for loader in combined.flattened]
    if limits == combined.limits:
        return
    combined.limits = limits
    fit_loop.max_batches = min(limits) if combined._mode == "min_size" else max(limits)
    # A resumed epoch is read by the iterator that was made when the loaders were built, before hooks set a length.
    combined._iterator.limits, fit_loop._data_fetcher.length = limits, fit_loop.max_batches
    if trainer.val_check_batch is None or trainer.val_check_batch == float("inf"):
        return
    interval = trainer.val_check_interval
    if isinstance(interval, float):
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * interval))
    elif interval > fit_loop.max_batches and trainer.check_val_every_n_epoch and trainer.limit_val_batches:
        rank_zero_warn(
            f"Epoch {trainer.current_epoch} has {fit_loop.max_batches} batches, and val_check_interval={interval}: it "
            "has no validation. Pass a share of the epoch, as 1.0, or check_val_every_n_epoch=None to count over all.",
            category=StatefulWarning,
        )


def _limited(loader: Any, limit: float) -> float:
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return float("inf") if isinstance(limit, float) else limit
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


@contextmanager
def epoch_set_to(trainer: pl.Trainer, epoch: int) -> Iterator[None]:
    """Make ``trainer.current_epoch`` be ``epoch`` for a while, before Lightning restores its loops."""
    current = trainer.fit_loop.epoch_progress.current
    held = {name: getattr(current, name) for name in TRACKED}
    for name in TRACKED:
        setattr(current, name, epoch)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(current, name, value)


def continue_from(trainer: pl.Trainer, progress: LoopProgress) -> None:
    """Put the loops of a trainer that has trained before at ``progress``, as a checkpoint would."""
    fit_loop = trainer.fit_loop
    fit_loop.load_state_dict(rewritten(fit_loop.state_dict(), progress))


def forget_restart(trainer: pl.Trainer) -> None:
    """Let a fit without a checkpoint begin as any other, where a tuner has restored the loops between two epochs."""
    if not read_counters(trainer.fit_loop.state_dict()).running:
        trainer.fit_loop._restarting = False
        trainer.fit_loop.epoch_loop.restarting = False


def prepare_first_epoch(trainer: pl.Trainer, progress: LoopProgress) -> None:
    """Make the first epoch after a resume run as it would have without the stop.

    To be called when training starts. Lightning's loops treat a restart specially in ways that lose or repeat work;
    with the counters as :func:`rewritten` leaves them nothing of it is needed, so their restart flags are cleared.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    if progress.train_reload_epoch >= 0:
        fit_loop._last_train_dl_reload_epoch = progress.train_reload_epoch
    # Ours, kept with the loop: see _validated_before.
    epoch_loop._validated = (progress.epoch, progress.validated)
    if progress.val_reload_epoch >= 0:
        epoch_loop.val_loop._last_val_dl_reload_epoch = progress.val_reload_epoch
    _around_reset(trainer, progress)
    if not progress.running:
        # With max_steps, Lightning restarts even a finished epoch: one batch, or a whole epoch, too many.
        fit_loop._restarting = False
        epoch_loop.restarting = False
        if _is_due(trainer, progress.train_reload_epoch):
            # Of loaders that it builds anew, Lightning asks iter() twice in an epoch, and a dataset may count that; but
            # only once where it resumes.
            fit_loop._resuming_from_checkpoint = False
    elif progress.validate:
        # Sends Lightning through the rest of its on_advance_end first: validate, then count the batch.
        epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        epoch_loop.val_loop._has_run = False  # in an earlier fit of this trainer, perhaps


def skip_repeated_validation(trainer: pl.Trainer) -> None:
    """Leave out a validation after this batch if it was run before the batch had to be trained on again."""
    epoch, batch = next_step(trainer)
    trainer.fit_loop.epoch_loop._skip_next_val = batch <= _validated_before(trainer, epoch)


@contextmanager
def validation_loaders_as_of(trainer: pl.Trainer, epoch: int) -> Iterator[None]:
    """Build the first validation loaders of a fit as an uninterrupted run built them, unless a reload is due.

    Args:
        trainer: The trainer.
        epoch: The epoch in which it built them; -1 if it had not.
    """
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    if epoch < 0 or _is_due(trainer, epoch) or val_loop._combined_loader is not None:
        yield
        return
    with epoch_set_to(trainer, epoch):
        yield
    val_loop._last_val_dl_reload_epoch = epoch


def is_rebuilt_next(trainer: pl.Trainer, progress: LoopProgress) -> bool:
    """Whether training goes on with an epoch for which Lightning builds the training loaders anew, stopped or not."""
    epoch, step = progress.epoch_and_step
    with epoch_set_to(trainer, epoch):
        return not step and (not progress.running or progress.ended) and _is_due(trainer, progress.train_reload_epoch)


def reloads_every(trainer: pl.Trainer) -> int:
    """After how many epochs Lightning builds the training loaders anew; 0 for never."""
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set by a connector
    return every


def is_rebuilt_now(trainer: pl.Trainer) -> bool:
    """Whether Lightning builds the training loaders anew for the epoch that begins now."""
    return _is_due(trainer, _epoch_or_none(trainer.fit_loop._last_train_dl_reload_epoch))


def _is_due(trainer: pl.Trainer, built: int) -> bool:
    """Whether loaders that were built in some epoch are to be built anew in the current one."""
    every = reloads_every(trainer)
    return bool(every and trainer.current_epoch - built >= every)


def lift_max_steps(trainer: pl.Trainer, progress: LoopProgress, global_step: int) -> None:
    """Let Lightning enter an epoch whose last step is done but whose validation or end hooks are not.

    :func:`prepare_first_epoch` puts the limit back.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if progress.running and (progress.validate or progress.ended) and -1 < epoch_loop.max_steps <= global_step:
        epoch_loop._lifted_max_steps, epoch_loop.max_steps = epoch_loop.max_steps, -1


def _restore_max_steps(trainer: pl.Trainer) -> None:
    """Put a lifted limit back."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.max_steps = vars(epoch_loop).pop("_lifted_max_steps", epoch_loop.max_steps)


def _around_reset(trainer: pl.Trainer, progress: LoopProgress) -> None:
    # There is no hook between the epoch loop's reset and its first batch, hence this wrapper for one call.
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop).pop("reset", None)
    epoch_loop.reset = partial(_reset_once, trainer, progress)


def _reset_once(trainer: pl.Trainer, progress: LoopProgress) -> None:
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop).pop("reset", None)
    _restore_max_steps(trainer)
    if progress.running:
        announce_resumed_epoch(trainer, ended=progress.ended)
        if progress.validate or not progress.ended:
            _count_fetched(trainer, progress.batch)
    epoch_loop.reset()
    if not progress.validate:
        # A loop that still calls itself restarting skips or repeats a validation, steps schedulers and counts a
        # batch twice. With a validation due, that is what leads to it.
        epoch_loop._restarting = False
    if progress.stopping:
        tell_to_stop(trainer, after_validation=progress.validate)


def _count_fetched(trainer: pl.Trainer, batch: int) -> None:
    """Let hooks get the right ``batch_idx`` where steps fetch by themselves (``dataloader_iter``)."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    advance = epoch_loop.advance

    def advance_once(fetcher: Any) -> None:
        vars(epoch_loop).pop("advance", None)
        if hasattr(fetcher, "_batch_idx"):
            fetcher._batch_idx, fetcher.combined_loader._iterator._idx = max(batch - 1, 0), batch
        advance(fetcher)

    epoch_loop.advance = advance_once


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


def is_within_batch_end(trainer: pl.Trainer) -> bool:
    """Whether the latest batch is processed, and the hooks that follow it are not over."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(current.processed > current.completed)


def _in_batch_end(trainer: pl.Trainer, begun: BatchBegun | None) -> bool:
    """Whether the latest batch is processed, and Lightning has yet to validate after it and to count it."""
    now = note_batch(trainer)
    uncounted = begun is not None and (now.processed, now.stepped) == (begun.processed + 1, begun.stepped)
    return uncounted or is_within_batch_end(trainer)


def _schedulers_wait(trainer: pl.Trainer, begun: BatchBegun | None) -> bool:
    """Whether an error within ``lr_scheduler_step`` kept schedulers from the step that follows the latest batch."""
    scheduled: Any = trainer.fit_loop.epoch_loop.scheduler_progress.current
    if begun is None or scheduled.ready == scheduled.completed:
        return False
    now = note_batch(trainer)
    if now.processed != begun.processed + 1:
        return False
    has_stepped = [one != before for one, before in zip(now.scheduled, begun.scheduled, strict=True)]
    return not _some_have_stepped(trainer, begun, has_stepped)


def _plateaus_have_stepped(trainer: pl.Trainer, begun: BatchBegun | None, interval: str) -> bool:
    """Whether schedulers that monitor a metric have taken the step that follows the latest batch, or its epoch."""
    if begun is None:
        return False
    every = zip(trainer.lr_scheduler_configs, note_batch(trainer).scheduled, begun.scheduled, strict=True)
    due = [(now, before) for config, now, before in every if config.reduce_on_plateau and config.interval == interval]
    return _some_have_stepped(trainer, begun, [now != before for now, before in due])


def _some_have_stepped(trainer: pl.Trainer, begun: BatchBegun, has_stepped: list[bool]) -> bool:
    """Whether any schedulers have stepped, with a warning if others have not."""
    if any(has_stepped) and not all(has_stepped):
        rank_zero_warn(
            f"A state is taken in lr_scheduler_step, after batch {begun.processed} of epoch {trainer.current_epoch}, "
            "when some learning rate schedulers have stepped and others have not. A resume from it steps none of them "
            "for this batch. Resume from a checkpoint that was saved at the end of a batch.",
            category=StatefulWarning,
        )
    return any(has_stepped)


def _in_epoch_end(trainer: pl.Trainer) -> bool:
    epoch: Any = trainer.fit_loop.epoch_progress.current
    return bool(epoch.processed > epoch.completed)


def _epoch_or_none(epoch: float) -> int:
    return -1 if epoch == float("-inf") else int(epoch)
