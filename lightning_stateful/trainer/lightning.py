"""Lightning's classes, from ``lightning.pytorch`` or ``pytorch_lightning``, whichever was imported first.

The two hold the same code, but a Trainer of the one does not know a data module, a callback or a loader of the other.
No other file imports either.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning_stateful.errors import ConfigurationError

PACKAGE = next(
    (name for name in sys.modules if name in ("lightning.pytorch", "pytorch_lightning")), "lightning.pytorch"
)

if TYPE_CHECKING or PACKAGE == "lightning.pytorch":
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.loops.evaluation_loop import RestartStage
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
    from lightning.pytorch.trainer.connectors.data_connector import (
        _check_dataloader_iterable,
        _DataLoaderSource,
        _worker_check,
    )
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities._pytree import _is_leaf_or_primitive_container
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
else:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import (
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
    )
    from pytorch_lightning.loops.evaluation_loop import RestartStage
    from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher
    from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
    from pytorch_lightning.trainer.connectors.callback_connector import _CallbackConnector
    from pytorch_lightning.trainer.connectors.data_connector import (
        _check_dataloader_iterable,
        _DataLoaderSource,
        _worker_check,
    )
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities._pytree import _is_leaf_or_primitive_container
    from pytorch_lightning.utilities.combined_loader import CombinedLoader

__all__ = [
    "PACKAGE",
    "BatchSizeFinder",
    "CombinedLoader",
    "GradientAccumulationScheduler",
    "LearningRateFinder",
    "RestartStage",
    "StochasticWeightAveraging",
    "TrainerFn",
    "TrainerStatus",
    "_CallbackConnector",
    "_DataLoaderIterDataFetcher",
    "_DataLoaderSource",
    "_IndexBatchSamplerWrapper",
    "_check_dataloader_iterable",
    "_is_leaf_or_primitive_container",
    "_worker_check",
    "check_package",
    "pl",
]


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
