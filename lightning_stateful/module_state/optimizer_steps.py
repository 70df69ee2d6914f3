"""Steps of optimizers and learning rate schedulers that a checkpoint falls between.

Lightning counts a batch after ``optimizer_step`` has returned, and steps schedulers behind that. A checkpoint that is
written within, or on an error there, may hold weights that were trained on the batch already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.loops.lightning import StochasticWeightAveraging, pl
from lightning_stateful.loops.loop_progress import STEPPED_IN, epoch_set_to, next_step
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.module_state import manual_steps
from lightning_stateful.module_state.manual_steps import NUM_CHANGES
from lightning_stateful.samplers.state_codec import from_plain, to_plain

# Kept with the loop.
_HOOK = "_step_hook"
# Lightning's method that calls the module's optimizer_zero_grad.
_ZERO_GRAD = "_optimizer_zero_grad"


def watch_steps(trainer: pl.Trainer) -> None:
    """Note from now on in which batch the optimizer has stepped; see also :mod:`.manual_steps`."""
    forget_steps(trainer)
    if not trainer.lightning_module.automatic_optimization:
        manual_steps.watch(trainer)
    elif hasattr(trainer.optimizers[0], "register_step_post_hook"):
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        # No local function: a trainer may have to be pickled.
        vars(epoch_loop)[_HOOK] = trainer.optimizers[0].register_step_post_hook(partial(_note_step, trainer))


def begin_batch(trainer: pl.Trainer) -> None:
    """See to gradients as a batch begins."""
    manual_steps.note_batch(trainer)


def settings_of_optimizers(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """The numbers, strings and tuples of each parameter group of the optimizers, such as its learning rate."""
    kinds = (bool, int, float, str, tuple, type(None))
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if isinstance(value, kinds) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        }
        for group in groups
    ]


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors in the state of an optimizer, in the order of its parameters."""
    of_parameters = [optimizer.state.get(one, {}) for group in optimizer.param_groups for one in group["params"]]
    return [value for held in of_parameters for value in held.values() if isinstance(value, torch.Tensor)]


def gradients(trainer: pl.Trainer, progress: LoopProgress) -> dict[str, Any]:
    """What a resume needs of gradients, as plain data.

    Args:
        trainer: The trainer.
        progress: Where it is.

    Returns:
        ``gradients``: names of the parameters that have some, where the module's own ``optimizer_zero_grad`` may set
        zeros: an optimizer goes on moving a parameter whose gradient is zero, and leaves one alone that has none.
        ``zero_gradients``: which of these are zero.
        ``last_gradients``: by parameter, those that StochasticWeightAveraging has a step taken on once more.
    """
    module = trainer.lightning_module
    if trainer.strategy.restore_checkpoint_after_setup:
        return {}
    named = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    found: dict[str, Any] = {}
    if named and type(module).optimizer_zero_grad is not pl.LightningModule.optimizer_zero_grad:
        found["gradients"] = list(named)
        zeros = [name for name, one in named.items() if not one.count_nonzero()]
        found |= {"zero_gradients": zeros} if zeros else {}
    if named and _comes_to_statistics(trainer, progress):
        found["last_gradients"] = {name: to_plain(one, name, "gradient") for name, one in named.items()}
    return found


def _comes_to_statistics(trainer: pl.Trainer, progress: LoopProgress) -> bool:
    """Whether the epoch comes next, or goes on, that StochasticWeightAveraging adds for BatchNorm's statistics.

    No gradients are computed in it, nor are those of the step before cleared, and Lightning takes a step at its end.
    """
    averaging = [one for one in callbacks_of(trainer) if isinstance(one, StochasticWeightAveraging)]
    # Known from on_fit_start on.
    ends = [getattr(one, "swa_end", None) for one in averaging]
    epoch = progress.epoch_and_step[0]
    return trainer.max_epochs == epoch + 1 and epoch - 1 in ends


def restore_gradients(trainer: pl.Trainer, saved: Mapping[str, Any]) -> None:
    """Give parameters the gradients that :func:`gradients` has kept, and zeros where it has kept names alone.

    The first batch clears these, or it is warned of.

    Args:
        trainer: The trainer.
        saved: A state that holds what it returned.

    Raises:
        DamagedStateError: It is nothing that it returns.
    """
    names, last = saved.get("gradients", ()), saved.get("last_gradients", {})
    lost: dict[str, tuple[torch.nn.Parameter, int]] = {}
    for name, parameter in trainer.lightning_module.named_parameters() if names or last else ():
        if name in last:
            parameter.grad = from_plain(last[name]).to(parameter.device)
        elif name in names and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            if name not in saved.get("zero_gradients", ()):
                lost[name] = parameter, getattr(parameter.grad, NUM_CHANGES)
    if lost:
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        vars(loop)[_ZERO_GRAD] = partial(_clear_first, loop, lost)


def end_restoring(trainer: pl.Trainer) -> None:
    """Undo :func:`restore_gradients`, where no batch has begun since."""
    vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop(_ZERO_GRAD, None)


def _clear_first(loop: Any, lost: dict[str, tuple[torch.nn.Parameter, int]], batch_idx: int, optimizer: Any) -> None:
    """In place of Lightning's method, once: tell of lost gradients that the module does not clear.

    Warns:
        StatefulWarning: There are such.
    """
    del vars(loop)[_ZERO_GRAD]
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    looked_at: dict[str, Any] = {}
    for name, (parameter, changes) in lost.items():
        grad = parameter.grad
        # Not one that a hook has cleared before.
        if grad is not None and getattr(grad, NUM_CHANGES) == changes and id(parameter) in stepped:
            looked_at[name] = grad.fill_(1)
    loop._optimizer_zero_grad(batch_idx, optimizer)
    left = [name for name, one in looked_at.items() if one.count_nonzero() and lost[name][0].grad is one]
    for name in left:
        looked_at[name].zero_()
    if left:
        rank_zero_warn(
            f"optimizer_zero_grad of the module has left gradients of {some_of(left)} in place in the first batch of "
            "this resume. What batches before the save had added to them is in no checkpoint, so the resume is "
            "not exact. Save where the next batch clears them, or let accumulate_grad_batches add them up.",
            category=StatefulWarning,
        )


def _note_step(trainer: pl.Trainer, *_: Any) -> None:
    setattr(trainer.fit_loop.epoch_loop, STEPPED_IN, next_step(trainer, begun=True))


def forget_steps(trainer: pl.Trainer) -> None:
    """Undo :func:`watch_steps`."""
    manual_steps.end_watching(trainer)
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop).pop(STEPPED_IN, None)
    vars(epoch_loop).pop("update_lr_schedulers", None)
    if (hook := vars(epoch_loop).pop(_HOOK, None)) is not None:
        hook.remove()


def _step_schedulers(trainer: pl.Trainer) -> None:
    """Let the schedulers take the step that follows a batch; those that monitor a metric are not among them."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    if epoch_loop._num_ready_batches_reached():
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def take_due_steps(trainer: pl.Trainer, progress: LoopProgress) -> None:
    """Let schedulers take the step that was due when the checkpoint was written.

    ReduceLROnPlateau takes it if what it monitors is known.
    """
    if progress.uncounted:
        _step_schedulers(trainer)
    if not progress.plateau:
        return
    with epoch_set_to(trainer, progress.epoch - (progress.plateau == "epoch")), _unknown_metrics_allowed(trainer):
        trainer.fit_loop.epoch_loop.update_lr_schedulers(progress.plateau, update_plateau_schedulers=True)


def end_resumed_epoch(trainer: pl.Trainer) -> None:
    """Let the end of a resumed epoch be that of any other; to be called in ``on_train_epoch_end``.

    Lightning still calls itself restarting there if no batch was left, and leaves ReduceLROnPlateau out, because it
    does not save metrics. Here it steps, unless what it monitors has not been logged by the end of that hook.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.restarting = False
    if trainer.fit_loop._restarting:
        trainer.fit_loop._restarting = False
        epoch_loop.update_lr_schedulers = partial(_update_once, trainer)


def _update_once(trainer: pl.Trainer, interval: str, update_plateau_schedulers: bool) -> None:
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    del epoch_loop.update_lr_schedulers
    with _unknown_metrics_allowed(trainer):
        epoch_loop.update_lr_schedulers(interval, update_plateau_schedulers)


@contextmanager
def _unknown_metrics_allowed(trainer: pl.Trainer) -> Iterator[None]:
    """Let Lightning warn, and not fail, where a metric that a checkpoint does not hold is due for ReduceLROnPlateau."""
    strict = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.strict]
    for config in strict:
        config.strict = False
    try:
        yield
    finally:
        for config in strict:
            config.strict = True
