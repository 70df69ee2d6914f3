"""Lightning's classes, from ``lightning.pytorch`` or ``pytorch_lightning``, whichever was imported first.

The two hold the same code, but a Trainer of the one does not know a data module, a callback or a loader of the other.
No other file imports either.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_stateful.errors import ConfigurationError

PACKAGE = next(
    (name for name in sys.modules if name in ("lightning.pytorch", "pytorch_lightning")), "lightning.pytorch"
)

if TYPE_CHECKING or PACKAGE == "lightning.pytorch":
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import (
        BackboneFinetuning,
        BaseFinetuning,
        BatchSizeFinder,
        Checkpoint,
        EarlyStopping,
        GradientAccumulationScheduler,
        LearningRateFinder,
        ModelPruning,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        Timer,
        TQDMProgressBar,
    )
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loops.evaluation_loop import RestartStage
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.trainer.connectors.data_connector import (
        _check_dataloader_iterable,
        _DataLoaderSource,
        _worker_check,
    )
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities._pytree import _is_leaf_or_primitive_container
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import (
        BackboneFinetuning,
        BaseFinetuning,
        BatchSizeFinder,
        Checkpoint,
        EarlyStopping,
        GradientAccumulationScheduler,
        LearningRateFinder,
        ModelPruning,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        Timer,
        TQDMProgressBar,
    )
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.loops.evaluation_loop import RestartStage
    from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
    from pytorch_lightning.trainer.connectors.data_connector import (
        _check_dataloader_iterable,
        _DataLoaderSource,
        _worker_check,
    )
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities._pytree import _is_leaf_or_primitive_container
    from pytorch_lightning.utilities.combined_loader import CombinedLoader
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

__all__ = [
    "PACKAGE",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BatchSizeFinder",
    "Checkpoint",
    "CombinedLoader",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LearningRateFinder",
    "LightningOptimizer",
    "ModelPruning",
    "OnExceptionCheckpoint",
    "RestartStage",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Timer",
    "TrainerFn",
    "TrainerStatus",
    "WeightAveraging",
    "_DataLoaderSource",
    "_IndexBatchSamplerWrapper",
    "_check_dataloader_iterable",
    "_is_leaf_or_primitive_container",
    "_worker_check",
    "check_package",
    "check_trainer",
    "is_param_in_hook_signature",
    "pl",
]

# A class since Lightning 2.6; before, nothing is an instance of it.
WeightAveraging: Any = getattr(pl.callbacks, "WeightAveraging", ())

# What is read, set or wrapped of Lightning that has no public name, and what for, from a Trainer on. Methods that are
# wrapped stand here too: a name that is set or wrapped and that a new Lightning does not know would do nothing.
INTERNALS = {
    "fit_loop._data_source": "to answer the loops' requests for loaders, of whatever origin",
    "fit_loop._combined_loader": "to replace loaders that were built before the callback's setup",
    "fit_loop._data_fetcher": "to end the workers of such loaders",
    "fit_loop._last_train_dl_reload_epoch": "to reload loaders in the epochs in which they would have been reloaded",
    "fit_loop._restarting": "to end the restart of this loop and not of those within it",
    "fit_loop._skip_backward": "to recognize the epoch that StochasticWeightAveraging adds",
    "fit_loop.advance": "to know what callbacks hold as an epoch is cut, before the hooks of its end",
    "fit_loop.max_batches": "to know the end of a limited epoch, and set it where epochs differ in length",
    "_run_sanity_check": "to leave it out on a resume between two epochs, too",
    "fit_loop.on_run_end": "to note weights as training ends, before the hooks of that",
    "fit_loop.on_advance_end": "to let signals wait for the end hooks of an epoch",
    "fit_loop.setup_data": "to tell the length of every epoch before it begins",
    "fit_loop.epoch_loop._batches_that_stepped": "to go on with the steps that loggers are told",
    "fit_loop.epoch_loop._num_ready_batches_reached": "to step schedulers at the end of an epoch",
    "fit_loop.epoch_loop._restarting": "to end the restart of this loop and not of those within it",
    "fit_loop.epoch_loop._on_after_fetch": "to note whether a batch's step draws from generators of the data",
    "fit_loop.epoch_loop._on_before_fetch": "to note random generators before a batch's first hook",
    "fit_loop.epoch_loop._results": "to read what a step has logged without a collective",
    "fit_loop.epoch_loop._results.update_metrics": "to add what a resumed epoch logs to what it had summed up",
    "fit_loop.epoch_loop._should_check_val_fx": "to know whether a validation follows the batch",
    "fit_loop.epoch_loop._skip_next_val": "to leave out a validation that was run before the stop",
    "fit_loop.epoch_loop.automatic_optimization._optimizer_zero_grad": "to know whether lost gradients are cleared",
    "fit_loop.epoch_loop.advance": "to stop a run after the validation that is due, and count batches that steps fetch",
    "fit_loop.epoch_loop.max_steps": "to finish an epoch whose last step is taken",
    "fit_loop.epoch_loop.on_advance_end": "to let signals wait for the end of a batch",
    "fit_loop.epoch_loop.on_run_start": "to read the first batch of a resumed epoch behind the hooks of its start",
    "fit_loop.epoch_loop.reset": "to prepare a resumed epoch before its first batch",
    "fit_loop.epoch_loop.val_loop._combined_loader": "to know whether validation loaders are built",
    "fit_loop.epoch_loop.val_loop._has_run": "to run a validation that is due",
    "fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch": "to reload loaders when they would have been reloaded",
    "fit_loop.epoch_loop.val_loop._restart_stage": "to run a validation that is due",
    "fit_loop.epoch_loop.val_loop._module_mode": "to know within a validation which layers are trained",
    "fit_loop.epoch_loop.val_loop.on_run_end": "to let signals wait for the end of a validation",
    "fit_loop.epoch_loop.val_loop.reset": "to note random generators before a validation's first hook",
    "fit_loop.epoch_loop.val_loop.run": "to run signals' handlers before a validation, not within its end",
    "lightning_module._current_fx_name": "to know which hook a checkpoint is saved in",
    "_accelerator_connector.cluster_environment": "to find the signal with which SLURM requeues a job",
    "_accelerator_connector.is_distributed": "to know whether Lightning would deal a loader out",
    "_accelerator_connector.use_distributed_sampler": "to know whether Lightning would deal a loader out",
    "_checkpoint_connector._loaded_checkpoint": "to know whether optimizers are restored, which no hook tells",
    "_logger_connector._callback_metrics": "to read and restore metrics without a collective",
    "_logger_connector._logged_metrics": "to read and restore metrics without a collective",
    "_logger_connector._progress_bar_metrics": "to read and restore metrics without a collective",
    "_logger_connector._first_loop_iter": "to keep what a resumed epoch logs in its first batch",
    "_logger_connector.should_update_logs": "to compute what is logged only where it is",
}


def check_package(trainer: Any) -> None:
    """Make sure that a trainer is of the package that is used here.

    Raises:
        ConfigurationError: It is of the other one.
    """
    if not isinstance(trainer, pl.Trainer):
        other = "pytorch_lightning" if PACKAGE == "lightning.pytorch" else "lightning.pytorch"
        raise ConfigurationError(
            f"{type(trainer).__module__}.{type(trainer).__qualname__} is no Trainer of {PACKAGE}, which this process "
            f"imported first and lightning_stateful therefore builds on. Import everything from {PACKAGE}, or import "
            f"{other} before {PACKAGE} and before anything from lightning_stateful."
        )


def check_trainer(trainer: Any) -> None:
    """Make sure, before anything is trained on, that a trainer is one that the toolkit can resume exactly.

    Raises:
        ConfigurationError: It is of the other package, or lacks some of :data:`INTERNALS`.
    """
    check_package(trainer)
    missing = [f"  - trainer.{name}, {reason}" for name, reason in INTERNALS.items() if not _has(trainer, name)]
    if missing:
        lines, installed = "\n".join(missing), pl.__version__  # type: ignore[attr-defined]  # not exported
        raise ConfigurationError(
            f"The Trainer of this version of Lightning ({installed}) lacks what an exact resume needs:\n"
            f"{lines}\nInstall a version that lightning-stateful is tested with: lightning>=2.5,<2.7."
        )


def _has(trainer: Any, name: str) -> bool:
    try:
        attrgetter(name)(trainer)
    except AttributeError:
        return False
    return True
