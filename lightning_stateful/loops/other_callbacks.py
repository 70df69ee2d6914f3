"""Lightning's own callbacks that a resume has to mind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.loops.lightning import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    TQDMProgressBar,
    WeightAveraging,
    pl,
)

# Dicts of metrics that a Trainer has, and what its results call their part in each.
_PARTS = {"callback_metrics": "callback", "logged_metrics": "log", "progress_bar_metrics": "pbar"}
Metrics = dict[str, dict[str, float]]

# What the finders call the file that they restore from themselves.
_OWN_FILES = (".lr_find", ".scale_batch_size")


def longest_accumulation(trainer: pl.Trainer) -> int:
    """Batches of the longest window of accumulated gradients, whatever the epoch."""
    windows = [trainer.accumulate_grad_batches]
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            windows += callback.scheduling.values()
    return max(windows)


def acts_before(trainer: pl.Trainer, hook: str) -> bool:
    """Whether another callback has a hook that is called before that of this package's callback."""
    return any(getattr(type(one), hook) is not getattr(pl.Callback, hook) for one in callbacks_before(trainer))


def callbacks_before(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks whose hooks are called before those of this package's callback; none without one."""
    callbacks = callbacks_of(trainer)
    ours = [place for place, callback in enumerate(callbacks) if _is_ours(type(callback))]
    return callbacks[: ours[0]] if ours else []


def _is_ours(kind: type) -> bool:
    """Whether a class is of this package, or derived from one."""
    return any(one.__module__.partition(".")[0] == __name__.partition(".")[0] for one in kind.__mro__)


def announce_resumed_epoch(trainer: pl.Trainer, *, ended: bool) -> None:
    """Tell callbacks that set things for a whole epoch as it starts that one goes on; Lightning does not.

    Args:
        trainer: The trainer.
        ended: All batches of the epoch are done, its end hooks are not.
    """
    module = _module(trainer)
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer)
        elif isinstance(callback, StochasticWeightAveraging):
            if ended and trainer.current_epoch > callback.swa_end:
                # Of an epoch for BatchNorm's statistics, which are complete, this is left to be undone by its end.
                callback._accumulate_grad_batches = trainer.accumulate_grad_batches
                trainer.fit_loop.max_batches += 1
            else:
                # Puts its scheduler in the place of others. This epoch's weights are in its average already.
                callback.on_train_epoch_start(trainer, module)
        elif isinstance(callback, TQDMProgressBar):
            # Without the total it shows "5/?".
            TQDMProgressBar.on_train_epoch_start(callback, trainer, module)


def finish_averaging(trainer: pl.Trainer) -> None:
    """Put averaged weights into a model of which no epoch was left to train: Lightning then ends without its hooks."""
    module = _module(trainer)
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            if trainer.current_epoch - 1 == callback.swa_end and callback._scheduler_state is not None:
                averaged: Any = callback._average_model
                callback.transfer_weights(averaged, module)
        elif isinstance(callback, WeightAveraging):
            callback.on_train_end(trainer, module)


def waits_to_stop(trainer: pl.Trainer, epochs: int) -> bool:
    """Whether the run has been told to stop (by EarlyStopping, say) and waits for ``min_epochs`` or ``min_steps``.

    Args:
        trainer: The trainer.
        epochs: Epochs that are over.
    """
    if not trainer.should_stop:
        return False
    return epochs < (trainer.min_epochs or 0) or trainer.global_step < (trainer.min_steps or 0)


def tell_to_stop(trainer: pl.Trainer, *, after_validation: bool) -> None:
    """Tell a resumed run to stop as soon as it may.

    Args:
        trainer: The trainer, in the first epoch of the resumed run.
        after_validation: A validation is due before the next batch, and is run first.
    """
    if not after_validation:
        trainer.should_stop = True
        return
    # If it may stop by now, the loop would do so before it has begun to validate.
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    original = epoch_loop.advance

    def advance_once(*args: Any) -> None:
        vars(epoch_loop).pop("advance", None)
        trainer.should_stop = True
        original(*args)

    epoch_loop.advance = advance_once


def prepare_resume(trainer: pl.Trainer) -> None:
    """Refuse a finder in a resumed run, and begin that without a sanity check.

    A finder trains a while, and would throw the restored progress away without a word. Hooks of a sanity check would
    change once more what was restored: Lightning leaves it out within an epoch for that, and not between two.

    Raises:
        ConfigurationError: A LearningRateFinder or BatchSizeFinder is among the callbacks.
    """
    # A subclass with an on_fit_start of its own may find nothing there, as those of Lightning's documentation.
    hooks = (LearningRateFinder.on_fit_start, BatchSizeFinder.on_fit_start)
    found = [type(callback) for callback in callbacks_of(trainer)]
    finders = [kind.__name__ for kind in found if kind.on_fit_start in hooks]
    if finders and not Path(str(trainer.ckpt_path)).name.startswith(_OWN_FILES):
        raise ConfigurationError(
            f"{' and '.join(finders)} would restart the run that ckpt_path={trainer.ckpt_path!r} is to resume, from "
            "its first step. Leave it out when you resume; what it found is in the checkpoint or its log."
        )
    begun: Any = trainer
    # Once: the next fit has one.
    begun._run_sanity_check = partial(vars(trainer).pop, "_run_sanity_check", None)


def logged_metrics(trainer: pl.Trainer, *, epoch_over: bool = False, is_step: bool = False) -> Metrics:
    """The latest values that schedulers monitor, and callbacks and modules read, by the Trainer's dict that has them.

    Args:
        trainer: The trainer.
        epoch_over: The epoch's end hooks run, in which its averages are known. Those that would take a collective,
            which a state may not, are left out.
        is_step: A batch has just been trained on, whatever Lightning does now.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    unsynced = [one for _, one in results.valid_items() if trainer.world_size > 1 and _needs_other_ranks(one)]
    # Of these only the values of an epoch before are known.
    left_out = {one.meta.name for one in unsynced if epoch_over}
    # What this step has logged is read, not computed.
    newer = [results.metrics(True)] if trainer.training or is_step else []
    newer += [results.metrics(False)] if epoch_over and not unsynced else []
    found: Metrics = {}
    for kind, of_dict in _dicts_of_metrics(trainer).items():
        known = dict(of_dict)
        for of_results in newer:
            known |= of_results[_PARTS[kind]]
        # A hook may have written anything into these dicts.
        numbers = {name: value for name, value in known.items() if _is_number(value)}
        of_kind = {name: value for name, value in numbers.items() if name.removesuffix("_epoch") not in left_out}
        found[kind] = {name: float(value) for name, value in sorted(of_kind.items())}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _dicts_of_metrics(trainer: pl.Trainer) -> dict[str, dict[str, Any]]:
    """Those that :data:`_PARTS` names, without what Lightning adds where they are asked for."""
    connector: Any = trainer._logger_connector
    return {
        "callback_metrics": connector._callback_metrics,
        "logged_metrics": connector._logged_metrics,
        "progress_bar_metrics": connector._progress_bar_metrics,
    }


def _needs_other_ranks(result: Any) -> bool:
    is_shared = result.meta.sync.should or not result.is_tensor
    return bool(result.meta.on_epoch and is_shared and result._computed is None)


def monitors(trainer: pl.Trainer) -> set[str]:
    """Names of what learning rate schedulers and callbacks monitor."""
    names = {getattr(callback, "monitor", None) for callback in callbacks_of(trainer)}
    names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    return {name for name in names if isinstance(name, str)}


@contextmanager
def metrics_set_to(trainer: pl.Trainer, metrics: Mapping[str, float]) -> Iterator[None]:
    """Have ``trainer.callback_metrics`` hold saved values, too, where it has no newer ones."""
    known = _dicts_of_metrics(trainer)["callback_metrics"]
    before = dict(known)
    restore_metrics(trainer, metrics)
    try:
        yield
    finally:
        known.clear()
        known.update(before)


def restore_metrics(
    trainer: pl.Trainer, metrics: Mapping[str, float], *, are_newer: bool = False, kind: str = "callback_metrics"
) -> None:
    """Put saved values into one of the Trainer's dicts: in place of others only if the saved ones are newer."""
    known = _dicts_of_metrics(trainer)[kind]
    for name, value in metrics.items():
        if name in known and not are_newer:
            continue
        if kind == "progress_bar_metrics":
            known[name] = value
            continue
        single = torch.tensor(value, dtype=torch.float32)
        exact = single if float(single) == value or value != value else torch.tensor(value, dtype=torch.float64)
        known[name] = exact.to(trainer.strategy.root_device)


def _module(trainer: Any) -> pl.LightningModule:
    module: pl.LightningModule = trainer.lightning_module
    return module


def callbacks_of(trainer: pl.Trainer) -> list[Any]:
    """The callbacks of a trainer, in the order in which their hooks are called."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
